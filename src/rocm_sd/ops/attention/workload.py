"""The calls that count: what attention is proven on, tuned for and timed at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit, device_facts
from rocm_sd.kernels.configs.attention import AttentionConfig, pieces
from rocm_sd.kernels.hip.attention import TILES as HIP_TILES
from rocm_sd.kernels.hip.attention import tiles as hip_tiles
from rocm_sd.ops.attention import reference
from rocm_sd.ops.definition import Also, Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "HIP_HEADS", "TUNING", "VERIFICATION", "problem", "variant"]

# At most this many keys is attention to a text: 77 tokens, or a few such texts' worth padded.
CROSS = 128
_ANY = 2**31


def problem(q: torch.Tensor, k: torch.Tensor, *_rest: Any) -> Problem:
    B, S, H, D = q.shape
    return {"b": B, "s": S, "t": k.shape[1], "h": H, "d": D, "dtype": dtype_name(q.dtype)}


def _sample(
    B: int, S: int, T: int, H: int, D: int, dtype: torch.dtype = torch.float16, scale: float | None = None
) -> Sample:
    """Where S is T, q, k and v are views of one packed projection; otherwise k and v are, as for a text."""

    def build(draw: Draw) -> tuple[Any, ...]:
        if S == T:
            q, k, v = draw(B, S, 3, H, D).unbind(2)
        else:
            q = draw(B, S, H, D)
            k, v = draw(B, T, 2, H, D).unbind(2)
        return q, k, v, scale

    scaled = "" if scale is None else f", scale {scale}"
    return Sample(f"{B}x{S}x{H}x{D} to {T} keys, {dtype_name(dtype)}{scaled}", dtype, build)


def variant(problem: Problem, config: AttentionConfig, device: torch.device) -> str:
    """How the head is cut, how the last block of keys is met, and whether the keys are divided."""
    b, s, t, h, d = (int(problem[name]) for name in ("b", "s", "t", "h", "d"))
    count = sum(1 for piece in pieces(d, config.pieces) if piece)
    cut = "wide" if config.chunk else f"{count} piece{'s' if count > 1 else ''}"
    ranges, _ = config.key_ranges(b * h, s, t, d, device_facts(device).compute_units or 1)
    return f"{cut}, {config.key_loop(t, d)}{', divided' if ranges > 1 else ''}"


# Scores of a call that is like another, 256 MB in float32: stock torch may keep them all.
_LIKE_SCORES = 2**26


def _similar(problem: Problem) -> Iterator[Sample]:
    b, s, t, h, d = (int(problem[name]) for name in ("b", "s", "t", "h", "d"))
    dtype = getattr(torch, str(problem["dtype"]))
    # Of fewer keys with the same tail: where programs are many, how many queries there are counts, too.
    for keys in (t, min(t, 4096 + t % 1024), min(t, 1024 + t % 1024)):
        for items, heads in ((b, h), (1, h), (1, 1)):
            if items * heads * s * keys <= _LIKE_SCORES:
                yield _sample(items, s, keys, heads, d, dtype)
    for rows in (_LIKE_SCORES // (h * t), 1024, 128, 16):
        for heads in (h, 1):
            yield _sample(1, max(1, min(s, rows)), t, heads, d, dtype)


@dataclass(frozen=True)
class _Tile:
    """Queries, keys, warps, and what else the kernel's config names; `stages` is the load stages worth a trial."""

    block_m: int
    block_n: int
    warps: int
    stages: tuple[int, ...] = (1, 2)
    pieces: int = 3
    ahead: int = 0
    chunk: int = 0
    columns: int = 0

    def configs(self, programs_per_cu: int) -> Iterator[AttentionConfig]:
        for stages in self.stages:
            yield AttentionConfig(
                self.block_m, self.block_n, self.warps, stages, self.pieces, self.ahead, self.chunk, self.columns,
                programs_per_cu,
            )  # fmt: skip


