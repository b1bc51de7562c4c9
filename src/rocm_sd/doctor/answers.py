"""How a check reads a probe's answer: what is not as it should be is no answer, and never a pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rocm_sd.doctor.check import Probe, Probes
    from rocm_sd.doctor.facts import Facts

__all__ = ["flag", "is_on", "number", "on_the_gpu", "rows", "text"]


def on_the_gpu(
    probe: Probe, judge: Callable[[Facts, Mapping[str, Any]], Finding], *, also_on_cpu: bool = False
) -> Callable[[Facts, Probes], Finding]:
    """A check that asks the probe and judges its answer; without a GPU, and so without the question, it says so.

    A GPU that torch does not see is another matter: what then ran on the processor says nothing about it.
    """

    def run(facts: Facts, probes: Probes) -> Finding:
        has_gpu = bool(facts.gpus or facts.torch.devices)
        if not has_gpu and not also_on_cpu:
            return Finding(Status.NOT_HERE, "There is no GPU to measure.")
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
