"""What ops with a result in 8 bits share: the two arguments `scale` and `to`, and where their kernels can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd import arch
from rocm_sd.errors import Unsupported, require_one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.arch import Arch
    from rocm_sd.ops.definition import WhyNot
    from rocm_sd.ops.layouts import Part
    from rocm_sd.ops.samples import Draw
    from rocm_sd.tuning import Problem

__all__ = [
    "DTYPES", "FORMATS", "LIMITS", "drawn", "dtype_of", "fits", "limit_of", "multiplied", "require_eight_bits",
    "rounded_to", "too_wide",
]  # fmt: skip

# The largest value of each format.
LIMITS = {"int8": 127, "float8_e4m3fn": 448, "float8_e4m3fnuz": 240}
FORMATS = frozenset(getattr(torch, name) for name in LIMITS)
# What products of 8 bits may be rounded to.
DTYPES = ("float16", "bfloat16", "float32", "float64")


def require_eight_bits(op: str, scale: Part, to: str | None, *others: Part) -> None:
    """Refuse a format that there is not, a scale of another kind, and gradients, which rounding does not have."""
    if to is None and scale is None:
        return
    if to is None or scale is None:
        raise Unsupported(op, "a scale without a format or a format without a scale", hint="Give both, or neither.")
    require_one_of("to", to, tuple(LIMITS))
    if scale.dtype is not torch.float32 or scale.shape != (1,):
        raise Unsupported(op, f"scale of {scale.dtype} and shape {tuple(scale.shape)}: it takes float32 of (1,)")
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (scale, *others)):
        raise Unsupported(op, "a gradient of a result in 8 bits: it has none", hint="Use torch.no_grad().")


def dtype_of(x: torch.Tensor, to: str | None) -> torch.dtype:
    return x.dtype if to is None else getattr(torch, to)


def rounded_to(to: str | None) -> dict[str, str]:
    """What a problem says of it. Of other results it says nothing: what was measured for them is found as before."""
    return {} if to is None else {"to": to}


def limit_of(to: str | None) -> int:
    """The format's largest value; 0 for results of x's own dtype."""
    return 0 if to is None else LIMITS[to]


def drawn(draw: Draw, of: str, *shape: int) -> torch.Tensor:
    """Values of a format, whose root mean square is a quarter of its limit."""
    limit = LIMITS[of]
    value = draw(*shape, std=limit / 4, dtype=torch.float32).clamp(-limit, limit)
    return (value.round() if of == "int8" else value).to(getattr(torch, of))


def fits(problem: Problem, here: Arch) -> bool:
    """Whether the format is one that the architecture multiplies; products of int8 can be had on each."""
    to = str(problem.get("to") or problem.get("of") or "int8")
    return to == "int8" or here.multiplies(to)


def too_wide(side: str, most: int) -> Callable[[Problem], str | None]:
    """Why a row of so many values is not for a kernel that keeps rows in registers."""

    def why_not(problem: Problem) -> str | None:
        width = int(problem[side])
        return f"rows of {width} values: a row of more than {most} does not stay in registers" if width > most else None

    return why_not


def multiplied(why_not: WhyNot) -> WhyNot:
    """The same, but for formats that the device does not multiply: nobody has its kernels compiled there."""

    def why_not_here(problem: Problem, device: torch.device) -> str | None:
        here = arch.detect(device)
        if here != arch.CPU and not fits(problem, here):
            return f"{here.name} does not multiply {problem.get('to') or problem.get('of')}"
        return why_not(problem, device)

    return why_not_here
