"""rocm-sd tune: which implementation and config each op runs with, timed on this card; or ranked with no GPU."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from rocm_sd.errors import InvalidOption, RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rocm_sd.search.outcome import Outcome
    from rocm_sd.search.shapes import Traced
    from rocm_sd.tuning.database import Database, Entry
    from rocm_sd.verify.tuning_files import Found

__all__ = ["tune"]

INTERRUPTED = 130  # what a shell returns for a program that Ctrl-C ended


def tune(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="emoji, a workload of `rocm-sd bench`, a folder, a checkpoint, a hub id; with --static: ops by name.",
            show_default="emoji; with --static all ops",
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Widths and heights, e.g. 512x512,1024x1024. (default: the model's)")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,4.")] = "1",
    budget: Annotated[str, typer.Option(help="Time for all of it: 90s, 2m, 1h.")] = "2m",
    ops: Annotated[str | None, typer.Option(help="Only these, e.g. attention,conv2d. (default: all)")] = None,
    strategy: Annotated[str, typer.Option(help="How to search: halving, or one that a package adds.")] = "halving",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one candidate; one that takes longer is taken to hang.")
    ] = 60.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write all measurements to this file, and exit.")] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", help="Take in the measurements of such a file, and exit.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List what was measured on this card, and exit.")] = False,
    static: Annotated[bool, typer.Option("--static", help="With no GPU: compile every config and rank them.")] = False,
    arch: Annotated[
        str | None,
        typer.Option(help="--static: architectures, e.g. gfx1100,gfx942. (default: all that can be compiled for)"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="--static: folder for GFX/OP.json. (default: the data of this installation)")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at once. (default: as many as fit)")] = None,
    device: Annotated[str | None, typer.Option(help="cuda (AMD and NVIDIA) or cpu. (default: what is there)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure, machine-readable.")] = False,
) -> None:
    """Time every way to compute what a picture needs on this card, and remember the fastest that is right.

    rocm-sd tune

    rocm-sd tune sd15-512 --sizes 512x512,768x768 --batch 1,4 --budget 2m

    rocm-sd tune ./my-model --ops attention,conv2d

    rocm-sd tune --list

    rocm-sd tune --export tuned.json

    rocm-sd tune --static group_norm_silu --arch gfx1100,gfx942

    rocm-sd tune --static group_norm_silu:hip --arch gfx1030

    Ctrl-C keeps what was measured, and the same command continues there. Nothing is chosen that is wrong, or that is
    not faster than stock torch beyond doubt. With --static no GPU is needed, times are modelled, and the exit code is 1
    when a size is left without a usable config (docs/tuning.md).
    """
    begun = time.monotonic()
    if static:
        _tune_static(names or [], arch, out, jobs, as_json=as_json)
        return
    given = [option for option, value in (("--arch", arch), ("--out", out)) if value is not None]
    if given:
        raise InvalidOption(given[0], "without --static", [], hint="A search runs on this card: leave it out.")
    if names and len(names) > 1:
        raise InvalidOption("model", " ".join(names), [], hint="Give one model; ops are named by --ops.")
    from rocm_sd.tuning.layers import user_database

    database = user_database()
    if import_ is not None or export is not None:
        _moved(database, import_, export)
    elif listed:
        _list(database, device, as_json=as_json)
    else:
        pictures = _Pictures(names[0] if names else None, _sizes(sizes), _batches(batch), _names(ops))
        _search(
            database, pictures, device, _seconds(budget), begun, strategy, timeout, jobs, fresh=fresh, as_json=as_json
        )


class _Pictures:
    """What is drawn to collect the calls."""

    def __init__(
        self, model: str | None, sizes: Sequence[tuple[int, int]], batches: Sequence[int], ops: Sequence[str]
    ) -> None:
        self.model, self.sizes, self.batches, self.ops = model, sizes, batches, ops

    def traced(self, device: torch.device, tell: Callable[[str], object]) -> list[Traced]:
        from rocm_sd.search import shapes
        from rocm_sd.search.candidates import operation

        for name in self.ops:
            operation(name)
        tell("loading the model")
        return shapes.trace(shapes.workload(self.model, device), self.sizes, self.batches, self.ops, tell)


def _search(
    database: Database,
    pictures: _Pictures,
    device: str | None,
    budget_s: float,
    begun: float,
    strategy: str,
    timeout_s: float,
    jobs: int | None,
    *,
    fresh: bool,
    as_json: bool,
) -> None:
    from rocm_sd.integrations.diffusers.loading import default_device, hush
    from rocm_sd.search import ahead, halving
    from rocm_sd.search.tuner import Options, Tuner
    from rocm_sd.search.tuner import Progress as Step

    on = default_device(device)
    hush()
    chosen = halving.strategy(strategy)
    # The bar goes to standard error, so that --json leaves nothing but JSON on standard output.
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("tuning", total=None)
        traced = pictures.traced(on, lambda what: progress.update(bar, description=what))
        progress.reset(bar, total=1.0)

        def told(step: Step) -> None:
            described = f"{step.what} ({step.best})" if step.best else step.what
            progress.update(bar, completed=step.share, description=escape(described))

        options = Options(budget_s, timeout_s, jobs or ahead.default_jobs(on), chosen, fresh)
        tuner = Tuner(on, database, options, told)
        searching = time.monotonic()
        outcomes = tuner.run(traced, begun)
        took = time.monotonic() - searching
    if as_json:
        typer.echo(json.dumps([outcome.to_dict() for outcome in outcomes], indent=2))
    else:
        _show_outcomes(Console(), outcomes, took, on_cpu=on.type == "cpu")
    if tuner.interrupted:
        Console(stderr=True).print("Stopped. What was measured is kept; the same command continues.", soft_wrap=True)
        raise typer.Exit(INTERRUPTED)


def _show_outcomes(console: Console, outcomes: Sequence[Outcome], took: float, *, on_cpu: bool) -> None:
    from rocm_sd.ops import OPS
    from rocm_sd.search.candidates import extras

    measured = [outcome for outcome in outcomes if outcome.measured]
    table = Table(
        "op", "problem", "chosen", "us", "stock us", "times stock", title="measured here", title_justify="left"
    )
    table.columns[0].no_wrap = True
    for outcome in measured:
        cells = (_number(outcome.us), _number(outcome.stock_us), _number(outcome.times_stock, 2))
        table.add_row(outcome.op, _problem(outcome.problem), escape(str(outcome.chosen)), *cells)
    console.print(table)
    faster = sum(1 for outcome in measured if not outcome.chosen.is_stock)
    now = sum(outcome.now for outcome in outcomes)
    console.print(
        f"{faster} of {len(outcomes)} problems run faster than stock torch; {now} measurements in {took:.0f} s.",
        soft_wrap=True,
    )
    waiting = sum(1 for outcome in outcomes if not outcome.complete and not outcome.unchecked)
    if waiting:
        console.print(
            f"{waiting} problems are not searched to the end: the same command continues there.", soft_wrap=True
        )
    for outcome in outcomes:
        where = f"{outcome.op} {_problem(outcome.problem)}"
        for failure in outcome.failures:
            console.print(
                f"[red]left out[/] {escape(f'{failure.candidate} ({where}): {failure.reason}')}", soft_wrap=True
            )
        if outcome.unchecked:
            console.print(f"[yellow]not searched[/] {escape(f'{where}: {outcome.unchecked}')}", soft_wrap=True)
    added = {(extra.op, extra.implementation.name) for extra in extras()}
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


def _problem(problem: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in problem.items()) or "whole pipeline"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _moved(database: Database, import_: Path | None, export: Path | None) -> None:
    console = Console()
    for file, what, move in (
        (import_, "--import", database.import_json),
        (export, "--export", database.export_json),
    ):
        if file is None:
            continue
        try:
            count = move(file)
        except OSError as error:
            hint = f"It cannot be {'read' if file is import_ else 'written'}: {error.strerror or error}."
            raise InvalidOption(what, str(file), [], hint=hint) from error
        done = "taken from" if file is import_ else "written to"
        console.print(f"{count} measurements {done} {escape(str(file))}", soft_wrap=True, highlight=False)


def _list(database: Database, device: str | None, *, as_json: bool) -> None:
    from rocm_sd.integrations.diffusers.loading import default_device
    from rocm_sd.search.candidates import hash_of, operations
    from rocm_sd.tuning import environment, lookup
    from rocm_sd.tuning.layers import preferred

    known_ops = operations()

    def holds(entry: Entry) -> bool:
        """Whether its candidate, the op's own or a plug-in's, is there as it was measured, and not set aside."""
        op = known_ops.get(entry.op)
        if op is None or (entry.op, entry.candidate, entry.kernel_hash) in aside:
            return False
        return op.has(entry.candidate) and hash_of(op, entry.candidate) == entry.kernel_hash

    here = environment.current(default_device(device))
    aside = {(one.op, one.candidate, one.kernel_hash) for one in database.quarantined(here)}
    by_problem: dict[tuple[str, str], list[Entry]] = {}
    for entry in database.all(environment=here):
        by_problem.setdefault((entry.op, _problem(entry.problem)), []).append(entry)
    rows: list[dict[str, Any]] = []
    for (op, _), entries in by_problem.items():
        usable = [e for e in entries if e.clearly_faster and holds(e)]
        best = min(usable, key=lambda e: e.median_us) if usable else None
        if best is not None:
            shipped = lookup(op, here.arch, best.problem)
            known = (e for e in usable if e.candidate == shipped.implementation and e.config in (shipped.config, {}))
            best = preferred(best, next(known, None))
        stock_us = next((e.stock_us for e in (best, *entries) if e and e.stock_us), None)
        rows.append(
            {
                "op": op, "problem": dict(entries[0].problem),
                "chosen": best.candidate if best else "torch", "config": dict(best.config) if best else {},
                "us": best.median_us if best else stock_us, "stock_us": stock_us,
                "candidates": len(entries),
                "left_out": {e.candidate: e.numerics for e in entries if e.numerics != "ok"},
                "when": max(e.when for e in entries),
            }
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    if not rows:
        console.print("Nothing was measured on this card with these versions. Type: rocm-sd tune")
        return
    table = Table("op", "problem", "chosen", "us", "stock us", "tried", "left out", "when")
    table.columns[0].no_wrap = True
    for row in rows:
        named = " ".join([row["chosen"], *(f"{name}={value}" for name, value in row["config"].items())])
        cells = (_number(row["us"]), _number(row["stock_us"]), str(row["candidates"]), str(len(row["left_out"])))
        table.add_row(row["op"], _problem(row["problem"]), escape(named), *cells, row["when"][:10])
    console.print(table)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise InvalidOption("--budget", text, [], hint="Give a time: 90s, 2m or 1h.")
    return seconds


def _sizes(text: str | None) -> list[tuple[int, int]]:
    """(height, width) of each, from widths and heights."""
    sizes = []
    for part in _names(text):
        found = re.fullmatch(r"(\d+)x(\d+)", part)
        if not found:
            raise InvalidOption("--sizes", part, [], hint="Give widths and heights: 512x512,1024x768.")
        sizes.append((int(found[2]), int(found[1])))
    return sizes


def _batches(text: str) -> list[int]:
    parts = _names(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidOption("--batch", text, [], hint="Give batch sizes: 1,4.")
    return [int(part) for part in parts]


def _names(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _tune_static(ops: list[str], arch: str | None, out: Path | None, jobs: int | None, *, as_json: bool) -> None:
    from rocm_sd.verify import static_tuning

    planned = static_tuning.plan(ops, _names(arch))
    if planned.left_out:
        Console(stderr=True).print(escape(planned.left_out), soft_wrap=True)
    # The bar goes to standard error, so that --json leaves nothing but JSON on standard output.
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("tuning", total=planned.tasks)
        found = static_tuning.tune(
            planned,
            out or static_tuning.DATA,
            jobs=jobs,
            progress=lambda what: progress.update(bar, advance=1, description=what),
        )
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        _show(Console(), found, out or static_tuning.DATA)
    failed = [each.error for each in found if each.error]
    if failed:
        raise RocmSdError(
            f"{len(failed)} of {len(found)} sizes have no usable config: {'; '.join(failed)}.",
            hint="Give the op's space a smaller tile, fewer stages or more warps there: see docs/tuning.md.",
        )


def _show(console: Console, found: list[Found], folder: Path) -> None:
    for op in dict.fromkeys(each.name for each in found):
        table = Table("arch", "when", "config", "modelled us", "next", "figures", title=op, title_justify="left")
        table.columns[0].no_wrap = True
        for each in found:
            if each.name == op:
                table.add_row(*_row(each))
        console.print(table)
    console.print(f"Modelled, never timed. Written to {escape(str(folder))}", soft_wrap=True)


def _row(found: Found) -> tuple[str, ...]:
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
    config = " ".join(f"{name}={value}" for name, value in best.config.items())
    return found.arch, when, config, f"{best.modelled_us:.1f}", runner_up, figures


def _limits(limit: object) -> str:
    return " to ".join(str(end) for end in limit) if isinstance(limit, list) else str(limit)
