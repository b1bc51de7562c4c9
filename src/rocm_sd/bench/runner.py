"""Engines side by side in one interleaved run: right first, then timed; what is measured is never lost.

For each batch size: exact latents, each engine made ready and compared with them, then pictures in turns. An engine
that is wrong, crashes or runs out of memory is skipped with the reason, and the others go on; where memory is short
for all of them, each has it alone in its turns. The card's own time, if it is asked for, is measured after all turns of
all batch sizes: no turn is timed in a process that a profiler was in.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd import arch, plugging
from rocm_sd.bench.gate import PictureGate, free_memory
from rocm_sd.bench.lossy import Judged, LossyJudge
from rocm_sd.bench.machine import PeakMemory, Points, machine
from rocm_sd.bench.profiling.recording import card_ms
from rocm_sd.bench.records import OURS, STOCK, Comparison, Measurement, Record, continued, now, record_file
from rocm_sd.bench.sensors import watch
from rocm_sd.bench.turns import Effort, Failed, Pipelines, failure_line, forget_compiled, is_short, without_folders
from rocm_sd.measuring import Stopwatch, compare, interleaved, settled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from rocm_sd.bench.engines import Engine
    from rocm_sd.bench.turns import Progress
    from rocm_sd.bench.workloads import Workload

__all__ = ["default_repeats", "run"]

log = logging.getLogger("rocm_sd")
# Of a pipeline that is made anew for its turn: the first compiles and captures, the second replays.
_PICTURES_BEFORE_A_TURN = 2
_SAVE_EVERY_S = 5.0
_SENSED_S = 2.0
_NO_CARD_TIME = "no card time: "


def default_repeats(device: torch.device) -> int:
    """On a CPU as many as an interval needs, within a minute."""
    return 8 if device.type == "cpu" else 20


def run(
    workload: Workload,
    engines: Sequence[Engine],
    batches: Sequence[int],
    *,
    out: Path,
    kind: str = "engines",
    repeats: int | None = None,
    resume: bool = True,
    cold: bool = False,
    command: str = "",
    against: str = STOCK,
    card_times: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Measure, and keep the record in `record_file(out, ...)` up to date. Ctrl-C leaves one that can be resumed.

    Every engine is compared with the one called `against`. The numerics gate compares with a stock pipeline of its own,
    whether or not that is among the engines. `card_times`: how long the device is busy is measured too, of one batch.
    """
    repeats = repeats or default_repeats(workload.device)
    planned = {
        "engines": {engine.name: engine.version() for engine in engines},
        "batches": list(batches),
        "repeats": repeats,
        "cold": cold,
    }
    record = Record(
        kind, workload.facts, machine(workload.device), command, now(), (), complete=False, extra={"planned": planned},
        loading=workload.loading,
    )  # fmt: skip
    file = record_file(out, workload.name, kind)
    with continued(file, record, resume=resume) as begun:
        return _EngineRun(
            workload, tuple(engines), tuple(batches), repeats, against, card_times, begun, file,
            Stopwatch(workload.device, cold=cold),
            Effort(workload.facts.steps, len(engines), batches, repeats, _PICTURES_BEFORE_A_TURN, progress),
        ).go()  # fmt: skip


