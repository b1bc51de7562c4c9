"""What a host program decides about the graphs of one of its models, and a call as the host hands it over."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    import torch
    from torch import nn

    from rocm_sd.engine.capture.hoisting import PreparedCall

__all__ = ["HostCall", "Policy"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostCall:
    """One call of a model: `eager` answers it as without graphs, and may be asked more than once.

    `body` takes the arguments, and is what is captured: it is kept, and must not keep the model alive. `also`: what
    decides which kernels run, besides the arguments and torch's settings. `used`: gives the parts of the model that
    such a call runs, all inside of them included, where it does not run all of it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    eager: Callable[[], Any]
    body: Callable[..., Any]
    also: Hashable = None
    used: Callable[[nn.Module], Iterable[nn.Module]] | None = None


class Policy(ABC):
    """`name`: of the model, in sentences.

    `captures`: whether there are graphs; otherwise each call is as the first of its kind. `under_autocast`: whether
    calls within autocast are captured; `also` tells them apart then.
    """

    captures = True
    under_autocast = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def why_not(self, model: nn.Module, device: torch.device) -> str | None:
        """What in the model has to be called every time, or why there is no room for a graph, in words.

        Asked before a capture: whatever comes later makes the graph stale.
        """

    def dtype(self, model: nn.Module, call: HostCall) -> torch.dtype:  # noqa: ARG002 -- for hosts that cast weights
        """The dtype that the model computes in."""
        return next(model.parameters()).dtype

    def prepare(self, model: nn.Module, call: HostCall) -> PreparedCall | None:  # noqa: ARG002 -- for hosts that prepare
        """What the body takes in place of some arguments, which is computed outside of the graph."""
        return None

    def propagates(self, error: Exception) -> bool:  # noqa: ARG002 -- for hosts with such errors
        """Whether an error within a capture is the host's own, and must reach it."""
        return False

    def say(self, sentence: str) -> None:
        """To the user, at once; the report has it as well."""
        log.warning("%s", sentence)

    def cleared(self) -> None:  # noqa: B027 -- for hosts that keep more than graphs
        """The graphs were given up."""
