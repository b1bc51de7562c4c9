"""LDS instructions: loads and stores at one or two addresses, and lane permutations that go through the LDS unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator import lanes
from rocm_sd.verify.emulator.access import Transfer, parse_transfer
from rocm_sd.verify.emulator.counters import bank_conflicts
from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.lds import LdsAccess
from rocm_sd.verify.emulator.vmem import extend, put, take
from rocm_sd.verify.emulator.wave import ACC_BASE, Outstanding, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.machine import Machine
    from rocm_sd.verify.emulator.wave import Group

    Array = NDArray[Any]
    Run = Callable[[Group], None]

__all__ = ["DsBinder"]

_OLD_NAMES = {
    "ds_read2st64": "ds_load_2addr_stride64",
    "ds_write2st64": "ds_store_2addr_stride64",
    "ds_read2": "ds_load_2addr",
    "ds_write2": "ds_store_2addr",
    "ds_read": "ds_load",
    "ds_write": "ds_store",
}


def _modern(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        if name.startswith(old + "_"):
            return new + name[len(old) :]
    return name


# Loops over several buffers meet a few patterns of addresses in turn.
_REMEMBERED = 8


@dataclass(eq=False)
class _Met:
    """What follows from the addresses that an instruction met."""

    waves: Array
    accesses: list[LdsAccess]
    conflicts: int


def _access(g: Group, addresses: Array, transfer: Transfer, *, stores: bool) -> LdsAccess:
    if g.full:
        parts, there = (*g.by_lane, addresses.reshape(-1)), g.workgroups
    else:
        workgroups, waves = (each.reshape(addresses.shape) for each in g.by_lane)
        parts, there = (workgroups[g.exec], waves[g.exec], addresses[g.exec]), g.workgroups[g.exec.any(axis=1)]
    return LdsAccess(*parts, transfer.element, transfer.count, stores, np.unique(there))


class DsBinder:
    """Binds the LDS instructions of one kernel."""

    def __init__(self, machine: Machine, counter: str) -> None:
        self.machine, self.counter = machine, counter

    def bind(self, inst: Decoded) -> tuple[Run, int, str]:
        name = _modern(inst.name)
        if inst.get("gds"):
            raise UnknownInstruction(inst.name, inst.address, "gds")
        if name in ("ds_swizzle_b32", "ds_bpermute_b32", "ds_permute_b32"):
            return self._permute(inst, name)
        verb, _, words = name.removeprefix("ds_").partition("_")
        if verb not in ("load", "store"):
            raise UnknownInstruction(inst.name, inst.address)
        offsets, words = self._offsets(inst, words)
        transfer = parse_transfer(words, loads=verb == "load")
        if transfer is None:
            raise UnknownInstruction(inst.name, inst.address)
        return self._load(inst, transfer, offsets) if verb == "load" else self._store(inst, transfer, offsets)

    def _offsets(self, inst: Decoded, words: str) -> tuple[list[int], str]:
        first, second = inst.fields["offset0"], inst.fields["offset1"]
        if not words.startswith("2addr_"):
            return [first | second << 8], words
        words = words.removeprefix("2addr_")
        step = 64 if words.startswith("stride64_") else 1
        words = words.removeprefix("stride64_")
        unit = step * (8 if words == "b64" else 4)
        return [first * unit, second * unit], words

    def _register(self, inst: Decoded, field: str) -> int:
        return inst.fields[field] + (ACC_BASE if inst.get("acc") else 0)

    def _meeting(
        self, number: int, offsets: list[int], transfer: Transfer, *, stores: bool
    ) -> Callable[[Group], list[LdsAccess]]:
        """The accesses of a group, one an offset; what they cost is counted."""
        totals, met = self.machine.totals, self.machine.remembered()
        dwords = max(transfer.size // 4, 1)

        def meet(g: Group) -> list[LdsAccess]:
            key = g.v[number].tobytes(), None if g.full else g.exec.tobytes()
            found = met.get(key)
            if found is None or found.waves is not g.waves:
                addresses = g.v[number].astype(np.int64)
                accesses = [_access(g, addresses + offset, transfer, stores=stores) for offset in offsets]
                conflicts = bank_conflicts(addresses - addresses[:, :1], g.exec, dwords)
                found = _Met(g.waves, accesses, conflicts)
                if len(met) >= _REMEMBERED:
                    met.clear()
                met[key] = found
            totals.lds_accesses += g.width
            totals.lds_bank_conflicts += found.conflicts
            return found.accesses

        return meet

    def _load(self, inst: Decoded, transfer: Transfer, offsets: list[int]) -> tuple[Run, int, str]:
        number, target = inst.fields["addr"], self._register(inst, "vdst")
        lds, counter = self.machine.lds, self.counter
        meet = self._meeting(number, offsets, transfer, stores=False)
        filled = 0
        for place in range(len(offsets)):
            filled |= transfer.registers(target + place * transfer.count, inst.family)

        def run(g: Group) -> None:
            accesses = meet(g)
            # Both addresses are read before the first register is written: the address register may be among them.
            found = [extend(lds.load(access, inst.address), transfer) for access in accesses]
            for place, words in enumerate(found):
                put(g, target + place * transfer.count, words, transfer)
            g.issue(counter, Outstanding(inst.name, inst.address, filled, in_order=True, lds_bytes=accesses))

        return run, filled | vgpr_bits(number), "lds_load"

    def _store(self, inst: Decoded, transfer: Transfer, offsets: list[int]) -> tuple[Run, int, str]:
        number = inst.fields["addr"]
        sources = [self._register(inst, field) for field in ("data0", "data1")[: len(offsets)]]
        lds, counter = self.machine.lds, self.counter
        meet = self._meeting(number, offsets, transfer, stores=True)
        touched = vgpr_bits(number)
        for source in sources:
            touched |= transfer.registers(source, inst.family)

        def run(g: Group) -> None:
            accesses = meet(g)
            for source, access in zip(sources, accesses, strict=True):
                lds.store(access, take(g, source, transfer), inst.address)
            g.issue(counter, Outstanding(inst.name, inst.address, 0, in_order=True, lds_bytes=accesses))

        return run, touched, "lds_store"

    def _permute(self, inst: Decoded, name: str) -> tuple[Run, int, str]:
        """These move values between lanes and touch no LDS byte; their results arrive like those of a load."""
        number, target = inst.fields["addr"], self._register(inst, "vdst")
        source = self._register(inst, "data0")
        offset = inst.fields["offset0"] | inst.fields["offset1"] << 8
        reach = None if inst.family == "gfx94x" else 32
        filled = vgpr_bits(target)
        counter = self.counter

        def permuted(g: Group) -> Array:
            if name == "ds_swizzle_b32":
                swizzled: Array = lanes.ds_swizzle(g.v[number], offset, g.exec)
                return swizzled
            move = lanes.ds_bpermute if name == "ds_bpermute_b32" else lanes.ds_permute
            moved: Array = move(g.v[number], g.v[source], g.exec, offset=offset, group=reach)
            return moved

        def run(g: Group) -> None:
            np.copyto(g.v[target], permuted(g), where=g.exec)
            g.issue(counter, Outstanding(inst.name, inst.address, filled, in_order=True))

        touched = filled | vgpr_bits(number)
        return run, touched if name == "ds_swizzle_b32" else touched | vgpr_bits(source), "lds_load"
