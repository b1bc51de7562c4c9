"""What fixes a machine: environment variables, for one command or in a file that a shell reads; nothing else.

Every change of the file keeps the one before it, and `undo` brings that back.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocm_sd.doctor.check import Status
from rocm_sd.errors import RocmSdError
from rocm_sd.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rocm_sd.doctor.examination import Examined

__all__ = ["Treatment", "env_file", "run_with", "treatment_for", "undo", "write"]

_HEADER = "# Written by rocm-sd doctor --fix. Undo: rocm-sd doctor --undo"


@dataclass(frozen=True)
class Treatment:
    """`env` and `unset` are what is safe to apply; `left` are problems that are the user's to fix, with the reason."""

    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    left: tuple[tuple[str, str], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.env and not self.unset

    def lines(self) -> list[str]:
        """The changes as a shell reads them."""
        return [
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(self.env.items())),
            *(f"unset {name}" for name in sorted(self.unset)),
        ]


def treatment_for(examined: Sequence[Examined]) -> Treatment:
    """The safe fixes of all problems together. Where two want different things of one variable, neither is applied."""
    wishes: dict[str, dict[str | None, str]] = {}
    left: list[tuple[str, str]] = []
    for each in examined:
        if each.finding.status is not Status.PROBLEM:
            continue
        name, fix = each.check.name, each.finding.fix
        if fix is None:
            left.append((name, "no fix is known"))
            continue
        if not fix.safe or not (fix.env or fix.unset):
            left.append((name, fix.summary))
            continue
        for variable, value in [*fix.env.items(), *((variable, None) for variable in fix.unset)]:
            wishes.setdefault(variable, {})[value] = name
    env, unset, reasons = {}, [], {}
    for variable, wanted in wishes.items():
        if len(wanted) > 1:
            left.append((variable, f"{' and '.join(wanted.values())} want different values of it: choose one"))
            continue
        ((value, name),) = wanted.items()
        reasons[variable] = name
        if value is None:
            unset.append(variable)
        else:
            env[variable] = value
    return Treatment(env, tuple(unset), reasons, tuple(left))


def run_with(treatment: Treatment, command: Sequence[str]) -> int:
    """Run a command with the variables in place, before it imports torch; gives its exit code."""
    environment = {name: value for name, value in os.environ.items() if name not in treatment.unset}
    environment |= treatment.env
    try:
        return subprocess.run(list(command), env=environment, check=False).returncode
    except OSError as error:
        raise RocmSdError(f"{command[0]} could not be started: {error.strerror}.", hint="Check its name.") from None


def env_file() -> Path:
    from platformdirs import user_config_path  # noqa: PLC0415 -- only --fix and --undo need it

    return user_config_path("rocm-sd", appauthor=False) / "env.sh"


def write(treatment: Treatment, file: Path) -> bool:
    """Add the treatment to the file, and keep the file as it was; False where it says all of that already.

    What earlier treatments put there stays: their problems are not seen any more, because they are fixed.
    """
    before = _ours(file)
    new = treatment.lines()
    changed = {_variable(line) for line in new}
    kept = [line for line in before or [] if _variable(line) not in changed]
    if before is not None and set(new) <= set(before):
        return False
    text = "\n".join([_HEADER, *kept, *new]) + "\n"
    try:
        if before is not None:
            write_text(_backup(file, len(_backups(file)) + 1), file.read_text(encoding="utf-8"))
        write_text(file, text)
    except OSError as error:
        raise RocmSdError(f"{file} cannot be written: {error.strerror}.", hint="Set the variables by hand.") from None
    return True


def undo(file: Path) -> str:
    """Bring back the file before the last treatment; says in a sentence what was done."""
    if _ours(file) is None:
        return f"There is nothing to undo: there is no {file}."
    backups = _backups(file)
    try:
        if not backups:
            file.unlink()
            return f"Removed {file}: there was none before."
        write_text(file, backups[-1].read_text(encoding="utf-8"))
        backups[-1].unlink()
    except OSError as error:
        raise RocmSdError(f"{file} cannot be changed: {error.strerror}.", hint="Remove it by hand.") from None
    return f"Brought back {file} as it was before the last --fix."


def _ours(file: Path) -> list[str] | None:
    """The lines below the header; None where there is no such file. A file of somebody else's is not touched."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RocmSdError(f"{file} cannot be read: {error}.", hint="Move it away.") from None
    if not lines or lines[0] != _HEADER:
        raise RocmSdError(
            f"{file} was not written by rocm-sd, and is not touched.", hint="Move it away, and try again."
        )
    return lines[1:]


def _variable(line: str) -> str:
    """The variable that a line sets or unsets; a line of another kind is its own name, and is kept as it is."""
    words = line.split(maxsplit=1)
    if len(words) == 2 and words[0] in {"export", "unset"}:
        return words[1].partition("=")[0]
    return line


def _backup(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.before-{number}")


def _backups(file: Path) -> list[Path]:
    """Oldest first, without a gap."""
    found: list[Path] = []
    while _backup(file, len(found) + 1).exists():
        found.append(_backup(file, len(found) + 1))
    return found
