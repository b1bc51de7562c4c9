"""The calls that count: what linear_8bit is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.configs.linear_8bit import Linear8bitConfig
from rocm_sd.kernels.sizes import ceil_div
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.eight_bits import LIMITS, drawn, fits
from rocm_sd.ops.linear_8bit import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]

FNUZ, OCP = "float8_e4m3fnuz", "float8_e4m3fn"


def problem(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: str = "float16",
) -> Problem:
    N, K = weight.shape
    return {
        "m": x.numel() // K,
        "n": N,
        "k": K,
        "of": dtype_name(x.dtype),
        "by_row": int(x_scale.dim() > 0),
        "by_column": int(weight_scale.dim() > 0),
        "bias": int(bias is not None),
        "residual": int(residual is not None),
        "dtype": dtype,
    }


def _sample(
    M: int,
    N: int,
    K: int,
    of: str = "int8",
    dtype: torch.dtype = torch.float16,
    *,
    bias: bool = True,
    residual: bool = True,
    by_row: bool = True,
    by_column: bool = True,
) -> Sample:
    limit = LIMITS[of]

    def scales(draw: Draw, *shape: int) -> torch.Tensor:
        """So that the product of a row has values of about one, and no scale is another's."""
        return draw(*shape, mean=4 / limit * K**-0.25, std=0.5 / limit * K**-0.25, dtype=torch.float32)

    def build(draw: Draw) -> tuple[Any, ...]:
        return (
            drawn(draw, of, M, K),
            scales(draw, M) if by_row else scales(draw, 1)[0],
            drawn(draw, of, N, K),
            scales(draw, N) if by_column else scales(draw, 1)[0],
            draw(N) if bias else None,
            draw(M, N) if residual else None,
            dtype_name(draw.dtype),
        )

    parts = "".join(f" + {name}" for name, has in (("bias", bias), ("residual", residual)) if has)
    one = "".join(f", one scale for {name}" for name, many in (("x", by_row), ("the weight", by_column)) if not many)
    return Sample(f"{M}x{K} @ {K}x{N} of {of}{parts}{one}, {dtype_name(dtype)}", dtype, build)


def _whole(M: int, N: int, K: int, of: str = "int8", *, bias: bool = True, residual: bool = True) -> Sample:
    """One scale for all of x and all of the weight."""
    return _sample(M, N, K, of, bias=bias, residual=residual, by_row=False, by_column=False)


def _linears(M: int, C: int, of: str = "int8") -> tuple[Sample, ...]:
    """QKV, the way in and the way out of the feed-forward, and an attention's way out."""
    return (
        _sample(M, 3 * C, C, of, bias=False, residual=False),
        _sample(M, 8 * C, C, of, residual=False),
        _sample(M, C, 4 * C, of),
        _sample(M, C, C, of),
    )


def _timed(M: int, C: int) -> tuple[Sample, ...]:
    """The linears of a transformer block in fp8, as a model with one scale for each calls them."""
    return (
        _whole(M, 3 * C, C, OCP, bias=False, residual=False),
        _whole(M, C, C, OCP, bias=False, residual=False),
        _whole(M, C, C, OCP, residual=False),
        _whole(M, 8 * C, C, OCP, residual=False),
        _whole(M, C, 4 * C, OCP, residual=False),
        _whole(M, C, 4 * C, OCP),
    )


_WMMA = ((128, 128, 0, 64, 8, 2), (128, 64, 0, 64, 4, 2), (64, 64, 0, 64, 4, 2))
# block_m, block_n, block_n2, block_k, warps, stages
_TILES: Mapping[MatrixUnit, tuple[tuple[int, int, int, int, int, int], ...]] = {
    # 16 bytes a lane of either operand.
    MatrixUnit.DOT: ((64, 64, 0, 64, 4, 1), (32, 32, 0, 128, 4, 1)),
    MatrixUnit.TENSOR_CORE: (
        (128, 256, 0, 128, 8, 3), (128, 128, 0, 128, 8, 4), (128, 128, 0, 128, 4, 3), (128, 64, 0, 128, 4, 4),
        (64, 64, 0, 128, 4, 4), (64, 128, 32, 128, 4, 4), (64, 128, 0, 128, 4, 4),
    ),
    MatrixUnit.MFMA: ((256, 128, 0, 64, 8, 2), (128, 128, 0, 64, 4, 2), (64, 64, 0, 64, 4, 2)),
    MatrixUnit.WMMA_GFX11: _WMMA,
    MatrixUnit.WMMA_GFX12: _WMMA,
}  # fmt: skip


def _space(problem: Problem, arch: Arch) -> Iterator[Linear8bitConfig]:
    """Each tile of the matrix unit, but those so large that an eighth of the GPU works."""
    m, n = int(problem["m"]), int(problem["n"])
    for block_m, block_n, block_n2, block_k, warps, stages in _TILES.get(arch.matrix_unit or MatrixUnit.NONE, ()):
        if block_n2 and n % (block_n + block_n2):
            continue
        if ceil_div(m, block_m) * ceil_div(n, block_n + block_n2) * 8 >= (arch.compute_units or 1):
            yield Linear8bitConfig(block_m, block_n, block_n2, block_k, group_m=8, warps=warps, stages=stages)


def _work(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Work:
    N, K = weight.shape
    M = x.numel() // K
    residual = rest[2] if len(rest) > 2 else None
    return Work(2.0 * M * N * K, float(M * K + N * K + 2 * M * N * (1 if residual is None else 2)) + x_scale.numel())


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.linear_8bit",
    reference=reference.linear_8bit,
    problem=problem,
    small=(
        _sample(33, 48, 64),
        _sample(5, 77, 45, dtype=torch.bfloat16),
        _sample(17, 32, 96, residual=False, by_row=False),
        _sample(20, 40, 320, dtype=torch.bfloat16, bias=False, by_column=False),
        *(_sample(33, 48, 64, of) for of in (OCP, FNUZ)),
        *(_sample(5, 77, 45, of, torch.bfloat16, bias=False) for of in (OCP, FNUZ)),
        *(_whole(20, 40, 160, of, residual=False) for of in (OCP, FNUZ)),
        *(_sample(20, 40, 96, of, residual=False, by_row=False) for of in (OCP, FNUZ)),
        _sample(1, 1, 1),
    ),
    real=(
        *_linears(2048, 1280), *_linears(8192, 640)[:1], *_linears(8192, 320)[:1],
        *_linears(2048, 1280, OCP), *_linears(2048, 1280, FNUZ), _whole(2048, 1280, 1280, OCP),
    ),
    tiny=(_sample(6, 4, 5, dtype=torch.float64),
          _sample(6, 4, 5, dtype=torch.float64, bias=False, residual=False, by_row=False, by_column=False)),
    empty=(_sample(0, 16, 32),),
    promises={"_product_8bit": KernelPromise(uses_dot=True)},
    fits=fits,
)  # fmt: skip

TUNING = Tuning(
    space=_space,
    buckets=(
        Bucket({"m": [1, 1024]}, _linears(512, 1280)[1]),
        Bucket({"m": [1025, 2**31], "n": [1, 2047]}, _linears(2048, 1280)[2]),
        Bucket({"m": [1025, 2**31], "n": [2048, 2**31]}, _linears(2048, 1280)[1]),
    ),
    work=_work,
    untimed="triton",
    # SDXL at 1024x1024, then SD 1.5 at 512x512; 2 maps are one picture with guidance.
    timed=(*_timed(2048, 1280), *_timed(8192, 640), *_timed(8192, 320), *_timed(2048, 640)),
)
