"""What the verbs share on a terminal: bars, lines that are not wrapped, options that several have, and lists."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
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

__all__ = ["Device", "bar", "batch_sizes", "parts", "say"]

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
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or Console(stderr=True), **{"transient": True, **options}) as progress:
        yield partial(progress.update, progress.add_task(what, total=total))


def say(console: Console, line: str) -> None:
    """Print it as it is, with what looks like markup, on one line however narrow the terminal: it can be copied."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def batch_sizes(text: str) -> tuple[int, ...]:
    given = parts(text)
    # Nine digits: a number of thousands is not even read by Python.
    if not given or not all(part.isdecimal() and len(part) <= 9 and int(part) for part in given):
        raise InvalidOption("--batch", text, [], hint="It takes sizes of 1 or more, e.g. --batch 1,8.")
    return tuple(map(int, given))


def parts(text: str | None) -> list[str]:
    """The parts of "a, b", each once."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
