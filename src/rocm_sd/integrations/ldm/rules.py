"""What a rule for one of ldm's classes is, and the forward that stands in for the class's own on one module.

A rule's forward gives None where the host's own is to run: nothing has been changed by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.integrations.ldm.policy import HostPolicy

__all__ = ["BlockRule", "is_replacement", "mark_replacement"]

_REPLACEMENTS: WeakSet[Callable[..., Any]] = WeakSet()


@dataclass(frozen=True)
class BlockRule:
    """For the classes `kinds` of ldm's `file`; with `path` for the Sequential at that place of the model.

    `model`: whose block it is, "UNet" or "VAE". `op`: the one that the rule is for. `worth_it_on_cpu`: from how many
    values on it pays with ops that are stock torch; None if never. `channels_last`: with convolutions of another layout
    each use would cost copies. `slices`: the host's own forward goes on in smaller pieces where memory runs out.
    `packs`: linears are laid together where the host's policy allows it.
    """

    name: str
    summary: str
    model: str
    file: str
    kinds: tuple[str, ...]
    op: str
    why_not: Callable[[HostPolicy, Any], str | None]
    forward: Callable[..., torch.Tensor | None]
    worth_it_on_cpu: int | None = None
    channels_last: bool = True
    slices: bool = False
    packs: bool = False
    path: str | None = None

    def applies(self, policy: HostPolicy, module: nn.Module, path: str = "") -> bool:
        if self.path is not None:
            return path == self.path and type(module) is nn.Sequential
        return policy.is_of(module, self.file, *self.kinds)

    def replacement(self, policy: HostPolicy) -> Callable[..., Any]:
        """The rule's forward as a method, and the class's own wherever that has no answer or fails."""

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            answer = None
            # First of all: what is compiled is the host's own, and nothing of this is traced.
            if not torch.compiler.is_compiling() and args and policy.allows(self, self_, args[0]):
                try:
                    answer = self._answer(policy, self_, *args, **kwargs)
                except Exception as error:
                    if policy.fails(self, error):
                        raise
            # Not while an error is at hand: its frames hold the memory that may just have run out.
            return type(self_).forward(self_, *args, **kwargs) if answer is None else answer

        return mark_replacement(forward)

    def _answer(self, policy: HostPolicy, module: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return self.forward(policy, module, x, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return self.forward(policy, module, x, *args, **kwargs)


def mark_replacement(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have `is_replacement` know a function that stands in for one of the host's."""
    _REPLACEMENTS.add(forward)
    return forward


def is_replacement(forward: Any) -> bool:
    """Of a function or a bound method."""
    return getattr(forward, "__func__", forward) in _REPLACEMENTS
