"""The modelled time of a proposal, from what processes have counted and compiled, beside that of the shipped kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import typed_json
from rocm_sd.errors import RocmSdError
from rocm_sd.tuning.ranking import model
from rocm_sd.tuning.static.tasks import CompiledLaunch
from rocm_sd.verify.programs import CountedLaunch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Work", "modelled", "ratio", "worse"]

_WORSE = 1.005  # of the shipped kernel's count, before a finding names it


@dataclass(frozen=True)
class Work:
    """Modelled times, and by architecture what they come from: larger is worse."""

    times: dict[str, dict[str, float]]
    counts: dict[str, dict[str, float]]


def ratio(work: Work, shipped: Work) -> dict[str, float]:
    return {
        arch: max(
            0.0001,
            round(math.prod(us / shipped.times[arch][call] for call, us in calls.items()) ** (1 / len(calls)), 4),
        )
        for arch, calls in work.times.items()
    }


def worse(work: Work, shipped: Work) -> Iterator[str]:
    for arch, counts in work.counts.items():
        for name, count in counts.items():
            before = shipped.counts[arch].get(name, 0.0)
            if count > before * _WORSE:
                more = f"{count / before:.2f} times" if before else f"{count:.6g} in place of none"
                yield f"{arch}: {name}, {more}"


def _count(counts: dict[str, float], made: CompiledLaunch, counted: CountedLaunch) -> None:
    """Add what all workgroups of a launch do; registers and LDS are those of the launch that has most."""
    groups, code, program = math.prod(made.grid), made.code, counted.program
    waves = groups * code.waves
    sums = {
        "bytes loaded": groups * program.loaded,
        "bytes stored": groups * program.stored,
        "vector instructions": waves * (code.main.vector + code.rest.vector),
        "transcendental instructions": waves * (code.main.transcendental + code.rest.transcendental),
        "matrix operations": groups * program.matrix_flops(code.waves),
    }
    for name, value in sums.items():
        counts[name] = counts.get(name, 0.0) + value
    for name, value in (("VGPRs", made.vgprs), ("bytes of LDS", made.lds)):
        counts[name] = max(counts.get(name, 0.0), value)


def modelled(
    calls: Sequence[str],
    architectures: Sequence[str],
    compiled: Mapping[str, Mapping[str, Any]],
    counted: Mapping[str, Mapping[str, Any]],
) -> Work:
    """A call's launches one after the other; a gate's blemishes have ended the climb before."""
    wanted = {arch: set(calls) for arch in architectures}
    if any({arch: set(each) for arch, each in found.items()} != wanted for found in (compiled, counted)):
        raise RocmSdError("The process answered with other calls than were to be modelled.")
    work = Work({}, {})
    for arch in architectures:
        times, counts = work.times.setdefault(arch, {}), work.counts.setdefault(arch, {})
        for call in calls:
            made = [typed_json.read(CompiledLaunch, each) for each in compiled[arch][call]]
            programs = [typed_json.read(CountedLaunch, each) for each in counted[arch][call]]
            if [(each.kernel, each.grid) for each in made] != [(each.kernel, each.grid) for each in programs]:
                raise RocmSdError(f"Other kernels or grids were counted than were compiled, for {call} on {arch}.")
            seconds = 0.0
            for one, other in zip(made, programs, strict=True):
                seconds += model(archs.get(arch), math.prod(one.grid), one.code, other.program).seconds
                _count(counts, one, other)
            times[call] = round(seconds * 1e6, 3)
            if not 0.0 < times[call] < math.inf:
                raise RocmSdError(f"The process answered with figures that make no time, for {call} on {arch}.")
    return work
