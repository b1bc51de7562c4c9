"""What a check is: a question about a machine, answered by facts and by probes, with what it means and how to fix it.

A check that cannot run says so, and never reports a pass: what is not as it should be in a probe's answer is no answer.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = [
    "CannotRun", "Check", "Finding", "Fix", "Probe", "Probes", "Status", "check", "fine", "flag", "is_on",
    "measured_check", "not_here", "number", "on_the_gpu", "problem", "rows", "text", "unknown",
]  # fmt: skip


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
    def ask(self, name: str) -> Mapping[str, Any]:
        """Run the probe of that name, in a process of its own, and give its answer; or raise CannotRun."""


@dataclass(frozen=True)
class Fix:
    """How to fix it. `env` and `unset` are environment variables; `commands` are for the user to type.

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


def fine(says: str, means: str = "", *, measured: Mapping[str, Any] | None = None) -> Finding:
    return Finding(Status.OK, says, means, measured=measured or {})


def problem(says: str, means: str, fix: Fix, measured: Mapping[str, Any] | None = None) -> Finding:
    return Finding(Status.PROBLEM, says, means, fix, measured or {})


def unknown(says: str, means: str = "") -> Finding:
    return Finding(Status.UNKNOWN, says, means)


def not_here(says: str, means: str = "", *, measured: Mapping[str, Any] | None = None) -> Finding:
    return Finding(Status.NOT_HERE, says, means, measured=measured or {})


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


def check(*, measures: str, reports: str, probe: Probe | None = None) -> Callable[[Callable[..., Finding]], Check]:
    """Make a check of `name(facts, probes)`. The question is the first line of its module's docstring.

    `reports` are the links on GitHub, as people write them there: "ROCm/ROCm#3060 pytorch/pytorch/pull/170780".
    """
    links = tuple(f"https://github.com/{each.replace('#', '/issues/')}" for each in reports.split())

    def made(run: Callable[..., Finding]) -> Check:
        question = (sys.modules[run.__module__].__doc__ or "").partition("\n")[0]
        return Check(run.__name__, question, measures, links, run, probe)

    return made


def measured_check(
    *, measures: str, reports: str, probe: Probe, also_on_cpu: bool = False
) -> Callable[[Callable[[Facts, Mapping[str, Any]], Finding]], Check]:
    """Make a check of `name(facts, answer)`, which judges what the probe measured."""

    def made(judge: Callable[[Facts, Mapping[str, Any]], Finding]) -> Check:
        run = wraps(judge)(on_the_gpu(probe, judge, also_on_cpu=also_on_cpu))
        return check(measures=measures, reports=reports, probe=probe)(run)

    return made


def on_the_gpu(
    probe: Probe, judge: Callable[[Facts, Mapping[str, Any]], Finding], *, also_on_cpu: bool = False
) -> Callable[[Facts, Probes], Finding]:
    """A check that asks the probe and judges its answer; without a GPU, and so without the question, it says so.

    A GPU that torch does not see is another matter: what then ran on the processor says nothing about it.
    """

    def run(facts: Facts, probes: Probes) -> Finding:
        has_gpu = bool(facts.gpus or facts.torch.devices)
        if not has_gpu and not also_on_cpu:
            return not_here("There is no GPU to measure.")
        answer = probes.ask(probe.name)
        try:
            if has_gpu and is_on(answer, "cpu"):
                raise CannotRun("torch sees no GPU, so the probe ran on the processor")
            return judge(facts, answer)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CannotRun(f"the answer of the probe {probe.name} could not be read ({error!r})") from None

    return run


def is_on(answer: Mapping[str, Any], kind: str) -> bool:
    """Whether the probe ran on that kind of device; None is one that had no time left to say, which is no CPU."""
    device = answer["device"]
    return device is not None and device["kind"] == kind


def number(of: Mapping[str, Any], name: str) -> float:
    """A time or a rate: finite and above zero."""
    value = of[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def flag(of: Mapping[str, Any], name: str) -> bool:
    value = of[name]
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def text(of: Mapping[str, Any], name: str) -> str:
    value = of[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}")
    return value


def rows(of: Mapping[str, Any], name: str = "rows") -> list[Mapping[str, Any]]:
    """A table with at least one line: a probe that measured nothing found nothing out."""
    value = of[name]
    if not isinstance(value, list) or not value or not all(isinstance(row, dict) for row in value):
        raise ValueError(f"{name} is {value!r}")
    return value
