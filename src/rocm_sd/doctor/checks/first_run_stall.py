"""Does the first picture of a new size stall?"""

from __future__ import annotations

import random as chance
import time
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, measured_check, number, problem
from rocm_sd.doctor.probing.common import Place, random
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["first_run_stall"]

# A search of minutes is known to be one after this long.
_LIMIT_S = 15.0
# A VAE has a dozen convolutions that differ: at a second each, the user waits for what should be a moment. Loading a
# kernel takes tens of milliseconds and is no search.
_STALL_MS = 1000.0
_STALL_RATIO = 20.0
_MEANS = "The first picture of every new size waits for a search, up to many minutes; later ones of that size do not."
_MODE = "MIOPEN_FIND_MODE"


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """The library's search, for which users wait: `first_ms` is None where it had not ended after `exceeded_s` seconds.

    MIOpen remembers on disk the sizes it has searched. So the size is drawn by chance, and a second run of this probe
    meets a new one.
    """
    drawn = chance.SystemRandom()
    height, width = (drawn.randrange(37, 63) for _ in range(2))
    scale = 1 if quick else 5
    outcome = isolated_on(device, _first_and_second, height * scale, width * scale, limit_s=_LIMIT_S)
    size = {"height": height * scale, "width": width * scale, "channels": 128}
    if outcome.answer is not None:
        return {**outcome.answer, **size, "exceeded_s": None}
    if outcome.exceeded:
        # What the device is, its process had no time to say; no other than a GPU's library searches.
        return {"device": None, "first_ms": None, "second_ms": None, **size, "exceeded_s": _LIMIT_S}
    raise CannotRun(f"the convolution failed: {outcome.failed}")


def _first_and_second(where: Place, height: int, width: int) -> dict[str, Any]:
    if not where.is_gpu:
        height, width = height // 4, width // 4
    kernel = random(where, 128, 128, 3, 3)
    # Loading the library takes a second on its own, and is no search: a 1 x 1 convolution does that beforehand.
    _timed(where, random(where, 1, 16, 8, 8), random(where, 16, 16, 1, 1))
    picture = random(where, 1, 128, height, width)
    first, second = _timed(where, picture, kernel), _timed(where, picture, kernel)
    return {"first_ms": first, "second_ms": second}


def _timed(where: Place, picture: Any, kernel: Any) -> float:
    from torch.nn import functional  # noqa: PLC0415 -- in the process that needs it

    where.synchronize()
    started = time.perf_counter()
    functional.conv2d(picture, kernel, padding=kernel.shape[-1] // 2)
    where.synchronize()
    return (time.perf_counter() - started) * 1e3


@measured_check(
    measures="the first and the second call of a VAE convolution of a size drawn by chance",
    reports="ROCm/TheRock#2591 ROCm/TheRock#3266 invoke-ai/InvokeAI#8655 Comfy-Org/ComfyUI#10460 "
    "multimodal-art-projection/YuE#169",
    probe=Probe("first_convolution", measure),
)
def first_run_stall(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    size = f"{answer['width']} x {answer['height']}"
    measured = {name: answer[name] for name in ("first_ms", "second_ms", "exceeded_s", "width", "height")}
    if answer["exceeded_s"] is not None:
        waited = number(answer, "exceeded_s")
        says = f"The first convolution at {size} had not ended after {waited:.0f} s."
        return problem(says, _MEANS, _fix(facts), measured)
    first, second = number(answer, "first_ms"), number(answer, "second_ms")
    says = f"The first convolution at {size} took {first:.4g} ms, the second {second:.3g} ms."
    if first > _STALL_MS and first > _STALL_RATIO * second:
        return problem(says, _MEANS, _fix(facts), measured)
    return fine(says, measured=measured)


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
        "once; ROCm 7.14 and later leave out the slowest candidates. The kernels of rocm-sd need no search.",
        commands=("rocm-sd tune",),
    )
