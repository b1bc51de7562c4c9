"""Cards that were not at hand: how high each op stands on the proof ladder there, and modelled times.

Every row of the latter is labelled as modelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd.bench import projection as modelled
from rocm_sd.bench.report.parts import Figure, Section, Table, shown
from rocm_sd.verify.proofs import RUNGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.bench.records import Record
    from rocm_sd.bench.report.reading import Outcome

__all__ = ["KERNELS", "ladder", "projection", "run_ladder"]

HOST = "cpu"  # rungs 1 and 2 need no architecture and count for all
# One that moves data and one that multiplies matrices: enough for a page that has no other ladder.
KERNELS = ("group_norm_silu", "attention")


def run_ladder(on_outcome: Callable[[Outcome, int], None]) -> tuple[Outcome, ...]:
    """All rungs of two kernels on the emulated architectures; `on_outcome` gets each outcome and how many there are."""
    from rocm_sd.verify import ladder as proofs  # noqa: PLC0415 -- the compiler is loaded only when it is used

    tasks = proofs.plan(KERNELS, proofs.EMULATED)
    outcomes = proofs.verify(tasks, lambda outcome: on_outcome(outcome.to_dict(), len(tasks)))
    return tuple(outcome.to_dict() for outcome in outcomes)


def ladder(outcomes: Sequence[Outcome]) -> Section:
    title = "The proof ladder"
    if not outcomes:
        return Section(
            "ladder", title, missing="No proofs were given. Type: rocm-sd report ... --ladder run, or --ladder FILE"
        )
    ops = list(dict.fromkeys(o["op"] for o in outcomes))
    architectures = list(dict.fromkeys(o["arch"] for o in outcomes if o["arch"] != HOST))
    cells = {(o["op"], o["arch"], o["rung"]): o for o in outcomes}
    figures = [_overview(ops, architectures, cells)] if len(architectures) > 1 else []
    figures += [_figures_of(name, ops, cells) for name in architectures]
    failed = [f"{o['op']} on {o['arch']}, {o['rung']}: {o['sentence']}" for o in outcomes if o["state"] == "failed"]
    if failed:
        figures.insert(0, Figure("What failed", None, None, tuple(failed)))
    lead = (
        "Each rung shows what the one below cannot: 1 the definition against float64, 2 the kernel interpreted, "
        "3 machine code through every gate, 4 that machine code executed on the emulator, 5 a run on a card. Where "
        "rung 5 is empty, nothing has run on that silicon."
    )
    named = f" --arch {','.join(architectures)}" if architectures else ""
    return Section(
        "ladder", title, lead, tuple(figures), commands=(f"rocm-sd verify {' '.join(ops)}{named} --json > ladder.json",)
    )


_Cells = dict[tuple[str, str, str], "Outcome"]


def _at(cells: _Cells, op: str, architecture: str, rung: str) -> Outcome | None:
    return cells.get((op, HOST if RUNGS.index(rung) < 2 else architecture, rung))


def _overview(ops: list[str], architectures: list[str], cells: _Cells) -> Figure:
    rows = [[op, *(_rungs(cells, op, name) for name in architectures)] for op in ops]
    table = Table.of("Rungs passed", ("op", *architectures), rows, text=range(len(architectures) + 1))
    return Figure("Rungs passed", None, table, folded=False)


def _rungs(cells: _Cells, op: str, architecture: str) -> str:
    """The numbers of the rungs that were passed: "1 2 3 4"; a failure is named, and everything else is a dot."""
    words = []
    for number, rung in enumerate(RUNGS, 1):
        outcome = _at(cells, op, architecture, rung)
        state = outcome["state"] if outcome else "skipped"
        words.append(str(number) if state == "passed" else f"{number} FAILED" if state == "failed" else "·")
    return " ".join(words)


def _figures_of(name: str, ops: list[str], cells: _Cells) -> Figure:
    card = archs.get(name)
    rows = []
    for op in ops:
        compiled = cells.get((op, name, "compiled"))
        figures: dict[str, Any] = compiled.get("figures", {}) if compiled else {}
        waves = figures.get("waves_per_simd")
        most = card.max_waves_per_simd
        rows.append(
            [
                op,
                _rungs(cells, op, name),
                figures.get("vgprs"),
                figures.get("lds"),
                waves,
                f"{100 * waves / most:.0f}%" if waves and most else None,
                _limits(figures),
                _error(cells.get((op, name, "emulated"))),
            ]
        )
    title = f"{name}, {card.product}" if card.product else name
    headings = (
        "op", "rungs passed", "VGPRs", "LDS B", "waves/SIMD", "occupancy",
        "limited by", "emulated error, of allowed",
    )  # fmt: skip
    table = Table.of(f"{title}: of its kernels, the most registers and LDS and the fewest waves", headings, rows,
                     text=(0, 1, 6))  # fmt: skip
    return Figure(title, None, table, folded=False)


def _limits(figures: dict[str, Any]) -> str | None:
    kernels = figures.get("kernels")
    if not isinstance(kernels, dict):
        return None
    found = [k for k in kernels.values() if isinstance(k, dict) and isinstance(k.get("waves_per_simd"), int)]
    fewest = min(found, key=lambda k: int(k["waves_per_simd"]), default=None)
    return str(fewest.get("limited_by", "")) if fewest else None


def _error(outcome: Outcome | None) -> str | None:
    figures = outcome.get("figures", {}) if outcome else {}
    error, allowed = figures.get("largest_error"), figures.get("allowed")
    both = isinstance(error, (int, float)) and isinstance(allowed, (int, float))
    return f"{shown(error) or error} of {shown(allowed)}" if both else None


def projection(records: Sequence[Record]) -> Section | None:
    """record.extra["projection"], or the model's rows of the workload: plain values, each labelled as modelled."""
    figures = []
    for record in {record.workload.name: record for record in records}.values():
        found = record.extra.get("projection", modelled.rows(record.workload.name))
        rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
        if not rows:
            continue
        rows = [row | {"model_error": _model_error(row)} for row in rows]
        plain = dict.fromkeys(
            name for row in rows for name, value in row.items() if not isinstance(value, (dict, list))
        )
        names = [str(name) for name in plain if name != "label"]
        title = f"{record.workload.name} on cards that were not at hand"
        cells = [[*(_cell(row.get(name)) for name in names), modelled.LABEL] for row in rows]
        words = [n for n, name in enumerate(names) if any(isinstance(row.get(name), str) for row in rows)]
        table = Table.of(
            title, [*(name.replace("_", " ") for name in names), "kind"], cells, text=[*words, len(names)],
            label=modelled.LABEL,
        )  # fmt: skip
        figures.append(Figure(title, None, table, folded=False, label=modelled.LABEL))
    if not figures:
        return None
    lead = (
        "Modelled, not measured: FLOPs, bytes and efficiencies measured on another card, put through the figures of "
        "these. docs/projection.md has the formula and what it ignores."
    )
    return Section("projection", "Projected to other cards", lead, tuple(figures))


def _model_error(row: dict[str, Any]) -> str | None:
    """In the words of the projection, or from its figures."""
    if row.get("model_error"):
        return str(row["model_error"])
    deviation = row.get("deviation")
    if isinstance(deviation, dict) and _cell(deviation.get("as_used")):
        return f"{_cell(deviation['as_used'])}% on the card that was timed"
    return None


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) else shown(value)
