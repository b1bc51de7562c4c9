"""Machine code to instructions: one `Decoded` each, with the raw bit fields of its encoding.

The tables are those of the tinygrad wheel (pinned: the decoder is an internal module of it). What it lacks is
added here: buffer instructions of RDNA, DPP8, DPP on compares in the long encoding, and literals of such variants.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import MissingDependency, Unsupported
from rocm_sd.verify.emulator.errors import UnknownInstruction

if TYPE_CHECKING:
    from rocm_sd.arch import Arch

__all__ = ["Decoded", "Decoder", "family_of"]

_TABLES = {"rdna3": "rdna3", "rdna3.5": "rdna3", "rdna4": "rdna4", "cdna3": "cdna", "cdna4": "cdna"}
_FAMILIES = {"rdna3": "gfx11", "rdna4": "gfx12", "cdna": "gfx94x"}
_UNLISTED = {"rdna3": ("MUBUF",), "rdna4": ("VBUFFER",), "cdna": ()}
_LONGEST = 20
_MOST_DECODED = 1 << 16
_LITERAL, _DPP16, _DPP8, _DPP8_FI = 255, 250, 233, 234
_VARIANTS = frozenset({249, _DPP16, _LITERAL})  # 249: SDWA on CDNA


def family_of(arch: Arch) -> str:
    """gfx11, gfx12 or gfx94x: what decides encodings, register layouts and wait counters."""
    table = _TABLES.get(arch.family)
    if table is None:
        raise Unsupported(
            "The emulator",
            f"{arch.name} ({arch.family})",
            hint="Use a kernel compiled for gfx11xx, gfx12xx, gfx942 or gfx950.",
        )
    return _FAMILIES[table]


@dataclass(frozen=True)
class Decoded:
    """`name` is the mnemonic in lower case with no encoding suffix; `form` the encoding; `fields` are raw numbers."""

    family: str
    name: str
    form: str
    address: int
    size: int
    raw: int
    fields: dict[str, int] = field(repr=False)

    @property
    def null(self) -> int | None:
        """The row of the scalar file that reads as zero and swallows writes; CDNA has M0 there instead."""
        return None if self.family == "gfx94x" else 124

    def get(self, name: str) -> int:
        return self.fields.get(name, 0)


@lru_cache(maxsize=1)
def _tinygrad() -> Any:
    try:
        return importlib.import_module("tinygrad.renderer.amd")
    except ImportError as error:
        raise MissingDependency("tinygrad", "verify") from error


class Decoder:
    """Decodes the text of one code object."""

    def __init__(self, arch: Arch, text: bytes, text_address: int) -> None:
        self.family = family_of(arch)
        self.table = _TABLES[arch.family]
        self.text, self.text_address = text, text_address
        _tinygrad()

    def at(self, offset: int) -> Decoded:
        address = self.text_address + offset
        if not 0 <= offset < len(self.text):
            raise UnknownInstruction("an instruction outside of the machine code", address)
        data = self.text[offset : offset + _LONGEST].ljust(_LONGEST, b"\0")
        try:
            name, form, size, raw, fields = _decode(self.table, data)
        except (ValueError, KeyError) as error:
            word = int.from_bytes(data[:4], "little")
            raise UnknownInstruction(f"the encoding {word:#010x}", address, str(error)) from error
        return Decoded(self.family, name, form, address, size, raw, fields)


@lru_cache(maxsize=8)
def _unlisted(table: str) -> list[Any]:
    module = importlib.import_module(f"tinygrad.runtime.autogen.amd.{table}.ins")
    return [getattr(module, name) for name in _UNLISTED[table]]


# No instruction is the beginning of a longer one, so what follows it does not matter: kernels share most of theirs.
_decoded: dict[tuple[str, bytes], tuple[str, str, int, int, dict[str, int]]] = {}


def _decode(table: str, data: bytes) -> tuple[str, str, int, int, dict[str, int]]:
    for size in range(4, _LONGEST + 1, 4):
        found = _decoded.get((table, data[:size]))
        if found is not None:
            return found
    bits = int.from_bytes(data, "little")
    form, name = _met(table, bits) or _search(table, data)
    fields = {key: bits >> field.lo & field.mask for key, field in form._fields if key != "encoding"}
    raw = bits & (1 << 8 * form._size()) - 1  # noqa: SLF001 - the decoder offers no raw fields
    kind = form.__name__
    size = _complete(kind, fields, data, form._size())  # noqa: SLF001
    if len(_decoded) >= _MOST_DECODED:
        _decoded.clear()
    return _decoded.setdefault((table, data[:size]), (name, kind.split("_")[0], size, raw, fields))


# The wheel's tables are searched one class after another, at 0.1 ms an instruction: as long as executing it for a whole
# batch. Classes met before are known by the bits that tell them: the fixed ones and the opcode.
_forms: dict[str, dict[Any, dict[int, str]]] = {table: {} for table in _FAMILIES}


def _met(table: str, bits: int) -> tuple[Any, str] | None:
    for form, names in _forms[table].items():
        mask, sources = _telling(form)
        name = names.get(bits & mask)
        # A literal, DPP or SDWA that a source names makes it another class.
        if name is not None and not any((bits >> place & most) + first in _VARIANTS for place, most, first in sources):
            return form, name
    return None


@lru_cache(maxsize=256)
def _telling(form: Any) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The bits that tell a class, and where its sources stand: place, largest value, code of the value 0."""
    dsl = importlib.import_module("tinygrad.renderer.amd.dsl")
    fields = [field for _, field in form._fields]
    mask = sum(field.mask << field.lo for field in fields if isinstance(field, (dsl.FixedBitField, dsl.EnumBitField)))
    sources = [field for field in fields if isinstance(field, dsl.SrcField)]
    return mask, tuple((field.lo, field.mask, field._valid_range[0]) for field in sources)  # noqa: SLF001


