"""What is timed: a model, a size, a scheduler and its steps; the same weights, prompts and noise for every engine.

Without `--model` the weights are random, of the real architecture: speed does not depend on them, and nothing has to be
downloaded. What a picture looks like does, so a record says where its weights came from.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.bench import architectures
from rocm_sd.bench.loading import timed_loads
from rocm_sd.bench.records import NOT_LOADED, LoadTimes, WorkloadFacts
from rocm_sd.errors import DeviceUnavailable, InvalidOption, Unsupported
from rocm_sd.models import ModelKind, resolve
from rocm_sd.models.emoji import DEMO_PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.models import ModelSource

__all__ = ["OP_PREFIX", "WORKLOADS", "Recipe", "Workload", "make", "require_workload"]

OP_PREFIX = "op:"
# Of MLPerf Inference: every picture of its SDXL benchmark is drawn with it.
_MLPERF_NEGATIVE = "normal quality, low quality, worst quality, low res, blurry, nsfw, nude, bad hands, missing fingers"


@dataclass(frozen=True)
class Recipe:
    """`shared_noise`: every picture starts from the same noise, as MLPerf asks."""

    name: str
    summary: str
    family: str
    side: int
    steps: int
    scheduler: str
    guidance: float
    prediction: str = "epsilon"
    negative: str = ""
    shared_noise: bool = False


WORKLOADS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("sd15-512", "Stable Diffusion 1.5, 512x512, 50 steps DDIM", "sd15", 512, 50, "ddim", 7.5),
        Recipe("sd15-768", "Stable Diffusion 1.5, 768x768, 50 steps DDIM", "sd15", 768, 50, "ddim", 7.5),
        Recipe(
            "sd21-768", "Stable Diffusion 2.1, 768x768, 50 steps DDIM", "sd21", 768, 50, "ddim", 7.5,
            prediction="v_prediction",
        ),
        Recipe("sdxl-1024", "SDXL, 1024x1024, 30 steps Euler", "sdxl", 1024, 30, "euler", 5.0),
        Recipe(
            "sdxl-mlperf", "SDXL as in MLPerf Inference: 1024x1024, 20 steps Euler, guidance 8, fixed noise", "sdxl",
            1024, 20, "euler", 8.0, negative=_MLPERF_NEGATIVE, shared_noise=True,
        ),
        Recipe("emoji", "the built-in model with its own weights, 128x128", "emoji", 128, 20, "ddim", 3.0),
    )
}  # fmt: skip
# So many that a benchmark of two engines takes less than a minute on two cores.
_EMOJI_CPU_STEPS = 4
_TINY_STEPS = 3
# Parameters of a UNet: that of Stable Diffusion 1.5 has 860 millions.
_MOST_ON_A_CPU = 100e6


class Workload:
    """A recipe with its weights. `pipeline()` gives each engine copies of its own; `picture()` draws with one."""

    def __init__(
        self,
        recipe: Recipe,
        base: Any,
        facts: WorkloadFacts,
        device: torch.device,
        dtype: torch.dtype,
        loading: LoadTimes = NOT_LOADED,
    ) -> None:
        self.recipe, self.facts, self.device, self.dtype, self.loading = recipe, facts, device, dtype, loading
        # Kept on the host, in the dtype: every copy has the same rounded weights, and the card holds engines only.
        self._base = base
        self._prompts = base.text_encoder is not None if hasattr(base, "text_encoder") else False
        # Random numbers for a batch of SDXL take the host 30 ms: they are no part of a picture's time.
        self._given: dict[tuple[Any, ...], dict[str, Any]] = {}

    @property
    def name(self) -> str:
        return self.facts.name

    def pipeline(self, dtype: torch.dtype | None = None, *, by_layers: bool = False) -> Any:
        """A stock pipeline with modules of its own, on the device. `by_layers`: a layer's weights come when it runs."""
        dtype = dtype or self.dtype
        # Weights go to the device at once: a copy on the host would take longer than all that follows.
        home = torch.device("cpu") if by_layers else self.device
        weights = {id(weight): _copied(weight, home, dtype) for weight in _weights(self._base)}
        pipe = copy.deepcopy(self._base, memo=weights).to(home, dtype)
        pipe.set_progress_bar_config(disable=True)
        if by_layers:
            pipe.enable_group_offload(self.device, offload_type="leaf_level")
        return pipe

    def picture(
        self,
        pipe: Any,
        batch: int,
        *,
        seed: int = 0,
        steps: int | None = None,
        output: str = "pt",
        only: int | None = None,
    ) -> torch.Tensor:
        """The pipeline's own call, with text encoders where the model has them, and with the VAE unless "latent".

        `only`: that one picture of the batch, by itself.
        """
        dtype = getattr(getattr(pipe, "unet", None), "dtype", None) or self.dtype
        key = (batch, self.facts.height, self.facts.width, seed, dtype)
        if key not in self._given:
            self._require_memory(batch, dtype)
            noise = self._noise(batch, seed).to(self.device, dtype)
            self._given[key] = {**self._text(batch, dtype), "latents": noise}
        given = self._given[key]
        drawn = pipe(
            **(given if only is None else {name: each[only : only + 1] for name, each in given.items()}),
            num_inference_steps=steps or self.facts.steps,
            guidance_scale=self.facts.guidance,
            height=self.facts.height,
            width=self.facts.width,
            output_type=output,
        ).images
        return drawn if isinstance(drawn, torch.Tensor) else torch.as_tensor(drawn)

    @property
    def takes_prompts(self) -> bool:
        """Whether its model reads texts; one of random weights has no text encoders."""
        return self._prompts

    def pictures_of(self, pipe: Any, prompts: Sequence[str], first: int) -> torch.Tensor:
        """[B, 3, H, W] in 0..1; `first`: the number of the first prompt, by which each gets noise of its own."""
        seeds = [0 if self.recipe.shared_noise else first + number for number in range(len(prompts))]
        noise = torch.cat([self._noise(1, seed) for seed in seeds])
        self._require_memory(len(prompts), self.dtype)
        drawn: torch.Tensor = pipe(
            prompt=list(prompts),
            negative_prompt=[self.recipe.negative] * len(prompts),
            latents=noise.to(self.device, self.dtype),
            num_inference_steps=self.facts.steps,
            guidance_scale=self.facts.guidance,
            height=self.facts.height,
            width=self.facts.width,
            output_type="pt",
        ).images
        return torch.as_tensor(drawn)

    def _require_memory(self, batch: int, dtype: torch.dtype) -> None:
        from rocm_sd.integrations.diffusers.batch_memory import require_memory  # noqa: PLC0415 -- slow to import

        require_memory(self._base, batch, self.facts.height, self.facts.width, self.device, dtype)

    def _noise(self, batch: int, seed: int) -> torch.Tensor:
        """Float32, drawn on the host: every engine, dtype and device starts from the same."""
        scale = self._base.vae_scale_factor
        shape = (1, self._base.vae.config.latent_channels, self.facts.height // scale, self.facts.width // scale)
        seeds = [seed if self.recipe.shared_noise else seed * 1000 + number for number in range(batch)]
        return torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(each)) for each in seeds])

    def _text(self, batch: int, dtype: torch.dtype) -> dict[str, Any]:
        if self._prompts:
            prompts = [DEMO_PROMPTS[number % len(DEMO_PROMPTS)] for number in range(batch)]
            return {"prompt": prompts, "negative_prompt": [self.recipe.negative] * batch}
        config = self._base.unet.config
        given: dict[str, tuple[int, ...]] = {"prompt_embeds": (77, config.cross_attention_dim)}
        if config.addition_embed_type == "text_time":
            given["pooled_prompt_embeds"] = (architectures.pooled_width(config),)
        text = {}
        for number, (name, shape) in enumerate(given.items()):
            for kind, prefix in enumerate(("", "negative_")):
                random = torch.Generator().manual_seed(17 + 2 * number + kind)
                text[prefix + name] = torch.randn(batch, *shape, generator=random).to(self.device, dtype)
        return text


