"""Moving data between lanes: DPP, permutes, swizzles, broadcasts. Pure functions on uint32 [W, L] arrays.

Those that can leave a lane without a value return two arrays: the values and the lanes that may be written. At the end
stand the vector instructions that do nothing else, and moves between register files: operands around these functions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.operands import VGPR, scalar_source, scalar_target
from rocm_sd.verify.emulator.wave import vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.vector_types import Array
    from rocm_sd.verify.emulator.wave import Group

    Run = Callable[[Group], None]

__all__ = [
    "bind_lane_operation",
    "dpp",
    "dpp8",
    "ds_bpermute",
    "ds_permute",
    "ds_swizzle",
    "permlane16",
    "permlane16_var",
    "permlane64",
    "permlane_swap",
    "read_first_lane",
    "read_lane",
    "write_lane",
]

_INVALID = -1


def _dpp_source_lane(control: int, lane: int, lanes: int) -> int:  # noqa: C901, PLR0911, PLR0912 - one case per control
    """Lane that `lane` reads under the 9-bit DPP_CTRL, or -1 where the control points outside its row or wave."""
    row, place = lane & ~15, lane & 15
    amount = control & 15
    if control <= 0xFF:
        return (lane & ~3) | (control >> (2 * (lane & 3))) & 3
    if 0x101 <= control <= 0x10F:
        return lane + amount if place + amount < 16 else _INVALID
    if 0x111 <= control <= 0x11F:
        return lane - amount if place >= amount else _INVALID
    if 0x121 <= control <= 0x12F:
        return row | (place - amount) & 15
    if control == 0x130:
        return lane + 1 if lane + 1 < lanes else _INVALID
    if control == 0x134:
        return (lane + 1) % lanes
    if control == 0x138:
        return lane - 1
    if control == 0x13C:
        return (lane - 1) % lanes
    if control == 0x140:
        return row | 15 - place
    if control == 0x141:
        return (lane & ~7) | 7 - (lane & 7)
    if control == 0x142:
        return row - 1
    if control == 0x143:
        return (lane & ~31) - 1
    if 0x150 <= control <= 0x15F:
        return row | amount
    if 0x160 <= control <= 0x16F:
        return lane ^ amount
    raise ValueError(f"DPP control {control:#x} names no lane pattern.")


@lru_cache(maxsize=1024)
def _dpp_pattern(control: int, lanes: int) -> tuple[Array, Array, bool]:
    source = np.array([_dpp_source_lane(control, lane, lanes) for lane in range(lanes)])
    inside = source >= 0
    return np.maximum(source, 0), inside, bool(inside.all())


@lru_cache(maxsize=256)
def _dpp_write_mask(row_mask: int, bank_mask: int, lanes: int) -> Array:
    lane = np.arange(lanes)
    rows = (row_mask >> (lane >> 4)) & 1
    banks = (bank_mask >> ((lane >> 2) & 3)) & 1
    return (rows & banks).astype(bool)


def _fetched(
    values: Array, active: Array, inside: Array | None, bound_control: bool, fetch_inactive: bool
) -> tuple[Array, Array]:
    """`values` of the lanes that were read, and where one came: an inactive or outside lane gives 0 if bound_control,
    else none.
    """
    found = np.ones(values.shape, dtype=bool) if fetch_inactive else active
    if inside is not None:
        found = found & inside
    if bound_control and np.count_nonzero(found) == found.size:
        return values, found
    if bound_control:
        return np.where(found, values, np.uint32(0)), np.ones(values.shape, dtype=bool)
    return values, found


def dpp(
    source: Array,
    control: int,
    active: Array,
    *,
    row_mask: int = 0xF,
    bank_mask: int = 0xF,
    bound_control: bool = False,
    fetch_inactive: bool = False,
) -> tuple[Array, Array]:
    """Source 0 after data-parallel permutation, and the lanes whose result may be written (to be and-ed with exec).

    `control` is the encoded 9-bit field, `active` the exec mask as bool [W, L], `bound_control` and `fetch_inactive`
    the encoded BC and FI bits. gfx9 has no FI and reads as if it were 0.
    """
    lanes = source.shape[-1]
    lane, inside, whole = _dpp_pattern(control, lanes)
    values, found = _fetched(
        source.take(lane, axis=-1),
        active.take(lane, axis=-1),
        None if whole else inside,
        bound_control,
        fetch_inactive,
    )
    if row_mask != 0xF or bank_mask != 0xF:
        found = found & _dpp_write_mask(row_mask, bank_mask, lanes)
    return values, found


def dpp8(source: Array, selects: int, active: Array, *, fetch_inactive: bool = False) -> tuple[Array, Array]:
    """Any permutation within groups of eight lanes: 3 bits a lane, lane 0 lowest. An inactive source reads as 0."""
    lane = np.arange(source.shape[-1])
    chosen = (lane & ~7) | (selects >> (3 * (lane & 7))) & 7
    return _fetched(source[..., chosen], active[..., chosen], None, bound_control=True, fetch_inactive=fetch_inactive)


def permlane16(
    source: Array,
    select_low: Array,
    select_high: Array,
    active: Array,
    *,
    cross: bool = False,
    bound_control: bool = False,
    fetch_inactive: bool = False,
) -> tuple[Array, Array]:
    """v_permlane16_b32, and v_permlanex16_b32 with `cross`: 4 bits a lane from two scalars [W, 1] pick within a row.

    op_sel[0] is fetch_inactive and op_sel[1] bound_control.
    """
    low, high = select_low.flat[0], select_high.flat[0]
    if not (np.count_nonzero(select_low != low) or np.count_nonzero(select_high != high)):
        chosen = _row_pattern(int(low), int(high), cross, source.shape[-1])
        found = active.take(chosen, axis=-1)
        return _fetched(source.take(chosen, axis=-1), found, None, bound_control, fetch_inactive)
    lane = np.arange(source.shape[-1], dtype=np.uint32)
    select = np.where((lane & 8) == 0, select_low, select_high)
    place = (select >> (4 * (lane & 7)).astype(np.uint32)) & np.uint32(15)
    return _permute_in_rows(source, place, active, cross, bound_control, fetch_inactive)


@lru_cache(maxsize=256)
def _row_pattern(low: int, high: int, cross: bool, lanes: int) -> Array:
    """The lanes that are read where all waves pick alike."""
    lane = np.arange(lanes)
    select = np.where((lane & 8) == 0, low, high)
    return (lane & ~15) ^ (16 if cross else 0) | (select >> 4 * (lane & 7)) & 15


def permlane16_var(
    source: Array,
    select: Array,
    active: Array,
    *,
    cross: bool = False,
    bound_control: bool = False,
    fetch_inactive: bool = False,
) -> tuple[Array, Array]:
    """v_permlane16_var_b32 and v_permlanex16_var_b32 (gfx12): each lane's own low 4 bits pick within a row."""
    return _permute_in_rows(source, select & np.uint32(15), active, cross, bound_control, fetch_inactive)


