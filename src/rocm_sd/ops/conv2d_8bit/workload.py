"""The calls that count: what conv2d_8bit is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.configs.conv2d_8bit import Conv2d8bitConfig
from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.ops.conv2d.workload import fitting_stages, output_size
from rocm_sd.ops.conv2d_8bit import reference
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, drawn, fits
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]

FNUZ, OCP = "float8_e4m3fnuz", "float8_e4m3fn"


def problem(
    x: torch.Tensor,
    _x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001 -- the op's own arguments
    add: torch.Tensor | None = None,  # noqa: ARG001
    residual: torch.Tensor | None = None,  # noqa: ARG001
    stride: int = 1,
    padding: int = 0,
    dtype: str = "float16",
) -> Problem:
    """`pixels` are those of the output, over the whole batch."""
    Cout, Cin, kernel, _ = weight.shape
    height, width = (output_size(size, kernel, stride, padding) for size in x.shape[2:])
    return {
        "pixels": x.shape[0] * height * width,
        "cin": Cin,
        "cout": Cout,
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "of": dtype_name(x.dtype),
        "by_channel": int(weight_scale.dim() > 0),
        "dtype": dtype,
    }


def _sample(
    shape: tuple[int, int, int, int],
    cout: int,
    kernel: int = 3,
    of: str = "int8",
    dtype: torch.dtype = torch.float16,
    *,
    stride: int = 1,
    parts: str = "bias add residual",
    by_channel: bool = True,
) -> Sample:
    limit, (N, Cin, H, W) = LIMITS[of], shape
    padding = kernel // 2

    def scales(draw: Draw, *shape: int) -> torch.Tensor:
        """So that sums have values of about one, and no scale is another's."""
        mean = 4 / limit * (Cin * kernel * kernel) ** -0.25
        return draw(*shape, mean=mean, std=mean / 8, dtype=torch.float32)

    def build(draw: Draw) -> tuple[Any, ...]:
        size = output_size(H, kernel, stride, padding), output_size(W, kernel, stride, padding)
        return (
            drawn(draw, of, N, H, W, Cin).permute(0, 3, 1, 2),
            scales(draw, 1)[0],
            drawn(draw, of, cout, kernel, kernel, Cin).permute(0, 3, 1, 2),
            scales(draw, cout) if by_channel else scales(draw, 1)[0],
            draw(cout) if "bias" in parts else None,
            draw(N, cout) if "add" in parts else None,
            draw.image(N, cout, *size) if "residual" in parts else None,
            stride,
            padding,
            dtype_name(draw.dtype),
        )

    name = f"{'x'.join(map(str, shape))} to {cout}, {kernel}x{kernel} of {of}"
    name += f", stride {stride}" if stride > 1 else ""
    name += "" if by_channel else ", one scale for the weight"
    return Sample(f"{name}, {parts or 'bare'}, {dtype_name(dtype)}", dtype, build)


def _unet(cin: int, cout: int, size: int, of: str = "int8", batch: int = 2) -> Sample:
    """Batch 2 is one picture with guidance. In fp8 a model has one scale for each weight."""
    return _sample((batch, cin, size, size), cout, of=of, by_channel=of == "int8")


_WMMA = ((128, 64, 0, 64, 4, 2), (64, 64, 0, 64, 4, 2), (64, 128, 0, 64, 8, 2))
# block_m, block_n, block_n2, block_k, warps, stages
_TILES: Mapping[MatrixUnit, tuple[tuple[int, int, int, int, int, int], ...]] = {
    MatrixUnit.DOT: ((64, 64, 0, 64, 4, 1), (32, 32, 0, 128, 4, 1)),
    # Sums of fp8 go through float32 registers: 64 x 160 of them in four warps cost little beside the products.
    MatrixUnit.TENSOR_CORE: (
        (64, 128, 32, 128, 4, 3), (128, 128, 32, 256, 8, 3),
        (64, 128, 0, 128, 4, 3), (128, 64, 0, 128, 4, 3), (128, 128, 0, 128, 8, 4), (64, 64, 0, 128, 4, 4),
        (64, 128, 0, 64, 4, 4), (128, 64, 0, 64, 4, 4), (128, 128, 0, 64, 8, 4),
    ),
    MatrixUnit.MFMA: ((128, 128, 0, 64, 4, 2), (128, 64, 0, 64, 4, 2), (64, 64, 0, 64, 4, 2)),
    MatrixUnit.WMMA_GFX11: _WMMA,
    MatrixUnit.WMMA_GFX12: _WMMA,
}  # fmt: skip


