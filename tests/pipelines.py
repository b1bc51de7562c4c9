"""Pipelines of every kind that `optimize` knows, with random weights; a step of each takes milliseconds."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import rocm_sd
from rocm_sd import numerics
from rocm_sd.ops import OPS
from tiny_models import (
    POOLED,
    TEXT,
    controlnet_of,
    flux_transformer,
    projected_text_encoder_of,
    sd3_transformer,
    text_encoder_of,
    unet_of,
    vae_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SPECIAL = ("<|startoftext|>", "<|endoftext|>")


def tiny_unet(**options) -> UNet2DConditionModel:
    return unet_of("sd15", **options)


def tiny_vae() -> AutoencoderKL:
    return vae_of(force_upcast=True)


def tiny_tokenizer(folder: Path) -> CLIPTokenizer:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = {token: number for number, token in enumerate([*letters, *(f"{c}</w>" for c in letters), *SPECIAL])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def tiny_pipeline(folder: Path, seed: int = 0) -> StableDiffusionPipeline:
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(folder)
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    pipe = StableDiffusionPipeline(
        vae=tiny_vae().eval(),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        unet=tiny_unet().eval(),
        scheduler=DDIMScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
KNOWN_SCHEDULERS = {
    "ddim": ("DDIMScheduler", {"clip_sample": False, "steps_offset": 1}),
    "euler": ("EulerDiscreteScheduler", {"steps_offset": 1}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "dpm++karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}),
    "ancestral": ("EulerAncestralDiscreteScheduler", {"steps_offset": 1}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {"steps_offset": 1}),
}
# Of these the engine has no table: their own step is called.
UNKNOWN_SCHEDULERS = {
    "heun": ("HeunDiscreteScheduler", {}),
    "thresholding": ("DDIMScheduler", {"clip_sample": False, "thresholding": True, "steps_offset": 1}),
}
SCHEDULERS = KNOWN_SCHEDULERS | UNKNOWN_SCHEDULERS


def scheduler_of(name: str, **options) -> Any:
    kind, own = SCHEDULERS[name]
    return getattr(diffusers, kind)(**BETAS | own | options)


def picture_of(seed: int, height: int = 16, width: int = 16, batch: int = 1) -> torch.Tensor:
    """[batch, 3, height, width] of values between 0 and 1."""
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def mask_of(height: int = 16, width: int = 16, batch: int = 1) -> torch.Tensor:
    """The right half is painted anew."""
    mask = torch.zeros(batch, 1, height, width)
    mask[..., width // 2 :] = 1
    return mask


_EMBEDDED = {"prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"}


# Graphs where there is a GPU, and elsewhere traces.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """A pipeline and the arguments of a call that is typical of it."""

    kind: str
    components: Callable[[CLIPTokenizer], dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    scheduler: str | None = "ddim"
    scheduler_options: dict[str, Any] = field(default_factory=dict)

    def build(self, folder: Path, seed: int = 0) -> Any:
        """The same weights for the same seed."""
        torch.manual_seed(seed)
        parts = self.components(tiny_tokenizer(folder))
        if self.scheduler is not None:
            parts["scheduler"] = scheduler_of(self.scheduler, **self.scheduler_options)
        pipe = getattr(diffusers, self.kind)(**parts).to(DEVICE)
        pipe.set_progress_bar_config(disable=True)
        return pipe


def call(pipe: Any, case: Case, seed: int = 0, **options) -> torch.Tensor:
    """The final latents."""
    generator = torch.Generator().manual_seed(seed)
    named = {"generator": generator, "output_type": "latent"} | case.arguments | options
    # Stock computes in the dtype of what it is given here.
    embedded = {key: value.to(DEVICE, pipe.dtype) for key, value in named.items() if key in _EMBEDDED}
    return pipe(**named | embedded).images


@contextmanager
def exactly(dtype: torch.dtype) -> Iterator[None]:
    """Runs in float64 inside draw the noise that a run in `dtype` draws: another dtype would be another noise."""
    randn = torch.randn

    def drawn(*size, dtype: torch.dtype | None = None, **named) -> torch.Tensor:
        if dtype is torch.float64:
            return randn(*size, dtype=of_the_test, **named).double()
        return randn(*size, dtype=dtype, **named)

    of_the_test = dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", drawn)
        yield


def require_as_exact_as_stock(
    ours: list[torch.Tensor], exact: list[torch.Tensor], stock: list[torch.Tensor], times: float = 1.5
) -> None:
    """The root-mean-square error over all pictures is at most `times` that of stock, plus a rounding."""
    for one, its_stock in zip(ours, stock, strict=True):
        assert one.dtype == its_stock.dtype
    compared = numerics.compare(*(torch.stack(pictures) for pictures in (ours, exact, stock)))
    # Where stock is infinite there is nothing to compare with. NaN compares false.
    assert compared.stock_rms < 0.2 * float(torch.stack(exact).std()), f"stock itself is far off: {compared}"
    assert compared.rms <= times * compared.stock_rms + compared.floor, str(compared)


class Twins:
    """A pipeline three times, of the same weights: optimised, stock, and stock in float64."""

    def __init__(self, case: Case, folder: Path, dtype: torch.dtype = torch.float32, **options) -> None:
        self.case, self.dtype = case, dtype
        self.stock = case.build(folder).to(dtype)
        self.exact = case.build(folder).to(torch.float64)
        self.ours = rocm_sd.optimize(case.build(folder).to(dtype), **options)

    def each(self, operation: Callable[[Any], Any]) -> None:
        for pipe in (self.stock, self.exact, self.ours):
            operation(pipe)
        # A LoRA comes in float32, and would be computed so.
        self.exact.to(torch.float64)

    def pictures(self, seed: int = 0, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents: ours, exact, stock's. `generator` is a function that makes one, since a run uses it up."""
        with exactly(self.dtype):
            exact = self.drawn(self.exact, seed, **options)
        return self.drawn(self.ours, seed, **options), exact, self.drawn(self.stock, seed, **options)

    def drawn(self, pipe: Any, seed: int = 0, **options) -> torch.Tensor:
        """The latents of one of the three."""
        made = {name: value() if name == "generator" else value for name, value in options.items()}
        return call(pipe, self.case, seed, **made)

    def are_equal(self, seed: int = 0, **options) -> bool:
        """Whether ours has stock's bits, as a pipeline that was restored has."""
        return torch.equal(self.drawn(self.ours, seed, **options), self.drawn(self.stock, seed, **options))

    def check(self, seed: int = 0, **options) -> torch.Tensor:
        """One picture of each; the optimised one's latents."""
        ours, exact, stock = self.pictures(seed, **options)
        # One picture of 256 values: its error is by chance a half more than stock's, or less.
        require_as_exact_as_stock([ours], [exact], [stock], times=2)
        return ours


