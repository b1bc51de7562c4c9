"""The calls that count: what group_norm_silu is proven on, tuned for and timed at."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.group_norm_silu import GroupNormSiluConfig
from rocm_sd.kernels.hip.group_norm_silu import GroupNormSiluConfig as HipConfig
from rocm_sd.kernels.sizes import power_of_2
from rocm_sd.ops.definition import Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, fits, rounded_to
from rocm_sd.ops.group_norm_silu import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "TUNING", "VERIFICATION", "problem", "variant"]


def problem(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,  # noqa: ARG001 -- the op's own arguments
    bias: torch.Tensor | None = None,  # noqa: ARG001
    add: torch.Tensor | None = None,  # noqa: ARG001
    eps: float = 1e-5,  # noqa: ARG001
    silu: bool = True,  # noqa: ARG001
    concat: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,  # noqa: ARG001
    to: str | None = None,
) -> Problem:
    N, C, H, W = x.shape
    C += 0 if concat is None else concat.shape[1]
    return {"n": N, "c": C, "hw": H * W, "groups": groups, "dtype": dtype_name(x.dtype), **rounded_to(to)}


def _sample(
    shape: tuple[int, int, int, int],
    groups: int,
    dtype: torch.dtype,
    *,
    affine: bool = True,
    add: bool = True,
    concat: int = 0,
    to: str | None = None,
    mean: float = 0.7,
    std: float = 2.0,
) -> Sample:
    """`concat`: how many of the channels lie in a tensor of their own; `to`: in which 8 bits the result is."""

    def build(draw: Draw) -> tuple[Any, ...]:
        N, C, H, W = shape
        x = draw.image(N, C - concat, H, W, mean=mean, std=std)
        weight, bias = (draw(C), draw(C)) if affine else (None, None)
        given = x, groups, weight, bias, draw(N, C) if add else None, 1e-5, affine
        if to is None:
            return (*given, draw.image(N, concat, H, W, mean=-0.4, std=3.0)) if concat else given
        other = draw.image(N, concat, H, W, mean=-0.4, std=3.0) if concat else None
        # So that some values are beyond the limit.
        return *given, other, draw(1, mean=2.0 / LIMITS[to], std=0.0, dtype=torch.float32), to

    said = ((", no affine", not affine), (", no add", not add), (f", {concat} of them in another", concat),
            (f", to {to}", to), (f", {mean:g} +- {std:g}", std != 2.0))  # fmt: skip
    parts = "".join(word for word, true in said if true)
    size = "x".join(map(str, shape))
    return Sample(f"{size} in {groups} groups, {dtype_name(dtype)}{parts}", dtype, build)


def variant(problem: Problem, config: GroupNormSiluConfig, _device: torch.device) -> str:
    width = int(problem["c"]) // int(problem["groups"])
    return "one pass" if config.one_pass(int(problem["hw"]), width) else "two passes"


def _similar(problem: Problem) -> Iterator[Sample]:
    """Of as many pixels, or of fewer, in one line each."""
    n, c, hw, groups = (int(problem[name]) for name in ("n", "c", "hw", "groups"))
    for items, pixels in ((n, hw), (1, hw), (1, min(hw, 2**16)), (1, min(hw, 2**13))):
        to = str(problem.get("to") or "") or None
        yield _sample((items, c, 1, pixels), groups, getattr(torch, str(problem["dtype"])), to=to)


def _real(N: int, C: int, H: int, W: int) -> Sample:
    """Half of the UNet's norms and all of the VAE's have no add; with one, stock would look worse than it mostly is."""
    return _sample((N, C, H, W), 32, torch.float16, add=False)


def _space(problem: Problem, arch: Arch) -> Iterator[GroupNormSiluConfig]:
    lanes = arch.wave_size or 32
    group = power_of_2(int(problem["hw"])) * power_of_2(int(problem["c"]) // int(problem["groups"]))
    for warps in (4, 8, 16):
        # 64 values a lane: beside their addresses they stay below half of a file of 256 registers.
        if group <= 64 * warps * lanes:
            yield _config(64 * warps * lanes, warps, 64, 32, 4, 4)
    for channels, rows, warps, slices_per_cu in product((64, 128), (16, 32, 64), (4, 8), (2, 4, 8)):
        # Two running values an element: above 32 elements a lane they do not fit beside their addresses.
        if 8 <= channels * rows // (warps * lanes) <= 32:
            yield _config(0, 4, channels, rows, warps, slices_per_cu)


def _config(
    whole_elements: int, whole_warps: int, channels: int, rows: int, warps: int, slices_per_cu: int
) -> GroupNormSiluConfig:
    """Both passes over x in tiles of one size."""
    tile = channels, rows, warps
    return GroupNormSiluConfig(whole_elements, whole_warps, *tile, slices_per_cu, *tile)


def _work(x: torch.Tensor, groups: int, *rest: Any) -> Work:
    asked = problem(x, groups, *rest)
    elements = math.prod(float(asked[size]) for size in ("n", "c", "hw"))
    # Ten operations an element; x is read twice, since no cache holds the largest maps.
    return Work(10.0 * elements, 3.0 * elements * x.element_size())


# The last resolution's first block: what comes from below, and the skip connection after it.
_JOINED = _sample((2, 960, 64, 64), 32, torch.float16, add=False, concat=320)

VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.group_norm_silu",
    reference=reference.group_norm_silu,
    problem=problem,
    # Maps of 35x59 and more are too large for one workgroup on any architecture, so that both ways are taken.
    small=(
        _sample((2, 48, 5, 7), 4, torch.float16),
        _sample((1, 96, 11, 4), 32, torch.float32, affine=False, add=False),
        _sample((1, 32, 1, 1), 32, torch.float16),
        _sample((1, 30, 67, 64), 3, torch.bfloat16),
        _sample((1, 72, 37, 61), 2, torch.float16),
        _sample((2, 72, 35, 59), 3, torch.float16, concat=20),
        *(
            _sample((1, 30, *size), 3, dtype, affine=False, add=False, mean=7.3, std=0.0)
            for size in ((7, 5), (67, 64))
            for dtype in (torch.float16, torch.float32)
        ),
        _sample((2, 48, 5, 7), 4, torch.float16, to="int8"),
        _sample((1, 72, 37, 61), 2, torch.float16, to="float8_e4m3fn"),
        _sample((1, 48, 5, 7), 4, torch.bfloat16, add=False, to="float8_e4m3fnuz"),
    ),
    # The widest and the narrowest norm of Stable Diffusion 1.5, and the largest of its VAE at 512x512.
    real=(_real(2, 320, 64, 64), _real(2, 2560, 8, 8), _real(1, 256, 512, 512), _JOINED,
          *(_sample((2, 640, 64, 64), 32, torch.float16, to=to) for to in LIMITS)),
    tiny=(
        _sample((2, 6, 3, 4), 3, torch.float64),
        _sample((2, 6, 3, 4), 3, torch.float64, affine=False, add=False),
        _sample((2, 6, 3, 4), 3, torch.float64, concat=2),
    ),
    empty=(_sample((0, 32, 4, 4), 8, torch.float16),),
    promises={
        "_whole": KernelPromise(narrow_loads_because="a group of 10 channels starts at any multiple of 4 bytes"),
        "_moments": KernelPromise(bound_by_memory=True),
        "_fold": KernelPromise(
            narrow_loads_because="a group may have one channel, and what it reads is one row for each slice"
        ),
        "_apply": KernelPromise(bound_by_memory=True),
    },
    similar=_similar,
    fits=fits,
)  # fmt: skip


def _hip_space(_problem: Problem, _arch: Arch) -> Iterator[HipConfig]:
    for whole_values in (16, 32):
        for slices_per_cu in (2, 4, 8):
            yield HipConfig(whole_values, slices_per_cu)


HIP = Kernels(
    module="rocm_sd.kernels.hip.group_norm_silu",
    promises={
        "group_norm_silu_whole": KernelPromise(
            narrow_loads_because="a group of 10 channels starts at any multiple of 4 bytes"
        ),
        "group_norm_silu_moments": KernelPromise(bound_by_memory=True),
        "group_norm_silu_fold": KernelPromise(
            narrow_loads_because="a group may have one channel, and what it reads is one row for each slice"
        ),
        "group_norm_silu_apply": KernelPromise(bound_by_memory=True),
    },
    space=_hip_space,
    # No group is so small that one workgroup holds it.
    small_configs=(HipConfig(whole_values=0),),
)

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"hw": [1, 256]}, _real(2, 1280, 16, 16)),
        Bucket({"hw": [257, 1024]}, _real(2, 640, 32, 32)),
        Bucket({"hw": [1025, 16384]}, _real(2, 320, 64, 64)),
        Bucket({"hw": [16385, 2**31]}, _real(1, 256, 512, 512)),
    ),
    work=_work,
    untimed="triton",
    # UNet and VAE of SD 1.5 at 512x512, then of SDXL at 1024x1024; batch 2 is one picture with guidance.
    timed=tuple(
        _real(*shape)
        for shape in (
            (2, 1280, 8, 8), (2, 2560, 8, 8), (2, 2560, 16, 16), (2, 960, 64, 64), (1, 512, 64, 64), (1, 512, 256, 256),
            (1, 128, 512, 512), (2, 320, 128, 128), (2, 1280, 32, 32), (1, 256, 1024, 1024), (1, 128, 1024, 1024),
        )
    ),
)  # fmt: skip
