"""rocm-sd contribute: all that a card's owner can tell about it, in one command and one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from rocm_sd import settings
from rocm_sd.cli.terminal import Device, bar, budget_seconds, literal, say, status
from rocm_sd.errors import INTERRUPTED, InvalidOption, RocmSdError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.card_report import Part
    from rocm_sd.bench.records import Machine
    from rocm_sd.contribution.device import Device as Seen
    from rocm_sd.contribution.keeping import Kept
    from rocm_sd.contribution.running import PlannedPart

__all__ = ["contribute"]

_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "dim"}
_MOST_SHOWN, _LONGEST = 4, 160
# Their sentences have the reasons already.
_SAID_WHOLE = {"calibration", "bench", "comfyui"}


def contribute(
    budget: Annotated[str, typer.Option(help="Time for all of it: 90s, 10m, 1h.")] = "10m",
    out: Annotated[Path, typer.Option(help="The folder for the file.")] = Path(),
    comfyui: Annotated[
        Path | None, typer.Option(help="The folder of ComfyUI. (default: looked for in the usual places)")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Agree to the statement, and write without asking.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an interrupted run has found.")] = False,
    device: Device = None,
) -> None:
    """Find out all that your card can tell, and write it to one file that you may send. Nothing is sent by itself.

    rocm-sd contribute

    rocm-sd contribute --budget 20m --comfyui ~/ComfyUI

    rocm-sd contribute --yes --out results

    It runs the doctor, the kernels' self-tests, the numerics of every op, calibration, bench of what fits into memory,
    and ComfyUI where it is found: about ten minutes on a card. What crashes, hangs or is wrong is recorded, and the
    rest goes on: a failure is the most valuable thing to send. Ctrl-C keeps what is done, and the same command
    continues there. You are asked before the file is written; it has no name, no host and no folder in it
    (docs/contribute.md).
    """
    seconds = budget_seconds(budget)
    _require_sense(agreed=yes)
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.contribution import keeping

    writable_folder(out)
    console = Console()
    machine, parts, kernels = _planned(console, device, comfyui)
    with keeping.keeping(keeping.key_of(machine, kernels), fresh=fresh) as kept:
        _introduce(console, machine, kept, seconds)
        found, complete = _run(console, parts, kept, seconds)
        _publish(console, machine, found, kept, f"rocm-sd contribute --budget {budget}", out, agreed=yes)
        if complete:
            kept.remove()
        else:
            say(console, f"For what {budget} did not suffice for, type: rocm-sd contribute --budget {_twice(seconds)}")


def _require_sense(*, agreed: bool) -> None:
    """Said before ten minutes are spent."""
    emulated = settings.current().emulate
    if emulated is not None:
        hint = "An emulated card can tell nothing about one. Type: unset ROCM_SD_EMULATE"
        raise InvalidOption("ROCM_SD_EMULATE", emulated, [], hint=hint)
    if not agreed and not sys.stdin.isatty():
        from rocm_sd.bench.publishing import STATEMENT

        raise RocmSdError(
            "Nothing was measured: you are asked before the file is written, and there is no terminal to ask on.",
            hint=f"To agree beforehand to this statement, type: rocm-sd contribute --yes\n{STATEMENT}",
        )


def _planned(console: Console, asked: str | None, comfyui: Path | None) -> tuple[Machine, tuple[PlannedPart, ...], str]:
    """The device is looked at in a process of its own, since to open a sick one may be its end."""
    from rocm_sd.contribution import planning, sick_device
    from rocm_sd.contribution.attempts import called
    from rocm_sd.workers import Worker, WorkerFailed

    with status(console, "Looking at the machine ..."), Worker() as worker:
        try:
            device: Seen = worker.call(called, "rocm_sd.contribution.tasks:look", asked, timeout=120.0)
        except WorkerFailed as error:
            return sick_device.machine(), planning.without_device(error.message, comfyui), ""
        return device.machine, planning.planned(device, comfyui), device.kernels


def _introduce(console: Console, machine: Machine, kept: Kept, seconds: float) -> None:
    from rocm_sd import arch

    takes = f"{seconds / 60:.0f} minutes at most" if machine.arch != "cpu" else "a few minutes"
    console.print(f"[bold]{literal(machine.device)}[/] ({literal(machine.arch)}): {takes}", highlight=False)
    if machine.arch == "cpu":
        gpus = [gpu.arch_name or gpu.name or gpu.vendor.value for gpu in arch.find_gpus()]
        if gpus:
            say(console, f"torch does not see {', '.join(gpus)}, which this machine has: all of this runs on the CPU.")
            say(console, "What is wrong, and how to fix it, says: rocm-sd doctor")
        else:
            console.print("There is no GPU here: all of this runs on the CPU, with the built-in model alone.")
    console.print("Nothing is sent. You are asked before one file is written. Ctrl-C keeps what is done.", style="dim")
    if not kept.is_empty:
        say(console, f"Continuing where it was: {_results(kept)} kept. To start anew: --fresh")
    console.print()


def _run(console: Console, planned: Sequence[PlannedPart], kept: Kept, seconds: float) -> tuple[tuple[Part, ...], bool]:
    from rocm_sd.contribution.running import Run

    try:
        with bar("starting", console=console, share=True, speed_estimate_period=600) as update:
            run = Run(
                kept, seconds,
                lambda done, total, what: update(completed=done, total=max(total, 1.0), description=what[:60]),
                lambda part: _show_part(console, part),
            )  # fmt: skip
            return run.parts(planned), run.complete
    except KeyboardInterrupt:
        say(console, f"Interrupted. {_results(kept)} kept; to go on, type the same command again.")
        raise typer.Exit(INTERRUPTED) from None


def _show_part(console: Console, part: Part) -> None:
    head = f"[{_COLOURS[part.state]}]{part.state:>7}[/]  [bold]{part.name}[/]: {literal(part.summary)}"
    console.print(f"{head} [dim]({part.seconds:.0f} s)[/]", highlight=False)
    if part.name in _SAID_WHOLE:
        return
    wrong = part.of("failed")
    for item in wrong[:_MOST_SHOWN]:
        reason = item.reason if len(item.reason) <= _LONGEST else f"{item.reason[:_LONGEST]}..."
        console.print(Padding(literal(f"{item.name}: {reason}"), (0, 0, 0, 9)), highlight=False)
    if len(wrong) > _MOST_SHOWN:
        console.print(Padding(f"and {len(wrong) - _MOST_SHOWN} more, in the file", (0, 0, 0, 9)), highlight=False)


def _publish(
    console: Console, machine: Machine, parts: Sequence[Part], kept: Kept, command: str, out: Path, *, agreed: bool
) -> None:
    """Shows what will be in the file, asks, and writes it."""
    from rocm_sd.bench import card_report, publishing, sending

    spent = sum(part.seconds for part in parts)
    report = card_report.CardReport(machine, command, kept.when, round(spent, 1), tuple(parts))
    body = card_report.publishable(report)
    console.print(f"\n[bold]{card_report.counted(parts)}.[/]", highlight=False)
    if any(part.state == "failed" for part in parts):
        console.print("A failure is the most valuable thing to send: please do.")
    name = card_report.file_name(body)
    console.print(
        f"\nThe file {literal(name)} will have the card, driver and versions; every line above with its figures "
        "and reasons; what the doctor measured; every single timing. It will have no name, no host, no folder and no "
        "serial number.",
        highlight=False,
    )
    console.print(Padding(literal(publishing.STATEMENT), (1, 4)), highlight=False)
    if not agreed and not _asked():
        say(console, "Nothing was written. What was measured is kept: type the same command to be asked again.")
        raise typer.Exit
    file = card_report.write(body, out)
    say(console, f"wrote {file} ({file.stat().st_size / 1024:.0f} KiB)")
    console.print("\n[bold]To send it:[/]")
    for way in sending.ways(machine.arch, sending.repository()):
        say(console, f"  {way}")


def _asked() -> bool:
    try:
        return typer.confirm("Do you agree, and shall it be written?")
    except typer.Abort:
        return False


def _results(kept: Kept) -> str:
    return "1 result is" if kept.done == 1 else f"{kept.done} results are"


def _twice(seconds: float) -> str:
    return f"{2 * seconds / 60:.0f}m" if seconds >= 60 else f"{2 * seconds:.0f}s"
