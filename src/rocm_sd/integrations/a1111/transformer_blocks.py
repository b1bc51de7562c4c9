"""SpatialTransformer and BasicTransformerBlock of ldm and sgm: packed QKV, adds inside norms and last linears, no
permutes. They do their work in calls that are recorded as a whole, and leave all others to the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rocm_sd.integrations.a1111.class_forwards import is_usual
from rocm_sd.integrations.a1111.guarding import STOCK, guarded
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.plain_layers import (
    all_plain,
    attend,
    idle,
    is_of,
    linear,
    norm_silu,
    project,
    to_map,
    to_tokens,
)
from rocm_sd.ops import layer_norm_residual, linear_geglu
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.layers import untouched
from rocm_sd.rewrite.packing import unpack

__all__ = ["RULES"]


def _block_why_not(module: Any) -> str | None:
    for name in ("attn1", "attn2"):
        attn = getattr(module, name, None)
        if not hasattr(attn, "to_q") or len(getattr(attn, "to_out", ())) != 2:
            return f"its {name} is a {type(attn).__name__}"
    if len(module.ff.net) != 3 or not hasattr(module.ff.net[0], "proj"):
        return "its feed-forward is not GEGLU"
    return None


@guarded("The UNet's transformer block", lambda block: block.norm1.weight)
def _block(self: Any, x: torch.Tensor, context: torch.Tensor | None = None, **more: Any) -> Any:
    attn1, attn2, norms = self.attn1, self.attn2, (self.norm1, self.norm2, self.norm3)
    if more or not PERMISSION.whole or not PERMISSION.attention or x.dim() != 3:
        return STOCK
    if not (_is_plain(attn1, x) and _is_plain(attn2, x) and _is_geglu(self.ff, x) and all_plain(x, *norms)):
        return STOCK
    # Autocast would bring text of another dtype to this one.
    text = None if context is None else context.to(x.dtype)
    h, _ = _normed(self.norm1, x, None)
    h = _attention(attn1, h, text if self.disable_self_attn else None)
    h, x = _normed(self.norm2, h, x)
    h = _attention(attn2, h, text)
    h, x = _normed(self.norm3, h, x)
    gate, _, out = self.ff.net
    return linear(out, linear_geglu(h, gate.proj.weight, gate.proj.bias), x)


def _is_plain(attn: Any, x: torch.Tensor) -> bool:
    out, dropout = attn.to_out
    if not (untouched(attn, attn.to_out) and is_usual(attn) and idle(dropout)):
        return False
    return all_plain(x, attn.to_q, attn.to_k, attn.to_v, out)


def _is_geglu(ff: Any, x: torch.Tensor) -> bool:
    gate, dropout, out = ff.net
    return untouched(ff, ff.net, gate) and is_usual(gate) and idle(dropout) and all_plain(x, gate.proj, out)


def _normed(norm: nn.LayerNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return layer_norm_residual(x, residual, norm.weight, norm.bias, norm.eps)


def _attention(attn: Any, x: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
    heads = attn.heads
    if text is None:
        q, k, v = project(x, heads, attn.to_q, attn.to_k, attn.to_v)
    else:
        (q,) = project(x, heads, attn.to_q)
        k, v = project(text, heads, attn.to_k, attn.to_v)
    return attend(q, k, v, getattr(attn, "scale", None), attn.to_out[0], None)


def _spatial_why_not(module: Any) -> str | None:
    for name in ("proj_in", "proj_out"):
        layer = getattr(module, name)
        if isinstance(layer, nn.Conv2d) and (layer.kernel_size, layer.stride, layer.padding, layer.groups) != (
            (1, 1),
            (1, 1),
            (0, 0),
            1,
        ):
            return f"its {name} is a convolution of more than a point"
    return None


@guarded("The UNet's spatial transformer", lambda module: module.norm.weight)
def _spatial(self: Any, x: torch.Tensor, context: Any = None) -> Any:
    if not PERMISSION.whole or x.dim() != 4 or isinstance(context, list):
        return STOCK
    # The host's own has one text for each of its blocks: with one text for several it says so itself.
    if type(self).__module__.startswith("ldm") and len(self.transformer_blocks) != 1:
        return STOCK
    if not all_plain(x, self.norm, self.proj_in, self.proj_out):
        return STOCK
    tokens = linear(self.proj_in, to_tokens(norm_silu(self.norm, x, silu=False)))
    for block in self.transformer_blocks:
        tokens = block(tokens, context=context)
    return to_map(linear(self.proj_out, tokens, to_tokens(x)), x)


RULES = (
    Rule("spatial_transformer", "GroupNorm, projections and residual on the picture as it lies", True,
         lambda module: is_of(module, "SpatialTransformer"), _spatial_why_not, _spatial),
    Rule("transformer", "packed QKV and text KV, adds inside the norms, GEGLU", False,
         lambda module: is_of(module, "BasicTransformerBlock"), _block_why_not, _block, undo=unpack),
)  # fmt: skip
