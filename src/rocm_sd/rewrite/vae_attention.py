"""Attention of a VAE's middle block: channels-last pictures are read as tokens in place, and the residual is added by
the output projection.

In another layout the second rule: stock's own forward, but for pictures whose scores torch would write out whole, 2 GB
at 1024x1024 and 33 GB at 2048x2048. Those go through the op, which bounds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.ops import attention, library_scratch, linear_residual
from rocm_sd.ops.attention.op import keeps_more_than_bounded
from rocm_sd.ops.samples import dtype_name
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import falls_back, norm_silu, of_diffusers, of_kind
from rocm_sd.rewrite.layers import is_plain
from rocm_sd.rewrite.tokens import map_of, tokens_of
from rocm_sd.rewrite.transformer import stock_processor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BOUNDED", "RULE"]

# One core: 1.03 of stock's time at 1x128x16x16, 0.95 at 1x128x32x32, 0.96 at 1x512x16x16.
_WORTH_IT_ON_CPU = 2**17


def _applies(module: Any) -> bool:
    # The attentions of transformer blocks have no norm of their own.
    return isinstance(module.group_norm, nn.GroupNorm)


def _why_not(module: Any) -> str | None:
    if not _is_stock_processor(module.processor):
        return f"its attention is computed by {type(module.processor).__name__}"
    if module.spatial_norm is not None or module.norm_q is not None or module.norm_k is not None:
        return "it has more norms than one"
    if module.only_cross_attention or module.added_kv_proj_dim is not None or module.pre_only:
        return "it is not attention of a picture to itself"
    if module.inner_kv_dim != module.inner_dim or module.out_dim != module.query_dim:
        return "its keys or its output have another width"
    if len(module.to_out) != 2 or type(module.to_out[1]) is not nn.Dropout:
        return "it has another output projection than a linear and a dropout"
    return None


def _is_stock_processor(processor: object) -> bool:
    # Others slice, fuse or adapt. This one ignores the module's `scale` and its upcasts, as the op does.
    kind = stock_processor(processor)
    return kind.__name__ == "AttnProcessor2_0" and kind.__module__.startswith("diffusers.")


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    known = _is_to_itself(encoder_hidden_states, attention_mask, kwargs) and _is_stock_processor(self.processor)
    if (
        not known
        or falls_back(hidden_states, self.group_norm.weight, "attention", _WORTH_IT_ON_CPU)
        or not hidden_states.numel()
    ):
        return NotImplemented
    tokens = tokens_of(norm_silu(self.group_norm, hidden_states, silu=False))
    q, k, v = (_heads(_linear(layer, tokens), self.heads) for layer in (self.to_q, self.to_k, self.to_v))
    out, dropout = self.to_out
    mixed = attention(q, k, v).flatten(2)
    residual = tokens_of(hidden_states) if self.residual_connection else None
    if dropout.training and dropout.p:
        y = dropout(_linear(out, mixed))
        y = y if residual is None else y + residual
    else:
        y = _linear(out, mixed, residual)
    # These are a VAE's only products; its memory peaks later in a decoder, and earlier in an encoder.
    library_scratch.give_back()
    y = y if self.rescale_output_factor == 1.0 else y / self.rescale_output_factor
    return map_of(y, hidden_states)


def _is_to_itself(text: object, mask: object, rest: Mapping[str, object]) -> bool:
    # A VAE hands over `temb`, which only a spatial norm reads.
    return text is None and mask is None and rest.keys() <= {"temb"}


def _bounded_forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    known = _is_to_itself(encoder_hidden_states, attention_mask, kwargs) and _is_stock_processor(self.processor)
    if (
        not known
        or falls_back(hidden_states, self.group_norm.weight, "attention")
        or not hidden_states.numel()
        or not _writes_out_scores(self, hidden_states)
    ):
        return NotImplemented
    # Layer by layer as Diffusers' processor has it.
    x = self.group_norm(hidden_states.flatten(2)).transpose(1, 2)
    q, k, v = (_heads(layer(x), self.heads) for layer in (self.to_q, self.to_k, self.to_v))
    y = attention(q, k, v).flatten(2)
    for layer in self.to_out:
        y = layer(y)
    y = y.transpose(1, 2).reshape(hidden_states.shape)
    y = y + hidden_states if self.residual_connection else y
    return y / self.rescale_output_factor


def _writes_out_scores(module: Any, x: torch.Tensor) -> bool:
    tokens = x.shape[2] * x.shape[3]
    problem = {
        "b": x.shape[0], "s": tokens, "t": tokens, "h": module.heads, "d": module.inner_dim // module.heads,
        "dtype": dtype_name(x.dtype),
    }  # fmt: skip
    return keeps_more_than_bounded(problem, x.device)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(*x.shape[:2], heads, -1)


def _linear(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    if type(layer) is nn.Linear and is_plain(layer) and of_kind(layer.weight, x):
        return linear_residual(x, layer.weight, layer.bias, residual)
    y: torch.Tensor = layer(x)
    return y if residual is None else y + residual


RULE = Rule(
    name="vae_attention",
    summary="attention over a picture's pixels with no layout copies, the residual in the output projection",
    channels_last=True,
    of_kind=of_diffusers("Attention"),
    applies=_applies,
    why_not=_why_not,
    forward=_forward,
)

# Found after the other: where that one is applied, nothing is left to this one.
BOUNDED = Rule(
    name="vae_attention_bounded",
    summary="attention over a picture's pixels with scores that are bounded, where torch would write them out whole",
    channels_last=False,
    of_kind=of_diffusers("Attention"),
    applies=_applies,
    why_not=_why_not,
    forward=_bounded_forward,
    # A CPU's own attention is fused.
    on_cpu=False,
)
