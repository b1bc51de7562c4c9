"""More than one card: efficiency by strategy and number of cards, modelled, with what it rests on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rocm_sd.bench import projection
from rocm_sd.bench.report.charts import GUTTER, KEY, Scale, chart, label, line, percent, tag
from rocm_sd.bench.report.parts import Figure, Section, Table, shown
from rocm_sd.parallel.layers import UNETS, unet_call
from rocm_sd.parallel.scaling import COUNTS, LABEL, MI300X, RX_7900_XTX, Machine, Work, assumptions, predictions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.bench.records import Record
    from rocm_sd.bench.report.parts import Svg
    from rocm_sd.parallel.scaling import Prediction

__all__ = ["efficiency", "modelled", "scaling", "work"]

# By workload: what it is called, its config, and how long the host takes to launch a step of stock's operations one by
# one (benchmarks/launch-cost-h200, comparisons-*.json).
_MODELS = {"sd15-512": ("SD 1.5", "sd15", 30.7e-3), "sdxl-mlperf": ("SDXL", "sdxl", 79.5e-3)}
_PLAN = "shipped"
_GUIDED = 2  # entries of a batch: with the prompt, and without it
_TOP, _HEIGHT = 24.0, 340.0
# Strategies that share a colour are told apart by their dashes.
_LINES = {
    "data": ("dark", None), "cfg": ("dark", "2 4"), "patch": ("ours", None), "cfg x patch": ("ours", "7 4"),
    "data x cfg x patch": ("ours", "2 4"), "tensor": ("medium", None), "pipeline": ("medium", "7 4"),
}  # fmt: skip


def scaling(records: Sequence[Record]) -> Section | None:
    """For the workloads among the records whose single step is modelled for these cards."""
    names = [name for name in _MODELS if any(record.workload.name == name for record in records)]
    if not names:
        return None
    on_mi300x = [work(name, MI300X) for name in names]
    figures = [_curves(each, MI300X) for each in on_mi300x]
    figures += [_table(on_mi300x, MI300X, (2, 4, 8))]
    figures += [_table([work(name, RX_7900_XTX) for name in names], RX_7900_XTX, (2,))]
    lead = (
        "Modelled, not measured: no machine with several of these cards was at hand. Efficiency is pictures a second, "
        "as a share of what so many cards would draw each by itself. The bytes that are sent are exact, and counted in "
        "tests. Lines end where a strategy has nothing for more cards to do. What the figures rest on stands at the "
        "tables."
    )
    return Section("scaling", "More than one GPU", lead, tuple(figures))


def work(workload: str, machine: Machine) -> Work:
    """A step on one card of the machine, as it is projected; what its calls cost without any work does not shrink."""
    name, family, host = _MODELS[workload]
    side = UNETS[family]["sample_size"]
    calls = projection.counted(workload, machine.arch, _PLAN)
    empty = [replace(call, flops=0.0, bytes=0.0, cycles=0.0) for call in calls]
    step, fixed = (
        projection.project_counted(some, 1, machine.arch, projection.fits()).step_ms for some in (calls, empty)
    )
    source = f"projected, plan {_PLAN}"
    return Work(name, unet_call(UNETS[family], _GUIDED, side, side), step / 1e3, fixed / 1e3, host, source)


def modelled(workload: str, arch: str, mesh: str) -> tuple[str, Sequence[Prediction]]:
    """The card of that architecture, and its predictions for a mesh such as "cfg" or "cfg x patch", as strategies run
    where no rank has graphs: what looks into a model is launched one by one. Nothing of either where nothing is
    modelled.
    """
    machine = next((each for each in (MI300X, RX_7900_XTX) if each.arch == arch), None)
    if machine is None or workload not in _MODELS:
        return "", ()
    counts = [cards for cards in COUNTS if machine.network is not None or cards <= machine.node]
    return machine.card, predictions(work(workload, machine), machine, counts, captured=False).get(mesh, ())


def _curves(step: Work, machine: Machine) -> Figure:
    found = predictions(step, machine)
    title = f"{step.name} on {machine.card}: efficiency by number of cards"
    rows = [
        [name, each.cards, _share(each), shown(each.step * 1e3), shown(each.computed * 1e3),
         shown(each.sent * 1e3), shown(each.bytes / 1e6), each.label]
        for name, line_ in found.items() for each in line_ if each.cards > 1
    ]  # fmt: skip
    headings = ("mesh", "cards", "efficiency", "ms a step", "ms computed", "ms of exchanges", "MB from a card", "kind")
    table = Table.of(title, headings, rows, text=(0, 7), label=LABEL)
    return Figure(title, efficiency(title, found), table, assumptions(step, machine)[:1], label=LABEL)


def efficiency(title: str, found: Mapping[str, Sequence[Prediction]]) -> Svg:
    """Cards across, by doubling; efficiency up."""
    bottom = _HEIGHT - 44
    x = Scale(COUNTS[0], COUNTS[-1], GUTTER, 98.0, log=True)
    y = Scale(0.0, 1.0, bottom, _TOP)
    parts: list[Svg] = []
    for value in y.ticks(5):
        parts.append(line(GUTTER, y(value), 100, y(value), "grid"))
        parts.append(label(f"{value:g}", GUTTER - 1.5, y(value) + 4, "tick", anchor="end"))
    parts += [label(str(cards), x(cards), bottom + 18, "tick", anchor="middle") for cards in COUNTS]
    parts += [label("efficiency", 0, _TOP - 10, "axis"), label("cards", 100, bottom + 38, "axis", anchor="end")]
    described = []
    for number, (name, points) in enumerate(found.items()):
        shade, dashes = _LINES[name]
        kind, row = f"trace {shade}", _HEIGHT + KEY * number

        def drawn(x1: float, y1: float, x2: float, y2: float, kind: str = kind, dashes: str | None = dashes) -> Svg:
            ends = {"x1": percent(x1), "y1": y1, "x2": percent(x2), "y2": y2}
            return tag("line", **ends, class_=kind, stroke_dasharray=dashes)

        parts += [drawn(x(a.cards), y(a.efficiency), x(b.cards), y(b.efficiency)) for a, b in pairwise(points)]
        for point in points:
            said = f"{name}, {point.cards} cards: {_share(point)} ({LABEL})"
            dot = "dot ours" if shade == "ours" else "dot other"
            parts.append(
                tag("circle", tag("title", said), cx=percent(x(point.cards)), cy=y(point.efficiency), r=3.0, class_=dot)
            )
        last = points[-1]
        key = f"{name}: {_share(last)} on {last.cards}"
        described.append(key)
        named = f"name {shade}" if shade == "ours" else "name"
        parts += [drawn(GUTTER, row, GUTTER + 5, row), label(key, GUTTER + 7, row + 4, named)]
    return chart(title, f"{LABEL}. {'; '.join(described)}", _HEIGHT + KEY * len(found), *parts)


def _table(steps: Sequence[Work], machine: Machine, counts: Sequence[int]) -> Figure:
    title = f"{_listed(counts)} {machine.card} over {machine.link.name}"
    rows = []
    for step in steps:
        free, launched = (predictions(step, machine, counts, captured=captured) for captured in (True, False))
        for name, found in free.items():
            cells = {each.cards: f"{_share(each)} ({shown(each.step * 1e3)} ms)" for each in found}
            slower = {each.cards: _share(each) for each in launched[name]}
            rows.append([step.name, name, *(each.get(cards) for each in (cells, slower) for cards in counts)])
    headings = ["model", "mesh", *(f"{cards} cards" for cards in counts)]
    headings += [f"{cards}, launched one by one" for cards in counts]
    table = Table.of(title, headings, rows, text=(0, 1), label=LABEL)
    # Those that are of every model stand once.
    notes = dict.fromkeys(
        said for alike in zip(*(assumptions(step, machine) for step in steps), strict=True) for said in alike
    )
    return Figure(title, None, table, tuple(notes), folded=False, label=LABEL)


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, counts[:-1])), str(counts[-1]))))


def _share(found: Prediction) -> str:
    return f"{found.efficiency:.2f}"
