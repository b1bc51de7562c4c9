from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels.configs.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.ops import layer_norm_residual
from rocm_sd.ops.layer_norm_residual import reference
from rocm_sd.ops.layer_norm_residual.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher
from rocm_sd.verify import numerics

# Edge, odd and real.
SHAPES = [(1, 1), (3, 2), (5, 77), (2, 9, 96), (2, 13, 320), (2, 640), (3, 1280), (2, 768), (1, 2048), (2, 1000)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(arguments, implementation, *, eps=1e-5):
    results = layer_norm_residual(*arguments, eps=eps, implementation=implementation)
    exact = reference.layer_norm_residual(*in_float64(arguments), eps=eps)
    stock = layer_norm_residual(*arguments, eps=eps, implementation="torch")
    for name, a, e, s in zip(("y", "total"), results, exact, stock, strict=True):
        assert a.dtype == arguments[0].dtype
        assert a.is_contiguous()
        numerics.require(f"layer_norm_residual ({implementation}), {name}", a, e, s)
    return results


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


def test_the_norm_alone_has_gradients(device):
    x, _, weight, bias = inputs((3, 8), torch.float64, device, residual_too=False)
    given = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm_residual(x, None, w, b)[0], given)


@pytest.mark.parametrize(
    "config", [{"rows": 4, "warps": 1, "chunk": 64}, {"rows": 1, "warps": 4, "chunk": 512}], ids=str
)
@pytest.mark.parametrize("C", [320, 300])
@pytest.mark.usefixtures("poison_memory")
def test_every_way_to_split_a_row(config, C, device):
    arguments = inputs((9, C), torch.float16, device)
    results = OP.implementation("triton").run(*arguments, 1e-5, config=LayerNormResidualConfig(**config))
    exact = reference.layer_norm_residual(*in_float64(arguments))
    stock = layer_norm_residual(*arguments, implementation="torch")
    for a, e, s in zip(results, exact, stock, strict=True):
        numerics.require("layer_norm_residual", a, e, s)


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(weight, bias, device):
    x, residual, w, b = inputs((5, 96), torch.float16, device)
    check((x, residual, w if weight else None, b if bias else None), "triton", eps=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["sliced_rows", "sliced_columns", "transposed", "expanded"])
def test_inputs_of_any_strides(kind, implementation, device):
    x, residual, weight, bias = inputs((2, 12, 48), torch.float16, device)
    strided = {
        "sliced_rows": torch.cat([x, x], dim=-1)[..., 48:],
        "sliced_columns": torch.cat([x, x], dim=-1)[..., ::2],
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": x[:1].expand(2, -1, -1),
    }[kind]
    check((strided, residual, weight, bias), implementation)
    check((residual, strided, torch.stack([weight, weight], dim=1)[:, 0], bias), implementation)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_input_gives_the_same_bits(implementation, device):
    arguments = inputs((13, 320), torch.float16, device)
    first, second = (layer_norm_residual(*arguments, implementation=implementation) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(implementation, device):
    arguments = inputs((2, 5, 96), torch.float16, device)
    assert needs_no_dispatcher(*arguments)
    direct = layer_norm_residual(*arguments, implementation=implementation)
    dispatched = torch.ops.rocm_sd.layer_norm_residual(*arguments, 1e-5, implementation)
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    x, residual, weight, bias = inputs((2, 4, 32), torch.float16, device)
    y, total = layer_norm_residual(x[:0], residual[:0], weight, bias, implementation=implementation)
    assert y.shape == total.shape == (0, 4, 32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_opcheck(implementation, device):
    arguments = [t.requires_grad_() for t in inputs((2, 3, 32), torch.float32, device)]
    torch.library.opcheck(torch.ops.rocm_sd.layer_norm_residual.default, (*arguments, 1e-5, implementation))


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
def test_gradcheck(affine):
    tensors = inputs((2, 3, 6), torch.float64, torch.device("cpu"), affine=affine)
    assert torch.autograd.gradcheck(layer_norm_residual, tuple(t.requires_grad_() for t in tensors if t is not None))


def test_gradients_where_one_output_is_unused():
    x, residual, weight, bias = (t.requires_grad_() for t in inputs((2, 3, 6), torch.float64, torch.device("cpu")))
    y, total = layer_norm_residual(x, residual, weight, bias)
    (through_total,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    torch.testing.assert_close(through_total, torch.ones_like(x))
    (through_y,) = torch.autograd.grad(y.square().sum(), residual)
    stock = F.layer_norm(x + residual, (6,), weight, bias).square().sum()
    torch.testing.assert_close(through_y, torch.autograd.grad(stock, residual)[0])


def test_half_precision_gradients_follow_float64(device):
    tensors = inputs((4, 5, 64), torch.float16, device)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(tensors[0].shape, generator=generator).to(tensors[0]) for _ in range(2)]

    def gradients(function, tensors, given):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*tensors), tensors, given)

    def stock(x, residual, weight, bias):
        total = x + residual
        return F.layer_norm(total, total.shape[-1:], weight, bias), total

    exact = gradients(reference.layer_norm_residual, in_float64(tensors), [g.double() for g in given])
    ours = gradients(layer_norm_residual, tensors, given)
    theirs = gradients(stock, tensors, given)
    for name, a, e, s in zip(("x", "residual", "weight", "bias"), ours, exact, theirs, strict=True):
        numerics.require(f"gradient of {name}", a, e, s)


def test_compiles_as_one_graph(device):
    arguments = inputs((2, 3, 32), torch.float32, device)

    def block(x, *rest):
        y, total = layer_norm_residual(x * 2, *rest)
        return y + 1, total

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), block(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 32, dtype=torch.int32)}, "dtype torch.int32"),
        ({"x": torch.zeros(())}, "x of shape"),
        ({"x": torch.zeros(2, 0)}, "x of shape"),
        ({"residual": torch.zeros(32)}, "residual of shape"),
        ({"residual": torch.zeros(2, 32, dtype=torch.float16)}, "residual of torch.float16"),
        ({"weight": torch.zeros(31)}, "weight of shape"),
        ({"bias": torch.zeros(2, 32)}, "bias of shape"),
        ({"weight": torch.zeros(32, device="meta")}, "weight on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32), "residual": torch.zeros(2, 32), "weight": None, "bias": None} | change
    with pytest.raises(Unsupported, match=message):
        layer_norm_residual(**arguments)


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x = torch.zeros(2, 32, dtype=torch.float64)
    with pytest.raises(Unsupported, match="float64"):
        layer_norm_residual(x, x, implementation="triton")
    wide = torch.zeros(1, 16385)
    with pytest.raises(Unsupported, match="rows of 16385 values"):
        layer_norm_residual(wide, wide, implementation="triton")
    with pytest.raises(InvalidOption, match="torch, triton"):
        layer_norm_residual(x, x, implementation="cuda")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "layer_norm_residual=triton")
    with pytest.raises(Unsupported, match="float64"):
        layer_norm_residual(x, x)


def test_a_cpu_tensor_gets_stock_torch():
    choice = OP.choose({"m": 2, "c": 32, "dtype": "float16"}, torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")
