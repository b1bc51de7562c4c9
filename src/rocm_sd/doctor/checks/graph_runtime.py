"""Is this a release of ROCm whose graphs are known to go wrong?"""

from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts, known_as, numbers
from rocm_sd.doctor.wheels import pip_line

__all__ = ["graph_runtime"]

_SWITCH = "ROCM_SD_STEP_GRAPH"


@dataclass(frozen=True)
class _Release:
    """Releases `first` to `last` go wrong so; `seen_on` are the families of GPUs that it was reported of."""

    first: tuple[int, int, int]
    last: tuple[int, int, int]
    seen_on: tuple[str, ...]
    how: str
    report: str

    def has(self, version: tuple[int, ...]) -> bool:
        """Whether it is one of them; of "7.2", which a wheel is named by, the last number is not known."""
        if len(version) == 2:
            return version == self.first[:2]
        return self.first <= version[:3] <= self.last


# The ROCm inside PyTorch's own wheel of torch 2.13, which set-up falls back to, is 7.2.
_RELEASES = (
    _Release(
        (7, 2, 0),
        (7, 2, 3),
        ("cdna3",),
        "in about one process of five what a graph replays is corrupt",
        "ROCm/clr#279",
    ),
)


@check(measures="the release of ROCm against those whose graphs were reported to go wrong", reports="ROCm/clr#279")
def graph_runtime(facts: Facts, _probes: Probes) -> Finding:
    meant = facts.meant
    if meant is None or facts.torch.build != "rocm":
        return not_here("There is no AMD GPU, or torch is not built for ROCm.")
    version = numbers(facts.rocm)
    if not version:
        raise CannotRun("the release of ROCm is not known")
    known = next((each for each in _RELEASES if each.has(version)), None)
    if known is None:
        return fine(f"Nothing is known against the graphs of ROCm {facts.rocm}.", "graph_replay tries them.")
    which = f"{'.'.join(map(str, known.first))} to {'.'.join(map(str, known.last))}"
    if meant.gfx is None or known_as(meant.gfx).family not in known.seen_on:
        says = f"ROCm {facts.rocm}: of {which} it is reported ({known.report}) that {known.how}, but not on such a GPU."
        return fine(says, "rocm-sd compares what a graph replays before it uses it, and graph_replay tries them.")
    says = f"This is ROCm {facts.rocm}, and of {which} it is reported ({known.report}) that {known.how}."
    means = "Pictures may be wrong without an error in some runs, though one comparison was right."
    line = pip_line((meant.gfx,), numbers(facts.python))
    fix = Fix(
        f"Install a torch with another ROCm; until then {_SWITCH}=0 draws without graphs, and slower.",
        env={_SWITCH: "0"},
        commands=(line,) if line is not None and not line.endswith('+rocm7.2"') else (),
    )
    return problem(says, means, fix, {"rocm": facts.rocm, "gfx": meant.gfx})
