"""gfx1201 against AMD's own words: the RDNA4 pseudocode in tinygrad's tables, evaluated and compared bit for bit.

`VECTOR` and `SCALAR` are what rung 4 executes of every op for gfx1201, without instructions that move data between
lanes, memory, branches, waits and matrices, for which other tests stand: their pseudocode says how and not what.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from plain import is_nan, ulps_apart

pytest.importorskip("triton", reason="its wheel carries LLVM's AMD assembler")
pytest.importorskip("tinygrad", reason="it has AMD's pseudocode")

from one_instruction import execute
from pseudocode import Pseudocode, Value
from tinygrad.runtime.autogen.amd.rdna4.str_pcode import PCODE

if TYPE_CHECKING:
    from rocm_sd.verify.emulator.wave import Group

GFX = "gfx1201"
VECTOR = [
    "v_add3_u32", "v_add_co_ci_u32", "v_add_co_u32", "v_add_f16", "v_add_f32", "v_add_lshl_u32", "v_add_nc_u16",
    "v_add_nc_u32", "v_alignbit_b32", "v_and_b16", "v_and_b32", "v_and_or_b32", "v_ashrrev_i16", "v_ashrrev_i32",
    "v_bfe_i32", "v_bfe_u32", "v_bfi_b32", "v_bfrev_b32", "v_cmp_eq_u32", "v_cmp_ge_i32", "v_cmp_gt_f32",
    "v_cmp_gt_i32", "v_cmp_gt_i64", "v_cmp_gt_u16", "v_cmp_gt_u32", "v_cmp_le_i32", "v_cmp_le_u32", "v_cmp_lt_i32",
    "v_cmp_lt_i64", "v_cmp_lt_u32", "v_cmp_ne_u32", "v_cmp_ngt_f32", "v_cmp_o_f32", "v_cmp_u_f32", "v_cmpx_eq_u32",
    "v_cmpx_gt_i32", "v_cmpx_gt_u32", "v_cmpx_lt_i32", "v_cmpx_lt_u32", "v_cmpx_ne_u32", "v_cndmask_b16",
    "v_cndmask_b32", "v_cvt_f16_f32", "v_cvt_f32_f16", "v_cvt_f32_i32", "v_cvt_f32_u32", "v_div_fixup_f32",
    "v_div_fmas_f32", "v_div_scale_f32", "v_exp_f32", "v_fma_f32", "v_fma_mix_f32", "v_fma_mixhi_f16",
    "v_fma_mixlo_f16", "v_fmaak_f32", "v_fmac_f32", "v_fmamk_f32", "v_ldexp_f32", "v_lshl_add_u32", "v_lshl_or_b32",
    "v_lshlrev_b16", "v_lshlrev_b32", "v_lshlrev_b64", "v_lshrrev_b16", "v_lshrrev_b32", "v_mad_co_i64_i32",
    "v_mad_co_u64_u32", "v_mad_i32_i24", "v_mad_u32_u24", "v_max3_num_f32", "v_max_i32", "v_max_num_f32",
    "v_med3_i32", "v_min_i32", "v_min_num_f32", "v_minmax_i32", "v_mov_b16", "v_mov_b32", "v_mul_f32", "v_mul_hi_i32",
    "v_mul_hi_u32", "v_mul_i32_i24", "v_mul_lo_u16", "v_mul_lo_u32", "v_mul_u32_u24", "v_not_b32", "v_or3_b32",
    "v_or_b16", "v_or_b32", "v_pack_b32_f16", "v_perm_b32", "v_pk_add_f16", "v_rcp_f32", "v_rcp_iflag_f32",
    "v_rsq_f32", "v_sqrt_f32", "v_sub_f32", "v_sub_nc_u16", "v_sub_nc_u32", "v_subrev_f32", "v_subrev_nc_u32",
    "v_xad_u32", "v_xnor_b32", "v_xor3_b32", "v_xor_b32",
]  # fmt: skip
SCALAR = [
    "s_abs_i32", "s_add_co_ci_u32", "s_add_co_i32", "s_add_f32", "s_add_nc_u64", "s_addk_co_i32", "s_and_b32",
    "s_and_not1_b32", "s_and_saveexec_b32", "s_ashr_i32", "s_bfe_i32", "s_bfe_u32", "s_bitcmp0_b32", "s_bitcmp1_b32",
    "s_brev_b32", "s_cmp_eq_u32", "s_cmp_ge_i32", "s_cmp_ge_u32", "s_cmp_gt_i32", "s_cmp_gt_u32", "s_cmp_le_i32",
    "s_cmp_lg_f16", "s_cmp_lg_u32", "s_cmp_lt_f32", "s_cmp_lt_i32", "s_cmp_lt_u32", "s_cselect_b32", "s_cvt_f32_f16",
    "s_cvt_f32_i32", "s_cvt_f32_u32", "s_cvt_u32_f32", "s_lshl1_add_u32", "s_lshl2_add_u32", "s_lshl3_add_u32",
    "s_lshl4_add_u32", "s_lshl_b32", "s_lshl_b64", "s_lshr_b32", "s_max_i32", "s_min_i32", "s_mov_b32", "s_mov_b64",
    "s_movk_i32", "s_mul_f32", "s_mul_hi_i32", "s_mul_hi_u32", "s_mul_i32", "s_mul_u64", "s_mulk_i32", "s_not_b32",
    "s_or_b32", "s_or_saveexec_b32", "s_sext_i32_i16", "s_sext_i32_i8", "s_sub_co_i32", "s_xor_b32", "v_s_exp_f32",
    "v_s_rcp_f32",
]  # fmt: skip
# The guide states these exactly; hardware and emulator are within one unit in the last place and know no subnormals.
APPROXIMATE = frozenset({"v_exp_f32", "v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_s_exp_f32", "v_s_rcp_f32",
                         "v_sqrt_f32"})  # fmt: skip
TEXTS: dict[str, str] = {}
for _op, _text in PCODE.items():
    TEXTS.setdefault(re.sub("_e(32|64)$", "", _op.name.lower()), _text)
PSEUDOCODE = Pseudocode(TEXTS)

SAMPLES = {"v": 192, "s": 96}
# Products halfway between two float32, and an addend too small for float64 to keep that decides: rounding twice fails.
HALFWAY = [(0x3F800800, 0x3F800800, 0x17800000), (0x3F800800, 0x3F801800, 0x97800000)]
LITERAL = 0x3FA3D70A  # 1.28
SHORT = 0x9ABC
IMMEDIATE = frozenset({"s_addk_co_i32", "s_mulk_i32", "s_movk_i32"})  # they take SHORT
MASKS = {"VCC": 106, "EXEC": 126}

EDGES_32 = [0, 1, 2, 15, 31, 32, 33, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFE,
            0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]  # fmt: skip
FLOATS_32 = [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x80800000, 0x00FFFFFF, 0x3F800000, 0xBF800000,
             0x3F7FFFFF, 0x3F800001, 0x4B000000, 0x4B7FFFFF, 0x4F000000, 0x4F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
             0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFA00000, 0x477FE000, 0x477FF000, 0x33000000,
             0x33000001, 0x387FC000, 0x38800000, 0xC2FC0000, 0x42FE0000]  # fmt: skip
FLOATS_16 = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x3C01, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01,
             0x7C01, 0xFD00]  # fmt: skip


def operands(name: str, count: int) -> np.ndarray:
    """[source, sample] of 64 bits: edges, numbers of moderate size, any bits; now and then two sources are alike."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    text = TEXTS[name]
    edges = [EDGES_32]
    if "f32" in text:
        edges = [FLOATS_32, FLOATS_32, EDGES_32]
    if "f16" in text:
        edges = [FLOATS_16, FLOATS_32]
    found = np.zeros((3, count), np.uint64)
    for source in range(3):
        pool = [rng.choice(each, count) for each in edges]
        pool.append(rng.integers(0, 1 << 32, count))
        pool.append((rng.normal(size=count) * 2.0 ** rng.integers(-8, 8, count)).astype(np.float32).view(np.uint32))
        pool.append(rng.normal(size=count).astype(np.float16).view(np.uint16))
        low = np.choose(rng.integers(0, len(pool), count), pool).astype(np.uint64)
        # Above a 16-bit number stands another one, which must not matter or must be used.
        low |= np.where(low < 1 << 16, rng.choice([0, 0x3C01, 0xFFFF], count), 0).astype(np.uint64) << np.uint64(16)
        high = rng.choice(EDGES_32, count).astype(np.uint64)
        found[source] = low | high << np.uint64(32)
    again = rng.random(count)
    found[1] = np.where(again < 0.1, found[0], found[1])
    found[2] = np.where(again > 0.9, found[0], found[2])
    found[:, :2] = np.array(HALFWAY).T
    return found


