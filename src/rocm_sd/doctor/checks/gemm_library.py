"""Does torch take the faster GEMM library?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import number, on_the_gpu, text
from rocm_sd.doctor.check import CannotRun, Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

# The libraries differ by up to a fifth in either direction from shape to shape, the reported pain is 2.3 times.
_HARM = 1.3
_PREFER = "TORCH_BLAS_PREFER_HIPBLASLT"
_NAMES = {"rocblas": "rocBLAS", "hipblaslt": "hipBLASLt", "cublas": "cuBLAS", "cublaslt": "cuBLASLt"}


def judge(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    libraries = answer["libraries"]
    rates = {name: number(told, "tflops") for name, told in libraries.items() if told["tflops"] is not None}
    errors = {name: text(told, "error") for name, told in libraries.items() if told["tflops"] is None}
    measured = {"tflops": rates, "errors": errors}
    if "default" in errors:
        return _broken(facts, rates, errors, measured)
    ours = rates.pop("default")
    if not rates:
        raise CannotRun("no library but torch's default could be timed")
    best = max(rates, key=rates.__getitem__)
    told = ", ".join(f"{_NAMES.get(name, name)} {rate:.3g}" for name, rate in rates.items())
    lost = "".join(f" {_NAMES.get(name, name)} fails: {why}." for name, why in errors.items())
    says = f"torch's GEMMs run at {ours:.3g} TFLOP/s; by library: {told}.{lost}"
    if rates[best] > _HARM * ours:
        means = f"The linear layers of every step run at {ours / rates[best]:.0%} of the speed that is there."
        return Finding(Status.PROBLEM, says, means, _fix(best, facts), measured)
    return Finding(Status.OK, says, measured=measured)


def _broken(
    facts: Facts, rates: Mapping[str, float], errors: Mapping[str, str], measured: Mapping[str, Any]
) -> Finding:
    if not rates:
        raise CannotRun(f"no GEMM ran: {errors['default']}")
    says = f"torch's default GEMM fails: {errors['default']}. These run: {', '.join(_NAMES.get(n, n) for n in rates)}."
    means = "No picture can be made with these settings."
    fix = _fix(max(rates, key=rates.__getitem__), facts)
    return Finding(Status.PROBLEM, says, means, fix, measured)


def _fix(best: str, facts: Facts) -> Fix:
    name = _NAMES.get(best, best)
    if best == "rocblas":
        # Every build of torch for ROCm has rocBLAS, and it is right on every card: safe.
        return Fix(f"Set {_PREFER}=0, so that torch calls {name}.", env={_PREFER: "0"}, safe=True)
    if best == "hipblaslt" and facts.amd:
        # It crashed a card before: the user is to know that it was chosen.
        return Fix(f"Set {_PREFER}=1, so that torch calls {name}, and make a picture to try it.", env={_PREFER: "1"})
    return Fix(
        f'In your own code: torch.backends.cuda.preferred_blas_library("{best}"). rocm-sd tune finds it by itself.'
    )


CHECK = Check(
    name="gemm_library",
    question="Does torch take the faster GEMM library?",
    measures="matrix products of UNet shapes in three layouts by torch's default and by each library, each in its own "
    "process",
    links=(
        "https://github.com/ROCm/TheRock/issues/5314",
        "https://github.com/ROCm/ROCm/issues/6271",
        "https://github.com/pytorch/pytorch/issues/138067",
    ),
    run=on_the_gpu("gemm_library", judge),
)
