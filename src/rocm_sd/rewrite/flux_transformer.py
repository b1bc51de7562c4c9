"""Transformer blocks of Flux: two streams (picture and text) at first, then one of both.

As SD3's block, with queries and keys rotated in three passes, straight to their place among the joint tokens. A block
of one stream projects QKV and its feed-forward at once, and reads the tokens of the block before it where they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.ops import attention
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import is_diffusers, of_diffusers
from rocm_sd.rewrite.joint_transformer import (
    computes_attention,
    feed_forward,
    feed_forward_why_not,
    gated,
    known_call,
    linear,
    modulated,
    norm_zero,
    project,
)
from rocm_sd.rewrite.layers import idle, untouched
from rocm_sd.rewrite.packing import unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RULE", "SINGLE"]

_KIND = "FluxTransformerBlock"
_SINGLE_KIND = "FluxSingleTransformerBlock"
# The largest value of float16, at which stock clips.
_LARGEST = 65504

Rotary = tuple[torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _why_not(module: Any) -> str | None:
    if not is_diffusers(module.attn, "FluxAttention"):
        return f"its attention is a {type(module.attn).__name__}"
    if type(module).__name__ == _SINGLE_KIND:
        return None
    return feed_forward_why_not(module.ff) or feed_forward_why_not(module.ff_context)


# Named as the method that it stands in for: pickle looks a bound method up by that name, and finds the class's own.
def forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    x, text = hidden_states, encoder_hidden_states
    if joint_attention_kwargs or not known_call(x, text, temb):
        return NotImplemented
    h, gate, shift, scale, mlp_gate = norm_zero(self.norm1, x, temb)
    text_h, text_gate, text_shift, text_scale, text_mlp_gate = norm_zero(self.norm1_context, text, temb)
    # An adapter's processor answers with a third tensor, to be added at the end.
    h, text_h, *more = _attend_jointly(self.attn, h, text_h, image_rotary_emb)
    x = gated(x, gate, h)
    x = gated(x, mlp_gate, feed_forward(self.ff, modulated(self.norm2, x, scale, shift)))
    for one in more:
        x = x + one
    text = gated(text, text_gate, text_h)
    h = modulated(self.norm2_context, text, text_scale, text_shift)
    return _clipped(gated(text, text_mlp_gate, feed_forward(self.ff_context, h))), x


def _single_forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    x, text = hidden_states, encoder_hidden_states
    if joint_attention_kwargs or not known_call(x, text, temb):
        return NotImplemented
    tokens = _one_after_the_other(text, x)
    h, gate = _norm_zero_single(self.norm, tokens, temb)
    attn = self.attn
    if _computes(attn, tokens, image_rotary_emb):
        q, k, v, wide = project(h, attn.to_q, attn.to_k, attn.to_v, self.proj_mlp)
        mixed = _mix([_heads(attn.head_dim, (q, k, v), attn.norm_q, attn.norm_k)], image_rotary_emb)
    else:
        mixed = attn(hidden_states=h, image_rotary_emb=image_rotary_emb)
        wide = linear(self.proj_mlp, h)
    both = _beside_gelu(mixed, self.act_mlp, wide)
    tokens = _clipped(gated(tokens, gate, linear(self.proj_out, both)))
    return tokens[:, : text.shape[1]], tokens[:, text.shape[1] :]


def _norm_zero_single(ada: Any, x: torch.Tensor, temb: torch.Tensor) -> Pair:
    if not (is_diffusers(ada, "AdaLayerNormZeroSingle") and untouched(ada)):
        stock: Pair = ada(x, emb=temb)
        return stock
    shift, scale, gate = ada.linear(ada.silu(temb)).chunk(3, dim=1)
    return modulated(ada.norm, x, scale, shift), gate


def _one_after_the_other(text: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[text; x] along the tokens: a view where the block before has left them so, as all but the first find them."""
    B, T, C = text.shape
    if (
        (x.shape[0], x.shape[2], x.stride()) == (B, C, text.stride())
        and x.storage_offset() == text.storage_offset() + T * text.stride(1)
        and x.untyped_storage().data_ptr() == text.untyped_storage().data_ptr()
    ):
        return text.as_strided((B, T + x.shape[1], C), text.stride(), text.storage_offset())
    return torch.cat([text, x], dim=1)