def width_of(name: str, which: str) -> int:
    """Bits of a source or of the destination, by the types that the pseudocode reads it as."""
    if which == "D0" and name.startswith(("v_cmp", "s_cmp")):
        return 32
    sizes = {int(size) for size in re.findall(rf"\b{which}(?:\[[^\]]*\])?\.[a-z](\d+)", TEXTS[name])}
    if re.search(r"[bui]16$", name) and name.startswith("v_"):
        return 16
    if re.search(rf"\b{which}\[", TEXTS[name]):
        return 32
    return 64 if 64 in sizes else 16 if sizes == {16} and name.startswith("v_") else 32


def register(file: str, number: int, width: int) -> str:
    if width == 64:
        return f"{file}[{number}:{number + 1}]"
    return f"{file}{number}.l" if width == 16 else f"{file}{number}"


def written_out(name: str) -> str:
    """The instruction with sources in registers 0, 2 and 4 and its destination in 6."""
    text = TEXTS[name]
    file = "s" if name in SCALAR else "v"
    uses = [place for place in range(3) if re.search(rf"\bS{place}\b", text) or "S[i]" in text]
    sources = [register(file, 2 * place, width_of(name, f"S{place}")) for place in uses]
    target = register(file, 6, width_of(name, "D0"))
    if name.startswith(("s_cmp", "s_bitcmp")):
        return f"{name} {', '.join(sources)}"
    if name.startswith("v_cmpx"):
        return f"{name}_e64 {', '.join(sources)}"
    if name.startswith("v_cmp"):
        return f"{name}_e64 s6, {', '.join(sources)}"
    if name in IMMEDIATE:
        return f"{name} s6, {SHORT:#x}"
    if name in ("v_add_co_u32", "v_add_co_ci_u32", "v_div_scale_f32"):
        target += ", vcc_lo"
    if name.startswith("v_mad_co"):
        target += ", s6"
    if name in ("v_add_co_ci_u32", "v_cndmask_b32", "v_cndmask_b16"):
        sources.append("vcc_lo")
    if "fmaak" in name:
        sources.append(f"{LITERAL:#x}")
    if "fmamk" in name:
        sources.insert(1, f"{LITERAL:#x}")
    return f"{name} {target}, {', '.join(sources)}"


