"""Instructions that steer a wave: branches, jumps, barriers, waits, and those that only concern timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.operands import scalar_bits, scalar_source, scalar_target, signed_field
from rocm_sd.verify.emulator.wave import VCC

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.wave import Group

__all__ = ["Flow", "bind_wait", "flow_of"]

# Hints to scheduler, caches and performance counters, and waits for the arithmetic units, which are never late here.
_TIMING = frozenset(
    {
        "s_nop", "s_clause", "s_delay_alu", "s_waitcnt_depctr", "s_wait_alu", "s_sendmsg", "s_setprio", "s_sleep",
        "s_set_inst_prefetch_distance", "s_icache_inv", "s_ttracedata", "s_ttracedata_imm", "s_incperflevel",
        "s_decperflevel", "s_wakeup", "s_version", "s_wait_event", "s_waitcnt_expcnt", "s_wait_expcnt",
        "s_wait_samplecnt", "s_wait_bvhcnt", "s_prefetch_inst", "s_prefetch_inst_pc_rel", "s_prefetch_data",
        "s_prefetch_data_pc_rel",
    }
)  # fmt: skip
_COUNTERS = ("vmcnt", "vscnt", "lgkmcnt", "loadcnt", "storecnt", "dscnt", "kmcnt")
_ENDINGS = frozenset({"s_endpgm", "s_endpgm_saved"})

_CONDITIONS: dict[str, Any] = {
    "s_cbranch_scc0": lambda g: ~g.scc,
    "s_cbranch_scc1": lambda g: g.scc,
    "s_cbranch_vccz": lambda g: ~g.mask(VCC).any(axis=1),
    "s_cbranch_vccnz": lambda g: g.mask(VCC).any(axis=1),
    "s_cbranch_execz": lambda g: ~g.exec.any(axis=1),
    "s_cbranch_execnz": lambda g: g.exec.any(axis=1),
}


@dataclass
class Flow:
    """`action`: branch, jump (the target is computed), end, barrier, signal or barrier_wait."""

    action: str
    kind: str
    target: int = 0
    condition: Any = None
    jump: Any = None
    touched: int = 0


def flow_of(inst: Decoded, offset: int, following: int) -> Flow | None:  # noqa: PLR0911 - one a kind
    """How control goes on after the instruction; None where it goes on to the next."""
    name = inst.name
    if name in _ENDINGS:
        return Flow("end", "branch")
    if name == "s_barrier":
        return Flow("barrier", "barrier")
    if name == "s_barrier_signal":
        if inst.fields["ssrc0"] != 193:
            raise UnknownInstruction(name, inst.address, "a barrier other than that of the workgroup")
        return Flow("signal", "barrier")
    if name == "s_barrier_wait":
        if inst.fields["simm16"] != 0xFFFF:
            raise UnknownInstruction(name, inst.address, "a barrier other than that of the workgroup")
        return Flow("barrier_wait", "barrier")
    if name == "s_branch":
        return Flow("branch", "branch", _target(inst, following))
    if name in _CONDITIONS:
        touched = scalar_bits(inst, VCC, 64) if "vcc" in name else 0
        return Flow("branch", "branch", _target(inst, following), _CONDITIONS[name], touched=touched)
    if name in ("s_setpc_b64", "s_swappc_b64", "s_getpc_b64", "s_call_b64"):
        return _jump(inst, name, offset, following)
    return None


def _target(inst: Decoded, following: int) -> int:
    return following + 4 * signed_field(inst.fields["simm16"], 16)


def _jump(inst: Decoded, name: str, offset: int, following: int) -> Flow:
    """A jump whose target is a register; addresses count from where the text is loaded."""
    base = inst.address - offset
    save, touched = (None, 0) if name == "s_setpc_b64" else scalar_target(inst, inst.fields["sdst"], 64)
    after = np.array([base + following], np.uint64)
    read, more = scalar_source(inst, inst.fields["ssrc0"], 64) if name in ("s_setpc_b64", "s_swappc_b64") else (None, 0)

    def jump(g: Group) -> int:
        target = following
        if name == "s_call_b64":
            target = _target(inst, following)
        elif read is not None:
            places = np.unique(read(g))
            if len(places) != 1:
                raise UnknownInstruction(name, inst.address, "waves that jump to different places at once")
            target = int(places[0]) - base
        if save is not None:
            save(g, after)
        return target

    return Flow("jump", "branch", jump=jump, touched=touched | more)


def _nothing(_g: Group) -> None:
    return


def bind_wait(inst: Decoded) -> Callable[[Group], None] | None:
    """Waits for memory, and timing hints; None for every other instruction."""
    name, number = inst.name, inst.get("simm16")
    if name in _TIMING:
        return _nothing
    limits = _limits(name, number, inst.family)
    if limits is None:
        return None

    def run(g: Group) -> None:
        for counter, allowed in limits:
            g.wait(counter, allowed)

    return run


def _limits(name: str, number: int, family: str) -> list[tuple[str, int]] | None:
    if name == "s_waitcnt" and family == "gfx11":
        return _tight([("vmcnt", number >> 10 & 63, 63), ("lgkmcnt", number >> 4 & 63, 63)])
    if name == "s_waitcnt" and family == "gfx94x":
        return _tight([("vmcnt", number & 15 | number >> 10 & 0x30, 63), ("lgkmcnt", number >> 8 & 15, 15)])
    if name == "s_wait_idle":
        return [(counter, 0) for counter in _COUNTERS]
    if name in ("s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt"):
        first = "loadcnt" if "load" in name else "storecnt"
        return _tight([(first, number >> 8 & 63, 63), ("dscnt", number & 63, 63)])
    single = name.removeprefix("s_waitcnt_").removeprefix("s_wait_")
    return [(single, number & 63)] if single in _COUNTERS else None


def _tight(limits: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """Fields at their largest value do not wait."""
    return [(counter, allowed) for counter, allowed, largest in limits if allowed != largest]
