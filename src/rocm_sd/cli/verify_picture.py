"""rocm-sd verify --picture: emoji-sd drawn by the machine code of cards that are not there, beside stock torch's."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rocm_sd.cli.pictures import difference, save_png, save_text, sheet, writable_folder
from rocm_sd.cli.terminal import bar, printable, say
from rocm_sd.errors import require_known, require_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rocm_sd.bench.emulated_picture import Drawn, KernelRow, PictureRequest
    from rocm_sd.verify.device import Launch

__all__ = ["draw_pictures"]

_LEGEND = (
    "M instr.: million instructions of waves; MB: asked for by lanes; conflicts: extra cycles for banks of LDS.",
    "Counts are exact for the code that ran. ms are modelled, never measured: the least that such a card could take,",
    "by the counted work and its data sheet. Nothing here ran on AMD silicon.",
)


def draw_pictures(
    architectures: Sequence[str], prompt: str, steps: int, plan: str, out: Path, *, as_json: bool
) -> None:
    from rocm_sd.bench.emulated_picture import PLANS, PictureRequest
    from rocm_sd.integrations.diffusers.loading import hush
    from rocm_sd.verify.proofs import EMULATED

    require_known("architecture to emulate", architectures, EMULATED)
    require_one_of("plan", plan, PLANS)
    writable_folder(out)
    hush()
    console = Console(stderr=as_json)
    drawn = []
    for name in architectures or EMULATED[:1]:
        drawn.append(_drawn(PictureRequest(name, prompt, steps, plan=plan), out, console))
        if not as_json:
            console.print(_table(drawn[-1]))
            say(console, f"it shows a {drawn[-1].shows}; stock's a {drawn[-1].stock_shows}")
            for part in ("step 1", "decode"):
                say(console, f"numerics gate of {part}, passed: {drawn[-1].parts[part].gate}")
    if as_json:
        typer.echo(json.dumps([_plain(each) for each in drawn], indent=2))
    else:
        for line in _LEGEND:
            say(console, line)


def _drawn(request: PictureRequest, out: Path, console: Console) -> Drawn:
    from rocm_sd.bench.emulated_picture import draw
    from rocm_sd.kernels import code_cache

    began, launches, in_step = time.perf_counter(), 0, 0
    with bar(f"{request.arch}: preparing", console=Console(stderr=True)) as update:

        def on_launch(part: str, launch: Launch) -> None:
            nonlocal launches, in_step
            launches += 1
            if part == "step 1":
                in_step += 1
            elif part != "decode":
                # Steps are alike; what the decoder launches is not known before.
                update(total=in_step * request.steps)
            update(completed=launches, description=f"{request.arch}: {part} of {request.steps}, {launch.kernel}")

        drawn = draw(request, code_cache.folder() / "emulated", on_launch)
    stem = f"{request.arch}-{request.plan}-{request.steps}-steps"
    picture, largest = difference(drawn.stock_image, drawn.image)
    rows = [
        [
            (drawn.stock_image, "stock torch on a CPU, float16"),
            (drawn.image, f"drawn by {request.arch} machine code"),
            (picture, f"difference x20, largest {largest} of 255"),
        ]
    ]
    save_png(sheet(rows), out / f"{stem}.png", asdict(request))
    save_text(json.dumps(_plain(drawn), indent=1) + "\n", out / f"{stem}.json")
    say(console, f"wrote {out / stem}.png and .json ({time.perf_counter() - began:.0f} s, {launches} launches)")
    return drawn


def _table(drawn: Drawn) -> Table:
    request = drawn.request
    title = f"{request.arch}, plan {request.plan}: {printable(request.prompt)}"
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("kernel", no_wrap=True)
    for heading in ("launches", "variants", "M instr.", "MB", "conflicts", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in ("step 1", "decode"):
        part = drawn.parts[name]
        for row in sorted(part.rows, key=lambda row: -row.modelled_us):
            table.add_row(*_cells(row))
        total = part.total
        total.kernel = f"{name}: ours"
        table.add_row(*_cells(total), style="bold")
        stock_ms = part.stock_modelled_us / 1e3
        table.add_row(f"{name}: stock torch", str(part.stock_calls), "", "", "", "", f"{stock_ms:.2f}")
        table.add_section()
    return table


def _cells(row: KernelRow) -> list[str]:
    return [
        row.kernel,
        str(row.launches),
        str(row.variants),
        f"{row.wave_instructions / 1e6:.2f}",
        f"{row.bytes / 1e6:.1f}",
        f"{row.lds_bank_conflicts / 1e3:.0f}k" if row.lds_bank_conflicts else "0",
        f"{row.modelled_us / 1e3:.2f}",
    ]


def _plain(drawn: Drawn) -> dict[str, Any]:
    return {
        "request": asdict(drawn.request),
        "shows": drawn.shows,
        "stock_shows": drawn.stock_shows,
        "parts": {name: asdict(part) | {"total": asdict(part.total)} for name, part in drawn.parts.items()},
        "label": "times are modelled, never measured",
    }
