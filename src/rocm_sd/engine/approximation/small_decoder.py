"""A small decoder draws the picture in place of the VAE's own: emoji-sd's, or the AutoencoderTiny of a family.

It stands in front of whatever plans the VAE's decode. What it does not know (other latents, gradients, a number of
steps that nothing was measured for, values that are not finite) goes on to the VAE.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from rocm_sd.engine.approximation.shipped import costs, of_steps
from rocm_sd.engine.installed import Approximated, Installed
from rocm_sd.errors import RocmSdError, Unsupported, first_line
from rocm_sd.rewrite import forwards
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from PIL.Image import Image
    from torch import nn

    from rocm_sd.engine.approximation.shipped import Setting

__all__ = ["SmallDecoder", "find", "folder_of", "has_small_decoder", "install", "preview", "wanted"]

log = logging.getLogger("rocm_sd")

# By the channels of the latents and what they are multiplied by: the latents of a family are those of its VAE.
_FAMILIES = {
    (4, 0.18215): "madebyollin/taesd",
    (4, 0.13025): "madebyollin/taesdxl",
    (16, 1.5305): "madebyollin/taesd3",
    (16, 0.3611): "madebyollin/taef1",
}
# Names that the hub was asked for in vain: without a network, it is asked for 23 s.
_NOT_ON_THE_HUB: set[str] = set()
_PREVIEWS: WeakKeyDictionary[Any, SmallDecoder | None] = WeakKeyDictionary()
_WHAT = "small decoder"


@dataclass(frozen=True)
class SmallDecoder:
    """`module` takes (z - shift) * scale of the latents z that the VAE's `decode` takes, and gives pictures as that
    does; `channels`: of the latents.
    """

    module: nn.Module
    name: str
    channels: int
    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Computed in `dtype`, and answered in that of z."""
        weight = next(self.module.parameters())
        if weight.device != z.device or weight.dtype != dtype:
            self.module.to(z.device, dtype)
        if self.shift or self.scale != 1:
            z = (z - self.shift) * self.scale
        pictures: torch.Tensor = self.module(z.to(dtype))
        return pictures.to(z.dtype)


def find(vae: Any, *, hub: bool = True) -> SmallDecoder | str:
    """The small decoder for a VAE's latents, or why there is none and what to type. `hub`: whether to ask there for one
    that is not on this machine.
    """
    kind = type(vae)
    if kind.__name__ != "AutoencoderKL" or not kind.__module__.startswith("diffusers."):
        return f"no small decoder is known for a {kind.__name__}"
    name = _FAMILIES.get((vae.config.latent_channels, round(vae.config.scaling_factor, 5)))
    if name is None:
        return _of_emoji(vae)
    try:
        tiny = _loaded(vae, name, hub=hub)
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError, KeyError, TypeError) as error:
        _NOT_ON_THE_HUB.update({name} if hub else ())
        return f"{name} cannot be loaded ({first_line(error)}); type: hf download {name}"
    return _of_tiny(vae, tiny, name)


def _of_emoji(vae: Any) -> SmallDecoder | str:
    unknown = f"no small decoder is known for latents of {vae.config.latent_channels} channels with its scaling factor"
    if vae.config.latent_channels != 4 or any(p.is_meta for p in vae.decoder.parameters()):
        return unknown
    # Not at the top: whoever has no such decoder may have no safetensors.
    from rocm_sd.models.emoji.decoder import load_decoder, teacher_of  # noqa: PLC0415

    try:
        decoder, teacher = load_decoder()
    except RocmSdError as error:
        return str(error)
    return SmallDecoder(decoder, "emoji-sd's own", 4) if teacher == teacher_of(vae) else unknown


def folder_of(name: str) -> Path:
    """Where a decoder may lie that is loaded without the hub, whose name ends as the hub's."""
    return default_path().with_name("small-decoders") / name.rpartition("/")[2]


