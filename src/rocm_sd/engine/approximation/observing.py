"""What comes into a model's layers while a short picture is drawn, and which layers 8 bits are too few for."""

from __future__ import annotations

import copy
import math
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.errors import first_line
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NotObserved", "Observed", "observe", "too_far"]

_PROMPTS = ("a photograph of a street in the rain", "a watercolour of a frog")
_STEPS = 4
_SIDE = 512  # of the picture, where the model's own is larger
_ROWS = 64  # of each call that are kept
# A layer is delicate whose error is more than so many times that of the layer in the middle, and more than this.
_TIMES, _LEAST = 3.0, 0.06
# However the others are: fp8 has three bits behind the point, so that rounding both factors changes a product by
# 2 * 2**-4 at most. A larger error is of values that were lost altogether, among others that are too large.
_MOST = 0.125


class NotObserved(Exception):
    """Why no picture could be drawn, in words."""


@dataclass
class Observed:
    """`largest`: the largest value that came in; `columns`: that of each column; `rows`: some of what came in."""

    largest: torch.Tensor
    columns: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Observed:
        rows = x.detach().reshape(-1, x.shape[-1])
        columns = rows.abs().amax(0).float()
        step = max(1, len(rows) // _ROWS)
        return cls(columns.amax(), columns, rows[::step][:_ROWS].clone())

    @classmethod
    def of_maps(cls, x: torch.Tensor, layer: nn.Conv2d) -> Observed:
        """Rows are the patches under the filter of some pixels: a convolution multiplies each with its weights."""
        maps, (height, width) = x.detach(), layer.kernel_size
        padded = F.pad(maps, (int(layer.padding[1]),) * 2 + (int(layer.padding[0]),) * 2)
        down, along = padded.shape[2] - height + 1, padded.shape[3] - width + 1
        places = range(0, down * along, max(1, down * along * len(maps) // _ROWS))
        patches = [
            padded[:, :, at // along : at // along + height, at % along : at % along + width].flatten(1)
            for at in places
        ]
        rows = torch.cat(patches)[:_ROWS].clone()
        return cls(maps.abs().amax().float(), rows.abs().amax(0).float(), rows)

    def add(self, more: Observed) -> None:
        self.largest = torch.maximum(self.largest, more.largest)
        self.columns = torch.maximum(self.columns, more.columns)
        self.rows = torch.cat([self.rows, more.rows])


def observe(
    target: Any, layers: Mapping[str, nn.Module], *, decoded: bool = False, encoded: bool = False
) -> dict[str, Observed]:
    """Of each layer; raises NotObserved where the pipeline draws no picture from a prompt, or not all of it ran.

    `decoded`: whether the VAE takes part; `encoded`: whether it then encodes what was drawn.
    """
    seen: dict[str, Observed] = {}

    def watch(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            now = Observed.of_maps(args[0], layer) if isinstance(layer, nn.Conv2d) else Observed.of(args[0])
            if name in seen:
                seen[name].add(now)
            else:
                seen[name] = now

        return hook

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        for pipe, pictures in _draw(target, "pt" if decoded else "latent"):
            if encoded:
                _encode(pipe.vae, pictures)
    except Exception as error:
        raise NotObserved(f"it could not be tried on a picture ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    missing = [name for name in layers if name not in seen]
    if missing:
        raise NotObserved(f"{len(missing)} of its layers took no part in a picture, {missing[0]} among them")
    if not all(bool(each.largest.isfinite()) for each in seen.values()):
        raise NotObserved("a picture of its own has values that are not finite")
    return seen


def _draw(target: Any, output: str) -> list[tuple[Any, torch.Tensor]]:
    """A picture from each prompt, by the pipeline's own parts and the same seed each time."""
    pipe, more = _drawing(target)
    pipe.set_progress_bar_config(disable=True)
    try:
        return _pictures(pipe, [{"prompt": prompt, **more} for prompt in _PROMPTS], output)
    except Exception:  # noqa: BLE001 -- one that has no encoders of its own: whoever calls it brings embeddings along
        return _pictures(pipe, [_noise(pipe) | more], output)


@torch.no_grad()
def _encode(vae: Any, pictures: torch.Tensor) -> None:
    """As a pipeline does with a picture that it is given: a VAE that overflows in its own dtype is widened for it."""
    own = vae.dtype
    wide = torch.float32 if vae.config.get("force_upcast") and own is torch.float16 else own
    if wide is not own:
        vae.to(wide)
    try:
        vae.encode(pictures.to(vae.device, wide) * 2 - 1)
    finally:
        if wide is not own:
            vae.to(own)


def _drawing(target: Any) -> tuple[Any, dict[str, Any]]:
    """A pipeline of the same parts that draws from a prompt, and what else it is to be given.

    Its scheduler is a copy: the pipeline's own may be in the middle of a picture. It has no ControlNet, which would ask
    for a picture. A UNet that takes a picture beside the latents is given a grey one, of which all is to be painted.
    """
    # Whoever has a pipeline has imported it.
    diffusers: Any = sys.modules["diffusers"]
    parts: dict[str, Any] = {"scheduler": copy.deepcopy(target.scheduler)}
    forwards.discard(parts["scheduler"])
    if "controlnet" in target.components:
        parts["controlnet"] = None
    if not _is_given_a_picture(target):
        return diffusers.AutoPipelineForText2Image.from_pipe(target, **parts), {}
    pipe = diffusers.AutoPipelineForInpainting.from_pipe(target, **parts)
    return pipe, {"image": torch.full((1, 3, _SIDE, _SIDE), 0.5), "mask_image": torch.ones(1, 1, _SIDE, _SIDE)}


def _is_given_a_picture(target: Any) -> bool:
    """Whether a UNet's channels are the latents, those of a picture, and a mask."""
    channels = getattr(getattr(getattr(target, "unet", None), "config", None), "in_channels", None)
    latents = getattr(getattr(getattr(target, "vae", None), "config", None), "latent_channels", None)
    return channels is not None and latents is not None and channels == 2 * latents + 1


def _pictures(pipe: Any, several: list[dict[str, Any]], output: str) -> list[tuple[Any, torch.Tensor]]:
    model = getattr(pipe, "unet", None) or pipe.transformer
    own = getattr(pipe, "default_sample_size", None) or getattr(model.config, "sample_size", None)
    side = min(_SIDE, own * pipe.vae_scale_factor) if isinstance(own, int) else _SIDE
    drawn = []
    for given in several:
        with torch.no_grad():
            made = pipe(
                **given, num_inference_steps=_STEPS, height=side, width=side, output_type=output,
                generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
        drawn.append((pipe, made.images))
    return drawn


def _noise(pipe: Any) -> dict[str, Any]:
    """In place of a prompt, and as wide as the model's config says that it is."""
    model = getattr(pipe, "unet", None) or pipe.transformer
    config, weight = model.config, next(model.parameters())
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(weight.device, weight.dtype)

    if getattr(config, "joint_attention_dim", None) is not None:
        text, pooled = noise(1, 77, config.joint_attention_dim), noise(1, config.pooled_projection_dim)
        return {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
    names = ("prompt_embeds", "negative_prompt_embeds")
    found = {name: noise(1, 77, config.cross_attention_dim) for name in names}
    if config.addition_embed_type == "text_time":
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        found |= {name.replace("prompt", "pooled_prompt"): noise(1, width) for name in names}
    return found


def too_far(errors: Mapping[str, float]) -> frozenset[str]:
    """The names whose error stands out, is too much for any layer, or is not a number."""
    middle = statistics.median([error for error in errors.values() if math.isfinite(error)] or [0.0])
    most = min(max(_TIMES * middle, _LEAST), _MOST)
    return frozenset(name for name, error in errors.items() if not error <= most)
