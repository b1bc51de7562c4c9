"""Is torch's attention right at every head size?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import flag, number, on_the_gpu, rows, text
from rocm_sd.doctor.check import CannotRun, Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

_FIX = Fix(
    "rocm-sd tests attention before it uses it, and needs nothing. Elsewhere: in ComfyUI start with "
    "--use-split-cross-attention; in your own code wrap the VAE in torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)
_MEANS = "Pictures come out black, grey or as noise, without an error. The VAE of SD and SDXL has a head of 512."


def judge(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    """The probe's own gate: an error of at most twice that of plain math in the same dtype, plus one rounding."""
    table = rows(answer)
    wrong = [row for row in table if not flag(row, "ok")]
    failed = answer["failed"]
    crashed = {name: text(why, "reason") for name, why in failed.items() if not flag(why, "exceeded")}
    measured = {"cases": len(table), "wrong": [_case(row) for row in wrong], "failed": dict(failed)}
    if wrong:
        worst = _worst(wrong)
        says = f"{len(wrong)} of {len(table)} cases are wrong, among them {_case(worst)}: {_error(worst)}."
        return Finding(Status.PROBLEM, says, _MEANS, _FIX, measured)
    if crashed:
        told = "; ".join(f"{name}: {why}" for name, why in crashed.items())
        means = "A program that takes this backend ends in the middle of a picture."
        return Finding(
            Status.PROBLEM, f"An attention backend does not survive its test. {told}.", means, _FIX, measured
        )
    if failed:
        raise CannotRun(f"{' and '.join(failed)} did not end in time")
    heads = sorted({int(number(row, "head")) for row in table})
    backends = sorted({text(row, "backend") for row in table})
    says = f"All {len(table)} cases are right, heads {heads[0]} to {heads[-1]} by {', '.join(backends)}."
    return Finding(Status.OK, says, measured=measured)


def _worst(wrong: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """No number at all is worse than any."""
    return max(wrong, key=lambda row: float("inf") if row["error"] is None else number(row, "error"))


def _case(row: Mapping[str, Any]) -> str:
    return f"{text(row, 'backend')} with heads of {row['head']}, {row['keys']} keys, {text(row, 'dtype')}"


def _error(row: Mapping[str, Any]) -> str:
    if row["error"] is None:
        return str(row.get("reason") or "the result is not a number")
    by_math = row["math_error"]
    beside = "gives no number" if by_math is None else f"has {by_math:.2g}"
    return f"error {number(row, 'error'):.2g}, where plain math {beside}"


CHECK = Check(
    name="sdpa_numerics",
    question="Is torch's attention right at every head size?",
    measures="the error against float64 of every backend of scaled_dot_product_attention that says it can run, for "
    "heads of 40 to 512, 77 and 1024 keys, float16 and bfloat16, beside that of plain math",
    links=(
        "https://github.com/pytorch/pytorch/issues/189849",
        "https://github.com/ROCm/TheRock/issues/6561",
        "https://github.com/vllm-project/vllm-omni/issues/7484",
        "https://github.com/ROCm/aotriton/issues/210",
        "https://github.com/ROCm/TheRock/issues/1315",
    ),
    run=on_the_gpu("sdpa_numerics", judge, also_on_cpu=True),
)
