"""What is measured: a model and a call of it, with its tensors in this process and without them for a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.calibration.skeleton import Skeleton, described_call, model_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["CannotBeRebuilt", "NotMeasured", "Outline", "Subject"]


class NotMeasured(Exception):
    """No plan could be measured; its text is the reason. It holds for all models that were to be measured."""


class CannotBeRebuilt(NotMeasured):
    """A reason that lies in the first of them."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and a call of it, which a picture makes so many times."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    times: int = 1

    @property
    def key(self) -> str:
        return model_key(self.model)

    @property
    def call(self) -> str:
        return described_call(self.args, self.kwargs)


@dataclass(frozen=True)
class Outline:
    """A subject without its tensors, as a worker rebuilds it, and the names that its plans are stored under."""

    key: str
    call: str
    skeleton: Skeleton
    modules: frozenset[str]  # that its classes come from

    @classmethod
    def of(cls, subject: Subject) -> Outline:
        """Raises `CannotBeRebuilt`."""
        try:
            skeleton = Skeleton.of(subject.model, subject.args, subject.kwargs)
        except Exception as error:  # what a pickle cannot take along is said in as many ways as there are classes
            raise CannotBeRebuilt(f"it cannot be rebuilt: {type(error).__name__}: {error}") from error
        modules = frozenset(type(module).__module__ for module in subject.model.modules())
        return cls(subject.key, subject.call, skeleton, modules)