def _beside_gelu(mixed: torch.Tensor, act: Any, wide: torch.Tensor) -> torch.Tensor:
    """[mixed, act(wide)] along the columns."""
    if not (
        type(act) is nn.GELU and untouched(act) and mixed.dtype == wide.dtype and mixed.shape[:2] == wide.shape[:2]
    ):
        return torch.cat([mixed, act(wide)], dim=2)
    C = mixed.shape[2]
    both = wide.new_empty((*wide.shape[:2], C + wide.shape[2]))
    both[..., :C] = mixed
    # Written to its place: of the five parts, the four of the feed-forward are not copied again.
    torch.ops.aten.gelu.out(wide, approximate=act.approximate, out=both[..., C:])
    return both


def _attend_jointly(attn: Any, x: torch.Tensor, text: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, ...]:
    out, dropout = attn.to_out
    words, tokens = text.shape[1], text.shape[1] + x.shape[1]
    if not (_computes(attn, x, rotary, tokens) and attn.added_kv_proj_dim is not None and idle(dropout)):
        stock: tuple[torch.Tensor, ...] = attn(hidden_states=x, encoder_hidden_states=text, image_rotary_emb=rotary)
        return stock
    added = project(text, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    own = project(x, attn.to_q, attn.to_k, attn.to_v)
    mixed = _mix(
        [
            _heads(attn.head_dim, added, attn.norm_added_q, attn.norm_added_k),
            _heads(attn.head_dim, own, attn.norm_q, attn.norm_k),
        ],
        rotary,
    )
    return linear(out, mixed[:, words:]), linear(attn.to_add_out, mixed[:, :words])


def _computes(attn: Any, x: torch.Tensor, rotary: Any, tokens: int | None = None) -> bool:
    if attn.fused_projections or not computes_attention(attn, "FluxAttnProcessor"):
        return False
    if rotary is None:
        return True
    size = (x.shape[1] if tokens is None else tokens, attn.head_dim)
    return len(rotary) == 2 and all(
        type(t) is torch.Tensor and t.shape == size and t.dtype == torch.float32 and t.device == x.device
        for t in rotary
    )


def _heads(size: int, qkv: Sequence[torch.Tensor], norm_q: Any, norm_k: Any) -> Heads:
    q, k, v = (y.view(*y.shape[:-1], -1, size) for y in qkv)
    return norm_q(q), norm_k(k), v


def _mix(streams: Sequence[Heads], rotary: Rotary | None) -> torch.Tensor:
    """Attention of the tokens of all streams, one stream after the other, to each other: [B, S, H * D]."""
    queries, keys, values = zip(*streams, strict=True)
    v = values[0] if len(values) == 1 else torch.cat(values, dim=1)
    if rotary is None:
        q, k = (torch.cat(parts, dim=1) for parts in (queries, keys))
    else:
        cos, sin = rotary
        # (a, b) becomes (a cos - b sin, b cos + a sin): sine carries the sign, so that the pair need only be swapped.
        signed = torch.stack([-sin[:, 0::2], sin[:, 1::2]], dim=-1).flatten(1)
        q, k = (_rotated(parts, cos, signed) for parts in (queries, keys))
    return attention(q, k, v).flatten(2)


def _rotated(parts: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + swapped(x) * sin in float32, x: the parts one after the other, [B, S, H, D]; cos, sin: [S, D].

    Three passes over x; stock takes eight, most of them in float32, and copies the parts together before.
    """
    first = parts[0]
    B, _, H, D = first.shape
    out = first.new_empty((B, len(cos), H, D))
    start = 0
    for x in parts:
        rows = slice(start, start + x.shape[1])
        start = rows.stop
        swapped = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        # `out` is rounded to as the sum is stored.
        torch.addcmul(x * cos[rows, None], swapped, sin[rows, None], out=out[:, rows])
    return out


def _clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clip(-_LARGEST, _LARGEST) if x.dtype == torch.float16 else x


RULE = Rule(
    name="flux_transformer",
    summary="packed QKV of picture and text, short rotation, norms with scale and shift, gated residuals",
    channels_last=False,
    of_kind=of_diffusers(_KIND),
    why_not=_why_not,
    forward=forward,
    undo=unpack,
    for_graphs=True,
)

SINGLE = Rule(
    name="flux_single_transformer",
    summary="QKV and feed-forward in one product, short rotation, no copies between blocks",
    channels_last=False,
    of_kind=of_diffusers(_SINGLE_KIND),
    why_not=_why_not,
    forward=_single_forward,
    undo=unpack,
    for_graphs=True,
)
