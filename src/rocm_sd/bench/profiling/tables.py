"""An analysis for people: tables for a terminal, and the notes that say how far its figures may be trusted."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rocm_sd.bench.profiling.analysis import ARITHMETIC, Analysis, TimePart
from rocm_sd.bench.profiling.families import IDLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.bench.profiling.findings import SlowPath

__all__ = ["annotated", "show", "show_timings"]

_NAME = 64
_WORDS = ("family", "mostly", "bound by")
# Where a terminal is narrow, words give way and figures do not. 80 columns hold the widest figures of an H200.
_WRAPPED = frozenset({"name", "family", "mostly", "of floor"})
_TWO_LINES = ("GFLOP/s", "TFLOP/s", "floor ms", "of floor", "bound by")
_HEADS = {head: head.replace(" ", "\n").replace("/", "\n/") for head in _TWO_LINES}
_LEAST = {"name": 20, "family": 11}
_MOST = {"family": 13, "of floor": 8}
_GRAPH = (
    "{share:.0%} of the GPU's time is in replayed graphs, whose kernels belong to no module and no op: by family only"
)
_SLOWED = (
    "it took {profiled:.0f} ms under the profiler and {plain:.0f} ms without: the shares of short ops may be too high"
)


def annotated(
    analysis: Analysis, found: Sequence[SlowPath], notes: Sequence[str] = (), plain_ms: float | None = None
) -> Analysis:
    """The analysis with its findings, and with a note for everything that is not as it seems."""
    every = [*notes]
    if analysis.graph_share > 0.01:
        every.append(_GRAPH.format(share=analysis.graph_share))
    if plain_ms and analysis.profiled_ms > 1.2 * plain_ms:
        every.append(
            f"idle is measured against {plain_ms:.1f} ms, which it takes without the profiler"
            if analysis.on_gpu
            else _SLOWED.format(profiled=analysis.profiled_ms, plain=plain_ms)
        )
    if analysis.on_gpu and not any(part.floor_ms for part in analysis.families):
        every.append(f"no roofline: the shapes of the ops or the peaks of {analysis.arch or 'this card'} are not known")
    return replace(analysis, findings=tuple(found), notes=tuple(every))


def show(analysis: Analysis, console: Console | None = None, *, rows: int = 15) -> None:
    console = console or Console()
    where = " on ".join(filter(None, (", ".join(str(v) for v in analysis.subject.values()), analysis.device)))
    busy = f"{analysis.busy_ms:.1f} ms of it busy" if analysis.on_gpu else f"{analysis.busy_ms:.1f} ms of it in ops"
    console.print(f"{escape(where)}: {analysis.wall_ms:.1f} ms, {busy}", soft_wrap=True, highlight=False)
    console.print(_families(analysis))
    if analysis.modules:
        console.print(_modules(analysis, rows))
    console.print(_kernels(analysis, rows))
    if analysis.findings:
        console.print("[bold]What stands out[/]")
    for found in analysis.findings:
        console.print(f"  {escape(found.sentence)}", soft_wrap=True, highlight=False)
        console.print(f"    [dim]{escape(found.next)}[/]", soft_wrap=True, highlight=False)
    for note in analysis.notes:
        console.print(f"[dim]note: {escape(note)}[/]", soft_wrap=True, highlight=False)


def show_timings(timings: Mapping[str, Sequence[float]], console: Console | None = None) -> None:
    """Calls that were timed one by one."""
    table = _table("Timed calls", "call", "calls", "median ms", "least ms", "most ms")
    for name, taken in timings.items():
        table.add_row(escape(name), str(len(taken)), *(f"{ms:.3f}" for ms in (median(taken), min(taken), max(taken))))
    (console or Console()).print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        is_words = number == 0 or column in _WORDS
        table.add_column(
            _HEADS.get(column, column),
            justify="left" if is_words else "right",
            no_wrap=column not in _WRAPPED,
            overflow="fold",
            min_width=_LEAST.get(column),
            max_width=_MOST.get(column),
        )
    return table


def _families(analysis: Analysis) -> Table:
    has_peak = any(part.floor_ms is not None for part in analysis.families)
    has_flops = any(part.flops for part in analysis.families)
    rate, per_ms = ("TFLOP/s", 1e9) if analysis.on_gpu else ("GFLOP/s", 1e6)
    columns = ["family", "ms", "share", "calls"] + [rate] * has_flops
    table = _table("By family", *columns, *(["floor ms", "of floor", "bound by"] if has_peak else []))
    for part in sorted(analysis.families, key=lambda part: (part.name == IDLE, -part.ms)):
        row = [_family_name(part, analysis), f"{part.ms:.2f}", f"{part.share:.1%}", str(part.calls or "")]
        if has_flops:
            # The other families are bound by memory: their FLOP/s say nothing.
            flops = part.flops if part.name in ARITHMETIC and part.ms else None
            row.append(f"{flops / part.ms / per_ms:.0f}" if flops else "")
        table.add_row(*row, *(_floor(part) if has_peak else []))
    return table


def _family_name(part: TimePart, analysis: Analysis) -> str:
    if part.name == IDLE and not analysis.on_gpu:
        return "idle (Python, outside ops)"
    return part.name


def _floor(part: TimePart) -> list[str]:
    if part.floor_ms is None or part.percent is None:
        return ["", "", ""]
    # A percent that speaks for less than all of its time says for how much.
    covered = (part.counted_ms or 0.0) / part.ms if part.ms else 0.0
    percent = f"{part.percent:.0f}%" + (f" (of {covered:.0%})" if covered < 0.95 else "")
    return [f"{part.floor_ms:.2f}", percent, part.bound or ""]


def _modules(analysis: Analysis, rows: int) -> Table:
    table = _table("By module", "module", "ms", "share", "mostly")
    shown = analysis.modules[:rows]
    for part in sorted(shown, key=lambda part: part.name):
        mostly = ", ".join(f"{name} {ms / part.ms:.0%}" for name, ms in list(part.families.items())[:3] if part.ms)
        indent = "  " * part.name.count(".", 0, part.name.find(".") + 1)
        table.add_row(f"{indent}{escape(part.name)}", f"{part.ms:.2f}", f"{part.share:.1%}", mostly)
    return table


def _kernels(analysis: Analysis, rows: int) -> Table:
    has_peak = any(part.floor_ms is not None for part in analysis.kernels)
    title = "By kernel" if analysis.on_gpu else "By op"
    columns = ["name", "family", "ms", "share", "calls", *(["of floor"] if has_peak else [])]
    left = analysis.kernels[rows:]
    table = _table(f"{title}, the first {rows} of {len(analysis.kernels)}" if left else title, *columns)
    for part in analysis.kernels[:rows]:
        name = part.name if len(part.name) <= _NAME else f"{part.name[: _NAME - 3]}..."
        family = " + ".join(part.families)
        row = [escape(name), family, f"{part.ms:.2f}", f"{part.share:.1%}", str(part.calls)]
        table.add_row(*row, *([_floor(part)[1]] if has_peak else []))
    unknown = [part for part in left if part in analysis.unknown]
    for part in unknown:
        row = [escape(part.name[:_NAME]), "other", f"{part.ms:.2f}", f"{part.share:.1%}", str(part.calls)]
        table.add_row(*row, *([""] if has_peak else []))
    return table
