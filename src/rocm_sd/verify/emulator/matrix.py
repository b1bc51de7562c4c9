"""Matrix instructions: D = A x B + C on whole waves, in the register layouts of AMD's ISA documents.

Layouts are tables of where each matrix element stands, so an instruction is: gather, one batched product, scatter.
Arithmetic: products of the narrow types are exact in float64; the sum over K and C is taken in float64 and rounded once
to the type of D. The hardware's own order of summation is not documented; its result may differ by a few units in the
last place of the largest partial sum. Integer sums are exact and wrap, or saturate with the clamp bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.float_formats import (
    BF8,
    BF8_FNUZ,
    FP8,
    FP8_FNUZ,
    bf16_to_float,
    float_to_bf16,
    round_to_xf32,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.vector_types import Array

__all__ = ["MATRIX", "MatrixModifiers", "MatrixOp"]


@dataclass(frozen=True)
class MatrixModifiers:
    """Fields of the encoding, one entry a source (A, B, C).

    Floats: neg_lo and neg_hi negate the even and odd elements of A and B; for C, neg_lo negates and neg_hi takes the
    absolute value first. Integers of WMMA: neg_lo marks A or B as signed. op_sel[2] picks the upper half for 16-bit C
    and D on gfx11. MFMA: `blgp`, `cbsz` and `abid` permute or broadcast blocks.
    """

    neg_lo: tuple[bool, bool, bool] = (False, False, False)
    neg_hi: tuple[bool, bool, bool] = (False, False, False)
    op_sel: tuple[bool, bool, bool] = (False, False, False)
    clamp: bool = False
    cbsz: int = 0
    abid: int = 0
    blgp: int = 0


PLAIN = MatrixModifiers()


@dataclass(frozen=True)
class MatrixOp:
    """function(a, b, c, modifiers=PLAIN) on raw uint32 [regs, W, L]; an inline constant C arrives as filled registers.

    EXEC plays no part. `flops` counts a multiply-add as two, for one wave.
    """

    function: Callable[..., Array] = field(repr=False)
    a_regs: int
    b_regs: int
    c_regs: int
    d_regs: int
    wave_size: int
    flops: int


# ---------------------------------------------------------------------------------------------------------------------
# Layouts: for each (register element, lane) the coordinates it holds.


@dataclass(frozen=True)
class Layout:
    """Shape of one instruction: M x N x K, `blocks` independent products, `per_lane` elements of A (and B) a lane."""

    family: str
    m: int
    n: int
    k: int
    blocks: int
    per_lane: int
    lanes: int


@lru_cache(maxsize=128)
def _input_places(layout: Layout) -> tuple[Array, Array]:
    """Element and lane that hold A[block, row, k]; B[block, k, column] stands at the same place for column == row.

    gfx11: lane % 16 is the row and every lane holds all of K; lanes 16 to 31 repeat lanes 0 to 15.
    gfx12 and MFMA: the lanes beyond the rows of all blocks hold the next `per_lane` values of K.
    """
    block, row, k = np.meshgrid(np.arange(layout.blocks), np.arange(layout.m), np.arange(layout.k), indexing="ij")
    if layout.family == "gfx11":
        return k, row
    lane = row + layout.m * (block + layout.blocks * (k // layout.per_lane))
    return k % layout.per_lane, lane


@lru_cache(maxsize=128)
def _output_places(layout: Layout, wide: bool = False) -> tuple[Array, Array]:
    """Element and lane that hold D[block, row, column]. `wide`: the float64 forms, whose rows lie four apart."""
    block, row, column = np.meshgrid(np.arange(layout.blocks), np.arange(layout.m), np.arange(layout.n), indexing="ij")
    if layout.family == "gfx11":
        return row // 2, column + 16 * (row % 2)
    if layout.family == "gfx12":
        return row % 8, column + 16 * (row // 8)
    if layout.m == 4:
        if wide:
            return 0 * row, column + 4 * block + 16 * row
        return row, column + 4 * block
    groups = layout.lanes // layout.n
    if wide:
        return row // groups, column + layout.n * (row % groups)
    # Four consecutive rows stand in four registers; the next four belong to the next group of lanes.
    element = row % 4 + 4 * (row // (4 * groups))
    return element + (layout.m * layout.n // layout.lanes) * block, column + layout.n * (row // 4 % groups)


@lru_cache(maxsize=128)
def _input_index(layout: Layout) -> Array:
    """[block, row, k]: place in a wave's elements, flattened element-major."""
    element, lane = _input_places(layout)
    return element * layout.lanes + lane