def _permute_in_rows(
    source: Array, place: Array, active: Array, cross: bool, bound_control: bool, fetch_inactive: bool
) -> tuple[Array, Array]:
    lane = np.arange(source.shape[-1])
    row = (lane & ~15) ^ (16 if cross else 0)
    chosen = np.broadcast_to(row | place.astype(np.int64), source.shape)
    found = np.take_along_axis(np.broadcast_to(active, source.shape), chosen, axis=-1)
    return _fetched(np.take_along_axis(source, chosen, axis=-1), found, None, bound_control, fetch_inactive)


def permlane64(source: Array) -> Array:
    """Lanes 0..31 and 32..63 exchanged; a wave of 32 lanes keeps its values, as the instruction is a no-op there."""
    half = source.shape[-1] // 2
    return source.copy() if half == 16 else np.roll(source, half, axis=-1)


def permlane_swap(destination: Array, source: Array, rows: int) -> tuple[Array, Array]:
    """gfx950: the odd rows, of 16 or of 32 lanes, of `destination` and the even rows of `source` change places."""
    new_destination, new_source = destination.copy(), source.copy()
    for even in range(0, source.shape[-1], 2 * rows):
        new_destination[..., even + rows : even + 2 * rows] = source[..., even : even + rows]
        new_source[..., even : even + rows] = destination[..., even + rows : even + 2 * rows]
    return new_destination, new_source


