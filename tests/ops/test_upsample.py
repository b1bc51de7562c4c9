from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import upsample
from rocm_sd.ops.upsample import reference
from rocm_sd.ops.upsample.op import OP

# N, C, H, W and the scale: edge, odd and real.
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 4, 1, 7, 2),
    (1, 9, 5, 1, 3),
    (2, 30, 13, 7, 2),
    (1, 24, 5, 6, 1),
    (1, 20, 3, 5, 4),
    (1, 12, 4, 3, 5),
    (1, 160, 4, 8, 2),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]
MODES = ["nearest", "bilinear"]


def image(shape, dtype, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last)


def check(x, scale, mode, implementation):
    y = op_checks.check(OP, (x, scale, mode), implementation)
    if mode == "nearest":
        assert torch.equal(y, reference.upsample(x, scale, mode))
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, mode, implementation, device):
    *size, scale = shape
    check(image(size, dtype, device), scale, mode, implementation)


@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_the_reference_is_torchs_interpolate(mode, scale):
    x = image((2, 3, 4, 5), torch.float64, "cpu")
    theirs = F.interpolate(x, scale_factor=scale, mode=mode, align_corners=None if mode == "nearest" else False)
    torch.testing.assert_close(reference.upsample(x, scale, mode), theirs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_large_half_precision_values_stay_finite(mode, implementation, device):
    """Two neighbours at the end of the range: their sum is infinite, their mean is not."""
    x = torch.full((1, 8, 3, 3), 65504.0, device=device, dtype=torch.float16)
    assert torch.equal(check(x, 2, mode, implementation), torch.full((1, 8, 6, 6), 65504.0).to(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 32, 4)}, r"x of shape \(2, 32, 4\)"),
        ({"x": torch.zeros(2, 32, 0, 4)}, r"x of shape \(2, 32, 0, 4\)"),
        ({"scale": 0}, "scale 0"),
        ({"scale": 1.5}, "scale 1.5"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(Unsupported, match=message):
        upsample(**{"x": torch.zeros(2, 32, 4, 4)} | change)


def test_an_unknown_mode_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidOption, match="nearest, bilinear"):
        upsample(torch.zeros(1, 4, 4, 4), mode="bicubic")


def test_a_scale_whose_code_would_be_too_long_is_refused():
    with pytest.raises(Unsupported, match="scale 9"):
        upsample(torch.zeros(1, 32, 4, 4), 9, implementation="triton")
