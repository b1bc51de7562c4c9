"""Transformer block of a UNet: packed QKV and text KV, residual adds inside the norms and the last linear's epilogue,
the feed-forward's first linear and GEGLU as one op.

Each piece (an attention, a norm, the feed-forward) asks at every call whether it is what the ops compute; where it is
not, the piece itself is called, as stock does. A block whose pieces all are is one op where that is measured as faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.ops import (
    OPS,
    attention,
    geglu,
    geglu_8bit,
    layer_norm_8bit,
    layer_norm_residual,
    linear_geglu,
    linear_residual,
    transformer_block,
)
from rocm_sd.ops.transformer_block.workload import problem_of
from rocm_sd.rewrite import conditioning, eight_bits
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import of_diffusers
from rocm_sd.rewrite.layers import idle, is_layer_norm, is_plain, untouched, weight_and_bias
from rocm_sd.rewrite.packing import packed_linear, unpack
from rocm_sd.rewrite.tokens import projected

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "RULE", "chain", "has_stock_processor", "hoistable", "keys_values", "one_dtype", "self_attention",
    "stock_processor",
]  # fmt: skip

# Of one token each; where a layer in 8 bits comes next, as it takes them.
Tokens = torch.Tensor | eight_bits.Rounded
Rounding = tuple[torch.Tensor | None, str] | None
_KIND = "BasicTransformerBlock"
_PROCESSORS = "diffusers.models.attention_processor"
_NORMS = ("norm1", "norm2", "norm3")


def _why_not(module: Any) -> str | None:
    if module.norm_type != "layer_norm":
        return f"its norms are {module.norm_type}, not layer_norm"
    if module.pos_embed is not None:
        return "it adds positional embeddings between norm and attention"
    if type(module.ff).__name__ != "FeedForward" or type(module.ff.net[0]).__name__ != "GEGLU":
        return f"its feed-forward is {type(module.ff).__name__} with {module.activation_fn}, not GEGLU"
    for name, attn in (("attn1", module.attn1), ("attn2", module.attn2)):
        reason = None if attn is None else _attention_why_not(attn)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _attention_why_not(attn: Any) -> str | None:
    if type(attn).__name__ != "Attention" or not type(attn).__module__.startswith("diffusers."):
        return f"is a {type(attn).__name__}"
    for more in ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "added_kv_proj_dim"):
        if getattr(attn, more) is not None:
            return f"has {more}"
    if attn.inner_kv_dim != attn.inner_dim:
        return "has fewer key heads than query heads"
    if attn.to_out is None or len(attn.to_out) != 2:
        return "has another output projection than a linear and a dropout"
    if attn.residual_connection or attn.rescale_output_factor != 1:
        return "adds a residual or rescales its output itself"
    return None


# Named as the method that it stands in for: pickle looks a bound method up by that name, and finds the class's own.
def forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,  # noqa: ARG001 -- stock's signature
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: torch.Tensor | None = None,  # noqa: ARG001
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,  # noqa: ARG001
) -> Any:
    x, text = hidden_states, encoder_hidden_states
    if cross_attention_kwargs or not _known(self, x):
        return NotImplemented
    whole = None
    if attention_mask is None and encoder_attention_mask is None:
        whole = _as_one_op(self, None, x, text)
    if whole is not None:
        return whole
    h, x = _before_feed_forward(self, None, x, text, attention_mask, encoder_attention_mask)
    return _feed_forward(self.ff, h, x)


def chain(blocks: Iterable[Any], x: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor | None:
    """Block after block, each one's last residual added in the next one's first norm; None where one is not plain."""
    every = list(blocks)
    if not every or not all(RULE.works_alone(block) and _known(block, x) for block in every):
        return None
    pending = None
    for block in every:
        whole = _as_one_op(block, pending, x, text)
        if whole is not None:
            pending, x = None, whole
            continue
        h, x = _before_feed_forward(block, pending, x, text, None, None)
        if block is every[-1]:
            return _feed_forward(block.ff, h, x)
        pending = _feed_forward(block.ff, h, None)
    return x


def _known(block: Any, x: torch.Tensor) -> bool:
    return block._chunk_size is None and x.dim() == 3 and one_dtype(x)  # noqa: SLF001


def _as_one_op(
    block: Any, pending: torch.Tensor | None, x: torch.Tensor, text: torch.Tensor | None
) -> torch.Tensor | None:
    """The block of the tokens x, or pending + x, by `transformer_block`; None where its steps are to run one by one.

    They are where the op chooses stock, which is these steps; where a gradient may be wanted, which each has by itself;
    and where one of them is not what the op computes.
    """
    # What an op chooses cannot be asked for while it is traced.
    if block.attn2 is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    # An IP-Adapter gives the text and its pictures, in a tuple.
    if not isinstance(text, torch.Tensor):
        return None
    attn, attn2, (gate, _, ff, *_) = block.attn1, block.attn2, block.ff.net
    asked = problem_of(x, text.shape[1], attn2.heads, getattr(ff, "in_features", 0))
    if OPS["transformer_block"].choose(asked, x.device).is_stock or not _all_plain(block):
        return None
    packed = packed_linear(attn.to_q, attn.to_k, attn.to_v)
    if packed is None:
        return None
    one, two, three = (getattr(block, name) for name in _NORMS)
    (out, _), (out2, _) = attn.to_out, attn2.to_out
    keys, values = conditioning.keys_values(attn2) or keys_values(attn2, text)
    return transformer_block(
        x if pending is None else pending + x, keys, values,
        one.weight, one.bias, packed[0], out.weight, out.bias,
        two.weight, two.bias, attn2.to_q.weight, out2.weight, out2.bias,
        three.weight, three.bias, gate.proj.weight, gate.proj.bias, ff.weight, ff.bias, one.eps,
    )  # fmt: skip


def _all_plain(block: Any) -> bool:
    """Whether the block is what `transformer_block` computes, now: no masks, no LoRA, biases where the op has them."""
    (gate, dropout, ff, *last), attentions = block.ff.net, (block.attn1, block.attn2)
    (out, dropout1), (out2, dropout2) = (attn.to_out for attn in attentions)
    norms = [getattr(block, name) for name in _NORMS]
    biased = (out, out2, gate.proj, ff)
    bare = [layer for attn in attentions for layer in (attn.to_q, attn.to_k, attn.to_v)]
    return (
        not block.only_cross_attention
        and all(_is_default(attn) and _scale(attn) is None and attn.heads == block.attn1.heads for attn in attentions)
        and all(is_layer_norm(norm) and norm.bias is not None and norm.eps == norms[0].eps for norm in norms)
        and untouched(*attentions, block.ff, gate)
        and idle(dropout, dropout1, dropout2, *last)
        and all(is_plain(layer) and layer.bias is not None for layer in biased)
        and all(is_plain(layer) and layer.bias is None for layer in bare)
    )


def _scale(attn: Any) -> float | None:
    """What scores are multiplied by; None for what all heads of this size are. The default processor reads none."""
    own: float = attn.scale
    is_read = type(attn.processor).__name__ == "AttnProcessor" and own != (attn.inner_dim // attn.heads) ** -0.5
    return own if is_read else None


def _before_feed_forward(
    block: Any,
    pending: torch.Tensor | None,
    x: torch.Tensor,
    text: torch.Tensor | None,
    mask: torch.Tensor | None,
    text_mask: torch.Tensor | None,
) -> tuple[Tokens, torch.Tensor]:
    """Of the tokens x, or pending + x: what the feed-forward takes, and the residual that is added to its result."""
    own = text if block.only_cross_attention else None
    rounding = _rounding(block.attn1, own, mask)
    if pending is None:
        h = _norm(block.norm1, x, rounding)
    else:
        h, x = _add_and_norm(block.norm1, pending, x, rounding)
    attended = _attend(block.attn1, h, own, mask)
    if block.attn2 is not None:
        h, x = _add_and_norm(block.norm2, attended, x, _rounding(block.attn2, text, text_mask))
        attended = _attend(block.attn2, h, text, text_mask)
    gate = block.ff.net[0]
    return _add_and_norm(block.norm3, attended, x, eight_bits.rounding(gate.proj) if _is_idle(block.ff) else None)


def keys_values(attn: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, H, D] of the text, as an attention that `hoistable` says yes to reads them."""
    k, v = _project(text, attn.heads, attn.to_k, attn.to_v)
    return k, v


