from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.ops import geglu
from rocm_sd.ops.geglu.op import OP

# [..., 2F]: edge, odd and real.
SHAPES = [(1, 2), (3, 154), (2, 5, 96), (7, 640), (2, 3, 2560), (1, 5120), (1, 10240)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]


check = partial(op_checks.check, OP)


def inputs(shape, dtype, device, *, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(*shape, generator=generator) * 2).to(device, dtype)
    return x, torch.randn(shape[-1], generator=generator).to(device, dtype) if bias else None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, bias, dtype, implementation, device):
    check(inputs(shape, dtype, device, bias=bias), implementation)


def test_it_is_what_diffusers_computes(device):
    x, _ = inputs((4, 64), torch.float32, device, bias=False)
    hidden, gate = x.chunk(2, dim=-1)
    torch.testing.assert_close(geglu(x, implementation="triton"), hidden * F.gelu(gate))


def test_the_gelu_of_the_kernel_is_exact_to_1e_7_and_keeps_its_tail(device):
    gate = torch.linspace(-9, 9, 8192, dtype=torch.float32)
    x = torch.cat([torch.ones_like(gate), gate])[None].to(device)
    y = geglu(x, implementation="triton")[0].double().cpu()
    exact = gate.double() * 0.5 * torch.erfc(gate.double() * -math.sqrt(0.5))
    error = (y - exact).abs()
    # Beyond 1 float32 itself is coarser than 1e-7; the fit's own error is the rest.
    assert (error <= 1e-7 * exact.abs().clamp_min(1.0)).all()
    assert (error <= 1e-4 * exact.abs()).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_gates(implementation, device):
    infinity = float("inf")
    gates = torch.tensor([0.0, -20.0, -1e30, 20.0, 1e30, infinity, float("nan")], dtype=torch.float32)
    x = torch.cat([torch.ones_like(gates), gates])[None].to(device)
    y = geglu(x, implementation=implementation)[0].cpu()
    torch.testing.assert_close(y[:6], torch.tensor([0.0, 0.0, 0.0, 20.0, 1e30, infinity]), atol=1e-17, rtol=1e-6)
    assert y[6].isnan()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_half_precision_values_stay_finite(implementation, device):
    x, bias = inputs((3, 64), torch.float16, device)
    y = check((torch.cat([x[:, :32] * 1000, x[:, 32:].clamp(-4, 4)], dim=-1), bias), implementation)
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(()), None, "x of shape"),
        (torch.zeros(2, 0), None, "x of shape"),
        (torch.zeros(2, 31), None, "x of shape"),
        (torch.zeros(2, 32), torch.zeros(16), "bias of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(x, bias, message):
    with pytest.raises(Unsupported, match=message):
        geglu(x, bias)
