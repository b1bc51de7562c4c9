"""Transformer block of SD3 and 3.5, and the pieces that it shares with Flux: packed QKV for picture and text, attention
without transposes, norm with scale and shift in one or two passes, gated residuals in one.

Each piece (a norm, an attention, a feed-forward) asks at every call whether it is what it stands for; where it is not,
the piece itself is called, as stock does. Every sum of a product is rounded once, where stock rounds twice.
"""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import attention, linear_residual
from rocm_sd.ops.layouts import has_gaps
from rocm_sd.ops.linear_residual.packing import split_columns
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import is_diffusers, of_diffusers, of_kind
from rocm_sd.rewrite.layers import idle, is_plain, untouched
from rocm_sd.rewrite.packing import packed_linear, unpack
from rocm_sd.rewrite.transformer import stock_processor

__all__ = [
    "RULE", "computes_attention", "feed_forward", "feed_forward_why_not", "gated", "known_call",
    "linear", "modulated", "norm_zero", "project",
]  # fmt: skip

_KIND = "JointTransformerBlock"
_DISPATCH = "diffusers.models.attention_dispatch"
# The second is this project's own, which calls the same op.
_BACKENDS = ("native", "rocm_sd")
# In float64 stock's own norms and rotations are float32: references stay stock's.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _why_not(module: Any) -> str | None:
    for name, attn in (("attn", module.attn), ("attn2", module.attn2)):
        if attn is not None and not is_diffusers(attn, "Attention"):
            return f"{name} is a {type(attn).__name__}"
        if attn is not None and attn.inner_kv_dim != attn.inner_dim:
            return f"{name} has fewer key heads than query heads"
        if attn is not None and (attn.to_out is None or len(attn.to_out) != 2):
            return f"{name} has another output projection than a linear and a dropout"
    return feed_forward_why_not(module.ff)


def feed_forward_why_not(ff: Any) -> str | None:
    if is_diffusers(ff, "FeedForward") and is_diffusers(ff.net[0], "GELU"):
        return None
    kind = f" with {type(ff.net[0]).__name__}" if is_diffusers(ff, "FeedForward") else ""
    return f"its feed-forward is {type(ff).__name__}{kind}, not one with GELU"


# Named as the method that it stands in for: pickle looks a bound method up by that name, and finds the class's own.
def forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    x, text = hidden_states, encoder_hidden_states
    if self._chunk_size is not None or joint_attention_kwargs or not known_call(x, text, temb):
        return NotImplemented
    if self.use_dual_attention:
        h, gate, shift, scale, mlp_gate, h2, gate2 = _norm_zero_twice(self.norm1, x, temb)
    else:
        h, gate, shift, scale, mlp_gate = norm_zero(self.norm1, x, temb)
    if self.context_pre_only:
        known_text = _norm_continuous(self.norm1_context, text, temb)
        h, _ = _attend_jointly(self.attn, h, known_text)
    else:
        known_text, text_gate, text_shift, text_scale, text_mlp_gate = norm_zero(self.norm1_context, text, temb)
        h, text_h = _attend_jointly(self.attn, h, known_text)
    x = gated(x, gate, h)
    if self.use_dual_attention:
        x = gated(x, gate2, _attend(self.attn2, h2))
    x = gated(x, mlp_gate, feed_forward(self.ff, modulated(self.norm2, x, scale, shift)))
    if self.context_pre_only:
        return None, x
    text = gated(text, text_gate, text_h)
    h = modulated(self.norm2_context, text, text_scale, text_shift)
    return gated(text, text_mlp_gate, feed_forward(self.ff_context, h)), x


