from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.configs.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.ops import layer_norm_residual
from rocm_sd.ops.layer_norm_residual.op import OP

# Edge, odd and real.
SHAPES = [(1, 1), (3, 2), (5, 77), (2, 9, 96), (2, 13, 320), (2, 640), (3, 1280), (2, 768), (1, 2048), (2, 1000)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]


check = partial(op_checks.check, OP)


def inputs(shape, dtype, device, *, affine=True, seed=0, residual_too=True):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, mean=0.0, std=1.0):
        return (torch.randn(*size, generator=generator) * std + mean).to(device, dtype)

    C = shape[-1]
    x, residual = normal(*shape, mean=0.7, std=2.0), normal(*shape)
    return (
        x,
        residual if residual_too else None,
        *((normal(C, mean=1.0, std=0.3), normal(C, std=0.5)) if affine else (None, None)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_without_a_residual_it_is_the_norm_alone(shape, dtype, implementation, device):
    arguments = inputs(shape, dtype, device, residual_too=False)
    _, total = check(arguments, implementation)
    assert total is arguments[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_norm_alone_of_any_strides(implementation, device):
    x, _, weight, bias = inputs((2, 12, 48), torch.float16, device)
    for strided in (torch.cat([x, x], dim=-1)[..., ::2], x.transpose(0, 1), x[:1].expand(2, -1, -1)):
        y, total = layer_norm_residual(strided, None, weight, bias, implementation=implementation)
        assert total is strided
        assert y.is_contiguous()
        torch.testing.assert_close(y, F.layer_norm(strided, (48,), weight, bias))


@pytest.mark.parametrize(
    "config", [{"rows": 4, "warps": 1, "chunk": 64}, {"rows": 1, "warps": 4, "chunk": 512}], ids=str
)
@pytest.mark.parametrize("C", [320, 300])
@pytest.mark.usefixtures("poison_memory")
def test_every_way_to_split_a_row(config, C, device):
    arguments = inputs((9, C), torch.float16, device)
    check((*arguments, 1e-5), "triton", LayerNormResidualConfig(**config))


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(weight, bias, device):
    x, residual, w, b = inputs((5, 96), torch.float16, device)
    check((x, residual, w if weight else None, b if bias else None, 1e-6), "triton")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_norm_is_that_of_the_total_as_returned(implementation, device):
    """A residual below the rounding of x changes neither: what is normalized is what the next layer adds to."""
    x = torch.full((2, 64), 1024.0, device=device, dtype=torch.float16)
    x[:, ::2] += 1
    small = torch.rand(2, 64, generator=torch.Generator().manual_seed(0)).to(x) * 0.4
    y, total = layer_norm_residual(x, small, implementation=implementation)
    assert torch.equal(total, x)
    torch.testing.assert_close(y.float(), F.layer_norm(x.float(), (64,)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_large_mean_does_not_cancel(implementation, device):
    """E[x^2] - E[x]^2 in float32 would lose the variance here: mean 1000, spread 0.1."""
    x, residual, weight, bias = inputs((4, 320), torch.float32, device)
    check((x * 0.05 + 1000, residual * 0.05, weight, bias), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_half_precision_values_stay_finite(implementation, device):
    x, residual, weight, bias = inputs((3, 320), torch.float16, device)
    y, total = check((x.clamp(-4, 4) * 12000, residual, weight, bias), implementation)
    assert y.isfinite().all()
    assert total.isfinite().all()


def test_gradients_where_one_output_is_unused():
    x, residual, weight, bias = (t.requires_grad_() for t in inputs((2, 3, 6), torch.float64, torch.device("cpu")))
    y, total = layer_norm_residual(x, residual, weight, bias)
    (through_total,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    torch.testing.assert_close(through_total, torch.ones_like(x))
    (through_y,) = torch.autograd.grad(y.square().sum(), residual)
    stock = F.layer_norm(x + residual, (6,), weight, bias).square().sum()
    torch.testing.assert_close(through_y, torch.autograd.grad(stock, residual)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(())}, "x of shape"),
        ({"x": torch.zeros(2, 0)}, "x of shape"),
        ({"residual": torch.zeros(32)}, "residual of shape"),
        ({"residual": torch.zeros(2, 32, dtype=torch.float16)}, "residual of torch.float16"),
        ({"weight": torch.zeros(31)}, "weight of shape"),
        ({"bias": torch.zeros(2, 32)}, "bias of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32), "residual": torch.zeros(2, 32), "weight": None, "bias": None} | change
    with pytest.raises(Unsupported, match=message):
        layer_norm_residual(**arguments)


def test_a_row_that_does_not_stay_in_registers_is_refused():
    wide = torch.zeros(1, 16385)
    with pytest.raises(Unsupported, match="rows of 16385 values"):
        layer_norm_residual(wide, wide, implementation="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
@pytest.mark.parametrize(("mean", "std"), [(7.3, 0.0), (7.3, 1e-3), (3e4, 10.0)], ids=["constant", "nearly", "large"])
@pytest.mark.parametrize("C", [77, 320])
def test_rows_whose_spread_is_next_to_nothing(C, mean, std, affine, dtype):
    """The mean's own rounding, 2e-7 of it, would be all of such a row, times 316: stock has 0 where all are equal."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn((4, C), generator=generator) * std + mean).to(dtype)
    parts = [torch.randn(C, generator=generator).to(dtype) for _ in range(2)] if affine else [None, None]
    for residual in (None, torch.zeros_like(x)):
        op_checks.check(OP, (x, residual, *parts, 1e-5), "triton")
