"""Whether a model draws random numbers, as dropout at work does: its graph would draw others, and each trial more."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Drawn", "undone"]


class Drawn:
    """`said` tells, after a run, that torch's random numbers went on since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, _states(device)

    def said(self) -> str | None:
        after = _states(self._device)
        same = all(torch.equal(one, other) for one, other in zip(self._before, after, strict=True))
        return None if same else "it draws random numbers: dropout, perhaps"


@contextmanager
def undone(device: torch.device) -> Iterator[None]:
    """What is drawn within is drawn again afterwards, as if nothing had been: of runs whose results nobody takes."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else [], device_type="cuda"):
        yield


def _states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of the generators that a model on this device would draw from; both lie in the host's memory."""
    on_host = torch.get_rng_state()
    return (on_host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (on_host,)