def _space(problem: Problem, arch: Arch) -> Iterator[Conv2d8bitConfig]:
    """Each tile of the matrix unit that fits; where there are such, those whose steps are empty to a sixth at most."""
    pixels, cin, cout = (int(problem[name]) for name in ("pixels", "cin", "cout"))
    tiles = _TILES.get(arch.matrix_unit or MatrixUnit.NONE, ())
    tiles = tuple(tile for tile in tiles if not tile[2] or cout % (tile[1] + tile[2]) == 0)
    full = [tile for tile in tiles if ceil_div(cin, tile[3]) * tile[3] * 5 <= cin * 6]
    for block_m, block_n, block_n2, block_k, warps, stages in full or tiles:
        fitting = fitting_stages(stages, (block_m + block_n + block_n2) * block_k, arch)
        # So large that an eighth of the GPU would work.
        few = ceil_div(pixels, block_m) * ceil_div(cout, block_n + block_n2) * 8 < (arch.compute_units or 1)
        if fitting and not few:
            yield Conv2d8bitConfig(block_m, block_n, block_n2, block_k, group_m=8, warps=warps, stages=fitting)


def _work(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Work:
    asked = problem(x, x_scale, weight, *rest)
    out = int(asked["pixels"]) * weight.shape[0]
    residual = rest[3] if len(rest) > 3 else None
    moved = x.numel() + weight.numel() + 2 * out * (1 if residual is None else 2)
    return Work(2.0 * int(asked["pixels"]) * weight.numel(), float(moved))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.conv2d_8bit",
    reference=reference.conv2d_8bit,
    problem=problem,
    small=(
        _sample((1, 32, 5, 7), 24),
        _sample((2, 20, 4, 5), 17, dtype=torch.bfloat16, parts="add residual"),
        _sample((1, 16, 7, 6), 16, stride=2, parts="bias"),
        _sample((2, 40, 3, 5), 20, 1, by_channel=False),
        *(_sample((1, 32, 5, 7), 24, of=of) for of in (OCP, FNUZ)),
        *(_sample((2, 20, 4, 5), 17, 3, of, torch.bfloat16, parts="bias", by_channel=False) for of in (OCP, FNUZ)),
        _sample((1, 4, 5, 5), 3, parts=""),
    ),
    # SD 1.5's highest resolution, and SDXL's two lower ones.
    real=tuple(_unet(*shape, of) for of in ("int8", OCP, FNUZ) for shape in ((320, 320, 64), (1280, 1280, 32))),
    tiny=(_sample((2, 3, 4, 3), 2, dtype=torch.float64),
          _sample((1, 2, 5, 4), 3, stride=2, parts="", dtype=torch.float64, by_channel=False)),
    empty=(_sample((0, 32, 4, 4), 8),),
    promises={"_conv2d_8bit": KernelPromise(uses_dot=True)},
    fits=fits,
)  # fmt: skip

_MOST = 2**31
TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"pixels": [1, 1024]}, _unet(1280, 1280, 16)),
        Bucket({"pixels": [1025, 8192]}, _unet(640, 640, 64)),
        Bucket({"pixels": [8193, _MOST]}, _unet(320, 320, 128)),
    ),
    work=_work,
    untimed="triton",
    # SDXL at 1024x1024, then SD 1.5 at 512x512; 2 maps are one picture with guidance.
    timed=tuple(
        _unet(*shape, OCP)
        for shape in (
            (320, 320, 128), (640, 320, 128), (960, 320, 128),
            (320, 640, 64), (640, 640, 64), (960, 640, 64), (1280, 640, 64), (1920, 640, 64),
            (640, 1280, 32), (1280, 1280, 32), (1920, 1280, 32), (2560, 1280, 32),
            (320, 320, 64), (640, 320, 64), (640, 640, 32), (1280, 1280, 16), (1280, 1280, 8),
        )
    ),
)  # fmt: skip
