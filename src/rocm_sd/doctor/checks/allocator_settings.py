"""Do the settings of torch's allocator agree with each other, and with this torch?"""

from __future__ import annotations

from rocm_sd.doctor.check import Finding, Fix, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts, numbers

__all__ = ["allocator_settings"]

# torch takes the first of these that is set, and none of the others (c10/cuda/CUDAAllocatorConfig.h).
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Before it, ROCm builds ignore the option.
_SEGMENTS_ON_ROCM = (2, 12)


@check(
    measures="PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_HIP_ALLOC_CONF, and torch's version",
    reports="pytorch/pytorch#123548 pytorch/pytorch/pull/177974 pytorch/pytorch#187343",
)
def allocator_settings(facts: Facts, _probes: Probes) -> Finding:
    given = {name: facts.environment[name] for name in _VARIABLES if facts.environment.get(name)}
    if not given:
        return fine("No setting of torch's allocator is given.")
    if facts.torch.build in {"cpu", "none"}:
        return not_here(f"{', '.join(given)} is set, and this torch has no GPU to allocate on.")
    seen = "; ".join(f"{name}={value}" for name, value in given.items())
    parsed = {name: _options(value) for name, value in given.items()}
    if any(options is None for options in parsed.values()):
        fix = Fix("Unset it: torch's own defaults are sound.", unset=tuple(given), safe=True)
        return problem(f"{seen} is not of the form name:value,name:value.", "torch ends with an error.", fix)
    read = next(iter(given))
    wrong, kept = _wrong(parsed[read] or {}, facts)
    if len({tuple(sorted((each or {}).items())) for each in parsed.values()}) > 1:
        wrong.insert(0, f"they say different things, and torch reads {read} alone")
    if not wrong:
        return fine(f"{seen}.")
    return problem(
        f"{seen}: {'; '.join(wrong)}.",
        "Memory is reserved that nobody uses, until a picture no longer fits; or the setting does nothing.",
        _fix(given, kept),
    )


def _wrong(options: dict[str, str], facts: Facts) -> tuple[list[str], dict[str, str]]:
    """What is wrong, and the options that are left when it is fixed."""
    wrong, kept = [], dict(options)
    segments = options.get("expandable_segments", "").lower() == "true"
    if segments and "max_split_size_mb" in options:
        wrong.append(
            "expandable_segments together with max_split_size_mb was seen to reserve 14,060 MiB in place of 220"
        )
        kept.pop("max_split_size_mb")
    if segments and facts.torch.build == "rocm" and numbers(facts.torch.version) < _SEGMENTS_ON_ROCM:
        wrong.append(
            f"expandable_segments has no effect in ROCm builds before torch 2.12, and this is {facts.torch.version}"
        )
        kept.pop("expandable_segments")
    threshold = options.get("garbage_collection_threshold")
    if threshold is not None and not _is_share(threshold):
        wrong.append(f"garbage_collection_threshold is a share between 0 and 1, and not {threshold}")
        kept.pop("garbage_collection_threshold")
    return wrong, kept


def _fix(given: dict[str, str], kept: dict[str, str]) -> Fix:
    value = ",".join(f"{name}:{setting}" for name, setting in kept.items())
    if not value:
        return Fix("Unset it: torch's own defaults are sound.", unset=tuple(given), safe=True)
    # The one that torch reads now.
    name = next(iter(given))
    unset = tuple(other for other in given if other != name)
    return Fix(f"Set {name}={value} alone.", env={name: value}, unset=unset, safe=True)


def _options(value: str) -> dict[str, str] | None:
    options = {}
    for part in value.replace("[", "").replace("]", "").split(","):
        name, colon, setting = part.strip().partition(":")
        if not colon or not name.strip() or not setting.strip():
            return None
        options[name.strip()] = setting.strip()
    return options


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False
