"""One call of attention, in each of the ways in which it may be given."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.ops.attention.joined_heads import optimized_attention

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["attention_call", "random_attention_inputs"]

_SIZES = ("batch_size", "seq_len", "d_model", "num_heads")


def attention_call(*arguments: Any, **named: Any) -> tuple[str, Callable[[], Any], torch.device]:
    """(name, call, the device that it is timed on) of tensors, of sizes, or of a function and its arguments."""
    first = arguments[0] if arguments else named.get("query", named.get("batch_size"))
    if callable(first):
        given = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
        device = given[0].device if given else _here()
        return getattr(first, "__name__", type(first).__name__), partial(first, *arguments[1:], **named), device
    if isinstance(first, torch.Tensor):
        return "attention", partial(optimized_attention, *arguments, **named), first.device
    if isinstance(first, int):
        sizes = dict(zip(_SIZES, arguments, strict=False)) | named
        if set(sizes) != set(_SIZES) or len(arguments) > len(_SIZES):
            raise Unsupported("profile_attention", f"sizes {sizes}", hint=f"Give {', '.join(_SIZES)}.")
        inputs = random_attention_inputs("profile_attention", **sizes)
        return "attention", partial(optimized_attention, *inputs), inputs[0].device
    raise Unsupported(
        "profile_attention",
        f"a {type(first).__name__}",
        hint=f"Give query, key and value; {', '.join(_SIZES)}; or a function and its arguments.",
    )


def random_attention_inputs(
    caller: str, batch_size: int, seq_len: int, d_model: int, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, each [B, S, H, D], out of one packed product; float16 on a GPU, float32 on a CPU."""
    if min(batch_size, seq_len, d_model, num_heads) < 1 or d_model % num_heads:
        sizes = f"batch_size={batch_size}, seq_len={seq_len}, d_model={d_model}, num_heads={num_heads}"
        raise Unsupported(caller, sizes, hint="Give sizes above 0, and d_model in whole heads.")
    device = _here()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    random = torch.Generator(device).manual_seed(0)
    packed = torch.randn(
        (batch_size, seq_len, 3, num_heads, d_model // num_heads), generator=random, device=device, dtype=dtype
    )
    q, k, v = packed.unbind(2)
    return q, k, v


def _here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