def small_blocks_too(patch: pytest.MonkeyPatch, step_graph: str) -> None:
    """Captured steps on ("1") or off ("0") on a CPU, with the ops in every block.

    Left to themselves, the rewritten blocks of a model this small would call stock, which is faster there.
    """
    patch.setenv("ROCM_SD_STEP_GRAPH", step_graph)
    if DEVICE.type == "cpu":
        patch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))
    # On a GPU convolutions of float32 would keep 10 bits.
    patch.setattr(torch.backends.cudnn, "allow_tf32", False)


def _sd(family: str, *, controlnets: int = 0, **unet_options) -> Callable[[CLIPTokenizer], dict[str, Any]]:
    def components(tokenizer: CLIPTokenizer) -> dict[str, Any]:
        parts = {
            "vae": vae_of(),
            "text_encoder": text_encoder_of(tokenizer),
            "tokenizer": tokenizer,
            "unet": unet_of(family, **unet_options),
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }
        return parts | _controlled(family, controlnets)

    return components


def _controlled(family: str, count: int) -> dict[str, Any]:
    nets = [controlnet_of(family) for _ in range(count)]
    return {"controlnet": nets if count > 1 else nets[0]} if nets else {}


def _sdxl(*, controlnets: int = 0, **unet_options) -> Callable[[CLIPTokenizer], dict[str, Any]]:
    def components(tokenizer: CLIPTokenizer) -> dict[str, Any]:
        parts = {
            "vae": vae_of(),
            "text_encoder": text_encoder_of(tokenizer),
            "text_encoder_2": projected_text_encoder_of(tokenizer),
            "tokenizer": tokenizer,
            "tokenizer_2": tokenizer,
            "unet": unet_of("sdxl", **unet_options),
            "add_watermarker": False,
        }
        return parts | _controlled("sdxl", controlnets)

    return components


def _refiner(tokenizer: CLIPTokenizer) -> dict[str, Any]:
    return {
        "vae": vae_of(),
        "text_encoder": None,
        "text_encoder_2": projected_text_encoder_of(tokenizer),
        "tokenizer": None,
        "tokenizer_2": tokenizer,
        "unet": unet_of("refiner"),
        "requires_aesthetics_score": True,
        "force_zeros_for_empty_prompt": False,
        "add_watermarker": False,
    }


def _sd3(tokenizer: CLIPTokenizer) -> dict[str, Any]:
    return {
        "transformer": sd3_transformer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": vae_of(shift_factor=0.06),
        "text_encoder": projected_text_encoder_of(tokenizer),
        "text_encoder_2": projected_text_encoder_of(tokenizer),
        "text_encoder_3": None,
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "tokenizer_3": None,
    }


def _flux(*, guided: bool) -> Callable[[CLIPTokenizer], dict[str, Any]]:
    def components(tokenizer: CLIPTokenizer) -> dict[str, Any]:
        return {
            "transformer": flux_transformer(guidance_embeds=guided),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
            "vae": vae_of(shift_factor=0.1),
            "text_encoder": text_encoder_of(tokenizer),
            "text_encoder_2": None,
            "tokenizer": tokenizer,
            "tokenizer_2": None,
        }

    return components


def embeddings_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


