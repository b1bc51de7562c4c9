"""Norms and gates whose result is 8 bits wide, with a scale for each row: the two ops that fuse `quantize_rows`."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import geglu, geglu_8bit, layer_norm_8bit, layer_norm_residual, quantize_rows
from rocm_sd.ops.geglu_8bit import op as gate
from rocm_sd.ops.layer_norm_8bit import op as norm

# Edge, odd and real.
ROWS = [(1, 1), (3, 2), (5, 77), (2, 9, 96), (2, 13, 320), (2, 640), (3, 1280), (2, 1000)]
DTYPES = [torch.float16, torch.bfloat16]
FORMATS = ["int8", "float8_e4m3fn", "float8_e4m3fnuz"]
IMPLEMENTATIONS = ["torch", "triton"]

check_norm = partial(op_checks.check, norm.OP)
check_gate = partial(op_checks.check, gate.OP)


def drawn(*shape, dtype=torch.float16, mean=0.0, std=1.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std + mean).to(dtype)


def given_norm(shape, dtype, device, *, residual=True, affine=True):
    x, added = drawn(*shape, dtype=dtype, mean=0.7, std=2.0), drawn(*shape, dtype=dtype, seed=1)
    weight, bias = drawn(shape[-1], dtype=dtype, mean=1.0, std=0.3, seed=2), drawn(shape[-1], dtype=dtype, seed=3)
    parts = x, added if residual else None, *((weight, bias) if affine else (None, None))
    return tuple(None if part is None else part.to(device) for part in parts)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", ROWS, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_a_norm_is_as_accurate_as_stock(shape, dtype, to, implementation, device):
    check_norm((*given_norm(shape, dtype, device), 1e-5, to), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ROWS, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_a_norm_without_a_residual_returns_what_it_was_given(shape, implementation, device):
    arguments = (*given_norm(shape, torch.float16, device, residual=False, affine=False), 1e-5, "int8")
    assert check_norm(arguments, implementation)[2] is arguments[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", ROWS, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_a_gate_is_as_accurate_as_stock(shape, dtype, to, implementation, device):
    check_gate((drawn(*shape[:-1], 2 * shape[-1], dtype=dtype, std=2.0).to(device), to), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_row_has_its_own_scale_and_zeros_have_none(implementation, device):
    x = drawn(4, 96, std=2.0).to(device)
    x[1] *= 16
    x[2] = 0
    q, scales = geglu_8bit(x, implementation=implementation)
    assert scales.shape == (4,)
    assert scales[1] > 8 * scales[0]
    assert scales[2] == 0
    assert not q[2].any()
    assert (q[[0, 1, 3]].abs().amax(-1) == 127).all()


def test_they_are_two_ops_in_one(device):
    x, added, weight, bias = given_norm((3, 5, 64), torch.float32, device)
    y, total = layer_norm_residual(x, added, weight, bias)
    for implementation in IMPLEMENTATIONS:
        q, scales, whole = layer_norm_8bit(x, added, weight, bias, implementation=implementation)
        right, expected = quantize_rows(y, "int8")
        assert (q.int() - right.int()).abs().max() <= 1
        torch.testing.assert_close(scales, expected)
        assert torch.equal(whole, total)
        q, scales = geglu_8bit(x, implementation=implementation)
        right, expected = quantize_rows(geglu(x), "int8")
        assert (q.int() - right.int()).abs().max() <= 1
        torch.testing.assert_close(scales, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_any_strides(implementation, device):
    x, added, weight, bias = given_norm((2, 12, 48), torch.float16, device)
    apart = torch.cat([x, x], dim=-1)[..., :48]
    ours = layer_norm_8bit(apart, added.transpose(0, 1).contiguous().transpose(0, 1), weight, bias)
    dense = layer_norm_8bit(x, added, weight, bias)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, dense, strict=True))
    both = zip(
        geglu_8bit(apart, implementation=implementation), geglu_8bit(x, implementation=implementation), strict=True
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in both)


def test_what_cannot_be_had_is_refused_in_words(device):
    x = torch.zeros(2, 31, device=device)
    with pytest.raises(Unsupported, match="x of shape"):
        geglu_8bit(x)
    with pytest.raises(Unsupported, match="residual of shape"):
        layer_norm_8bit(x, x[:1])
    with pytest.raises(Unsupported, match="gradient"):
        layer_norm_8bit(x.clone().requires_grad_(), None)
    for function, arguments in ((layer_norm_8bit, (x, None)), (geglu_8bit, (x[:, :30],))):
        with pytest.raises(InvalidOption, match="to"):
            function(*arguments, to="int4")
    wide = torch.zeros(1, 2 * 16384, device=device)
    with pytest.raises(Unsupported, match="registers"):
        geglu_8bit(wide, implementation="triton")
    with pytest.raises(Unsupported, match="registers"):
        layer_norm_8bit(wide, None, implementation="triton")
