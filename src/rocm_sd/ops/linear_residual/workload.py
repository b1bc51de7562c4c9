"""The calls that count: what linear_residual is proven on, tuned for and timed at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.configs.linear_residual import LinearResidualConfig
from rocm_sd.kernels.hip.linear_residual import TILES as HIP_TILES
from rocm_sd.kernels.hip.linear_residual import tiles as hip_tiles
from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.ops.definition import Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.linear_residual import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "HIP_SMALLEST", "TUNING", "VERIFICATION", "problem", "variant"]


def problem(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> Problem:
    N, K = weight.shape
    return {
        "m": x.numel() // K,
        "n": N,
        "k": K,
        "bias": int(bias is not None),
        "residual": int(residual is not None),
        "dtype": dtype_name(x.dtype),
    }


def _sample(
    M: int, N: int, K: int, dtype: torch.dtype = torch.float16, *, bias: bool = True, residual: bool = True
) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        return (
            draw(M, K),
            draw(N, K, std=K**-0.5),
            draw(N) if bias else None,
            draw(M, N) if residual else None,
        )

    parts = "".join(f" + {name}" for name, has in (("bias", bias), ("residual", residual)) if has)
    return Sample(f"{M}x{K} @ {K}x{N}{parts}, {dtype_name(dtype)}", dtype, build)


def _apart(B: int, S: int, C: int, rest: int, dtype: torch.dtype = torch.float16) -> Sample:
    """The first S of S + `rest` tokens of each item, as a joint attention to picture and text leaves them."""

    def build(draw: Draw) -> tuple[Any, ...]:
        return draw(B, S + rest, C)[:, :S], draw(C, C, std=C**-0.5), draw(C), None

    return Sample(f"{B} apart of {S}x{C} @ {C}x{C} + bias, {dtype_name(dtype)}", dtype, build)


def variant(problem: Problem, config: Any, _device: torch.device) -> str:
    """Of either language's config: whether K is in parts, and whether its steps are whole."""
    k = int(problem["k"])
    said = (
        ("in parts", min(config.split_k, ceil_div(k, config.block_k)) > 1),
        ("a part of a step", k % config.block_k),
    )
    return ", ".join(text for text, true in said if true) or "whole"


def _similar(problem: Problem) -> Iterator[Sample]:
    """Of as many rows, or of fewer."""
    m, n, k, bias, residual = (int(problem[name]) for name in ("m", "n", "k", "bias", "residual"))
    for rows in (m, min(m, 4096), min(m, 256)):
        dtype = getattr(torch, str(problem["dtype"]))
        yield _sample(rows, n, k, dtype, bias=bool(bias), residual=bool(residual))


def _out(M: int, C: int) -> Sample:
    return _sample(M, C, C)


def _qkv(M: int, C: int) -> Sample:
    return _sample(M, 3 * C, C, bias=False, residual=False)


def _feed_in(M: int, C: int) -> Sample:
    return _sample(M, 8 * C, C, residual=False)


def _feed_out(M: int, C: int) -> Sample:
    return _sample(M, C, 4 * C)


def _text(C: int, K: int) -> Sample:
    return _sample(2 * 77, 2 * C, K, bias=False, residual=False)


_WMMA = (
    (128, 128, 32, 8, 2),
    (128, 64, 32, 4, 2),
    (64, 128, 32, 4, 2),
    (64, 64, 32, 4, 2),
)
# block_m, block_n, block_k, warps, stages
_TILES: Mapping[MatrixUnit, tuple[tuple[int, int, int, int, int], ...]] = {
    # Products by vector instructions: both operands of a tile come from LDS once for each step.
    MatrixUnit.DOT: ((64, 64, 32, 4, 1), (64, 32, 32, 4, 1), (32, 32, 32, 4, 1)),
    MatrixUnit.TENSOR_CORE: (
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 4),
    ),
    MatrixUnit.MFMA: (
        (256, 128, 32, 8, 2),
        (128, 128, 64, 4, 2),
        (128, 128, 32, 4, 2),
        (128, 64, 64, 4, 2),
        (64, 64, 64, 4, 2),
    ),
    MatrixUnit.WMMA_GFX11: _WMMA,
    MatrixUnit.WMMA_GFX12: _WMMA,
}


