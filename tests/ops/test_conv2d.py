from __future__ import annotations

from functools import partial

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd import arch
from rocm_sd.arch import MatrixUnit
from rocm_sd.errors import Unsupported
from rocm_sd.ops import conv2d
from rocm_sd.ops.conv2d.op import OP

# N, Cin, H, W, Cout, kernel, stride, padding: edge, odd and real.
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 0),
    (1, 4, 1, 1, 3, 3, 1, 1),
    (2, 4, 9, 9, 24, 3, 1, 1),
    (1, 9, 5, 6, 33, 3, 1, 1),
    (3, 20, 5, 7, 17, 3, 1, 1),
    (2, 32, 9, 8, 40, 3, 2, 1),
    (1, 32, 7, 9, 16, 3, 1, 0),
    (1, 16, 6, 5, 16, 1, 2, 1),
    (2, 96, 5, 7, 40, 1, 1, 0),
    (1, 64, 12, 10, 4, 3, 1, 1),
    (1, 320, 8, 8, 64, 3, 1, 1),
]
IMPLEMENTATIONS = ["torch", "library_epilogue", "triton"]
# What each implementation is asked for in half precision and in float32, which the matrix units do not take.
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


check, configured = partial(op_checks.check, OP), partial(op_checks.configured, OP)


