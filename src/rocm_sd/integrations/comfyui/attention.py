"""ComfyUI's attention override: softmax(q k^T) v by the op, and by the host's function where the op is not for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.integrations.comfyui.host import PatchReport, belongs_to_the_host
from rocm_sd.integrations.ldm import is_ready
from rocm_sd.ops import OPS, attention
from rocm_sd.rewrite.convolutions import through_op

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPTION", "is_our_override", "override_for"]

OPTION = "optimized_attention_override"
_NAME = "attention"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the host hands over besides, and what changes nothing in the result.
_HARMLESS = frozenset({"transformer_options", "_inside_attn_wrapper"})


def is_our_override(function: Any) -> bool:
    return getattr(function, "__module__", None) == __name__


def override_for(report: PatchReport) -> Callable[..., Any]:
    """A function, and no object: the host copies its options deeply, and functions stay themselves."""

    def override(
        func: Callable[..., Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Any:
        answer = None
        if mask is None and kwargs.keys() <= _HARMLESS and _NAME not in report.failed and _is_for_op(q):
            try:
                answer = _attend(q, k, v, heads, skip_reshape, spare_memory=report.level == "memory")
            except Exception as error:
                if belongs_to_the_host(error):
                    raise
                report.fail(_NAME, error)
        if answer is not None:
            return answer.transpose(1, 2) if skip_output_reshape else answer.flatten(2)
        return func(
            q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
            skip_output_reshape=skip_output_reshape, **kwargs,
        )  # fmt: skip

    return override


def _is_for_op(q: Any) -> bool:
    return is_ready(q) and not torch.is_autocast_enabled(q.device.type) and through_op(_NAME, q)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, split: bool, *, spare_memory: bool
) -> torch.Tensor | None:
    """[B, S, H, D]; None where the op is not for these. `split`: they are [B, H, S, D], and [B, S, H * D] otherwise.

    The host's wish for scores in float32 (`attn_precision`) is met by every implementation of the op.
    """
    if any(type(t) is not torch.Tensor or t.dtype not in _DTYPES or t.dtype != q.dtype for t in (q, k, v)):
        return None
    if any(t.dim() != (4 if split else 3) or t.device != q.device for t in (q, k, v)):
        return None
    if split:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    elif any(t.shape[-1] % heads for t in (q, k, v)):
        return None
    else:
        q, k, v = (t.reshape(*t.shape[:2], heads, -1) for t in (q, k, v))
    # Fewer key heads than query heads, or values of another width.
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]) or not k.shape[1]:
        return None
    if spare_memory and OPS[_NAME].scratch_bytes((q, k, v, None), q.device):
        return None
    return attention(q, k, v)