def _loaded(vae: Any, name: str, *, hub: bool) -> Any:
    # The host program is not imported here: the VAE is of it.
    kind = sys.modules[type(vae).__module__.partition(".")[0]].AutoencoderTiny
    options = {"use_safetensors": True, "torch_dtype": torch.float32}
    if folder_of(name).is_dir():
        return kind.from_pretrained(folder_of(name), local_files_only=True, **options)
    try:
        return kind.from_pretrained(name, local_files_only=True, **options)
    except OSError:
        if not hub or name in _NOT_ON_THE_HUB:
            raise
    log.warning("%s is loaded from the hub", name)
    return kind.from_pretrained(name, **options)


def _of_tiny(vae: Any, tiny: Any, name: str) -> SmallDecoder | str:
    theirs, ours = vae.config, tiny.config
    enlarges = ours.upsampling_scaling_factor ** (len(ours.num_decoder_blocks) - 1)
    asked = 2 ** (len(theirs.block_out_channels) - 1)
    if (ours.latent_channels, enlarges, ours.out_channels) != (theirs.latent_channels, asked, theirs.out_channels):
        return f"{name} enlarges {ours.latent_channels} channels {enlarges} times, and the VAE other ones or otherwise"
    # A pipeline would give it x / its scale + its shift of the model's x, and gives the VAE x / scale + shift.
    scale, shift = theirs.scaling_factor, theirs.shift_factor or 0.0
    scale /= ours.scaling_factor
    shift -= (ours.shift_factor or 0.0) / scale
    decoder = tiny.decoder.eval().requires_grad_(requires_grad=False)
    return SmallDecoder(decoder, name, theirs.latent_channels, scale, shift)


def wanted(settings: list[Setting]) -> bool:
    return any(setting.approximation.small_decoder for setting in settings)


def install(target: Any, settings: list[Setting], device: torch.device) -> tuple[Installed, list[nn.Module]]:
    """In front of the VAE's `decode`; and what of it may be captured."""
    vae: Any = getattr(target, "vae", None)
    small = f"there is no VAE in a {type(target).__name__}" if vae is None else find(vae)
    if isinstance(small, str):
        note = f"pictures are drawn by the VAE's own decoder: {small}"
        exact = Approximated(_WHAT, why_exact=small)
        return Installed(lambda: (note,), lambda: None, approximated=lambda: (exact,)), []
    own = next(vae.parameters()).dtype
    small.module.to(device, own)
    drawing = _Drawing(ref(target), ref(vae), small, settings, own)
    begun = drawing.begin()
    return Installed(lambda: tuple(drawing.notes()), begun, approximated=lambda: (drawing.approximated(),)), [
        small.module
    ]


