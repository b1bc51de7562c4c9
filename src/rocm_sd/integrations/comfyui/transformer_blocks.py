"""Transformers of ComfyUI's UNet: the map as tokens without permutes, residual adds inside norms and epilogues, GEGLU
in one op.

A block takes its fused way while a step is being recorded only: called one by one from Python, so many small
questions cost more than they save. Whatever another node has put into the block keeps it to the host's own way.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.integrations.comfyui.attention import is_our_override
from rocm_sd.integrations.comfyui.host import is_comfy
from rocm_sd.integrations.comfyui.layers import (
    add_and_norm,
    idle,
    is_plain,
    linear,
    map_of,
    norm_silu,
    ours,
    tokens_of,
)
from rocm_sd.integrations.comfyui.rules import BlockRule
from rocm_sd.ops import attention, linear_geglu
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES", "fused"]

_ATTENTION = "ldm.modules.attention"
_FUSED: ContextVar[bool] = ContextVar("rocm_sd_comfyui_fused", default=False)


@contextmanager
def fused() -> Iterator[None]:
    """Within, transformer blocks go their fused way: what runs is recorded, and Python runs once."""
    token = _FUSED.set(True)
    try:
        yield
    finally:
        _FUSED.reset(token)


def _of_one_point(layer: Any) -> bool:
    if isinstance(layer, nn.Conv2d):
        return (layer.kernel_size, layer.stride, layer.padding, layer.groups) == ((1, 1), (1, 1), (0, 0), 1)
    return isinstance(layer, nn.Linear)


def _spatial_why_not(module: Any) -> str | None:
    if not isinstance(module.norm, nn.GroupNorm):
        return f"its norm is {type(module.norm).__name__}, not GroupNorm"
    if not (_of_one_point(module.proj_in) and _of_one_point(module.proj_out)):
        return "its projections are not of one point"
    return None


def _spatial(
    self: Any, x: torch.Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None
) -> torch.Tensor | None:
    # Of another layout the host's own way has fewer copies.
    if not ours("linear_residual", x) or x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    if not (is_plain(self.norm, x) and is_plain(self.proj_in, x) and is_plain(self.proj_out, x)):
        return None
    blocks = self.transformer_blocks
    options = {} if transformer_options is None else transformer_options
    contexts = context if isinstance(context, list) else [context] * len(blocks)
    # What blocks, and the patches of other nodes, look up there.
    options["activations_shape"] = list(x.shape)
    tokens = linear(self.proj_in, tokens_of(norm_silu(self.norm, x, silu=False)))
    for number, block in enumerate(blocks):
        options["block_index"] = number
        tokens = block(tokens, context=contexts[number], transformer_options=options)
    return map_of(linear(self.proj_out, tokens, tokens_of(x)), *x.shape[2:])


def _block_why_not(block: Any) -> str | None:
    if block.ff_in or not block.is_res:
        return "it begins with a feed-forward, or changes the width"
    if getattr(block, "switch_temporal_ca_to_sa", False):
        return "it attends over time"
    if block.attn2 is None:
        return "it has no attention to the text"
    net = block.ff.net
    if len(net) != 3 or not is_comfy(type(net[0]), "GEGLU", _ATTENTION):
        return "its feed-forward is not GEGLU"
    for name in ("attn1", "attn2"):
        attn = getattr(block, name)
        if not is_comfy(type(attn), "CrossAttention", _ATTENTION):
            return f"its {name} is a {type(attn).__name__}"
    return None


def _block(
    self: Any, x: torch.Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None
) -> torch.Tensor | None:
    options = {} if transformer_options is None else transformer_options
    if not _FUSED.get() or not ours("layer_norm_residual", x) or x.dim() != 3:
        return None
    if options.get("patches") or options.get("patches_replace"):
        return None
    h, x = add_and_norm(self.norm1, x, None)
    h = _attend(self.attn1, h, context if self.disable_self_attn else None, options)
    h, x = add_and_norm(self.norm2, h, x)
    h = _attend(self.attn2, h, context, options)
    h, x = add_and_norm(self.norm3, h, x)
    return _feed_forward(self.ff, h, x)


def _attend(attn: Any, x: torch.Tensor, context: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    known = is_our_override(options.get("optimized_attention_override"))
    if not known or not untouched(attn, attn.to_out) or not idle(attn.to_out[1]):
        stock: torch.Tensor = attn(x, context=context, transformer_options=options)
        return stock
    source = x if context is None else context
    layers = ((attn.to_q, x), (attn.to_k, source), (attn.to_v, source))
    q, k, v = (_heads(linear(layer, given), attn.heads) for layer, given in layers)
    return linear(attn.to_out[0], attention(q, k, v).flatten(2))


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(*x.shape[:2], heads, -1)


def _feed_forward(ff: Any, h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    gate, dropout, out = ff.net
    projection = gate.proj
    if not (untouched(ff, ff.net, gate) and idle(dropout) and is_plain(projection, h)):
        y: torch.Tensor = ff(h)
        return residual + y
    return linear(out, linear_geglu(h, projection.weight, projection.bias), residual)


RULES: tuple[BlockRule, ...] = (
    BlockRule(
        "spatial_transformer",
        "GroupNorm, projections and residual on the channels-last map as it lies, without permutes",
        lambda _path, module: is_comfy(type(module), "SpatialTransformer", _ATTENTION),
        _spatial_why_not,
        _spatial,
    ),
    BlockRule(
        "transformer",
        "residual adds inside norms and epilogues, GEGLU in one op; in recorded steps",
        lambda _path, module: is_comfy(type(module), "BasicTransformerBlock", _ATTENTION),
        _block_why_not,
        _block,
    ),
)
