"""Attention processors for `unet.set_attn_processor(...)`: UNets and SD3 call SDPA directly, past any backend.

Each is a subclass of the one of Diffusers' own that it stands in for, and computes the same; where that is more than
attention of plain tensors (a mask, autocast, gradients), SDPA is called as stock does. `rocm_sd.optimize` takes one
for what it stands in for.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import (
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    JointAttnProcessor2_0,
)

from rocm_sd.errors import Unsupported
from rocm_sd.integrations.diffusers.attention_backend import attend

__all__ = [
    "ROCmAttnProcessor",
    "ROCmFusedAttnProcessor",
    "ROCmIPAdapterAttnProcessor",
    "ROCmJointAttnProcessor",
    "set_rocm_processors",
]


class _ToTokens:
    """Attention of a picture to itself or to a text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        *_arguments: Any,
        **_named: Any,
    ) -> torch.Tensor:
        x = _tokens(attn, hidden_states, temb)
        text = encoder_hidden_states
        mask = _mask(attn, attention_mask, x if text is None else text)
        x = _normed(attn, x)
        if text is not None and attn.norm_cross:
            text = attn.norm_encoder_hidden_states(text)
        q, k, v = _in_heads(attn, *self._project(attn, x, text))
        mixed = attend(_by_head(attn.norm_q, q), _by_head(attn.norm_k, k), v, mask)
        return _out(attn, mixed.flatten(2).to(q.dtype), hidden_states)

    @staticmethod
    def _project(attn: Any, x: torch.Tensor, text: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        source = x if text is None else text
        return attn.to_q(x), attn.to_k(source), attn.to_v(source)


class ROCmAttnProcessor(_ToTokens, AttnProcessor2_0):  # type: ignore[misc]
    """Stands in for AttnProcessor2_0: `unet.set_attn_processor(ROCmAttnProcessor())`."""

    stands_in_for = AttnProcessor2_0


class ROCmFusedAttnProcessor(_ToTokens, FusedAttnProcessor2_0):  # type: ignore[misc]
    """Stands in for FusedAttnProcessor2_0: after `fuse_qkv_projections()`."""

    stands_in_for = FusedAttnProcessor2_0

    @staticmethod
    def _project(attn: Any, x: torch.Tensor, text: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if text is None:
            return tuple(attn.to_qkv(x).chunk(3, dim=-1))
        return attn.to_q(x), *attn.to_kv(text).chunk(2, dim=-1)


class ROCmJointAttnProcessor(JointAttnProcessor2_0):  # type: ignore[misc]
    """Stands in for JointAttnProcessor2_0: the tokens of SD3's picture and text in one attention."""

    stands_in_for = JointAttnProcessor2_0

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,  # noqa: ARG002 -- stock's does not read it either
        *_arguments: Any,
        **_named: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x, text = hidden_states, encoder_hidden_states
        q, k, v = _in_heads(attn, attn.to_q(x), attn.to_k(x), attn.to_v(x))
        q, k = _by_head(attn.norm_q, q), _by_head(attn.norm_k, k)
        if text is not None:
            words = _in_heads(attn, attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text))
            words = (_by_head(attn.norm_added_q, words[0]), _by_head(attn.norm_added_k, words[1]), words[2])
            q, k, v = (torch.cat(pair, dim=1) for pair in zip((q, k, v), words, strict=True))
        mixed = attend(q, k, v).flatten(2).to(q.dtype)
        if text is None:
            return _projected(attn, mixed)
        picture, words_out = mixed[:, : x.shape[1]], mixed[:, x.shape[1] :]
        if not attn.context_pre_only:
            words_out = attn.to_add_out(words_out)
        return _projected(attn, picture), words_out


class ROCmIPAdapterAttnProcessor(IPAdapterAttnProcessor2_0):  # type: ignore[misc]
    """Stands in for IPAdapterAttnProcessor2_0: made `of` one that `pipe.load_ip_adapter` has put there."""

    stands_in_for = IPAdapterAttnProcessor2_0

    @classmethod
    def of(cls, processor: Any) -> ROCmIPAdapterAttnProcessor:
        """With the weights and scales of that one."""
        ours = cls.__new__(cls)
        torch.nn.Module.__init__(ours)
        for name in ("hidden_size", "cross_attention_dim", "num_tokens", "scale", "to_k_ip", "to_v_ip"):
            setattr(ours, name, getattr(processor, name))
        ours.train(processor.training)
        return ours

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        scale: float = 1.0,
        ip_adapter_masks: Any = None,
    ) -> torch.Tensor:
        # Where an adapter's picture counts by region, and with inputs of older versions, stock's own.
        if ip_adapter_masks is not None or not isinstance(encoder_hidden_states, tuple):
            stock: torch.Tensor = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb, scale, ip_adapter_masks
            )
            return stock
        text, pictures = encoder_hidden_states
        x = _tokens(attn, hidden_states, temb)
        mask = _mask(attn, attention_mask, text)
        x = _normed(attn, x)
        if attn.norm_cross:
            text = attn.norm_encoder_hidden_states(text)
        q, k, v = _in_heads(attn, attn.to_q(x), attn.to_k(text), attn.to_v(text))
        mixed = attend(q, k, v, mask).flatten(2).to(q.dtype)
        for picture, share, to_k, to_v in zip(pictures, self.scale, self.to_k_ip, self.to_v_ip, strict=False):
            if not (any(share) if isinstance(share, list) else share):
                continue
            own = (_heads(layer(picture), attn.heads, len(q), q.shape[-1]) for layer in (to_k, to_v))
            mixed = mixed + share * attend(q, *own).flatten(2).to(q.dtype)
        return _out(attn, mixed, hidden_states)


