"""What a kernel is launched with besides its arguments: frozen dataclasses of whole numbers, such as a tile's sizes.

A module of Triton kernels imports Triton, which is not everywhere: its config stands in `kernels/configs`, a file for
each op. A launcher of HIP kernels imports nothing of that kind and keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["NO_CONFIG", "Config", "OpenConfig"]


@dataclass(frozen=True)
class Config:
    """Without fields it is the config of what has nothing to configure, and is false."""

    @classmethod
    def fitting(cls, values: Mapping[str, Any]) -> Self | None:
        """From a data file or a database; None where the names are not those of the fields, or a value is no int."""
        if values.keys() != {each.name for each in fields(cls)}:
            return None
        return cls(**values) if all(isinstance(value, int) for value in values.values()) else None

    def to_dict(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __bool__(self) -> bool:
        return bool(fields(self))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_dict().items())


NO_CONFIG = Config()


@dataclass(frozen=True)
class OpenConfig(Config):
    """Whatever names there are: of a plug-in that declares no class for its configs, or as a data file has them."""

    values: tuple[tuple[str, int], ...] = ()

    @classmethod
    def fitting(cls, values: Mapping[str, Any]) -> Self:
        return cls(tuple(sorted(values.items())))

    def to_dict(self) -> dict[str, int]:
        return dict(self.values)

    def __bool__(self) -> bool:
        return bool(self.values)
