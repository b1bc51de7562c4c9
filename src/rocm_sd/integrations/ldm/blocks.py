"""Blocks of ldm's UNet and VAE, each as a rule: GroupNorm + SiLU as one op, convolutions with the adds in them, nearest
2x with the convolution after it, maps as tokens without permutes, residual adds inside norms and epilogues, GEGLU.

Layers are looked at in every call, and whatever somebody has put into a block keeps it to the host's own way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.integrations.ldm.rules import BlockRule, HostPolicy
from rocm_sd.ops import attention, layer_norm_residual, linear_geglu
from rocm_sd.rewrite.convolutions import plain_convolution, plain_convolution_and_add, plain_norm_silu, unusual
from rocm_sd.rewrite.layers import idle, untouched
from rocm_sd.rewrite.resblock import WORTH_IT_ON_CPU
from rocm_sd.rewrite.sampling import doubles, plain_doubled
from rocm_sd.rewrite.tokens import map_of, plain_linear, projected, tokens_of

__all__ = ["NORM_OUT", "TRANSFORMER_RULES", "UNET_RULES", "VAE_RULES"]

_UNET = "modules.diffusionmodules.openaimodel"
_VAE = "modules.diffusionmodules.model"
_ATTENTION = "modules.attention"


def _given(*values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def _why_not_convolutions(policy: HostPolicy, *layers: Any) -> str | None:
    for layer in layers:
        if not isinstance(layer, nn.Conv2d):
            return "its convolutions are not of two dimensions"
        of_this_job = policy.pads_by_job and layer.padding_mode != "zeros"
        reason = None if of_this_job else unusual(layer)
        if reason is not None:
            return reason
    return None


def _is_norm_act(layers: Any) -> bool:
    return isinstance(layers[0], nn.GroupNorm) and type(layers[1]) is nn.SiLU


def _resblock_why_not(policy: HostPolicy, block: Any) -> str | None:
    if block.use_scale_shift_norm:
        return "its time embedding scales and shifts"
    if getattr(block, "skip_t_emb", False) or getattr(block, "exchange_temb_dims", False) or block.emb_layers is None:
        return "it has no time embedding of one value a channel"
    if len(block.in_layers) != 3 or len(block.out_layers) != 4 or len(block.emb_layers) != 2:
        return "it has other layers than a norm, SiLU and a convolution"
    if not (_is_norm_act(block.in_layers) and _is_norm_act(block.out_layers)):
        return "its norms are not GroupNorm with SiLU"
    return _why_not_convolutions(policy, block.in_layers[2], block.out_layers[3])


def _resblock(policy: HostPolicy, block: Any, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor | None:
    norm1, act1, conv1 = block.in_layers
    norm2, act2, dropout, conv2 = block.out_layers
    act, projection = block.emb_layers
    skip = None if type(block.skip_connection) is nn.Identity else block.skip_connection
    # Torch's kernel that enlarges channels-last maps fails on large batches.
    if x.dim() != 4 or emb.dim() != 2 or (block.updown and len(x) >= 64):
        return None
    if not untouched(block.in_layers, block.out_layers, block.emb_layers, act, act1, act2) or not idle(dropout):
        return None
    if not (policy.all_plain(x, norm1, norm2, projection) and policy.all_taken(x, conv1, conv2, *_given(skip))):
        return None
    hidden = plain_norm_silu(norm1, x)
    if block.updown:
        hidden, x = block.h_upd(hidden), block.x_upd(x)
    # Autocast would bring an embedding of another dtype to this one.
    hidden, later = plain_convolution_and_add(conv1, hidden, block.emb_layers(emb.to(x.dtype)))
    hidden = plain_norm_silu(norm2, hidden, later)
    return plain_convolution(conv2, hidden, residual=x if skip is None else plain_convolution(skip, x))


def _vae_resblock_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not (isinstance(block.norm1, nn.GroupNorm) and isinstance(block.norm2, nn.GroupNorm)):
        return "its norms are not GroupNorm"
    return _why_not_convolutions(policy, block.conv1, block.conv2)


def _vae_resblock(
    policy: HostPolicy, block: Any, x: torch.Tensor, temb: Any = None, *carries: Any, **named: Any
) -> torch.Tensor | None:
    # A video's VAE carries frames from one call to the next.
    if x.dim() != 4 or _given(temb, *carries, *named.values()) or not idle(block.dropout):
        return None
    conv1, conv2, skip = block.conv1, block.conv2, None
    if block.in_channels != block.out_channels:
        skip = block.conv_shortcut if block.use_conv_shortcut else block.nin_shortcut
    if not (policy.all_plain(x, block.norm1, block.norm2) and policy.all_taken(x, conv1, conv2, *_given(skip))):
        return None
    # Named anew at each step: the picture before is then free, which in a VAE is the peak of its memory.
    hidden, later = plain_norm_silu(block.norm1, x), None
    if policy.vae_bias_in_norm:
        hidden, later = plain_convolution_and_add(conv1, hidden, None)
    else:
        hidden = plain_convolution(conv1, hidden)
    hidden = plain_norm_silu(block.norm2, hidden, later)
    return plain_convolution(conv2, hidden, residual=x if skip is None else plain_convolution(skip, x))


# Samplers: a UNet's have `use_conv`, `channels`, and `op` for the convolution of stride 2; a VAE's have `with_conv`.
def _upsample_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not getattr(block, "use_conv", getattr(block, "with_conv", False)):
        return "it has no convolution"
    if getattr(block, "scale_factor", 2) != 2:
        return f"it enlarges by {block.scale_factor}"
    return _why_not_convolutions(policy, block.conv)


def _upsample(policy: HostPolicy, block: Any, x: torch.Tensor, output_shape: Any = None) -> torch.Tensor | None:
    layer, size = block.conv, None if output_shape is None else output_shape[2:]
    if x.dim() != 4 or getattr(block, "channels", x.shape[1]) != x.shape[1] or getattr(block, "scale_factor", 2) != 2:
        return None
    return plain_doubled(layer, x) if policy.all_taken(x, layer) and doubles(layer, x, size) else None


def _vae_upsample(policy: HostPolicy, block: Any, x: torch.Tensor, *carries: Any, **named: Any) -> torch.Tensor | None:
    return None if _given(*carries, *named.values()) else _upsample(policy, block, x)


def _downsample_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not getattr(block, "use_conv", getattr(block, "with_conv", False)):
        return "it has no convolution"
    return _why_not_convolutions(policy, getattr(block, "op", None) or block.conv)


def _downsample(policy: HostPolicy, block: Any, x: torch.Tensor) -> torch.Tensor | None:
    known = x.dim() == 4 and x.shape[1] == block.channels and policy.all_taken(x, block.op)
    return plain_convolution(block.op, x) if known else None


def _vae_downsample(
    policy: HostPolicy, block: Any, x: torch.Tensor, *carries: Any, **named: Any
) -> torch.Tensor | None:
    if x.dim() != 4 or _given(*carries, *named.values()) or not policy.all_taken(x, block.conv):
        return None
    # It pads below and to the right only.
    return plain_convolution(block.conv, F.pad(x, (0, 1, 0, 1)))


def _out_why_not(policy: HostPolicy, layers: Any) -> str | None:
    if len(layers) != 3 or not _is_norm_act(layers):
        return "it is not GroupNorm, SiLU and a convolution"
    return _why_not_convolutions(policy, layers[2])


def _out(policy: HostPolicy, layers: Any, x: torch.Tensor) -> torch.Tensor | None:
    norm, act, last = layers
    known = x.dim() == 4 and untouched(act) and policy.all_plain(x, norm) and policy.all_taken(x, last)
    return plain_convolution(last, plain_norm_silu(norm, x)) if known else None


def _of_one_point(layer: Any) -> bool:
    if isinstance(layer, nn.Conv2d):
        return (layer.kernel_size, layer.stride, layer.padding, layer.groups) == ((1, 1), (1, 1), (0, 0), 1)
    return isinstance(layer, nn.Linear)


def _spatial_why_not(_policy: HostPolicy, module: Any) -> str | None:
    if not isinstance(module.norm, nn.GroupNorm):
        return f"its norm is {type(module.norm).__name__}, not GroupNorm"
    known = _of_one_point(module.proj_in) and _of_one_point(module.proj_out)
    return None if known else "its projections are not of one point"


def _spatial(
    policy: HostPolicy, module: Any, x: torch.Tensor, context: Any = None, transformer_options: Any = None
) -> torch.Tensor | None:
    # Of another layout the host's own way has fewer copies.
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    if not policy.all_plain(x, module.norm, module.proj_in, module.proj_out):
        return None
    # The original has one text for each of its blocks: where it has another number, it says so itself.
    blocks, of_all = module.transformer_blocks, not type(module).__module__.startswith("ldm.")
    texts = context if isinstance(context, list) else [context] * (len(blocks) if of_all else 1)
    if len(texts) != len(blocks):
        return None
    options = transformer_options
    named = {} if options is None else {"transformer_options": options}
    if options is not None:
        # What blocks, and the patches of other nodes, look up there.
        options["activations_shape"] = list(x.shape)
    tokens = plain_linear(module.proj_in, tokens_of(plain_norm_silu(module.norm, x, silu=False)))
    for number, (block, text) in enumerate(zip(blocks, texts, strict=True)):
        if options is not None:
            options["block_index"] = number
        tokens = block(tokens, context=text, **named)
    return map_of(plain_linear(module.proj_out, tokens, tokens_of(x)), x)


def _transformer_why_not(policy: HostPolicy, block: Any) -> str | None:
    if getattr(block, "ff_in", None) or not getattr(block, "is_res", True):
        return "it begins with a feed-forward, or changes the width"
    if getattr(block, "switch_temporal_ca_to_sa", False):
        return "it attends over time"
    for name in ("attn1", "attn2"):
        attn = getattr(block, name, None)
        if attn is None:
            return f"it has no {name}"
        known = policy.is_of(attn, _ATTENTION, "CrossAttention", "MemoryEfficientCrossAttention")
        if not known or len(attn.to_out) != 2:
            return f"its {name} is a {type(attn).__name__}"
    if len(block.ff.net) != 3 or not policy.is_of(block.ff.net[0], _ATTENTION, "GEGLU"):
        return "its feed-forward is not GEGLU"
    return None


def _transformer(
    policy: HostPolicy, block: Any, x: torch.Tensor, context: Any = None, transformer_options: Any = None, **more: Any
) -> torch.Tensor | None:
    if more or x.dim() != 3 or not policy.attention_is_plain(transformer_options or {}):
        return None
    if context is not None and (type(context) is not torch.Tensor or context.device != x.device):
        return None
    attn1, attn2, (gate, dropout, out) = block.attn1, block.attn2, block.ff.net
    if not (untouched(block.ff, block.ff.net, gate) and policy.is_usual(gate) and idle(dropout)):
        return None
    if not policy.all_plain(x, block.norm1, block.norm2, block.norm3, gate.proj, out):
        return None
    if not (_is_plain_attention(policy, attn1, x) and _is_plain_attention(policy, attn2, x)):
        return None
    # Autocast would bring text of another dtype to this one.
    text = None if context is None else context.to(x.dtype)
    h, _ = _add_and_norm(block.norm1, x, None)
    h = _attend(policy, attn1, h, text if block.disable_self_attn else None)
    h, x = _add_and_norm(block.norm2, h, x)
    h = _attend(policy, attn2, h, text)
    h, x = _add_and_norm(block.norm3, h, x)
    return plain_linear(out, linear_geglu(h, gate.proj.weight, gate.proj.bias), x)


def _is_plain_attention(policy: HostPolicy, attn: Any, x: torch.Tensor) -> bool:
    out, dropout = attn.to_out
    if not (untouched(attn, attn.to_out) and policy.is_usual(attn) and idle(dropout)):
        return False
    return policy.all_plain(x, attn.to_q, attn.to_k, attn.to_v, out)


def _add_and_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual)."""
    return layer_norm_residual(x, residual, norm.weight, norm.bias, norm.eps)


