"""A picture by emoji-sd on a card that is not there: every kernel as that card's machine code, beside stock torch's.

    drawn = draw(PictureRequest("gfx1100", steps=8), folder)     # resumable: a step that was drawn is not drawn again
    drawn.image, drawn.stock_image, drawn.parts["step 1"].rows

Prompts are encoded by stock torch; the UNet and the decoder of the VAE are emulated, in float16. The first step and the
decoder are held to the numerics gate: float64, and stock torch in float16, compute them from the same inputs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rocm_sd import models
from rocm_sd.engine import Parts, optimize_with, report, restore
from rocm_sd.engine.calibration import kernels_hash
from rocm_sd.errors import NumericsFailure
from rocm_sd.files import whole, write_text
from rocm_sd.integrations.diffusers.loading import load_pipeline
from rocm_sd.models.emoji import EMOJI
from rocm_sd.numerics import compare
from rocm_sd.quality.embedding import background_colour, load_embedding
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS
from rocm_sd.verify.device import emulated
from rocm_sd.verify.stock_work import StockWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import PIL.Image

    from rocm_sd.verify.code_object import CodeObject
    from rocm_sd.verify.device import EmulatedCard, Launch

__all__ = ["PLANS", "CardPlan", "Drawn", "KernelRow", "Part", "PictureRequest", "draw"]


class CardPlan(NamedTuple):
    """What of the engine runs, and the implementation that ops prefer."""

    parts: Parts
    prefer: str | None


_ALL_RULES = frozenset(rule.name for rule in (*RULES, *RULES_FOR_GRAPHS))
# `shipped` is what a card does before it was measured, with the rules that it has where steps are captured. The others
# are what it may choose once it was.
PLANS = {
    "every": CardPlan(Parts(plan="channels_last", calibrated=False), "triton"),
    "transformer": CardPlan(Parts(plan="contiguous", calibrated=False), "triton"),
    "shipped": CardPlan(Parts(rules=_ALL_RULES, calibrated=False), None),
}
_HALF = torch.float16


@dataclass(frozen=True)
class PictureRequest:
    arch: str
    prompt: str = "a frog on a pink background"
    steps: int = 8
    seed: int = 0
    guidance: float = 3.0
    plan: str = "every"

    def key(self, pipe: Any) -> str:
        """Of all that decides the picture's bits: the model's weights and this version's kernels, too."""
        plan = PLANS[self.plan]
        runs = [plan.parts.plan, sorted(plan.parts.rules or ()), plan.prefer]
        text = json.dumps([asdict(self), runs, kernels_hash(), torch.__version__], sort_keys=True)
        digest = hashlib.sha256(text.encode())
        for model in (pipe.text_encoder, pipe.unet, pipe.vae):
            for name, tensor in model.state_dict().items():
                digest.update(name.encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass
class KernelRow:
    """Launches of one kernel: counts are exact, `modelled_us` is a model of the card."""

    kernel: str
    launches: int = 0
    variants: int = 0
    wave_instructions: int = 0
    bytes: int = 0
    lds_bank_conflicts: int = 0
    modelled_us: float = 0.0
    seconds: float = 0.0

    def add(self, launch: Launch) -> None:
        counters = launch.counters
        self.launches += 1
        self.wave_instructions += counters.wave_instructions
        self.bytes += counters.bytes_loaded + counters.bytes_stored
        self.lds_bank_conflicts += counters.lds_bank_conflicts
        self.modelled_us += launch.modelled_us or 0.0
        self.seconds += launch.seconds


@dataclass
class Part:
    """A step or the decoder: the kernels that it launched, what stock torch did besides, and the gate's verdict.

    The gate is asked of the first step and of the decoder.
    """

    rows: list[KernelRow] = field(default_factory=list)
    stock_calls: int = 0
    stock_modelled_us: float = 0.0
    gate: str | None = None

    @classmethod
    def of(cls, launches: list[Launch], stock: StockWork) -> Part:
        by_kernel: dict[str, KernelRow] = {}
        variants: dict[str, set[Any]] = {}
        for launch in launches:
            by_kernel.setdefault(launch.kernel, KernelRow(launch.kernel)).add(launch)
            variants.setdefault(launch.kernel, set()).add(launch.variant)
        for name, row in by_kernel.items():
            row.variants = len(variants[name])
        return cls(list(by_kernel.values()), stock.calls, stock.modelled_us)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Part:
        return cls(**{**value, "rows": [KernelRow(**row) for row in value["rows"]]})

    @property
    def total(self) -> KernelRow:
        total = KernelRow("all kernels")
        for row in self.rows:
            for each in fields(row):
                if each.name != "kernel":
                    setattr(total, each.name, getattr(total, each.name) + getattr(row, each.name))
        return total


@dataclass
class Drawn:
    """`parts`: "step 1" and so on, and "decode". `shows`: the emoji that a picture looks like most, and its ground."""

    request: PictureRequest
    image: PIL.Image.Image
    stock_image: PIL.Image.Image
    shows: str
    stock_shows: str
    parts: dict[str, Part]
    report: str


def draw(
    request: PictureRequest,
    folder: Path,
    on_launch: Callable[[str, Launch], object] | None = None,
    edit: Callable[[CodeObject], CodeObject] | None = None,
) -> Drawn:
    """What was drawn into `folder` before, by the same request and kernels, is taken from there.

    `on_launch` hears of each launch, and of the part that it is of. Raises `NumericsFailure` where the first step or
    the decoder is further from float64 than the gate allows.
    """
    # Not in inference mode, which hides from the count what stock's ops are made of, and weights from being packed.
    with torch.no_grad():
        stock, exact = _Model(_HALF, request), _Model(torch.float64, request)
        stock_picture = stock.decoded(stock.denoised())
        ours = _Model(_HALF, request)
        kept = _Kept(folder / request.key(ours.pipe))
        plan = PLANS[request.plan]
        under_way = ""

        def noted(launch: Launch) -> None:
            if on_launch is not None:
                on_launch(under_way, launch)

        with emulated(request.arch, prefer=plan.prefer, on_launch=noted, edit=edit) as card:
            optimize_with(ours.pipe, "performance", "exact", plan.parts)
            said = str(report(ours.pipe))
            latents = ours.latents
            for number, timestep in enumerate(ours.timesteps):
                under_way = f"step {number + 1}"
                found = kept.find(under_way)
                if found is None:
                    noise, part = _watched(card, ours.noise, latents, timestep)
                    if number == 0:
                        part.gate = _gate("The UNet", noise, *(m.noise(latents, timestep) for m in (exact, stock)))
                    found = ours.stepped(noise, timestep, latents)
                    kept.keep(under_way, found, part)
                latents = found
            under_way = "decode"
            picture = kept.find(under_way)
            if picture is None:
                picture, part = _watched(card, ours.decoded, latents)
                part.gate = _gate("The decoder", picture, *(model.decoded(latents) for model in (exact, stock)))
                kept.keep(under_way, picture, part)
            restore(ours.pipe)
    images = stock.image(picture), stock.image(stock_picture)
    return Drawn(request, *images, _shows(picture), _shows(stock_picture), kept.parts, said)


def _shows(picture: torch.Tensor) -> str:
    pixels = (picture.float() / 2 + 0.5).clamp(0, 1)
    (nearest,) = load_embedding().retrieve(pixels, 1)[0].tolist()
    return f"{EMOJI[nearest].name} on {background_colour(pixels[0])}"


class _Model:
    """emoji-sd in a dtype, with a prompt's embeddings and the latents that a picture begins with."""

    def __init__(self, dtype: torch.dtype, request: PictureRequest) -> None:
        self.pipe = load_pipeline(models.resolve(None), torch.device("cpu"), dtype)
        self._request, self._dtype = request, dtype
        # Those of float16 in float64, too: what is compared is the UNet and the decoder.
        self.pipe.text_encoder.to(_HALF)
        positive, negative = self.pipe.encode_prompt(request.prompt, "cpu", 1, True, "")
        self._text = torch.cat([negative, positive]).to(dtype)
        size = self.pipe.unet.config.sample_size
        generator = torch.Generator().manual_seed(request.seed)
        self.latents = torch.randn((1, 4, size, size), generator=generator).to(_HALF)
        self.pipe.scheduler.set_timesteps(request.steps)
        self.timesteps = list(self.pipe.scheduler.timesteps)

    def noise(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Without guidance and with it: [2, 4, H, W]."""
        found: torch.Tensor = self.pipe.unet(torch.cat([latents, latents]).to(self._dtype), timestep, self._text).sample
        return found

    def stepped(self, noise: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        without, with_text = noise.chunk(2)
        guided = without + self._request.guidance * (with_text - without)
        found: torch.Tensor = self.pipe.scheduler.step(guided, timestep, latents).prev_sample
        return found.to(latents.dtype)

    def denoised(self) -> torch.Tensor:
        latents = self.latents
        for timestep in self.timesteps:
            latents = self.stepped(self.noise(latents, timestep), timestep, latents)
        return latents

    def decoded(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        found: torch.Tensor = vae.decode(latents.to(self._dtype) / vae.config.scaling_factor).sample
        return found

    def image(self, picture: torch.Tensor) -> PIL.Image.Image:
        found: PIL.Image.Image = self.pipe.image_processor.postprocess(picture.float(), output_type="pil")[0]
        return found


def _watched(
    card: EmulatedCard, compute: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> tuple[torch.Tensor, Part]:
    before = len(card.launches)
    with StockWork(card.arch) as stock:
        result = compute(*arguments)
    return result, Part.of(card.launches[before:], stock)


def _gate(what: str, ours: torch.Tensor, exact: torch.Tensor, stock: torch.Tensor) -> str:
    found = compare(ours, exact, stock)
    if not found.ok:
        raise NumericsFailure(f"{what} differs from float64 by more than is allowed: {found}.")
    return str(found)


class _Kept:
    """What was drawn, on the disk: a file of tensors and one of counts for each part, each whole or not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.parts: dict[str, Part] = {}

    def find(self, name: str) -> torch.Tensor | None:
        tensors, counts = self._files(name)
        try:
            found = load_file(tensors)["tensor"]
            self.parts[name] = Part.from_dict(json.loads(counts.read_text(encoding="utf-8")))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        return found

    def keep(self, name: str, tensor: torch.Tensor, part: Part) -> None:
        tensors, counts = self._files(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.parts[name] = part
        write_text(counts, json.dumps(asdict(part)))
        with whole(tensors) as unfinished:
            save_file({"tensor": tensor.contiguous()}, unfinished)

    def _files(self, name: str) -> tuple[Path, Path]:
        stem = name.replace(" ", "-")
        return self._folder / f"{stem}.safetensors", self._folder / f"{stem}.json"
