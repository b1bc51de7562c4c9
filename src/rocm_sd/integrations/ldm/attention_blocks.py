"""Transformers of ldm's UNet and the attention of its VAE: maps as tokens without permutes, residual adds inside norms
and epilogues, GEGLU in one op, packed QKV where the host allows it. Whatever somebody has put into a block keeps it to
the host's own way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.integrations.ldm.convolutional_blocks import why_not_convolutions
from rocm_sd.integrations.ldm.rules import BlockRule
from rocm_sd.ops import attention, layer_norm_residual, linear_geglu
from rocm_sd.rewrite.convolutions import plain_norm_silu
from rocm_sd.rewrite.layers import idle, untouched
from rocm_sd.rewrite.tokens import map_of, plain_linear, projected, tokens_of

if TYPE_CHECKING:
    from rocm_sd.integrations.ldm.policy import HostPolicy

__all__ = ["TRANSFORMER_RULES", "VAE_ATTENTION"]

_ATTENTION = "modules.attention"
_VAE = "modules.diffusionmodules.model"


def _of_one_point(layer: Any) -> bool:
    if isinstance(layer, nn.Conv2d):
        return (layer.kernel_size, layer.stride, layer.padding, layer.groups) == ((1, 1), (1, 1), (0, 0), 1)
    return isinstance(layer, nn.Linear)


def _spatial_why_not(_policy: HostPolicy, module: Any) -> str | None:
    if not isinstance(module.norm, nn.GroupNorm):
        return f"its norm is {type(module.norm).__name__}, not GroupNorm"
    if not (_of_one_point(module.proj_in) and _of_one_point(module.proj_out)):
        return "its projections are not of one point"
    return None


def _spatial(
    policy: HostPolicy,
    module: Any,
    x: torch.Tensor,
    context: Any = None,
    transformer_options: dict[str, Any] | None = None,
) -> torch.Tensor | None:
    # Of another layout the host's own way has fewer copies.
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    blocks, several = module.transformer_blocks, isinstance(context, list)
    # The original has one text for each of its blocks: with one text for several it says so itself.
    if several and len(context) != len(blocks):
        return None
    if not several and len(blocks) != 1 and type(module).__module__.startswith("ldm."):
        return None
    if not policy.all_plain(x, module.norm, module.proj_in, module.proj_out):
        return None
    options = transformer_options
    named = {} if options is None else {"transformer_options": options}
    if options is not None:
        # What blocks, and the patches of other nodes, look up there.
        options["activations_shape"] = list(x.shape)
    tokens = plain_linear(module.proj_in, tokens_of(plain_norm_silu(module.norm, x, silu=False)))
    for number, block in enumerate(blocks):
        if options is not None:
            options["block_index"] = number
        tokens = block(tokens, context=context[number] if several else context, **named)
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
    policy: HostPolicy,
    block: Any,
    x: torch.Tensor,
    context: torch.Tensor | None = None,
    transformer_options: dict[str, Any] | None = None,
    **more: Any,
) -> torch.Tensor | None:
    if more or x.dim() != 3 or not policy.attention_is_plain(transformer_options or {}):
        return None
    if context is not None and (type(context) is not torch.Tensor or context.device != x.device):
        return None
    attn1, attn2, ff = block.attn1, block.attn2, block.ff
    if not policy.all_plain(x, block.norm1, block.norm2, block.norm3) or not _is_plain_geglu(policy, ff, x):
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
    gate, _, out = ff.net
    return plain_linear(out, linear_geglu(h, gate.proj.weight, gate.proj.bias), x)


def _is_plain_attention(policy: HostPolicy, attn: Any, x: torch.Tensor) -> bool:
    out, dropout = attn.to_out
    if not (untouched(attn, attn.to_out) and policy.is_usual(attn) and idle(dropout)):
        return False
    return policy.all_plain(x, attn.to_q, attn.to_k, attn.to_v, out)


def _is_plain_geglu(policy: HostPolicy, ff: Any, x: torch.Tensor) -> bool:
    gate, dropout, out = ff.net
    if not (untouched(ff, ff.net, gate) and policy.is_usual(gate) and idle(dropout)):
        return False
    return policy.all_plain(x, gate.proj, out)


def _add_and_norm(
    norm: nn.LayerNorm, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
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
    reason = why_not_convolutions(policy, *layers)
    return reason or (None if all(map(_of_one_point, layers)) else "its projections are not of one point")


def _vae_attention(policy: HostPolicy, block: Any, x: torch.Tensor) -> torch.Tensor | None:
    layers = (block.q, block.k, block.v, block.proj_out)
    if x.dim() != 4 or not policy.attention_is_plain(None) or not policy.all_plain(x, block.norm, *layers):
        return None
    tokens = tokens_of(plain_norm_silu(block.norm, x, silu=False))
    q, k, v = (plain_linear(layer, tokens).unsqueeze(2) for layer in layers[:3])
    return map_of(plain_linear(block.proj_out, attention(q, k, v).flatten(2), tokens_of(x)), x)


TRANSFORMER_RULES = (
    BlockRule("spatial_transformer",
              "GroupNorm, projections and residual on the channels-last map as it lies, without permutes",
              "UNet", _ATTENTION, ("SpatialTransformer",), "linear_residual", _spatial_why_not, _spatial,
              worth_it_on_cpu=0),
    BlockRule("transformer", "residual adds inside norms and epilogues, GEGLU in one op; in captured calls",
              "UNet", _ATTENTION, ("BasicTransformerBlock",), "layer_norm_residual", _transformer_why_not,
              _transformer, worth_it_on_cpu=0, channels_last=False, packs=True),
)  # fmt: skip
VAE_ATTENTION = BlockRule(
    "vae_attention", "attention over a picture's pixels with no layout copies, the residual in the output projection",
    "VAE", _VAE, ("AttnBlock", "MemoryEfficientAttnBlock"), "attention", _vae_attention_why_not, _vae_attention,
    slices=True,
)  # fmt: skip
