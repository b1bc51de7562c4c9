"""How a record compares with published figures: percent of the speed, and whether the project's target is reached.

80% of an RTX 4090 on RDNA3, 90% of an H100 on CDNA3, 70% of an RTX 3090 on older RDNA. A figure counts where the model
and the size of the picture are the same, and the cards are of one class: those of data centres are never held against
those of desktops, nor those of one generation against those of another. Whatever else differs (steps, engine, dtype,
year) is named with the result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.bench.records import OURS, Measurement, Record, WorkloadFacts

if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = ["Baseline", "Kpi", "Target", "baselines", "kpis", "same_class", "table", "target_for", "targets"]


@dataclass(frozen=True)
class Baseline:
    """A published figure. `steps` and `batch` are None where the source does not say."""

    model: str
    height: int
    width: int
    steps: int | None
    hardware: str
    arch: str
    engine: str
    software: str
    dtype: str
    batch: int | None
    result: float
    unit: str
    year: int
    source: str
    note: str = ""

    @property
    def steps_per_s(self) -> float | None:
        """None where the figure is of pictures and the steps are not known, or of a stream of batches."""
        if self.unit == "it/s":
            return self.result
        if self.unit in {"s/picture", "s/batch"} and self.steps is not None:
            return self.steps / self.result
        return None


@dataclass(frozen=True)
class Target:
    families: tuple[str, ...]
    hardware: tuple[str, ...]
    percent: float


@dataclass(frozen=True)
class Kpi:
    """`ours` and `theirs` are in `unit`. `target` is None where the project set none for this card.

    `hardest`: the fastest published figure of the target's card, which alone decides whether the target is reached.
    """

    engine: str
    batch: int
    baseline: Baseline
    ours: float
    theirs: float
    unit: str
    target: float | None
    differences: tuple[str, ...]
    hardest: bool = False

    @property
    def percent(self) -> float:
        return 100 * self.ours / self.theirs

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.percent >= self.target


@cache
def _data() -> dict[str, Any]:
    text = files("rocm_sd.bench").joinpath("data/baselines.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def baselines() -> tuple[Baseline, ...]:
    return tuple(Baseline(**figure) for figure in _data()["figures"])


@cache
def targets() -> tuple[Target, ...]:
    return tuple(Target(tuple(t["families"]), tuple(t["hardware"]), float(t["percent"])) for t in _data()["targets"])


def target_for(architecture: str) -> Target | None:
    """None for cards of other kinds: the founding documents set no target for CDNA2, RDNA4 or NVIDIA."""
    family = arch.get(architecture).family
    return next((target for target in targets() if family in target.families), None)


def kpis(record: Record, engine: str = OURS) -> tuple[Kpi, ...]:
    """Every published figure that fits, of a card of the same class, at every batch size of the record; nothing for a
    record of single ops.
    """
    facts = record.workload
    if record.kind == "op":
        return ()
    target = target_for(record.machine.arch)
    found: list[Kpi] = []
    for measured in record.measurements:
        if measured.engine != engine or not measured.ms:
            continue
        for baseline in baselines():
            if (baseline.model, baseline.height, baseline.width) != (facts.model, facts.height, facts.width):
                continue
            if not same_class(record.machine.arch, baseline.arch):
                continue
            rates = _rates(measured, baseline, facts)
            if rates is not None:
                percent = target.percent if target and baseline.hardware in target.hardware else None
                differences = tuple(_differences(record, measured, baseline))
                found.append(Kpi(engine, measured.batch, baseline, *rates, percent, differences))
    return _with_hardest(found)


def same_class(one: str, other: str) -> bool:
    """Both cards of data centres, or neither, and of one generation; one that is not known has no class."""
    ours, theirs = arch.get(one), arch.get(other)
    classes = {(each.datacenter, arch.generation(each)) for each in (ours, theirs)}
    return len(classes) == 1 and None not in classes.pop()


def _rates(measured: Measurement, baseline: Baseline, facts: WorkloadFacts) -> tuple[float, float, str] | None:
    """(ours, theirs, unit); None where a comparison would mean nothing."""
    if baseline.unit == "pictures/s":
        # A submitter's throughput compares with ours at any batch, of pictures of as many steps.
        return (measured.images_per_s, baseline.result, "pictures/s") if baseline.steps == facts.steps else None
    theirs = baseline.steps_per_s
    if theirs is None or baseline.batch != measured.batch:
        return None
    return measured.steps_per_s, theirs, "it/s"


def _differences(record: Record, measured: Measurement, baseline: Baseline) -> Iterable[str]:
    facts = record.workload
    if baseline.steps is None:
        yield f"its steps are not published, ours are {facts.steps}"
    elif baseline.steps != facts.steps:
        yield f"{baseline.steps} steps there, {facts.steps} here: text and VAE weigh differently"
    if baseline.dtype != facts.dtype:
        yield f"{baseline.dtype} there, {facts.dtype} here"
    if baseline.batch is None:
        yield f"its batch size is not published, ours is {measured.batch}"
    named = measured.version.startswith(measured.engine)
    ours = measured.version if named else f"{measured.engine} {measured.version}"
    yield f"{baseline.software} of {baseline.year} there, {ours} of {record.when[:4]} here"
    if "denoising loop" in baseline.note:
        yield "the denoising loop alone there, the whole picture here"
    elif "included" in baseline.note and facts.weights == "random":
        yield "text encoders are in its time, and may not be in ours"
    if "not published, taken as" in baseline.note:
        yield baseline.note.split(";")[0]
    if facts.weights == "random":
        yield "random weights here"


def _with_hardest(found: list[Kpi]) -> tuple[Kpi, ...]:
    """Per batch and unit, the lowest percentage among the figures of the target's card."""
    lowest: dict[tuple[int, str], Kpi] = {}
    for kpi in found:
        if kpi.target is not None:
            key = (kpi.batch, kpi.unit)
            if key not in lowest or kpi.percent < lowest[key].percent:
                lowest[key] = kpi
    hardest = {id(kpi) for kpi in lowest.values()}
    return tuple(replace(kpi, hardest=id(kpi) in hardest) for kpi in found)


def table(found: Iterable[Kpi]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows for a document or a terminal; the sources are links."""
    headings = ("engine", "batch", "compared with", "year", "theirs", "ours", "percent", "target", "what differs")
    rows: list[tuple[str, ...]] = []
    for kpi in found:
        target = (
            "none set" if kpi.target is None else f"{kpi.target:.0f}%, {'reached' if kpi.reached else 'not reached'}"
        )
        theirs = kpi.baseline
        rows.append(
            (
                kpi.engine,
                str(kpi.batch),
                f"[{theirs.hardware}, {theirs.engine}]({theirs.source})",
                str(theirs.year),
                f"{kpi.theirs:.3g} {kpi.unit}",
                f"{kpi.ours:.3g} {kpi.unit}",
                f"{kpi.percent:.0f}%",
                target + (" (decides)" if kpi.hardest else ""),
                "; ".join(kpi.differences),
            )
        )
    return headings, rows
