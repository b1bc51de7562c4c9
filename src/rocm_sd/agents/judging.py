"""How high a proposal climbs, and what it would be worth: each rung in a walled-in process, the first failure ends it.

    judge = Judge(OPS["geglu"], ("gfx1100", "gfx942"))
    judged = judge(proposal)                  # rungs with their findings, modelled times, and the verdict
    judged.finding                            # what goes back to the proposer

A verdict is `offered` where every rung was passed and the work that was counted, as a modelled time, is less than what
the shipped kernel needs; on a card the measured time decides in its place. What a process answers is read strictly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from rocm_sd import arch as archs
from rocm_sd.agents.asking import Asking, plain
from rocm_sd.agents.confinement import LIMITS
from rocm_sd.agents.modelling import Work, ratio, worse
from rocm_sd.agents.proposals import Proposal, why_not_allowed
from rocm_sd.agents.verdicts import (
    ENDED,
    LEAST_GAIN,
    OFFERED,
    REFUSED,
    RULES,
    SLOWER,
    Judged,
    Rung,
    Timing,
    has_failed,
)
from rocm_sd.errors import MissingDependency, RocmSdError
from rocm_sd.typed_json import Misfit
from rocm_sd.verify.proofs import EMULATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.agents.confinement import Limits
    from rocm_sd.ops.registry import Op

__all__ = [
    "OFFERED",
    "REFUSED",
    "RULES",
    "SHARE",
    "SLOWER",
    "Judge",
    "Judged",
    "OnCard",
    "Rung",
    "Timing",
]

# To interpret a million values of a product takes a minute of a core, and more by the clock where others use it.
_LIMITS = replace(LIMITS, seconds=900.0, cpu_seconds=300)
_MOST_SAID = 1500
# Configs that one process tries: a fault of one costs the others their start alone.
_AT_ONCE = 16
SHARE = "share"  # of the shipped config's time, in the figures of a rung that the best of a space need not climb
# Of a space: whoever is refused by a rung leaves its place to the next best.
_MOST_CLIMBS = 3


class OnCard(Protocol):
    """Rung 5 and the times of a proposal, on the card whose architecture it names."""

    @property
    def arch(self) -> str: ...

    def climbed(
        self, proposal: Proposal, job: Mapping[str, Any], files: Mapping[str, str]
    ) -> tuple[Rung, tuple[Timing, ...]]:
        """Raises RocmSdError or Misfit where its process ends, or makes something up."""

    def searched(self, proposal: Proposal, job: Mapping[str, Any]) -> list[tuple[float, dict[str, int]]]:
        """(share of the shipped config's time, config) of those that are right there, the best first."""


class Judge(Asking):
    """Of proposals for one op. `note` hears which rung is being climbed; `limits` are those of each process.

    `gains_alone`: what the model finds no faster climbs no rung, where nobody learns from what it would have found.
    """

    def __init__(
        self,
        op: Op,
        architectures: Sequence[str],
        note: Callable[[str], object] = lambda _what: None,
        limits: Limits = _LIMITS,
        card: OnCard | None = None,
        *,
        gains_alone: bool = False,
    ) -> None:
        super().__init__(op, architectures, limits)
        self._note, self._gains_alone = note, gains_alone
        self._card = card if card is not None and card.arch in self.architectures else None
        self._require_a_card_where_nothing_else_proves()
        self._shipped: dict[str, Work] = {}

    def _require_a_card_where_nothing_else_proves(self) -> None:
        there = {*self._read, *([self._card.arch] if self._card is not None else [])}
        for name in self.architectures:
            if name not in there:
                raise RocmSdError(
                    f"Kernels for {name} are proven on such a card alone, and none is here.",
                    hint=f"Name architectures that are proven without one: --arch {','.join(EMULATED)}",
                )

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

    def shipped(self, kind: str = "kernel", bucket: str = "", source: str = "") -> Work:
        """Of what is shipped, by architecture and call."""
        key = f"{kind == 'hip'} {bucket}"
        if key not in self._shipped:
            self._note("the shipped kernel")
            self._shipped[key] = self.shipped_as(
                Proposal("hip" if kind == "hip" else "kernel", bucket=bucket, source=source)
            )
        return self._shipped[key]

    def shipped_as(self, asked: Proposal) -> Work:
        """The same of the shipped kernel with another config, or of one bucket."""
        if not self._read:
            return Work({}, {})
        interpreted, compiled = self._figures(asked, {})
        return self._modelled(asked, compiled.compiled, interpreted.counted)

    def _best_of(self, proposal: Proposal, allowed: Rung) -> Judged:
        """Of all configs the best climbs, by the times that a card measured where there is one, else by modelled ones:
        and where it is refused, the next.
        """
        configs, faults = list(proposal.configs()), list[str]()
        ranked: list[tuple[float, dict[str, int]]] = []
        try:
            if self._card is not None:
                configs = list(self._interpretable(proposal, configs, faults))
            if self._read:
                ranked = self._ranked(proposal, configs, faults)
                configs = [config for _, config in ranked]
            if self._card is not None and configs:
                self._note(f"{len(configs)} configs on the card")
                ranked = self._card.searched(proposal, self._job(proposal, climb=True) | {"configs": configs})
        except (RocmSdError, Misfit) as error:
            return Judged(REFUSED, (allowed, Rung(3, "any", "failed", str(error)[:_MOST_SAID])))
        if not ranked:
            said = "; ".join(faults)[:_MOST_SAID]
            return Judged(REFUSED, (allowed, Rung(3, "any", "failed", f"no config could be used: {said}")))
        share, best = ranked[0]
        if share > (1.0 - LEAST_GAIN if self._card is None else 1.0):
            where, how = (4, "modelled") if self._card is None else (5, "measured")
            said = f"the best of {len(ranked)} configs needs {share:.3f} of the shipped config's {how} time"
            arch = "any" if self._card is None else self._card.arch
            rung = Rung(where, arch, "skipped", said, {SHARE: share, ENDED: 1})
            return Judged(SLOWER, (allowed, rung), config=best)
        judged = Judged(REFUSED, (allowed,))
        for _, config in ranked[:_MOST_CLIMBS]:
            judged = self._climbed(replace(proposal, kind="config", config=config, space={}, listed=()), (allowed,))
            if judged.verdict != REFUSED:
                break
        return judged

    def _ranked(
        self, proposal: Proposal, configs: Sequence[dict[str, int]], faults: list[str]
    ) -> list[tuple[float, dict[str, int]]]:
        """(share of the shipped time, config), the best first, of those that compile and fail no gate."""
        shipped = self.shipped(proposal.kind, proposal.bucket, proposal.source)
        found: list[tuple[float, dict[str, int]]] = []
        for some in _pieces(configs):
            self._note(f"{len(configs)} configs, compiled and counted")
            counted = self._each("interpret_each", proposal, some, interpret=True)
            compiled = self._each("figures_of_each", proposal, some)
            for config, one, other in zip(some, counted, compiled, strict=True):
                fault = one.fault or other.fault or _failed_gates(other.figures)
                if not fault:
                    try:
                        work = self._modelled(proposal, other.figures, one.figures)
                        found.append((_mean(ratio(work, shipped)), config))
                    except (RocmSdError, Misfit) as error:
                        fault = str(error)
                if fault:
                    faults.append(f"{config}: {fault}")
        return sorted(found, key=lambda each: (each[0], tuple(each[1].values())))

    def _interpretable(
        self, proposal: Proposal, configs: Sequence[dict[str, int]], faults: list[str]
    ) -> Iterator[dict[str, int]]:
        """Those of the op's own space, which every test run interprets; of others those that pass rung 2 at small
        sizes: nothing that is unproven comes to the card.
        """
        own = self._own_space(proposal.bucket)
        yield from (config for config in configs if config in own)
        for some in _pieces([config for config in configs if config not in own]):
            self._note(f"{len(some)} configs, interpreted")
            for config, one in zip(
                some, self._each("interpret_each", proposal, some, interpret=True, climb=True), strict=True
            ):
                if one.fault:
                    faults.append(f"{config}: {one.fault}")
                else:
                    yield config

    def _own_space(self, bucket: str) -> list[dict[str, int]]:
        assert self.op.tuning is not None
        assert self.op.verification is not None
        sample = next(each.sample for each in self.op.tuning.buckets if each.sample.name == bucket)
        problem = self.op.verification.problem(*sample.make(filled=False))
        return [
            config.to_dict() for name in self.architectures for config in self.op.tuning.space(problem, archs.get(name))
        ]

    def _climbed(self, proposal: Proposal, rungs: tuple[Rung, ...]) -> Judged:
        files = self._files(proposal)
        work, shipped = Work({}, {}), Work({}, {})
        timings: tuple[Timing, ...] = ()
        at = 3  # what it fails at where it does not compile
        try:
            if self._gains_alone and self._card is None and (found := self._without_gain(proposal, files, rungs)):
                return found
            at = 2
            counted: Mapping[str, Mapping[str, Any]] = {}
            if proposal.kind != "hip":
                self._note("rung 2, interpreted")
                interpreted = self._interpreted(proposal, files, climb=True)
                rungs, counted = rungs + interpreted.rungs, interpreted.counted
            at = 3
            if self._read and not has_failed(rungs):
                self._note("rungs 3 and 4, compiled and emulated")
                compiled = self._compiled(proposal, files, climb=True)
                rungs, counted = rungs + compiled.rungs, counted or compiled.counted
                if not has_failed(rungs):
                    work = self._modelled(proposal, compiled.compiled, counted)
            if not has_failed(rungs):
                rungs += tuple(_not_read(self.architectures, self._read))
                at = 5
                rungs, timings = self._on_card(proposal, files, rungs)
        except (RocmSdError, Misfit) as error:
            where = self._card.arch if at == 5 and self._card is not None else "any"
            return Judged(REFUSED, (*rungs, Rung(at, where, "failed", str(error)[:_MOST_SAID])), config=proposal.config)
        if has_failed(rungs):
            return Judged(REFUSED, rungs, config=proposal.config)
        if self._read:
            shipped = self.shipped(proposal.kind, proposal.bucket, proposal.source)
        judged = Judged(SLOWER, rungs, work.times, ratio(work, shipped), proposal.config, timings)
        if judged.is_better:
            return replace(judged, verdict=OFFERED)
        return replace(judged, worse=tuple(worse(work, shipped)))

    def _without_gain(self, proposal: Proposal, files: Mapping[str, str], rungs: tuple[Rung, ...]) -> Judged | None:
        """The verdict on what needs as much counted work as the shipped kernel; None where it is to climb."""
        self._note("its counted work")
        interpreted, compiled = self._figures(proposal, files)
        work = self._modelled(proposal, compiled.compiled, interpreted.counted or compiled.counted)
        shipped = self.shipped(proposal.kind, proposal.bucket, proposal.source)
        judged = Judged(SLOWER, (), work.times, ratio(work, shipped), proposal.config)
        if judged.is_better:
            return None
        left = Rung(2, "any", "skipped", "it needs no less counted work than the shipped kernel", {ENDED: 1})
        return replace(judged, rungs=(*rungs, left), worse=tuple(worse(work, shipped)))

    def _on_card(
        self, proposal: Proposal, files: Mapping[str, str], rungs: tuple[Rung, ...]
    ) -> tuple[tuple[Rung, ...], tuple[Timing, ...]]:
        """A proposal that seems faster is timed a second time, in a process of its own, and those times are what
        counts: of many proposals that are as fast as the shipped kernel, some win the first time by chance.
        """
        if self._card is None:
            return rungs, ()
        timings: tuple[Timing, ...] = ()
        rung = None
        for what in ("on the card", "on the card, once more"):
            self._note(f"rung 5, {what}")
            rung, timings = self._card.climbed(proposal, self._job(proposal, climb=True), files)
            if rung.state == "failed" or not Judged(SLOWER, (), measured=timings).is_better:
                break
        assert rung is not None
        return (*rungs, rung), () if rung.state == "failed" else timings


def _pieces(configs: Sequence[dict[str, int]]) -> Iterator[list[dict[str, int]]]:
    left = iter(configs)
    while some := list(islice(left, _AT_ONCE)):
        yield some


def _not_read(architectures: Sequence[str], read: Sequence[str]) -> Iterator[Rung]:
    for name in architectures:
        if name not in read:
            yield Rung(3, name, "skipped", "no gate and no emulator reads machine code for it: the card alone judges")


def _failed_gates(compiled: Mapping[str, Mapping[str, Any]]) -> str:
    """Rung 3 refuses for any of them; what is no launch is found by the model."""
    launches = [each for calls in compiled.values() for found in calls.values() for each in found]
    failed = [each["failed"] for each in launches if isinstance(each, dict) and isinstance(each.get("failed"), dict)]
    return "; ".join(plain(f"{name}: {said}") for each in failed for name, said in each.items())


def _mean(shares: Mapping[str, float]) -> float:
    return math.exp(sum(math.log(value) for value in shares.values()) / len(shares))
