"""Does a replayed graph compute what the plain calls compute?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import flag, on_the_gpu, rows, text
from rocm_sd.doctor.check import Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

_SWITCH = "ROCM_SD_STEP_GRAPH"
# Without graphs the same kernels run, launched one by one: safe.
_FIX = Fix(f"Set {_SWITCH}=0: rocm-sd then captures no graphs.", env={_SWITCH: "0"}, safe=True)


def judge(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    measured = {name: answer[name] for name in ("captured", "replays", "error")}
    if not flag(answer, "captured"):
        says = f"A graph of one block could not be captured and replayed: {text(answer, 'error')}."
        means = "Programs that use graphs, torch.compile in its reduce-overhead mode among them, fail or crash."
        return Finding(Status.PROBLEM, says, means, _FIX, measured)
    replays = rows(answer, "replays")
    wrong = [row for row in replays if not flag(row, "ok")]
    if wrong:
        error = wrong[0]["largest_error"]
        told = "it is not a number" if error is None else f"error {error:.3g}, allowed {wrong[0]['allowed']:.3g}"
        says = f"{len(wrong)} of {len(replays)} replays with new inputs are wrong: {told}."
        return Finding(
            Status.PROBLEM, says, "Pictures are wrong without an error where graphs are used.", _FIX, measured
        )
    return Finding(Status.OK, f"{len(replays)} replays with new inputs are right.", measured=measured)


CHECK = Check(
    name="graph_replay",
    question="Does a replayed graph compute what the plain calls compute?",
    measures="a norm, a convolution, a linear layer and attention, captured once and replayed twice with new inputs",
    links=(
        "https://github.com/pytorch/pytorch/issues/155684",
        "https://github.com/pytorch/pytorch/issues/185074",
        "https://github.com/pytorch/pytorch/issues/155720",
    ),
    run=on_the_gpu("graph_capture", judge),
)