_TEXT = {"prompt": "a frog", "num_inference_steps": 4}
_SIZE = {"height": 16, "width": 16}
_FROM = {"image": picture_of(1), "strength": 0.75}
_MASKED = _FROM | {"mask_image": mask_of(), "strength": 1.0}
_HINT = {"image": picture_of(2)}
# There is no T5: its part is handed over.
_FLUX = {
    "prompt_embeds": embeddings_of(3, 1, 12, TEXT),
    "pooled_prompt_embeds": embeddings_of(4, 1, POOLED),
    "num_inference_steps": 4,
}
_LCM = {"time_cond_proj_dim": 32}
_V = {"prediction_type": "v_prediction"}
_TRAILING = {"timestep_spacing": "trailing"}
_DISTILLED = {"num_inference_steps": 2, "guidance_scale": 0.0}
_SD = "StableDiffusion"


def _family(name: str, title: str, of: Callable[..., Any], options: dict[str, Any]) -> dict[str, Case]:
    """A family's UNet in each of the pipelines that there are for it."""
    nine = {"in_channels": 9}
    controlled_from = {"control_image": picture_of(2), "controlnet_conditioning_scale": 0.7}

    def case(kind: str, components: Any, **arguments) -> Case:
        return Case(f"{title}{kind}Pipeline", components, _TEXT | arguments, scheduler_options=options)

    return {
        name: case("", of(), **_SIZE),
        f"{name}-img2img": case("Img2Img", of(), **_FROM),
        f"{name}-inpaint9": case("Inpaint", of(**nine), **_MASKED, **_SIZE),
        f"{name}-inpaint4": case("Inpaint", of(), **_MASKED, **_SIZE),
        f"{name}-controlnet": case("ControlNet", of(controlnets=1), **_HINT),
        f"{name}-controlnet-img2img": case("ControlNetImg2Img", of(controlnets=1), **_FROM, **controlled_from),
        f"{name}-controlnet-inpaint": case("ControlNetInpaint", of(controlnets=1), **_MASKED, **controlled_from),
    }


CASES: dict[str, Case] = {
    **_family("sd15", _SD, lambda **options: _sd("sd15", **options), {}),
    **_family("sd21", _SD, lambda **options: _sd("sd21", **options), _V),
    **_family("sdxl", f"{_SD}XL", _sdxl, {}),
    "sd15-two-controlnets": Case(
        f"{_SD}ControlNetPipeline",
        _sd("sd15", controlnets=2),
        _TEXT | {"image": [picture_of(2), picture_of(5)], "control_guidance_end": [0.5, 1.0]},
    ),
    "refiner": Case(f"{_SD}XLImg2ImgPipeline", _refiner, _TEXT | _FROM),
    "refiner-inpaint": Case(f"{_SD}XLInpaintPipeline", _refiner, _TEXT | _MASKED | _SIZE),
    "lcm": Case("LatentConsistencyModelPipeline", _sd("sd15", **_LCM), _TEXT | _SIZE, "lcm"),
    "lcm-img2img": Case("LatentConsistencyModelImg2ImgPipeline", _sd("sd15", **_LCM), _TEXT | _FROM, "lcm"),
    "lcm-sd15": Case(f"{_SD}Pipeline", _sd("sd15", **_LCM), _TEXT | _SIZE | {"guidance_scale": 8.0}, "lcm"),
    "lcm-sdxl": Case(f"{_SD}XLPipeline", _sdxl(**_LCM), _TEXT | _SIZE | {"guidance_scale": 8.0}, "lcm"),
    "turbo": Case(f"{_SD}XLPipeline", _sdxl(), _TEXT | _SIZE | _DISTILLED, "ancestral", _TRAILING),
    "turbo-one-step": Case(
        f"{_SD}XLPipeline", _sdxl(), _TEXT | _SIZE | _DISTILLED | {"num_inference_steps": 1}, "ancestral", _TRAILING
    ),
    "turbo-img2img": Case(
        f"{_SD}XLImg2ImgPipeline", _sdxl(), _TEXT | _DISTILLED | _FROM | {"strength": 0.5}, "ancestral", _TRAILING
    ),
    "sd-turbo": Case(f"{_SD}Pipeline", _sd("sd21"), _TEXT | _SIZE | _DISTILLED, "ancestral", _TRAILING),
    "lightning": Case(
        f"{_SD}XLPipeline", _sdxl(), _TEXT | _SIZE | {"guidance_scale": 0.0}, "euler", _TRAILING | {"steps_offset": 0}
    ),
    "sd3": Case(f"{_SD}3Pipeline", _sd3, _TEXT | _SIZE | {"max_sequence_length": 12}, None),
    "sd3-img2img": Case(f"{_SD}3Img2ImgPipeline", _sd3, _TEXT | _FROM | _SIZE | {"max_sequence_length": 12}, None),
    "flux-dev": Case("FluxPipeline", _flux(guided=True), _FLUX | _SIZE, None),
    "flux-schnell": Case("FluxPipeline", _flux(guided=False), _FLUX | _SIZE | {"guidance_scale": 0.0}, None),
    "flux-img2img": Case("FluxImg2ImgPipeline", _flux(guided=True), _FLUX | _FROM | _SIZE, None),
}
