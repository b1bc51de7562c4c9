"""rocm-sd report: one HTML page from recorded results."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rocm_sd.cli.terminal import bar, say
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
            metavar="[RECORD]...", help="Files of rocm-sd bench, or folders.", show_default="those of the folder"
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Every record in it. (default: benchmarks, where no record is named)")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    ladder: Annotated[
        str | None, typer.Option(help="The proof ladder: a file of rocm-sd verify --json, or: run (two kernels).")
    ] = None,
    picture: Annotated[list[Path] | None, typer.Option(help="A PNG file to show; may be given again.")] = None,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw three pictures on the CPU, by stock and by rocm-sd.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Make one HTML page from recorded results, which works with no network.

    rocm-sd report results/emoji.json --draw --open

    rocm-sd report --folder benchmarks --out report.html

    rocm-sd report results/*.json --ladder run --picture out/demo.png
    """
    from rocm_sd.bench import report as reports
    from rocm_sd.bench.report import other_cards, pictures
    from rocm_sd.cli.pictures import save_text, writable_file

    # Said before a ladder is climbed for a minute.
    optional_module("jinja2", "jinja2", "report")
    # Everything that is given is read before anything is made, and everything is made before anything is written.
    named = [*(records or []), *_folder(folder, records or [])]
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
    if not (inputs.records or inputs.op_runs or outcomes or given or drawn):
        where = f"no record in {', '.join(map(str, named))}" if named else "no record was given"
        raise RocmSdError(f"There is nothing to report on: {where}.", hint="Type: rocm-sd bench emoji --out results")
    html = reports.render(reports.page(inputs, outcomes, given, drawn))
    save_text(html, out)
    if inputs.skipped:
        console.print(f"skipped, since they are no records: {', '.join(inputs.skipped)}", highlight=False, markup=False)
    say(Console(), f"wrote {out} ({len(html.encode()) / 1024:.0f} KiB)")
    _name_failures(outcomes)
    if show:
        webbrowser.open(out.resolve().as_uri())


def _folder(folder: Path | None, records: list[Path]) -> list[Path]:
    if folder is None:
        usual = Path("benchmarks")
        return [usual] if not records and usual.is_dir() else []
    if not folder.is_dir():
        raise InvalidOption("--folder", str(folder), [], hint="There is no such folder. Records are files in one.")
    return [folder]


def _name_failures(outcomes: tuple[Outcome, ...]) -> None:
    """The page shows a failure, and the terminal does, too."""
    failed = [f"{o['op']} on {o['arch']} ({o['rung']})" for o in outcomes if o["state"] == "failed"]
    if failed:
        say(Console(stderr=True), f"failed on the ladder: {', '.join(failed)}")
