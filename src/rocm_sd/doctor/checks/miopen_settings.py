"""Do MIOpen's environment variables suit this GPU, this torch and this ROCm?"""

from __future__ import annotations

from rocm_sd import arch
from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts, numbers

__all__ = ["miopen_settings"]

_NHWC = "PYTORCH_MIOPEN_SUGGEST_NHWC"
_NAIVE = "MIOPEN_DEBUG_CONV_DIRECT_NAIVE_CONV_FWD"
_ENFORCE = "MIOPEN_FIND_ENFORCE"
_MODE = "MIOPEN_FIND_MODE"
# torch built with ROCm 7.0 and later turned NHWC on for every GPU until 2.10 turned it off again. Later wheels of 2.7
# to 2.9 have that, too, which their version does not tell.
_NHWC_FROM_ROCM, _NHWC_UNTIL_TORCH = (7, 0), (2, 10)
# From here on MIOpen leaves its naive kernels out of the search.
_QUICK_SEARCH = (7, 14)
_SEARCH_ALWAYS = {"3", "4", "SEARCH", "SEARCH_DB_UPDATE"}


@check(
    measures=f"{_NHWC}, {_NAIVE}, {_ENFORCE} and {_MODE}; the versions of torch and ROCm; the family of the GPU",
    reports="pytorch/pytorch#170764 pytorch/pytorch/pull/170780 ROCm/TheRock#2485 ROCm/TheRock#2591 "
    "ROCm/rocm-libraries#3509",
)
def miopen_settings(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None or facts.torch.build != "rocm":
        return not_here("MIOpen is not used: there is no AMD GPU, or torch is not built for ROCm.")
    environment = facts.environment
    wrong: list[str] = []
    means: list[str] = []
    env: dict[str, str] = {}
    unset: list[str] = []
    if _nhwc_is_on(facts) and arch.get(meant.gfx or "").family.startswith("rdna"):
        how = (
            f"{_NHWC}={environment[_NHWC]}" if _NHWC in environment else f"torch {facts.torch.version} may suggest NHWC"
        )
        wrong.append(f"{how} on {meant.gfx}")
        means.append("MIOpen then passes over its fast Winograd kernels: upscaling took 81 s a step in place of 1.8")
        env[_NHWC] = "0"
    if environment.get(_NAIVE) == "0":
        wrong.append(f"{_NAIVE}=0")
        means.append("for some convolutions the naive kernel is the only one, and they fail")
        unset.append(_NAIVE)
    if environment.get(_ENFORCE, "").upper() in _SEARCH_ALWAYS:
        wrong.append(f"{_ENFORCE}={environment[_ENFORCE]}")
        means.append("MIOpen tunes every convolution of every new size, for minutes each")
        unset.append(_ENFORCE)
    if wrong:
        changes = [*(f"{name}={value}" for name, value in env.items()), *(f"unset {name}" for name in unset)]
        fix = Fix(f"{', '.join(changes)}.", env=env, unset=tuple(unset), safe=True)
        return problem(f"{'; '.join(wrong)}.", f"{'; '.join(means)}.", fix)
    return fine(_search(facts), "What a first run of a new size costs, first_run_stall measures.")


def _nhwc_is_on(facts: Facts) -> bool:
    value = facts.environment.get(_NHWC)
    if value is not None:
        return value != "0"
    return numbers(facts.rocm) >= _NHWC_FROM_ROCM and numbers(facts.torch.version) < _NHWC_UNTIL_TORCH


def _search(facts: Facts) -> str:
    mode = facts.environment.get(_MODE)
    if mode is not None:
        return f"{_MODE}={mode}."
    quick = numbers(facts.rocm) >= _QUICK_SEARCH
    search = "leaves naive kernels out" if quick else "tries every kernel for each new size"
    return f"{_MODE} is not set: the search of ROCm {facts.rocm or '(unknown)'} {search}."
