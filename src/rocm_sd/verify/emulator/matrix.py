"""Matrix instructions: D = A x B + C on whole waves, in the register layouts of AMD's ISA documents.

Layouts say where each matrix element stands, so an instruction is: change of axes, one batched product, change of axes.
Arithmetic: products of the narrow types are exact in float64; the sum over K and C is taken in float64 and rounded once
to the type of D. The hardware's own order of summation is not documented; its result may differ by a few units in the
last place of the largest partial sum. Integer sums are exact and wrap, or saturate with the clamp bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator import convert
from rocm_sd.verify.emulator.convert import EIGHT_BIT
from rocm_sd.verify.emulator.float_formats import bf16_to_float, float_to_bf16, round_to_xf32

if TYPE_CHECKING:
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


# ---------------------------------------------------------------------------------------------------------------------
# Layouts: where the coordinates of a matrix stand in registers and lanes. Each is a product of ranges, so that moving
# between registers and matrices is a change of axes.


@dataclass(frozen=True)
class MatrixLayout:
    """Shape of one instruction: M x N x K, `blocks` independent products, `per_lane` elements of A (and B) a lane."""

    family: str
    m: int
    n: int
    k: int
    blocks: int
    per_lane: int
    lanes: int

    def rows(self, registers: Array) -> Array:
        """Registers [regs, W, L] of A, or of B by columns, as words [W, block, row, words of K].

        gfx11: lane % 16 is the row and every lane holds all of K; lanes 16 to 31 repeat lanes 0 to 15.
        gfx12 and MFMA: the lanes beyond the rows of all blocks hold the next `per_lane` values of K.
        """
        count, waves = registers.shape[:2]
        if self.family == "gfx11":
            split = registers[:, :, None, None, : self.m]
        else:
            split = registers.reshape(count, waves, self.k // self.per_lane, self.blocks, self.m)
        ordered = np.ascontiguousarray(split.transpose(1, 3, 4, 2, 0))
        return ordered.reshape(waves, self.blocks, self.m, -1)

    def placed(self, product: Array, wide: bool) -> Array:
        """D [W, block, row, column] with the axes that make up elements, waves and lanes in this order, nothing moved.

        `wide`: the float64 forms, whose rows lie four apart.
        """
        ranges, axes = _output_axes(self, wide)
        return product.reshape(len(product), *ranges).transpose(axes)


@lru_cache(maxsize=128)
def _output_axes(layout: MatrixLayout, wide: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranges that block, row and column are made of, after the waves; and in which order registers and lanes have them.

    Of those before the waves (axis 0) an element's number is made, of those after them the lane's.
    """
    m, n, blocks = layout.m, layout.n, layout.blocks
    if layout.family == "gfx11":
        return (m // 2, 2, n), (1, 0, 2, 3)
    if layout.family == "gfx12":
        return (2, m // 2, n), (2, 0, 1, 3)
    if m == 4:
        return (blocks, m, n), (0, 2, 1, 3) if wide else (2, 0, 1, 3)
    groups = layout.lanes // n
    if wide:
        return (blocks, m // groups, groups, n), (1, 2, 0, 3, 4)
    # Four consecutive rows stand in four registers; the next four belong to the next group of lanes.
    return (blocks, m // (4 * groups), groups, 4, n), (1, 2, 4, 0, 3, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Element types: bits of one, and the type of `convert` that a register full of them has.

_ELEMENTS = {
    "f16": (16, "pk_f16"),
    "bf16": (16, "pk_bf16"),
    "f32": (32, "f32"),
    "i32": (32, "i32"),
    "xf32": (32, "f32"),
    "f64": (64, "f64"),
    "i8": (8, "i8x4"),
    "iu8": (8, "iu8x4"),
    "iu4": (4, "iu4x8"),
    **{name: (8, f"{name}x4") for name in ("fp8", "bf8", "fp8_fnuz", "bf8_fnuz")},
}


def _elements(registers: Array, name: str) -> Array:
    """[regs, W, L] uint32 of C to typed elements [elements, W, L], lower bits first."""
    bits, kind = _ELEMENTS[name]
    if bits == 64:
        return convert.join64(registers[0::2], registers[1::2]).view(np.float64)
    if bits == 32:
        return convert.to_type(registers, kind)
    return convert.to_type(registers, kind).swapaxes(0, 1).reshape(-1, *registers.shape[1:])


_SAME_WIDTH = {"f16": np.float16, "f32": np.float32, "xf32": np.float32, "f64": np.float64, "i8": np.int8}


def _in_words(words: Array, name: str, *, signed: bool) -> Array:
    """Typed elements of contiguous words, lower bits first; `signed` matters to iu8 and iu4."""
    if name in _SAME_WIDTH:
        return words.view(_SAME_WIDTH[name])
    if name == "bf16":
        return bf16_to_float(words.view(np.uint16))
    if name == "iu8":
        return words.view(np.int8 if signed else np.uint8)
    if name == "iu4":
        octets = words.view(np.uint8)
        nibbles = np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1).astype(np.int8)
        return (nibbles ^ 8) - 8 if signed else nibbles
    return EIGHT_BIT[name].decode(words.view(np.uint8))


# ---------------------------------------------------------------------------------------------------------------------
# One instruction.


@dataclass(frozen=True)
class MatrixOp:
    """op(a, b, c, modifiers=PLAIN) on raw uint32 [regs, W, L]; an inline constant C arrives as filled registers.

    `a`, `b` and `d` are the types of the elements; C and D have one. EXEC plays no part.
    """

    layout: MatrixLayout
    a: str
    b: str
    d: str
    flushes_subnormals: bool = False

    @property
    def a_regs(self) -> int:
        return self.layout.per_lane * _ELEMENTS[self.a][0] // 32

    @property
    def b_regs(self) -> int:
        return self.layout.per_lane * _ELEMENTS[self.b][0] // 32

    @property
    def d_regs(self) -> int:
        """Registers of C and of D. WMMA of gfx11 has one value a register, whatever its width."""
        elements = self.layout.m * self.layout.n * self.layout.blocks // self.layout.lanes
        return elements if self.layout.family == "gfx11" else elements * _ELEMENTS[self.d][0] // 32

    @property
    def flops(self) -> int:
        """Of one wave; a multiply-add counts as two."""
        return 2 * self.layout.m * self.layout.n * self.layout.k * self.layout.blocks

    def __call__(self, a: Array, b: Array, c: Array, modifiers: MatrixModifiers = PLAIN) -> Array:
        total = self.total(self.factor(a, 0, modifiers), self.factor(b, 1, modifiers), c, modifiers)
        return self.stored(total, c, modifiers)

    @property
    def rounds_alone(self) -> bool:
        """Whether D is the sum in float32 and nothing else: an assignment to registers does that."""
        return self.d == "f32" and not self.flushes_subnormals

    def factor(self, registers: Array, source: int, modifiers: MatrixModifiers) -> Array:
        """A, or B by columns, in float64: [W, block, row, k]."""
        name = self.b if source else self.a
        if self.layout.family == "gfx11" and np.count_nonzero(registers[..., :16] != registers[..., 16:]):
            raise ValueError(
                f"WMMA of gfx11 needs lanes 16 to 31 of {'AB'[source]} to repeat lanes 0 to 15, and here they differ."
            )
        values = _in_words(self.layout.rows(registers), name, signed=modifiers.neg_lo[source])
        if self.d == "i32":
            return values.astype(np.float64)
        if name == "xf32":
            values = round_to_xf32(values)
        if self.flushes_subnormals and name in {"f16", "bf16"}:
            smallest = 2.0**-14 if name == "f16" else 2.0**-126
            values = np.where(np.abs(values) < smallest, np.copysign(values.dtype.type(0), values), values)
        if modifiers.neg_lo[source] or modifiers.neg_hi[source]:
            odd = np.arange(self.layout.k) % self.layout.per_lane % 2 == 1
            negative = np.where(odd, modifiers.neg_hi[source], modifiers.neg_lo[source])
            values = values * np.where(negative, -1, 1).astype(values.dtype)
        return values.astype(np.float64)

    def total(self, left: Array, right: Array, c: Array, modifiers: MatrixModifiers) -> Array:
        """Elements of D before they are rounded, [elements, W, L]: of what `factor` gave and the registers of C."""
        if modifiers.cbsz or modifiers.abid or modifiers.blgp:
            raise ValueError("MFMA with cbsz, abid or blgp is not modelled.")
        product = np.matmul(left, right.swapaxes(-1, -2))
        placed = self.layout.placed(product, self.d == "f64")
        if self.d == "i32":
            # Sums of at most 128 products of bytes are far below 2**53, so float64 was exact.
            placed = placed.astype(np.int64)
        total = self._addend(c, modifiers)
        in_place = total.reshape(placed.shape)
        np.add(placed, in_place, out=in_place)
        return total

    def _addend(self, c: Array, modifiers: MatrixModifiers) -> Array:
        """The elements of C, copied and wide."""
        values = _elements(c, self.d)
        if self.layout.family == "gfx11" and _ELEMENTS[self.d][0] == 16:
            values = values[int(modifiers.op_sel[2]) :: 2]
        if self.d == "i32":
            return values.astype(np.int64)
        if modifiers.neg_hi[2]:
            values = np.abs(values)
        if modifiers.neg_lo[2]:
            values = -values
        return values.astype(np.float64)

    def stored(self, result: Array, c: Array, modifiers: MatrixModifiers) -> Array:
        """Registers of D."""
        elements = self._narrow(result, modifiers)
        if self.d == "f64":
            return np.stack(convert.split64(elements.view(np.uint64)), axis=1).reshape(-1, *c.shape[1:])
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


# ---------------------------------------------------------------------------------------------------------------------
# The tables.


def _wmma(family: str, d: str, a: str, b: str, k: int = 16) -> MatrixOp:
    per_lane = k if family == "gfx11" else k // 2
    return MatrixOp(MatrixLayout(family, 16, 16, k, 1, per_lane, 32), a, b, d)


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
    return MatrixOp(MatrixLayout("mfma", m, n, k, blocks, m * k * blocks // 64, 64), a, b or a, d, flush)


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
