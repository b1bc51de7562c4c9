"""The card on which proposals climb rung 5 and are timed, asked by way of walled-in processes.

    card = find("cuda")                       # what is there, once a process within walls has used it; None for "cpu"
    Judge(op, (card.arch,), card=card)
    Judge(op, architectures, card=Recorded(rounds))     # what a record says of it, where it is replayed

A fault of a proposal ends its process, and costs nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rocm_sd import typed_json
from rocm_sd.agents.asking import climbed_as
from rocm_sd.agents.confinement import LIMITS, confined
from rocm_sd.agents.judging import SHARE
from rocm_sd.agents.verdicts import RULES, Rung, Timing, timing_of
from rocm_sd.errors import DeviceUnavailable, RocmSdError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.agents.confinement import Limits
    from rocm_sd.agents.keeping import Round
    from rocm_sd.agents.proposals import Proposal
    from rocm_sd.agents.verdicts import Judged

__all__ = ["Card", "Recorded", "find"]

_ON_CARD = "rocm_sd.agents.on_card"
# Eight are the first with an interval of 95%; of a kernel that takes microseconds so many cost nothing.
_TURNS = 24
# To start Python, torch and a driver, and to compile; what hangs on the card ends within it.
_LIMITS = replace(LIMITS, seconds=300.0, cpu_seconds=600, memory_bytes=None)
_SEARCH_SHARE = 0.5  # of the process's time: what begins before that ends in time
_BY_DEFAULT = "halving"


@dataclass(frozen=True)
class _Ready:
    arch: str
    name: str


@dataclass(frozen=True)
class _Times:
    call: str
    ours: tuple[float, ...]
    shipped: tuple[float, ...]
    stock: tuple[float, ...]


@dataclass(frozen=True)
class _Climbed:
    rungs: tuple[Rung, ...]
    times: tuple[_Times, ...]


@dataclass(frozen=True)
class _Share:
    config: dict[str, int]
    share: float


@dataclass(frozen=True)
class _Searched:
    found: tuple[_Share, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Card:
    """`device` is torch's name for it, `name` its maker's."""

    device: str
    arch: str
    name: str
    turns: int = _TURNS
    limits: Limits = _LIMITS

    def climbed(
        self, proposal: Proposal, job: Mapping[str, Any], files: Mapping[str, str]
    ) -> tuple[Rung, tuple[Timing, ...]]:
        del proposal
        found = typed_json.read(_Climbed, self._asked("climb", job, files), RULES, top="the process's answer")
        (rung,) = climbed_as(found.rungs, [(5, self.arch)])
        if rung.state == "failed":
            return rung, ()
        if not found.times or rung.state != "passed":
            raise RocmSdError("The process answered with no time of any call.")
        return rung, tuple(self._timing(each) for each in found.times)

    def searched(self, proposal: Proposal, job: Mapping[str, Any]) -> list[tuple[float, dict[str, int]]]:
        asked = {"strategy": proposal.strategy or _BY_DEFAULT, "seconds": self.limits.seconds * _SEARCH_SHARE}
        answer = self._asked("search", {**job, **asked}, {})
        found = typed_json.read(_Searched, answer, RULES, top="the process's answer").found
        given = list(job["configs"])
        if any(each.config not in given or not 0.0 < each.share < math.inf for each in found):
            raise RocmSdError("The process answered with other configs or times than it was to find.")
        return sorted(((each.share, each.config) for each in found), key=lambda each: each[0])

    def _asked(self, function: str, job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
        more = {"device": self.device, "card": self.arch, "turns": self.turns}
        return confined(f"{_ON_CARD}:{function}", {**job, **more}, files=files, limits=self.limits, device=True)

    def _timing(self, times: _Times) -> Timing:
        each = (times.ours, times.shipped, times.stock)
        if any(len(some) != self.turns or not all(0.0 < ms < math.inf for ms in some) for some in each):
            raise RocmSdError(f"The process answered with times that no turns have, for {times.call}.")
        return timing_of(self.name, self.arch, times.call, *each)


def find(device: str) -> Card | None:
    """Of torch's name for it; None for the CPU. Raises DeviceUnavailable where it cannot be used within the walls."""
    if device.partition(":")[0] == "cpu":
        return None
    try:
        answer = confined(f"{_ON_CARD}:ready", {"device": device}, limits=_LIMITS, device=True)
        found = typed_json.read(_Ready, answer, RULES, top="the process's answer")
    except (RocmSdError, typed_json.Misfit) as error:
        raise DeviceUnavailable(
            f"{device} cannot be used by a process within walls: {error}.",
            hint="To model times and measure none, type --device cpu.",
        ) from error
    return Card(device, found.arch, found.name)


class Recorded:
    """What a record found on a card that need not be here: the same times give the same tree."""

    def __init__(self, rounds: Sequence[Round]) -> None:
        self.arch = ""
        self._climbed: dict[str, tuple[Rung, tuple[Timing, ...]]] = {}
        self._searched: dict[str, tuple[float, dict[str, int]]] = {}
        for each in rounds:
            for proposal in each.proposal:
                self._take(proposal, each.judged)

    def _take(self, proposal: Proposal, judged: Judged) -> None:
        rung = next((each for each in judged.rungs if each.rung == 5), None)
        if rung is None:
            return
        self.arch = rung.arch
        if proposal.kind == "space":
            share = rung.figures.get(SHARE, 0.0)
            self._searched[proposal.digest] = float(share), judged.config
            proposal = replace(proposal, kind="config", config=judged.config, space={}, listed=())
        self._climbed[proposal.digest] = rung, judged.measured

    def climbed(
        self, proposal: Proposal, _job: Mapping[str, Any], _files: Mapping[str, str]
    ) -> tuple[Rung, tuple[Timing, ...]]:
        if proposal.digest not in self._climbed:
            raise RocmSdError("The record says nothing of it on a card.")
        return self._climbed[proposal.digest]

    def searched(self, proposal: Proposal, _job: Mapping[str, Any]) -> list[tuple[float, dict[str, int]]]:
        found = self._searched.get(proposal.digest)
        return [] if found is None else [found]
