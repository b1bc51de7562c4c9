"""Where results of vector instructions go: registers under EXEC, halves and bytes of them, lane masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator import convert
from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.operands import VGPR, scalar_bits, scalar_target
from rocm_sd.verify.emulator.vector import zeroes_high_half
from rocm_sd.verify.emulator.wave import EXEC, VCC, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.wave import Group

    Write = Callable[[Group, Any, Any], None]

__all__ = ["BYTES", "HALVES", "SHORT", "WORDS", "ResultBinder"]

HALVES = frozenset({"f16", "bf16", "u16", "i16", "b16"})
BYTES = frozenset({"fp8", "bf8", "fp8_fnuz", "bf8_fnuz"})
# 32-bit types, each with the view of the vector file that shows it.
WORDS = {"f32": "vf", "i32": "vi", "u32": "v", "b32": "v"}
# Encodings of 32 bits, which have no room for modifiers.
SHORT = frozenset({"VOP1", "VOP2", "VOPC"})


def _merged(g: Group, old: Any, value: Any, where: Any) -> Any:
    """`value` in the active lanes, the old one in others; np.where takes half the time of np.copyto with a mask."""
    return np.where(g.exec if where is None else g.exec & where, value, old)


def _within_exec(g: Group, mask: Any) -> Any:
    if mask.shape != g.exec.shape:
        mask = np.broadcast_to(mask, g.exec.shape)
    return mask if g.full else mask & g.exec


class ResultBinder:
    """bind(...) gives write(g, value, lanes), where `lanes` limits EXEC further (None: it does not)."""

    def __init__(self, gfx: str, wave_size: int) -> None:
        self.gfx, self.wave_size = gfx, wave_size

    def bind(self, inst: Decoded, name: str, result: str, target: int) -> tuple[Write, int]:
        if result == "mask":
            return self._mask_destination(inst, name, target)
        if result == "b32+b32":
            return self._swap_destination(inst, target)
        if name.startswith("v_s_"):
            return self._scalar_destination(inst, result, target)
        value_kind, _, mask = result.partition("+")
        if mask not in ("", "mask"):
            raise UnknownInstruction(inst.name, inst.address, f"a result of type {result}")
        write, bits = self._value_destination(inst, name, value_kind, target)
        if not mask:
            return write, bits
        code = inst.fields.get("sdst", VCC)

        def write_both(g: Group, value: Any, where: Any) -> None:
            number, carry = value
            write(g, number, where)
            if code != inst.null:
                g.set_mask(code, _within_exec(g, carry))

        return write_both, bits | scalar_bits(inst, code, self.wave_size)

    def _scalar_destination(self, inst: Decoded, result: str, target: int) -> tuple[Write, int]:
        """gfx12's transcendental functions of scalar registers; EXEC does not matter."""
        if result != "f32":
            raise UnknownInstruction(inst.name, inst.address, f"scalar result of type {result}")
        store, bits = scalar_target(inst, target, 32)

        def write(g: Group, value: Any, _where: Any) -> None:
            store(g, np.asarray(value, np.float32)[:, 0].view(np.uint32))

        return write, bits

    def _mask_destination(self, inst: Decoded, name: str, target: int) -> tuple[Write, int]:
        code = VCC
        if inst.form.startswith("VOP3"):
            code = target
        elif inst.get("sd"):
            code = inst.fields["sdst"]
        writes_exec = name.startswith("v_cmpx")
        only_exec = writes_exec and inst.family != "gfx94x"

        def write(g: Group, value: Any, where: Any) -> None:
            mask = _within_exec(g, value)
            if where is not None:
                mask = mask & where
            if not only_exec and code != inst.null:
                g.set_mask(code, mask)
            if writes_exec:
                g.set_mask(EXEC, mask)

        return write, 0 if only_exec else scalar_bits(inst, code, self.wave_size)

    def _swap_destination(self, inst: Decoded, target: int) -> tuple[Write, int]:
        other = inst.fields["src0"] - VGPR

        def write(g: Group, value: Any, _where: Any) -> None:
            first, second = (part.copy() for part in value)
            np.copyto(g.v[target], first, where=g.exec)
            np.copyto(g.v[other], second, where=g.exec)

        return write, vgpr_bits(target) | vgpr_bits(other)

    def _value_destination(self, inst: Decoded, name: str, kind: str, target: int) -> tuple[Write, int]:
        if "dst_sel" in inst.fields and inst.fields["dst_sel"] != 6:
            return self._sdwa_destination(inst, kind, target)
        if kind in WORDS:
            view = WORDS[kind]

            def write_word(g: Group, value: Any, where: Any) -> None:
                register = getattr(g, view)[target]
                register[:] = value if where is None and g.full else _merged(g, register, value, where)

            return write_word, vgpr_bits(target)
        if kind in ("pk_f32", "pk_b32"):
            pair = slice(target, target + 2)

            def write_pair(g: Group, value: Any, where: Any) -> None:
                registers = (g.vf if kind == "pk_f32" else g.v)[pair]
                registers[:] = value if where is None and g.full else _merged(g, registers, value, where)

            return write_pair, vgpr_bits(target, 2)
        if kind in convert.WIDE:

            def write_wide(g: Group, value: Any, where: Any) -> None:
                low, high = convert.split64(convert.from_type(value, kind))
                active = g.exec if where is None else g.exec & where
                np.copyto(g.v[target], low, where=active)
                np.copyto(g.v[target + 1], high, where=active)

            return write_wide, vgpr_bits(target, 2)
        return self._narrow_destination(inst, name, kind, target)

    def _narrow_destination(self, inst: Decoded, name: str, kind: str, target: int) -> tuple[Write, int]:
        high = bool(inst.get("opsel") >> 3 & 1) and inst.form == "VOP3"
        byte = inst.get("opsel") >> 2 & 3 if kind in BYTES else 0
        half = None
        keep = kind in HALVES or kind in BYTES or kind == "f16_high"
        if kind in HALVES:
            keep = high or not zeroes_high_half(name, self.gfx)
            if inst.family != "gfx94x":
                if inst.form in SHORT:
                    high, target = bool(target >> 7), target & 0x7F
                half = int(high)
        elif high and kind not in BYTES:
            raise UnknownInstruction(inst.name, inst.address, f"op_sel on a result of type {kind}")

        def write(g: Group, value: Any, where: Any) -> None:
            old = g.v[target]
            bits = convert.from_type(value, kind, old if keep else None, high, byte=byte)
            old[:] = bits if where is None and g.full else _merged(g, old, bits, where)

        return write, vgpr_bits(target, 1, half)

    def _sdwa_destination(self, inst: Decoded, kind: str, target: int) -> tuple[Write, int]:
        selection, unused = inst.fields["dst_sel"], inst.fields["dst_unused"]

        def write(g: Group, value: Any, _where: Any) -> None:
            bits = convert.from_type(value, kind)
            np.copyto(g.v[target], convert.sdwa_merge(bits, selection, unused, g.v[target]), where=g.exec)

        return write, vgpr_bits(target)
