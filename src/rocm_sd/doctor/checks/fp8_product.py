"""Do FP8 products run, in the format of this GPU, and rightly?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import flag, on_the_gpu, text
from rocm_sd.doctor.check import CannotRun, Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

_NAMES = {"ocp": "torch.float8_e4m3fn (OCP, up to 448)", "fnuz": "torch.float8_e4m3fnuz (FNUZ, up to 240)"}
_STORE = "Keep FP8 for storage alone: weights in FP8, products in float16."


def judge(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    tried = {name: answer[name] for name in _NAMES}
    expected = answer["expected"]
    wrong = [name for name, told in tried.items() if flag(told, "accepted") and not flag(told, "ok")]
    measured = {"expected": expected, **tried}
    if wrong:
        says = "; ".join(f"torch accepts {_NAMES[name]} here, and {text(tried[name], 'error')}" for name in wrong)
        own = f"This GPU has {_NAMES[expected]}. " if expected in _NAMES and expected not in wrong else ""
        means = "A model that was quantized for the other format gives noise, without an error."
        return Finding(Status.PROBLEM, f"{says}.", means, Fix(f"{own}Do not use the wrong one. {_STORE}"), measured)
    if expected is None:
        raise CannotRun("the FP8 format of this GPU is not known, and nothing that ran was wrong")
    if expected == "none":
        return Finding(Status.NOT_HERE, f"This GPU has no FP8 products. {_STORE}", measured=measured)
    if not flag(tried[expected], "accepted"):
        says = f"This GPU has {_NAMES[expected]}, but torch refuses: {text(tried[expected], 'error')}."
        means = "FP8 models fail, or are computed in another dtype and gain nothing."
        return Finding(Status.PROBLEM, says, means, Fix(f"Install a torch built for a later ROCm. {_STORE}"), measured)
    return Finding(Status.OK, f"Products of {_NAMES[expected]} are right.", measured=measured)


CHECK = Check(
    name="fp8_product",
    question="Do FP8 products run, in the format of this GPU, and rightly?",
    measures="torch._scaled_mm in both formats of e4m3 against float64, each in a process of its own",
    links=(
        "https://github.com/pytorch/ao/issues/4130",
        "https://github.com/ROCm/ROCm/issues/6019",
        "https://github.com/vllm-project/vllm/issues/51021",
        "https://github.com/pytorch/pytorch/issues/198194",
    ),
    run=on_the_gpu("scaled_product", judge),
)
