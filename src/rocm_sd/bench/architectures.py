"""The real architectures of Stable Diffusion 1.5, 2.1 and SDXL with random weights, and what they compute."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.parallel.layers import TEXT_TOKENS, UNETS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TINY_SIDE", "picture_flops", "pooled_width", "random_pipeline", "unet_inputs"]

_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_UNETS: dict[str, dict[str, Any]] = {
    "sd15": {**UNETS["sd15"]},
    "sd21": {
        **UNETS["sd15"],
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
    },
    "sdxl": {
        **UNETS["sdxl"],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
    # The weights that overflow in float16 are real ones; without this, stock would decode in float32.
    "force_upcast": False,
}
_SCALING = {"sd15": 0.18215, "sd21": 0.18215, "sdxl": 0.13025}
TINY_SIDE = 64
_TINY_UNET: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": (32, 32, 64, 64), "attention_head_dim": 4, "cross_attention_dim": 32},
    "sd21": {"block_out_channels": (32, 32, 64, 64), "attention_head_dim": (2, 2, 4, 4), "cross_attention_dim": 32},
    "sdxl": {
        "block_out_channels": (32, 32, 64),
        "attention_head_dim": (2, 2, 4),
        "cross_attention_dim": 32,
        "transformer_layers_per_block": (1, 1, 2),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    },
}
# Groups of one channel and one pixel would have no variance: their norm would be of rounding errors.
_TINY = {"sample_size": TINY_SIDE // 8, "layers_per_block": 1, "norm_num_groups": 8}
_TINY_VAE = {"block_out_channels": (32, 32, 32, 64), "layers_per_block": 1, "sample_size": TINY_SIDE}


def random_pipeline(
    family: str, scheduler: str, prediction: str, device: torch.device, dtype: torch.dtype, *, tiny: bool = False
) -> Any:
    """A pipeline without text encoders; the same seed gives the same weights on the same kind of device."""
    import diffusers  # noqa: PLC0415 -- slow to import

    from rocm_sd.integrations.diffusers import SCHEDULERS  # noqa: PLC0415

    unet_config = _UNETS[family] | (_TINY_UNET[family] | _TINY if tiny else {})
    vae_config = _VAE | {"scaling_factor": _SCALING[family]} | (_TINY_VAE if tiny else {})
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device, _default_dtype(dtype):
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(**unet_config).eval().requires_grad_(requires_grad=False)
        vae = diffusers.AutoencoderKL(**vae_config).eval().requires_grad_(requires_grad=False)
    class_name, options = SCHEDULERS[scheduler]
    # DDIM clips its samples by default; Stable Diffusion's own config turns that off.
    clip = {"clip_sample": False} if class_name == "DDIMScheduler" else {}
    noise = getattr(diffusers, class_name)(**_NOISE, **clip, **options, prediction_type=prediction)
    if family == "sdxl":
        return diffusers.StableDiffusionXLPipeline(
            vae, None, None, None, None, unet, noise, force_zeros_for_empty_prompt=False, add_watermarker=False
        )
    return diffusers.StableDiffusionPipeline(vae, None, None, unet, noise, None, None, requires_safety_checker=False)


def pooled_width(unet_config: Any) -> int:
    """Of SDXL's pooled text: what is left of its added embedding after six numbers about the picture's size."""
    return int(unet_config.projection_class_embeddings_input_dim) - 6 * int(unet_config.addition_time_embed_dim)


def unet_inputs(config: Any, batch: int, height: int, width: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Of one call, for latents of that size; what they hold is whatever the default device gives."""
    empty = partial(torch.empty, dtype=dtype)
    added = None
    if config.addition_embed_type == "text_time":
        added = {"text_embeds": empty(batch, pooled_width(config)), "time_ids": empty(batch, 6)}
    return {
        "sample": empty(batch, config.in_channels, height, width),
        "timestep": torch.empty(()),
        "encoder_hidden_states": empty(batch, TEXT_TOKENS, config.cross_attention_dim),
        "added_cond_kwargs": added,
    }


def picture_flops(pipe: Any, height: int, width: int, steps: int, *, guided: bool) -> float:
    """Floating-point operations of one picture, counted by running the models on tensors without memory."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 -- only counted once a run

    with torch.device("meta"):
        unet = type(pipe.unet).from_config(pipe.unet.config)
        vae = type(pipe.vae).from_config(pipe.vae.config)
        scale = pipe.vae_scale_factor
        inputs = unet_inputs(pipe.unet.config, 2 if guided else 1, height // scale, width // scale)
        with torch.no_grad(), FlopCounterMode(display=False) as of_step:
            unet(**inputs)
        decoded = torch.empty(1, pipe.vae.config.latent_channels, height // scale, width // scale)
        with torch.no_grad(), FlopCounterMode(display=False) as of_vae:
            vae.decode(decoded)
    return float(steps * of_step.get_total_flops() + of_vae.get_total_flops())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
