"""Vector instructions: operands of every encoding (literals, op_sel, DPP, SDWA, dual issue) around the pure functions.

`vector.VALU` says what an instruction computes; this module reads its sources with their modifiers, and writes its
result under EXEC. Everything that depends on the encoding is resolved here once, when the instruction is first met.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator import convert, lanes
from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.operands import VGPR, constant, scalar_bits, scalar_source
from rocm_sd.verify.emulator.results import BYTES, HALVES, SHORT, WORDS, ResultBinder
from rocm_sd.verify.emulator.vector import Vop, valu_for
from rocm_sd.verify.emulator.wave import VCC, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from rocm_sd.verify.emulator.decode import Decoded
    from rocm_sd.verify.emulator.wave import Group

    Array = NDArray[Any]
    Read = Callable[[Group], Any]
    Write = Callable[[Group, Any, Any], None]

__all__ = ["VectorBinder"]

_FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
_INTEGER_HALVES = frozenset({"u16", "i16", "b16"})
_BYTE_PAIRS = frozenset(f"{name}x2" for name in BYTES)


def _fixed(value: Any) -> Read:
    return lambda _g: value


@dataclass
class _Modifiers:
    """Bits of one source."""

    absolute: bool = False
    negate: bool = False
    op_sel: bool = False
    op_sel_hi: bool = True
    negate_hi: bool = False


@dataclass
class Bound:
    """compute(g) gives the value, lanes(g) those it holds for (None: all active); write(g, value, lanes) stores it.

    `run` does all of it, in the way that is fastest for the instruction.
    """

    compute: Callable[[Any], Any]
    lanes: Read | None
    write: Any
    touched: int
    run: Callable[[Any], None]


def _computing(function: Any, readers: list[Read]) -> Callable[[Any], Any]:
    if len(readers) == 1:
        (one,) = readers
        return lambda g: function(one(g))
    if len(readers) == 2:
        first, second = readers
        return lambda g: function(first(g), second(g))
    return lambda g: function(*[read(g) for read in readers])


def _finishing(compute: Callable[[Any], Any], omod: int, clamp: bool, result: str) -> Callable[[Any], Any]:
    """The output modifiers after it."""

    def finished(g: Group) -> Any:
        value = compute(g)
        number, *mask = value if "+" in result else (value,)
        number = convert.omod(number, omod)
        if clamp:
            number = convert.clamp(number)
        return (number, *mask) if mask else number

    return finished


def _running(compute: Callable[[Any], Any], spread: Read | None, write: Write) -> Callable[[Any], None]:
    if spread is None:
        return lambda g: write(g, compute(g), None)

    def run(g: Group) -> None:
        # The lanes are known only after the sources were read.
        value = compute(g)
        write(g, value, spread(g))

    return run


def _in_place(
    function: Any, readers: list[Read], view: str, target: int, otherwise: Callable[[Any], None]
) -> Callable[[Any], None]:
    """Results go straight to their register where every lane is active; numpy allows that it is a source, too."""

    def run(g: Group) -> None:
        if g.full:
            function(*[read(g) for read in readers], out=getattr(g, view)[target])
        else:
            otherwise(g)

    return run


class VectorBinder:
    """Binds the vector instructions of one code object."""

    def __init__(self, gfx: str, wave_size: int) -> None:
        self.wave_size = wave_size
        self._table = valu_for(gfx)
        self._results = ResultBinder(gfx, wave_size)

    def bind(self, inst: Decoded) -> tuple[Callable[[Group], None], int]:
        if inst.form == "VOPD":
            return self._bind_dual(inst)
        bound = self._bind_one(inst)
        return bound.run, bound.touched

    def _bind_dual(self, inst: Decoded) -> tuple[Callable[[Group], None], int]:
        """Both halves read before either writes."""
        names = inst.name.split(" :: ")
        target = inst.get("vdstx")
        other = inst.get("vdsty") << 1 | (target & 1 ^ 1)
        x, y = (
            self._bind_vop(inst, name, (inst.get(f"src{axis}0"), VGPR + inst.get(f"vsrc{axis}1")), register)
            for name, axis, register in zip(names, "xy", (target, other), strict=True)
        )
        # A plain move hands on the register itself, which the first half may be about to overwrite.
        overwrites = bool(vgpr_bits(target) & y.touched)

        def run(g: Group) -> None:
            first, second = x.compute(g), y.compute(g)
            if overwrites:
                second = np.array(second)
            x.write(g, first, None)
            y.write(g, second, None)

        return run, x.touched | y.touched

    def _bind_one(self, inst: Decoded) -> Bound:
        if inst.name.startswith("v_bitop3"):
            # The truth table stands where others have their modifiers.
            table = inst.get("neg") | inst.get("abs") << 3 | inst.get("omod") << 6
            inst = replace(inst, fields=inst.fields | {"bitop3": table, "neg": 0, "abs": 0, "omod": 0})
        codes: list[int] = []
        if "src0" in inst.fields:
            codes.append(inst.fields["src0"])
        if inst.form in ("VOP2", "VOPC"):
            codes.append(VGPR + inst.fields["vsrc1"])
        elif inst.form.startswith("VOP3"):
            codes += [inst.fields["src1"], inst.fields["src2"]]
        return self._bind_vop(inst, inst.name, tuple(codes), inst.get("vdst"))

    def _bind_vop(self, inst: Decoded, name: str, codes: tuple[int, ...], target: int) -> Bound:
        vop = self._table.get(name)
        if vop is None:
            raise UnknownInstruction(name, inst.address)
        readers, touched, spread = self._readers(inst, vop, codes, target)
        function = vop.function
        clamped = bool(inst.get("clmp"))
        result = vop.result.removesuffix("+mask")
        if clamped and result.removeprefix("pk_") not in _FLOATS and result != "f16_high":
            if vop.saturating is None:
                raise UnknownInstruction(inst.name, inst.address, "clamp")
            function, clamped = vop.saturating, False
        if vop.unfused is not None and self._product_is_exact(inst, codes):
            function = vop.unfused
        compute = _computing(function, readers)
        if inst.get("omod") or clamped:
            compute = _finishing(compute, inst.get("omod"), clamped, vop.result)
        write, bits = self._results.bind(inst, name, vop.result, target)
        run = _running(compute, spread, write)
        plain = spread is None and not inst.get("omod") and not clamped and inst.fields.get("dst_sel", 6) == 6
        if plain and vop.result in WORDS and isinstance(function, np.ufunc) and "src0_sel" not in inst.fields:
            run = _in_place(function, readers, WORDS[vop.result], target, run)
        return Bound(compute, spread, write, touched | bits, run)

    def _readers(
        self, inst: Decoded, vop: Vop, codes: tuple[int, ...], target: int
    ) -> tuple[list[Read], int, Read | None]:
        """One a source, the registers they touch, and for DPP the lanes whose result may be written."""
        readers: list[Read] = []
        touched = 0
        spread: Callable[[Group], Array] | None = None
        for place, kind in enumerate(vop.sources):
            last = place == len(vop.sources) - 1
            if kind in ("lane", "bitop3"):
                lane = np.arange(self.wave_size, dtype=np.uint32)
                readers.append(_fixed(lane if kind == "lane" else inst.fields["bitop3"]))
            elif kind == "mask":
                code = codes[place] if inst.form.startswith("VOP3") and place < len(codes) else VCC
                readers.append(self._mask_reader(inst, code))
                touched |= scalar_bits(inst, code, self.wave_size)
            elif vop.accumulates and last:
                read, bits = self._source(inst, VGPR + target, kind, _Modifiers(op_sel=bool(inst.get("opsel") & 8)))
                readers.append(read)
                touched |= bits
            else:
                code = codes[place] if place < len(codes) else 255
                if place == 0 and "vsrc0" in inst.fields:
                    read, bits, spread = self._permuted(inst, kind)
                elif place == 1 and "src1_sel" in inst.fields:
                    code = inst.fields["vsrc1"] + (0 if inst.get("s1") else VGPR)
                    read, bits = self._selected(inst, code, kind, "src1")
                else:
                    read, bits = self._source(inst, code, kind, self._modifiers(inst, place))
                readers.append(read)
                touched |= bits
        return readers, touched, spread

    def _product_is_exact(self, inst: Decoded, codes: tuple[int, ...]) -> bool:
        """Of a mixed multiply-add: float32 holds a product of two float16, or of anything and one, with no rounding."""

        def of_few_bits(place: int) -> bool:
            # 240 to 247 are powers of two up to 4, 128 is zero.
            return self._modifiers(inst, place).op_sel_hi or codes[place] in (128, *range(240, 248))

        one = any(codes[place] in (242, 243) for place in (0, 1))
        return one or (of_few_bits(0) and of_few_bits(1))

    def _modifiers(self, inst: Decoded, place: int) -> _Modifiers:
        def bit(name: str) -> bool:
            return bool(inst.get(name) >> place & 1)

        if inst.form == "VOP3P":
            high = inst.get("opsel_hi") | inst.get("opsel_hi2") << 2
            return _Modifiers(
                negate=bit("neg"), negate_hi=bit("neg_hi"), op_sel=bit("opsel"), op_sel_hi=bool(high >> place & 1)
            )
        dual = inst.form in SHORT and place < 2
        return _Modifiers(
            absolute=bit("abs") or (dual and bool(inst.get(f"src{place}_abs"))),
            negate=bit("neg") or (dual and bool(inst.get(f"src{place}_neg"))),
            op_sel=bit("opsel"),
        )

    def _mask_reader(self, inst: Decoded, code: int) -> Read:
        bits = 0 if code == inst.null else constant(code, "b64", None)
        if bits is None:
            return lambda g: g.mask(code)
        return _fixed(np.array([[bits >> lane & 1 for lane in range(self.wave_size)]], np.bool_))

    def _source(self, inst: Decoded, code: int, kind: str, mods: _Modifiers) -> tuple[Read, int]:
        """A reader of typed values of shape [W, L], [W, 1] or [1, 1]."""
        half = None
        if (kind in HALVES or kind in _BYTE_PAIRS) and inst.family != "gfx94x" and code >= VGPR:
            if inst.form in SHORT:
                # Long encodings name the half by op_sel; short ones have no room and take the top bit of the number.
                mods.op_sel = bool(code - VGPR >> 7 & 1)
                code &= ~0x80
            half = int(mods.op_sel)
        # A mixed-precision source that is read as float16 takes its inline constants in that format too.
        raw, bits = self._raw(inst, code, "f16" if kind == "mix" and mods.op_sel_hi else kind, half)
        plain = not (mods.absolute or mods.negate)
        if kind in ("pk_f32", "pk_b32") and code >= VGPR:
            return self._pair(code - VGPR, kind, mods), bits
        if kind in WORDS and plain:
            return self._word(inst, code, kind, raw), bits
        return self._typed(inst, raw, kind, mods, code), bits

    @staticmethod
    def _pair(number: int, kind: str, mods: _Modifiers) -> Read:
        """Two registers as [2, W, L], in the order that op_sel names."""
        rows = [number + mods.op_sel, number + mods.op_sel_hi]
        signs = np.array([mods.negate, mods.negate_hi], np.uint32)[:, None, None] << np.uint32(31)
        if signs.any():
            typed = np.float32 if kind == "pk_f32" else np.uint32
            return lambda g: (g.v[rows] ^ signs).view(typed)
        chosen = slice(number, number + 2) if rows == [number, number + 1] else rows
        if kind == "pk_f32":
            return lambda g: g.vf[chosen]
        return lambda g: g.v[chosen]

    def _word(self, inst: Decoded, code: int, kind: str, raw: Read) -> Read:
        """The fast path: registers seen as 32-bit values, with no conversion at all."""
        number = code - VGPR
        if code >= VGPR:
            return {
                "f32": lambda g: g.vf[number],
                "i32": lambda g: g.vi[number],
            }.get(kind, lambda g: g.v[number])
        value = constant(code, kind, inst.fields.get("literal"))
        if value is not None:
            return _fixed(convert.to_type(np.array([[value]], np.uint32), kind))
        if kind in ("u32", "b32"):
            return raw
        return lambda g: raw(g).view(np.float32 if kind == "f32" else np.int32)

    def _raw(self, inst: Decoded, code: int, kind: str, half: int | None) -> tuple[Read, int]:
        wide = kind in convert.WIDE
        if code >= VGPR:
            number = code - VGPR
            if wide:
                return lambda g: convert.join64(g.v[number], g.v[number + 1]), vgpr_bits(number, 2)
            return lambda g: g.v[number], vgpr_bits(number, 1, half)
        value = constant(code, kind, inst.fields.get("literal"))
        if value is not None:
            if 240 <= code <= 248 and kind.removeprefix("pk_") in _INTEGER_HALVES:
                # The manuals do not say which width of float an integer instruction of 16 bits sees.
                raise UnknownInstruction(inst.name, inst.address, "a float constant as a 16-bit integer")
            return _fixed(np.array([[value]], np.uint64 if wide else np.uint32)), 0
        read, bits = scalar_source(inst, code, 64 if wide else 32)
        return lambda g: read(g)[:, None], bits

    @staticmethod
    def _typed(inst: Decoded, raw: Read, kind: str, mods: _Modifiers, code: int) -> Read:
        if kind == "mix":
            # The upper negation bits of this encoding are the absolute-value bits here.
            return lambda g: convert.mix_source(
                raw(g), op_sel=mods.op_sel, op_sel_hi=mods.op_sel_hi, absolute=mods.negate_hi, negate=mods.negate
            )
        if kind in convert.PACKED:
            fixed = constant(code, kind, inst.fields.get("literal"))
            if kind in convert.WIDE and fixed and (mods.op_sel or mods.op_sel_hi):
                raise UnknownInstruction(inst.name, inst.address, "upper half of an inline constant")
            return lambda g: convert.packed_source(
                raw(g),
                kind,
                op_sel=mods.op_sel,
                op_sel_hi=mods.op_sel_hi,
                neg_lo=mods.negate,
                neg_hi=mods.negate_hi,
            )
        if kind.startswith("iu"):
            kind = convert.signed_or_unsigned(kind, mods.negate)
            return lambda g: convert.to_type(raw(g), kind)
        if kind not in _FLOATS and kind not in ("b32", "b16") and (mods.absolute or mods.negate):
            raise UnknownInstruction(inst.name, inst.address, f"sign modifiers on a source of type {kind}")
        if kind in BYTES:
            # Both bits of op_sel number the byte, the first being the higher one; SDWA has shifted it down already.
            select = inst.get("opsel") & 3 if inst.form == "VOP3" else 0
            byte = select >> 1 | (select & 1) << 1
            return lambda g: convert.to_type(raw(g), kind, byte=byte)
        high = mods.op_sel and (kind in HALVES or kind in _BYTE_PAIRS)
        if mods.op_sel and not high and kind not in WORDS:
            raise UnknownInstruction(inst.name, inst.address, f"op_sel on a source of type {kind}")
        return lambda g: convert.apply_modifiers(convert.to_type(raw(g), kind, high), mods.absolute, mods.negate)

    def _permuted(self, inst: Decoded, kind: str) -> tuple[Read, int, Read | None]:
        """Source 0 of a DPP or SDWA instruction, and for DPP the lanes whose result may be written."""
        if "src0_sel" in inst.fields:
            code = inst.fields["vsrc0"] + (0 if inst.get("s0") else VGPR)
            return (*self._selected(inst, code, kind, "src0"), None)
        mods = self._modifiers(inst, 0)
        number = inst.fields["vsrc0"]
        if kind in HALVES and inst.family != "gfx94x" and inst.form in SHORT:
            mods.op_sel, number = bool(number >> 7), number & 0x7F
        state: list[Any] = [None]

        def moved(g: Group) -> Array:
            if "dpp8" in inst.fields or "lane_sel_0" in inst.fields:
                selects = inst.fields.get("dpp8")
                if selects is None:
                    selects = sum(inst.fields[f"lane_sel_{i}"] << 3 * i for i in range(8))
                found = lanes.dpp8(g.v[number], selects, g.exec, fetch_inactive=bool(inst.get("fi")))
            else:
                found = lanes.dpp(
                    g.v[number],
                    inst.fields["dpp"],
                    g.exec,
                    row_mask=inst.fields["row_mask"],
                    bank_mask=inst.fields["bank_mask"],
                    bound_control=bool(inst.get("bc")),
                    fetch_inactive=bool(inst.get("fi")),
                )
            moved_values: Array
            moved_values, state[0] = found
            return moved_values

        read = self._typed(inst, moved, kind, mods, VGPR + number)
        return read, vgpr_bits(number), lambda _g: state[0]

    def _selected(self, inst: Decoded, code: int, kind: str, which: str) -> tuple[Read, int]:
        raw, bits = self._raw(inst, code, kind, None)
        selection, extend = inst.fields[f"{which}_sel"], bool(inst.get(f"{which}_sext"))
        mods = _Modifiers(bool(inst.get(f"{which}_abs")), bool(inst.get(f"{which}_neg")))
        return self._typed(inst, lambda g: convert.sdwa_select(raw(g), selection, extend), kind, mods, code), bits
