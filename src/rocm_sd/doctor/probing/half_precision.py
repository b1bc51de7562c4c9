"""GEMM and convolution in float16 against bfloat16, each in a process of its own: some compilers abort on bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

from rocm_sd.doctor.probing.common import Cannot, medians, place, random
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

_DTYPES = ("float16", "bfloat16")
_LIMIT_S = 9.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """{"float16": {"gemm_ms", "conv_ms", "error"}, "bfloat16": ...}."""
    told: dict[str, Any] = {}
    for dtype in _DTYPES:
        outcome = isolated(_times, dtype, device, quick, limit_s=_LIMIT_S)
        if outcome.answer is None:
            told[dtype] = {"gemm_ms": None, "conv_ms": None, "error": outcome.failed}
        else:
            told["device"] = outcome.answer["device"]
            told[dtype] = {**outcome.answer["times"], "error": ""}
    if "device" not in told:
        raise Cannot(f"neither dtype ran: {told['float16']['error']}")
    return told


def _times(name: str, device: str | None, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    dtype = getattr(torch, name)
    small = quick or not where.is_gpu
    rows, depth, channels, size = (128, 320, 32, 16) if small else (4096, 2560, 320, 64)
    left, right = random(where, rows, depth, dtype=dtype), random(where, depth, depth, dtype=dtype, seed=1)
    picture = random(where, 1, channels, size, size, dtype=dtype)
    kernel = random(where, channels, channels, 3, 3, dtype=dtype, seed=1) * (channels * 9) ** -0.5
    calls = {
        "gemm": partial(torch.mm, left, right),
        "conv": partial(torch.nn.functional.conv2d, picture, kernel, padding=1),
    }
    with torch.no_grad():
        taken = medians(calls, where)
    return {"device": where.told(), "times": {"gemm_ms": taken["gemm"], "conv_ms": taken["conv"]}}
