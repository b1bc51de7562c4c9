"""Products of FP8 matrices (torch._scaled_mm) in both formats of e4m3, beside float64: 240 is the largest number in the
one (FNUZ, gfx942), 448 in the other (OCP, gfx950, gfx12, NVIDIA), and code that takes the wrong one makes noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.probing.common import Cannot, Place, place
from rocm_sd.doctor.probing.isolated import isolated

if TYPE_CHECKING:
    import torch

__all__ = ["answer"]

_FORMATS = {"ocp": "float8_e4m3fn", "fnuz": "float8_e4m3fnuz"}
_LIMIT_S = 9.0
# The sum is kept in float32 and rounded once to bfloat16: eight roundings of the largest value are room enough.
_ROUNDINGS = 8


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`expected`: the format of the architecture, "none" or None where nobody knows; then each format with
    {"accepted", "ok", "error"}. `ok` is None where it was refused.
    """
    told: dict[str, Any] = {}
    for name, dtype in _FORMATS.items():
        outcome = isolated(_product, dtype, device, 64 if quick else 512, limit_s=_LIMIT_S)
        if outcome.answer is None:
            told[name] = {"accepted": False, "ok": None, "error": outcome.failed}
        else:
            told |= {"device": outcome.answer["device"], "expected": outcome.answer["expected"]}
            told[name] = outcome.answer["result"]
    if "device" not in told:
        raise Cannot(f"no product could be tried: {told['ocp']['error']}")
    return told


def _product(dtype: str, device: str | None, size: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    expected = None if where.arch.fp8 is None else where.arch.fp8.value
    return {"device": where.told(), "expected": expected, "result": _tried(getattr(torch, dtype), where, size)}


def _tried(dtype: torch.dtype, where: Place, size: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- as above

    # The spread of 60 puts values near 240, where the formats part.
    drawn = (torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    left, right = ((60 * values).clamp(-240, 240).to(dtype).to(where.device) for values in drawn)
    one = torch.ones(()).to(where.device)
    try:
        product = torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001
        result = product.cpu().double()
    except (RuntimeError, ValueError, NotImplementedError) as refused:
        return {"accepted": False, "ok": None, "error": str(refused).splitlines()[0][:200]}
    exact = left.cpu().double() @ right.cpu().double().t()
    return {"accepted": True, **_judged(result, exact)}


def _judged(result: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- as above

    error = float((result - exact).abs().max() / exact.abs().max())
    ok = error <= _ROUNDINGS * torch.finfo(torch.bfloat16).eps
    return {"ok": ok, "error": "" if ok else f"largest error {error:.3g} of the largest value"}