def read_lane(source: Array, lane: Array) -> Array:
    """v_readlane_b32: [W] values of one lane a wave; exec does not matter, the lane number wraps at the wave size."""
    chosen = np.asarray(lane).astype(np.int64) % source.shape[-1]
    chosen = np.broadcast_to(chosen.reshape(-1), source.shape[:1])
    return source[np.arange(source.shape[0]), chosen]


def read_first_lane(source: Array, active: Array) -> Array:
    """v_readfirstlane_b32: [W] values of the lowest active lane, lane 0 where none is active."""
    first = active.argmax(axis=-1)
    return source[np.arange(source.shape[0]), first]


def write_lane(destination: Array, value: Array, lane: Array) -> Array:
    """v_writelane_b32: `destination` with one lane a wave replaced; exec does not matter."""
    chosen = np.broadcast_to(
        np.asarray(lane).astype(np.int64).reshape(-1) % destination.shape[-1], destination.shape[:1]
    )
    written = destination.copy()
    written[np.arange(destination.shape[0]), chosen] = np.asarray(value).reshape(-1)
    return written


def ds_bpermute(address: Array, data: Array, active: Array, *, offset: int = 0, group: int | None = None) -> Array:
    """Pull: each lane reads lane (address + offset) / 4, modulo `group`; an inactive source gives 0.

    `group` is the wave on gfx9 and 32 lanes on gfx11 and gfx12.
    """
    chosen = _addressed(address, offset, group or data.shape[-1])
    # Flat places: take_along_axis makes its index anew for every call, at three times the price of the gather.
    chosen += _first_places(*data.shape)
    values = data.reshape(-1).take(chosen)
    found = active.reshape(-1).take(chosen)
    return values if np.count_nonzero(found) == found.size else np.where(found, values, np.uint32(0))


@lru_cache(maxsize=64)
def _first_places(waves: int, lanes: int) -> Array:
    """[W, 1]: where each wave's lanes begin."""
    return np.arange(0, waves * lanes, lanes)[:, None]


def ds_permute(address: Array, data: Array, active: Array, *, offset: int = 0, group: int | None = None) -> Array:
    """Push: each active lane writes lane (address + offset) / 4; the highest writer wins, an unwritten lane gets 0."""
    chosen = _addressed(address, offset, group or data.shape[-1])
    result = np.zeros_like(data)
    waves = np.arange(data.shape[0])
    for lane in range(data.shape[-1]):
        writes = active[:, lane]
        result[waves[writes], chosen[writes, lane]] = data[writes, lane]
    return result


def _addressed(address: Array, offset: int, group: int) -> Array:
    return (((address + np.uint32(offset)) >> np.uint32(2)) % np.uint32(group)).astype(np.int64)


def ds_swizzle(source: Array, offset: int, active: Array) -> Array:
    """Fixed patterns within 32 lanes; an inactive source gives 0."""
    lane, inside = _swizzle_pattern(offset, source.shape[-1])
    return np.where(active[..., lane] & inside, source[..., lane], np.uint32(0))


@lru_cache(maxsize=256)
def _swizzle_pattern(offset: int, lanes: int) -> tuple[Array, Array]:
    chosen = np.array([_swizzle_lane(offset, lane) for lane in range(lanes)])
    return chosen, (chosen >= 0) & (chosen < lanes)


def _swizzle_lane(offset: int, lane: int) -> int:
    place, group = lane & 31, lane & 32
    if offset >= 0xE000:
        mask = offset & 31
        return group | int(f"{place:05b}"[::-1], 2) >> mask.bit_count() | (place & mask)
    if offset >= 0xC000:
        mask, amount = offset & 31, (offset >> 5) & 31
        step = -amount if offset & 0x400 else amount
        return group | (place & mask) | ((place + step) & ~mask & 31)
    if offset & 0x8000:
        return (lane & ~3) | (offset >> (2 * (lane & 3))) & 3
    keep, force, flip = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
    return group | ((place & keep) | force) ^ flip


def bind_lane_operation(inst: Decoded) -> tuple[Run, int] | None:
    """What the instruction does and the registers it touches; None where it is none of these."""
    if inst.name in ("v_nop", "v_pipeflush"):
        return (lambda _g: None), 0
    if inst.name.startswith("v_accvgpr"):
        return _accumulator(inst)
    bind = _LANE_OPERATIONS.get(inst.name)
    return None if bind is None else bind(inst)


