"""The calls that count: what upsample_conv2d is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.configs.upsample_conv2d import UpsampleConv2dConfig
from rocm_sd.kernels.hip.upsample_conv2d import TILES as HIP_TILES
from rocm_sd.kernels.hip.upsample_conv2d import tiles as hip_tiles
from rocm_sd.ops.conv2d.workload import TILES, fitting_stages, rectangle
from rocm_sd.ops.definition import Also, Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.samples import Draw, Sample, dtype_name
from rocm_sd.ops.upsample_conv2d import reference
from rocm_sd.ops.upsample_conv2d.parity import parity_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "HIP_SMALLEST", "TUNING", "VERIFICATION", "problem", "variant"]


def problem(x: torch.Tensor, weight: torch.Tensor, *_rest: Any) -> Problem:
    """`pixels` are those of x, over the whole batch."""
    N, Cin, H, W = x.shape
    return {"pixels": N * H * W, "cin": Cin, "cout": weight.shape[0], "dtype": dtype_name(x.dtype)}


def _sample(
    shape: tuple[int, int, int, int], cout: int, *, bias: bool = True, dtype: torch.dtype = torch.float16
) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        Cin = shape[1]
        x = draw.image(*shape)
        weight = draw.image(cout, Cin, 3, 3, std=(Cin * 9) ** -0.5)
        sums = parity_weights(weight) if draw.filled else draw(4, cout, 2, 2, Cin)
        return x, weight, draw(cout) if bias else None, sums

    name = f"{'x'.join(map(str, shape))} to {cout}"
    return Sample(f"{name}, {'bias' if bias else 'bare'}, {dtype_name(dtype)}", dtype, build)


def variant(problem: Problem, config: Any, _device: torch.device) -> str:
    """Of either language's config: what of a tile is not whole."""
    said = (("two widths", getattr(config, "block_n2", 0)), ("a part of a step", int(problem["cin"]) % config.block_k))
    return ", ".join(text for text, true in said if true) or "whole"


def _similar(problem: Problem) -> Iterator[Sample]:
    """In one picture, or in one of fewer lines; at last with fewer results, whose weights are fewer, too."""
    dtype = getattr(torch, str(problem["dtype"]))
    all_, cout = int(problem["pixels"]), int(problem["cout"])
    for pixels, channels in ((all_, cout), (2**13, cout), (2**10, cout), (2**10, min(cout, 320))):
        yield _sample((1, int(problem["cin"]), *rectangle(min(pixels, all_))), channels, dtype=dtype)


def _real(n: int, channels: int, size: int) -> Sample:
    return _sample((n, channels, size, size), channels)


def _space(problem: Problem, arch: Arch) -> Iterator[UpsampleConv2dConfig]:
    for block_m, block_n, block_n2, block_k, warps, stages in TILES.get(arch.matrix_unit or MatrixUnit.NONE, ()):
        if block_n2 and int(problem["cout"]) % (block_n + block_n2):
            continue
        fitting = fitting_stages(stages, (block_m + block_n + block_n2) * block_k * 2, arch)
        if fitting:
            yield UpsampleConv2dConfig(block_m, block_n, block_n2, block_k, group_m=8, warps=warps, stages=fitting)


def _work(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_rest: Any) -> Work:
    """Of the four 2x2 convolutions: what is needed, not what enlarging first would cost."""
    N, Cin, H, W = x.shape
    Cout = weight.shape[0]
    moved = x.numel() + 16 * Cout * Cin + 4 * N * H * W * Cout + (0 if bias is None else Cout)
    return Work(2.0 * 4 * N * H * W * 4 * Cin * Cout, float(moved * x.element_size()))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.upsample_conv2d",
    reference=reference.upsample_conv2d,
    problem=problem,
    small=(
        _sample((1, 32, 3, 5), 24),
        _sample((2, 20, 3, 2), 17, dtype=torch.bfloat16),
        _sample((1, 16, 1, 1), 16, bias=False),
    ),
    # The smallest and the largest of the UNet of Stable Diffusion 1.5, and the largest of its VAE.
    real=(_real(2, 1280, 8), _real(2, 640, 32), _real(1, 256, 256)),
    tiny=(
        _sample((2, 3, 2, 3), 2, dtype=torch.float64),
        _sample((2, 3, 2, 3), 2, bias=False, dtype=torch.float64),
    ),
    empty=(_sample((0, 32, 4, 4), 8),),
    promises={
        "_upsample_conv2d": KernelPromise(uses_dot=True),
        "_interleave": KernelPromise(bound_by_memory=True),
    },
    # A small map: the library's part runs on the CPU here.
    also=(Also("parity_library", (_sample((2, 20, 3, 2), 17),), (_real(2, 640, 8),)),),
    similar=_similar,
)


def _hip_space(problem: Problem, arch: Arch) -> Iterator[Config]:
    """Each tile of the matrix unit, but those so large that an eighth of the GPU works: four are for each place."""
    pixels, cout, units = int(problem["pixels"]), int(problem["cout"]), arch.compute_units or 1
    for config in hip_tiles(arch):
        if 4 * config.tiles(pixels, cout) * 8 >= units:
            yield config


# The tile that every matrix unit has.
HIP_SMALLEST = HIP_TILES[MatrixUnit.DOT][-1]
HIP = Kernels(
    module="rocm_sd.kernels.hip.upsample_conv2d",
    promises={"upsample_conv2d": KernelPromise(uses_dot=True)},
    space=_hip_space,
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"pixels": [1, 256]}, _real(2, 1280, 8)),
        Bucket({"pixels": [257, 1024]}, _real(2, 1280, 16)),
        Bucket({"pixels": [1025, 4096]}, _real(2, 640, 32)),
        Bucket({"pixels": [4097, 2**31]}, _real(1, 512, 128)),
    ),
    work=_work,
    untimed="torch",
    # UNet and VAE of SD 1.5 at 512x512, then of SDXL at 1024x1024; batch 2 is one picture with guidance.
    timed=(
        _real(1, 512, 64), _real(1, 256, 256),
        _real(2, 1280, 32), _real(2, 640, 64), _real(1, 512, 256), _real(1, 256, 512),
    ),
)  # fmt: skip
