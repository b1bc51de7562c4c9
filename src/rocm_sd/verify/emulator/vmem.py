"""Loads and stores of vector registers: global, flat, buffer and scratch instructions, and LDS instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator.access import Transfer, parse_transfer
from rocm_sd.verify.emulator.atomics import parse_atomic
from rocm_sd.verify.emulator.counters import CACHE_LINE, bank_conflicts, cache_lines
from rocm_sd.verify.emulator.errors import OutOfBounds, UnknownInstruction
from rocm_sd.verify.emulator.lds import Access
from rocm_sd.verify.emulator.operands import null_code, scalar_bits, scalar_reader
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

__all__ = ["MemoryBinder", "signed_field"]

_COUNTERS = {
    "gfx11": {"load": "vmcnt", "store": "vscnt", "lds": "lgkmcnt", "smem": "lgkmcnt"},
    "gfx94x": {"load": "vmcnt", "store": "vmcnt", "lds": "lgkmcnt", "smem": "lgkmcnt"},
    "gfx12": {"load": "loadcnt", "store": "storecnt", "lds": "dscnt", "smem": "kmcnt"},
}


def signed_field(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


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
    """Write loaded words, [count, W, L] or [count, active lanes], under EXEC."""
    for place in range(transfer.count):
        register = g.v[target + place]
        value = words[place]
        if transfer.half is not None:
            old = register if g.full else register[g.exec]
            value = old & np.uint32(0xFFFF0000) | value if transfer.half == 0 else old & np.uint32(0xFFFF) | value << 16
        if g.full:
            register[:] = value
        else:
            register[g.exec] = value


def take(g: Group, source: int, transfer: Transfer) -> Array:
    """Register values to store, as elements: [count, W, L] or [count, active lanes]."""
    block = g.v[source : source + transfer.count]
    block = block if g.full else block[:, g.exec]
    if transfer.element == 4:
        return block
    if transfer.half == 1:
        block = block >> np.uint32(16)
    return block.astype(np.uint8 if transfer.element == 1 else np.uint16)


class MemoryBinder:
    """Binds the memory instructions of one launch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.family = machine.family
        self.null = null_code(machine.family)
        self.counters = _COUNTERS[machine.family]

    def bind(self, inst: Decoded) -> tuple[Run, int, str]:
        """What it does, the registers it touches, and its class."""
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

    def _registers(self, register: int, transfer: Transfer) -> int:
        half = transfer.half if self.family != "gfx94x" else None
        return vgpr_bits(register, transfer.count, half)

    def _issue(self, inst: Decoded, verb: str, registers: int) -> Callable[[Group], None]:
        queues = [self.counters[verb]]
        if inst.name.startswith("flat"):
            queues.append(self.counters["lds"])
        filled = registers if verb == "load" else 0

        def issue(g: Group) -> None:
            for queue in queues:
                g.issue(queue, Outstanding(inst.name, inst.address, filled, in_order=True))

        return issue

    def _global(self, inst: Decoded, verb: str, transfer: Transfer) -> tuple[Run, int, str]:
        addresses, touched = self._global_addresses(inst)
        register = self._data_register(inst, verb)
        registers = self._registers(register, transfer)
        issue = self._issue(inst, verb, registers)
        memory, count = self.machine.memory, self._traffic(transfer, verb)

        def load(g: Group) -> None:
            where = addresses(g)
            count(g.exec, where)
            found = memory.load(where if g.full else where[g.exec], transfer.element, transfer.count, inst.address)
            put(g, register, extend(found, transfer), transfer)
            issue(g)

        def store(g: Group) -> None:
            where = addresses(g)
            count(g.exec, where)
            active = where if g.full else where[g.exec]
            memory.store(active, take(g, register, transfer), transfer.element, inst.address)
            issue(g)

        return (load if verb == "load" else store), touched | registers, f"vmem_{verb}"

    def _global_addresses(self, inst: Decoded) -> tuple[Addresses, int]:
        number = inst.fields["addr"] if "addr" in inst.fields else inst.fields["vaddr"]
        base = inst.fields["saddr"]
        off = base == (127 if self.null is None else self.null)
        if self.family == "gfx12":
            offset = signed_field(inst.fields["ioffset"], 24)
        elif inst.form == "FLAT":
            offset = inst.fields["offset"] & 0xFFF
        else:
            offset = signed_field(inst.fields["offset"], 13)
        constant = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if off or inst.form in ("FLAT", "VFLAT"):

            def vector(g: Group) -> Array:
                address: Array = g.v[number + 1].astype(np.uint64)
                address <<= np.uint64(32)
                address |= g.v[number]
                address += constant
                return address

            return vector, vgpr_bits(number, 2)
        read = scalar_reader(base, 64, inst, self.family)

        def scalar(g: Group) -> Array:
            address: Array = g.v[number] + (read(g)[:, None] + constant)
            return address

        return scalar, vgpr_bits(number) | sgpr_bits(base, 2)

    def _traffic(self, transfer: Transfer, verb: str) -> Callable[[Array, Array], None]:
        totals = self.machine.counters
        size = transfer.size
        last: list[Any] = [None, None, 0]

        def count(active: Array, addresses: Array) -> None:
            # Loops repeat the same pattern further on: where only the line numbers moved, so does nothing else.
            pattern = addresses - (addresses[:1, :1] & ~np.uint64(CACHE_LINE - 1))
            if last[0] is not None and last[1] is active and np.array_equal(last[0], pattern):
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
    ) -> tuple[Callable[[Group], tuple[Array, Array]], int]:
        """Addresses of the elements of active lanes, and which the descriptor lets through: both [count, lanes]."""
        if inst.get("idxen"):
            raise UnknownInstruction(inst.name, inst.address, "idxen")
        resource = inst.fields["rsrc"] if "rsrc" in inst.fields else 4 * inst.fields["srsrc"]
        constant = signed_field(inst.fields["ioffset"], 24) if "ioffset" in inst.fields else inst.fields["offset"]
        scalar = scalar_reader(inst.fields["soffset"], 32, inst, self.family)
        number = inst.fields["vaddr"] if inst.get("offen") else None
        count, element = self._traffic(transfer, verb), np.uint64(transfer.element)
        steps = (transfer.element * np.arange(transfer.count, dtype=np.uint64))[:, None]

        def place(g: Group) -> tuple[Array, Array]:
            if ((g.s[resource + 1] >> np.uint32(16)) & np.uint32(0x3FFF)).any():
                raise UnknownInstruction(inst.name, inst.address, "a buffer descriptor with a stride")
            upper = (g.s[resource + 1] & np.uint32(0xFFFF)).astype(np.uint64)
            base = g.s[resource].astype(np.uint64) | upper << np.uint64(32)
            offset = np.broadcast_to((scalar(g).astype(np.uint64) + np.uint64(constant))[:, None], g.exec.shape)
            if number is not None:
                offset = offset + g.v[number]
            limit = np.broadcast_to(g.s[resource + 2].astype(np.uint64)[:, None], g.exec.shape)
            address = base[:, None] + offset
            inside = offset[g.exec] + steps + element <= limit[g.exec]
            allowed = np.zeros(g.exec.shape, np.bool_)
            allowed[g.exec] = inside.any(axis=0)
            count(allowed, address)
            return address[g.exec] + steps, inside

        touched = sgpr_bits(resource, 4) | scalar_bits(inst.fields["soffset"], 32, self.family)
        return place, touched if number is None else touched | vgpr_bits(number)

    def _buffer(self, inst: Decoded, verb: str, transfer: Transfer) -> tuple[Run, int, str]:
        """What lies beyond the descriptor reads as zero and is not written: that is how masks are compiled."""
        place, touched = self._buffer_place(inst, transfer, verb)
        register = self._data_register(inst, verb)
        registers = self._registers(register, transfer)
        issue = self._issue(inst, verb, registers)
        memory, element = self.machine.memory, transfer.element

        def load(g: Group) -> None:
            address, inside = place(g)
            found = np.zeros(inside.shape, np.uint8 if element == 1 else np.uint16 if element == 2 else np.uint32)
            found[inside] = memory.load(address[inside], element, 1, inst.address)[0]
            words = extend(found, transfer)
            put(g, register, words.reshape(transfer.count, g.width, g.lanes) if g.full else words, transfer)
            issue(g)

        def store(g: Group) -> None:
            address, inside = place(g)
            values = take(g, register, transfer).reshape(inside.shape)
            memory.store(address[inside], values[inside][None], element, inst.address)
            issue(g)

        return (load if verb == "load" else store), touched | registers, f"vmem_{verb}"

    def _atomic(self, inst: Decoded, words: str) -> tuple[Run, int, str]:
        atomic = parse_atomic(words)
        if atomic is None:
            raise UnknownInstruction(inst.name, inst.address)
        returns = bool(inst.get("glc") or inst.get("sc0") or inst.get("th") & 1)
        data = self._data_register(inst, "store")
        target = self._data_register(inst, "load")
        dwords, operands = atomic.dwords, atomic.dwords * (2 if atomic.compares else 1)
        filled = vgpr_bits(target, dwords) if returns else 0
        issue = self._issue(inst, "load" if returns else "store", filled)
        memory = self.machine.memory
        transfer = Transfer(4, dwords, signed=False, half=None)
        if inst.name.startswith("buffer"):
            place, touched = self._buffer_place(inst, transfer, "store")
        else:
            place, touched = self._global_place(inst, transfer)

        def run(g: Group) -> None:
            address, inside = place(g)
            chosen: Array = np.atleast_1d(inside.all(axis=0))
            given = g.v[data : data + operands][:, g.exec]
            before = np.zeros((dwords, len(chosen)), np.uint32)
            before[:, chosen] = atomic.apply(memory, address[0][chosen], given[:, chosen], inst.address)
            if returns:
                g.v[target : target + dwords][:, g.exec] = before
            issue(g)

        kind = "vmem_load" if returns else "vmem_store"
        return run, touched | vgpr_bits(data, operands) | filled, kind

    def _global_place(self, inst: Decoded, transfer: Transfer) -> tuple[Callable[[Group], tuple[Array, Array]], int]:
        addresses, touched = self._global_addresses(inst)
        count = self._traffic(transfer, "store")

        def place(g: Group) -> tuple[Array, Array]:
            where = addresses(g)
            count(g.exec, where)
            active = where[g.exec][None]
            return active, np.ones(active.shape, np.bool_)

        return place, touched

    def _scratch(self, inst: Decoded, verb: str, transfer: Transfer) -> tuple[Run, int, str]:
        bits = 24 if self.family == "gfx12" else 13
        offset = signed_field(inst.fields["ioffset" if self.family == "gfx12" else "offset"], bits)
        number = inst.fields["addr"] if "addr" in inst.fields else inst.fields["vaddr"]
        base = inst.fields["saddr"]
        fixed = base == (127 if self.null is None else self.null)
        read = None if fixed else scalar_reader(base, 32, inst, self.family)
        register = self._data_register(inst, verb)
        registers = self._registers(register, transfer)
        issue = self._issue(inst, verb, registers)
        scratch, size, vector = self.machine.scratch, self.machine.scratch_bytes, bool(inst.get("sve"))

        def access(g: Group) -> Access:
            address = np.full(g.exec.shape, offset, np.int64)
            if vector:
                address += g.v[number].view(np.int32)
            if read is not None:
                address += read(g).view(np.int32)[:, None]
            if ((address < 0) | (address + transfer.size > size))[g.exec].any():
                raise OutOfBounds(f"A scratch access is outside of the {size} bytes of a lane.", address=inst.address)
            place = (g.waves[:, None] * g.lanes + np.arange(g.lanes))[g.exec]
            return Access(
                place, np.zeros_like(place), address[g.exec], transfer.element, transfer.count, verb == "store"
            )

        def load(g: Group) -> None:
            words = extend(scratch.load(access(g), inst.address), transfer)
            put(g, register, words.reshape(transfer.count, g.width, g.lanes) if g.full else words, transfer)
            issue(g)

        def store(g: Group) -> None:
            values = take(g, register, transfer)
            scratch.store(access(g), values.reshape(transfer.count, -1), inst.address)
            issue(g)

        touched = registers | (vgpr_bits(number) if vector else 0)
        touched |= 0 if read is None else sgpr_bits(base)
        return (load if verb == "load" else store), touched, f"vmem_{verb}"


def conflicts_counter(totals: Any, dwords: int) -> Callable[[Group, Array], None]:
    last: list[Any] = [None, None, 0]

    def count(g: Group, addresses: Array) -> None:
        # A pattern that moves as a whole meets the same conflicts: banks only rotate.
        pattern = addresses - addresses[:, :1]
        if not (last[0] is not None and last[1] is g.exec and np.array_equal(last[0], pattern)):
            last[:] = pattern, g.exec, bank_conflicts(pattern, g.exec, dwords)
        totals.lds_accesses += g.width
        totals.lds_bank_conflicts += last[2]

    return count
