"""How high a proposal climbs, and what it would be worth: each rung in a walled-in process, the first failure ends it.

    judge = Judge(OPS["geglu"], ("gfx1100", "gfx942"))
    judged = judge(proposal)                  # rungs with their findings, modelled times, and the verdict
    judged.finding                            # what goes back to the proposer

A verdict is `offered` where every rung was passed and the work that was counted, as a modelled time, is less than what
the shipped kernel needs; on a card the measured time decides in its place. What a process answers is read strictly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import typed_json
from rocm_sd.agents.confinement import LIMITS, confined
from rocm_sd.agents.proposals import Proposal, module_of, why_not_allowed
from rocm_sd.agents.trying import KERNELS, MANY, SOURCE
from rocm_sd.errors import MissingDependency, RocmSdError
from rocm_sd.tuning.ranking import model
from rocm_sd.tuning.static.tasks import CompiledLaunch
from rocm_sd.typed_json import Misfit, Rules
from rocm_sd.verify.ladder import EMULATED, HOST
from rocm_sd.verify.programs import CountedLaunch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.agents.confinement import Limits
    from rocm_sd.ops.registry import Op

__all__ = ["OFFERED", "REFUSED", "RULES", "SLOWER", "Judge", "Judged", "Rung", "Timing"]

OFFERED, SLOWER, REFUSED = "offered", "no better", "refused"
# Less than that is within what the model leaves out.
_LEAST_GAIN = 0.01
_TRYING = "rocm_sd.agents.trying"
# To interpret a million values of a product takes a minute of a core, and more by the clock where others use it.
_LIMITS = replace(LIMITS, seconds=900.0, cpu_seconds=300)
_MOST_SAID = 1500
_WORSE = 1.005  # of the shipped kernel's count, before a finding names it
# Of whoever wrote down a rung or a verdict: a process, or the file of a stranger.
RULES: Rules = {
    "Rung.rung": {"minimum": 1, "maximum": 5},
    "Rung.state": {"enum": ["passed", "failed", "skipped"]},
    "Judged.verdict": {"enum": [OFFERED, SLOWER, REFUSED]},
}
_Times = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Rung:
    """`arch` names what it was shown on: an architecture, or the machine itself."""

    rung: int
    arch: str
    state: str
    finding: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Measured on a card, in turns with the kernel that is shipped: how many times as fast, with its interval."""

    device: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Judged:
    """`modelled`: microseconds by architecture and call; `ratio`: their share of the shipped kernel's.

    `worse`: of one that is no better, which counted work is more than the shipped kernel's, in words.
    """

    verdict: str
    rungs: tuple[Rung, ...]
    modelled: dict[str, dict[str, float]] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)
    measured: tuple[Timing, ...] = ()
    worse: tuple[str, ...] = ()

    @property
    def height(self) -> int:
        """The highest rung that was passed on all that it was tried on."""
        failed = {each.rung for each in self.rungs if each.state == "failed"}
        passed = {each.rung for each in self.rungs if each.state != "failed"} - failed
        return max((rung for rung in passed if not failed or rung < min(failed)), default=0)

    @property
    def finding(self) -> str:
        """One paragraph for who proposed it."""
        failed = next((each for each in self.rungs if each.state == "failed"), None)
        if failed is not None:
            where = "" if failed.rung == 1 else f" ({failed.arch})"
            return f"It failed at rung {failed.rung}, {_RUNGS[failed.rung]}{where}: {failed.finding}"
        times = "; ".join(f"{arch}: {value:.3f} of the shipped kernel's time" for arch, value in self.ratio.items())
        figures = "; ".join(
            f"{each.arch}: {each.figures['vgprs']} VGPRs, {each.figures['lds']} bytes of LDS, "
            f"{each.figures['waves_per_simd']} waves a SIMD"
            for each in self.rungs
            if each.rung == 3 and {"vgprs", "lds", "waves_per_simd"} <= set(each.figures)
        )
        worse = f" Worse than the shipped kernel: {'; '.join(self.worse)}." if self.worse else ""
        return f"It passed every rung. Modelled: {times}. Machine code: {figures}.{worse}"

    @property
    def score(self) -> float:
        """The geometric mean over architectures; infinity for what failed."""
        if self.verdict == REFUSED or not self.ratio or min(self.ratio.values()) <= 0.0:
            return math.inf
        return math.exp(sum(math.log(value) for value in self.ratio.values()) / len(self.ratio))


_RUNGS = {
    1: "what a proposal may contain",
    2: "results in the interpreter",
    3: "gates on machine code",
    4: "execution of the machine code",
    5: "results on the card",
}