@lru_cache(maxsize=128)
def _output_index(layout: Layout, wide: bool) -> tuple[Array, Array]:
    """[block, row, column] to a wave's flattened elements, and the way back."""
    element, lane = _output_places(layout, wide)
    there = element * layout.lanes + lane
    back = np.empty(there.size, dtype=np.int64)
    back[there.ravel()] = np.arange(there.size)
    return there, back


def _by_wave(elements: Array) -> Array:
    """[elements, W, L] to [W, elements * L]."""
    return elements.swapaxes(0, 1).reshape(elements.shape[1], -1)


# ---------------------------------------------------------------------------------------------------------------------
# Element types: how registers unpack into elements [elements, W, L] and back.


def _halves(registers: Array) -> Array:
    """[regs, W, L] uint32 to [2 * regs, W, L] uint16, lower half first."""
    both = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=1)
    return both.astype(np.uint16).reshape(-1, *registers.shape[1:])


def _fields(registers: Array, bits: int) -> Array:
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, 1, 1)
    fields = (registers[:, None] >> shifts) & np.uint32((1 << bits) - 1)
    return fields.reshape(-1, *registers.shape[1:])


def _doubles(registers: Array) -> Array:
    low, high = registers[0::2].astype(np.uint64), registers[1::2].astype(np.uint64)
    return (low | (high << np.uint64(32))).view(np.float64)


def _float_reader(name: str) -> Callable[[Array], Array]:
    readers: dict[str, Callable[[Array], Array]] = {
        "f16": lambda registers: _halves(registers).view(np.float16),
        "bf16": lambda registers: bf16_to_float(_halves(registers)),
        "f32": lambda registers: registers.view(np.float32),
        "xf32": lambda registers: round_to_xf32(registers.view(np.float32)),
        "f64": _doubles,
        "fp8": lambda registers: FP8.decode(_fields(registers, 8)),
        "bf8": lambda registers: BF8.decode(_fields(registers, 8)),
        "fp8_fnuz": lambda registers: FP8_FNUZ.decode(_fields(registers, 8)),
        "bf8_fnuz": lambda registers: BF8_FNUZ.decode(_fields(registers, 8)),
    }
    return readers[name]


def _integers(registers: Array, bits: int, signed: bool) -> Array:
    values = _fields(registers, bits).astype(np.int64)
    sign = 1 << (bits - 1)
    return (values ^ sign) - sign if signed else values


_BITS = {"f16": 16, "bf16": 16, "f32": 32, "xf32": 32, "f64": 64, "i8": 8, "iu8": 8, "iu4": 4, "fp8": 8, "bf8": 8}


def _width(name: str) -> int:
    return _BITS[name.removesuffix("_fnuz")]


# ---------------------------------------------------------------------------------------------------------------------
# One instruction.


