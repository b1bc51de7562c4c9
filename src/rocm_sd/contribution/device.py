"""What is measured: a device, as a process of its own has seen it. The command itself opens none, nor imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocm_sd.bench.records import Machine

__all__ = ["Device"]


@dataclass(frozen=True)
class Device:
    """`name` as torch has it; memory in bytes. `implementations`: (op, implementation) of all that run on it.

    `kernels`: a hash of every kernel's source.
    """

    name: str
    machine: Machine
    free: int | None
    host_free: int | None
    dtype: str
    kernels: str
    implementations: tuple[tuple[str, str], ...]
