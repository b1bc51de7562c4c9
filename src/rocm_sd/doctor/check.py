"""What a check is: a question about a machine, answered by facts and by probes, with what it means and what mends it.

A check that cannot run says so, and never reports a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CannotRun", "Check", "Finding", "Fix", "Probe", "Probes", "Status"]


class Status(Enum):
    OK = "ok"
    PROBLEM = "problem"
    # It could not be run, or its answer could not be read; never a pass.
    UNKNOWN = "unknown"
    # The question does not arise here: no such GPU, no such library.
    NOT_HERE = "not here"


class CannotRun(Exception):
    """A probe that crashed, hung, or has nothing to run on; its text is the reason, in words."""


class Probes(Protocol):
    def ask(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        """Run the probe of that name, in a process of its own, and give its answer; or raise CannotRun."""


@dataclass(frozen=True)
class Fix:
    """What mends it. `env` and `unset` are environment variables; `commands` are for the user to type.

    `safe`: it may be applied without harm where the diagnosis is wrong, so `--fix` may do it after asking.
    """

    summary: str
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    safe: bool = False


@dataclass(frozen=True)
class Finding:
    """`says`: what was seen, in one sentence with its figures; `means`: what that does to a user, in plain words."""

    status: Status
    says: str
    means: str = ""
    fix: Fix | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """What a check measures. It runs in a process of its own, and its name is the key of a recorded answer.

    `answer(*, device=None, quick=False)` gives one JSON object, in which `device` says where it ran.
    """

    name: str
    answer: Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """`measures`: what is looked at; `links`: where users met the pain, as evidence; `run` may raise CannotRun."""

    name: str
    question: str
    measures: str
    links: tuple[str, ...]
    run: Callable[[Facts, Probes], Finding]
    probe: Probe | None = None
