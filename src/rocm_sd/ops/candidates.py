"""An op, and all that can compute it: its own implementations and those of plug-ins, each with its configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocm_sd.errors import InvalidOption
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.ops import plugins
from rocm_sd.tuning import lookup
from rocm_sd.tuning.environment import kernel_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import Family, Implementation, Tuning, Verification
    from rocm_sd.tuning import Choice, Problem

__all__ = ["OpCandidates"]


@dataclass(frozen=True)
class OpCandidates:
    """`implementations` are the op's own, stock torch first.

    `derived` has the arguments that follow from others, by name, and how: a caller may keep them, and at random they
    would be wrong. `composed`: its stock implementation calls other ops, which are to be tuned before it.
    `instead_of_stock(problem, device)` names the op's own that are to be tried in place of stock, where data or nothing
    at all would choose it though it takes memory without a bound there; most ops have no such problem.
    """

    name: str
    summary: str
    implementations: tuple[Implementation, ...]
    verification: Verification | None = None
    tuning: Tuning | None = None
    family: Family | None = None
    derived: Mapping[str, Callable[..., torch.Tensor]] = field(default_factory=dict)
    composed: bool = False
    instead_of_stock: Callable[[Problem, torch.device], tuple[str, ...]] | None = None
    own: Mapping[str, Implementation] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", {each.name: each for each in self.implementations})

    def implementation(self, name: str) -> Implementation:
        """By name, a plug-in's among them: other packages are looked for where none of the op's own is meant."""
        if name in self.own:
            return self.own[name]
        plug_in = plugins.find(self.name, name)
        if plug_in is None:
            raise InvalidOption(
                f"{self.name} implementation", name, [*self.own, *(each.name for each in plugins.of_op(self.name))]
            )
        return plug_in.implementation

    def has(self, name: str) -> bool:
        """Whether it is one of the op's own, and not a plug-in's."""
        return name in self.own

    @property
    def defaults(self) -> dict[str, Config]:
        """What the op's own implementations run with where nothing was tuned."""
        return {each.name: each.default for each in self.implementations}

    def lookup(self, architecture: str, problem: Problem) -> Choice:
        """What the shipped data name there."""
        return lookup(self.name, architecture, problem, self.defaults)

    def config_of(self, name: str, choice: Choice) -> Config:
        """What one of the op's own runs with where `choice` was made: its default where that has none for it."""
        return choice.config_for(name) or self.own[name].default

    def config_at(self, name: str, choice: Choice, problem: Problem, device: torch.device) -> Config:
        """`config_of`; a plug-in that was not chosen runs with the first of its configs."""
        if self.has(name):
            return self.config_of(name, choice)
        if choice.implementation == name:
            return choice.config
        plug_in = plugins.find(self.name, name)
        return (plug_in.first_config(problem, device) if plug_in is not None else None) or NO_CONFIG

    def kernel_hashes(self) -> tuple[str, ...]:
        """Of all kernels that the op has, whoever runs them."""
        own = (each.name for each in self.implementations if each.kernels is not None)
        return (self.kernel_hash(), *(self.kernel_hash(name) for name in own))

    def kernel_hash(self, implementation: str | None = None) -> str:
        """Of the source that it depends on: of its own kernels, of the op's, or nothing for what has none of them.

        Of a plug-in it is the version that its package gives.
        """
        if implementation is not None and not self.has(implementation):
            plug_in = plugins.find(self.name, implementation)
            return "" if plug_in is None else plug_in.version
        kernels = None if implementation is None else self.own[implementation].kernels
        if kernels is not None:
            return kernel_hash(kernels.module)
        known = self.verification
        if known is None or not known.kernels or implementation not in {None, *known.proven}:
            return ""
        return kernel_hash(known.kernels)