@dataclass
class _EngineRun:
    workload: Workload
    engines: tuple[Engine, ...]
    batches: tuple[int, ...]
    repeats: int
    against: str
    with_card_times: bool
    record: Record
    file: Path
    stopwatch: Stopwatch
    effort: Effort
    saved_at: float = 0.0

    def __post_init__(self) -> None:
        self.device = self.workload.device
        self.lossy = LossyJudge(self.workload)
        self.measured = {(one.engine, one.batch): one for one in self.record.measurements}
        if self.with_card_times:
            self.effort.expect_card_times()

    def go(self) -> Record:
        try:
            for number, batch in enumerate(self.batches):
                ready = self._batch(batch)
                self.effort.finish_batch(batch)
                if not any(self._missing(each) for each in self.batches[number + 1 :]):
                    # The last turn is taken, and the pipelines are warm.
                    self._measure_card_times(batch, ready)
                ready.clear()
                forget_compiled()
            for batch in self.batches[:-1]:
                self._measure_card_times(batch, {})
                forget_compiled()
            self.effort.finish()
            self.save(complete=True)
        except KeyboardInterrupt:
            self.save()
            raise
        return self.record

    def save(self, *, complete: bool = False) -> None:
        order = {engine.name: place for place, engine in enumerate(self.engines)}
        measurements = sorted(
            self.measured.values(), key=lambda one: (self.batches.index(one.batch), order[one.engine])
        )
        self.record = replace(
            self.record, measurements=tuple(measurements), comparisons=tuple(self._comparisons()), complete=complete
        )
        self.record.save(self.file)
        self.saved_at = time.perf_counter()

    def _comparisons(self) -> list[Comparison]:
        """Every engine with stock, or what stands for it, and ours with every other that draws the same pictures."""
        found = []
        for batch in self.batches:
            timed = {e.name: m.ms for e in self.engines if (m := self.measured.get((e.name, batch))) and m.ms}
            pairs = [(name, self.against) for name in timed if name != self.against]
            rivals = [name for name in timed if not self.measured[name, batch].quality.is_lossy]
            pairs += [(OURS, name) for name in rivals if name not in {self.against, OURS}]
            found += [
                compare(ours, theirs, batch, timed[ours], timed[theirs])
                for ours, theirs in pairs
                if ours in timed and theirs in timed
            ]
        return found

    def _batch(self, batch: int) -> dict[str, Any]:
        """Everything but the card's own time. Returns the pipelines that are ready by now, by engine."""
        todo = self._missing(batch)
        if not todo:
            return {}
        self.effort.advance(0, f"batch {batch}: exact latents")
        try:
            gate = PictureGate(self.workload, batch)
        except Exception as error:  # noqa: BLE001 -- out of memory most likely: without a reference nothing is timed
            for engine in todo:
                self._skip(engine.name, batch, f"nothing to compare it with: {failure_line(error)}")
            free_memory()
            return {}
        self.effort.advance(self.effort.gate * batch, f"batch {batch}")
        pipelines = Pipelines(lambda name: self._made_anew(name, batch))
        for engine in todo:
            self._prepare(engine, batch, gate, pipelines)
            self.save()
        self._timed(batch, pipelines)
        self._sensed(batch, pipelines)
        if pipelines.one_at_a_time:
            pipelines.give_up()
        return pipelines.kept

    def _missing(self, batch: int) -> list[Engine]:
        """Engines that have turns to take."""
        return [engine for engine in self.engines if not self._is_done(engine.name, batch)]

    def _is_done(self, engine: str, batch: int) -> bool:
        found = self.measured.get((engine, batch))
        return found is not None and (found.left_out is not None or len(found.ms) >= self.repeats)

    def _prepare(self, engine: Engine, batch: int, gate: PictureGate, pipelines: Pipelines) -> None:
        """Add the engine's pipeline to those that take turns, or skip it."""
        last = self.measured.get((pipelines.names[-1], batch)) if pipelines.names else None
        free_memory()
        if pipelines.one_at_a_time:
            pipelines.give_up()
        elif last is not None and is_short(self.device, last.first_run_mib):
            self._one_at_a_time(batch, pipelines)
            pipelines.give_up()
        failed = self._tried(engine, batch, gate, pipelines)
        if failed is not None and failed.is_short_of_memory and pipelines.kept:
            pipelines.give_up()
            failed = self._tried(engine, batch, gate, pipelines)
            if failed is None:
                self._one_at_a_time(batch, pipelines)
        if failed is not None:
            self._skip(engine.name, batch, failed.why)

    def _tried(self, engine: Engine, batch: int, gate: PictureGate, pipelines: Pipelines) -> Failed | None:
        try:
            pipe = self._prepared(engine, batch, gate)
        except plugging.FAULTS as error:  # whatever fails in one engine, the others go on
            failed = Failed(engine.name, error)
        else:
            if pipe is not None:
                pipelines.add(engine.name, pipe)
            return None
        # Not before: the error's frames keep what was made.
        free_memory()
        return failed

    def _one_at_a_time(self, batch: int, pipelines: Pipelines) -> None:
        note = f"batch {batch}: too little memory for all engines at once; each was made ready anew for its turns"
        log.warning("%s, which takes longer", note)
        self._note(note)
        pipelines.one_at_a_time = True
        self.effort.expect_one_at_a_time(batch)

    def _note(self, *notes: str) -> None:
        self.record = replace(self.record, notes=tuple(dict.fromkeys((*self.record.notes, *notes))))

    def _engine(self, name: str) -> Engine:
        return next(each for each in self.engines if each.name == name)

    def _made_anew(self, name: str, batch: int) -> Any:
        self.effort.advance(0, f"batch {batch}: {name} is made ready again")
        pipe = self._engine(name).prepare(self.workload.pipeline())
        for _ in range(_PICTURES_BEFORE_A_TURN):
            self.workload.picture(pipe, batch)
        self.effort.advance(self.effort.anew * batch, f"batch {batch}: {name} is ready")
        return pipe

    def _prepared(self, engine: Engine, batch: int, gate: PictureGate) -> Any | None:
        """The engine's pipeline after its warm-up and the gate, or None where it is skipped."""
        self.effort.advance(0, f"batch {batch}: {engine.name}, first picture")
        free_memory()
        memory = PeakMemory(self.device)
        pipe = self.workload.pipeline()
        started = time.perf_counter()
        pipe = engine.prepare(pipe)
        drawn = partial(self.workload.picture, pipe, batch)
        self.stopwatch.milliseconds(drawn)
        first_s, first_mib = time.perf_counter() - started, memory.mib()
        self.effort.advance(self.effort.picture * batch, f"batch {batch}: {engine.name}, second picture")
        with memory.over_time() as course:
            second_ms = self.stopwatch.milliseconds(drawn)
            second_mib = memory.mib()
        self._remember_memory(engine.name, batch, course)
        self.effort.advance(self.effort.picture * batch, f"batch {batch}: {engine.name}, compared with exact")
        judged = self._judged(engine, batch, gate, pipe)
        self.effort.advance(self.effort.check * batch, f"batch {batch}: {engine.name}, warming up")
        if judged.why_not:
            self._skip(engine.name, batch, judged.why_not, judged.error, judged.stock_error)
            return None
        started = time.perf_counter()
        with watch(self.device) as readings:
            settled(drawn, self.stopwatch, budget_s=self._warm_up_budget_s, before=[second_ms])
        settled_s = time.perf_counter() - started
        self.effort.advance(self.effort.settling * batch, f"batch {batch}: {engine.name} is warm")
        fresh = Measurement(
            engine.name, engine.version(), engine.provider, batch, (), self.workload.facts.steps, first_s,
            first_s + settled_s, first_mib, second_mib, floor_ms=None if engine.lossy else self._floor_ms(batch),
            error=judged.error, stock_error=judged.stock_error, notes=judged.notes, quality=judged.quality,
        )  # fmt: skip
        if settled_s >= _SENSED_S:
            fresh = replace(fresh, **readings.figures)
        # A resumed run finds compiled kernels: the first one's warm-up is the true one.
        self.measured.setdefault((engine.name, batch), fresh)
        return pipe

    def _judged(self, engine: Engine, batch: int, gate: PictureGate, pipe: Any) -> Judged:
        if engine.lossy is None:
            found = gate.check(pipe)
            return Judged(found.error, gate.stock_error, found.wrong)
        return self.lossy.judge(
            engine.name, engine.lossy, pipe, batch,
            lambda what: self.effort.advance(0, f"batch {batch}: {engine.name}, {what}"),
        )  # fmt: skip

    @property
    def _warm_up_budget_s(self) -> float:
        return 3.0 if self.device.type == "cpu" else 20.0

    def _remember_memory(self, engine: str, batch: int, course: Points) -> None:
        """Of the second picture, and of one batch size: the others look alike."""
        if batch == self.batches[0] and course:
            kept = self.record.extra.get("memory_over_time", {})
            self.record = replace(
                self.record, extra={**self.record.extra, "memory_over_time": {**kept, engine: course}}
            )

    def _floor_ms(self, batch: int) -> float | None:
        peak = arch.detect(self.device).peak(self.workload.facts.dtype)
        flops = self.workload.facts.flops
        return None if peak is None or flops is None else batch * flops / peak / 1e9

    def _timed(self, batch: int, pipelines: Pipelines) -> None:
        def kept(name: str, milliseconds: float) -> None:
            found = self.measured[name, batch]
            self.measured[name, batch] = replace(found, ms=(*found.ms, milliseconds))
            self.effort.advance(self.effort.picture * batch, f"batch {batch}: {name}, {len(found.ms) + 1}")
            if time.perf_counter() - self.saved_at > _SAVE_EVERY_S:
                self.save()

        while pipelines.names:
            done = {name: self.measured[name, batch].ms for name in pipelines.names}
            calls = {name: partial(self._draw, name, batch, pipelines) for name in pipelines.names}
            try:
                interleaved(
                    calls, self.stopwatch, repeats=self.repeats, done=done,
                    before=lambda name: self._draw(name, None, pipelines), on_turn=kept,
                )  # fmt: skip
            except Failed as failed:
                name, why, is_short_of_memory = failed.engine, failed.why, failed.is_short_of_memory
            else:
                return
            # The error is gone now, and with it the frames that kept memory.
            if is_short_of_memory and len(pipelines.kept) > 1:
                self._one_at_a_time(batch, pipelines)
                pipelines.give_up()
            else:
                pipelines.remove(name)
                self._skip(name, batch, why)

    def _draw(self, name: str, batch: int | None, pipelines: Pipelines) -> None:
        """A picture; with no batch the pipeline is only made ready. Whatever fails is raised as `Failed`."""
        try:
            pipe = pipelines.of(name)
            if batch is not None:
                self.workload.picture(pipe, batch)
        except plugging.FAULTS as error:
            raise Failed(name, error) from error

    def _sensed(self, batch: int, pipelines: Pipelines) -> None:
        """Power, clock and temperature of each engine alone, after the turns: a turn may be shorter than a reading.

        Of an engine whose warm-up was long enough they are known from there.
        """
        with watch(self.device) as readings:
            pass  # it reads once at each end, which shows whether there is anything to read
        if set(readings.figures.values()) == {None}:
            if self.device.type != "cpu":
                self._note(*map(without_folders, readings.notes))
            return
        for name in pipelines.names:
            if any(getattr(self.measured[name, batch], figure) is not None for figure in readings.figures):
                continue
            self.effort.advance(0, f"batch {batch}: {name}, power and clock")
            try:
                self._draw(name, None, pipelines)
                until = time.perf_counter() + _SENSED_S
                with watch(self.device) as readings:
                    while time.perf_counter() < until:
                        self.stopwatch.milliseconds(partial(self._draw, name, batch, pipelines))
            except Failed as failed:
                self._skip(name, batch, failed.why)
                continue
            self.measured[name, batch] = replace(self.measured[name, batch], **readings.figures)

    def _measure_card_times(self, batch: int, ready: Mapping[str, Any]) -> None:
        """What is missing of them. An engine that is not `ready` is warmed up again; it has passed the gate before."""
        for engine in self.engines:
            found = self.measured.get((engine.name, batch))
            if not self.with_card_times or found is None or not found.ms or found.card_ms is not None:
                continue
            self.effort.advance(0, f"batch {batch}: {engine.name}, the card's own time")
            taken, why = None, "torch.profiler recorded nothing of a device"
            try:
                taken = self._card_ms(engine, batch, ready.get(engine.name))
            except plugging.FAULTS as error:  # whatever fails here, its turns stand
                why = failure_line(error)
            if ready:
                free_memory()
            else:
                forget_compiled()
            notes = tuple(note for note in found.notes if not note.startswith(_NO_CARD_TIME))
            if taken is None:
                log.warning("%s at batch %d: %s%s", engine.name, batch, _NO_CARD_TIME, why)
                notes += (_NO_CARD_TIME + why,)
            self.measured[engine.name, batch] = replace(found, card_ms=taken, notes=notes)
            self.effort.advance(self.effort.card(batch) * batch, f"batch {batch}: {engine.name}, the card's own time")
            self.save()

    def _card_ms(self, engine: Engine, batch: int, warm: Any | None) -> float | None:
        pipe = engine.prepare(self.workload.pipeline()) if warm is None else warm
        drawn = partial(self.workload.picture, pipe, batch)
        if warm is None:
            settled(drawn, self.stopwatch, budget_s=self._warm_up_budget_s)
        return card_ms(drawn)

    def _skip(
        self, name: str, batch: int, why: str, error: float | None = None, stock_error: float | None = None
    ) -> None:
        log.warning("%s is skipped at batch %d: %s", name, batch, why)
        engine = self._engine(name)
        self.measured[name, batch] = Measurement(
            name, engine.version(), engine.provider, batch, (), self.workload.facts.steps,
            # JSON has no NaN.
            error=error if error is not None and math.isfinite(error) else None,
            stock_error=stock_error, left_out=why,
        )  # fmt: skip
        self.save()