@dataclass(frozen=True)
class _Instruction:
    layout: Layout
    a: str
    b: str
    d: str
    flushes_subnormals: bool = False

    @property
    def c_elements(self) -> int:
        return self.layout.m * self.layout.n * self.layout.blocks // self.layout.lanes

    @property
    def c_regs(self) -> int:
        bits = {"f64": 64, "f16": 16, "bf16": 16}.get(self.d, 32)
        if self.layout.family == "gfx11":
            return 8
        return self.c_elements * bits // 32

    def input_regs(self, name: str) -> int:
        return self.layout.per_lane * _width(name) // 32

    def __call__(self, a: Array, b: Array, c: Array, modifiers: MatrixModifiers = PLAIN) -> Array:
        if modifiers.cbsz or modifiers.abid or modifiers.blgp:
            raise ValueError("MFMA with cbsz, abid or blgp is not modelled.")
        left = self._input(a, self.a, 0, modifiers)
        right = self._input(b, self.b, 1, modifiers)
        index = _input_index(self.layout)
        rows = _by_wave(left).take(index, axis=1)
        columns = _by_wave(right).take(index, axis=1).swapaxes(-1, -2)
        product = np.matmul(rows, columns)
        if self.d == "i32":
            # Sums of at most 128 products of bytes are far below 2**53, so float64 was exact.
            product = product.astype(np.int64)
        return self._store(product + self._addend(c, modifiers), c, modifiers)

    def _input(self, registers: Array, name: str, source: int, modifiers: MatrixModifiers) -> Array:
        if self.layout.family == "gfx11" and not np.array_equal(registers[..., :16], registers[..., 16:]):
            raise ValueError(
                f"WMMA of gfx11 needs lanes 16 to 31 of {'AB'[source]} to repeat lanes 0 to 15, and here they differ."
            )
        if self.d == "i32":
            signed = name == "i8" or modifiers.neg_lo[source]
            return _integers(registers, _width(name), signed).astype(np.float64)
        values = _float_reader(name)(registers)
        if self.flushes_subnormals and name in {"f16", "bf16"}:
            smallest = 2.0**-14 if name == "f16" else 2.0**-126
            values = np.where(np.abs(values) < smallest, np.copysign(values.dtype.type(0), values), values)
        if modifiers.neg_lo[source] or modifiers.neg_hi[source]:
            signs = np.ones((len(values), 1, 1), dtype=values.dtype)
            signs[0::2] = -1 if modifiers.neg_lo[source] else 1
            signs[1::2] = -1 if modifiers.neg_hi[source] else 1
            values = values * signs
        # numpy widens float16 to float32 in hardware, to float64 in software.
        return values.astype(np.float32).astype(np.float64) if name == "f16" else values.astype(np.float64)

    def _elements(self, registers: Array, modifiers: MatrixModifiers) -> Array:
        """C as typed elements [elements, W, L]."""
        if self.d == "f64":
            return _doubles(registers)
        if self.d in {"f32", "i32"}:
            return registers.view(np.float32 if self.d == "f32" else np.int32)
        halves = _halves(registers)
        if self.layout.family == "gfx11":
            halves = halves[1::2] if modifiers.op_sel[2] else halves[0::2]
        return bf16_to_float(halves) if self.d == "bf16" else halves.view(np.float16)

    def _addend(self, c: Array, modifiers: MatrixModifiers) -> Array:
        there, _ = _output_index(self.layout, self.d == "f64")
        values = _by_wave(self._elements(c, modifiers)).take(there, axis=1)
        if self.d == "i32":
            return values.astype(np.int64)
        if modifiers.neg_hi[2]:
            values = np.abs(values)
        if modifiers.neg_lo[2]:
            values = -values
        return values.astype(np.float64)

    def _store(self, result: Array, c: Array, modifiers: MatrixModifiers) -> Array:
        _, back = _output_index(self.layout, self.d == "f64")
        typed = self._narrow(result, modifiers)
        waves = typed.reshape(len(typed), -1).take(back, axis=1)
        elements = np.ascontiguousarray(waves.reshape(len(typed), -1, self.layout.lanes).swapaxes(0, 1))
        if self.d == "f64":
            bits = elements.view(np.uint64)
            registers = np.stack([bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)], axis=1)
            return registers.reshape(-1, *c.shape[1:])
        if self.d in {"f32", "i32"}:
            return elements.view(np.uint32)
        halves = elements.view(np.uint16).astype(np.uint32)
        if self.layout.family != "gfx11":
            return halves[0::2] | (halves[1::2] << np.uint32(16))
        # One value a register; the other half keeps what C held, as the destination is C's register.
        if modifiers.op_sel[2]:
            return (c & np.uint32(0xFFFF)) | (halves << np.uint32(16))
        return (c & np.uint32(0xFFFF0000)) | halves

    def _narrow(self, result: Array, modifiers: MatrixModifiers) -> Array:
        if self.d == "i32":
            if modifiers.clamp:
                return np.clip(result, -(2**31), 2**31 - 1).astype(np.int32)
            return result.astype(np.int32)
        if self.d == "bf16":
            return float_to_bf16(result.astype(np.float32))
        kind = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[self.d]
        typed = result.astype(kind)
        if self.flushes_subnormals and self.d == "f32":
            typed = np.where(np.abs(typed) < np.float32(2.0**-126), np.copysign(np.float32(0), typed), typed)
        return typed