# By the largest head that they serve. Registers on gfx1100 (Triton 3.9) are what parts them: 64x64 in 4 warps needs 188
# at head size 40 and spills 23 at 80; 64x32 spills 71 at 160, where 64x16 needs 224 and 32x32 needs 247.
_WMMA = {
    48: (_Tile(64, 64, 4), _Tile(128, 64, 8), _Tile(64, 32, 4), _Tile(32, 64, 2)),
    96: (_Tile(64, 32, 4), _Tile(128, 32, 8), _Tile(32, 32, 2), _Tile(64, 64, 4)),
    128: (_Tile(64, 32, 4), _Tile(128, 32, 8), _Tile(64, 64, 8), _Tile(32, 32, 4)),
    256: (_Tile(64, 16, 4), _Tile(32, 32, 4), _Tile(32, 16, 2)),
}
# gfx12 keeps each operand in one half of a wave where gfx11 keeps it in both: more fits.
_WMMA_GFX12 = _WMMA | {256: (_Tile(64, 32, 4), _Tile(128, 32, 8), _Tile(64, 32, 8), _Tile(64, 16, 4))}
# Waves of 64 hold twice the values a warp: tiles are larger, and 2 warps are enough to load 16 columns by 16 bytes.
_MFMA = {
    48: (_Tile(64, 64, 2), _Tile(128, 64, 4, pieces=1), _Tile(64, 128, 4), _Tile(32, 64, 2)),
    64: (_Tile(128, 64, 4), _Tile(64, 64, 4), _Tile(128, 32, 4), _Tile(64, 32, 2)),
    128: (_Tile(64, 64, 4), _Tile(128, 32, 4), _Tile(128, 64, 4), _Tile(64, 32, 4)),
    256: (_Tile(64, 32, 4), _Tile(64, 64, 4), _Tile(128, 32, 4), _Tile(128, 32, 8)),
}
# wgmma runs beside the softmax of the block before only where one dot makes the scores: `ahead` goes with one piece.
_TENSOR_CORE = {
    64: (
        _Tile(128, 64, 8, (3,)), _Tile(128, 128, 8, (2, 3)), _Tile(128, 64, 4, (3,)), _Tile(64, 64, 4, (3,)),
        _Tile(64, 128, 4, (2,)), _Tile(128, 128, 8, (2,), pieces=1), _Tile(128, 64, 8, (3,), pieces=1, ahead=1),
        _Tile(64, 64, 4, (3,), pieces=1, ahead=1),
        _Tile(128, 128, 8, (2,), pieces=1, ahead=1),
    ),
    128: (
        _Tile(128, 64, 8, (2, 3)), _Tile(128, 128, 8, (2,)), _Tile(64, 64, 4, (2, 3)), _Tile(128, 64, 4, (3,)),
        _Tile(64, 32, 4, (3,)), _Tile(128, 64, 8, (2,), pieces=1, ahead=1), _Tile(64, 64, 4, (2,), pieces=1, ahead=1),
    ),
    256: (
        _Tile(128, 64, 8, (2, 3)), _Tile(64, 64, 4, (2, 3)), _Tile(128, 32, 8, (3,)), _Tile(64, 32, 4, (2, 3)),
        _Tile(32, 32, 4, (3,)), _Tile(64, 64, 8, (2,)),
    ),
}  # fmt: skip
# Few keys: what counts is how few of the loads and products are padding, and that the grid is large. Never one stage:
# in 64x128 Triton 3.6 then lets wgmma read beyond the shared memory now and then (by compute-sanitizer, on an H200).
_TENSOR_CORE_CROSS = {
    128: (
        _Tile(128, 128, 8, (2,)), _Tile(128, 64, 4, (2,)), _Tile(128, 32, 4, (3,)), _Tile(64, 128, 4, (2,)),
        _Tile(64, 64, 4, (2,)), _Tile(64, 32, 4, (3,)), _Tile(32, 32, 2, (3,)), _Tile(128, 128, 8, (2,), pieces=1),
    ),
    256: (
        _Tile(128, 128, 8, (2,)), _Tile(64, 64, 4, (2,)), _Tile(64, 64, 8, (2,)), _Tile(64, 32, 4, (3,)),
        _Tile(64, 128, 8, (2,)), _Tile(32, 32, 4, (3,)),
    ),
}  # fmt: skip
# Queries of 512 columns fill the registers of a workgroup that also keeps its sums, so they are read again for each
# block of keys; 16 warps of 32 hold all columns of 64 queries in 216 registers, fewer warps own a slice of them.
_WIDE_WMMA = (
    _Tile(64, 32, 16, chunk=128, columns=512), _Tile(64, 32, 8, chunk=64, columns=256),
    _Tile(32, 32, 8, chunk=64, columns=512), _Tile(64, 64, 8, chunk=32, columns=128),
)  # fmt: skip
_WIDE_MFMA = (
    _Tile(64, 64, 8, chunk=64, columns=512), _Tile(128, 64, 8, chunk=64, columns=256),
    _Tile(64, 32, 4, chunk=64, columns=512), _Tile(64, 64, 4, chunk=64, columns=256),
)  # fmt: skip
# 227 KB of shared memory hold the queries, and two stages of 32 keys and values.
_WIDE_TENSOR_CORE = (
    _Tile(64, 32, 8, (1, 2), pieces=1), _Tile(64, 64, 8, (1,), pieces=1),
    _Tile(128, 64, 8, (2,), chunk=128, columns=256), _Tile(64, 64, 4, (2,), chunk=64, columns=128),
)  # fmt: skip
# Products by vector instructions: what `_attend` holds of a head of 40 at once spills at every tile on gfx906.
_DOT = (
    _Tile(32, 32, 4, (1,), chunk=64, columns=64), _Tile(32, 32, 4, (1,), chunk=64, columns=128),
    _Tile(16, 32, 2, (1,), chunk=64, columns=64),
)  # fmt: skip
_TILES: Mapping[MatrixUnit, Mapping[int, tuple[_Tile, ...]]] = {
    MatrixUnit.DOT: {_ANY: _DOT},
    MatrixUnit.WMMA_GFX11: _WMMA | {_ANY: _WIDE_WMMA},
    MatrixUnit.WMMA_GFX12: _WMMA_GFX12 | {_ANY: _WIDE_WMMA},
    MatrixUnit.MFMA: _MFMA | {_ANY: _WIDE_MFMA},
    MatrixUnit.TENSOR_CORE: _TENSOR_CORE | {_ANY: _WIDE_TENSOR_CORE},
}


