"""Every vector instruction by its mnemonic, without encoding suffix: VALU["v_add_f32"]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.verify.emulator.vector_compare import COMPARE, MOVE
from rocm_sd.verify.emulator.vector_convert import CONVERT, EIGHT_BIT_FNUZ, EIGHT_BIT_OCP
from rocm_sd.verify.emulator.vector_float import FLOAT
from rocm_sd.verify.emulator.vector_int import INTEGER
from rocm_sd.verify.emulator.vector_packed import PACKED_OPS
from rocm_sd.verify.emulator.vector_types import Vop

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VALU", "VALU_FNUZ", "VALU_OCP", "Vop", "valu_for", "zeroes_high_half"]

VALU: dict[str, Vop] = FLOAT | INTEGER | COMPARE | MOVE | CONVERT | PACKED_OPS
"""What means the same on every architecture. The 8-bit floats do not: an engine that reads this table alone refuses
them by name instead of reading the wrong format."""

VALU_OCP: dict[str, Vop] = VALU | EIGHT_BIT_OCP
VALU_FNUZ: dict[str, Vop] = VALU | EIGHT_BIT_FNUZ


def valu_for(gfx: str) -> Mapping[str, Vop]:
    """The table of one architecture, by its gfx name."""
    if gfx.startswith("gfx94"):
        return VALU_FNUZ
    return VALU_OCP if gfx.startswith(("gfx95", "gfx12")) else VALU


_PRESERVING_ON_GFX9 = frozenset(
    {
        "v_mad_f16",
        "v_mac_f16",
        "v_fma_f16",
        "v_fmac_f16",
        "v_fmaak_f16",
        "v_fmamk_f16",
        "v_mad_u16",
        "v_mad_i16",
        "v_div_fixup_f16",
        "v_fma_mixlo_f16",
        "v_fma_mixhi_f16",
        "v_mad_mixlo_f16",
        "v_mad_mixhi_f16",
    }
)


def zeroes_high_half(mnemonic: str, gfx: str) -> bool:
    """Whether a 16-bit result clears the other half of its register.

    gfx10 and later keep it. gfx9 clears it, but for the multiply-adds that were new there and the 8-bit conversions
    (LLVM, GCNSubtarget::zeroesHigh16BitsOfDest).
    """
    if not gfx.startswith("gfx9") or mnemonic in _PRESERVING_ON_GFX9:
        return False
    return not mnemonic.startswith(("v_cvt_pk_fp8", "v_cvt_pk_bf8", "v_cvt_sr_", "v_cvt_scalef32"))
