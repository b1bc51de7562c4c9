"""What the verbs share on a terminal: bars, lines that are not wrapped, options that several have, and lists.

Text of a user's (a prompt, a path, a model's name) is printed through here, and never read as Rich's markup.
"""

from __future__ import annotations

import inspect
import re
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

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

from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.status import Status

__all__ = [
    "OUT",
    "Device",
    "bar",
    "batch_sizes",
    "budget_seconds",
    "help_text",
    "literal",
    "name_report",
    "parts",
    "printable",
    "say",
    "status",
]

Device = Annotated[
    str | None, typer.Option(help="cuda (AMD and NVIDIA GPUs) or cpu. (default: a GPU if torch sees one)")
]


# Where verbs write unless told otherwise, and where `rocm-sd report` looks for what they wrote.
OUT = Path("out")


@contextmanager
def bar(
    what: str, total: float | None = None, *, console: Console | None = None, share: bool = False, **options: Any
) -> Iterator[Callable[..., None]]:
    """A bar, which is gone at its end; it gives `update(completed=3, description="what is under way")`.

    On standard error unless `console` is given, so that --json leaves nothing but JSON on standard output. `share`: it
    shows a percentage, and not how many of how many.
    """
    done = TaskProgressColumn() if share else MofNCompleteColumn()
    said = TextColumn("{task.description}", markup=False)
    columns = (said, BarColumn(), done, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or Console(stderr=True), **{"transient": True, **options}) as progress:
        task = progress.add_task(printable(what), total=total)

        def update(**changes: Any) -> None:
            if "description" in changes:
                changes["description"] = printable(changes["description"])
            progress.update(task, **changes)

        yield update


def say(console: Console, line: str) -> None:
    """Print it as it is, with what looks like markup, on one line however narrow the terminal: it can be copied."""
    console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def name_report(console: Console, folder: Path) -> None:
    """What to type next, where a record was written to this folder."""
    where = "" if folder == OUT else f" {shlex.quote(str(folder))}"
    say(console, f"To see it as a page, type: rocm-sd report{where}")


def status(console: Console, text: str) -> Status:
    """A spinner with this text, as it is."""
    return console.status(literal(text))


def literal(text: str) -> str:
    """The text where Rich reads markup, such as a cell of a table: it shows as it is, and what a terminal would obey
    (colours, the cursor, the direction of writing) as escapes, since a stranger may have written it.
    """
    return escape("".join(_shown(each) for each in text))


def _shown(character: str) -> str:
    """Joiners are parts of emojis and of words."""
    obeyed = category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and character not in "\n\t\u200c\u200d"
    return character.encode("unicode_escape").decode() if obeyed else character


def printable(text: str) -> str:
    """Bytes of a path or an argument that are no text show as escapes, where printing them would raise."""
    return text.encode("utf-8", "backslashreplace").decode()


def help_text(verb: Callable[..., None]) -> str:
    """Its docstring, a paragraph a line: typer keeps the lines of the source, which are longer than most terminals'."""
    paragraphs = inspect.cleandoc(verb.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def batch_sizes(text: str) -> tuple[int, ...]:
    given = parts(text)
    # Nine digits: a number of thousands is not even read by Python.
    if not given or not all(part.isdecimal() and len(part) <= 9 and int(part) for part in given):
        raise InvalidOption("--batch", text, [], hint="It takes sizes of 1 or more, e.g. --batch 1,8.")
    return tuple(map(int, given))


def parts(text: str | None) -> list[str]:
    """The parts of "a, b", each once."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def budget_seconds(text: str) -> float:
    """Of "90s", "2m" or "1h"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise InvalidOption("--budget", text, [], hint="Give a time: 90s, 2m or 1h.")
    return seconds
