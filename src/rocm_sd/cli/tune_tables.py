"""What `rocm-sd tune` prints: figures are whole in 80 columns, and what is long is folded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from rocm_sd.tuning.search.tuner import TuningResult
    from rocm_sd.tuning.static.data_files import BucketResult

__all__ = ["described", "show_known", "show_outcomes", "show_static", "show_tunable_op"]

_CONFIGS = "rocm-sd tune --list --json"


def described(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "whole pipeline"


def show_outcomes(console: Console, outcomes: Sequence[TuningResult], took: float, *, on_cpu: bool) -> None:
    from rocm_sd.ops import OPS
    from rocm_sd.tuning.search.candidates import plug_ins

    measured = [outcome for outcome in outcomes if outcome.measured]
    rows = (
        (o.op, o.problem, o.chosen.implementation, _number(o.us), _number(o.stock_us), _number(o.times_stock, 2))
        for o in measured
    )
    console.print(_by_op("measured here", rows, "us", "stock us", "x stock"))
    faster = sum(1 for outcome in measured if not outcome.chosen.is_stock)
    now = sum(outcome.now for outcome in outcomes)
    console.print(
        f"{faster} of {len(outcomes)} problems run faster than stock torch; {now} measurements in {took:.0f} s. "
        f"Configs: {_CONFIGS}.",
        soft_wrap=True,
    )
    waiting = sum(1 for outcome in outcomes if not outcome.complete and not outcome.unchecked)
    if waiting:
        left = "1 problem is" if waiting == 1 else f"{waiting} problems are"
        console.print(f"{left} not searched to the end: the same command continues there.", soft_wrap=True)
    for outcome in outcomes:
        where = f"{outcome.op} {described(outcome.problem)}"
        for failure in outcome.failures:
            console.print(
                f"[red]skipped[/] {escape(f'{failure.candidate} ({where}): {failure.reason}')}", soft_wrap=True
            )
        if outcome.unchecked:
            console.print(f"[yellow]not searched[/] {escape(f'{where}: {outcome.unchecked}')}", soft_wrap=True)
    added = {(each.op, each.name) for each in plug_ins()}
    plugged = [o for o in outcomes if (o.op, o.chosen.implementation) in added]
    for what, several in (
        ("Pictures use it after a test of its own, at its first use.", [o for o in plugged if o.op in OPS]),
        ("It is stored and listed; pictures have the settings of rocm-sd.", [o for o in plugged if o.op not in OPS]),
    ):
        names = ", ".join(dict.fromkeys(f"{o.op} {o.chosen.implementation}" for o in several))
        if names:
            console.print(escape(f"{names}: of a plug-in. {what}"), soft_wrap=True)
    if on_cpu:
        console.print(
            "On a CPU there is little to choose: kernels are for GPUs, and stock torch is mostly all there is."
        )


def show_known(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    cells = (
        (row["op"], row["problem"], row["chosen"], _number(row["us"]), _number(row["stock_us"]), _tried(row))
        for row in rows
    )
    last = max(row["when"] for row in rows)[:10]
    console.print(_by_op(f"measured on this card, last on {last}", cells, "us", "stock us", "tried"))
    console.print(f"Configs, and why one is skipped: {_CONFIGS}.", soft_wrap=True)


def show_tunable_op(console: Console, arch: str) -> None:
    """What torch's TunableOp found, where `rocm-sd tune --tunable-op` ran; nothing where it did not."""
    import torch

    from rocm_sd.tuning import tunable_op

    results = tunable_op.results_here()
    if results is None:
        return
    table = Table(title="results of torch's TunableOp", title_justify="left")
    table.add_column("product")
    table.add_column("kernel", overflow="fold")
    table.add_column("us, by torch", justify="right")
    for one in results.products:
        us = None if one.ms is None else one.ms * 1e3
        table.add_row(escape(one.words), escape(one.solution), _number(us))
    console.print(table)
    stale = tunable_op.why_stale(results, arch, torch.__version__)
    use = "A product runs by its kernel where the search above found that faster." if stale is None else ""
    console.print(escape(use or f"They are not used: {stale}."), soft_wrap=True)


def _tried(row: Mapping[str, Any]) -> str:
    out = len(row["left_out"])
    return f"{row['candidates']}, {out} out" if out else str(row["candidates"])


def _by_op(title: str, rows: Iterable[tuple[Any, ...]], *figures: str) -> Table:
    """Group rows (op, problem, chosen, figures ...) under the name of their op, in the order of the first of each."""
    table = Table(title=title, title_justify="left")
    table.add_column("problem")
    table.add_column("chosen", no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    of_op: dict[str, list[tuple[Any, ...]]] = {}
    for op, *rest in rows:
        of_op.setdefault(op, []).append(tuple(rest))
    for op, several in of_op.items():
        table.add_section()
        table.add_row(f"[bold]{escape(op)}[/]")
        for problem, chosen, *cells in several:
            table.add_row(described(problem), escape(chosen), *cells)
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def show_static(console: Console, found: list[BucketResult], folder: Path) -> None:
    for op in dict.fromkeys(each.name for each in found):
        table = Table("arch", "problem", "config", "modelled us", "next", "figures", title=op, title_justify="left")
        table.columns[0].no_wrap = True
        for each in found:
            if each.name == op:
                table.add_row(*_row(each))
        console.print(table)
    console.print(f"Modelled, never timed. Written to {escape(str(folder))}", soft_wrap=True)


def _row(found: BucketResult) -> tuple[str, ...]:
    when = " ".join(f"{name} {_limits(limit)}" for name, limit in found.when.items())
    dropped = ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
    if found.error:
        return found.arch, when, f"[bold red]none[/] of {len(found.candidates)}", "", "", dropped
    ranked = found.ranked
    best = ranked[0]
    figures = f"{best.figures['vgprs']} VGPRs, {best.figures['lds']} B LDS, {best.figures['waves_per_simd']} waves"
    figures += f"; {len(found.candidates)} compiled" + (f", dropped: {dropped}" if dropped else "")
    if best.blemishes:
        figures += f"; [yellow]fails {escape(best.blemishes[0])}[/]"
    runner_up = f"{ranked[1].modelled_us:.1f}" if len(ranked) > 1 else ""
    return found.arch, when, str(best.config), f"{best.modelled_us:.1f}", runner_up, figures


def _limits(limit: object) -> str:
    return " to ".join(str(end) for end in limit) if isinstance(limit, list) else str(limit)
