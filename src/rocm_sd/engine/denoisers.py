"""What the engine knows of each class of Diffusers that a pipeline calls for a picture: all others run as is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FEATURES", "MERGED", "OURS", "Denoiser", "denoiser"]

# Arguments that no model takes: from one part of the engine to another, through what is installed between them.
FEATURES = "rocm_sd_features"
MERGED = "rocm_sd_merged"
OURS = frozenset({FEATURES, MERGED})


@dataclass(frozen=True)
class Denoiser:
    """Each of these is captured as a graph; of a UNet, what depends on the prompt alone is hoisted out of it.

    `each`: arguments, nested or not, whose every tensor has one entry for each sample, so that a batch can be halved;
    the first tells how many. `one_or_each`: the same, or one entry for all. `shared`: tensors that say nothing of
    samples. Any other argument may hold numbers and words, but no tensor.
    `every_step`: called at each, and not once a picture.

    `maps`: how many values there are for each channel of each token at the fullest moment of a block, as stock runs it,
    where the model predicts the noise; `text`: tokens besides the picture's; `patch`: the side of the latents that is
    one token, where the config does not say it. `samples`: in a batch for one picture; Flux has its guidance inside.
    Live bytes of stock's own operations, counted on real configs in fp16 with fused attention: 136.6 MB for SD 1.5
    (512x512), 330.9 for SDXL, 396.8 for its refiner, 338.8 for SD3 medium (1024x1024), each a batch of 2; 490.8 for
    Flux.
    """

    each: tuple[str, ...] = ()
    one_or_each: tuple[str, ...] = ("timestep",)
    shared: tuple[str, ...] = ()
    maps: int = 0
    text: int = 0
    patch: int = 0
    samples: int = 2
    is_unet: bool = False
    every_step: bool = True


_UNET = ("sample", "encoder_hidden_states", "class_labels", "timestep_cond", "attention_mask", "added_cond_kwargs")
_TRANSFORMER = ("hidden_states", "encoder_hidden_states", "pooled_projections")

_DENOISERS = {
    # down_intrablock_additional_residuals is missing: the UNet takes the states of a T2I adapter out of the caller's
    # list.
    "UNet2DConditionModel": Denoiser(
        (*_UNET, "encoder_attention_mask", "down_block_additional_residuals", "mid_block_additional_residual"),
        maps=22,
        is_unet=True,
    ),
    "ControlNetModel": Denoiser((*_UNET, "controlnet_cond")),
    "ControlNetUnionModel": Denoiser(),
    "SD3Transformer2DModel": Denoiser((*_TRANSFORMER, "block_controlnet_hidden_states"), maps=13, text=333),
    "SD3ControlNetModel": Denoiser(),
    "FluxTransformer2DModel": Denoiser(
        (*_TRANSFORMER, "controlnet_block_samples", "controlnet_single_block_samples"),
        ("timestep", "guidance"),
        ("img_ids", "txt_ids"),
        maps=18,
        text=512,
        # It cuts latents into patches before the model, whose own patches are points.
        patch=2,
        samples=1,
    ),
    "FluxControlNetModel": Denoiser(),
    # A VAE's: called once a picture, but for hundreds of launches.
    "Decoder": Denoiser(every_step=False),
}


def denoiser(model: Any) -> Denoiser | None:
    """None where the class is another one, also of another package under the same name."""
    kind = type(model)
    return _DENOISERS.get(kind.__name__) if kind.__module__.startswith("diffusers.") else None
