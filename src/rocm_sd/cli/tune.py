"""rocm-sd tune: which config each op's kernel runs with, for each architecture."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rocm_sd.errors import RocmSdError, Unsupported

if TYPE_CHECKING:
    from rocm_sd.verify.tuning_files import Found

__all__ = ["tune"]


def tune(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops by name.", show_default="all")] = None,
    static: Annotated[bool, typer.Option("--static", help="With no GPU: compile every config and rank them.")] = False,
    arch: Annotated[
        str | None, typer.Option(help="Architectures, e.g. gfx1100,gfx942. (default: all that Triton compiles for)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for GFX/OP.json. (default: the data of this installation)")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at once. (default: as many as cores)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every config and figure, machine-readable.")] = False,
) -> None:
    """Choose the config of each op's kernel, for each architecture and size.

    rocm-sd tune --static

    rocm-sd tune --static group_norm_silu --arch gfx1100,gfx942

    rocm-sd tune --static --out ./tuned --json

    Needs no AMD GPU: times are modelled, never measured (docs/tuning.md). Ctrl-C keeps the files already written, and
    the next run finds what was compiled. The exit code is 1 when a size is left without a usable config.
    """
    if not static:
        raise Unsupported("This version's tune", "timing on a card", hint="Type: rocm-sd tune --static")
    from rocm_sd.verify import static_tuning

    planned = static_tuning.plan(ops or (), [part.strip() for part in (arch or "").split(",") if part.strip()])
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
    for op in dict.fromkeys(each.op for each in found):
        table = Table("arch", "when", "config", "modelled us", "next", "figures", title=op, title_justify="left")
        table.columns[0].no_wrap = True
        for each in found:
            if each.op == op:
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