def _weights(pipe: Any) -> Iterator[torch.Tensor]:
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            yield from part.parameters()
            yield from part.buffers()


def _copied(weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    copied = weight.detach().to(device, dtype if weight.is_floating_point() else None, copy=True)
    return nn.Parameter(copied, weight.requires_grad) if isinstance(weight, nn.Parameter) else copied


def make(
    name: str,
    device: torch.device,
    *,
    model: str | None = None,
    steps: int | None = None,
    tiny: bool = False,
    dtype: torch.dtype | None = None,
    time_loading: bool = False,
) -> Workload:
    """`model`: a folder, a checkpoint or a hub id to take weights from. `tiny`: a small model, to try the command.

    `time_loading`: a model with weights of its own is loaded twice, which is timed.
    """
    from rocm_sd.integrations.diffusers.loading import default_dtype  # noqa: PLC0415 -- slow to import

    recipe = require_workload(name, device, model=model, steps=steps, tiny=tiny)
    dtype, loading = dtype or default_dtype(device), NOT_LOADED
    timed_on = device if time_loading else None
    if recipe.family == "emoji" and not tiny:
        base, loading = _loaded(resolve(), recipe, dtype, timed_on)
        weights, title = "emoji-sd", "emoji-sd"
        recipe = recipe if device.type != "cpu" else replace(recipe, steps=_EMOJI_CPU_STEPS)
    elif model is not None:
        source = resolve(model)
        base, loading = _loaded(source, recipe, dtype, timed_on)
        weights, title = _public_name(source), recipe.family
        if device.type == "cpu" and base.unet.num_parameters() > _MOST_ON_A_CPU:
            raise _needs_a_gpu(name)
    else:
        family = "sd15" if recipe.family == "emoji" else recipe.family
        base = architectures.random_pipeline(family, recipe.scheduler, recipe.prediction, device, dtype, tiny=tiny)
        weights, title = "random", f"{family}, tiny" if tiny else family
        if tiny:
            recipe = replace(recipe, name=f"{name}-tiny", side=architectures.TINY_SIDE, steps=_TINY_STEPS)
    facts = WorkloadFacts(
        recipe.name, title, weights, recipe.side, recipe.side, steps or recipe.steps,
        type(base.scheduler).__name__, recipe.guidance, str(dtype).removeprefix("torch."),
    )  # fmt: skip
    return Workload(recipe, base.to("cpu"), replace(facts, flops=_flops(base, facts)), device, dtype, loading)


def require_workload(
    name: str, device: torch.device, *, model: str | None = None, steps: int | None = None, tiny: bool = False
) -> Recipe:
    """Raises what is wrong with the options of `make`, before anything is loaded."""
    if name not in WORKLOADS:
        raise InvalidOption("workload", name, [*WORKLOADS, f"{OP_PREFIX}NAME", "ops"])
    recipe = WORKLOADS[name]
    if steps is not None and steps < 1:
        raise InvalidOption("--steps", steps, [], hint="It takes 1 or more.")
    if tiny and model is not None:
        raise InvalidOption("--tiny", model, [], hint="It makes a small model of its own: leave out --model.")
    if device.type == "cpu" and recipe.family != "emoji" and not tiny and model is None:
        raise _needs_a_gpu(name)
    if recipe.family == "emoji" and model is not None:
        raise InvalidOption("--model", model, [], hint="emoji is the built-in model; take sd15-512 for another.")
    return recipe


def _needs_a_gpu(name: str) -> DeviceUnavailable:
    return DeviceUnavailable(
        f"{name} needs a GPU: on a CPU one picture takes many minutes, and torch sees no GPU.",
        hint=f"Try the command with a small model: rocm-sd bench {name} --tiny; or measure: rocm-sd bench emoji",
    )


def _loaded(
    source: ModelSource, recipe: Recipe, dtype: torch.dtype, timed_on: torch.device | None = None
) -> tuple[Any, LoadTimes]:
    """The pipeline on the host: the card's memory is for the engines. `timed_on`: how long it takes to get there."""
    from rocm_sd.integrations.diffusers import load_pipeline, set_scheduler  # noqa: PLC0415 -- slow to import

    loading = NOT_LOADED
    if timed_on is None:
        pipe = load_pipeline(source, torch.device("cpu"), dtype)
    else:
        pipe, loading = timed_loads(source, lambda: load_pipeline(source, timed_on, dtype))
        pipe.to("cpu")
    if not hasattr(pipe, "unet"):
        raise Unsupported(
            f"The workload {recipe.name}", f"a {type(pipe).__name__}", hint="Give a Stable Diffusion or SDXL model."
        )
    is_sdxl = pipe.unet.config.addition_embed_type == "text_time"
    if is_sdxl != (recipe.family == "sdxl"):
        fitting = [each.name for each in WORKLOADS.values() if (each.family == "sdxl") == is_sdxl]
        raise Unsupported(
            f"The workload {recipe.name}", f"a {type(pipe).__name__}", hint=f"Use one of: {', '.join(fitting)}."
        )
    set_scheduler(pipe, recipe.scheduler)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None
    return pipe, loading


def _public_name(source: ModelSource) -> str:
    """Nothing of a person's folders goes into a record: only the last part of a path."""
    return source.location if source.kind is ModelKind.HUB else Path(source.location).resolve().name


def _flops(base: Any, facts: WorkloadFacts) -> float | None:
    """Of one picture: its UNet calls, two a step where guidance is on, and the VAE's decoder; without the text."""
    try:
        return architectures.picture_flops(base, facts.height, facts.width, facts.steps, guided=facts.guidance > 1)
    except (NotImplementedError, RuntimeError):
        # An operation that cannot be traced without memory: then no share of the floor is given.
        return None
