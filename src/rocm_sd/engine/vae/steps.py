"""A VAE's encoder or decoder as the list of steps that a picture goes through, for the planner and for the tiler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

from rocm_sd.rewrite import forwards
from rocm_sd.rewrite.convolutions import is_diffusers, unusual
from rocm_sd.rewrite.transformer import stock_processor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["Kind", "VaeStep", "decoder_steps", "encoder_steps", "rewritten", "why_not_in_strips", "why_unknown"]


class Kind(Enum):
    CONVOLUTION = "convolution"
    RESNET = "resnet"
    ATTENTION = "attention"
    UPSAMPLE = "upsample"
    DOWNSAMPLE = "downsample"
    # Norm, activation and convolution at the end; the module is the encoder or decoder itself.
    OUT = "out"


@dataclass(frozen=True)
class VaeStep:
    """`block` is whose call it is made in: stock keeps a block's input until the block has returned."""

    path: str
    kind: Kind
    module: Any
    block: str = ""


def decoder_steps(vae: Any) -> tuple[VaeStep, ...]:
    return tuple(_decoder_steps(vae))


def _decoder_steps(vae: Any) -> Iterator[VaeStep]:
    decoder = vae.decoder
    if vae.post_quant_conv is not None:
        yield VaeStep("post_quant_conv", Kind.CONVOLUTION, vae.post_quant_conv)
    yield VaeStep("decoder.conv_in", Kind.CONVOLUTION, decoder.conv_in)
    yield from _middle("decoder.mid_block", decoder.mid_block)
    for number, block in enumerate(decoder.up_blocks):
        yield from _block(f"decoder.up_blocks.{number}", block, "upsamplers", Kind.UPSAMPLE)
    yield VaeStep("decoder.conv_out", Kind.OUT, decoder)


def encoder_steps(vae: Any) -> tuple[VaeStep, ...]:
    return tuple(_encoder_steps(vae))


def _encoder_steps(vae: Any) -> Iterator[VaeStep]:
    encoder = vae.encoder
    yield VaeStep("encoder.conv_in", Kind.CONVOLUTION, encoder.conv_in)
    for number, block in enumerate(encoder.down_blocks):
        yield from _block(f"encoder.down_blocks.{number}", block, "downsamplers", Kind.DOWNSAMPLE)
    yield from _middle("encoder.mid_block", encoder.mid_block)
    yield VaeStep("encoder.conv_out", Kind.OUT, encoder)
    if vae.quant_conv is not None:
        yield VaeStep("quant_conv", Kind.CONVOLUTION, vae.quant_conv)


def _middle(path: str, block: Any) -> Iterator[VaeStep]:
    yield VaeStep(f"{path}.resnets.0", Kind.RESNET, block.resnets[0], path)
    for number, (attention, resnet) in enumerate(zip(block.attentions, block.resnets[1:], strict=True)):
        if attention is not None:
            yield VaeStep(f"{path}.attentions.{number}", Kind.ATTENTION, attention, path)
        yield VaeStep(f"{path}.resnets.{number + 1}", Kind.RESNET, resnet, path)


def _block(path: str, block: Any, samplers: str, kind: Kind) -> Iterator[VaeStep]:
    for number, resnet in enumerate(block.resnets):
        yield VaeStep(f"{path}.resnets.{number}", Kind.RESNET, resnet, path)
    for number, sampler in enumerate(getattr(block, samplers) or ()):
        yield VaeStep(f"{path}.{samplers}.{number}", kind, sampler, path)