class _Drawing:
    """`own`: the dtype of the VAE before a pipeline casts it for its decode."""

    def __init__(
        self, target: ref[Any], vae: ref[Any], small: SmallDecoder, settings: list[Setting], own: torch.dtype
    ) -> None:
        self._target, self._vae, self._small, self._settings, self._own = target, vae, small, settings, own
        self.drawn = 0
        self.not_because: Counter[str] = Counter()
        self._at_work = True

    def begin(self) -> Callable[[], None]:
        take_off = forwards.surround(self._vae(), self._answer, "decode")

        def restore() -> None:
            # A wrapper by somebody else may outlive it.
            self._at_work = False
            take_off()

        return restore

    def _answer(self, vae: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A copy of the VAE may have got other weights.
        if not self._at_work or self._vae() is not vae:
            return inner(*args, **kwargs)
        named = {**dict(zip(("z", "return_dict", "generator"), args, strict=False)), **kwargs}
        reason = self._why_not(vae, named.get("z"))
        if reason is None:
            with torch.no_grad():
                pictures = self._small(named["z"], self._dtype(vae, named["z"]))
            # What a picture is made of can be waited for: it is the last that is computed.
            if pictures.dtype is not torch.float16 or bool(torch.isfinite(pictures).all()):
                self.drawn += len(pictures)
                return _as_asked(vae, pictures, return_dict=named.get("return_dict", True))
            reason = "what the small decoder drew was not finite"
        self.not_because[reason] += 1
        return inner(*args, **kwargs)

    def _why_not(self, vae: Any, z: Any) -> str | None:
        if type(z) is not torch.Tensor or z.dim() != 4 or not z.numel() or z.shape[1] != self._small.channels:
            return "the latents are of another form"
        if torch.is_grad_enabled() and (z.requires_grad or any(p.requires_grad for p in vae.decoder.parameters())):
            return "gradients may be wanted"
        setting = self._setting()
        return None if setting.approximation.small_decoder else setting.why

    def _setting(self) -> Setting:
        """That of the picture that is drawn, or was last: a schedule is over when its picture is decoded."""
        timesteps = getattr(getattr(self._target(), "scheduler", None), "timesteps", None)
        return of_steps(self._settings, 1 if timesteps is None else len(timesteps))

    def _dtype(self, vae: Any, z: torch.Tensor) -> torch.dtype:
        # A VAE that overflows in float16 is cast for its decode; what is small here is made for it.
        upcast = z.dtype is torch.float32 and self._own is not torch.float32 and vae.config.force_upcast
        return self._own if upcast else z.dtype

    def approximated(self) -> Approximated:
        reasons = () if self.drawn else tuple(self.not_because)
        return Approximated(_WHAT, costs(self._settings), next(iter(reasons), None))

    def notes(self) -> Iterator[str]:
        for setting in self._settings:
            if setting.approximation.small_decoder:
                since = f" from {setting.from_steps} steps on" if setting.from_steps > 1 else ""
                yield f"pictures are drawn by a small decoder{since}, {self._small.name} ({setting.why})"
        if self.drawn:
            yield f"{self.drawn} pictures drawn by the small decoder"
        for reason, count in self.not_because.items():
            yield f"{count} decodes by the VAE's own decoder, because {reason}"


def _as_asked(vae: Any, pictures: torch.Tensor, *, return_dict: bool) -> Any:
    # What the VAE's own module calls by that name.
    return sys.modules[type(vae).__module__].DecoderOutput(sample=pictures) if return_dict else (pictures,)


def preview(pipe: Any, latents: torch.Tensor) -> Image:
    """A picture of a pipeline's latents, as its callbacks get them: by the small decoder where there is one on this
    machine, and by the VAE otherwise. Those of several pictures stand side by side.
    """
    vae: Any = getattr(pipe, "vae", None)
    if vae is None or not isinstance(latents, torch.Tensor) or latents.dim() != 4:
        raise Unsupported(
            "preview",
            "latents that are not [batch, channels, height, width], or a pipeline without a VAE",
            hint="Flux packs its latents: unpack them with pipe._unpack_latents(...) first.",
        )
    small, weight = _for_previews(vae), next(vae.parameters())
    z = _for_the_vae(vae.config, latents)
    with torch.no_grad():
        pictures = vae.decode(z.to(weight.dtype), return_dict=False)[0] if small is None else small(z, z.dtype)
    return _picture(torch.cat(list(pictures), -1))


def has_small_decoder(vae: Any) -> bool:
    """Whether previews of such a VAE's latents are drawn by a small decoder, which is on this machine."""
    return _for_previews(vae) is not None


def _for_previews(vae: Any) -> SmallDecoder | None:
    if vae not in _PREVIEWS:
        found = find(vae, hub=False)
        _PREVIEWS[vae] = None if isinstance(found, str) else found
    return _PREVIEWS[vae]


def _for_the_vae(config: Any, latents: torch.Tensor) -> torch.Tensor:
    """As pipelines do before they decode."""
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and deviation is not None:
        moments = [torch.tensor(value).view(1, -1, 1, 1).to(latents) for value in (mean, deviation)]
        return latents * moments[1] / float(config.scaling_factor) + moments[0]
    return latents / float(config.scaling_factor) + float(getattr(config, "shift_factor", None) or 0.0)


def _picture(pixels: torch.Tensor) -> Image:
    """[3, H, W] in -1..1."""
    from PIL import Image as Images  # noqa: PLC0415 -- needed here alone

    tones = (pixels.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    return Images.fromarray(tones.permute(1, 2, 0).contiguous().cpu().numpy())
