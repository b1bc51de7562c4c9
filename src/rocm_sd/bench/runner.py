"""Engines side by side in one interleaved run: right first, then timed; what is measured is never lost.

For each batch size: exact latents, each engine made ready and compared with them, then pictures in turns. An engine
that is wrong, crashes or runs out of memory is left out with the reason, and the others go on. The card's own time, if
it is asked for, is measured after all turns of all batch sizes: no turn is timed in a process that a profiler was in.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.bench.card_time import card_ms
from rocm_sd.bench.gate import PICTURES, STEPS, Gate, free_memory
from rocm_sd.bench.machine import machine
from rocm_sd.bench.measuring import Stopwatch, compare, interleaved, settled
from rocm_sd.bench.peaks import PeakMemory, Points
from rocm_sd.bench.records import Comparison, Measurement, Record
from rocm_sd.bench.resuming import keep_older, record_file, unfinished
from rocm_sd.bench.sensors import Readings, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from rocm_sd.bench.engines import Engine
    from rocm_sd.bench.workloads import Workload

    # Done, total, and what is under way: in steps of one picture, so that a bar's estimate holds for every stage.
    Progress = Callable[[float, float, str], object]

__all__ = ["default_repeats", "run"]

log = logging.getLogger("rocm_sd")
STOCK, OURS = "stock", "rocm-sd"
_SETTLING = 4  # pictures, for the estimate
_SAVE_EVERY_S = 5.0
_SENSED_S = 2.0
_NO_CARD_TIME = "no card time: "
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.~@+-]+)+[\\/](?=[\w.~@+-])")


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
        kind, workload.facts, machine(workload.device), command, _now(), (), complete=False, extra={"planned": planned}
    )
    file = record_file(out, workload.name, kind)
    earlier = unfinished(file, record) if resume else None
    if earlier is None:
        keep_older(file)
    return _Run(workload, engines, batches, repeats, cold, against, card_times, earlier or record, file, progress).go()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class _Failed(Exception):
    def __init__(self, engine: str, why: str) -> None:
        super().__init__(engine)
        self.engine, self.why = engine, why


class _Run:
    def __init__(
        self,
        workload: Workload,
        engines: Sequence[Engine],
        batches: Sequence[int],
        repeats: int,
        cold: bool,
        against: str,
        card_times: bool,
        record: Record,
        file: Path,
        progress: Progress | None,
    ) -> None:
        self.workload, self.engines, self.batches, self.repeats = workload, tuple(engines), tuple(batches), repeats
        self.device, self.record, self.file, self.against = workload.device, record, file, against
        self.measured = {(one.engine, one.batch): one for one in record.measurements}
        self.stopwatch = Stopwatch(self.device, cold=cold)
        self._progress, self._with_card_times = progress, card_times
        # Of one engine: its gate, its first two pictures, its warm-up and its turns; of the batch the gate's own two.
        gate = PICTURES * min(STEPS, workload.facts.steps)
        self._engine_share = gate + (2 + _SETTLING + repeats) * workload.facts.steps
        self._gate_share = 3 * gate
        self._total = sum(batch * (self._gate_share + len(engines) * self._engine_share) for batch in batches)
        if card_times:
            self._total += sum(batch * len(engines) * self._card_share(batch) for batch in batches)
        self._done, self._saved_at = 0.0, 0.0

    def go(self) -> Record:
        try:
            for number, batch in enumerate(self.batches):
                ready = self._batch(batch)
                shares = self._gate_share + len(self.engines) * self._engine_share
                self._reach(sum(each * shares for each in self.batches[: number + 1]), f"batch {batch}")
                if not any(self._missing(each) for each in self.batches[number + 1 :]):
                    # The last turn is taken, and the pipelines are warm.
                    self._measure_card_times(batch, ready)
                ready.clear()
                _forget_compiled()
            for batch in self.batches[:-1]:
                self._measure_card_times(batch, {})
                _forget_compiled()
            self._reach(self._total, "done")
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
        self._saved_at = time.perf_counter()

    def _comparisons(self) -> list[Comparison]:
        """Every engine with stock, or what stands for it, and ours with every other."""
        found = []
        for batch in self.batches:
            timed = {e.name: m.ms for e in self.engines if (m := self.measured.get((e.name, batch))) and m.ms}
            pairs = [(name, self.against) for name in timed if name != self.against]
            pairs += [(OURS, name) for name in timed if name not in {self.against, OURS}]
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
        self._advance(0, f"batch {batch}: exact latents")
        try:
            gate = Gate(self.workload, batch)
        except Exception as error:  # noqa: BLE001 -- out of memory most likely: without a reference nothing is timed
            for engine in todo:
                self._leave_out(engine.name, batch, f"nothing to compare it with: {_told(error)}")
            free_memory()
            return {}
        self._advance(self._gate_share * batch, f"batch {batch}")
        ready: dict[str, Any] = {}
        for engine in todo:
            pipe = self._prepared(engine, batch, gate)
            if pipe is not None:
                ready[engine.name] = pipe
            self.save()
        self._timed(batch, ready)
        self._sensed(batch, ready)
        return ready

    def _missing(self, batch: int) -> list[Engine]:
        """Engines that have turns to take."""
        return [engine for engine in self.engines if not self._is_done(engine.name, batch)]

    def _is_done(self, engine: str, batch: int) -> bool:
        found = self.measured.get((engine, batch))
        return found is not None and (found.left_out is not None or len(found.ms) >= self.repeats)

    def _prepared(self, engine: Engine, batch: int, gate: Gate) -> Any | None:
        """The engine's pipeline after its warm-up and the gate, or None where it is left out."""
        steps = self.workload.facts.steps

        def drawn() -> None:
            self.workload.picture(pipe, batch)

        self._advance(0, f"batch {batch}: {engine.name}, first picture")
        free_memory()
        memory = PeakMemory(self.device)
        try:
            pipe = self.workload.pipeline()
            started = time.perf_counter()
            pipe = engine.prepare(pipe)
            self.stopwatch.milliseconds(drawn)
            first_s, first_mib = time.perf_counter() - started, memory.mib()
            self._advance(steps * batch, f"batch {batch}: {engine.name}, second picture")
            with memory.over_time() as course:
                second_ms = self.stopwatch.milliseconds(drawn)
                second_mib = memory.mib()
            self._remember_memory(engine.name, batch, course)
            self._advance(steps * batch, f"batch {batch}: {engine.name}, compared with exact")
            verdict = gate.check(pipe)
            self._advance(PICTURES * gate.steps * batch, f"batch {batch}: {engine.name}, warming up")
            if verdict.wrong:
                self._leave_out(engine.name, batch, verdict.wrong, verdict.error, gate.stock_error)
                return None
            started = time.perf_counter()
            with watch(self.device) as readings:
                settled(drawn, self.stopwatch, budget_s=self._warm_up_budget_s, before=[second_ms])
            settled_s = time.perf_counter() - started
            self._advance(_SETTLING * steps * batch, f"batch {batch}: {engine.name} is warm")
        except Exception as error:  # noqa: BLE001 -- whatever ails one engine, the others go on
            self._leave_out(engine.name, batch, _told(error))
            free_memory()
            return None
        fresh = Measurement(
            engine.name, engine.version(), engine.provider, batch, (), steps, first_s, first_s + settled_s,
            first_mib, second_mib, floor_ms=self._floor_ms(batch), error=verdict.error, stock_error=gate.stock_error,
        )  # fmt: skip
        if settled_s >= _SENSED_S:
            fresh = _with_readings(fresh, readings)
        # A resumed run finds compiled kernels: the first one's warm-up is the true one.
        self.measured.setdefault((engine.name, batch), fresh)
        return pipe

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

    def _timed(self, batch: int, ready: dict[str, Any]) -> None:
        def kept(name: str, milliseconds: float) -> None:
            found = self.measured[name, batch]
            self.measured[name, batch] = replace(found, ms=(*found.ms, milliseconds))
            self._advance(self.workload.facts.steps * batch, f"batch {batch}: {name}, {len(found.ms) + 1}")
            if time.perf_counter() - self._saved_at > _SAVE_EVERY_S:
                self.save()

        while ready:
            done = {name: self.measured[name, batch].ms for name in ready}
            calls = {name: self._call(name, pipe, batch) for name, pipe in ready.items()}
            try:
                interleaved(calls, self.stopwatch, repeats=self.repeats, done=done, on_turn=kept)
            except _Failed as failed:
                del ready[failed.engine]
                self._leave_out(failed.engine, batch, failed.why)
            else:
                return

    def _call(self, name: str, pipe: Any, batch: int) -> Callable[[], None]:
        def call() -> None:
            try:
                self.workload.picture(pipe, batch)
            except Exception as error:
                raise _Failed(name, _told(error)) from error

        return call

    def _sensed(self, batch: int, ready: dict[str, Any]) -> None:
        """Power, clock and temperature of each engine alone, after the turns: a turn may be shorter than a reading.

        Of an engine whose warm-up was long enough they are known from there.
        """
        with watch(self.device) as readings:
            pass  # it reads once at each end, which tells whether there is anything to read
        if readings.power_watt is None and readings.clock_mhz is None and readings.temperature_c is None:
            if self.device.type != "cpu":
                self.record = replace(
                    self.record,
                    notes=tuple(dict.fromkeys((*self.record.notes, *map(_without_folders, readings.notes)))),
                )
            return
        for name, pipe in ready.items():
            known = self.measured[name, batch]
            if (known.power_watt, known.clock_mhz, known.temperature_c) != (None, None, None):
                continue
            self._advance(0, f"batch {batch}: {name}, power and clock")
            call = self._call(name, pipe, batch)
            until = time.perf_counter() + _SENSED_S
            try:
                with watch(self.device) as readings:
                    while time.perf_counter() < until:
                        self.stopwatch.milliseconds(call)
            except _Failed as failed:
                self._leave_out(name, batch, failed.why)
                continue
            self.measured[name, batch] = _with_readings(self.measured[name, batch], readings)

    def _card_share(self, batch: int) -> int:
        """Of one engine and one picture of the batch: the last batch size is warm already."""
        return (1 if batch == self.batches[-1] else 2 + _SETTLING) * self.workload.facts.steps

    def _measure_card_times(self, batch: int, ready: Mapping[str, Any]) -> None:
        """What is missing of them. An engine that is not `ready` is warmed up again; it has passed the gate before."""
        for engine in self.engines:
            found = self.measured.get((engine.name, batch))
            if not self._with_card_times or found is None or not found.ms or found.card_ms is not None:
                continue
            self._advance(0, f"batch {batch}: {engine.name}, the card's own time")
            taken, why = None, "torch.profiler recorded nothing of a device"
            try:
                taken = self._card_ms(engine, batch, ready.get(engine.name))
            except Exception as error:  # noqa: BLE001 -- whatever ails it here, its turns stand
                why = _told(error)
            free_memory()
            notes = tuple(note for note in found.notes if not note.startswith(_NO_CARD_TIME))
            if taken is None:
                log.warning("%s at batch %d: %s%s", engine.name, batch, _NO_CARD_TIME, why)
                notes += (_NO_CARD_TIME + why,)
            self.measured[engine.name, batch] = replace(found, card_ms=taken, notes=notes)
            self._advance(self._card_share(batch) * batch, f"batch {batch}: {engine.name}, the card's own time")
            self.save()

    def _card_ms(self, engine: Engine, batch: int, warm: Any | None) -> float | None:
        pipe = engine.prepare(self.workload.pipeline()) if warm is None else warm

        def drawn() -> None:
            self.workload.picture(pipe, batch)

        if warm is None:
            settled(drawn, self.stopwatch, budget_s=self._warm_up_budget_s)
        return card_ms(drawn)

    def _leave_out(
        self, name: str, batch: int, why: str, error: float | None = None, stock_error: float | None = None
    ) -> None:
        log.warning("%s is left out at batch %d: %s", name, batch, why)
        engine = next(each for each in self.engines if each.name == name)
        self.measured[name, batch] = Measurement(
            name, engine.version(), engine.provider, batch, (), self.workload.facts.steps,
            # JSON has no NaN.
            error=error if error is not None and math.isfinite(error) else None,
            stock_error=stock_error, left_out=why,
        )  # fmt: skip
        self.save()

    def _advance(self, by: float, what: str) -> None:
        self._reach(self._done + by, what)

    def _reach(self, done: float, what: str) -> None:
        self._done = min(max(self._done, done), self._total)
        if self._progress:
            self._progress(self._done, self._total, what)


def _forget_compiled() -> None:
    """Compiled code of one batch size would keep its pipelines, and torch's limit of recompilations counts it."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    free_memory()


def _with_readings(measured: Measurement, readings: Readings) -> Measurement:
    return replace(
        measured,
        power_watt=readings.power_watt,
        clock_mhz=readings.clock_mhz,
        temperature_c=readings.temperature_c,
    )


def _told(error: Exception) -> str:
    """One line: what a user reads in a table. Folders are not named in a record."""
    lines = _without_folders(str(error)).strip().splitlines()
    kind = "out of memory" if type(error).__name__ == "OutOfMemoryError" else type(error).__name__
    return f"{kind}: {lines[0][:200]}" if lines else kind


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)
