from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rocm_sd import numerics
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import geglu
from rocm_sd.ops.geglu import reference
from rocm_sd.ops.geglu.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher

# [..., 2F]: edge, odd and real.
SHAPES = [(1, 2), (3, 154), (2, 5, 96), (7, 640), (2, 3, 2560), (1, 5120), (1, 10240)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(shape, dtype, device, *, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(*shape, generator=generator) * 2).to(device, dtype)
    return x, torch.randn(shape[-1], generator=generator).to(device, dtype) if bias else None


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(arguments, implementation):
    y = geglu(*arguments, implementation=implementation)
    exact = reference.geglu(*in_float64(arguments))
    stock = geglu(*arguments, implementation="torch")
    assert y.dtype == arguments[0].dtype
    assert y.is_contiguous()
    numerics.require(f"geglu ({implementation})", y, exact, stock)
    return y


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["sliced_rows", "sliced_columns", "transposed", "expanded"])
def test_inputs_of_any_strides(kind, implementation, device):
    x, bias = inputs((2, 6, 48), torch.float16, device)
    strided = {
        "sliced_rows": torch.cat([x, x], dim=-1)[..., 48:],
        "sliced_columns": torch.cat([x, x], dim=-1)[..., ::2],
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": x[:1].expand(2, -1, -1),
    }[kind]
    check((strided, torch.stack([bias, bias], dim=1)[:, 0]), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_input_gives_the_same_bits(implementation, device):
    arguments = inputs((5, 640), torch.float16, device)
    first, second = (geglu(*arguments, implementation=implementation) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(implementation, device):
    arguments = inputs((2, 5, 96), torch.float16, device)
    assert needs_no_dispatcher(*arguments)
    direct = geglu(*arguments, implementation=implementation)
    dispatched = torch.ops.rocm_sd.geglu(*arguments, implementation)
    assert torch.equal(direct, dispatched)
    assert direct.stride() == dispatched.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    x, bias = inputs((2, 4, 32), torch.float16, device)
    assert geglu(x[:0], bias, implementation=implementation).shape == (0, 4, 16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_opcheck(implementation, device):
    arguments = [t.requires_grad_() for t in inputs((2, 3, 32), torch.float32, device)]
    torch.library.opcheck(torch.ops.rocm_sd.geglu.default, (*arguments, implementation))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_gradcheck(bias):
    tensors = inputs((2, 3, 8), torch.float64, torch.device("cpu"), bias=bias)
    assert torch.autograd.gradcheck(geglu, tuple(t.requires_grad_() for t in tensors if t is not None))


def test_half_precision_gradients_follow_float64(device):
    tensors = inputs((4, 5, 64), torch.float16, device)
    given = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(1)).to(tensors[0])

    def gradients(function, tensors, given):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*tensors), tensors, given)

    def stock(x, bias):
        value, gate = (x + bias).chunk(2, dim=-1)
        return value * F.gelu(gate)

    exact = gradients(reference.geglu, in_float64(tensors), given.double())
    ours = gradients(geglu, tensors, given)
    theirs = gradients(stock, tensors, given)
    for name, a, e, s in zip(("x", "bias"), ours, exact, theirs, strict=True):
        numerics.require(f"gradient of {name}", a, e, s)


def test_compiles_as_one_graph(device):
    arguments = inputs((2, 3, 32), torch.float32, device)

    def block(x, bias):
        return geglu(x * 2, bias) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), block(*arguments))


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.int32), None, "dtype torch.int32"),
        (torch.zeros(()), None, "x of shape"),
        (torch.zeros(2, 0), None, "x of shape"),
        (torch.zeros(2, 31), None, "x of shape"),
        (torch.zeros(2, 32), torch.zeros(16), "bias of shape"),
        (torch.zeros(2, 32), torch.zeros(32, device="meta"), "bias on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(x, bias, message):
    with pytest.raises(Unsupported, match=message):
        geglu(x, bias)


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x = torch.zeros(2, 32, dtype=torch.float64)
    with pytest.raises(Unsupported, match="float64"):
        geglu(x, implementation="triton")
    with pytest.raises(InvalidOption, match="torch, triton"):
        geglu(x, implementation="cuda")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "geglu=triton")
    with pytest.raises(Unsupported, match="float64"):
        geglu(x)


def test_a_cpu_tensor_gets_stock_torch():
    choice = OP.choose({"m": 2, "f": 16, "dtype": "float16"}, torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")
