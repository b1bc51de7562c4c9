"""rocm-sd verify: how high each op stands on the proof ladder, for each architecture, shown by running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rocm_sd.cli.terminal import bar, parts
from rocm_sd.errors import InvalidOption, NumericsFailure, RocmSdError, Unsupported

if TYPE_CHECKING:
    from rocm_sd.verify.ladder import Outcome

__all__ = ["verify"]

_WORDS = {"passed": "[green]passed[/]", "failed": "[bold red]failed[/]"}


def verify(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops by name.", show_default="all")] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Architectures, e.g. gfx1100,gfx942. (default: all that Triton compiles for; for HIP, six)"),
    ] = None,
    rung: Annotated[
        str | None,
        typer.Option(help="Rungs of the proof ladder, e.g. 3 or 1,2 (docs/verification.md). (default: all five)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure, machine-readable.")] = False,
    picture: Annotated[
        bool, typer.Option("--picture", help="Draw a picture on emulated cards: minutes for each. It can be resumed.")
    ] = False,
    prompt: Annotated[str, typer.Option(help="With --picture: what emoji-sd draws.")] = "a frog on a pink background",
    steps: Annotated[int, typer.Option(min=1, max=100, help="With --picture: denoising steps.")] = 8,
    plan: Annotated[
        str,
        typer.Option(help="With --picture: every (all rules), transformer (layout kept) or shipped (as the data say)."),
    ] = "every",
    out: Annotated[Path, typer.Option(help="With --picture: the folder to write to.")] = Path("out"),
) -> None:
    """Check every op against its reference: interpreted, compiled, emulated.

    rocm-sd verify

    rocm-sd verify group_norm_silu --arch gfx1100,gfx942

    rocm-sd verify group_norm_silu:hip --arch gfx1030

    rocm-sd verify --rung 3 --json

    rocm-sd verify --picture --arch gfx1100 --steps 8

    Needs no AMD GPU. Ctrl-C keeps the steps of a picture that are drawn, and the same command goes on there. The exit
    code is 7 when a result is wrong, and 1 when machine code breaks a gate or a rule.
    """
    if picture:
        from rocm_sd.cli.verify_picture import draw_pictures

        if ops or rung:
            raise Unsupported("verify --picture", "ops by name or --rung", hint="Leave them out: it runs all ops.")
        draw_pictures(parts(arch), prompt, steps, plan, out, as_json=as_json)
        return
    from rocm_sd.verify import ladder

    tasks = ladder.plan(ops or (), parts(arch), _rungs(rung))
    with bar("verifying", len(tasks)) as update:
        outcomes = ladder.verify(tasks, lambda o: update(advance=1, description=f"{o.op} {o.arch} {o.rung}"))
    if as_json:
        typer.echo(json.dumps([outcome.to_dict() for outcome in outcomes], indent=2))
    else:
        _show(Console(), outcomes)
    _raise_failures(outcomes)


def _rungs(text: str | None) -> list[int]:
    try:
        return [int(part) for part in parts(text)]
    except ValueError:
        raise InvalidOption("rung", text, ["1", "2", "3", "4", "5"]) from None


def _show(console: Console, outcomes: list[Outcome]) -> None:
    from rocm_sd.verify.proofs import RUNGS

    shown = [name for name in RUNGS if any(outcome.rung == name for outcome in outcomes)]
    for op in dict.fromkeys(outcome.op for outcome in outcomes):
        headings = [f"{RUNGS.index(name) + 1} {name}" for name in shown]
        table = Table("arch", *headings, title=op, title_justify="left", show_lines=True)
        table.columns[0].no_wrap = True
        rows: dict[str, dict[str, Outcome]] = {}
        for outcome in outcomes:
            if outcome.op == op:
                rows.setdefault(outcome.arch, {})[outcome.rung] = outcome
        for arch, cells in rows.items():
            table.add_row(arch, *(_cell(cells[name]) if name in cells else "" for name in shown))
        console.print(table)
    console.print("Nothing here ran on AMD silicon but what passed rung 5: see docs/verification.md.")
    for outcome in outcomes:
        if outcome.state == "failed":
            where = f"{outcome.op}, {outcome.arch}, {outcome.rung}"
            console.print(f"{_WORDS['failed']} {where}: {escape(outcome.sentence)}", soft_wrap=True)


def _cell(outcome: Outcome) -> str:
    """The verdict and its figures, one a line; where nothing ran, the reason."""
    if outcome.state == "skipped":
        return f"[dim]{escape(outcome.sentence)}[/]"
    lines, figures = [_WORDS[outcome.state]], outcome.figures
    if "vgprs" in figures:
        lines += [f"{figures['vgprs']} VGPRs", f"{figures['lds']} B LDS", f"{figures['waves_per_simd']} waves"]
    if "largest_error" in figures:
        lines.append(f"error {figures['largest_error']:.2g} of {figures['allowed']:.2g}")
    shares = [
        kernel["coalescing_efficiency"]
        for kernel in figures.get("kernels", {}).values()
        if "coalescing_efficiency" in kernel
    ]
    if shares:
        lines.append(f"{min(shares):.0%} coalesced")
    return "\n".join(lines)


def _raise_failures(outcomes: list[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if not failed:
        return
    names = ", ".join(f"{o.op} on {o.arch} ({o.rung})" for o in failed)
    kind = NumericsFailure if any(outcome.wrong_numbers for outcome in failed) else RocmSdError
    first = failed[0]
    hint = f"Type: rocm-sd verify {first.op} --arch {first.arch} --json, for every figure."
    if first.arch == "cpu":
        hint = f"Type: rocm-sd verify {first.op} --rung 1,2 --json, for every figure."
    raise kind(f"{len(failed)} of {len(outcomes)} checks failed: {names}.", hint=hint)
