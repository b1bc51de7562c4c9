"""Operands and modifiers of matrix instructions, in both encodings, around the functions of `matrix`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.matrix import MATRIX, MatrixModifiers, MatrixOp
from rocm_sd.verify.emulator.operands import VGPR, constant
from rocm_sd.verify.emulator.wave import ACC_BASE, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.vector_types import Array
    from rocm_sd.verify.emulator.wave import Group

__all__ = ["bind_matrix", "is_matrix"]


def is_matrix(name: str) -> bool:
    return name.startswith(("v_wmma_", "v_mfma_", "v_swmmac_", "v_smfmac_"))


def bind_matrix(inst: Decoded, gfx: str, wave_size: int) -> tuple[Callable[[Group], None], int, int]:
    """What it does, the registers it touches, and its floating-point operations for one wave."""
    # gfx950 shares encodings with gfx94x and has other 8-bit floats and more shapes.
    op = MATRIX[gfx if gfx in MATRIX else inst.family].get(inst.name)
    if op is None:
        raise UnknownInstruction(inst.name, inst.address)
    if op.layout.lanes != wave_size:
        raise UnknownInstruction(inst.name, inst.address, f"in waves of {wave_size}")
    shift_a, shift_b, shift_c = _accumulators(inst)
    a, b = inst.fields["src0"] - VGPR, inst.fields["src1"] - VGPR
    if a < 0 or b < 0:
        raise UnknownInstruction(inst.name, inst.address, "a factor that is no vector register")
    a, b, target = a + shift_a, b + shift_b, inst.fields["vdst"] + shift_c
    modifiers = _modifiers(inst)
    third, touched = _addend(inst, op, shift_c)
    a_regs, b_regs, d_regs = op.a_regs, op.b_regs, op.d_regs

    factors = [_factor(op, first, source, modifiers) for source, first in enumerate((a, b))]

    def run(g: Group) -> None:
        # Matrix instructions take no notice of EXEC.
        left, right = (factor(g) for factor in factors)
        total = op.total(left, right, third(g), modifiers)
        if op.rounds_alone:
            g.vf[target : target + d_regs] = total
        else:
            g.v[target : target + d_regs] = op.stored(total, third(g), modifiers)

    touched |= vgpr_bits(a, a_regs) | vgpr_bits(b, b_regs) | vgpr_bits(target, d_regs)
    return run, touched, op.flops


def _factor(op: MatrixOp, first: int, source: int, modifiers: MatrixModifiers) -> Callable[[Group], Array]:
    """A tile's rows meet every one of its columns: a factor is mostly that of an instruction just before."""
    last = first + (op.b_regs if source else op.a_regs)
    key = f"{first} {source} {op} {modifiers}"

    def factor(g: Group) -> Array:
        registers = g.v[first:last]
        before = g.factors.get(key)
        if before is None or np.count_nonzero(before[0] != registers):
            before = g.factors[key] = registers.copy(), op.factor(registers, source, modifiers)
        return before[1]

    return factor


def _accumulators(inst: Decoded) -> tuple[int, int, int]:
    if inst.family != "gfx94x":
        return 0, 0, 0
    raw = inst.raw
    return ACC_BASE * (raw >> 59 & 1), ACC_BASE * (raw >> 60 & 1), ACC_BASE * (raw >> 15 & 1)


def _modifiers(inst: Decoded) -> MatrixModifiers:
    if inst.family == "gfx94x":
        return MatrixModifiers(cbsz=inst.raw >> 8 & 7, abid=inst.raw >> 11 & 15, blgp=inst.raw >> 61 & 7)

    def three(field: str) -> tuple[bool, bool, bool]:
        value = inst.get(field)
        return bool(value & 1), bool(value & 2), bool(value & 4)

    return MatrixModifiers(three("neg"), three("neg_hi"), three("opsel"), bool(inst.get("clmp")))


def _addend(inst: Decoded, op: MatrixOp, shift: int) -> tuple[Callable[[Group], Array], int]:
    code, registers = inst.fields["src2"], op.d_regs
    if code >= VGPR:
        number = code - VGPR + shift
        return (lambda g: g.v[number : number + registers]), vgpr_bits(number, registers)
    value = constant(code, "b32", None)
    if value is None or (value and ("f32" not in inst.name.split("_")[2] and "i32" not in inst.name.split("_")[2])):
        raise UnknownInstruction(inst.name, inst.address, f"addend operand {code}")
    return (lambda g: np.full((registers, g.width, g.lanes), value, np.uint32)), 0
