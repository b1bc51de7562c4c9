"""out = softmax(scale * q k^T) v, q: [B, S, H, D], k, v: [B, T, H, D]: no score goes to memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.config import Config
from rocm_sd.kernels.hip.gemm import tiles_of
from rocm_sd.kernels.hip.launch import HipRefused, Kernel, access_width, ceil_div, parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["BY_HEAD", "DOT_WAVE64", "TILES", "AttentionConfig", "configs", "launch", "tiles"]

LOG2_E = 1.4426950408889634
_BYTES = 2  # of a value
_WIDEST = 8  # values in 16 bytes
_MOST_BYTES = 2**31 - 1  # of one head, from its first row to its last


@dataclass(frozen=True)
class AttentionConfig(Config):
    """A block of block_m queries, block_n keys at a time, by waves_m rows of waves_d waves, in fragments of one size.

    Waves of one row share queries: each has its own part of the keys, then of the columns. `chunk` cuts the head into
    pieces of so many columns, 0 leaves it whole; `queries_in_lds` keeps the queries there and not in registers;
    `values_ahead` has values on their way into registers while keys are multiplied.
    """

    block_m: int
    block_n: int
    waves_m: int
    waves_d: int
    fragment: int
    chunk: int = 0
    queries_in_lds: int = 0
    values_ahead: int = 1


# No tile of its own: `launch` takes the first of `configs`. One tile for all heads would spill at some, or waste most.
BY_HEAD = AttentionConfig(0, 0, 0, 0, 0, values_ahead=0)

# By the size of a head, the best by compiled occupancy first; in the comments its registers and waves a SIMD, in
# float16, on gfx1100, gfx1201, gfx942 and gfx1030. None spills on any architecture of the unit, in either dtype.
#
# Only pieces of 64 columns are whole cache lines: other heads are cut where nothing else helps. Large heads wait for
# their values where the registers for those would keep another wave out.
_WIDE_WMMA = AttentionConfig(32, 64, 2, 4, 16, chunk=64, queries_in_lds=1)
TILES: Mapping[MatrixUnit, Mapping[int, tuple[AttentionConfig, ...]]] = {
    MatrixUnit.WMMA_GFX11: {
        40: (AttentionConfig(128, 32, 8, 1, 16), AttentionConfig(128, 64, 8, 1, 16)),  # 119, 12
        64: (AttentionConfig(128, 32, 8, 1, 16), AttentionConfig(128, 64, 8, 1, 16)),  # 137, 10
        80: (AttentionConfig(64, 32, 4, 1, 16), AttentionConfig(128, 32, 8, 1, 16)),  # 165, 9
        # 205, 7
        128: (
            AttentionConfig(64, 32, 4, 1, 16, chunk=64, values_ahead=0),
            AttentionConfig(128, 32, 8, 1, 16, chunk=64, values_ahead=0),
        ),
        # 243, 4. Five pieces, with the queries in LDS, let 5 waves in, but read five lines of a row where three are
        # enough.
        160: (
            AttentionConfig(128, 32, 8, 1, 16, values_ahead=0),
            AttentionConfig(64, 32, 4, 1, 16, queries_in_lds=1),
        ),
        512: (_WIDE_WMMA,),  # 193, 4: LDS holds the queries of two workgroups
    },
    # A lane holds half of what it holds on gfx11 of either factor.
    MatrixUnit.WMMA_GFX12: {
        40: (AttentionConfig(128, 32, 8, 1, 16), AttentionConfig(128, 64, 8, 1, 16)),  # 85, 16
        64: (AttentionConfig(128, 32, 8, 1, 16, values_ahead=0), AttentionConfig(128, 32, 8, 1, 16)),  # 91, 16
        80: (AttentionConfig(128, 32, 8, 1, 16), AttentionConfig(64, 32, 4, 1, 16)),  # 115, 12
        # 141, 10
        128: (
            AttentionConfig(128, 32, 8, 1, 16, chunk=64, values_ahead=0),
            AttentionConfig(128, 64, 8, 1, 16, chunk=64),
        ),
        160: (AttentionConfig(128, 32, 8, 1, 16, values_ahead=0), AttentionConfig(128, 32, 8, 1, 16)),  # 182, 8
        512: (_WIDE_WMMA,),  # 144, 4
    },
    # Fragments of 32 read half as much from LDS, and leave room for half of the waves: only a timed card can tell.
    MatrixUnit.MFMA: {
        40: (AttentionConfig(128, 64, 8, 1, 16), AttentionConfig(128, 32, 4, 1, 32)),  # 78, 6
        64: (AttentionConfig(128, 64, 8, 1, 16), AttentionConfig(128, 32, 4, 1, 32)),  # 78, 6
        80: (AttentionConfig(128, 64, 8, 1, 16), AttentionConfig(128, 32, 4, 1, 32)),  # 96, 4
        128: (AttentionConfig(128, 64, 8, 1, 16, chunk=64), AttentionConfig(128, 32, 4, 1, 32)),  # 102, 4
        160: (AttentionConfig(128, 32, 8, 1, 16), AttentionConfig(128, 64, 8, 1, 16)),  # 120, 4
        512: (AttentionConfig(64, 64, 4, 2, 16, chunk=64),),  # 184, 2
    },
    # Queries in registers would take 8 for each 8 columns. Products take so long that lines read twice do not matter.
    MatrixUnit.DOT: {
        40: (AttentionConfig(128, 32, 8, 1, 16, queries_in_lds=1, values_ahead=0),),  # 113, 8
        64: (AttentionConfig(128, 32, 8, 1, 16, queries_in_lds=1, values_ahead=0),),  # 120, 8
        80: (AttentionConfig(128, 32, 8, 1, 16, queries_in_lds=1, values_ahead=0),),  # 144, 6
        128: (AttentionConfig(64, 32, 4, 1, 16, chunk=64, queries_in_lds=1, values_ahead=0),),  # 150, 4
        160: (AttentionConfig(64, 32, 4, 1, 16, chunk=32, queries_in_lds=1, values_ahead=0),),  # 157, 4
        512: (AttentionConfig(32, 64, 2, 2, 16, chunk=64, queries_in_lds=1, values_ahead=0),),  # 232, 2
    },
}
# Dot products by waves of 64; registers and waves a SIMD on gfx906. Sums become chunks of 64 keys, or 64 columns, so
# that waves cannot share queries, and the product with the values has zeros up to the next 64: 24 columns beside 40,
# 48 beside 80.
DOT_WAVE64: Mapping[int, tuple[AttentionConfig, ...]] = {
    40: (AttentionConfig(128, 64, 8, 1, 16, queries_in_lds=1, values_ahead=0),),  # 103, 2
    64: (AttentionConfig(128, 64, 8, 1, 16, queries_in_lds=1, values_ahead=0),),  # 101, 2
    # 101, 2. Whole, a head leaves LDS for half of the queries: as many lines for each of them, and half of the waves.
    80: (
        AttentionConfig(128, 64, 8, 1, 16, chunk=40, queries_in_lds=1, values_ahead=0),
        AttentionConfig(64, 64, 4, 1, 16, queries_in_lds=1, values_ahead=0),
    ),
    128: (AttentionConfig(128, 64, 8, 1, 16, chunk=64, queries_in_lds=1, values_ahead=0),),  # 99, 2
    160: (AttentionConfig(64, 64, 4, 1, 16, chunk=80, queries_in_lds=1, values_ahead=0),),  # 147, 1
    # 209, 1 on half of the SIMDs: LDS has no room for more queries
    512: (AttentionConfig(32, 64, 2, 1, 16, chunk=64, queries_in_lds=1, values_ahead=0),),
}


def tiles(arch: Arch) -> Mapping[int, tuple[AttentionConfig, ...]]:
    """By the size of a head."""
    return tiles_of(TILES, DOT_WAVE64, arch) or {}


def configs(head: int, arch: Arch) -> tuple[AttentionConfig, ...]:
    """What is worth a trial, the best by compiled occupancy first."""
    by_head = tiles(arch)
    if not by_head:
        raise HipRefused("attention (hip)", f"the architecture {arch.name}: nothing is known of its products")
    if head not in by_head:
        raise HipRefused("attention (hip)", f"heads of {head}", hint=f"There are {', '.join(map(str, by_head))}.")
    return by_head[head]


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    config: AttentionConfig,
    launcher: Launcher,
) -> None:
    """Fill `out`, dense [B, S, H, D]; q, k and v have columns side by side and any other strides; scale > 0.

    All are of one dtype, float16 or bfloat16. With BY_HEAD the first config of the head and architecture is taken.
    """
    B, S, H, D = q.shape
    T = k.shape[1]
    if q.element_size() != _BYTES:
        raise HipRefused("attention (hip)", f"dtype {q.dtype}", hint="Use float16 or bfloat16.")
    strides = tuple(stride for tensor in (q, k, v) for stride in tensor.stride()[:3])
    if any(tensor.stride(3) != 1 for tensor in (q, k, v)):
        raise HipRefused("attention (hip)", "heads whose columns do not lie side by side")
    if access_width(q.element_size(), D, *strides, tensors=(q, k, v, out)) != _WIDEST:
        raise HipRefused(
            "attention (hip)", f"heads of {D} with strides {strides}: rows do not begin at multiples of 16 bytes"
        )
    longest = max((tensor.shape[1] * tensor.stride(1) + D) * tensor.element_size() for tensor in (q, k, v))
    if longest > _MOST_BYTES:
        raise HipRefused("attention (hip)", f"a head that spans {longest} bytes: offsets have 31 bits")
    if not config.block_m:
        config = configs(D, launcher.arch)[0]
    kernel = Kernel("attention", "attend", parameters_of(q, (("head", D), *config.to_dict().items())))
    grid = (ceil_div(S, config.block_m), H, B)
    launcher.launch(kernel, grid, (q, k, v, out, S, T, H, *strides, scale * LOG2_E))
