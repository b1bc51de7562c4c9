"""How long the card itself is busy with a picture: what an optimisation saves it, whatever the host needs to launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.bench.profiling.capture import Recording
from rocm_sd.bench.profiling.trace import read, union

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["busy_ms", "card_ms"]


def card_ms(draw: Callable[[], object]) -> float | None:
    """Milliseconds in which the device worked on one call of `draw`, recorded by torch.profiler; None without a device.

    The call should be warm: what it compiles or captures counts too.
    """
    with Recording(host=False) as recording:
        draw()
    return None if recording.trace is None else busy_ms(recording.trace)


def busy_ms(trace: Mapping[str, Any]) -> float | None:
    """The time in which at least one kernel, copy or fill was under way; what runs beside another counts once.

    None, and not 0, where the trace has nothing of a device: then it was not measured.
    """
    kernels = read(trace).kernels
    return union((kernel.start, kernel.end) for kernel in kernels) / 1e3 if kernels else None