@dataclass(frozen=True)
class _Interpreted:
    rungs: tuple[Rung, ...]
    counted: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Compiled:
    rungs: tuple[Rung, ...]
    compiled: dict[str, dict[str, Any]]
    counted: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Work:
    """Modelled times, and by architecture what they come from: larger is worse."""

    times: _Times
    counts: dict[str, dict[str, float]]


class Judge:
    """Of proposals for one op. `note` hears which rung is being climbed; `limits` are those of each process."""

    def __init__(
        self,
        op: Op,
        architectures: Sequence[str],
        note: Callable[[str], object] = lambda _what: None,
        limits: Limits = _LIMITS,
    ) -> None:
        self.op, self.architectures, self._note, self._limits = op, tuple(architectures), note, limits
        self._shipped: dict[str, _Work] = {}

    def __call__(self, proposal: Proposal) -> Judged:
        reason = why_not_allowed(self.op, proposal)
        if reason is not None:
            return Judged(REFUSED, (Rung(1, "any", "failed", reason[:_MOST_SAID]),))
        # What a process lacks would else be the fault of every proposal.
        if find_spec("triton") is None:
            raise MissingDependency("triton", "verify")
        allowed = Rung(1, "any", "passed", "it contains nothing but what is allowed")
        if proposal.kind == "space":
            return self._best_of(proposal, allowed)
        return self._climbed(proposal, (allowed,))

    def shipped(self, kind: str = "kernel", bucket: str = "", source: str = "") -> _Work:
        """Of what is shipped, by architecture and call."""
        key = f"{kind == 'hip'} {bucket}"
        if key not in self._shipped:
            self._note("the shipped kernel")
            self._shipped[key] = self.shipped_as(
                Proposal("hip" if kind == "hip" else "kernel", bucket=bucket, source=source)
            )
        return self._shipped[key]

    def shipped_as(self, asked: Proposal) -> _Work:
        """The same of the shipped kernel with another config, or of one bucket."""
        interpreted, compiled = self._figures(asked, {})
        return self._modelled(asked, compiled.compiled, interpreted.counted)

    def _best_of(self, proposal: Proposal, allowed: Rung) -> Judged:
        """Of all configs the one whose work is least climbs; the others are told by their modelled times."""
        times: list[tuple[float, dict[str, int]]] = []
        faults: list[str] = []
        shipped = self.shipped(proposal.kind, proposal.bucket, proposal.source)
        for config in proposal.configs():
            each = replace(proposal, kind="config", config=config, space={})
            self._note(f"{config}")
            try:
                interpreted, compiled = self._figures(each, {})
                work = self._modelled(each, compiled.compiled, interpreted.counted)
            except (RocmSdError, Misfit) as error:
                # Also a config that does not compile: the others may.
                faults.append(f"{config}: {error}")
                continue
            times.append((math.prod(_ratio(work, shipped).values()), config))
        if not times:
            said = "; ".join(faults)[:_MOST_SAID]
            return Judged(REFUSED, (allowed, Rung(3, "any", "failed", f"no config could be compiled: {said}")))
        _, best = min(times, key=lambda each: (each[0], tuple(each[1].values())))
        return self._climbed(replace(proposal, kind="config", config=best, space={}), (allowed,))

    def _climbed(self, proposal: Proposal, rungs: tuple[Rung, ...]) -> Judged:
        files = self._files(proposal)
        try:
            counted: Mapping[str, Mapping[str, Any]] = {}
            if proposal.kind != "hip":
                self._note("rung 2, interpreted")
                interpreted = self._interpreted(proposal, files, climb=True)
                rungs, counted = rungs + interpreted.rungs, interpreted.counted
            if not _has_failed(rungs):
                self._note("rungs 3 and 4, compiled and emulated")
                compiled = self._compiled(proposal, files, climb=True)
                rungs, counted = rungs + compiled.rungs, counted or compiled.counted
            if not _has_failed(rungs):
                work = self._modelled(proposal, compiled.compiled, counted)
        except (RocmSdError, Misfit) as error:
            at = 2 if proposal.kind != "hip" and len(rungs) == 1 else 3
            ended = Rung(at, "any", "failed", str(error)[:_MOST_SAID])
            return Judged(REFUSED, (*rungs, ended), config=proposal.config)
        if _has_failed(rungs):
            return Judged(REFUSED, rungs, config=proposal.config)
        shipped = self.shipped(proposal.kind, proposal.bucket, proposal.source)
        ratio = _ratio(work, shipped)
        if max(ratio.values()) <= 1.0 and min(ratio.values()) <= 1.0 - _LEAST_GAIN:
            return Judged(OFFERED, rungs, work.times, ratio, proposal.config)
        return Judged(SLOWER, rungs, work.times, ratio, proposal.config, worse=tuple(_worse(work, shipped)))

    def _modelled(
        self, proposal: Proposal, compiled: Mapping[str, Mapping[str, Any]], counted: Mapping[str, Mapping[str, Any]]
    ) -> _Work:
        """Raises RocmSdError or Misfit for whatever figures a process may have made up."""
        assert self.op.tuning is not None
        names = [bucket.sample.name for bucket in self.op.tuning.buckets]
        calls = [name for name in names if proposal.bucket in {"", name}]
        try:
            return _modelled(calls, self.architectures, compiled, counted)
        except (ArithmeticError, LookupError, TypeError) as error:
            raise RocmSdError(
                f"The process answered with figures that no kernel has ({type(error).__name__})."
            ) from error

    def _files(self, proposal: Proposal) -> dict[str, str]:
        if proposal.kind == "hip":
            return {SOURCE: proposal.text}
        return {KERNELS: module_of(self.op, proposal)} if proposal.kind == "kernel" else {}

    def _figures(self, proposal: Proposal, files: Mapping[str, str]) -> tuple[_Interpreted, _Compiled]:
        """What the model needs, and no rung."""
        compiled = self._compiled(proposal, files, climb=False)
        if proposal.kind == "hip":
            return _Interpreted((), compiled.counted), compiled
        return self._interpreted(proposal, files, climb=False), compiled

    def _interpreted(self, proposal: Proposal, files: Mapping[str, str], *, climb: bool) -> _Interpreted:
        answer = confined(
            f"{_TRYING}:interpret",
            self._job(proposal, climb=climb),
            files=files,
            environment={"TRITON_INTERPRET": "1"},
            limits=self._limits,
        )
        found = typed_json.read(_Interpreted, answer, RULES, top="the process's answer")
        return replace(found, rungs=_climbed(found.rungs, [(2, HOST), (2, MANY)] if climb else []))

    def _compiled(self, proposal: Proposal, files: Mapping[str, str], *, climb: bool) -> _Compiled:
        job = self._job(proposal, climb=climb)
        answer = confined(f"{_TRYING}:compile_and_execute", job, files=files, limits=self._limits)
        found = typed_json.read(_Compiled, answer, RULES, top="the process's answer")
        emulated = [(4, arch) for arch in self.architectures if arch in EMULATED]
        wanted = [*((3, arch) for arch in self.architectures), *emulated]
        return replace(found, rungs=_climbed(found.rungs, wanted if climb else []))

    def _job(self, proposal: Proposal, *, climb: bool) -> dict[str, Any]:
        return {
            "op": self.op.name,
            "source": proposal.source,
            "bucket": proposal.bucket,
            "config": proposal.config,
            "architectures": list(self.architectures),
            "climb": climb,
        }