def _attend(policy: HostPolicy, attn: Any, x: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
    heads, pack = attn.heads, policy.packs_weights
    if text is None:
        q, k, v = projected(x, heads, attn.to_q, attn.to_k, attn.to_v, pack=pack)
    else:
        (q,) = projected(x, heads, attn.to_q)
        k, v = projected(text, heads, attn.to_k, attn.to_v, pack=pack)
    return plain_linear(attn.to_out[0], attention(q, k, v, getattr(attn, "scale", None)).flatten(2))


def _vae_attention_why_not(policy: HostPolicy, block: Any) -> str | None:
    if not isinstance(block.norm, nn.GroupNorm):
        return "its norm is not GroupNorm"
    layers = (block.q, block.k, block.v, block.proj_out)
    reason = _why_not_convolutions(policy, *layers)
    return reason or (None if all(map(_of_one_point, layers)) else "its projections are not of one point")


def _vae_attention(policy: HostPolicy, block: Any, x: torch.Tensor) -> torch.Tensor | None:
    layers = (block.q, block.k, block.v, block.proj_out)
    if x.dim() != 4 or not policy.attention_is_plain(None) or not policy.all_plain(x, block.norm, *layers):
        return None
    tokens = tokens_of(plain_norm_silu(block.norm, x, silu=False))
    q, k, v = (plain_linear(layer, tokens).unsqueeze(2) for layer in layers[:3])
    return map_of(plain_linear(block.proj_out, attention(q, k, v).flatten(2), tokens_of(x)), x)


_UPSAMPLE = "nearest 2x and the 3x3 convolution after it, in one op where that is faster"
_DOWNSAMPLE = "the convolution of stride 2 by whichever implementation is fastest"

UNET_RULES = (
    BlockRule("resblock",
              "GroupNorm + SiLU as one op; convolutions with the time embedding's and the shortcut's adds in them",
              "UNet", _UNET, ("ResBlock",), "conv2d", _resblock_why_not, _resblock, worth_it_on_cpu=WORTH_IT_ON_CPU),
    BlockRule("upsample", _UPSAMPLE, "UNet", _UNET, ("Upsample",), "upsample_conv2d", _upsample_why_not, _upsample),
    BlockRule("downsample", _DOWNSAMPLE, "UNet", _UNET, ("Downsample",), "conv2d", _downsample_why_not, _downsample),
)  # fmt: skip
# For a host that replaces by path: a Sequential is known by nothing else.
NORM_OUT = BlockRule("norm_out", "the last GroupNorm + SiLU as one op", "UNet", _UNET, (), "group_norm_silu",
                     _out_why_not, _out, path="out")  # fmt: skip
TRANSFORMER_RULES = (
    BlockRule("spatial_transformer",
              "GroupNorm, projections and residual on the channels-last map as it lies, without permutes",
              "UNet", _ATTENTION, ("SpatialTransformer",), "linear_residual", _spatial_why_not, _spatial,
              worth_it_on_cpu=0, calls=("transformer_blocks",)),
    BlockRule("transformer", "residual adds inside norms and epilogues, GEGLU in one op; in captured calls",
              "UNet", _ATTENTION, ("BasicTransformerBlock",), "layer_norm_residual", _transformer_why_not,
              _transformer, worth_it_on_cpu=0, channels_last=False, packs=True),
)  # fmt: skip
VAE_RULES = (
    BlockRule("vae_resblock", "GroupNorm + SiLU as one op; the shortcut's add in the second convolution",
              "VAE", _VAE, ("ResnetBlock",), "conv2d", _vae_resblock_why_not, _vae_resblock,
              worth_it_on_cpu=WORTH_IT_ON_CPU),
    BlockRule("vae_attention",
              "attention over a picture's pixels with no layout copies, the residual in the output projection",
              "VAE", _VAE, ("AttnBlock", "MemoryEfficientAttnBlock"), "attention", _vae_attention_why_not,
              _vae_attention, slices=True),
    BlockRule("vae_upsample", _UPSAMPLE, "VAE", _VAE, ("Upsample",), "upsample_conv2d", _upsample_why_not,
              _vae_upsample),
    BlockRule("vae_downsample", _DOWNSAMPLE, "VAE", _VAE, ("Downsample",), "conv2d", _downsample_why_not,
              _vae_downsample),
)  # fmt: skip