def known_call(x: torch.Tensor, text: torch.Tensor, temb: torch.Tensor) -> bool:
    """Whether the pieces are for a call of a block with these; otherwise the block is stock's as a whole.

    Where gradients may be wanted, pieces that write into memory of others cannot be used. A compiler fuses stock's own
    steps, and chooses their order itself. Autocast gives each step of stock a dtype of its own.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if x.dtype not in _DTYPES or x.device.type == "meta" or torch.is_autocast_enabled(x.device.type):
        return False
    if (x.dim(), text.dim(), temb.dim()) != (3, 3, 2) or not (x.numel() and text.numel()):
        return False
    return all(type(t) is torch.Tensor and t.dtype == x.dtype and t.device == x.device for t in (x, text, temb))


def norm_zero(ada: Any, x: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(y, gate, shift, scale, gate): y for the attention, the others for what comes after it."""
    if not (is_diffusers(ada, "AdaLayerNormZero") and ada.emb is None and untouched(ada)):
        stock: tuple[torch.Tensor, ...] = ada(x, emb=temb)
        return stock
    shift, scale, *rest = ada.linear(ada.silu(temb)).chunk(6, dim=1)
    return modulated(ada.norm, x, scale, shift), *rest


def _norm_zero_twice(ada: Any, x: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not (is_diffusers(ada, "SD35AdaLayerNormZeroX") and untouched(ada)):
        stock: tuple[torch.Tensor, ...] = ada(x, emb=temb)
        return stock
    shift, scale, gate, *mlp, shift2, scale2, gate2 = ada.linear(ada.silu(temb)).chunk(9, dim=1)
    y, y2 = _modulated(ada.norm, x, (scale, shift), (scale2, shift2))
    return y, gate, *mlp, y2, gate2


def _norm_continuous(ada: Any, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
    if not (is_diffusers(ada, "AdaLayerNormContinuous") and untouched(ada)):
        stock: torch.Tensor = ada(x, temb)
        return stock
    scale, shift = ada.linear(ada.silu(temb)).chunk(2, dim=1)
    return modulated(ada.norm, x, scale, shift)


def modulated(norm: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift; x: [B, S, C]; scale, shift: [B, C]."""
    (y,) = _modulated(norm, x, (scale, shift))
    return y


def _modulated(norm: Any, x: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    plain = type(norm) is nn.LayerNorm and not norm.elementwise_affine and untouched(norm)
    if not plain or any(t.dtype != x.dtype for pair in pairs for t in pair):
        y = norm(x)
        return [y * (1 + scale[:, None]) + shift[:, None] for scale, shift in pairs]
    # One sample's scale and shift are a weight and a bias: one pass over the tokens, where stock needs three.
    if all(len(scale) == 1 for scale, _ in pairs):
        return [F.layer_norm(x, norm.normalized_shape, (1 + s)[0], shift[0], norm.eps) for s, shift in pairs]
    y = F.layer_norm(x, norm.normalized_shape, None, None, norm.eps)
    return [torch.addcmul(shift[:, None], y, 1 + scale[:, None]) for scale, shift in pairs]


def gated(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + gate * y; x, y: [B, S, C]; gate: [B, C]."""
    # Stock promotes, where a processor of the user's own answers in another dtype.
    if x.dtype == gate.dtype == y.dtype:
        return torch.addcmul(x, gate[:, None], y)
    return x + gate[:, None] * y


def feed_forward(ff: Any, h: torch.Tensor) -> torch.Tensor:
    if is_diffusers(ff, "FeedForward") and len(ff.net) == 3 and untouched(ff):
        gelu, dropout, out = ff.net
        if is_diffusers(gelu, "GELU") and untouched(gelu) and idle(dropout):
            return linear(out, F.gelu(linear(gelu.proj, h), approximate=gelu.approximate))
    y: torch.Tensor = ff(h)
    return y


def computes_attention(attn: Any, processor_kind: str) -> bool:
    """Whether calling this attention is the plain softmax(q k^T) v of that processor, now."""
    processor = attn.processor
    kind = stock_processor(processor)
    if kind.__name__ != processor_kind or not kind.__module__.startswith("diffusers.") or not untouched(attn):
        return False
    # A backend or a parallel split that the user has chosen is the processor's business.
    if getattr(processor, "_parallel_config", None):
        return False
    registry = getattr(sys.modules.get(_DISPATCH), "_AttentionBackendRegistry", None)
    backend = getattr(processor, "_attention_backend", None) or getattr(registry, "_active_backend", "native")
    return getattr(backend, "value", backend) in _BACKENDS


def _attend_jointly(attn: Any, x: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, dropout = attn.to_out
    if not (computes_attention(attn, "JointAttnProcessor2_0") and idle(dropout)):
        stock: tuple[torch.Tensor, torch.Tensor] = attn(hidden_states=x, encoder_hidden_states=text)
        return stock
    picture = _heads(x, attn.heads, (attn.to_q, attn.to_k, attn.to_v), attn.norm_q, attn.norm_k)
    added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    words = _heads(text, attn.heads, added, attn.norm_added_q, attn.norm_added_k)
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(picture, words, strict=True))
    mixed = attention(q, k, v).flatten(2)
    tokens = x.shape[1]
    text_out = mixed[:, tokens:]
    if not attn.context_pre_only:
        text_out = linear(attn.to_add_out, text_out)
    return linear(out, mixed[:, :tokens]), text_out


def _attend(attn: Any, x: torch.Tensor) -> torch.Tensor:
    out, dropout = attn.to_out
    if not (computes_attention(attn, "JointAttnProcessor2_0") and idle(dropout)):
        stock: torch.Tensor = attn(hidden_states=x)
        return stock
    q, k, v = _heads(x, attn.heads, (attn.to_q, attn.to_k, attn.to_v), attn.norm_q, attn.norm_k)
    return linear(out, attention(q, k, v).flatten(2))


def _heads(x: torch.Tensor, heads: int, layers: tuple[Any, ...], norm_q: Any, norm_k: Any) -> Heads:
    q, k, v = (y.view(*y.shape[:-1], heads, -1) for y in project(x, *layers))
    return _head_norm(norm_q, q), _head_norm(norm_k, k), v


def _head_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """norm(x) over the columns of each head; x: [B, S, H, D]."""
    if norm is None:
        return x
    # Stock's is eight steps in Python, in float32 as well; torch has one kernel for it on GPUs.
    if is_diffusers(norm, "RMSNorm") and norm.bias is None and untouched(norm):
        weight = norm.weight
        if weight is None or of_kind(weight, x):
            return F.rms_norm(x, tuple(norm.dim), weight, norm.eps)
    # A norm that is not known is shown [B, H, S, D], as stock does.
    y: torch.Tensor = norm(x.transpose(1, 2))
    return y.transpose(1, 2)


def project(x: torch.Tensor, *layers: Any) -> list[torch.Tensor]:
    """What each layer makes of x, by one product where the weights of neighbours in the list can be read as one."""
    found: list[torch.Tensor] = []
    for plain, group in groupby(layers, key=lambda layer: _is_product(layer, x)):
        these = list(group)
        packed = packed_linear(*these) if plain and len(these) > 1 else None
        if packed is None:
            found += [linear(layer, x) for layer in these]
        else:
            found += split_columns(linear_residual(x, *packed), *(layer.weight.shape[0] for layer in these))
    return found


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if _is_product(layer, x):
        # Samples with gaps between them are for the op to read as they lie, or to copy.
        return linear_residual(x if has_gaps(x) else x.contiguous(), layer.weight, layer.bias)
    y: torch.Tensor = layer(x)
    return y


def _is_product(layer: Any, x: torch.Tensor) -> bool:
    return type(layer) is nn.Linear and is_plain(layer) and of_kind(layer.weight, x)


RULE = Rule(
    name="joint_transformer",
    summary="packed QKV of picture and text, norms with scale and shift, gated residuals",
    channels_last=False,
    of_kind=of_diffusers(_KIND),
    why_not=_why_not,
    forward=forward,
    undo=unpack,
    for_graphs=True,
)