def _has_failed(rungs: Sequence[Rung]) -> bool:
    return any(each.state == "failed" for each in rungs)


def _climbed(found: Sequence[Rung], wanted: Sequence[tuple[int, str]]) -> tuple[Rung, ...]:
    """All that were to be climbed, or those to the first that failed: nothing is passed by leaving it out. Their words
    may be those of a proposal, and no terminal obeys them.
    """
    climbed = [(each.rung, each.arch) for each in found]
    failed = [number for number, each in enumerate(found, 1) if each.state == "failed"]
    whole = failed == [len(found)] if failed else len(found) == len(wanted)
    if not whole or climbed != list(wanted)[: len(climbed)]:
        shown = ", ".join(f"{rung} on {arch}" for rung, arch in wanted) or "none"
        raise RocmSdError(f"The process answered with other rungs than were to be climbed ({shown}).")
    figures = [{name: _plain(value) for name, value in each.figures.items()} for each in found]
    return tuple(
        replace(each, finding=_plain(each.finding), figures=values) for each, values in zip(found, figures, strict=True)
    )


def _plain(value: Any) -> Any:
    return "".join(each if each.isprintable() else " " for each in value) if isinstance(value, str) else value


def _ratio(work: _Work, shipped: _Work) -> dict[str, float]:
    return {
        arch: max(
            0.0001,
            round(math.prod(us / shipped.times[arch][call] for call, us in calls.items()) ** (1 / len(calls)), 4),
        )
        for arch, calls in work.times.items()
    }


def _worse(work: _Work, shipped: _Work) -> Iterator[str]:
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


def _modelled(
    calls: Sequence[str],
    architectures: Sequence[str],
    compiled: Mapping[str, Mapping[str, Any]],
    counted: Mapping[str, Mapping[str, Any]],
) -> _Work:
    """A call's launches one after the other; a gate's blemishes have ended the climb before."""
    wanted = {arch: set(calls) for arch in architectures}
    if any({arch: set(each) for arch, each in found.items()} != wanted for found in (compiled, counted)):
        raise RocmSdError("The process answered with other calls than were to be modelled.")
    work = _Work({}, {})
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
