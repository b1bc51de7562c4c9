"""What the verdict of a report is made of, besides the changes: where it runs, by which plans, and what is in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocm_sd import arch, settings
from rocm_sd.engine.approximation import costs
from rocm_sd.tuning.choice import was_timed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rocm_sd.engine.approximation import Setting
    from rocm_sd.engine.installed import Approximated, Graphs, ModelPlan
    from rocm_sd.engine.levels import Decision
    from rocm_sd.engine.model_ways import ModelWay
    from rocm_sd.engine.parts import Parts
    from rocm_sd.rewrite import Change

__all__ = ["Facts", "facts_of"]


@dataclass(frozen=True)
class Facts:
    """`level`: the one in force, and what it `does` where it is memory. `why_no_graphs`: None where they are wanted, or
    where nobody would expect them. `cost`: of the quality that is in force. `fell_back`: modules that were replaced and
    run as stock does by now. `moved_to`: the device where its weights are now, if that is another one.
    `idle_gpu`: a GPU of this machine that does not draw. `timed`: the shipped data were timed on such a card.
    """

    level: str = "performance"
    does: str = ""
    plans: tuple[ModelPlan, ...] = ()
    why_no_graphs: str | None = None
    graphs: tuple[Graphs, ...] = ()
    approximated: tuple[Approximated, ...] = ()
    cost: str = ""
    fell_back: tuple[Change, ...] = ()
    moved_to: str | None = None
    idle_gpu: str | None = None
    known: bool = True
    emulated: bool = False
    timed: bool = False
    stock_ops: bool = False


def facts_of(
    decision: Decision,
    ways: Iterable[ModelWay],
    parts: Parts,
    approximated: Iterable[list[Setting]],
    *,
    graphs: bool,
) -> Facts:
    """What is known when all is installed. `graphs`: whether they are wanted."""
    here, device = arch.detect(decision.device), decision.device
    return Facts(
        level=decision.level,
        does=f"half batches, no graphs{', offload' if decision.offload else ''}" if decision.level == "memory" else "",
        plans=tuple(way.plan for way in ways if way.plan is not None),
        why_no_graphs=_why_no_graphs(decision, parts, wanted=graphs),
        cost=next(filter(None, map(costs, approximated)), ""),
        idle_gpu=_idle_gpu(device),
        known=here.known,
        emulated=arch.emulated() is not None and device.type == "cpu",
        timed=was_timed(here.name),
        stock_ops=not arch.computes_on_gpu(device) and not settings.current().implementations,
    )


def _why_no_graphs(decision: Decision, parts: Parts, *, wanted: bool) -> str | None:
    """None where they are wanted, or where nobody looks for them: on a CPU, and where a level does without."""
    if wanted or decision.device.type == "cpu" or decision.level == "memory":
        return None
    if not (parts.captured or parts.hoisted):
        return "they are left out here"
    if decision.kept is not None:
        return f"the {decision.kept} that was found moves weights"
    if settings.current().step_graph is False:
        return "ROCM_SD_STEP_GRAPH is 0"
    return f"torch has none for {decision.device.type}"


def _idle_gpu(device: torch.device) -> str | None:
    """In words, which GPU of this machine does not draw, where the CPU does."""
    if arch.computes_on_gpu(device):
        return None
    if torch.cuda.is_available():
        return "torch sees a GPU: call pipe.to('cuda') first"
    found = next((gpu.arch_name or gpu.name for gpu in arch.find_gpus()), None)
    return None if found is None else f"there is a {found}; type: rocm-sd doctor"
