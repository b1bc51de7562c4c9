"""The calls that count: what linear_geglu is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.configs.linear_geglu import LinearGegluConfig
from rocm_sd.kernels.hip.linear_geglu import tiles as hip_tiles
from rocm_sd.ops.conv2d.workload import fitting_stages
from rocm_sd.ops.definition import Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.linear_geglu import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "TUNING", "VERIFICATION", "problem", "variant"]


def problem(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Problem:
    rows, K = weight.shape
    return {
        "m": x.numel() // K,
        "f": rows // 2,
        "k": K,
        "bias": int(bias is not None),
        "dtype": dtype_name(x.dtype),
    }


def _sample(M: int, F: int, K: int, dtype: torch.dtype = torch.float16, *, bias: bool = True) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        return draw(M, K), draw(2 * F, K, std=2 * K**-0.5), draw(2 * F) if bias else None

    return Sample(f"{M}x{K} to {F}, {dtype_name(dtype)}{'' if bias else ', bare'}", dtype, build)


def variant(problem: Problem, config: LinearGegluConfig, _device: torch.device) -> str:
    return "a part of a step" if int(problem["k"]) % config.block_k else "whole"


def _similar(problem: Problem) -> Iterator[Sample]:
    """Of as many rows, or of fewer."""
    m, f, k = (int(problem[name]) for name in ("m", "f", "k"))
    for rows in (m, min(m, 4096), min(m, 256)):
        yield _sample(rows, f, k, getattr(torch, str(problem["dtype"])), bias=bool(problem["bias"]))


def _feed_in(M: int, C: int) -> Sample:
    return _sample(M, 4 * C, C)


# None spills: on gfx1100 128x64 takes 241 of 256 VGPRs in 4 warps and 125 in 8, and 128x128 in 8 takes 241.
_WMMA = (
    (128, 128, 32, 8, 2),
    (128, 64, 32, 8, 2),
    (128, 64, 32, 4, 2),
    (64, 64, 32, 4, 2),
    (128, 32, 32, 4, 2),
    (64, 32, 32, 4, 2),
)
# block_m, block_n, block_k, warps, stages. Each tile has two sums of block_m x block_n.
_TILES: Mapping[MatrixUnit, tuple[tuple[int, int, int, int, int], ...]] = {
    # Products by vector instructions. Of 32 rows, 32 values of each, two waves load 16 bytes a lane and four load 8.
    MatrixUnit.DOT: ((64, 64, 32, 4, 1), (64, 32, 32, 2, 1), (32, 32, 32, 2, 1)),
    # On sm_90 none spills: 173 registers a thread for 128x128, 198 for 256x64, 126 for 64x64.
    MatrixUnit.TENSOR_CORE: (
        (128, 128, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (256, 64, 64, 8, 4),
        (128, 64, 64, 8, 4),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 4),
        (128, 32, 64, 4, 4),
    ),
    MatrixUnit.MFMA: (
        (128, 128, 64, 8, 2),
        (128, 128, 32, 8, 2),
        (128, 128, 32, 4, 2),
        (128, 64, 64, 4, 2),
        (64, 64, 64, 4, 2),
        (64, 32, 64, 4, 2),
    ),
    MatrixUnit.WMMA_GFX11: _WMMA,
    MatrixUnit.WMMA_GFX12: _WMMA,
}


def _space(problem: Problem, arch: Arch) -> Iterator[LinearGegluConfig]:
    units = arch.compute_units or 1
    for block_m, block_n, block_k, warps, most_stages in _TILES.get(arch.matrix_unit or MatrixUnit.NONE, ()):
        tiles = -(-int(problem["m"]) // block_m) * -(-int(problem["f"]) // block_n)
        # Rows of x, and of both halves of the weight.
        stages = fitting_stages(most_stages, (block_m + 2 * block_n) * block_k * 2, arch)
        # A tile so large that an eighth of the GPU works loses to a smaller one.
        if tiles * 8 >= units and stages:
            yield LinearGegluConfig(block_m, block_n, block_k, group_m=8, warps=warps, stages=stages)


def _work(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Work:
    rows, K = weight.shape
    M = x.numel() // K
    moved = x.numel() + weight.numel() + M * rows // 2 + (0 if bias is None else rows)
    return Work(2.0 * M * rows * K, float(moved * x.element_size()))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.linear_geglu",
    reference=reference.linear_geglu,
    problem=problem,
    small=(
        _sample(33, 48, 64),
        _sample(5, 77, 45, torch.bfloat16),
        _sample(17, 32, 96, bias=False),
        _sample(20, 40, 320, torch.bfloat16, bias=False),
        # Sizes of 1 are constants of the code. Of 1x1 to 1 the gate is drawn so low that y is 0 in float16.
        _sample(3, 1, 1),
        _sample(1, 1, 2),
    ),
    # The feed-forwards of Stable Diffusion 1.5 and SDXL.
    real=(_feed_in(8192, 320), _feed_in(2048, 640), _feed_in(512, 1280), _feed_in(128, 1280), _feed_in(2048, 1280)),
    tiny=(_sample(6, 4, 5, torch.float64), _sample(6, 4, 5, torch.float64, bias=False)),
    empty=(_sample(0, 16, 32),),
    promises={"_linear_geglu": KernelPromise(uses_dot=True)},
    similar=_similar,
)


def _hip_space(problem: Problem, arch: Arch) -> Iterator[Config]:
    """Each tile of the matrix unit, but those so large that an eighth of the GPU works."""
    units = arch.compute_units or 1
    for config in hip_tiles(arch):
        if config.tiles(int(problem["m"]), 2 * int(problem["f"])) * 8 >= units:
            yield config


HIP = Kernels(
    module="rocm_sd.kernels.hip.linear_geglu",
    promises={"linear_geglu": KernelPromise(uses_dot=True)},
    space=_hip_space,
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"m": [1, 256]}, _feed_in(128, 1280)),
        Bucket({"m": [257, 1024]}, _feed_in(512, 1280)),
        Bucket({"m": [1025, 4096], "k": [1, 959]}, _feed_in(2048, 640)),
        Bucket({"m": [1025, 4096], "k": [960, 2**31]}, _feed_in(2048, 1280)),
        Bucket({"m": [4097, 2**31], "k": [1, 447]}, _feed_in(8192, 320)),
        Bucket({"m": [4097, 2**31], "k": [448, 959]}, _feed_in(8192, 640)),
        Bucket({"m": [4097, 2**31], "k": [960, 2**31]}, _feed_in(16384, 1280)),
    ),
    work=_work,
    # The product is left to the library, and the passes after it are one: never slower than stock.
    untimed="library_geglu",
    # Eight pictures with guidance of SD 1.5 at 512x512 and of SDXL at 1024x1024; one picture of each is in the buckets.
    timed=(
        _feed_in(65536, 320), _feed_in(16384, 640), _feed_in(4096, 1280), _feed_in(1024, 1280), _feed_in(65536, 640),
    ),
)  # fmt: skip
