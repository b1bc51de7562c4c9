"""What the verbs share on a terminal: bars, lines that are not wrapped, options that several have, and lists.

Text of a user's (a prompt, a path, a model's name) is printed through here, and never read as Rich's markup.
"""

from __future__ import annotations

from contextlib import contextmanager
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

from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.status import Status

__all__ = ["Device", "bar", "batch_sizes", "literal", "parts", "printable", "say", "status"]

Device = Annotated[str | None, typer.Option(help="cuda (AMD and NVIDIA) or cpu. (default: what is there)")]


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


def status(console: Console, text: str) -> Status:
    """A spinner with this text, as it is."""
    return console.status(literal(text))


def literal(text: str) -> str:
    """The text where Rich reads markup, such as a cell of a table: it shows as it is."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Bytes of a path or an argument that are no text show as escapes, where printing them would raise."""
    return text.encode("utf-8", "backslashreplace").decode()


def batch_sizes(text: str) -> tuple[int, ...]:
    given = parts(text)
    # Nine digits: a number of thousands is not even read by Python.
    if not given or not all(part.isdecimal() and len(part) <= 9 and int(part) for part in given):
        raise InvalidOption("--batch", text, [], hint="It takes sizes of 1 or more, e.g. --batch 1,8.")
    return tuple(map(int, given))


def parts(text: str | None) -> list[str]:
    """The parts of "a, b", each once."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
