"""rocm-sd report: one HTML page from recorded results."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rocm_sd.cli.terminal import OUT, bar, say
from rocm_sd.errors import InvalidOption, RocmSdError, optional_module

if TYPE_CHECKING:
    from rocm_sd.bench.report.parts import Picture
    from rocm_sd.bench.report.reading import Outcome

__all__ = ["report"]

RUN = "run"


def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RECORD]...",
            help="Files of rocm-sd bench or contribute, or folders.",
            show_default=f"the newest in {OUT}, else all in benchmarks",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Take every record in this folder.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    ladder: Annotated[
        str | None,
        typer.Option(
            help="Show the proof ladder: a file of rocm-sd verify --json, or run, which proves two kernels now."
        ),
    ] = None,
    picture: Annotated[list[Path] | None, typer.Option(help="A PNG file to show; may be given again.")] = None,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw three pictures on the CPU, by stock and by rocm-sd.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Make one HTML page from recorded results, which works with no network.

    rocm-sd report

    rocm-sd report results/emoji.json --draw --open

    rocm-sd report --folder benchmarks --out report.html

    rocm-sd report results/*.json --ladder run --picture out/demo.png

    rocm-sd report rocm-sd-contribution-gfx1100-2026-11-18-1a2b3c4d.json
    """
    from rocm_sd.bench import report as reports
    from rocm_sd.bench.report import other_cards, pictures
    from rocm_sd.cli.pictures import save_text, writable_file

    # Said before a ladder is climbed for a minute.
    optional_module("jinja2", "jinja2", "report")
    # Everything that is given is read before anything is made, and everything is made before anything is written.
    named = [*(records or []), *_folder(folder)] or _usual()
    inputs = reports.read(named)
    outcomes = reports.read_ladder(Path(ladder)) if ladder and ladder != RUN else ()
    given = [pictures.read(path) for path in picture or []]
    writable_file(out)
    console = Console(stderr=True)
    if ladder == RUN:
        with bar("proof ladder", console=console) as update:
            outcomes = other_cards.run_ladder(
                lambda o, total: update(advance=1, total=total, description=f"{o['op']} {o['arch']} {o['rung']}")
            )
    drawn: tuple[tuple[Picture, ...], ...] = ()
    if draw:
        with bar("drawing", console=console) as update:
            drawn = pictures.draw(lambda what, total: update(advance=1, total=total, description=what))
    if not (inputs.records or inputs.op_runs or inputs.contributed or outcomes or given or drawn):
        where = ", ".join(map(str, named)) or f"{OUT} or benchmarks"
        hint = "Type: rocm-sd bench emoji, then: rocm-sd report"
        raise RocmSdError(f"There is nothing to report on: there is no record in {where}.", hint=hint)
    html = reports.render(reports.page(inputs, outcomes, given, drawn))
    save_text(html, out)
    if inputs.skipped:
        console.print(f"skipped, since they are no records: {', '.join(inputs.skipped)}", highlight=False, markup=False)
    sources = f" from {', '.join(map(str, named))}" if named else ""
    say(Console(), f"wrote {out} ({len(html.encode()) / 1024:.0f} KiB){sources}")
    _name_failures(outcomes)
    if show:
        webbrowser.open(out.resolve().as_uri())


def _usual() -> list[Path]:
    """Where nothing is named: what `rocm-sd bench` wrote last, of each kind; else the records of a checkout."""
    from rocm_sd.bench.report import newest

    checkout = Path("benchmarks")
    return newest(OUT) or ([checkout] if checkout.is_dir() else [])


def _folder(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    if not folder.is_dir():
        raise InvalidOption("--folder", str(folder), [], hint="There is no such folder. Records are files in one.")
    return [folder]


def _name_failures(outcomes: tuple[Outcome, ...]) -> None:
    """The page shows a failure, and the terminal does, too."""
    failed = [f"{o['op']} on {o['arch']} ({o['rung']})" for o in outcomes if o["state"] == "failed"]
    if failed:
        say(Console(stderr=True), f"failed on the ladder: {', '.join(failed)}")
