"""Does the first picture of a new size stall?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import number, on_the_gpu
from rocm_sd.doctor.check import Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

# A VAE has a dozen convolutions that differ: at a second each, the user waits for what should be a moment. Loading a
# kernel takes tens of milliseconds and is no search.
_STALL_MS = 1000.0
_STALL_RATIO = 20.0
_MEANS = "The first picture of every new size waits for a search, up to many minutes; later ones of that size do not."
_MODE = "MIOPEN_FIND_MODE"


def judge(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    size = f"{answer['width']} x {answer['height']}"
    measured = {name: answer[name] for name in ("first_ms", "second_ms", "exceeded_s", "width", "height")}
    if answer["exceeded_s"] is not None:
        waited = number(answer, "exceeded_s")
        says = f"The first convolution at {size} had not ended after {waited:.0f} s."
        return Finding(Status.PROBLEM, says, _MEANS, _fix(facts), measured)
    first, second = number(answer, "first_ms"), number(answer, "second_ms")
    says = f"The first convolution at {size} took {first:.4g} ms, the second {second:.3g} ms."
    if first > _STALL_MS and first > _STALL_RATIO * second:
        return Finding(Status.PROBLEM, says, _MEANS, _fix(facts), measured)
    return Finding(Status.OK, says, measured=measured)


def _fix(facts: Facts) -> Fix:
    if not facts.amd:
        return Fix("Leave torch.backends.cudnn.benchmark off: on, it times every algorithm for every new size.")
    if _MODE not in facts.environment:
        # It chooses from what MIOpen ships and from its rules: nothing is computed otherwise, so it is safe.
        return Fix(
            f"Set {_MODE}=FAST: MIOpen then searches only where it knows nothing.", env={_MODE: "FAST"}, safe=True
        )
    return Fix(
        f"{_MODE}={facts.environment[_MODE]} is set and does not help. Keep to few picture sizes, each of which waits "
        "once; ROCm 7.14 and later leave out the slowest candidates. rocm-sd's own search nothing.",
        commands=("rocm-sd tune",),
    )


CHECK = Check(
    name="first_run_stall",
    question="Does the first picture of a new size stall?",
    measures="the first and the second call of a VAE convolution of a size drawn by chance",
    links=(
        "https://github.com/ROCm/TheRock/issues/2591",
        "https://github.com/ROCm/TheRock/issues/3266",
        "https://github.com/invoke-ai/InvokeAI/issues/8655",
        "https://github.com/Comfy-Org/ComfyUI/issues/10460",
        "https://github.com/multimodal-art-projection/YuE/issues/169",
    ),
    run=on_the_gpu("first_convolution", judge),
)
