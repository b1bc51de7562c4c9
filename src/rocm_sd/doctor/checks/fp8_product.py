"""Do FP8 products run, in the format of this GPU, and rightly?

240 is the largest number in the one format of e4m3 (FNUZ, gfx942), 448 in the other (OCP, gfx950, gfx12, NVIDIA), and
code that takes the wrong one makes noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, flag, measured_check, not_here, problem, text
from rocm_sd.doctor.probing.isolated import one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.doctor.facts import Facts
    from rocm_sd.doctor.probing.common import Place

__all__ = ["fp8_product"]

_FORMATS = {"ocp": "float8_e4m3fn", "fnuz": "float8_e4m3fnuz"}
_LIMITS_S = dict.fromkeys(_FORMATS, 9.0)
# The sum is kept in float32 and rounded once to bfloat16: eight roundings of the largest value are room enough.
_ROUNDINGS = 8
_NAMES = {"ocp": "torch.float8_e4m3fn (OCP, up to 448)", "fnuz": "torch.float8_e4m3fnuz (FNUZ, up to 240)"}
_STORE = "Keep FP8 for storage alone: weights in FP8, products in float16."


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`expected`: the format of the architecture, "none" or None where nobody knows; then each format with
    {"accepted", "ok", "error"}. `ok` is None where it was refused.
    """
    calls = {name: (dtype, 64 if quick else 512) for name, dtype in _FORMATS.items()}
    answers = one_by_one(device, _product, calls, {"accepted": False, "ok": None}, _LIMITS_S)
    if answers["device"] is None:
        raise CannotRun(f"no product could be tried: {answers['ocp']['error']}")
    fp8 = arch.get(answers["device"]["arch"]).fp8
    return {**answers, "expected": None if fp8 is None else fp8.value}


def _product(where: Place, name: str, size: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    dtype = getattr(torch, name)
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


@measured_check(
    measures="torch._scaled_mm in both formats of e4m3 against float64, each in a process of its own",
    reports="pytorch/ao#4130 ROCm/ROCm#6019 vllm-project/vllm#51021 pytorch/pytorch#198194",
    probe=Probe("scaled_product", measure),
)
def fp8_product(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    tried = {name: answer[name] for name in _NAMES}
    expected = answer["expected"]
    wrong = [name for name, each in tried.items() if flag(each, "accepted") and not flag(each, "ok")]
    measured = {"expected": expected, **tried}
    if wrong:
        says = "; ".join(f"torch accepts {_NAMES[name]} here, and {text(tried[name], 'error')}" for name in wrong)
        own = f"This GPU has {_NAMES[expected]}. " if expected in _NAMES and expected not in wrong else ""
        means = "A model that was quantized for the other format gives noise, without an error."
        return problem(f"{says}.", means, Fix(f"{own}Do not use the wrong one. {_STORE}"), measured)
    if expected is None:
        raise CannotRun("the FP8 format of this GPU is not known, and nothing that ran was wrong")
    if expected == "none":
        return not_here(f"This GPU has no FP8 products. {_STORE}", measured=measured)
    if not flag(tried[expected], "accepted"):
        says = f"This GPU has {_NAMES[expected]}, but torch refuses: {text(tried[expected], 'error')}."
        means = "FP8 models fail, or are computed in another dtype and gain nothing."
        return problem(says, means, Fix(f"Install a torch built for a later ROCm. {_STORE}"), measured)
    return fine(f"Products of {_NAMES[expected]} are right.", measured=measured)
