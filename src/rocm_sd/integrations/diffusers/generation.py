"""A request for pictures, and the pictures; schedulers by the short names that users know."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from rocm_sd.errors import InvalidOption, Unsupported, require_one_of
from rocm_sd.integrations.diffusers.batch_memory import require_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

__all__ = [
    "SCHEDULERS", "Generated", "Request", "generate", "require_drawable", "scheduler_like", "set_scheduler",
]  # fmt: skip

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    # Without its Runge-Kutta warm-up, as in Stable Diffusion's own config: that would need four steps at least.
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "dpm++2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++2m-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}

# What torch takes for a generator's seed.
_LOWEST_SEED, _HIGHEST_SEED = -(2**63), 2**64 - 1
_SEEDS = f"It takes a whole number from {_LOWEST_SEED} to {_HIGHEST_SEED}, and each further picture takes the next."
_NO_TEXT = "It is not UTF-8: check the encoding of the terminal or of the script."
# Far beyond what any card holds: what is larger was mistyped, and would fill the host's memory first.
_MOST_PICTURES, _LONGEST_SIDE = 4096, 65536


@dataclass(frozen=True)
class Request:
    """`width` and `height` of None mean the model's own size; `seed` makes the picture the same every time."""

    prompt: str
    negative: str = ""
    steps: int = 20
    guidance: float = 7.5
    seed: int = 0
    batch: int = 1
    width: int | None = None
    height: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise Unsupported("generate", f"{name} {getattr(self, name)}: it takes 1 or more")
        if self.batch > _MOST_PICTURES:
            raise Unsupported("generate", f"batch {self.batch}: it takes {_MOST_PICTURES} at most")
        for name in ("width", "height"):
            size = getattr(self, name)
            if size is not None and (size % 8 or not 8 <= size <= _LONGEST_SIDE):
                wanted = f"a multiple of 8, {_LONGEST_SIDE} at most"
                raise Unsupported("generate", f"{name} {size}: it takes {wanted}", hint="Try --size 512x512.")
        for name, is_right, hint in (
            ("guidance", math.isfinite(self.guidance), "It takes a finite number, such as 7.5."),
            # Those of the other pictures count up from it.
            ("seed", _LOWEST_SEED <= self.seed <= _HIGHEST_SEED - self.batch + 1, _SEEDS),
            ("prompt", _is_text(self.prompt), _NO_TEXT),
            ("negative", _is_text(self.negative), _NO_TEXT),
        ):
            if not is_right:
                raise InvalidOption(name, getattr(self, name), [], hint=hint)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _is_text(given: str) -> bool:
    """Bytes of the command line that are not UTF-8 come as halves of characters, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


@dataclass(frozen=True)
class Generated:
    images: list[Image]
    seconds: float


def generate(pipe: Any, request: Request, on_step: Callable[[int], None] | None = None) -> Generated:
    """Run the pipeline; `on_step(n)` is called after the n-th step. The noise is drawn on the CPU: a seed gives the
    same picture on every device.
    """
    require_drawable(pipe, request)
    generators = [torch.Generator("cpu").manual_seed(request.seed + i) for i in range(request.batch)]

    def after_step(_pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if on_step:
            on_step(step + 1)
        return tensors

    pipe.set_progress_bar_config(disable=True)
    started = time.perf_counter()
    images = pipe(
        request.prompt,
        negative_prompt=request.negative,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        num_images_per_prompt=request.batch,
        width=request.width,
        height=request.height,
        generator=generators,
        callback_on_step_end=after_step,
    ).images
    return Generated(images, time.perf_counter() - started)


def require_drawable(pipe: Any, request: Request) -> None:
    """Raises Unsupported for more steps than the pipeline's scheduler takes, TooLargeBatch for what cannot fit."""
    most = pipe.scheduler.config.num_train_timesteps
    # At exactly as many steps as were trained, a schedule with an offset runs past the end of its table.
    if request.steps >= most:
        raise Unsupported("generate", f"{request.steps} steps: this model takes fewer than {most}")
    # A consistency model's schedule is made of those of the model that it was distilled from.
    distilled = pipe.scheduler.config.get("original_inference_steps")
    if distilled is not None and request.steps > distilled:
        raise Unsupported(
            "generate", f"{request.steps} steps: {type(pipe.scheduler).__name__} takes {distilled} at most"
        )
    _require_memory(pipe, request)


def _require_memory(pipe: Any, request: Request) -> None:
    part = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
    side = getattr(getattr(part, "config", None), "sample_size", None)
    usual = side * getattr(pipe, "vae_scale_factor", 8) if isinstance(side, int) else 8
    height, width = request.height or usual, request.width or usual
    require_memory(pipe, request.batch, height, width, pipe.device, getattr(part, "dtype", torch.float16))


def set_scheduler(pipe: Any, name: str) -> None:
    """Give the pipeline another scheduler with the noise schedule of its own."""
    pipe.scheduler = scheduler_like(pipe.scheduler, name)


def scheduler_like(scheduler: Any, name: str | None = None) -> Any:
    """Another scheduler with the same noise schedule, by its short name; one of the same kind where none is given."""
    if name is None:
        return type(scheduler).from_config(scheduler.config)
    require_one_of("scheduler", name, SCHEDULERS)
    class_name, options = SCHEDULERS[name]
    return getattr(diffusers, class_name).from_config(scheduler.config, **options)
