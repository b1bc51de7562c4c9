"""Ways to run a whole model, and which of them was the fastest here: a plan is measured, stored and found again.

A plan is an entry of the performance database, as an op's candidate is: its problem is the model with the shapes of a
call, with graphs or without; its time is that of one call of the model, and `stock_us` that of the model as it came.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rocm_sd.ops import OPS
from rocm_sd.tuning import environment, resolve
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.search.workbench import OK

if TYPE_CHECKING:
    import torch

    from rocm_sd.tuning.entries import Entry

__all__ = [
    "CHANNELS_LAST", "CUT", "OP", "PLANS", "MeasuredPlan", "Plan", "kernels_hash", "known_wrong", "measured", "named",
    "problem_of", "was_cut",
]  # fmt: skip

OP = "plan"
# How the reason begins where the time was over before the plan was timed: nothing is known of it.
CUT = "cut"


@dataclass(frozen=True)
class Plan:
    """`rules`: all that the layout allows, or none. `captured`: from graphs, where these are wanted at all."""

    name: str
    rules: bool
    channels_last: bool
    captured: bool


CHANNELS_LAST = Plan("channels_last", rules=True, channels_last=True, captured=True)
PLANS = (
    Plan(STOCK, rules=False, channels_last=False, captured=False),
    Plan("graph", rules=False, channels_last=False, captured=True),
    Plan("contiguous", rules=True, channels_last=False, captured=True),
    CHANNELS_LAST,
)


_BY_NAME = {plan.name: plan for plan in PLANS}


def named(name: str) -> Plan:
    return _BY_NAME[name]


def problem_of(model: str, call: str, *, graphs: bool) -> dict[str, int | str]:
    return {"model": model, "call": call, "graphs": "captured" if graphs else "none"}


@cache
def kernels_hash() -> str:
    """Of all kernels: with others the choices that a plan was timed with do not hold."""
    digest = hashlib.sha256()
    for name, op in sorted(OPS.items()):
        digest.update(f"{name} {op.kernel_hashes()}".encode())
    return digest.hexdigest()[:16]


def _stored(model: str, device: torch.device, *, graphs: bool) -> list[Entry]:
    if not resolve.has_database():
        return []
    wanted = (model, "captured" if graphs else "none", kernels_hash())
    return [
        entry
        for entry in resolve.user_database().all(OP, environment.current(device))
        if (entry.problem.get("model"), entry.problem.get("graphs"), entry.kernel_hash) == wanted
        and entry.candidate in _BY_NAME
    ]


def known_wrong(model: str, device: torch.device, *, graphs: bool, call: str) -> dict[str, str]:
    """By plan: why it was not right for calls of these shapes."""
    return {
        name: why for name, why in _failed(model, device, graphs=graphs, call=call).items() if not why.startswith(CUT)
    }


def was_cut(model: str, device: torch.device, *, graphs: bool, call: str) -> bool:
    """Whether an earlier calibration ended before a plan for calls of these shapes was timed."""
    return any(why.startswith(CUT) for why in _failed(model, device, graphs=graphs, call=call).values())


def _failed(model: str, device: torch.device, *, graphs: bool, call: str) -> dict[str, str]:
    found = [entry for entry in _stored(model, device, graphs=graphs) if entry.problem.get("call") == call]
    return {entry.candidate: entry.numerics for entry in found if entry.numerics != OK and entry.candidate != STOCK}


@dataclass(frozen=True)
class MeasuredPlan:
    """`ms` of a call, and stock's; `when` it was measured, as a date."""

    plan: Plan
    ms: float
    stock_ms: float
    when: str

    def __str__(self) -> str:
        if self.plan.name == STOCK:
            return f"stock torch is the fastest here, {self.stock_ms:.3g} ms a call, measured here on {self.when}"
        times = f"{self.stock_ms / self.ms:.2f} times stock ({self.ms:.3g} ms a call instead of {self.stock_ms:.3g})"
        return f"{times}, measured here on {self.when}"


def measured(model: str, device: torch.device, *, graphs: bool, call: str | None = None) -> MeasuredPlan | None:
    """What was the fastest for calls of these shapes; where none are given, for those that were measured last.

    A plan that is not faster than stock beyond doubt stands back.
    """
    found = [entry for entry in _stored(model, device, graphs=graphs) if call in (None, entry.problem.get("call"))]
    if not found:
        return None
    newest = max(found, key=lambda entry: entry.when)
    same = [entry for entry in found if entry.problem == newest.problem]
    stock = next((entry for entry in same if entry.candidate == STOCK), None)
    best = min((entry for entry in same if entry.clearly_faster), key=lambda entry: entry.median_us, default=stock)
    if best is None or best.stock_us is None:
        return None
    return MeasuredPlan(_BY_NAME[best.candidate], best.median_us / 1e3, best.stock_us / 1e3, best.when[:10])