def hoistable(block: nn.Module) -> nn.Module | None:
    """The block's attention to the text, where its keys and values depend on nothing but the text, now."""
    attn: nn.Module | None = getattr(block, "attn2", None)
    if attn is None or not RULE.works_alone(block) or not (_is_default(attn) and untouched(attn)):
        return None
    return attn


def _by_ops(attn: Any, mask: torch.Tensor | None) -> bool:
    """Whether the attention's steps are those of the ops, now."""
    return mask is None and _is_default(attn) and untouched(attn) and idle(attn.to_out[1])


def _rounding(attn: Any, text: torch.Tensor | None, mask: torch.Tensor | None) -> Rounding:
    """How the norm before an attention is to round what it gives; keys and values of a text have their own input."""
    if not _by_ops(attn, mask):
        return None
    return eight_bits.rounding(attn.to_q, *((attn.to_k, attn.to_v) if text is None else ()))


def _attend(attn: Any, x: Tokens, text: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    out = attn.to_out[0]
    if not _by_ops(attn, mask):
        stock: torch.Tensor = attn(x, encoder_hidden_states=text, attention_mask=mask)
        return stock
    to_q, to_k, to_v, heads = attn.to_q, attn.to_k, attn.to_v, attn.heads
    if text is None:
        q, k, v = _project(x, heads, to_q, to_k, to_v)
    else:
        (q,) = _project(x, heads, to_q)
        k, v = conditioning.keys_values(attn) or keys_values(attn, text)
    return _linear(out, attention(q, k, v, _scale(attn)).flatten(2))


def self_attention(block: Any, x: torch.Tensor) -> torch.Tensor | None:
    """What the block's attention makes of tokens, for a stand-in around it: one that `untouched` would see. None where
    the rule would leave them to the attention itself.
    """
    attn = block.attn1
    out, dropout = attn.to_out
    known = RULE.works_alone(block) and _known(block, x) and not block.only_cross_attention
    if not known or not (_is_default(attn) and idle(dropout)):
        return None
    q, k, v = _project(x, attn.heads, attn.to_q, attn.to_k, attn.to_v)
    return _linear(out, attention(q, k, v, _scale(attn)).flatten(2))


def has_stock_processor(attn: Any) -> bool:
    """Whether it is computed as Diffusers' own default processors do, in either dtype for the scores."""
    processor = stock_processor(attn.processor)
    return processor.__module__ == _PROCESSORS and processor.__name__ in {"AttnProcessor2_0", "AttnProcessor"}


def stock_processor(processor: object) -> type:
    """The processor's class, or the one of Diffusers that it says it stands in for."""
    kind = type(processor)
    # Said by the class itself: a class of somebody else's that is derived from it may compute something else.
    stands_in_for: type = vars(kind).get("stands_in_for", kind)
    return stands_in_for


def _is_default(attn: Any) -> bool:
    processor = stock_processor(attn.processor)
    if processor.__module__ != _PROCESSORS:
        return False
    # The first reads neither `scale` nor the flags that ask for scores in float32.
    return processor.__name__ == "AttnProcessor2_0" or (
        processor.__name__ == "AttnProcessor" and not (attn.upcast_attention or attn.upcast_softmax)
    )


def _project(x: Tokens, heads: int, *layers: Any) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] of each layer, by one product where their weights can be read as one."""
    if all(eight_bits.is_eight_bit(layer) for layer in layers):
        return eight_bits.projected(x, heads, *layers)
    assert isinstance(x, torch.Tensor)
    if all(is_plain(layer) for layer in layers):
        return projected(x, heads, *layers)
    columns = [_linear(layer, x) for layer in layers]
    return tuple(y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads) for y in columns)


def _norm(norm: nn.LayerNorm, x: torch.Tensor, rounding: Rounding) -> Tokens:
    if is_layer_norm(norm):
        return _normed(norm, x, None, rounding)[0]
    y: torch.Tensor = norm(x)
    return y


def _add_and_norm(
    norm: nn.LayerNorm, h: torch.Tensor, x: torch.Tensor, rounding: Rounding
) -> tuple[Tokens, torch.Tensor]:
    # A processor of the user's own may answer in another dtype.
    if is_layer_norm(norm) and h.dtype == x.dtype and h.shape == x.shape:
        return _normed(norm, h, x, rounding)
    total = h + x
    return norm(total), total


def _normed(
    norm: nn.LayerNorm, x: torch.Tensor, residual: torch.Tensor | None, rounding: Rounding
) -> tuple[Tokens, torch.Tensor]:
    if rounding is None:
        return layer_norm_residual(x, residual, *weight_and_bias(norm), norm.eps)
    scale, to = rounding
    if scale is None:
        q, scales, total = layer_norm_8bit(x, residual, *weight_and_bias(norm), norm.eps, to)
        return eight_bits.Rounded(q, scales, x.dtype), total
    y, total = layer_norm_residual(x, residual, *weight_and_bias(norm), norm.eps, scale.view(1), to)
    return eight_bits.Rounded(y, scale, x.dtype), total


def _is_idle(ff: Any) -> bool:
    """Whether a feed-forward is its two linears and the gate, now."""
    gate, dropout, _, *last = ff.net
    return untouched(ff, gate) and idle(dropout, *last)


def _feed_forward(ff: Any, h: Tokens, residual: torch.Tensor | None) -> torch.Tensor:
    gate, _, out, *_ = ff.net
    if not _is_idle(ff):
        stock: torch.Tensor = ff(h)
        return stock if residual is None else stock + residual
    return _linear(out, _gated(gate.proj, out, h), residual)


def _gated(projection: Any, out: Any, h: Tokens) -> Tokens:
    """GEGLU of what the projection gives, rounded where `out` takes it so."""
    if is_plain(projection):
        assert isinstance(h, torch.Tensor)
        return linear_geglu(h, *weight_and_bias(projection))
    wide, rounding = _linear(projection, h), eight_bits.rounding(out)
    if rounding is None:
        return geglu(wide)
    scale, to = rounding
    if scale is None:
        return eight_bits.Rounded(*geglu_8bit(wide, to), wide.dtype)
    return eight_bits.Rounded(geglu(wide, None, scale.view(1), to), scale, wide.dtype)


def _linear(layer: Any, x: Tokens, residual: torch.Tensor | None = None) -> torch.Tensor:
    if eight_bits.is_eight_bit(layer):
        return eight_bits.product(layer, x, residual)
    assert isinstance(x, torch.Tensor)
    if is_plain(layer):
        return linear_residual(x, *weight_and_bias(layer), residual)
    y: torch.Tensor = layer(x)
    return y if residual is None else y + residual


def one_dtype(x: torch.Tensor) -> bool:
    """False under autocast, which gives each step of stock a dtype of its own, and for tensors without data."""
    device = x.device.type
    return device != "meta" and not torch.is_autocast_enabled(device)


RULE = Rule(
    name="transformer",
    summary="packed QKV and text KV, SkipLayerNorm, GEGLU, residuals in epilogues",
    channels_last=False,
    of_kind=of_diffusers(_KIND),
    why_not=_why_not,
    forward=forward,
    undo=unpack,
    for_graphs=True,
)
