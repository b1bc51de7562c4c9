"""Is torch's TunableOp left off, or on in a way that does not stall a picture?"""

from __future__ import annotations

from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts  # noqa: TC001 -- as in the other checks

__all__ = ["tunable_op"]

_ENABLED, _TUNING = "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING"
_OFF = {"", "0"}
_BY_US = "rocm-sd tune --tunable-op tunes products beforehand, and rocm-sd uses what is faster, product by product."


@check(
    measures=f"{_ENABLED} and {_TUNING}",
    reports="ROCm/TheRock#5550 pytorch/pytorch#190433 ROCm/TheRock#2591 Beinsezii/comfyui-amd-go-fast#2",
)
def tunable_op(facts: Facts, _probes: Probes) -> Finding:
    if facts.meant is None or facts.torch.build != "rocm":
        return not_here("TunableOp has kernels to choose from on ROCm alone.")
    enabled = facts.environment.get(_ENABLED)
    if enabled is None:
        return fine("TunableOp is off, as torch comes.", _BY_US)
    if enabled in _OFF:
        return fine(f"{_ENABLED}={enabled}: TunableOp is kept off.", "rocm-sd cannot use its results, either.")
    # torch tunes wherever it is enabled, unless it is told not to.
    if facts.environment.get(_TUNING, "1") not in _OFF:
        return problem(
            f"{_ENABLED}={enabled}, and its tuning is on.",
            "Every product of a new size is tuned in the middle of a picture: each kernel of the libraries runs.",
            Fix(f"Unset {_ENABLED}. {_BY_US}", unset=(_ENABLED,), safe=True),
        )
    return fine(
        f"{_ENABLED}={enabled} with its tuning off: products that were tuned before run by its kernels.",
        "They do so in stock torch as well, so that rocm-sd does not time them apart.",
    )
