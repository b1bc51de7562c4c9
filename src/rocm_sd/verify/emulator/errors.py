"""What the emulator reports. Each error names the instruction by its address, to be found in a listing."""

from __future__ import annotations

from rocm_sd.errors import RocmSdError

__all__ = [
    "BudgetExceeded",
    "Deadlock",
    "DivergentBarrier",
    "EmulationError",
    "GlobalRace",
    "LdsRace",
    "MisalignedAccess",
    "MissingWait",
    "OutOfBounds",
    "UninitialisedRead",
    "UnknownInstruction",
    "UnwrittenOutput",
]


class EmulationError(RocmSdError):
    """The kernel did something that a GPU would not do reliably, or that the emulator does not know."""

    def __init__(self, message: str, *, address: int | None = None, hint: str | None = None) -> None:
        where = "" if address is None else f" The instruction is at {address:#x}."
        super().__init__(message + where, hint=hint)
        self.address = address


class UnknownInstruction(EmulationError):
    """Nothing is ever guessed: an instruction without known semantics stops the kernel."""

    def __init__(self, name: str, address: int, reason: str = "") -> None:
        detail = f" ({reason})" if reason else ""
        super().__init__(f"The emulator does not know {name}{detail}.", address=address)
        self.name = name


class OutOfBounds(EmulationError):
    """An address that lies in no buffer."""


class MisalignedAccess(EmulationError):
    """An address that is no multiple of the element size (at most 4 bytes)."""


class UninitialisedRead(EmulationError):
    """A read of memory that nothing has written."""


class UnwrittenOutput(EmulationError):
    """A buffer that must be written was left unwritten in part."""


class MissingWait(EmulationError):
    """A register was used while the load that fills it is still outstanding."""


class LdsRace(EmulationError):
    """Two waves of a workgroup use the same LDS bytes, one of them writing, with no barrier between."""


class GlobalRace(EmulationError):
    """Two waves touch the same byte of global memory, one of them writing, and nothing orders them."""


class DivergentBarrier(EmulationError):
    """The waves of a workgroup wait at different barriers, or some ended while others wait."""


class Deadlock(EmulationError):
    """No wave can go on."""


class BudgetExceeded(EmulationError):
    """More instructions were executed than were allowed: an endless loop, or a launch too large to emulate."""