def _space(problem: Problem, arch: Arch) -> Iterator[AttentionConfig]:
    """Nothing where products are not known to be fast in any way: stock torch is hard to beat there."""
    d, unit = int(problem["d"]), arch.matrix_unit
    if unit is None or unit not in _TILES:
        return
    by_head = _TILES[unit]
    if unit is MatrixUnit.TENSOR_CORE and int(problem["t"]) <= CROSS:
        by_head = _TENSOR_CORE_CROSS | {_ANY: _WIDE_TENSOR_CORE}
    for tile in next(tiles for largest, tiles in by_head.items() if d <= largest):
        for config in tile.configs(programs_per_cu=int(d > 256)):
            if unit is not MatrixUnit.TENSOR_CORE or _staged_bytes(d, config) <= (arch.lds_per_workgroup or 0):
                yield config


def _staged_bytes(d: int, config: AttentionConfig) -> int:
    """Shared memory for the queries and every stage of keys and values, in half precision."""
    q = 2 * (config.chunk or d) * config.block_m
    k = 2 * (config.chunk or d) * config.block_n
    v = 2 * (config.columns or d) * config.block_n
    return (q + k + v) * config.stages if config.chunk else q + (k + v) * config.stages


def _work(q: torch.Tensor, k: torch.Tensor, *_rest: Any) -> Work:
    B, S, H, D = q.shape
    T = k.shape[1]
    return Work(4.0 * B * H * S * T * D, 2.0 * B * H * (S + T) * D * q.element_size())


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.attention",
    reference=reference.attention,
    problem=problem,
    small=(
        _sample(1, 20, 77, 2, 40),
        _sample(1, 33, 33, 2, 80, torch.bfloat16),
        _sample(1, 17, 70, 1, 160),
        _sample(2, 35, 35, 1, 64, torch.bfloat16),
        # Enough keys that they are divided between programs, and merged.
        _sample(1, 5, 522, 1, 512),
    ),
    # The largest self-attention of SD 1.5, its text, its widest heads, and the VAE's.
    real=(
        _sample(2, 4096, 4096, 8, 40),
        _sample(2, 4096, 77, 8, 40),
        _sample(2, 1024, 1024, 8, 80, torch.bfloat16),
        _sample(2, 256, 256, 8, 160),
        _sample(2, 64, 77, 8, 160),
        _sample(2, 4096, 4096, 10, 64),
        _sample(1, 4096, 4096, 24, 128, torch.bfloat16),
        _sample(1, 4096, 4096, 1, 512),
    ),
    tiny=(_sample(2, 3, 4, 2, 5, torch.float64), _sample(2, 3, 3, 2, 5, torch.float64, scale=0.7)),
    empty=(_sample(0, 4, 5, 2, 16), _sample(2, 0, 5, 2, 16)),
    promises={
        "_attend": KernelPromise(uses_dot=True),
        "_attend_wide": KernelPromise(uses_dot=True),
        # Not held to half of the waves: a row of 16384 scores in registers has 64 bytes a lane under way.
        "_softmax_rows": KernelPromise(),
        "_merge": KernelPromise(
            bound_by_memory=True, narrow_loads_because="maxima and sums are one number for each row of a part"
        ),
    },
    also=(
        Also(
            "gemm_softmax",
            small=(_sample(1, 5, 37, 1, 256), _sample(1, 3, 17000, 1, 256, torch.bfloat16)),
            # Few queries: the products run on the CPU here, and a row is the same however many there are.
            real=(_sample(1, 16, 4096, 1, 512), _sample(1, 16, 16384, 1, 512), _sample(1, 16, 32768, 1, 512)),
        ),
    ),
    similar=_similar,
)