def prepared(name: str, values: np.ndarray) -> Group:
    from rocm_sd.verify.emulator.wave import EXEC, VCC, Group

    rng = np.random.default_rng(1)
    scalar = name in SCALAR
    waves, lanes = (values.shape[1], 32) if scalar else (values.shape[1] // 32, 32)
    v = rng.integers(0, 1 << 32, (16, waves, lanes), dtype=np.uint32)
    s = rng.integers(0, 1 << 32, (128, waves), dtype=np.uint32)
    s[EXEC] = rng.integers(0, 1 << 32, waves) if scalar else 0xFFFFFFFF
    s[EXEC + 1] = 0
    s[VCC + 1] = 0
    for source in range(3):
        words = values[source].view(np.uint32).reshape(-1, 2).T
        for half in range(2):
            if scalar:
                s[2 * source + half] = words[half]
            else:
                v[2 * source + half] = words[half].reshape(waves, lanes)
    return Group(v, s, rng.random(waves) < 0.5, np.arange(waves), 1, 0)


def meant(name: str, state: dict[str, Any]) -> bool:
    """Whether the emulator follows the text: `div_scale` and `div_fmas` of vector_float.py say where not, and why."""
    if name == "v_div_fmas_f32":
        return not state["VCC"]
    if name != "v_div_scale_f32":
        return True
    below, above = (state[source].bits >> 23 & 0xFF for source in ("S1", "S2"))
    return below < 253 and above - below > -125


def at_first(name: str, group: Group, values: np.ndarray) -> list[dict[str, Any]]:
    """What the pseudocode finds, for each sample; one lane's bit stands for masks that have a bit for each."""
    scalar, short = name in SCALAR, name in IMMEDIATE
    low, high = destination(name, group)
    masks = {what: mask_of(name, group, row) for what, row in MASKS.items()}
    found = []
    for sample in range(values.shape[1]):
        sources = [int(values[source, sample]) for source in range(3)]
        before = int(low[sample]) | int(high[sample]) << 32
        if name == "v_div_scale_f32":
            # Where the guide says nothing of the result it is the first source, as LLVM's own expansion relies on.
            before = before >> 32 << 32 | sources[0] & 0xFFFFFFFF
        state: dict[str, Any] = {f"S{source}": Value(bits, 64, "B") for source, bits in enumerate(sources)}
        state |= {what: Value(int(mask[sample]), 64, "B") for what, mask in masks.items()}
        state |= {"S": [Value(bits & 0xFFFFFFFF, 32, "B") for bits in sources], "SIMM32": Value(LITERAL, 32, "B")}
        state |= {"D0": Value(0 if name.startswith("v_cmp") else before, 64, "B"), "D1": Value(0, 64, "B")}
        state |= {"S0": Value(SHORT, 16, "B")} if short else {}
        state |= {"SCC": Value(int(group.scc[sample]), 1, "U")} if scalar else {"laneId": Value(0, 32, "U")}
        found.append(state)
    return found


def destination(name: str, group: Group) -> tuple[np.ndarray, np.ndarray]:
    rows = group.s[6:8] if name in SCALAR else group.v[6:8].reshape(2, -1)
    return rows[0].copy(), rows[1].copy()


def mask_of(name: str, group: Group, row: int) -> np.ndarray:
    """A row of the scalar file: the whole of it for each wave, or a bit for each lane."""
    if name in SCALAR:
        return group.s[row].copy()
    return np.unpackbits(group.s[row].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little").reshape(-1)


def compared(name: str, instruction: str, extra: dict[str, Value]) -> None:
    values = operands(name, SAMPLES["s" if name in SCALAR else "v"])
    group = prepared(name, values)
    before = at_first(name, group, values)
    execute(GFX, instruction, group)
    low, high = destination(name, group)
    # Where a mask is the result, or the second one, it is in s6.
    masks = {what: mask_of(name, group, row) for what, row in MASKS.items()}
    if name.startswith(("v_cmp_", "v_mad_co")):
        masks["D0" if name.startswith("v_cmp_") else "D1"] = mask_of(name, group, 6)
    if name in SCALAR:
        masks["SCC"] = group.scc
    looked_at = 0
    for sample, state in enumerate(before):
        if not meant(name, state):
            continue
        looked_at += 1
        expected = PSEUDOCODE.run(TEXTS[name], state | extra)
        where = f"{instruction} of {[f'{int(each):#x}' for each in values[:, sample]]}"
        for what, mask in masks.items():
            assert int(mask[sample]) == expected[what].bits & 0xFFFFFFFF, f"{where}: {what}"
        if not name.startswith("v_cmp"):
            found, wanted = int(low[sample]) | int(high[sample]) << 32, expected["D0"].bits
            free = expected.get("free D0", 0) | (0xFFFFFFFF if name.startswith("v_pk_") else 0)
            right = same(name, wanted, found, free, int(values[0, sample]))
            assert right, f"{where}: {found:#x} is not {wanted:#x}"
    assert looked_at > len(before) // 4


def same(name: str, expected: int, found: int, free: int, source: int) -> bool:
    if name in APPROXIMATE:
        low = expected & 0xFFFFFFFF, found & 0xFFFFFFFF
        subnormal = any(0 < each & 0x7FFFFFFF < 0x800000 for each in (*low, source & 0xFFFFFFFF))
        return subnormal or ulps_apart(*low, "f32") <= 1
    if expected == found:
        return True
    kinds = [("f32", 0, 32)] if free & 0xFFFFFFFF == 0xFFFFFFFF and "f16" not in name else []
    kinds += [("f16", place, 16) for place in (0, 16) if "f16" in name and free >> place & 0xFFFF == 0xFFFF]
    for kind, place, width in kinds:
        mask = (1 << width) - 1
        if all(is_nan(each >> place & mask, kind) for each in (expected, found)):
            expected, found = expected & ~(mask << place), found & ~(mask << place)
    return expected == found


@pytest.mark.parametrize("name", [*VECTOR, *SCALAR])
def test_the_emulator_does_what_the_guide_says(name):
    if name.startswith("v_fma_mix"):
        for low, high in ((0, 0), (0, 7), (7, 7), (5, 6), (2, 3)):
            flags = [",".join(str(bits >> place & 1) for place in range(3)) for bits in (low, high)]
            extra = {"OPSEL": Value(low, 3, "B"), "OPSEL_HI": Value(high, 3, "B")}
            compared(name, f"{written_out(name)} op_sel:[{flags[0]}] op_sel_hi:[{flags[1]}]", extra)
    else:
        compared(name, written_out(name), {})