def _op(instruction: _Instruction) -> MatrixOp:
    layout = instruction.layout
    return MatrixOp(
        function=instruction,
        a_regs=instruction.input_regs(instruction.a),
        b_regs=instruction.input_regs(instruction.b),
        c_regs=instruction.c_regs,
        d_regs=instruction.c_regs,
        wave_size=layout.lanes,
        flops=2 * layout.m * layout.n * layout.k * layout.blocks,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The tables.


def _wmma(family: str, d: str, a: str, b: str, k: int = 16) -> MatrixOp:
    per_lane = k if family == "gfx11" else k // 2
    return _op(_Instruction(Layout(family, 16, 16, k, 1, per_lane, 32), a, b, d))


def _wmma_table(family: str) -> dict[str, MatrixOp]:
    table = {
        f"v_wmma_{d}_16x16x16_{source}": _wmma(family, d, source, source)
        for d, source in (
            ("f32", "f16"),
            ("f32", "bf16"),
            ("f16", "f16"),
            ("bf16", "bf16"),
            ("i32", "iu8"),
            ("i32", "iu4"),
        )
    }
    if family == "gfx12":
        table["v_wmma_i32_16x16x32_iu4"] = _wmma(family, "i32", "iu4", "iu4", k=32)
        for a in ("fp8", "bf8"):
            for b in ("fp8", "bf8"):
                table[f"v_wmma_f32_16x16x16_{a}_{b}"] = _wmma(family, "f32", a, b)
    return table


def _mfma(d: str, shape: tuple[int, int, int, int], a: str, b: str | None = None, *, flush: bool = False) -> MatrixOp:
    m, n, k, blocks = shape
    layout = Layout("mfma", m, n, k, blocks, m * k * blocks // 64, 64)
    return _op(_Instruction(layout, a, b or a, d, flush))


_COMMON: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "f32": ((32, 32, 1, 2), (16, 16, 1, 4), (4, 4, 1, 16), (32, 32, 2, 1), (16, 16, 4, 1)),
    "f16": ((32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 8, 1), (16, 16, 16, 1)),
    "bf16": ((32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 8, 1), (16, 16, 16, 1)),
    "i8": ((32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16)),
}


def _mfma_names(d: str, shape: tuple[int, int, int, int], source: str) -> tuple[str, ...]:
    """The name in AMD's tables, the assembler's, and the one of gfx90a: v_mfma_f32_32x32x4_2b_f16, ..._32x32x4f16."""
    m, n, k, blocks = shape
    stem = f"v_mfma_{d}_{m}x{n}x{k}"
    block = f"_{blocks}b" if blocks > 1 else ""
    old = f"{stem}{source}_1k" if source == "bf16" else f"{stem}{source}"
    return (f"{stem}{block}_{source}", f"{stem}_{source}", old)


def _mfma_table(
    extra: dict[str, tuple[tuple[int, int, int, int], ...]], fp8: tuple[str, str] | None, *, flush: bool
) -> dict[str, MatrixOp]:
    table: dict[str, MatrixOp] = {}
    for shapes in (_COMMON, extra):
        for source, sizes in shapes.items():
            d = "i32" if source == "i8" else "f32"
            for shape in sizes:
                op = _mfma(d, shape, source, flush=flush)
                table |= dict.fromkeys(_mfma_names(d, shape, source), op)
    for shape in ((16, 16, 4, 1), (4, 4, 4, 4)):
        table |= dict.fromkeys(_mfma_names("f64", shape, "f64"), _mfma("f64", shape, "f64"))
    if fp8 is not None:
        suffix = {"fp8": fp8[0], "bf8": fp8[1]}
        for m, k in ((16, 32), (32, 16)):
            for a, a_format in suffix.items():
                for b, b_format in suffix.items():
                    table[f"v_mfma_f32_{m}x{m}x{k}_{a}_{b}"] = _mfma("f32", (m, m, k, 1), a_format, b_format)
    return table


_I8_WIDE = ((32, 32, 16, 1), (16, 16, 32, 1))

MATRIX: dict[str, dict[str, MatrixOp]] = {
    "gfx11": _wmma_table("gfx11"),
    "gfx12": _wmma_table("gfx12"),
    # MI200 flushes subnormal inputs and results of its 16-bit matrix instructions (PyTorch, numerical accuracy notes).
    "gfx90a": _mfma_table({"i8": ((32, 32, 8, 1), (16, 16, 16, 1))}, None, flush=True),
    "gfx94x": _mfma_table(
        {"i8": _I8_WIDE, "xf32": ((32, 32, 4, 1), (16, 16, 8, 1))}, ("fp8_fnuz", "bf8_fnuz"), flush=False
    ),
    "gfx950": _mfma_table(
        {
            "i8": (*_I8_WIDE, (32, 32, 32, 1), (16, 16, 64, 1)),
            "f16": ((32, 32, 16, 1), (16, 16, 32, 1)),
            "bf16": ((32, 32, 16, 1), (16, 16, 32, 1)),
        },
        ("fp8", "bf8"),
        flush=False,
    ),
}
