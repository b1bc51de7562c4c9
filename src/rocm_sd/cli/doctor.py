"""rocm-sd doctor: what is wrong with this set-up, what it means, and how to fix it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from rocm_sd.cli.terminal import bar, say
from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.doctor.check import Probes
    from rocm_sd.doctor.examination import Examined
    from rocm_sd.doctor.facts import Facts
    from rocm_sd.doctor.treatment import Treatment

__all__ = ["DoctorCommand", "doctor"]

_COLOURS = {"ok": "green", "problem": "bold red", "unknown": "yellow", "not here": "dim"}
# What there is no need to read, in this order.
_FOLDED = ("ok", "unknown", "not here")
# So many names of checks that do not arise are worth reading.
_FEW = 5
_COMMAND = "rocm_sd.doctor.command"


class DoctorCommand(TyperCommand):
    """Keeps what follows `--` apart: it is a command to run, and not the names of checks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def doctor(
    context: typer.Context,
    checks: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK]...", help="Checks by name.", show_default="all")
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Apply what is safe: to the command after --, or in a file for your shell, after asking."
        ),
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Bring back the file as it was before the last --fix.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: write the file without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, for bug reports and scripts.")] = False,
    machine: Annotated[
        Path | None, typer.Option(help="Examine the machine that was recorded in this folder, and not this one.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write this machine to a folder, with nothing personal in it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure with small sizes.")] = False,
    in_full: Annotated[
        bool, typer.Option("--all", "--verbose", help="Show every check in full, and links to reports of each problem.")
    ] = False,
) -> None:
    """Say what is wrong with this set-up, what it means, and how to fix it. Nothing is changed without --fix.

    rocm-sd doctor

    rocm-sd doctor sdpa_numerics two_tritons --json

    rocm-sd doctor --fix

    rocm-sd doctor --fix -- python draw.py

    rocm-sd doctor --undo

    rocm-sd doctor --record ./my-machine

    Each measurement runs in a process of its own: a crash or a hang costs one answer. A check that could not run is
    unknown, and never a pass. The exit code is 1 where there is a problem; with a command after -- it is the
    command's. All checks are explained in docs/doctor.md.
    """
    from rocm_sd.doctor import treatment as treating
    from rocm_sd.doctor.check import Status
    from rocm_sd.doctor.examination import chosen_checks

    command: list[str] | None = context.meta.get(_COMMAND)
    _require_sense(fix=fix, undo=undo, machine=machine, record=record, command=command)
    if undo:
        say(Console(), treating.undo(treating.env_file()))
        return
    chosen = chosen_checks(checks or ())
    facts, examined = _examined(chosen, machine=machine, record=record, quick=quick)
    # Standard output is the command's own, where there is one.
    console = Console(stderr=command is not None)
    treatment = treating.treatment_for(examined) if fix else None
    if as_json and command is None:
        typer.echo(json.dumps(_as_json(facts, examined, treatment), indent=2))
    else:
        # Who names checks wants to read what they say.
        _show(console, examined, in_full=in_full or bool(checks), offer=machine is None and not fix)
    if treatment is not None and command is not None:
        _show_treatment(console, treatment)
        raise typer.Exit(treating.run_with(treatment, command))
    if treatment is not None:
        _offer(Console(stderr=as_json), treatment, agreed=yes)
    if any(each.finding.status is Status.PROBLEM for each in examined):
        raise typer.Exit(1)


def _require_sense(
    *, fix: bool, undo: bool, machine: Path | None, record: Path | None, command: list[str] | None
) -> None:
    if command is not None and not (fix and command):
        hint = "Type: rocm-sd doctor --fix -- COMMAND"
        raise InvalidOption("--", " ".join(command), [], hint=hint)
    if undo and fix:
        raise InvalidOption("--undo", "together with --fix", [], hint="Type one of them.")
    if machine is not None and (fix or undo or record is not None):
        hint = "A recorded machine is not the one at hand: it can be looked at, and not changed or recorded."
        raise InvalidOption("--machine", f"{machine} together with --fix, --undo or --record", [], hint=hint)


def _examined(
    chosen: Sequence[Any], *, machine: Path | None, record: Path | None, quick: bool
) -> tuple[Facts, tuple[Examined, ...]]:
    from rocm_sd.doctor import recording
    from rocm_sd.doctor.examination import examine
    from rocm_sd.doctor.probes import LiveProbes, RecordedProbes
    from rocm_sd.doctor.reading import gather

    errors = Console(stderr=True)
    live = LiveProbes(quick=quick)
    if machine is not None:
        facts = recording.load(machine)
        probes: Probes = RecordedProbes(recording.read_probes(machine))
    else:
        if record is not None:
            from rocm_sd.cli.pictures import writable_folder

            writable_folder(record)
        with errors.status("Looking at the machine ..."):
            facts = gather()
        probes = live
    with bar("examining", len(chosen)) as update:
        places = {check.name: place for place, check in enumerate(chosen)}
        examined = examine(facts, probes, chosen, lambda name: update(completed=places[name], description=name))
    if record is not None:
        recording.record(record, facts, live.answers)
        say(errors, f"wrote {record}: facts.json, probes.json and what sysfs says of the GPUs")
    return facts, examined