def why_unknown(vae: Any) -> str | None:
    """The reason that its steps are not those listed here, in words, or None."""
    if not is_diffusers(vae, "AutoencoderKL"):
        return f"a {type(vae).__name__} is not planned for"
    for name, whole, blocks, kind in (
        ("encoder", "Encoder", "down_blocks", "DownEncoderBlock2D"),
        ("decoder", "Decoder", "up_blocks", "UpDecoderBlock2D"),
    ):
        part = getattr(vae, name)
        if not is_diffusers(part, whole) or not is_diffusers(part.mid_block, "UNetMidBlock2D"):
            return f"its {name} is a {type(part).__name__} with a {type(getattr(part, 'mid_block', None)).__name__}"
        for block in getattr(part, blocks):
            if not is_diffusers(block, kind):
                return f"its {name} has a {type(block).__name__}"
    names = {
        Kind.RESNET: "ResnetBlock2D",
        Kind.ATTENTION: "Attention",
        Kind.UPSAMPLE: "Upsample2D",
        Kind.DOWNSAMPLE: "Downsample2D",
    }
    for step in (*_encoder_steps(vae), *_decoder_steps(vae)):
        if step.kind in names and not is_diffusers(step.module, names[step.kind]):
            return f"its {step.path} is a {type(step.module).__name__}"
        if step.kind is Kind.RESNET and (step.module.upsample is not None or step.module.downsample is not None):
            return f"its {step.path} samples"
    return None


def rewritten(module: nn.Module) -> bool:
    """Whether a rule has replaced its forward."""
    return forwards.is_rule(forwards.on_instance(module))


def why_not_in_strips(vae: Any, steps: tuple[VaeStep, ...], device: torch.device) -> str | None:
    """The reason that these steps cannot be taken layer by layer now, or None.

    Layers are called one by one then and norms are read, so a hook on what contains them would not run.
    """
    if vae.training:
        return "it is in training mode"
    for step in steps:
        for module in _modules_of(step):
            reason = _touched(module, device)
            if reason:
                return f"{step.path}: {reason}"
        reason = _unusual_step(step)
        if reason:
            return f"{step.path}: {reason}"
    return None


def _modules_of(step: VaeStep) -> Iterator[nn.Module]:
    if step.kind is not Kind.OUT:
        yield from step.module.modules()
        return
    yield step.module
    for part in (step.module.conv_norm_out, step.module.conv_act, step.module.conv_out):
        yield from part.modules()


def _touched(module: nn.Module, device: torch.device) -> str | None:
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return "it has hooks"
    if "_hf_hook" in own or forwards.is_foreign(module, own.get("forward")):
        return "another program has replaced its forward"
    if any(p.device != device for p in own["_parameters"].values() if p is not None):
        return "its weights are on another device"
    if isinstance(module, nn.Conv2d) and "_conv_forward" in own:
        return "another program has replaced its convolution"
    return unusual(module)


def _unusual_step(step: VaeStep) -> str | None:
    module = step.module
    if step.kind is Kind.RESNET:
        return _unusual_resnet(module)
    if step.kind is Kind.ATTENTION:
        return _unusual_attention(module)
    if step.kind is Kind.OUT and (not _is_norm(module.conv_norm_out) or type(module.conv_act) is not nn.SiLU):
        return "its last norm is no GroupNorm with SiLU"
    if step.kind is Kind.UPSAMPLE:
        plain = module.norm is None and module.use_conv and module.interpolate and not module.use_conv_transpose
        return None if plain else "it does not enlarge by nearest and convolution"
    if step.kind is Kind.DOWNSAMPLE:
        plain = module.norm is None and module.use_conv and module.padding == 0
        return None if plain else "it pads on another side"
    return None


def _is_norm(norm: object) -> bool:
    return type(norm) is nn.GroupNorm


def _unusual_resnet(module: Any) -> str | None:
    if not (_is_norm(module.norm1) and _is_norm(module.norm2)) or type(module.nonlinearity) is not nn.SiLU:
        return "its norms are no GroupNorm with SiLU"
    if module.time_emb_proj is not None or module.time_embedding_norm == "scale_shift":
        return "it takes a time embedding"
    return None


def _unusual_attention(module: Any) -> str | None:
    kind = stock_processor(module.processor)
    if kind.__name__ != "AttnProcessor2_0" or not kind.__module__.startswith("diffusers."):
        return f"its attention is computed by {kind.__name__}"
    if not _is_norm(module.group_norm) or module.spatial_norm is not None:
        return "its norm is no GroupNorm"
    if module.norm_q is not None or module.norm_k is not None or module.to_out[1].p:
        return "it has more than one norm, or dropout"
    return None
