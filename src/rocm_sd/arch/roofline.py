"""seconds = max(flops / peak, bytes / bandwidth): the least time a piece of work can take on an architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from rocm_sd.arch.types import Arch

__all__ = ["Roofline", "roofline"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """`intensity` and `ridge` are FLOP per byte: work below the ridge is bound by memory, above it by arithmetic."""

    seconds: float
    bound: str
    compute_seconds: float
    memory_seconds: float
    intensity: float
    ridge: float


def roofline(
    arch: Arch,
    flops: float,
    bytes: float,  # noqa: A002 - the word of the field; the builtin is not used here
    dtype: object,
    *,
    peak_tflops: float | None = None,
    bandwidth_gbps: float | None = None,
) -> Roofline:
    """Bound for `flops` operations in `dtype` ("float16", or torch.float16) that move `bytes` to or from memory.

    `peak_tflops` and `bandwidth_gbps` replace the table's figures: give measured ones where there are any, since the
    table's are those of the named product and not of the card at hand.
    """
    if flops < 0 or bytes < 0:
        raise ValueError(f"work cannot be negative: flops={flops}, bytes={bytes}")
    kind = dtype_name(dtype)
    peak = _known(arch, f"peak rate in {kind}", arch.peak(kind) if peak_tflops is None else peak_tflops) * 1e12
    rate = _known(arch, "memory bandwidth", arch.bandwidth_gbps if bandwidth_gbps is None else bandwidth_gbps) * 1e9
    compute, memory = flops / peak, bytes / rate
    return Roofline(
        seconds=max(compute, memory),
        bound="compute" if compute > memory else "memory",
        compute_seconds=compute,
        memory_seconds=memory,
        intensity=flops / bytes if bytes else float("inf"),
        ridge=peak / rate,
    )


def dtype_name(dtype: object) -> str:
    """The table's word for a dtype: torch.float16 -> "float16"; every fp8 format -> "float8" (the rate is the same)."""
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _known(arch: Arch, what: str, value: float | None) -> float:
    if value is None:
        raise Unsupported(
            f"A roofline of {arch.name}",
            f"work whose {what} is not known",
            hint="Give a measured one: roofline(..., peak_tflops=..., bandwidth_gbps=...).",
        )
    if value <= 0:
        raise ValueError(f"{what} must be positive, not {value}")
    return value
