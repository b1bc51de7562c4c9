"""How long the first convolution of a new size takes, beside the second: the library's search, which users wait for."""

from __future__ import annotations

import random as chance
import time
from typing import Any

from rocm_sd.doctor.probing.common import Cannot, Place, place, random
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

# A search of minutes is known to be one after this long.
_LIMIT_S = 15.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`first_ms` is None where the first call had not ended after `exceeded_s` seconds.

    MIOpen remembers on disk the sizes it has searched. So the size is drawn by chance, and a second run of this probe
    meets a new one.
    """
    drawn = chance.SystemRandom()
    height, width = (drawn.randrange(37, 63) for _ in range(2))
    scale = 1 if quick else 5
    outcome = isolated(_first_and_second, device, height * scale, width * scale, limit_s=_LIMIT_S)
    size = {"height": height * scale, "width": width * scale, "channels": 128}
    if outcome.answer is not None:
        return {**outcome.answer, **size, "exceeded_s": None}
    if outcome.exceeded:
        # What the device is, its process could not tell any more; no other than a GPU's library searches.
        return {"device": None, "first_ms": None, "second_ms": None, **size, "exceeded_s": _LIMIT_S}
    raise Cannot(f"the convolution failed: {outcome.failed}")


def _first_and_second(device: str | None, height: int, width: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    if not where.is_gpu:
        height, width = height // 4, width // 4
    kernel = random(where, 128, 128, 3, 3)
    with torch.no_grad():
        # Loading the library takes a second on its own, and is no search: a 1 x 1 convolution does that beforehand.
        _timed(where, random(where, 1, 16, 8, 8), random(where, 16, 16, 1, 1))
        picture = random(where, 1, 128, height, width)
        first, second = _timed(where, picture, kernel), _timed(where, picture, kernel)
    return {"device": where.told(), "first_ms": first, "second_ms": second}


def _timed(where: Place, picture: Any, kernel: Any) -> float:
    import torch  # noqa: PLC0415 -- as above

    if where.is_gpu:
        torch.cuda.synchronize(where.device)
    started = time.perf_counter()
    torch.nn.functional.conv2d(picture, kernel, padding=kernel.shape[-1] // 2)
    if where.is_gpu:
        torch.cuda.synchronize(where.device)
    return (time.perf_counter() - started) * 1e3
