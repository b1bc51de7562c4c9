"""Transformer block of a UNet: packed QKV and text KV, residual adds inside the norms and the last linear's epilogue,
the feed-forward's bias inside GEGLU.

Each piece (an attention, a norm, the feed-forward) asks at every call whether it is what the ops compute; where it is
not, the piece itself is called, as stock does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rocm_sd.ops import attention, geglu, layer_norm_residual, linear_residual
from rocm_sd.ops.linear_residual.packing import split_heads
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.layers import is_plain, untouched
from rocm_sd.rewrite.packing import packed_linear, unpack

__all__ = ["RULE", "one_dtype"]

_KIND = "BasicTransformerBlock"
_PROCESSORS = "diffusers.models.attention_processor"


def _applies(module: nn.Module) -> bool:
    return type(module).__name__ == _KIND and type(module).__module__.startswith("diffusers.")


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
    timestep: torch.Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: torch.Tensor | None = None,
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    x, text = hidden_states, encoder_hidden_states
    # Token merging (tomesd) gives a block another class when it is switched on.
    known = type(self).__name__ == _KIND and self._chunk_size is None
    if cross_attention_kwargs or not known or x.dim() != 3 or not one_dtype(x):
        stock: torch.Tensor = type(self).forward(
            self, hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
            cross_attention_kwargs, class_labels, added_cond_kwargs,
        )  # fmt: skip
        return stock
    h = _attend(self.attn1, self.norm1(x), text if self.only_cross_attention else None, attention_mask)
    if self.attn2 is not None:
        h, x = _add_and_norm(self.norm2, h, x)
        h = _attend(self.attn2, h, text, encoder_attention_mask)
    h, x = _add_and_norm(self.norm3, h, x)
    return _feed_forward(self.ff, h, x)


def _attend(attn: Any, x: torch.Tensor, text: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    out, dropout = attn.to_out
    if mask is not None or not (_is_default(attn) and untouched(attn) and _idle(dropout)):
        stock: torch.Tensor = attn(x, encoder_hidden_states=text, attention_mask=mask)
        return stock
    to_q, to_k, to_v, heads = attn.to_q, attn.to_k, attn.to_v, attn.heads
    if text is None:
        q, k, v = _project(x, heads, to_q, to_k, to_v)
    else:
        (q,) = _project(x, heads, to_q)
        k, v = _project(text, heads, to_k, to_v)
    scale = attn.scale if type(attn.processor).__name__ == "AttnProcessor" else None
    return _linear(out, attention(q, k, v, scale).flatten(2))


def _is_default(attn: Any) -> bool:
    processor = type(attn.processor)
    if processor.__module__ != _PROCESSORS:
        return False
    # The first reads neither `scale` nor the flags that ask for scores in float32.
    return processor.__name__ == "AttnProcessor2_0" or (
        processor.__name__ == "AttnProcessor" and not (attn.upcast_attention or attn.upcast_softmax)
    )


def _project(x: torch.Tensor, heads: int, *layers: Any) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] of each layer, by one product where their weights can be read as one."""
    if len(layers) > 1 and all(is_plain(layer) for layer in layers):
        packed = packed_linear(*layers)
        if packed is not None:
            return split_heads(linear_residual(x, *packed), len(layers), heads)
    columns = [_linear(layer, x) for layer in layers]
    return tuple(y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads) for y in columns)


def _add_and_norm(norm: nn.LayerNorm, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # A processor of the user's own may answer in another dtype.
    if type(norm) is nn.LayerNorm and untouched(norm) and h.dtype == x.dtype and h.shape == x.shape:
        return layer_norm_residual(h, x, norm.weight, norm.bias, norm.eps)
    total = h + x
    return norm(total), total


def _feed_forward(ff: Any, h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    gate, dropout, out, *last = ff.net
    if not (untouched(ff, gate) and _idle(dropout, *last)):
        stock: torch.Tensor = ff(h) + residual
        return stock
    projection = gate.proj
    h, bias = (
        (linear_residual(h, projection.weight), projection.bias) if is_plain(projection) else (projection(h), None)
    )
    return _linear(out, geglu(h, bias), residual)


def _linear(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    if is_plain(layer):
        return linear_residual(x, layer.weight, layer.bias, residual)
    y: torch.Tensor = layer(x)
    return y if residual is None else y + residual


def _idle(*dropouts: nn.Module) -> bool:
    return all(type(d) is nn.Dropout and not (d.training and d.p) and untouched(d) for d in dropouts)


def one_dtype(x: torch.Tensor) -> bool:
    """False under autocast, which gives each step of stock a dtype of its own, and for tensors without data."""
    device = x.device.type
    return device != "meta" and not torch.is_autocast_enabled(device)


RULE = Rule(
    name="transformer",
    summary="packed QKV and text KV, SkipLayerNorm, GEGLU, residuals in epilogues",
    channels_last=False,
    applies=_applies,
    why_not=_why_not,
    forward=forward,
    undo=unpack,
)
