from __future__ import annotations

from functools import partial

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.ops import group_norm_silu
from rocm_sd.ops.group_norm_silu.op import OP

# N, C, H, W, groups: edge, odd and real.
SHAPES = [
    (1, 32, 1, 1, 32),
    (1, 1, 1, 1, 1),
    (2, 96, 13, 17, 32),
    (3, 30, 5, 7, 3),
    (2, 320, 16, 16, 32),
    (1, 2560, 8, 8, 32),
    (1, 128, 64, 48, 32),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]


check = partial(op_checks.check, OP)


def inputs(shape, dtype, device, *, affine=True, add=True, seed=0):
    N, C, H, W, groups = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, mean=0.0, std=1.0):
        return (torch.randn(*size, generator=generator) * std + mean).to(device, dtype)

    x = normal(N, C, H, W, mean=0.7, std=2.0).contiguous(memory_format=torch.channels_last)
    weight = normal(C, mean=1.0, std=0.3) if affine else None
    bias = normal(C, std=0.5) if affine else None
    extra = normal(N, C) if add else None
    return x, groups, weight, bias, extra


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
@pytest.mark.parametrize("add", [True, False], ids=["add", "no_add"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(silu, affine, add, device):
    check((*inputs((2, 96, 13, 17, 32), torch.float16, device, affine=affine, add=add), 1e-6, silu), "triton")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_large_mean_does_not_cancel(implementation, device):
    """E[x^2] - E[x]^2 in float32 would lose the variance here: mean 1000, spread 0.1."""
    x, groups, weight, bias, _ = inputs((1, 32, 24, 24, 4), torch.float32, device, add=False)
    check((x * 0.05 + 1000, groups, weight, bias, None), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_half_precision_values_stay_finite(implementation, device):
    x, groups, weight, bias, _ = inputs((1, 64, 8, 8, 8), torch.float16, device, add=False)
    y = check((x.clamp(-4, 4) * 15000, groups, weight, bias, None), implementation)
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 5}, "32 channels in 5 groups"),
        ({"groups": 0}, "32 channels in 0 groups"),
        ({"x": torch.zeros(2, 32, 4)}, "x of 3 dimensions"),
        ({"weight": torch.zeros(31)}, "weight of shape"),
        ({"add": torch.zeros(32)}, "add of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32, 4, 4), "groups": 8, "weight": None, "bias": None, "add": None} | change
    with pytest.raises(Unsupported, match=message):
        group_norm_silu(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", ["affine", "bare", "add"])
@pytest.mark.parametrize(("mean", "std"), [(7.3, 0.0), (7.3, 1e-3), (3e4, 10.0)], ids=["constant", "nearly", "large"])
@pytest.mark.parametrize("whole", [2**20, 0], ids=["one_pass", "two_passes"])
def test_groups_whose_spread_is_next_to_nothing(whole, mean, std, parts, dtype):
    """The mean's own rounding, 2e-7 of it, would be all of such a group, times 316: stock has 0 where all are equal."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn((1, 30, 7, 5), generator=generator) * std + mean).to(dtype, memory_format=torch.channels_last)
    affine = [torch.randn(30, generator=generator).to(dtype) for _ in range(2)] if parts == "affine" else [None, None]
    add = torch.full((1, 30), 0.01).to(dtype) if parts == "add" else None
    config = op_checks.configured(OP, whole_elements=whole)
    op_checks.check(OP, (x, 3, *affine, add, 1e-5, parts == "affine"), "triton", config)
