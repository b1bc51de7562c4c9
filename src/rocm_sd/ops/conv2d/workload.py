"""The calls that count: what conv2d is proven on, tuned for and timed at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.configs.conv2d import Conv2dConfig
from rocm_sd.kernels.hip.conv2d import NARROW_TILES as HIP_NARROW_TILES
from rocm_sd.kernels.hip.conv2d import TILES as HIP_TILES
from rocm_sd.kernels.hip.conv2d import tiles as hip_tiles
from rocm_sd.kernels.sizes import ceil_div, power_of_2
from rocm_sd.ops.conv2d import reference
from rocm_sd.ops.definition import Also, Bucket, KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning import Problem

__all__ = [
    "HIP",
    "HIP_SMALLEST",
    "TILES",
    "TUNING",
    "VERIFICATION",
    "fitting_stages",
    "output_size",
    "problem",
    "rectangle",
    "variant",
]


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001 -- the op's own arguments
    add: torch.Tensor | None = None,  # noqa: ARG001
    residual: torch.Tensor | None = None,  # noqa: ARG001
    stride: int = 1,
    padding: int = 0,
    concat: torch.Tensor | None = None,
) -> Problem:
    """`pixels` are those of the output, over the whole batch."""
    N, Cin, H, W = x.shape
    Cin += 0 if concat is None else concat.shape[1]
    Cout, _, kernel, _ = weight.shape
    height, width = (output_size(size, kernel, stride, padding) for size in (H, W))
    return {
        "pixels": N * height * width,
        "cin": Cin,
        "cout": Cout,
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "dtype": dtype_name(x.dtype),
    }


def _sample(
    shape: tuple[int, int, int, int],
    cout: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    parts: str = "bias add residual",
    dtype: torch.dtype = torch.float16,
    concat: int = 0,
    padding: int | None = None,
) -> Sample:
    """`concat`: how many of the input channels lie in a tensor of their own."""
    padding = kernel // 2 if padding is None else padding

    def build(draw: Draw) -> tuple[Any, ...]:
        N, Cin, H, W = shape
        size = output_size(H, kernel, stride, padding), output_size(W, kernel, stride, padding)
        x = draw.image(N, Cin - concat, H, W)
        weight = draw.image(cout, Cin, kernel, kernel, std=(Cin * kernel * kernel) ** -0.5)
        bias = draw(cout) if "bias" in parts else None
        add = draw(N, cout) if "add" in parts else None
        residual = draw.image(N, cout, *size) if "residual" in parts else None
        given = x, weight, bias, add, residual, stride, padding
        return (*given, draw.image(N, concat, H, W)) if concat else given

    name = f"{'x'.join(map(str, shape))} to {cout}, {kernel}x{kernel}"
    name += f", stride {stride}" if stride > 1 else ""
    name += f", {concat} channels in another" if concat else ""
    return Sample(f"{name}, {parts or 'bare'}, {dtype_name(dtype)}", dtype, build)


def variant(problem: Problem, config: Any, _device: torch.device) -> str:
    """Of either language's config: which taps, whether they are in parts, and what of a tile is not whole."""
    kernel, cin = int(problem["kernel"]), int(problem["cin"])
    steps = kernel * kernel * ceil_div(cin, config.block_k)
    said = (
        (f", stride {problem['stride']}", problem["stride"] != 1),
        (", no padding", kernel > 1 and not problem["padding"]),
        (", in parts", min(config.split_k, steps) > 1),
        (", two widths", getattr(config, "block_n2", 0)),
        (", a part of a step", cin % config.block_k),
    )
    return f"{kernel}x{kernel}" + "".join(text for text, true in said if true)


def rectangle(pixels: int) -> tuple[int, int]:
    """Height and width of so many pixels, as near to a square as they can be."""
    height = next(side for side in range(int(pixels**0.5), 0, -1) if pixels % side == 0)
    return height, pixels // height


# Pixels of a call that is like another: of 320 channels they and the result are 20 MB in half precision.
_LIKE_PIXELS = (2**15, 2**12, 2**8)


