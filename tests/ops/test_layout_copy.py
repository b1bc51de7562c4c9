from __future__ import annotations

import pytest
import torch

from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.ops import layout_copy
from rocm_sd.ops.layout_copy import reference

# Edge, odd and real.
SHAPES = [
    (1, 1, 1, 1),
    (2, 1, 3, 5),
    (3, 7, 1, 1),
    (1, 3, 13, 7),
    (2, 4, 64, 64),
    (1, 70, 9, 11),
    (2, 130, 5, 27),
    (1, 320, 16, 16),
    (1, 3, 64, 96),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]
TARGETS = [True, False]


def target_id(channels_last: bool) -> str:
    return "to_channels_last" if channels_last else "to_contiguous"


def layout(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


def image(shape, dtype, device, channels_last=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return x.contiguous(memory_format=layout(channels_last))


def check(x, channels_last, implementation):
    """A copy has no rounding: it is the reference, bit by bit."""
    y = layout_copy(x, channels_last, implementation=implementation)
    expected = reference.layout_copy(x, channels_last)
    assert y.dtype == x.dtype
    assert y.stride() == expected.stride()
    assert y.is_contiguous(memory_format=layout(channels_last))
    assert torch.equal(y, expected)
    assert torch.equal(y, x)
    if y.numel():
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("channels_last", TARGETS, ids=target_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_every_value_is_in_its_place(shape, channels_last, dtype, implementation, device):
    check(image(shape, dtype, device, not channels_last), channels_last, implementation)


@pytest.mark.parametrize("channels_last", TARGETS, ids=target_id)
def test_values_that_arithmetic_would_change_are_kept(channels_last, device):
    x = image((1, 8, 4, 4), torch.float32, device, not channels_last)
    x[0, 0, 0] = torch.tensor([float("inf"), -float("inf"), -0.0, 1e-45], device=device)
    x[0, 1, 0, 0] = float("nan")
    y = layout_copy(x, channels_last, implementation="triton")
    assert torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32))


@pytest.mark.parametrize("channels_last", TARGETS, ids=target_id)
def test_half_precision_gradients_are_the_incoming_ones(channels_last, device):
    x = image((2, 8, 3, 5), torch.float16, device, not channels_last).requires_grad_()
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    layout_copy(x, channels_last).backward(gradient)
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 32, 4), "x of 3 dimensions"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(x, message):
    with pytest.raises(Unsupported, match=message):
        layout_copy(x, True)


def test_an_image_whose_offsets_pass_32_bits_is_refused(device):
    x = torch.zeros(1, device=device, dtype=torch.float16).expand(1, 64, 1 << 13, 1 << 13)
    with pytest.raises(Unsupported, match="67108864 pixels"):
        layout_copy(x, True, implementation="triton")