def inputs(shape, dtype, device, *, parts="bias add residual", seed=0):
    N, Cin, H, W, Cout, kernel, stride, padding = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        tensor = (torch.randn(*size, generator=generator) * std).to(device, dtype)
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    Ho, Wo = ((size + 2 * padding - kernel) // stride + 1 for size in (H, W))
    x, weight = normal(N, Cin, H, W), normal(Cout, Cin, kernel, kernel, std=(Cin * kernel**2) ** -0.5)
    bias = normal(Cout) if "bias" in parts else None
    add = normal(N, Cout) if "add" in parts else None
    residual = normal(N, Cout, Ho, Wo) if "residual" in parts else None
    return x, weight, bias, add, residual, stride, padding


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    if implementation == "triton" and dtype is torch.float32:
        with pytest.raises(Unsupported, match="dtype float32"):
            conv2d(*inputs(shape, dtype, device), implementation=implementation)
        return
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("parts", ["", "bias", "bias add residual"])
@pytest.mark.usefixtures("poison_memory")
def test_a_1x1_convolution_as_the_librarys_gemm(parts, dtype, device):
    check(inputs((2, 96, 5, 7, 40, 1, 1, 0), dtype, device, parts=parts), "library_gemm")
    check(inputs((1, 16, 1, 1, 1, 1, 1, 0), dtype, device, parts=parts), "library_gemm")


@pytest.mark.parametrize("parts", ["", "bias", "add", "residual", "bias residual"])
@pytest.mark.parametrize("implementation", ["library_epilogue", "triton"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(parts, implementation, device):
    check(inputs((2, 20, 5, 7, 17, 3, 1, 1), torch.float16, device, parts=parts), implementation)


CONFIGS = {
    "split": {"split_k": 4},
    "more_splits_than_blocks": {"split_k": 64},
    "one_group": {"group_m": 1, "block_m": 32, "block_n": 16},
    "ragged_group": {"group_m": 2, "block_m": 32, "block_n": 16},
    "two_widths": {"block_n": 32, "block_n2": 16},
    "second_width_past_the_end": {"block_n": 64, "block_n2": 16},
    "deep_block": {"block_k": 64},
    "shallow_block": {"block_k": 16},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("poison_memory")
def test_no_config_changes_the_result(config, device):
    arguments = inputs((2, 48, 7, 6, 40, 3, 1, 1), torch.float16, device)
    first, second = (check(arguments, "triton", configured(**config)) for _ in range(2))
    assert torch.equal(first, second)
    check(inputs((1, 64, 8, 8, 24, 1, 1, 0), torch.bfloat16, device), "triton", configured(**config))


@pytest.mark.parametrize("implementation", ["library_epilogue", "triton"])
def test_sums_beyond_half_precision_overflow_no_sooner_than_stock(implementation, device):
    """320 products of 25 x 25 make 200000: the sum must live in float32 and only its rounding may be infinite."""
    x = torch.full((1, 320, 2, 2), 25.0, dtype=torch.float16, device=device)
    weight = torch.full((2, 320, 1, 1), 25.0, dtype=torch.float16, device=device)
    weight[1, 160:] = -25.0
    stock = conv2d(x, weight, implementation="torch")
    y = conv2d(x, weight, implementation=implementation)
    assert torch.equal(y, stock)
    assert (y[:, 0] == float("inf")).all()
    assert (y[:, 1] == 0).all()


def test_a_residual_that_brings_a_sum_back_in_range_is_added_before_rounding(device):
    x = torch.full((1, 320, 2, 2), 25.0, dtype=torch.float16, device=device)
    weight = torch.full((1, 320, 1, 1), 10.0, dtype=torch.float16, device=device)
    residual = torch.full((1, 1, 2, 2), -40000.0, dtype=torch.float16, device=device)
    y = conv2d(x, weight, None, None, residual, implementation="triton")
    assert (y == 40000.0).all()


def test_infinite_pixels_stay_where_the_filter_reaches(device):
    """Masked taps and channels past the end must not make NaN of 0 x infinity."""
    x, weight, *_ = inputs((1, 20, 5, 5, 17, 3, 1, 1), torch.float16, device, parts="")
    x[0, :, 0, 0] = float("inf")
    y = conv2d(x, weight.abs(), padding=1, implementation="triton")
    assert (y[:, :, :2, :2] == float("inf")).all()
    assert y[:, :, 2:, :].isfinite().all()
    assert y[:, :, :, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, 4)}, "x of 3 dimensions"),
        ({"weight": torch.zeros(8, 8, 3)}, "weight of 3 dimensions"),
        ({"weight": torch.zeros(8, 4, 3, 3)}, "a weight for 4 channels on x of 8: groups are not taken"),
        ({"weight": torch.zeros(8, 8, 5, 5)}, "a kernel of 5x5: it takes 1x1 and 3x3"),
        ({"weight": torch.zeros(8, 8, 1, 3)}, "a kernel of 1x3"),
        ({"stride": 0}, "stride 0"),
        ({"padding": -1}, "padding -1"),
        ({"x": torch.zeros(2, 8, 2, 4), "padding": 0}, "a 3x3 kernel on 2x4 pixels"),
        ({"bias": torch.zeros(7)}, "bias of shape"),
        ({"add": torch.zeros(8)}, "add of shape"),
        ({"residual": torch.zeros(2, 8, 3, 4)}, "residual of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 8, 4, 4), "weight": torch.zeros(8, 8, 3, 3), "padding": 1} | change
    with pytest.raises(Unsupported, match=message):
        conv2d(**arguments)


@pytest.mark.parametrize("bucket", OP.tuning.buckets, ids=lambda bucket: bucket.sample.name)
def test_every_bucket_has_a_few_configs_on_every_matrix_unit(bucket):
    problem = OP.verification.problem(*bucket.sample.make(filled=False))
    for architecture in arch.ARCHS.values():
        if not architecture.triton_supported or architecture.matrix_unit in (MatrixUnit.DOT, MatrixUnit.NONE):
            continue
        configs = list(OP.tuning.space(problem, architecture))
        assert 1 <= len(configs) <= 12, architecture.name


def test_the_least_work_counts_each_product_and_each_tensor_once():
    arguments = inputs((2, 16, 8, 8, 32, 3, 2, 1), torch.float16, torch.device("cpu"))
    work = OP.tuning.work(*arguments)
    assert work.flops == 2 * (2 * 4 * 4) * 32 * 16 * 9
    assert work.bytes == 2 * (2 * 16 * 64 + 32 * 16 * 9 + 32 + 2 * 32 + 2 * (2 * 32 * 16))


def test_the_librarys_gemm_is_for_1x1_kernels():
    x, weight, *_ = inputs((1, 8, 4, 4, 8, 3, 1, 1), torch.float32, torch.device("cpu"))
    with pytest.raises(Unsupported, match="anything but a 1x1 kernel"):
        conv2d(x, weight, padding=1, implementation="library_gemm")