def _search(table: str, data: bytes) -> tuple[Any, str]:
    amd = _tinygrad()
    unlisted = next((form for form in _unlisted(table) if amd._matches(data, form)), None)  # noqa: SLF001
    inst = amd.decode_inst(data, table) if unlisted is None else unlisted.from_bytes(data)
    form: Any = type(inst)
    name = _name(inst)
    if not any(variant in form.__name__ for variant in ("_LIT", "_DPP", "_SDWA")):
        _forms[table].setdefault(form, {})[inst._raw & _telling(form)[0]] = name  # noqa: SLF001
    return form, name


def _name(inst: Any) -> str:
    if hasattr(inst, "opx"):
        return f"{_plain(inst.opx.name)} :: {_plain(inst.opy.name)}"
    return _plain(inst.op.name)


def _plain(name: str) -> str:
    short = name.lower().replace("v_dual_", "v_")
    for suffix in ("_e32", "_e64"):
        short = short.removesuffix(suffix)
    return short


def _complete(form: str, fields: dict[str, int], data: bytes, size: int) -> int:
    """Add the dword that follows the base encoding where the tables have no class for that variant."""
    sources = [fields[name] for name in ("src0", "src1", "src2", "ssrc0", "ssrc1", "srcx0", "srcy0") if name in fields]
    word = int.from_bytes(data[size : size + 4], "little")
    first = fields.get("src0")
    vector = form.startswith("VOP") and not form.startswith("VOPD")
    if vector and first == _DPP16 and "vsrc0" not in fields:
        fields.update(
            vsrc0=word & 0xFF,
            dpp=word >> 8 & 0x1FF,
            fi=word >> 18 & 1,
            bc=word >> 19 & 1,
            src0_neg=word >> 20 & 1,
            src0_abs=word >> 21 & 1,
            src1_neg=word >> 22 & 1,
            src1_abs=word >> 23 & 1,
            bank_mask=word >> 24 & 15,
            row_mask=word >> 28,
        )
        return size + 4
    if vector and first in (_DPP8, _DPP8_FI) and "vsrc0" not in fields:
        fields.update(vsrc0=word & 0xFF, dpp8=word >> 8, fi=int(first == _DPP8_FI))
        return size + 4
    if _LITERAL in sources and "literal" not in fields and "vsrc0" not in fields:
        fields["literal"] = word
        return size + 4
    return size
