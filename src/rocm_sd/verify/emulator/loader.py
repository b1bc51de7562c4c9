"""From a code object, a grid and arguments to memory and initial registers, as the hardware would set them up."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.errors import InvalidOption
from rocm_sd.verify.emulator.memory import Buffer, Memory
from rocm_sd.verify.emulator.wave import ACC_BASE, EXEC, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rocm_sd.verify.code_object import CodeObject, KernelArgument

__all__ = ["first_offset", "load_arguments", "register_count", "start_group"]

# Kernels that preload arguments begin with 256 bytes for hardware that cannot; hardware that can enters after them.
_PRELOAD_SKIP = 256
# What registers hold before anything is written is not defined; a quiet NaN makes use of it visible.
_POISON = 0x7FC0DEAD


def load_arguments(
    code: CodeObject, arguments: Sequence[Any], grid: tuple[int, int, int], waves: int, *, shared: bool = False
) -> Memory:
    """Memory with every buffer and the argument segment in place, what the runtime fills in included.

    `shared`: with processes that this one forks.
    """
    wanted = [argument for argument in code.arguments if not argument.is_hidden]
    given = list(arguments)
    # Triton appends two pointers, to scratch memory that no kernel here asks for, and gives names to none.
    unnamed = all(argument.name is None for argument in wanted)
    if unnamed and len(given) == len(wanted) - 2 and all(argument.is_pointer for argument in wanted[-2:]):
        given += [None, None]
    if len(given) != len(wanted):
        raise InvalidOption(
            "arguments",
            f"{len(arguments)} values",
            [f"{len(wanted)} values"],
            hint=f"The kernel {code.name} takes {len(wanted)}: {', '.join(_describe(w) for w in wanted)}.",
        )
    buffers: list[Buffer] = []
    for value in given:
        if isinstance(value, Buffer) and not any(value is known for known in buffers):
            buffers.append(value)
    # A runtime pads the segment to 16 bytes; clang reads the last arguments in wider loads than they are.
    size = max(-(-code.kernarg_size // 16) * 16, 16)
    memory = Memory(buffers, size, shared=shared)
    raw = bytearray(size)
    for place, (argument, value) in enumerate(zip(wanted, given, strict=True)):
        raw[argument.offset : argument.offset + argument.size] = _encode(place, argument, value, memory)
    hidden = _hidden(code, grid, waves)
    for argument in code.arguments:
        if argument.kind in hidden:
            encoded = hidden[argument.kind].to_bytes(argument.size, "little")
            raw[argument.offset : argument.offset + argument.size] = encoded
    memory.write_arguments(bytes(raw))
    return memory


def _hidden(code: CodeObject, grid: tuple[int, int, int], waves: int) -> dict[str, int]:
    """What ROCm's runtime puts behind the caller's arguments (LLVM user guide, code object V5 kernel metadata).

    Workgroups are one-dimensional and whole. Pointers to services of the runtime (printf, heap) stay null.
    """
    lanes = waves * code.wave_size
    values = {f"hidden_block_count_{axis}": size for axis, size in zip("xyz", grid, strict=True)}
    values |= {"hidden_group_size_x": lanes, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    values |= {"hidden_grid_dims": 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1, "hidden_dynamic_lds_size": code.lds}
    return values


def _describe(argument: KernelArgument) -> str:
    return argument.name or ("a pointer" if argument.is_pointer else f"{argument.size} bytes")


def _encode(place: int, argument: KernelArgument, value: Any, memory: Memory) -> bytes:
    if argument.is_pointer:
        if isinstance(value, Buffer):
            return struct.pack("<Q", memory.address_of(value))
        if value is None or (isinstance(value, int) and value == 0):
            return bytes(argument.size)
        raise InvalidOption(f"argument {place}", value, ["a Buffer", "None or 0 for a null pointer"])
    if isinstance(value, (Buffer, type(None))):
        raise InvalidOption(f"argument {place}", value, [f"a number of {argument.size} bytes"])
    if isinstance(value, (float, np.floating)):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[argument.size], float(value))
    number = int(value)
    bits = 8 * argument.size
    if not -(1 << (bits - 1)) <= number < 1 << bits:
        raise InvalidOption(f"argument {place}", value, [f"a number that fits {bits} bits"])
    return (number & ((1 << bits) - 1)).to_bytes(argument.size, "little")


def first_offset(code: CodeObject) -> int:
    skip = _PRELOAD_SKIP if code.entry.kernarg_preload_length else 0
    return code.entry_offset + skip


def register_count(code: CodeObject) -> int:
    """Rows of the vector file; accumulation registers stand after all vector registers."""
    return ACC_BASE + code.agprs if code.agprs else max(code.vgprs, 1)


def start_group(
    code: CodeObject, family: str, memory: Memory, grid: tuple[int, int, int], workgroups: NDArray[np.int64], waves: int
) -> Group:
    """All waves of `workgroups` (numbers in the grid, x fastest), `waves` each, at the first instruction."""
    total, lanes = len(workgroups) * waves, code.wave_size
    v = np.full((register_count(code), total, lanes), _POISON, np.uint32)
    s = np.full((128, total), _POISON, np.uint32)
    if family != "gfx94x":
        s[124] = 0
    wave = np.tile(np.arange(waves), len(workgroups))
    numbers = np.repeat(workgroups, waves)
    ids = numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])
    _scalars(code, family, memory, s, ids, wave)
    # The three coordinates of a work item are packed, ten bits each; workgroups are one-dimensional here.
    v[0] = wave[:, None] * lanes + np.arange(lanes)
    s[EXEC] = 0xFFFFFFFF
    s[EXEC + 1] = 0xFFFFFFFF if lanes == 64 else 0
    scc = np.zeros(total, np.bool_)
    return Group(v, s, scc, _numbered(total), waves, first_offset(code))


@lru_cache(maxsize=64)
def _numbered(waves: int) -> NDArray[np.int64]:
    """One array for all batches of a size: what is known of its waves' addresses is known by identity."""
    numbers = np.arange(waves)
    numbers.flags.writeable = False
    return numbers


def _scalars(
    code: CodeObject,
    family: str,
    memory: Memory,
    s: NDArray[np.uint32],
    ids: tuple[NDArray[np.int64], ...],
    wave: NDArray[np.int64],
) -> None:
    """User registers in the order of the LLVM user guide, then those the system adds."""
    entry = code.entry
    place = 4 * entry.private_segment_buffer + 2 * entry.dispatch_ptr + 2 * entry.queue_ptr
    if entry.kernarg_segment_ptr:
        address = memory.kernarg.address
        s[place], s[place + 1] = address & 0xFFFFFFFF, address >> 32
        place += 2
    place += 2 * entry.dispatch_id + 2 * entry.flat_scratch_init + entry.private_segment_size
    if entry.kernarg_preload_length:
        start = memory.kernarg.start + 4 * entry.kernarg_preload_offset
        words = memory.data[start : start + 4 * entry.kernarg_preload_length].view(np.uint32)
        s[place : place + len(words)] = words[:, None]
    if family == "gfx12":
        # Trap registers: x in ttmp9, y and z in the halves of ttmp7, the number of the wave in bits 25 to 29 of ttmp8.
        s[108 + 9] = ids[0]
        s[108 + 7] = ids[1] | ids[2] << 16
        s[108 + 8] = wave << 25
        return
    place = entry.user_sgprs
    for present, number in zip(entry.workgroup_id, ids, strict=True):
        if present:
            s[place] = number
            place += 1