def _space(problem: Problem, arch: Arch) -> Iterator[LinearResidualConfig]:
    """Each tile of the matrix unit as it is; and with K shared by several programs where the tiles are too few."""
    m, n, k = int(problem["m"]), int(problem["n"]), int(problem["k"])
    units = arch.compute_units or 1
    for block_m, block_n, block_k, warps, stages in _TILES.get(arch.matrix_unit or MatrixUnit.NONE, ()):
        tiles = -(-m // block_m) * -(-n // block_n)
        # A tile so large that an eighth of the GPU works loses to a smaller one, split or not.
        if tiles * 8 < units:
            continue
        # With a residual beside the accumulator, 128x256 spills 212 bytes a thread on sm_90.
        spills = arch.matrix_unit is MatrixUnit.TENSOR_CORE and block_m * block_n > 128 * 128
        if spills and problem["residual"]:
            continue
        for split_k in (1, *_splits(tiles, k, block_k, units)[-1:]):
            yield LinearResidualConfig(
                block_m, block_n, block_k, group_m=8, split_k=split_k, warps=warps, stages=stages
            )


def _splits(tiles: int, k: int, block_k: int, units: int) -> tuple[int, ...]:
    """In how many parts K may be cut: so many that no more workgroups begin than one and a half times fill the GPU."""
    # Of a short K the float32 parts are more bytes than the operands; and loading ahead needs four steps.
    return tuple(s for s in (2, 4, 8) if 2 * tiles * s <= 3 * units and k >= max(1024, 4 * s * block_k))


def _work(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> Work:
    N, K = weight.shape
    M = x.numel() // K
    outputs = M * N * (1 if residual is None else 2) + (0 if bias is None else N)
    return Work(2.0 * M * N * K, float((M * K + N * K + outputs) * x.element_size()))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.linear_residual",
    reference=reference.linear_residual,
    problem=problem,
    small=(
        _sample(33, 48, 64),
        _sample(5, 77, 45, torch.bfloat16),
        _sample(17, 32, 96, residual=False),
        _sample(20, 40, 320, torch.bfloat16, bias=False),
        _sample(1, 1, 1),
        _apart(2, 9, 40, 3),
    ),
    # Each linear of a transformer block of Stable Diffusion 1.5, and the narrowest maps, whose tiles are few.
    real=(_out(8192, 320), _qkv(2048, 640), _feed_in(512, 1280), _feed_out(128, 1280), _text(320, 768)),
    tiny=(_sample(6, 4, 5, torch.float64), _sample(6, 4, 5, torch.float64, bias=False, residual=False)),
    empty=(_sample(0, 16, 32),),
    promises={
        "_product": KernelPromise(uses_dot=True),
        "_fold": KernelPromise(bound_by_memory=True),
    },
    similar=_similar,
)


def _hip_space(problem: Problem, arch: Arch) -> Iterator[Config]:
    """Each tile of the matrix unit, but those so large that an eighth of the GPU works; whole, and with K in parts."""
    m, n, k = int(problem["m"]), int(problem["n"]), int(problem["k"])
    units = arch.compute_units or 1
    for config in hip_tiles(arch):
        tiles = config.tiles(m, n)
        if tiles * 8 < units:
            continue
        for split_k in (1, *_splits(tiles, k, config.block_k, units)):
            yield replace(config, split_k=split_k)


# The tile that every matrix unit has.
HIP_SMALLEST = HIP_TILES[MatrixUnit.DOT][-1]
HIP = Kernels(
    module="rocm_sd.kernels.hip.linear_residual",
    promises={
        "linear_residual": KernelPromise(uses_dot=True),
        "linear_split": KernelPromise(uses_dot=True),
        "batched_linear": KernelPromise(uses_dot=True),
        "conv2d_finish": KernelPromise(
            bound_by_memory=True, narrow_loads_because="what is added is half as wide as the sums beside it"
        ),
    },
    space=_hip_space,
    # One picture with guidance of Stable Diffusion 3 at 512x512.
    real=(_apart(2, 1024, 1536, 154),),
    # With K in parts samples that lie apart are copied, and the data may name such a config.
    small_configs=(replace(HIP_SMALLEST, split_k=3), HIP_SMALLEST),
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"m": [1, 256], "k": [1, 2559]}, _out(128, 1280)),
        Bucket({"m": [1, 256], "k": [2560, 2**31]}, _feed_out(128, 1280)),
        Bucket({"m": [257, 1024], "n": [1, 2047]}, _out(512, 1280)),
        Bucket({"m": [257, 1024], "n": [2048, 2**31]}, _qkv(512, 1280)),
        Bucket({"m": [1025, 4096], "n": [1, 2047]}, _out(2048, 1280)),
        Bucket({"m": [1025, 4096], "n": [2048, 2**31]}, _feed_in(2048, 1280)),
        Bucket({"m": [4097, 2**31], "n": [1, 447]}, _out(8192, 320)),
        Bucket({"m": [4097, 2**31], "n": [448, 2047]}, _out(8192, 640)),
        Bucket({"m": [4097, 2**31], "n": [2048, 2**31]}, _feed_in(8192, 640)),
    ),
    work=_work,
    untimed="torch",
    # The linears of SD 1.5 at 512x512, then of SDXL at 1024x1024; 2 maps are one picture with guidance.
    timed=(
        _qkv(8192, 320), _feed_in(8192, 320), _feed_out(8192, 320),
        _qkv(2048, 640), _out(2048, 640), _feed_in(2048, 640), _feed_out(2048, 640),
        _feed_in(512, 1280), _feed_out(512, 1280),
        _qkv(128, 1280), _feed_in(128, 1280),
        _text(320, 768), _text(640, 768), _text(1280, 768),
        _qkv(8192, 640), _feed_out(8192, 640), _qkv(2048, 1280), _feed_out(2048, 1280),
        _text(640, 2048), _text(1280, 2048),
        # Eight pictures of each.
        *(
            linear(M, C)
            for M, C in ((65536, 320), (16384, 640), (4096, 1280), (1024, 1280), (65536, 640), (16384, 1280))
            for linear in (_out, _qkv, _feed_out)
        ),
    ),
)  # fmt: skip