# The same for every matrix unit.
HIP_HEADS = tuple(HIP_TILES[MatrixUnit.DOT])


def _hip_space(problem: Problem, arch: Arch) -> Iterable[Config]:
    return hip_tiles(arch).get(int(problem["d"]), ())


HIP = Kernels(
    module="rocm_sd.kernels.hip.attention",
    promises={"attend": KernelPromise(uses_dot=True)},
    space=_hip_space,
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"d": 40, "t": [1, CROSS]}, _sample(2, 4096, 77, 8, 40)),
        Bucket({"d": 40, "t": [CROSS + 1, _ANY]}, _sample(2, 4096, 4096, 8, 40)),
        Bucket({"d": 64, "t": [1, CROSS]}, _sample(2, 4096, 77, 10, 64)),
        Bucket({"d": 64, "t": [CROSS + 1, 2048]}, _sample(2, 1024, 1024, 20, 64)),
        Bucket({"d": 64, "t": [2049, _ANY]}, _sample(2, 4096, 4096, 10, 64)),
        Bucket({"d": 80, "t": [1, CROSS]}, _sample(2, 1024, 77, 8, 80)),
        Bucket({"d": 80, "t": [CROSS + 1, _ANY]}, _sample(2, 1024, 1024, 8, 80)),
        Bucket({"d": 128, "t": [1, _ANY]}, _sample(1, 4096, 4096, 24, 128, torch.bfloat16)),
        Bucket({"d": 160, "t": [1, CROSS]}, _sample(2, 256, 77, 8, 160)),
        Bucket({"d": 160, "t": [CROSS + 1, _ANY]}, _sample(2, 256, 256, 8, 160)),
        Bucket({"d": 512, "t": [1, _ANY]}, _sample(1, 4096, 4096, 1, 512)),
    ),
    work=_work,
    # It competes with flash kernels of the vendor's libraries, so only a timed card may prefer it.
    untimed="torch",
    # SD 1.5 at 768x768, its smallest maps, SDXL's text, and the VAE at 1024x1024; batch 2 is one picture with guidance.
    timed=(
        _sample(2, 9216, 9216, 8, 40),
        _sample(2, 9216, 77, 8, 40),
        _sample(2, 4096, 4096, 8, 40, torch.bfloat16),
        _sample(2, 2304, 2304, 8, 80),
        _sample(2, 64, 64, 8, 160),
        _sample(2, 64, 77, 8, 160),
        _sample(2, 1024, 77, 20, 64),
        _sample(1, 16384, 16384, 1, 512),
        _sample(1, 16384, 16384, 1, 512, torch.bfloat16),
    ),
)
