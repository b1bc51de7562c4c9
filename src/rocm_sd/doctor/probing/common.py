"""What the probes share: the place they run on, random numbers, and times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.doctor.check import CannotRun
from rocm_sd.errors import DeviceUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["Place", "medians", "place", "random"]

# Drawing the numbers must not take longer than what they are for: these take 10 ms.
_DRAWN = 2**20
# Nine timings give a median; of a call that takes longer than this, three must do.
_REPEATS, _FEW_REPEATS, _LONG_MS = 9, 3, 100.0


@dataclass(frozen=True)
class Place:
    device: torch.device
    arch: arch.Arch

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def on_rocm(self) -> bool:
        return self.arch.vendor is arch.Vendor.AMD

    @property
    def half(self) -> torch.dtype:
        """What pictures are made in: float16 on a GPU; CPUs have no fast one."""
        import torch  # noqa: PLC0415 -- without torch a probe says so, and not a traceback

        return torch.float16 if self.is_gpu else torch.float32

    def synchronize(self) -> None:
        import torch  # noqa: PLC0415 -- as above

        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def to_dict(self) -> dict[str, str]:
        return {"kind": self.device.type, "vendor": self.arch.vendor.value, "arch": self.arch.name}


def place(device: str | None) -> Place:
    """The device named, or torch's current GPU, or the CPU.

    It opens the GPU, after which no forked process may: call it in the process that does the work.
    """
    try:
        import torch  # noqa: PLC0415 -- as above
    except ModuleNotFoundError as error:
        raise CannotRun(f"{error.name} is not installed") from None
    try:
        found = arch.detect(device)
    except DeviceUnavailable as error:
        raise CannotRun(str(error)) from None
    kind = device or ("cuda" if found.vendor is not arch.Vendor.NONE else "cpu")
    return Place(torch.device(kind), found)


def random(place: Place, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same ones everywhere: drawn on the CPU, and repeated where a great many are asked for."""
    import torch  # noqa: PLC0415 -- as above

    count = math.prod(shape)
    drawn = torch.randn(min(count, _DRAWN), generator=torch.Generator().manual_seed(seed))
    drawn = drawn.to(place.half if dtype is None else dtype).repeat(-(-count // _DRAWN))[:count]
    # One copy and no kernel: inputs arrive even where kernels are missing.
    return drawn.reshape(shape).to(place.device)


def medians(calls: Mapping[str, Callable[[], Any]], place: Place) -> dict[str, float]:
    """Milliseconds of each call, timed in turns after a warm-up."""
    from rocm_sd.measuring import Stopwatch, interleaved, settled  # noqa: PLC0415 -- imports torch

    stopwatch = Stopwatch(place.device)
    # A CPU's times answer no check's question.
    most = 6 if place.is_gpu else 2
    warm = [settled(call, stopwatch, least=2, most=most, budget_s=0.5)[-1] for call in calls.values()]
    repeats = _REPEATS if place.is_gpu and max(warm) <= _LONG_MS else _FEW_REPEATS
    return {name: median(taken) for name, taken in interleaved(calls, stopwatch, repeats=repeats).items()}