_OURS: dict[type, Any] = {
    AttnProcessor2_0: lambda _processor: ROCmAttnProcessor(),
    FusedAttnProcessor2_0: lambda _processor: ROCmFusedAttnProcessor(),
    JointAttnProcessor2_0: lambda _processor: ROCmJointAttnProcessor(),
    IPAdapterAttnProcessor2_0: ROCmIPAdapterAttnProcessor.of,
}


def set_rocm_processors(model: Any) -> int:
    """Give each attention of a model whose processor is known the one that stands in for it; how many that were.

    For a model with fused projections or an IP-Adapter, whose attentions have processors of several kinds. To be called
    again after those have changed.
    """
    processors = getattr(model, "attn_processors", None)
    if not isinstance(processors, dict):
        raise Unsupported(
            "set_rocm_processors",
            f"a {type(model).__name__}: it takes a model of Diffusers with attention processors",
            hint="Give pipe.unet, pipe.controlnet or pipe.transformer.",
        )
    known = {name for name, processor in processors.items() if type(processor) in _OURS}
    if known:
        model.set_attn_processor(
            {
                name: _OURS[type(processor)](processor) if name in known else processor
                for name, processor in processors.items()
            }
        )
    return len(known)


def _tokens(attn: Any, hidden_states: torch.Tensor, temb: torch.Tensor | None) -> torch.Tensor:
    """[B, S, C], of a picture [B, C, H, W] too."""
    x = hidden_states if attn.spatial_norm is None else attn.spatial_norm(hidden_states, temb)
    return x.flatten(2).transpose(1, 2) if x.dim() == 4 else x


def _normed(attn: Any, x: torch.Tensor) -> torch.Tensor:
    if attn.group_norm is None:
        return x
    y: torch.Tensor = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
    return y


def _mask(attn: Any, mask: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    batch, length = source.shape[:2]
    mask = attn.prepare_attention_mask(mask, length, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])


def _in_heads(attn: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # The keys say how large a head is, and how many pictures there are.
    head = k.shape[-1] // attn.heads
    return tuple(_heads(columns, attn.heads, len(k), head) for columns in (q, k, v))


def _heads(columns: torch.Tensor, heads: int, batch: int, head: int) -> torch.Tensor:
    return columns.view(batch, -1, heads, head)


def _by_head(norm: Any, columns: torch.Tensor) -> torch.Tensor:
    """A norm of queries or keys, which takes them as [B, H, S, D]."""
    if norm is None:
        return columns
    y: torch.Tensor = norm(columns.transpose(1, 2)).transpose(1, 2)
    return y


def _projected(attn: Any, x: torch.Tensor) -> torch.Tensor:
    linear, dropout = attn.to_out[0], attn.to_out[1]
    y: torch.Tensor = dropout(linear(x))
    return y


def _out(attn: Any, mixed: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    y = _projected(attn, mixed)
    if hidden_states.dim() == 4:
        y = y.transpose(-1, -2).reshape(len(y), *hidden_states.shape[1:])
    if attn.residual_connection:
        y = y + hidden_states
    return y if attn.rescale_output_factor == 1.0 else y / attn.rescale_output_factor
