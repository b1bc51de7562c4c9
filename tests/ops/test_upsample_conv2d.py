from __future__ import annotations

from functools import partial

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd import arch
from rocm_sd.arch import MatrixUnit
from rocm_sd.errors import Unsupported
from rocm_sd.ops import parity_weights, upsample_conv2d
from rocm_sd.ops.upsample_conv2d.op import OP

# N, Cin, H, W, Cout: edge, odd and real.
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 16, 1, 3, 3),
    (2, 9, 3, 1, 33),
    (3, 20, 3, 5, 17),
    (2, 32, 4, 6, 40),
    (1, 320, 4, 4, 64),
]
IMPLEMENTATIONS = ["torch", "parity_library", "triton"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


check, configured = partial(op_checks.check, OP), partial(op_checks.configured, OP)


def inputs(shape, dtype, device, *, bias=True, parity=True, seed=0):
    N, Cin, H, W, Cout = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        tensor = (torch.randn(*size, generator=generator) * std).to(device, dtype)
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    x, weight = normal(N, Cin, H, W), normal(Cout, Cin, 3, 3, std=(Cin * 9) ** -0.5)
    return x, weight, normal(Cout) if bias else None, parity_weights(weight) if parity else None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    if implementation == "triton" and dtype is torch.float32:
        with pytest.raises(Unsupported, match="dtype float32"):
            upsample_conv2d(*inputs(shape, dtype, device), implementation=implementation)
        return
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("implementation", ["parity_library", "triton"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("parity", [True, False], ids=["given", "summed"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(bias, parity, implementation, device):
    check(inputs((2, 20, 3, 5, 17), torch.float16, device, bias=bias, parity=parity), implementation)


def test_parity_weights_are_the_sums_of_what_meets_the_same_pixel():
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = parity_weights(weight)
    assert sums.shape == (4, 3, 2, 2, 2)
    w = weight.permute(0, 2, 3, 1)
    even = sums[0]
    torch.testing.assert_close(even[:, 0, 0], w[:, 0, 0])
    torch.testing.assert_close(even[:, 1, 1], w[:, 1:, 1:].sum(dim=(1, 2)))
    odd_column = sums[1]
    torch.testing.assert_close(odd_column[:, 0, 0], w[:, 0, :2].sum(dim=1))
    odd = sums[3]
    torch.testing.assert_close(odd[:, 0, 0], w[:, :2, :2].sum(dim=(1, 2)))
    torch.testing.assert_close(odd[:, 1, 1], w[:, 2, 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_parity_weights_are_rounded_once(dtype):
    weight = torch.randn(4, 5, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = parity_weights(weight)
    assert sums.dtype == dtype
    assert torch.equal(sums, parity_weights(weight.float()).to(dtype))


CONFIGS = {
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
    check(inputs((2, 48, 5, 7, 40), torch.float16, device), "triton", configured(**config))


def test_infinite_pixels_stay_where_the_filter_reaches(device):
    x, weight, *_ = inputs((1, 20, 4, 4, 17), torch.float16, device)
    x[0, :, 0, 0] = float("inf")
    y = upsample_conv2d(x, weight.abs(), implementation="triton")
    assert (y[:, :, :3, :3] == float("inf")).all()
    assert y[:, :, 3:, :].isfinite().all()
    assert y[:, :, :, 3:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, 4)}, "x of 3 dimensions"),
        ({"weight": torch.zeros(8, 8, 1, 1)}, r"weight of shape \(8, 8, 1, 1\): it takes"),
        ({"weight": torch.zeros(8, 4, 3, 3)}, "a weight for 4 channels on x of 8: groups are not taken"),
        ({"bias": torch.zeros(7)}, "bias of shape"),
        ({"parity_weight": torch.zeros(4, 8, 8, 2, 2)}, "parity_weight of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(Unsupported, match=message):
        upsample_conv2d(**({"x": torch.zeros(2, 8, 4, 4), "weight": torch.zeros(8, 8, 3, 3)} | change))


@pytest.mark.parametrize("bucket", OP.tuning.buckets, ids=lambda bucket: bucket.sample.name)
def test_every_bucket_has_a_few_configs_on_every_matrix_unit(bucket):
    problem = OP.verification.problem(*bucket.sample.make(filled=False))
    for architecture in arch.ARCHS.values():
        if not architecture.triton_supported or architecture.matrix_unit in (MatrixUnit.DOT, MatrixUnit.NONE):
            continue
        configs = list(OP.tuning.space(problem, architecture))
        assert 1 <= len(configs) <= 12, architecture.name


def test_the_least_work_is_that_of_four_small_filters():
    arguments = inputs((2, 16, 4, 4, 32), torch.float16, torch.device("cpu"))
    work = OP.tuning.work(*arguments)
    assert work.flops == 2 * (2 * 8 * 8) * 32 * 16 * 4
    assert work.bytes == 2 * (2 * 16 * 16 + 16 * 32 * 16 + 32 + 2 * 32 * 64)