def _read_lane(inst: Decoded) -> tuple[Run, int]:
    write, touched = scalar_target(inst, inst.fields["vdst"], 32)
    if inst.fields["src0"] < VGPR:
        raise UnknownInstruction(inst.name, inst.address, "a scalar source")
    number = inst.fields["src0"] - VGPR
    touched |= vgpr_bits(number)
    if inst.name == "v_readfirstlane_b32":
        return (lambda g: write(g, read_first_lane(g.v[number], g.exec))), touched
    read, more = scalar_source(inst, inst.fields["src1"], 32)
    return (lambda g: write(g, read_lane(g.v[number], read(g)))), touched | more


def _write_lane(inst: Decoded) -> tuple[Run, int]:
    target = inst.fields["vdst"]
    read, touched = scalar_source(inst, inst.fields["src0"], 32)
    where, more = scalar_source(inst, inst.fields["src1"], 32)

    def run(g: Group) -> None:
        g.v[target] = write_lane(g.v[target], np.broadcast_to(read(g), (g.width,)), where(g))

    return run, touched | more | vgpr_bits(target)


def _permlane16(inst: Decoded) -> tuple[Run, int]:
    number, target, opsel = inst.fields["src0"] - VGPR, inst.fields["vdst"], inst.get("opsel")
    options = {"cross": "x16" in inst.name, "fetch_inactive": bool(opsel & 1), "bound_control": bool(opsel & 2)}
    moved: Callable[[Group], tuple[Array, Array]]
    if "_var_" in inst.name:
        select = inst.fields["src1"] - VGPR
        touched = vgpr_bits(select)
        moved = lambda g: permlane16_var(g.v[number], g.v[select], g.exec, **options)  # noqa: E731
    else:
        low, first = scalar_source(inst, inst.fields["src1"], 32)
        high, second = scalar_source(inst, inst.fields["src2"], 32)
        touched = first | second
        moved = lambda g: permlane16(g.v[number], low(g)[:, None], high(g)[:, None], g.exec, **options)  # noqa: E731

    def run(g: Group) -> None:
        values, found = moved(g)
        if g.full:
            g.v[target] = values
        else:
            np.copyto(g.v[target], values, where=found & g.exec)

    return run, touched | vgpr_bits(number) | vgpr_bits(target)


def _permlane64(inst: Decoded) -> tuple[Run, int]:
    number, target = inst.fields["src0"] - VGPR, inst.fields["vdst"]

    def run(g: Group) -> None:
        np.copyto(g.v[target], permlane64(g.v[number]), where=g.exec)

    return run, vgpr_bits(number) | vgpr_bits(target)


def _swap(inst: Decoded) -> tuple[Run, int]:
    number, target = inst.fields["src0"] - VGPR, inst.fields["vdst"]
    rows = 16 if inst.name == "v_permlane16_swap_b32" else 32

    def run(g: Group) -> None:
        first, second = permlane_swap(g.v[target], g.v[number], rows)
        np.copyto(g.v[target], first, where=g.exec)
        np.copyto(g.v[number], second, where=g.exec)

    return run, vgpr_bits(number) | vgpr_bits(target)


def _accumulator(inst: Decoded) -> tuple[Run, int]:
    """Moves between vector and accumulation registers; the latter follow the former in one file."""
    code, target = inst.fields["src0"], inst.fields["vdst"]
    if "read" not in inst.name:
        target += VGPR
    if code < VGPR:
        read, touched = scalar_source(inst, code, 32)
    else:
        number = code - VGPR + (0 if "write" in inst.name else VGPR)
        touched = vgpr_bits(number)

    def run(g: Group) -> None:
        np.copyto(g.v[target], g.v[number] if code >= VGPR else read(g)[:, None], where=g.exec)

    return run, vgpr_bits(target) | touched


_LANE_OPERATIONS: dict[str, Callable[[Decoded], tuple[Run, int]]] = {
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_b32": _permlane16,
    "v_permlanex16_b32": _permlane16,
    "v_permlane16_var_b32": _permlane16,
    "v_permlanex16_var_b32": _permlane16,
    "v_permlane64_b32": _permlane64,
    "v_permlane16_swap_b32": _swap,
    "v_permlane32_swap_b32": _swap,
}
