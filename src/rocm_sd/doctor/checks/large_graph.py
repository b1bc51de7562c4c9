"""Is a large graph still right when it is replayed with new inputs?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, flag, measured_check, number, problem, rows, text
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.doctor.facts import Facts
    from rocm_sd.doctor.probing.common import Place

__all__ = ["large_graph"]

_LIMIT_S = 18.0
# Twice as many as the fault is reported from; a UNet's graph has some hundreds.
_NODES = 400
_REPLAYS = 5
# Of some releases one process in five is reported to be wrong: three show it one time in two.
_PROCESSES = 3
_WIDTH = 1024
_SWITCH = "ROCM_SD_STEP_GRAPH"
# As for `graph_replay`: the same kernels run, launched one by one.
_FIX = Fix(
    f"Set {_SWITCH}=0: rocm-sd then captures no graphs. ROCm 7.2.0 to 7.2.3 are known for it; 7.1.1 is reported right.",
    env={_SWITCH: "0"},
    safe=True,
)


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`nodes`, `processes`: {"captured", "wrong", "replays", "error"} each."""
    plain = isolated_on(device, _without_a_graph, limit_s=_LIMIT_S)
    here = plain.required("what is to be captured does not run without a graph either")["device"]
    if here["kind"] == "cpu":
        raise CannotRun("there is no GPU, and nothing else captures graphs")
    outcomes = [isolated_on(device, _replays_of_a_chain, limit_s=_LIMIT_S) for _ in range(1 if quick else _PROCESSES)]
    answers = [
        {"captured": False, "wrong": 0, "replays": 0, "error": outcome.failed}
        if outcome.answer is None
        else {"captured": True, "wrong": outcome.answer["wrong"], "replays": _REPLAYS, "error": ""}
        for outcome in outcomes
    ]
    return {"device": here, "nodes": _NODES, "processes": answers}


def _without_a_graph(where: Place) -> dict[str, Any]:
    """Where kernels are missing, graphs are not to blame."""
    import torch  # noqa: PLC0415 -- in the process that needs it

    chain(torch.zeros(_WIDTH, device=where.device), [torch.ones(_WIDTH, device=where.device)]).cpu()
    return {}


def _replays_of_a_chain(where: Place) -> dict[str, Any]:
    """How many of the replays differ from what is known beforehand: whole numbers, which float32 adds exactly."""
    import torch  # noqa: PLC0415 -- in the process that needs it

    with torch.cuda.device(where.device):
        # Each node reads memory of its own.
        others = [torch.full((_WIDTH,), float(each % 7), device=where.device) for each in range(_NODES)]
        held = torch.zeros(_WIDTH, device=where.device)
        chain(held, others)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = chain(held, others)
        wrong = 0
        for replay in range(_REPLAYS):
            changed = torch.arange(_WIDTH, dtype=torch.float32) + 1000 * replay
            # Both are written just before the replay, with no wait between.
            held.copy_(changed.to(where.device))
            others[_NODES // 2].fill_(float(replay))
            graph.replay()
            added = sum(each % 7 for each in range(_NODES) if each != _NODES // 2) + replay
            wrong += not torch.equal(result.cpu(), changed + added)
    return {"wrong": wrong}


def chain(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """One addition after the other: a launch for each."""
    for other in others:
        x = x + other
    return x


@measured_check(
    measures="a chain of 400 launches whose result is known, captured once and replayed five times with new inputs, in "
    "three processes",
    reports="ROCm/hip#3887 ROCm/hip#3902 ROCm/clr#279",
    probe=Probe("large_graph", measure),
)
def large_graph(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    nodes, processes = int(number(answer, "nodes")), rows(answer, "processes")
    measured = {name: answer[name] for name in ("nodes", "processes")}
    failed = [text(process, "error") for process in processes if not flag(process, "captured")]
    if failed:
        says = f"A graph of {nodes} nodes could not be captured and replayed: {failed[0]}."
        return problem(says, "rocm-sd captures whole models: they fail, or run without graphs.", _FIX, measured)
    replays = sum(int(number(process, "replays")) for process in processes)
    wrong = [_count(process, "wrong") for process in processes]
    if any(wrong):
        says = f"{sum(wrong)} of {replays} replays of a graph of {nodes} nodes are wrong, in {_of(wrong)}."
        means = (
            "Pictures are wrong without an error in programs that use graphs. rocm-sd compares the first four replays "
            "with plain calls, and cuts graphs into blocks of less than 150 nodes or does without where they differ."
        )
        return problem(says, means, _FIX, measured)
    return fine(f"{replays} replays of a graph of {nodes} nodes with new inputs are right.", measured=measured)


def _count(of: Mapping[str, Any], name: str) -> int:
    value = of[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


def _of(wrong: list[int]) -> str:
    return f"{sum(count > 0 for count in wrong)} of {len(wrong)} processes"
