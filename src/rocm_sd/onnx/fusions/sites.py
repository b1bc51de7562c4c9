"""How many sites of each fusion a part has: counted in the torch model that its config describes, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.errors import CorruptModel
from rocm_sd.onnx.fusions import (
    attention,
    bias_add,
    bias_split_gelu,
    channels_last,
    group_norm,
    quick_gelu,
    shared_guidance,
    skip_layer_norm,
    upsample_conv,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["sites_of"]

_CHECKER = "safety_checker"


def sites_of(part: str, config: Mapping[str, Any]) -> dict[str, int]:
    """By the name of the fusion; those that the part has none of are left out."""
    try:
        with torch.device("meta"):
            modules = _modules(part, dict(config))
    except Exception as error:
        hint = "Export the model again: rocm-sd onnx export"
        raise CorruptModel(f"{part}/config.json describes no model that can be made ({error}).", hint=hint) from error
    named = [type(module).__name__ for module in modules]
    upsamplers = [each for each in modules if type(each).__name__ == "Upsample2D" and getattr(each, "use_conv", False)]
    counted = {
        attention.NAME: sum(name in {"Attention", "CLIPAttention"} for name in named),
        group_norm.NAME: sum(isinstance(module, nn.GroupNorm) for module in modules),
        skip_layer_norm.NAME: _residual_norms(part, modules),
        bias_split_gelu.NAME: named.count("GEGLU"),
        # The last sum of a transformer; of CLIP's over pictures, too, of which one token is taken before the norm.
        bias_add.NAME: named.count("Transformer2DModel") + (named.count("CLIPEncoder") if part == _CHECKER else 0),
        quick_gelu.NAME: sum(_is_quick(module) for module in modules),
        upsample_conv.NAME: len(upsamplers),
        channels_last.CONV: sum(isinstance(module, nn.Conv2d) for module in modules) - len(upsamplers),
        shared_guidance.NAME: int(part == "unet" and "Transformer2DModel" in named),
        channels_last.SKIP: sum(getattr(module, "time_emb_proj", None) is not None for module in modules),
    }
    return {name: count for name, count in counted.items() if count}


def _modules(part: str, config: dict[str, Any]) -> list[nn.Module]:
    if part == "unet":
        from diffusers import UNet2DConditionModel  # noqa: PLC0415 -- seconds, and only this needs it

        return list(UNet2DConditionModel.from_config(config).modules())
    if part.startswith("vae"):
        from diffusers import AutoencoderKL  # noqa: PLC0415

        vae = AutoencoderKL.from_config(config)
        own = (vae.decoder, vae.post_quant_conv) if part == "vae_decoder" else (vae.encoder, vae.quant_conv)
        return [module for each in own if each is not None for module in each.modules()]
    import transformers  # noqa: PLC0415

    if part == _CHECKER:
        from diffusers.pipelines.stable_diffusion import safety_checker  # noqa: PLC0415

        checker = safety_checker.StableDiffusionSafetyChecker(transformers.CLIPConfig(**config))
        return list(checker.modules())
    return list(transformers.CLIPTextModel(transformers.CLIPTextConfig(**config)).modules())


def _residual_norms(part: str, modules: Iterable[nn.Module]) -> int:
    """Layer norms of a sum: all of a transformer's but the first, to which its input comes as it is."""
    found = 0
    for module in modules:
        name = type(module).__name__
        if name == "Transformer2DModel":
            norms = [
                norm
                for block in module.transformer_blocks  # type: ignore[union-attr]
                for norm in (block.norm1, block.norm2, block.norm3)
                if norm is not None
            ]
            found += len(norms) - 1
        elif name == "CLIPEncoder":
            found += 2 * len(module.layers) - 1  # type: ignore[arg-type]
    # A text encoder ends with a norm of the last sum; of pictures, one token of it is normed.
    return found + (1 if part.startswith("text") else 0)


def _is_quick(module: nn.Module) -> bool:
    return type(module).__name__ == "CLIPMLP" and type(module.activation_fn).__name__ == "QuickGELUActivation"
