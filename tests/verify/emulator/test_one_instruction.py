"""One instruction at a time: assembled by LLVM, decoded and executed by the engine, compared with plain Python.

Encodings, operands, modifiers and semantics are checked together, on random registers, with some lanes inactive and
with all of them active.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from one_instruction import execute
from plain import decode, encode, fma, signed, ulps_apart

from rocm_sd import arch
from rocm_sd.verify.emulator.matrix import MATRIX, MatrixModifiers

pytest.importorskip("triton", reason="its wheel carries LLVM's AMD assembler")
pytest.importorskip("tinygrad", reason="AMD code is decoded by tinygrad")

WAVES = 3
GFX11, GFX12, GFX9 = "gfx1100", "gfx1201", "gfx942"
RDNA, EVERY = (GFX11, GFX12), (GFX11, GFX12, GFX9)
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


# --- the machine ------------------------------------------------------------------------------------------------------


def registers(gfx: str, seed: int):
    """v0-v9 and s0-s9 hold moderate float32, v10-v19 pairs of float16, v20-v29 and s20-s29 any bits."""
    from rocm_sd.verify.emulator.wave import EXEC, VCC, Group

    rng = np.random.default_rng(seed)
    lanes = arch.get(gfx).wave_size
    v = rng.integers(0, 1 << 32, (512, WAVES, lanes), dtype=np.uint32)
    s = rng.integers(0, 1 << 32, (128, WAVES), dtype=np.uint32)
    v[0:10] = (rng.normal(size=(10, WAVES, lanes)) * 4).astype(np.float32).view(np.uint32)
    s[0:10] = rng.normal(size=(10, WAVES)).astype(np.float32).view(np.uint32)
    halves = (rng.normal(size=(10, WAVES, lanes, 2)) * 4).astype(np.float16)
    v[10:20] = halves.view(np.uint32)[..., 0]
    s[VCC : VCC + 2] = rng.integers(0, 1 << 32, (2, WAVES), dtype=np.uint32)
    # One wave with every lane, one with some, one with a single lane.
    s[EXEC : EXEC + 2] = np.array([[MASK32, 0x0F3CA596, 0x00010000], [MASK32, 0x80000001, 0]], dtype=np.uint32)
    return Group(v, s, np.zeros(WAVES, dtype=bool), np.arange(WAVES), 1, 0)


@dataclass
class Lane:
    """What one lane of one wave could see before the instruction."""

    all_v: np.ndarray
    all_s: np.ndarray
    wave: int
    number: int

    def v(self, n: int, lane: int | None = None) -> int:
        return int(self.all_v[n, self.wave, self.number if lane is None else lane])

    def s(self, n: int) -> int:
        return int(self.all_s[n, self.wave])

    def v64(self, n: int) -> int:
        return self.v(n) | self.v(n + 1) << 32

    def bit(self, row: int, lane: int | None = None) -> int:
        n = self.number if lane is None else lane
        return int(self.all_s[row + n // 32, self.wave]) >> n % 32 & 1

    @property
    def vcc(self) -> int:
        return self.bit(106)

    def active(self, lane: int) -> bool:
        return bool(self.bit(126, lane))


def f32(value) -> int:
    return encode(value, "f32")


def neg(bits: int) -> int:
    return bits ^ 1 << 31


def mag(bits: int) -> int:
    return bits & 0x7FFFFFFF


def add32(a: int, b: int) -> int:
    return fma(a, f32(1.0), b, "f32")


def mul32(a: int, b: int) -> int:
    return fma(a, b, (a ^ b) & 1 << 31, "f32")


def add16(a: int, b: int) -> int:
    return fma(a, 0x3C00, b, "f16")


def mul16(a: int, b: int) -> int:
    return fma(a, b, (a ^ b) & 0x8000, "f16")


def lo(bits: int) -> int:
    return bits & 0xFFFF


def hi(bits: int) -> int:
    return bits >> 16


def pack(low: int, high: int) -> int:
    return low & 0xFFFF | (high & 0xFFFF) << 16


def clamp32(bits: int) -> int:
    return f32(max(0.0, min(1.0, decode(bits, "f32"))))


def scaled(bits: int, factor: float) -> int:
    return f32(decode(bits, "f32") * factor)


# --- results in one vector register: v0 (or v11 for halves) -----------------------------------------------------------

K = 0x40490FDB  # pi
VALUES: list[tuple[tuple[str, ...], str, int, object]] = [
    (EVERY, "v_add_f32_e32 v0, v1, v2", 0, lambda x: add32(x.v(1), x.v(2))),
    (EVERY, "v_add_f32_e32 v0, s3, v2", 0, lambda x: add32(x.s(3), x.v(2))),
    (EVERY, "v_add_f32_e32 v0, 0x40490fdb, v2", 0, lambda x: add32(K, x.v(2))),
    (EVERY, "v_add_f32_e32 v0, -4.0, v2", 0, lambda x: add32(f32(-4.0), x.v(2))),
    (EVERY, "v_mul_f32_e32 v0, 0.15915494, v2", 0, lambda x: mul32(0x3E22F983, x.v(2))),
    (EVERY, "v_add_f32_e64 v0, -v1, |v2|", 0, lambda x: add32(neg(x.v(1)), mag(x.v(2)))),
    (EVERY, "v_mul_f32_e64 v0, -|v1|, v2 clamp", 0, lambda x: clamp32(mul32(mag(x.v(1)) | 1 << 31, x.v(2)))),
    (EVERY, "v_mul_f32_e64 v0, v1, v2 mul:2", 0, lambda x: scaled(mul32(x.v(1), x.v(2)), 2)),
    (EVERY, "v_mul_f32_e64 v0, v1, v2 mul:4", 0, lambda x: scaled(mul32(x.v(1), x.v(2)), 4)),
    (EVERY, "v_mul_f32_e64 v0, v1, v2 div:2", 0, lambda x: scaled(mul32(x.v(1), x.v(2)), 0.5)),
    (EVERY, "v_subrev_f32_e32 v0, v1, v2", 0, lambda x: add32(x.v(2), neg(x.v(1)))),
    (EVERY, "v_fma_f32 v0, v1, -v2, v3", 0, lambda x: fma(x.v(1), neg(x.v(2)), x.v(3), "f32")),
    (EVERY, "v_fma_f32 v0, v1, s4, 1.0", 0, lambda x: fma(x.v(1), x.s(4), f32(1.0), "f32")),
    (EVERY, "v_fmac_f32_e32 v0, v1, v2", 0, lambda x: fma(x.v(1), x.v(2), x.v(0), "f32")),
    (EVERY, "v_fmac_f32_e64 v0, -v1, v2", 0, lambda x: fma(neg(x.v(1)), x.v(2), x.v(0), "f32")),
    (EVERY, "v_fmaak_f32 v0, v1, v2, 0x40490fdb", 0, lambda x: fma(x.v(1), x.v(2), K, "f32")),
    (EVERY, "v_fmamk_f32 v0, v1, 0x40490fdb, v2", 0, lambda x: fma(x.v(1), K, x.v(2), "f32")),
    (EVERY, "v_lshl_add_u32 v0, v20, 3, v21", 0, lambda x: (x.v(20) << 3) + x.v(21)),
    (EVERY, "v_add_lshl_u32 v0, v20, v21, v22", 0, lambda x: (x.v(20) + x.v(21)) << (x.v(22) & 31)),
    (EVERY, "v_and_or_b32 v0, v20, s21, v22", 0, lambda x: x.v(20) & x.s(21) | x.v(22)),
    (EVERY, "v_add3_u32 v0, v20, v21, -7", 0, lambda x: x.v(20) + x.v(21) - 7),
    (EVERY, "v_perm_b32 v0, v20, v21, s22", 0, lambda x: perm(x.v(20), x.v(21), x.s(22))),
    (EVERY, "v_bfe_i32 v0, v20, 5, 9", 0, lambda x: signed(x.v(20) >> 5, 9)),
    (EVERY, "v_alignbit_b32 v0, v20, v21, 7", 0, lambda x: (x.v(20) << 32 | x.v(21)) >> 7),
    (EVERY, "v_mad_u32_u24 v0, v20, v21, v22", 0, lambda x: (x.v(20) & 0xFFFFFF) * (x.v(21) & 0xFFFFFF) + x.v(22)),
    (EVERY, "v_mul_hi_i32 v0, v20, v21", 0, lambda x: signed(x.v(20), 32) * signed(x.v(21), 32) >> 32),
    (EVERY, "v_ashrrev_i32_e32 v0, 3, v20", 0, lambda x: signed(x.v(20), 32) >> 3),
    (EVERY, "v_cndmask_b32_e32 v0, v1, v2, vcc{lo}", 0, lambda x: x.v(2) if x.vcc else x.v(1)),
    (EVERY, "v_cndmask_b32_e64 v0, -v1, |v2|, s[20:21]", 0, lambda x: mag(x.v(2)) if x.bit(20) else neg(x.v(1))),
    (EVERY, "v_cvt_i32_f32_e32 v0, v1", 0, lambda x: int(decode(x.v(1), "f32"))),
    (EVERY, "v_cvt_f32_u32_e32 v0, v20", 0, lambda x: f32(Fraction(x.v(20)))),
    ((GFX9,), "v_cvt_f32_f16_e32 v0, v10", 0, lambda x: f32(decode(lo(x.v(10)), "f16"))),
    (RDNA, "v_cvt_f32_f16_e32 v0, v10.l", 0, lambda x: f32(decode(lo(x.v(10)), "f16"))),
    (RDNA, "v_cvt_f32_f16_e32 v0, v10.h", 0, lambda x: f32(decode(hi(x.v(10)), "f16"))),
    (EVERY, "v_cvt_f32_ubyte2_e32 v0, v20", 0, lambda x: f32(Fraction(x.v(20) >> 16 & 255))),
    (EVERY, "v_ldexp_f32 v0, v1, -5", 0, lambda x: scaled(x.v(1), 2.0**-5)),
    (
        EVERY,
        "v_pk_add_f16 v0, v10, v11",
        0,
        lambda x: pack(add16(lo(x.v(10)), lo(x.v(11))), add16(hi(x.v(10)), hi(x.v(11)))),
    ),
    (
        EVERY,
        "v_pk_mul_f16 v0, v10, v11 op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0]",
        0,
        lambda x: pack(mul16(hi(x.v(10)) ^ 0x8000, lo(x.v(11))), mul16(lo(x.v(10)), hi(x.v(11)))),
    ),
    (
        EVERY,
        "v_pk_fma_f16 v0, v10, v11, v12 neg_hi:[0,0,1]",
        0,
        lambda x: pack(
            fma(lo(x.v(10)), lo(x.v(11)), lo(x.v(12)), "f16"),
            fma(hi(x.v(10)), hi(x.v(11)), hi(x.v(12)) ^ 0x8000, "f16"),
        ),
    ),
    (EVERY, "v_pk_lshlrev_b16 v0, 3, v20 op_sel_hi:[0,1]", 0, lambda x: pack(lo(x.v(20)) << 3, hi(x.v(20)) << 3)),
    (
        EVERY,
        "v_dot2_f32_f16 v0, v10, v11, v2",
        0,
        lambda x: dot2(x.v(10), x.v(11), x.v(2)),
    ),
    (
        EVERY,
        "v_fma_mix_f32 v0, v10, v2, -v11 op_sel:[1,0,0] op_sel_hi:[1,0,1]",
        0,
        lambda x: fma(half(hi(x.v(10))), x.v(2), neg(half(lo(x.v(11)))), "f32"),
    ),
    # Products that float32 holds exactly: of two halves, of a half and a power of two, of anything and one.
    (
        EVERY,
        "v_fma_mix_f32 v0, v10, -v11, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]",
        0,
        lambda x: fma(half(hi(x.v(10))), neg(half(lo(x.v(11)))), x.v(2), "f32"),
    ),
    (
        EVERY,
        "v_fma_mix_f32 v0, v10, 0.5, v2 op_sel_hi:[1,0,0]",
        0,
        lambda x: fma(half(lo(x.v(10))), encode(0.5, "f32"), x.v(2), "f32"),
    ),
    (
        EVERY,
        "v_fma_mix_f32 v0, v1, -1.0, v12 op_sel_hi:[0,0,1]",
        0,
        lambda x: fma(x.v(1), encode(-1.0, "f32"), half(lo(x.v(12))), "f32"),
    ),
    (
        EVERY,
        "v_fma_mixhi_f16 v0, v1, v2, v3",
        0,
        lambda x: pack(lo(x.v(0)), encode(decode(fma(x.v(1), x.v(2), x.v(3), "f32"), "f32"), "f16")),
    ),
    (
        EVERY,
        "v_mbcnt_lo_u32_b32 v0, s20, v21",
        0,
        lambda x: x.v(21) + (x.s(20) & ((1 << min(x.number, 32)) - 1)).bit_count(),
    ),
    (
        EVERY,
        "v_add_f32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf",
        0,
        lambda x: dpp_add(x, row_shr(x, 1), None),
    ),
    (
        EVERY,
        "v_add_f32_dpp v0, v1, v2 row_ror:4 row_mask:0x5 bank_mask:0xf",
        0,
        lambda x: dpp_add(x, row_ror(x, 4), 0x5),
    ),
    (
        EVERY,
        "v_add_f32_dpp v0, v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1",
        0,
        lambda x: add32(x.v(1, x.number ^ 1) if x.active(x.number ^ 1) else 0, x.v(2)),
    ),
    (
        (GFX9,),
        "v_add_f32_dpp v0, v1, v2 row_bcast:15 row_mask:0xa bank_mask:0xf",
        0,
        lambda x: dpp_add(x, x.number // 16 * 16 - 1, 0xA),
    ),
    ((GFX9,), "v_mov_b32_dpp v1, v1 row_half_mirror row_mask:0xf bank_mask:0xf", 1, lambda x: dpp_mov(x, x.number ^ 7)),
    (
        RDNA,
        "v_add_f32_dpp v0, v1, v2 row_xmask:5 row_mask:0xf bank_mask:0xf",
        0,
        lambda x: dpp_add(x, x.number ^ 5, None),
    ),
    (
        RDNA,
        "v_add_f32_dpp v0, v1, v2 row_share:3 row_mask:0xf bank_mask:0xf fi:1",
        0,
        lambda x: add32(x.v(1, x.number // 16 * 16 + 3), x.v(2)),
    ),
    (
        RDNA,
        "v_mov_b32_dpp v1, v1 dpp8:[7,6,5,4,3,2,1,0]",
        1,
        lambda x: x.v(1, x.number ^ 7) if x.active(x.number ^ 7) else 0,
    ),
    (
        RDNA,
        "v_add_f32_e64_dpp v0, -v1, |v2| row_xmask:1 row_mask:0xf bank_mask:0xf fi:1",
        0,
        lambda x: add32(neg(x.v(1, x.number ^ 1)), mag(x.v(2))),
    ),
    (RDNA, "v_add_nc_u32_e64 v0, v20, v21 clamp", 0, lambda x: min(MASK32, x.v(20) + x.v(21))),
    (RDNA, "v_sub_nc_u32_e64 v0, v20, v21 clamp", 0, lambda x: max(0, x.v(20) - x.v(21))),
    (RDNA, "v_xor3_b32 v0, v20, v21, 0x12345678", 0, lambda x: x.v(20) ^ x.v(21) ^ 0x12345678),
    (RDNA, "v_add_f16_e32 v0.h, v10.l, v11.h", 0, lambda x: pack(lo(x.v(0)), add16(lo(x.v(10)), hi(x.v(11))))),
    (
        RDNA,
        "v_mul_f16_e64 v0.l, -v10.h, v11.l",
        0,
        lambda x: pack(mul16(hi(x.v(10)) ^ 0x8000, lo(x.v(11))), hi(x.v(0))),
    ),
    (RDNA, "v_mov_b16_e32 v0.l, v20.h", 0, lambda x: pack(hi(x.v(20)), hi(x.v(0)))),
    (RDNA, "v_cvt_f16_f32_e32 v0.h, v1", 0, lambda x: pack(lo(x.v(0)), encode(decode(x.v(1), "f32"), "f16"))),
    (RDNA, "v_lshlrev_b16 v0.h, 3, v20.l", 0, lambda x: pack(lo(x.v(0)), lo(x.v(20)) << 3)),
    (RDNA, "v_permlanex16_b32 v0, v20, s20, s21", 0, lambda x: permlanex16(x, x.s(21))),
    (RDNA, "v_permlanex16_b32 v0, v20, s20, 0xfedcba98", 0, lambda x: permlanex16(x, 0xFEDCBA98)),
    (RDNA, "v_permlanex16_b32 v0, v20, s20, -1 op_sel:[1,0]", 0, lambda x: permlanex16(x, MASK32, inactive=True)),
    (RDNA, "v_permlane16_b32 v0, v20, s20, s21", 0, lambda x: permlanex16(x, x.s(21), cross=False)),
    (RDNA, "v_dot4_i32_iu8 v0, v20, v21, v22 neg_lo:[1,0,0]", 0, lambda x: dot4(x, a_signed=True)),
    ((GFX11,), "v_max_f32_e32 v0, v1, v2", 0, lambda x: f32(max(decode(x.v(1), "f32"), decode(x.v(2), "f32")))),
    ((GFX12,), "v_max_num_f32_e32 v0, v1, v2", 0, lambda x: f32(max(decode(x.v(1), "f32"), decode(x.v(2), "f32")))),
    ((GFX12,), "v_minimum_f32 v0, v1, v2", 0, lambda x: f32(min(decode(x.v(1), "f32"), decode(x.v(2), "f32")))),
    ((GFX9,), "v_max3_f32 v0, v1, v2, v3", 0, lambda x: f32(max(decode(x.v(n), "f32") for n in (1, 2, 3)))),
    ((GFX9,), "v_add_f16_e32 v0, v10, v11", 0, lambda x: add16(lo(x.v(10)), lo(x.v(11)))),
    (
        (GFX9,),
        "v_fma_f16 v0, v10, v11, v12 op_sel:[1,0,0,1]",
        0,
        lambda x: pack(lo(x.v(0)), fma(hi(x.v(10)), lo(x.v(11)), lo(x.v(12)), "f16")),
    ),
    ((GFX9,), "v_add_u32_e32 v0, v20, v21", 0, lambda x: x.v(20) + x.v(21)),
    (
        (GFX9,),
        "v_add_u32_sdwa v0, v20, sext(v21) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1",
        0,
        lambda x: (x.v(20) >> 8 & 255) + signed(hi(x.v(21)), 16),
    ),
    (
        (GFX9,),
        "v_lshlrev_b16_sdwa v0, v20, v21 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:BYTE_0",
        0,
        lambda x: x.v(0) & ~0xFF00 | ((x.v(21) & 255) << (x.v(20) & 15) & 255) << 8,
    ),
    (
        (GFX9,),
        "v_mul_f32_sdwa v0, -v1, |v2| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        0,
        lambda x: mul32(neg(x.v(1)), mag(x.v(2))),
    ),
    (
        (GFX9,),
        "v_cvt_pkrtz_f16_f32 v0, v1, v2",
        0,
        lambda x: pack(*(encode(decode(x.v(n), "f32"), "f16", truncate=True) for n in (1, 2))),
    ),
]


def perm(high: int, low: int, select: int) -> int:
    data = (high << 32 | low).to_bytes(8, "little")
    result = 0
    for place in range(4):
        code = select >> 8 * place & 255
        if code < 8:
            byte = data[code]
        elif code < 12:
            byte = 255 * (data[2 * code - 15] >> 7)
        else:
            byte = 0 if code == 12 else 255
        result |= byte << 8 * place
    return result


def half(bits: int) -> int:
    return f32(decode(bits, "f16"))


def dot2(a: int, b: int, c: int) -> int:
    first = fma(half(lo(a)), half(lo(b)), c, "f32")
    return fma(half(hi(a)), half(hi(b)), first, "f32")


def dot4(x: Lane, *, a_signed: bool) -> int:
    total = x.v(22)
    for n in range(4):
        a, b = x.v(20) >> 8 * n & 255, x.v(21) >> 8 * n & 255
        total += (signed(a, 8) if a_signed else a) * b
    return total


def row_shr(x: Lane, n: int) -> int | None:
    return x.number - n if x.number % 16 >= n else None


def row_ror(x: Lane, n: int) -> int:
    return x.number // 16 * 16 + (x.number - n) % 16


def dpp_add(x: Lane, source: int | None, row_mask: int | None) -> int:
    """v0 stays where the source lane lies outside, is inactive, or the row is masked."""
    masked = row_mask is not None and not row_mask >> x.number // 16 & 1
    if masked or source is None or source < 0 or not x.active(source):
        return x.v(0)
    return add32(x.v(1, source), x.v(2))


def dpp_mov(x: Lane, source: int) -> int:
    return x.v(1, source) if x.active(source) else x.v(1)


def permlanex16(x: Lane, high: int, *, cross: bool = True, inactive: bool = False) -> int:
    select = x.s(20) | high << 32
    place = select >> 4 * (x.number % 16) & 15
    lane = (x.number // 16 ^ int(cross)) * 16 + place
    return x.v(20, lane) if inactive or x.active(lane) else x.v(0)


def spelled(gfx: str, source: str) -> str:
    """Masks are one register on RDNA and a pair on CDNA."""
    if gfx == GFX9:
        return source.replace("{lo}", "")
    return (
        source.replace("{lo}", "_lo").replace("s[20:21]", "s20").replace("s[30:31]", "s30").replace("s[32:33]", "s32")
    )


CASES = [pytest.param(gfx, *case[1:], id=f"{gfx}: {case[1]}") for case in VALUES for gfx in case[0]]


def before(gfx: str, source: str, every_lane: bool = False):
    group = registers(gfx, zlib.crc32(source.encode()))
    if every_lane:
        group.s[126:128] = MASK32
        group.exec_changed()
    return group, group.v.copy(), group.s.copy()


@pytest.mark.parametrize("every_lane", [False, True], ids=["some lanes", "every lane"])
@pytest.mark.parametrize(("gfx", "source", "target", "statement"), CASES)
def test_value(every_lane, gfx, source, target, statement):
    group, v, s = before(gfx, source, every_lane)
    execute(gfx, spelled(gfx, source), group)
    for wave in range(WAVES):
        for number in range(group.lanes):
            lane = Lane(v, s, wave, number)
            wanted = statement(lane) & MASK32 if lane.active(number) else lane.v(target)
            assert int(group.v[target, wave, number]) == wanted, (wave, number)
    untouched = [n for n in range(512) if n != target]
    assert (group.v[untouched] == v[untouched]).all()
    assert (group.s == s).all()


# --- two registers, masks, scalars ------------------------------------------------------------------------------------

PAIRS = [
    (EVERY, "v_lshlrev_b64{e64} v[0:1], 5, v[20:21]", lambda x: x.v64(20) << 5),
    (EVERY, "v_ashrrev_i64 v[0:1], 5, v[20:21]", lambda x: signed(x.v64(20), 64) >> 5),
    ((GFX9,), "v_lshl_add_u64 v[0:1], v[20:21], 2, v[22:23]", lambda x: (x.v64(20) << 2) + x.v64(22)),
    ((GFX9,), "v_mov_b64_e32 v[0:1], v[20:21]", lambda x: x.v64(20)),
    ((GFX9,), "v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", lambda x: mul32(x.v(2), x.v(4)) | mul32(x.v(3), x.v(5)) << 32),
    (
        (GFX9,),
        "v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1] neg_hi:[0,1]",
        lambda x: add32(x.v(3), x.v(4)) | add32(x.v(2), neg(x.v(5))) << 32,
    ),
    (
        (GFX9,),
        "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel_hi:[1,0,1]",
        lambda x: fma(x.v(2), x.v(4), x.v(6), "f32") | fma(x.v(3), x.v(4), x.v(7), "f32") << 32,
    ),
    ((GFX9,), "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]", lambda x: x.v(3) | x.v(4) << 32),
]


@pytest.mark.parametrize("every_lane", [False, True], ids=["some lanes", "every lane"])
@pytest.mark.parametrize(
    ("gfx", "source", "statement"),
    [pytest.param(gfx, *case[1:], id=f"{gfx}: {case[1]}") for case in PAIRS for gfx in case[0]],
)
def test_pair_of_registers(every_lane, gfx, source, statement):
    group, v, s = before(gfx, source, every_lane)
    execute(gfx, source.replace("{e64}", "_e64" if gfx == GFX12 else ""), group)
    for wave in range(WAVES):
        for number in range(group.lanes):
            lane = Lane(v, s, wave, number)
            got = int(group.v[0, wave, number]) | int(group.v[1, wave, number]) << 32
            assert got == (statement(lane) & MASK64 if lane.active(number) else lane.v64(0))
    assert (group.v[2:] == v[2:]).all()


def float_less(x: Lane) -> bool:
    return decode(x.v(1), "f32") < decode(x.v(2), "f32")


MASKS = [
    (EVERY, "v_cmp_lt_f32_e32 vcc{lo}, v1, v2", 106, float_less),
    (EVERY, "v_cmp_lt_f32_e64 s[30:31], v1, v2", 30, float_less),
    (
        EVERY,
        "v_cmp_nlt_f32_e64 s[30:31], |v1|, -v2",
        30,
        lambda x: not decode(mag(x.v(1)), "f32") < decode(neg(x.v(2)), "f32"),
    ),
    (EVERY, "v_cmp_gt_i32_e64 s[30:31], v20, s21", 30, lambda x: signed(x.v(20), 32) > signed(x.s(21), 32)),
    (EVERY, "v_cmp_ne_u16_e64 s[30:31], {low20}, 0", 30, lambda x: lo(x.v(20)) != 0),
    (EVERY, "v_cmp_class_f32_e64 s[30:31], v1, s22", 30, lambda x: x.s(22) >> (3 if x.v(1) >> 31 else 8) & 1),
    (EVERY, "v_cmp_gt_u64_e64 s[30:31], v[20:21], v[22:23]", 30, lambda x: x.v64(20) > x.v64(22)),
    (RDNA, "v_cmpx_gt_u32_e64 v20, v21", 126, lambda x: x.v(20) > x.v(21)),
    ((GFX9,), "v_cmpx_gt_u32_e64 s[30:31], v20, v21", 30, lambda x: x.v(20) > x.v(21)),
]


@pytest.mark.parametrize("every_lane", [False, True], ids=["some lanes", "every lane"])
@pytest.mark.parametrize(
    ("gfx", "source", "row", "statement"),
    [pytest.param(gfx, *case[1:], id=f"{gfx}: {case[1]}") for case in MASKS for gfx in case[0]],
)
def test_mask(every_lane, gfx, source, row, statement):
    group, v, s = before(gfx, source, every_lane)
    text = spelled(gfx, source).replace("{low20}", "v20" if gfx == GFX9 else "v20.l")
    execute(gfx, text, group)
    for wave in range(WAVES):
        for number in range(group.lanes):
            lane = Lane(v, s, wave, number)
            got = int(group.s[row + number // 32, wave]) >> number % 32 & 1
            assert bool(got) == (lane.active(number) and bool(statement(lane))), (wave, number)
    assert (group.v == v).all()
    if "cmpx" in source and gfx == GFX9:
        assert (group.s[126:128] == group.s[30:32]).all()


CARRIES = [
    (RDNA, "v_add_co_u32 v0, s[30:31], v20, v21", lambda x: x.v(20) + x.v(21)),
    (RDNA, "v_add_co_ci_u32_e64 v0, s[30:31], v20, v21, s[32:33]", lambda x: x.v(20) + x.v(21) + x.bit(32)),
    ((GFX9,), "v_add_co_u32_e64 v0, s[30:31], v20, v21", lambda x: x.v(20) + x.v(21)),
    ((GFX9,), "v_addc_co_u32_e64 v0, s[30:31], v20, v21, s[32:33]", lambda x: x.v(20) + x.v(21) + x.bit(32)),
]


@pytest.mark.parametrize("every_lane", [False, True], ids=["some lanes", "every lane"])
@pytest.mark.parametrize(
    ("gfx", "source", "statement"),
    [pytest.param(gfx, *case[1:], id=f"{gfx}: {case[1]}") for case in CARRIES for gfx in case[0]],
)
def test_carry(every_lane, gfx, source, statement):
    group, v, s = before(gfx, source, every_lane)
    execute(gfx, spelled(gfx, source), group)
    for wave in range(WAVES):
        for number in range(group.lanes):
            lane = Lane(v, s, wave, number)
            carry = int(group.s[30 + number // 32, wave]) >> number % 32 & 1
            if lane.active(number):
                total = statement(lane)
                assert (int(group.v[0, wave, number]), carry) == (total & MASK32, total >> 32)
            else:
                assert (int(group.v[0, wave, number]), carry) == (lane.v(0), 0)


@pytest.mark.parametrize("gfx", EVERY)
def test_wide_multiply_add(gfx):
    name = "v_mad_co_u64_u32" if gfx == GFX12 else "v_mad_u64_u32"
    group, v, s = before(gfx, name)
    execute(gfx, spelled(gfx, f"{name} v[0:1], s[30:31], v20, v21, v[22:23]"), group)
    for wave in range(WAVES):
        for number in range(group.lanes):
            lane = Lane(v, s, wave, number)
            got = int(group.v[0, wave, number]) | int(group.v[1, wave, number]) << 32
            total = lane.v(20) * lane.v(21) + lane.v64(22)
            assert got == (total & MASK64 if lane.active(number) else lane.v64(0))


@pytest.mark.parametrize("gfx", RDNA)
@pytest.mark.parametrize(
    "source",
    [
        "v_dual_add_f32 v0, v1, v2 :: v_dual_mul_f32 v3, v0, v4",
        "v_dual_fmac_f32 v0, v1, v2 :: v_dual_mov_b32 v3, v0",
        "v_dual_fmaak_f32 v0, v1, v2, 0x40490fdb :: v_dual_cndmask_b32 v3, v4, v5",
    ],
)
def test_dual_issue_reads_before_it_writes(gfx, source):
    group, v, s = before(gfx, source)
    execute(gfx, source, group)
    for wave in range(WAVES):
        for number in range(group.lanes):
            x = Lane(v, s, wave, number)
            first = {
                "add": add32(x.v(1), x.v(2)),
                "fmac": fma(x.v(1), x.v(2), x.v(0), "f32"),
                "fmaak": fma(x.v(1), x.v(2), K, "f32"),
            }[source.split("_")[2]]
            second = {
                "mul": mul32(x.v(0), x.v(4)),
                "mov": x.v(0),
                "cndmask": x.v(5) if x.vcc else x.v(4),
            }[source.split("v_dual_")[2].split("_")[0]]
            wanted = (first, second) if x.active(number) else (x.v(0), x.v(3))
            assert (int(group.v[0, wave, number]), int(group.v[3, wave, number])) == wanted


@pytest.mark.parametrize("gfx", EVERY)
def test_single_lanes(gfx):
    group, v, s = before(gfx, "lanes")
    execute(gfx, "v_readfirstlane_b32 s40, v20\nv_readlane_b32 s41, v21, 7\nv_writelane_b32 v22, s23, 5", group)
    for wave in range(WAVES):
        active = [n for n in range(group.lanes) if Lane(v, s, wave, n).active(n)]
        assert group.s[40, wave] == v[20, wave, active[0]]
        assert group.s[41, wave] == v[21, wave, 7]
        wanted = v[22, wave].copy()
        wanted[5] = s[23, wave]
        assert (group.v[22, wave] == wanted).all()


@pytest.mark.parametrize("gfx", EVERY)
def test_swap(gfx):
    group, v, s = before(gfx, "swap")
    execute(gfx, "v_swap_b32 v20, v21", group)
    for wave in range(WAVES):
        for n in range(group.lanes):
            active = Lane(v, s, wave, n).active(n)
            assert group.v[20, wave, n] == v[21 if active else 20, wave, n]
            assert group.v[21, wave, n] == v[20 if active else 21, wave, n]


@pytest.mark.parametrize("gfx", EVERY)
def test_division_sequence(gfx):
    """What LLVM emits for a float32 division: the quotient is correctly rounded."""
    group, v, s = before(gfx, "division")
    vcc = "vcc" if gfx == GFX9 else "vcc_lo"
    scratch = "s[40:41]" if gfx == GFX9 else "s40"
    execute(
        gfx,
        f"""v_div_scale_f32 v30, {scratch}, v2, v2, v1
        v_rcp_f32_e32 v31, v30
        v_div_scale_f32 v32, {vcc}, v1, v2, v1
        v_fma_f32 v33, -v30, v31, 1.0
        v_fmac_f32_e32 v31, v33, v31
        v_mul_f32_e32 v33, v32, v31
        v_fma_f32 v34, -v30, v33, v32
        v_fmac_f32_e32 v33, v34, v31
        v_fma_f32 v30, -v30, v33, v32
        v_div_fmas_f32 v30, v30, v31, v33
        v_div_fixup_f32 v0, v30, v2, v1""",
        group,
    )
    for wave in range(WAVES):
        for n in range(group.lanes):
            x = Lane(v, s, wave, n)
            if x.active(n):
                exact = Fraction(decode(x.v(1), "f32")) / Fraction(decode(x.v(2), "f32"))
                assert int(group.v[0, wave, n]) == f32(exact)


# --- matrix instructions: the pure functions are checked in test_matrix, here their operands are ----------------------

WMMA = {
    GFX11: ("v[0:7]", "v[10:17]", "v[20:27]", 8),
    GFX12: ("v[0:7]", "v[10:13]", "v[20:23]", 4),
}


@pytest.mark.parametrize("gfx", RDNA)
@pytest.mark.parametrize("addend", ["v[0:7]", "0", "1.0"])
@pytest.mark.parametrize("modifiers", ["", " neg_lo:[1,0,0] neg_hi:[0,1,0]"])
def test_wmma_operands(gfx, addend, modifiers):
    d, a, b, count = WMMA[gfx]
    group = registers(gfx, 11)
    rng = np.random.default_rng(5)
    for first in (10, 20):
        halves = rng.normal(size=(count, WAVES, 32, 2)).astype(np.float16)
        if gfx == GFX11:
            halves[:, :, 16:] = halves[:, :, :16]
        group.v[first : first + count] = halves.view(np.uint32)[..., 0]
    v = group.v.copy()
    execute(gfx, f"v_wmma_f32_16x16x16_f16 {d}, {a}, {b}, {addend}{modifiers}", group)
    c = v[0:8] if addend.startswith("v") else np.full((8, WAVES, 32), f32(float(addend)), np.uint32)
    flags = (
        MatrixModifiers(neg_lo=(True, False, False), neg_hi=(False, True, False)) if modifiers else MatrixModifiers()
    )
    op = MATRIX["gfx11" if gfx == GFX11 else "gfx12"]["v_wmma_f32_16x16x16_f16"]
    wanted = op(v[10 : 10 + count], v[20 : 20 + count], c, flags)
    assert (group.v[0:8] == wanted).all()
    assert (group.v[8:] == v[8:]).all()


@pytest.mark.parametrize(
    ("name", "d", "a", "b", "c"),
    [
        ("v_mfma_f32_16x16x16_f16", "v[0:3]", "v[10:11]", "v[12:13]", "v[0:3]"),
        ("v_mfma_f32_16x16x16_f16", "a[0:3]", "v[10:11]", "v[12:13]", "a[4:7]"),
        ("v_mfma_f32_32x32x8_f16", "v[40:55]", "v[10:11]", "v[12:13]", "0"),
        ("v_mfma_f32_32x32x8_f16", "a[0:15]", "v[10:11]", "a[12:13]", "1.0"),
        ("v_mfma_f32_4x4x4_16b_f16", "v[0:3]", "v[10:11]", "v[12:13]", "v[4:7]"),
        ("v_mfma_f32_16x16x4_f32", "v[0:3]", "v4", "v5", "v[0:3]"),
        ("v_mfma_i32_16x16x32_i8", "v[0:3]", "v[20:21]", "v[22:23]", "v[24:27]"),
    ],
)
def test_mfma_operands(name, d, a, b, c):
    group = registers(GFX9, 12)
    group.v[256:300] = group.v[0:44]
    v = group.v.copy()

    def span(text: str) -> slice:
        first, _, last = text[1:].strip("[]").partition(":")
        base = 256 if text[0] == "a" else 0
        return slice(base + int(first), base + int(last or first) + 1)

    execute(GFX9, f"{name} {d}, {a}, {b}, {c}", group)
    op = MATRIX["gfx94x"][name]
    addend = v[span(c)] if c[0] in "va" else np.full((op.d_regs, WAVES, 64), f32(float(c)), np.uint32)
    with np.errstate(all="ignore"):
        wanted = op(v[span(a)], v[span(b)], addend)
    got = group.v[span(d)]
    assert got.shape == wanted.shape
    assert all(ulps_apart(int(x), int(y), "f32") == 0 for x, y in zip(got.ravel(), wanted.ravel(), strict=True))
    v[span(d)] = got
    assert (group.v == v).all()
