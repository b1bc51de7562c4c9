"""Whether a model draws random numbers, as dropout at work does: its graph would draw others, and each trial more."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DRAWS_NUMBERS", "Drawn", "is_training"]

DRAWS_NUMBERS = "it draws random numbers: dropout, perhaps"


class Drawn:
    """Whether torch's random numbers have gone on since this was made, by the model or by another thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, _states(device)

    def __bool__(self) -> bool:
        after = _states(self._device)
        return not all(torch.equal(one, other) for one, other in zip(self._before, after, strict=True))

    def undo(self) -> None:
        """What was drawn since will be drawn again, by every thread of the process: only where a model has drawn."""
        torch.set_rng_state(self._before[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._before[1], self._device)


def is_training(model: nn.Module) -> bool:
    return any(module.training for module in model.modules())


def _states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of the generators that a model on this device would draw from; both lie in the host's memory."""
    on_host = torch.get_rng_state()
    return (on_host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (on_host,)