def _as_json(facts: Facts, examined: Sequence[Examined], treatment: Treatment | None) -> dict[str, Any]:
    content: dict[str, Any] = {"facts": asdict(facts), "findings": [_row(each) for each in examined]}
    if treatment is not None:
        content["fix"] = {
            "env": dict(treatment.env),
            "unset": list(treatment.unset),
            "left": [{"of": name, "reason": reason} for name, reason in treatment.left],
        }
    return content


def _row(each: Examined) -> dict[str, Any]:
    check = each.check
    question = {"check": check.name, "question": check.question, "measures": check.measures, "links": check.links}
    return {**question, **asdict(each.finding), "status": each.finding.status.value}


def _show(console: Console, examined: Sequence[Examined], *, in_full: bool, offer: bool) -> None:
    """The verdict, then problems, each with all there is to say about it: they are what was asked for.

    `offer`: --fix is named where it would apply something.
    """
    by_status: dict[str, list[Examined]] = {status: [] for status in _COLOURS}
    for each in examined:
        by_status[each.finding.status.value].append(each)
    problems = by_status["problem"]
    say(console, _verdict(problems, by_status["ok"]))
    for each in problems:
        console.print()
        _show_one(console, each, links=in_full)
    console.print()
    for status in _FOLDED:
        if in_full:
            for each in by_status[status]:
                _show_one(console, each, links=False)
        elif by_status[status]:
            console.print(escape(_folded(status, by_status[status])), highlight=False)
    if offer and any(each.finding.fix is not None and each.finding.fix.safe for each in problems):
        console.print("To apply what is safe, type: rocm-sd doctor --fix", highlight=False)
    if not in_full:
        console.print("To see every check in full, type: rocm-sd doctor --all", highlight=False)


def _verdict(problems: Sequence[Examined], fine: Sequence[Examined]) -> str:
    if problems:
        return f"{_counted(len(problems), 'problem')}: {_names(problems)}."
    return "No problem was found." if fine else "No problem was found, and no check could be made."


def _folded(status: str, found: Sequence[Examined]) -> str:
    """All of one status in a sentence; a reason that several share is told once."""
    count = len(found)
    if status == "ok":
        return f"{_counted(count, 'check')} {'is' if count == 1 else 'are'} fine: {_names(found)}."
    if status == "not here":
        names = f": {_names(found)}" if count <= _FEW else ""
        return f"{_counted(count, 'check')} {'does' if count == 1 else 'do'} not arise here{names}."
    by_reason: dict[str, list[Examined]] = {}
    for each in found:
        by_reason.setdefault(_cause(each.finding.says), []).append(each)
    groups = "; ".join(f"{_names(several)} ({reason})" for reason, several in by_reason.items())
    return f"{_counted(count, 'check')} {'is' if count == 1 else 'are'} unknown: {groups}."


def _cause(says: str) -> str:
    """What several checks have in common that could not be run: what their probes say last."""
    return says.rstrip(".").rpartition(": ")[2]


def _names(found: Sequence[Examined]) -> str:
    return ", ".join(each.check.name for each in found)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _show_one(console: Console, each: Examined, *, links: bool) -> None:
    finding, status = each.finding, each.finding.status.value
    head = Table.grid(padding=(0, 2))
    head.add_column(justify="right", width=8)
    head.add_column()
    head.add_row(f"[{_COLOURS[status]}]{status}[/]", f"[bold]{each.check.name}[/]: {escape(finding.says)}")
    if finding.means and status != "ok":
        head.add_row("", escape(finding.means))
    if finding.fix:
        head.add_row("[green]fix[/]", escape(finding.fix.summary))
    console.print(head, highlight=False)
    if finding.fix:
        settings = [f"export {name}={value}" for name, value in finding.fix.env.items()]
        settings += [f"unset {name}" for name in finding.fix.unset]
        # Unwrapped, so that they can be copied; so are the links.
        for line in (*settings, *finding.fix.commands):
            say(console, f"          {line}")
    if links and status == "problem":
        for link in each.check.links:
            console.print(f"          [dim]{escape(link)}[/]", soft_wrap=True, highlight=False)


def _show_treatment(console: Console, treatment: Treatment) -> None:
    for name, reason in treatment.left:
        say(console, f"left to you: {name}: {reason}")
    if treatment.is_empty:
        console.print("There is nothing that is safe to apply by itself.")
        return
    for line in treatment.lines():
        say(console, f"  {line}")


def _offer(console: Console, treatment: Treatment, *, agreed: bool) -> None:
    from rocm_sd.doctor import treatment as treating

    _show_treatment(console, treatment)
    if treatment.is_empty:
        return
    file = treating.env_file()
    if not agreed and not _asked(console, file):
        console.print("Nothing was written.")
        return
    if treating.write(treatment, file):
        say(console, f"wrote {file}")
    else:
        say(console, f"{file} says so already")
    say(console, f"In each shell, or once in its profile, type: . {shlex.quote(str(file))}")
    console.print("To take it back: rocm-sd doctor --undo")


def _asked(console: Console, file: Path) -> bool:
    """No terminal, no answer: then nothing is written."""
    try:
        return typer.confirm(f"Write these lines to {file}?", default=False, err=True)
    except typer.Abort:
        console.print("No answer; with --yes it is written without one.")
        return False
