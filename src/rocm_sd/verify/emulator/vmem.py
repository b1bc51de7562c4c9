"""Loads, stores and atomics of vector registers: global, flat, buffer and scratch instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.access import Transfer, parse_atomic, parse_transfer
from rocm_sd.verify.emulator.counters import CACHE_LINE, cache_lines
from rocm_sd.verify.emulator.errors import OutOfBounds, UnknownInstruction
from rocm_sd.verify.emulator.lds import LdsAccess
from rocm_sd.verify.emulator.operands import scalar_source, signed_field
from rocm_sd.verify.emulator.races import lanes_of
from rocm_sd.verify.emulator.units import UNITS
from rocm_sd.verify.emulator.wave import ACC_BASE, Outstanding, sgpr_bits, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.machine import Machine
    from rocm_sd.verify.emulator.wave import Group

    Array = NDArray[Any]
    Run = Callable[[Group], None]
    Addresses = Callable[[Group], Array]
    Bound = tuple[Run, int, str, int]

__all__ = ["MemoryBinder", "extend", "put", "take"]

_COUNTERS = {
    "gfx11": {"load": "vmcnt", "store": "vscnt", "lds": "lgkmcnt", "smem": "lgkmcnt"},
    "gfx94x": {"load": "vmcnt", "store": "vmcnt", "lds": "lgkmcnt", "smem": "lgkmcnt"},
    "gfx12": {"load": "loadcnt", "store": "storecnt", "lds": "dscnt", "smem": "kmcnt"},
}
# Here a load may aim at a register that an earlier load is still filling. gfx12 counts loads in order and may write
# their registers in another (LLVM, SIInsertWaitcnts: hasVmemWriteVgprInOrder).
_WRITES_IN_ORDER = frozenset({"gfx11", "gfx94x"})


def extend(found: Array, transfer: Transfer) -> Array:
    """Loaded elements as 32-bit words."""
    if transfer.element == 4:
        return found
    if transfer.signed:
        kind = np.int8 if transfer.element == 1 else np.int16
        wide = found.view(kind).astype(np.int32).view(np.uint32)
    else:
        wide = found.astype(np.uint32)
    return wide & np.uint32(0xFFFF) if transfer.half is not None else wide


def put(g: Group, target: int, words: Array, transfer: Transfer) -> None:
    """Write loaded words, [count, active lanes], under EXEC."""
    if g.full and transfer.half is None:
        g.v[target : target + transfer.count] = words.reshape(transfer.count, g.width, g.lanes)
        return
    for place in range(transfer.count):
        register = g.v[target + place]
        value = words[place].reshape(register.shape) if g.full else words[place]
        if transfer.half is not None:
            old = register if g.full else register[g.exec]
            value = old & np.uint32(0xFFFF0000) | value if transfer.half == 0 else old & np.uint32(0xFFFF) | value << 16
        if g.full:
            register[:] = value
        else:
            register[g.exec] = value


def take(g: Group, source: int, transfer: Transfer) -> Array:
    """Register values to store, as elements: [count, active lanes]."""
    block = g.v[source : source + transfer.count]
    block = block.reshape(transfer.count, -1) if g.full else block[:, g.exec]
    if transfer.element == 4:
        return block
    if transfer.half == 1:
        block = block >> np.uint32(16)
    return block.astype(np.uint8 if transfer.element == 1 else np.uint16)


class MemoryBinder:
    """Binds the memory instructions of one kernel."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.counters = _COUNTERS[machine.family]

    def bind(self, inst: Decoded) -> Bound:
        """What it does, the registers it touches, its class, and which an earlier load may still be filling."""
        space, verb, words = (*inst.name.split("_", 2), "", "")[:3]
        if verb == "atomic" and space in ("global", "buffer"):
            return self._atomic(inst, words)
        if verb not in ("load", "store"):
            raise UnknownInstruction(inst.name, inst.address)
        transfer = parse_transfer(words, loads=verb == "load")
        if transfer is None or inst.get("lds") or inst.get("tfe") or inst.get("gds"):
            raise UnknownInstruction(inst.name, inst.address)
        if space == "scratch":
            return self._scratch(inst, verb, transfer)
        if space == "buffer":
            return self._buffer(inst, verb, transfer)
        return self._global(inst, verb, transfer)

    def _data_register(self, inst: Decoded, verb: str) -> int:
        fields = ("vdata",) if "vdata" in inst.fields else ("vdst",) if verb == "load" else ("data", "vsrc")
        number = next(inst.fields[name] for name in fields if name in inst.fields)
        return number + ACC_BASE if inst.get("acc") else number

    def _issue(self, inst: Decoded, verb: str, registers: int) -> Callable[[Group], None]:
        queues = [self.counters[verb]]
        if inst.name.startswith("flat"):
            queues.append(self.counters["lds"])
        filled = registers if verb == "load" else 0

        def issue(g: Group) -> None:
            for queue in queues:
                g.issue(queue, Outstanding(inst.name, inst.address, filled, in_order=True))

        return issue

    def _transfer(
        self,
        inst: Decoded,
        verb: str,
        transfer: Transfer,
        touched: int,
        load: Callable[[Group], Array],
        store: Callable[[Group, Array], None],
    ) -> Bound:
        """`load` gives the elements that the active lanes ask for, `store` takes them: [count, active lanes]."""
        register = self._data_register(inst, verb)
        registers = transfer.registers(register, inst.family)
        issue = self._issue(inst, verb, registers)

        def run(g: Group) -> None:
            if verb == "load":
                put(g, register, extend(load(g), transfer), transfer)
            else:
                store(g, take(g, register, transfer))
            issue(g)

        # FLAT may come from LDS as well and passes others; CDNA keeps the other half of a register, which it reads.
        plain = not inst.name.startswith("flat") and (transfer.half is None or inst.family != "gfx94x")
        refilled = registers & ~touched if verb == "load" and plain and inst.family in _WRITES_IN_ORDER else 0
        return run, touched | registers, f"vmem_{verb}", refilled

    def _global(self, inst: Decoded, verb: str, transfer: Transfer) -> Bound:
        place, touched = self._global_place(inst, transfer, verb)
        machine = self.machine

        def load(g: Group) -> Array:
            return machine.memory.load(place(g), transfer.element, transfer.count, inst.address, lanes_of(g))

        def store(g: Group, values: Array) -> None:
            machine.memory.store(place(g), values, transfer.element, inst.address, lanes_of(g))

        return self._transfer(inst, verb, transfer, touched, load, store)

    def _global_place(self, inst: Decoded, transfer: Transfer, verb: str) -> tuple[Addresses, int]:
        """Addresses of the active lanes; what they move is counted."""
        addresses, touched = self._global_addresses(inst)
        count = self._traffic(transfer, verb)

        def place(g: Group) -> Array:
            where = addresses(g)
            count(g.exec, where)
            return where.reshape(-1) if g.full else where[g.exec]

        return place, touched

    @staticmethod
    def _address_fields(inst: Decoded) -> tuple[int, int | None, int]:
        """The vector register, the scalar one or None, and the constant that make an address."""
        number = inst.fields["addr"] if "addr" in inst.fields else inst.fields["vaddr"]
        base: int | None = inst.fields["saddr"]
        if base == (127 if inst.null is None else inst.null) or inst.form in ("FLAT", "VFLAT"):
            base = None
        if inst.family == "gfx12":
            return number, base, signed_field(inst.fields["ioffset"], 24)
        offset = inst.fields["offset"]
        return number, base, offset & 0xFFF if inst.form == "FLAT" else signed_field(offset, 13)

    def _global_addresses(self, inst: Decoded) -> tuple[Addresses, int]:
        number, base, offset = self._address_fields(inst)
        constant = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if base is None:

            def vector(g: Group) -> Array:
                address: Array = g.v[number + 1].astype(np.uint64)
                address <<= np.uint64(32)
                address |= g.v[number]
                address += constant
                return address

            return vector, vgpr_bits(number, 2)
        read, touched = scalar_source(inst, base, 64)

        def scalar(g: Group) -> Array:
            address: Array = g.v[number] + (read(g)[:, None] + constant)
            return address

        return scalar, vgpr_bits(number) | touched

    def _traffic(self, transfer: Transfer, verb: str) -> Callable[[Array, Array], None]:
        totals = self.machine.totals
        size = transfer.size
        last: list[Any] = [None, None, 0]

        def count(active: Array, addresses: Array) -> None:
            # Loops repeat the same pattern further on: where only the line numbers moved, so does nothing else.
            pattern = addresses - (addresses[:1, :1] & ~np.uint64(CACHE_LINE - 1))
            same = last[0] is not None and (last[1] is active or np.array_equal(last[1], active))
            if same and np.array_equal(last[0], pattern):
                lines = last[2]
            else:
                lines = cache_lines(pattern, active, size)
                last[:] = pattern, active, lines
            asked = size * int(np.count_nonzero(active))
            if verb == "load":
                totals.bytes_loaded += asked
                totals.lines_loaded += lines
            else:
                totals.bytes_stored += asked
                totals.lines_stored += lines

        return count

    def _buffer_place(
        self, inst: Decoded, transfer: Transfer, verb: str
    ) -> tuple[Callable[[Group], tuple[Array, Array | None]], int]:
        """Addresses of active lanes, [lanes], and what the descriptor lets through.

        That is None for all of it, [lanes] where every lane is whole inside or outside, else [count, lanes].
        """
        if inst.get("idxen"):
            raise UnknownInstruction(inst.name, inst.address, "idxen")
        resource = inst.fields["rsrc"] if "rsrc" in inst.fields else 4 * inst.fields["srsrc"]
        constant = signed_field(inst.fields["ioffset"], 24) if "ioffset" in inst.fields else inst.fields["offset"]
        scalar, touched = scalar_source(inst, inst.fields["soffset"], 32)
        number = inst.fields["vaddr"] if inst.get("offen") else None
        count, element, size = self._traffic(transfer, verb), np.uint64(transfer.element), np.uint64(transfer.size)
        steps = (transfer.element * np.arange(transfer.count, dtype=np.uint64))[:, None]

        def place(g: Group) -> tuple[Array, Array | None]:
            if ((g.s[resource + 1] >> np.uint32(16)) & np.uint32(0x3FFF)).any():
                raise UnknownInstruction(inst.name, inst.address, "a buffer descriptor with a stride")
            upper = (g.s[resource + 1] & np.uint32(0xFFFF)).astype(np.uint64)
            base = g.s[resource].astype(np.uint64) | upper << np.uint64(32)
            offset = (scalar(g).astype(np.uint64) + np.uint64(constant))[:, None]
            offset = np.broadcast_to(offset, g.exec.shape) if number is None else offset + g.v[number]
            limit = g.s[resource + 2].astype(np.uint64)[:, None]
            address = base[:, None] + offset
            whole = offset + size <= limit
            if g.full and np.count_nonzero(whole) == whole.size:
                count(g.exec, address)
                return address.reshape(-1), None
            begun = whole if size == element else offset + element <= limit
            count(begun & g.exec, address)
            if whole is begun or np.array_equal(whole, begun):
                return address[g.exec], whole[g.exec]
            return address[g.exec], (offset[g.exec] + steps + element <= np.broadcast_to(limit, whole.shape)[g.exec])

        touched |= sgpr_bits(resource, 4)
        return place, touched if number is None else touched | vgpr_bits(number)

    def _buffer(self, inst: Decoded, verb: str, transfer: Transfer) -> Bound:
        """What lies beyond the descriptor reads as zero and is not written: that is how masks are compiled."""
        place, touched = self._buffer_place(inst, transfer, verb)
        machine, element, count = self.machine, transfer.element, transfer.count
        steps = (element * np.arange(count, dtype=np.uint64))[:, None]

        def load(g: Group) -> Array:
            address, inside = place(g)
            if inside is None:
                return machine.memory.load(address, element, count, inst.address, lanes_of(g))
            found = np.zeros((count, len(address)), UNITS[element])
            lanes = lanes_of(g, inside)
            if inside.ndim == 1:
                chosen = np.flatnonzero(inside)
                found[:, chosen] = machine.memory.load(address[chosen], element, count, inst.address, lanes)
            else:
                found[inside] = machine.memory.load((address + steps)[inside], element, 1, inst.address, lanes)[0]
            return found

        def store(g: Group, values: Array) -> None:
            address, inside = place(g)
            memory, lanes = machine.memory, lanes_of(g, inside)
            if inside is None:
                memory.store(address, values, element, inst.address, lanes)
            elif inside.ndim == 1:
                memory.store(address[inside], values[:, inside], element, inst.address, lanes)
            else:
                memory.store((address + steps)[inside], values[inside][None], element, inst.address, lanes)

        return self._transfer(inst, verb, transfer, touched, load, store)

    def _atomic(self, inst: Decoded, words: str) -> Bound:
        atomic = parse_atomic(words)
        if atomic is None:
            raise UnknownInstruction(inst.name, inst.address)
        returns = bool(inst.get("glc") or inst.get("sc0") or inst.get("th") & 1)
        data = self._data_register(inst, "store")
        target = self._data_register(inst, "load")
        dwords, operands = atomic.dwords, atomic.dwords * (2 if atomic.compares else 1)
        filled = vgpr_bits(target, dwords) if returns else 0
        issue = self._issue(inst, "load" if returns else "store", filled)
        machine = self.machine
        transfer = Transfer(4, dwords, signed=False, half=None)
        if inst.name.startswith("buffer"):
            place, touched = self._buffer_place(inst, transfer, "store")
        else:
            where, touched = self._global_place(inst, transfer, "store")

        def run(g: Group) -> None:
            address, inside = place(g) if inst.name.startswith("buffer") else (where(g), None)
            if inside is None:
                inside = np.ones(address.shape, np.bool_)
            chosen: Array = inside if inside.ndim == 1 else np.logical_and.reduce(inside, axis=0)
            given = g.v[data : data + operands][:, g.exec]
            before = np.zeros((dwords, len(chosen)), np.uint32)
            machine.memory.note_atomic(address[chosen], dwords, inst.address, lanes_of(g, chosen))
            before[:, chosen] = atomic.apply(machine.memory, address[chosen], given[:, chosen], inst.address)
            if returns:
                g.v[target : target + dwords][:, g.exec] = before
            issue(g)

        kind = "vmem_load" if returns else "vmem_store"
        return run, touched | vgpr_bits(data, operands) | filled, kind, 0

    def _scratch(self, inst: Decoded, verb: str, transfer: Transfer) -> Bound:
        number, base, offset = self._address_fields(inst)
        # 128 is the constant zero.
        read, touched = scalar_source(inst, 128 if base is None else base, 32)
        scratch, size, vector = self.machine.scratch, self.machine.scratch_bytes, bool(inst.get("sve"))

        def access(g: Group) -> LdsAccess:
            address = np.full(g.exec.shape, offset, np.int64)
            if vector:
                address += g.v[number].view(np.int32)
            address += read(g).view(np.int32)[:, None]
            if ((address < 0) | (address + transfer.size > size))[g.exec].any():
                raise OutOfBounds(f"A scratch access is outside of the {size} bytes of a lane.", address=inst.address)
            place = (g.waves[:, None] * g.lanes + np.arange(g.lanes))[g.exec]
            stores = verb == "store"
            return LdsAccess(place, np.zeros_like(place), address[g.exec], transfer.element, transfer.count, stores)

        def load(g: Group) -> Array:
            return scratch.load(access(g), inst.address)

        def store(g: Group, values: Array) -> None:
            scratch.store(access(g), values, inst.address)

        return self._transfer(inst, verb, transfer, touched | (vgpr_bits(number) if vector else 0), load, store)