def _similar(problem: Problem) -> Iterator[Sample]:
    """In one picture, or in one of fewer lines; at last with fewer results, whose weights are fewer, too."""
    kernel, stride, padding = (int(problem[name]) for name in ("kernel", "stride", "padding"))
    cout = int(problem["cout"])
    wanted = [(pixels, cout) for pixels in (int(problem["pixels"]), *_LIKE_PIXELS)]
    for pixels, channels in (*wanted, (_LIKE_PIXELS[-1], min(cout, 320))):
        height, width = rectangle(min(pixels, int(problem["pixels"])))
        # 1 x 8191 is no picture: of a prime number of pixels a few are left out.
        if width > 64 * height:
            height, width = rectangle(height * width // 64 * 64 or height * width)
        height, width = ((side - 1) * stride + kernel - 2 * padding for side in (height, width))
        yield _sample(
            (1, int(problem["cin"]), height, width),
            channels,
            kernel,
            stride=stride,
            padding=padding,
            dtype=getattr(torch, str(problem["dtype"])),
        )


def _unet(cin: int, cout: int, size: int, kernel: int = 3, stride: int = 1, batch: int = 2) -> Sample:
    """Batch 2 is one picture with guidance; the first convolution of a block has the time embedding after it."""
    parts = "bias add residual" if kernel == 3 and stride == 1 else "bias"
    return _sample((batch, cin, size, size), cout, kernel, stride=stride, parts=parts)


def _vae(cin: int, cout: int, size: int, batch: int = 1) -> Sample:
    return _sample((batch, cin, size, size), cout, parts="bias residual" if cin == cout else "bias")


# block_m, block_n, block_n2, block_k, warps, stages
_TENSOR_CORE = (
    (128, 256, 0, 64, 8, 3),
    (256, 128, 0, 64, 8, 3),
    (128, 128, 32, 64, 8, 4),
    (128, 128, 0, 64, 8, 4),
    (256, 64, 0, 64, 8, 4),
    (64, 128, 32, 64, 4, 4),
    (128, 64, 0, 64, 4, 4),
    (64, 128, 0, 64, 4, 4),
    (64, 64, 0, 64, 4, 5),
)
_MFMA = (
    (256, 128, 0, 32, 8, 2),
    (128, 128, 32, 32, 8, 2),
    (128, 128, 0, 64, 8, 2),
    (128, 128, 0, 32, 4, 2),
    (128, 64, 0, 64, 4, 2),
    (64, 128, 0, 64, 4, 2),
    (64, 64, 0, 64, 4, 2),
)
_WMMA = (
    (128, 128, 32, 32, 8, 2),
    (128, 128, 0, 32, 8, 2),
    (128, 64, 0, 32, 4, 2),
    (64, 128, 0, 32, 4, 2),
    (64, 64, 0, 64, 4, 2),
    (64, 64, 0, 32, 4, 2),
    (64, 32, 0, 64, 4, 2),
)
# Products by vector instructions: both operands of a tile come from LDS once for each step.
_DOT = ((64, 64, 0, 32, 4, 1), (64, 32, 0, 32, 4, 1), (32, 32, 0, 32, 4, 1))
TILES = {
    MatrixUnit.DOT: _DOT,
    MatrixUnit.TENSOR_CORE: _TENSOR_CORE,
    MatrixUnit.MFMA: _MFMA,
    MatrixUnit.WMMA_GFX11: _WMMA,
    MatrixUnit.WMMA_GFX12: _WMMA,
}


def _space(problem: Problem, arch: Arch) -> Iterator[Conv2dConfig]:
    pixels, cin, cout = int(problem["pixels"]), int(problem["cin"]), int(problem["cout"])
    steps = int(problem["kernel"]) ** 2
    tensor_core = arch.matrix_unit is MatrixUnit.TENSOR_CORE
    seen = set()
    for tile_m, tile_n, block_n2, tile_k, warps, stages in TILES.get(arch.matrix_unit or MatrixUnit.NONE, ()):
        if block_n2 and cout % (tile_n + block_n2):
            continue
        block_m = max(32, min(tile_m, power_of_2(pixels)))
        block_n = max(16, min(tile_n, power_of_2(cout)))
        block_k = max(16, min(tile_k, power_of_2(cin)))
        if cin % 16 and not tensor_core:
            # Masked loads of 2 bytes that are fetched one block ahead spill 9 to 66 SGPRs on gfx1100.
            stages = 1  # noqa: PLW2901 -- the table's figure is for whole blocks of channels
        stages = fitting_stages(stages, (block_m + block_n + block_n2) * block_k * 2, arch)  # noqa: PLW2901
        if not stages:
            continue
        tiles = ceil_div(pixels, block_m) * ceil_div(cout, block_n + block_n2)
        split_k = _split(tiles, steps * ceil_div(cin, block_k), arch.compute_units or 1)
        config = Conv2dConfig(
            block_m, block_n, block_n2, block_k, group_m=8, split_k=split_k, warps=warps, stages=stages
        )
        if config not in seen:
            seen.add(config)
            yield config


def fitting_stages(stages: int, block_bytes: int, arch: Arch) -> int:
    """The most stages, up to `stages`, whose blocks fit the LDS; 0 where none do."""
    # On AMD the newest block waits in registers.
    waiting = 0 if arch.matrix_unit is MatrixUnit.TENSOR_CORE else 1
    fitting = (arch.lds_per_workgroup or 0) // block_bytes + waiting
    return min(stages, fitting) if fitting > waiting else 0


def _split(tiles: int, steps: int, units: int) -> int:
    """Where the tiles leave half of the GPU idle, into as many parts as fill it once."""
    fill = min(units // tiles, 16)
    # A part of fewer than 8 steps costs more to begin and to add up than it saves.
    return fill if fill > 1 and steps // fill >= 8 else 1


def _work(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Work:
    """The rest of the op's arguments: what is added, stride and padding, and the channels that follow x's."""
    pixels = int(problem(x, weight, *rest)["pixels"])
    moved = x.numel() + weight.numel() + pixels * weight.shape[0]
    moved += sum(each.numel() for each in rest if isinstance(each, torch.Tensor))
    return Work(2.0 * pixels * weight.numel(), float(moved * x.element_size()))


# The shortcut of the last resolution's first block: what comes from below, and the skip connection after it.
_JOINED = _sample((2, 960, 64, 64), 320, 1, parts="bias", concat=320)

VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.conv2d",
    reference=reference.conv2d,
    problem=problem,
    small=(
        _sample((1, 32, 5, 7), 24),
        _sample((2, 20, 4, 5), 17, dtype=torch.bfloat16, parts="add residual"),
        _sample((1, 16, 7, 6), 16, stride=2, parts="bias"),
        _sample((2, 40, 3, 5), 20, 1),
        _sample((2, 72, 5, 9), 40, 1, parts="bias", concat=20),
        _sample((1, 4, 5, 5), 3, parts=""),
    ),
    # Of Stable Diffusion 1.5: a block of the highest and of the lowest resolution, a shortcut; and one of the VAE.
    real=(_unet(320, 320, 64), _unet(2560, 1280, 8), _unet(960, 320, 64, 1), _vae(256, 256, 512), _JOINED),
    tiny=(
        _sample((2, 3, 4, 3), 2, dtype=torch.float64),
        _sample((1, 2, 5, 4), 3, stride=2, parts="", dtype=torch.float64),
        _sample((2, 3, 2, 2), 2, 1, dtype=torch.float64),
        _sample((2, 5, 2, 2), 2, 1, dtype=torch.float64, concat=2),
    ),
    empty=(_sample((0, 32, 4, 4), 8), _sample((0, 32, 4, 4), 8, 1)),
    promises={
        "_conv2d": KernelPromise(uses_dot=True),
        "_finish": KernelPromise(bound_by_memory=True),
    },
    # Small maps: the library's part runs on the CPU here.
    also=(
        Also("library_epilogue", (_sample((2, 20, 4, 5), 17),), (_unet(640, 640, 8),)),
        Also("library_gemm", (_sample((2, 40, 3, 5), 20, 1),), (_unet(640, 640, 8, 1),)),
    ),
    similar=_similar,
)


def _hip_space(problem: Problem, arch: Arch) -> Iterator[Config]:
    """Each tile of the matrix unit as it is; and with the depth in parts where the tiles are too few."""
    pixels, cin, cout = int(problem["pixels"]), int(problem["cin"]), int(problem["cout"])
    taps, units = int(problem["kernel"]) ** 2, arch.compute_units or 1
    unit = arch.matrix_unit or MatrixUnit.NONE
    # Of more channels than are in a narrow tile, each further one would read all of x again.
    narrow = (config for config in HIP_NARROW_TILES.get(unit, ()) if cout <= config.block_n)
    for config in (*hip_tiles(arch), *narrow):
        parts = _split(config.tiles(pixels, cout), taps * ceil_div(cin, config.block_k), units)
        for split_k in sorted({1, parts}):
            yield replace(config, split_k=split_k)


def _hip_narrow_loads(problem: Problem) -> str | None:
    cin = int(problem["cin"])
    if cin % 8 == 0:
        return None
    if cin % 4:
        return f"pixels of {cin} channels begin at any multiple of {2 * (cin & -cin)} bytes"
    return f"pixels of {cin} channels begin at multiples of 8 bytes, and the next one may lie outside the picture"


# The tile that every matrix unit has.
HIP_SMALLEST = HIP_TILES[MatrixUnit.DOT][-1]
HIP = Kernels(
    module="rocm_sd.kernels.hip.conv2d",
    promises={
        "conv2d": KernelPromise(uses_dot=True),
        "conv2d_split": KernelPromise(uses_dot=True),
        "conv2d_finish": KernelPromise(
            bound_by_memory=True, narrow_loads_because="what is added is half as wide as the sums beside it"
        ),
    },
    space=_hip_space,
    # The first and the last of a UNet: few channels come 8 bytes at a time, and go value by value.
    real=(_unet(4, 320, 64), _unet(320, 4, 64)),
    small_configs=(replace(HIP_SMALLEST, split_k=3),),
    narrow_loads=_hip_narrow_loads,
)

_MOST = 2**31
TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"cout": [1, 16]}, _unet(320, 4, 64)),
        Bucket({"cin": [1, 16]}, _unet(4, 320, 64)),
        Bucket({"kernel": 1, "pixels": [1, 1024]}, _unet(2560, 1280, 16, 1)),
        Bucket({"kernel": 1, "pixels": [1025, _MOST]}, _unet(960, 320, 64, 1)),
        Bucket({"cout": 512, "pixels": [1, 8192]}, _vae(512, 512, 64)),
        Bucket({"cout": 512}, _vae(512, 512, 128)),
        Bucket({"pixels": [1, 256]}, _unet(1280, 1280, 8)),
        Bucket({"pixels": [257, 1024]}, _unet(1280, 1280, 16)),
        Bucket({"pixels": [1025, 4096]}, _unet(640, 640, 32)),
        Bucket({"pixels": [4097, 32768], "cout": [17, 383]}, _unet(320, 320, 64)),
        Bucket({"pixels": [4097, 32768]}, _unet(640, 640, 64)),
        Bucket({"cout": [17, 191]}, _vae(128, 128, 512)),
        Bucket({"pixels": [32769, _MOST]}, _vae(256, 256, 512)),
    ),
    work=_work,
    untimed="torch",
    # UNet and VAE of SD 1.5 at 512x512, then of SDXL at 1024x1024.
    timed=(
        _unet(960, 320, 64), _unet(1920, 640, 32), _unet(320, 640, 32), _unet(2560, 1280, 16), _unet(2560, 1280, 8),
        _unet(320, 320, 64, stride=2),
        _vae(512, 512, 256), _vae(512, 256, 256), _vae(256, 256, 256), _vae(256, 128, 512), _vae(128, 3, 512),
        _unet(320, 320, 128), _unet(640, 320, 128), _unet(960, 320, 128), _unet(320, 640, 64), _unet(960, 640, 64),
        _unet(1280, 640, 64), _unet(1920, 640, 64), _unet(640, 1280, 32), _unet(1280, 1280, 32), _unet(1920, 1280, 32),
        _unet(2560, 1280, 32), _unet(640, 320, 128, 1), _unet(1920, 640, 64, 1), _unet(2560, 1280, 32, 1),
        _vae(128, 128, 1024), _vae(256, 128, 1024),
        # Eight pictures: UNets of both, where their shapes are not those above, and the VAE.
        *(_unet(*shape, batch=16) for shape in (
            (320, 320, 64), (640, 320, 64), (960, 320, 64), (320, 640, 32), (640, 640, 32), (1280, 640, 32),
            (1920, 640, 32), (640, 1280, 16), (1280, 1280, 16), (2560, 1280, 16), (1280, 1280, 8), (2560, 1280, 8),
            (320, 320, 128), (640, 320, 128), (960, 320, 128), (640, 640, 64), (1280, 640, 64), (1920, 640, 64),
            (1280, 1280, 32), (1920, 1280, 32), (2560, 1280, 32),
        )),
        _vae(512, 512, 64, 8), _vae(512, 512, 128, 8), _vae(512, 512, 256, 8), _vae(256, 256, 256, 8),
        _vae(256, 256, 512, 8), _vae(128, 128, 512, 8), _vae(128, 128, 1024, 8),
    ),
)  # fmt: skip
