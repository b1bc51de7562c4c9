from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rocm_sd import numerics
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import group_norm_silu
from rocm_sd.ops.group_norm_silu import reference
from rocm_sd.ops.group_norm_silu.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher

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


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[:4])) + f"g{shape[4]}"


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(arguments, implementation, *, silu=True, eps=1e-5):
    y = group_norm_silu(*arguments, eps=eps, silu=silu, implementation=implementation)
    exact = reference.group_norm_silu(*in_float64(arguments), eps=eps, silu=silu)
    stock = group_norm_silu(*arguments, eps=eps, silu=silu, implementation="torch")
    assert y.dtype == arguments[0].dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    numerics.require(f"group_norm_silu ({implementation})", y, exact, stock)
    return y


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
    check(inputs((2, 96, 13, 17, 32), torch.float16, device, affine=affine, add=add), "triton", silu=silu, eps=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["nchw", "sliced", "transposed", "expanded"])
def test_inputs_of_any_strides(kind, implementation, device):
    x, groups, weight, bias, add = inputs((2, 32, 12, 12, 8), torch.float16, device)
    strided = {
        "nchw": x.contiguous(),
        "sliced": torch.cat([x, x], dim=1)[:, ::2],
        "transposed": x.transpose(2, 3),
        "expanded": x[:1].expand(2, -1, -1, -1),
    }[kind]
    sliced_add = torch.stack([add, add], dim=2)[:, :, 1]
    check((strided, groups, weight, bias, sliced_add), implementation)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_input_gives_the_same_bits(implementation, device):
    arguments = inputs((2, 96, 13, 17, 32), torch.float16, device)
    first, second = (group_norm_silu(*arguments, implementation=implementation) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(implementation, device):
    x, groups, weight, bias, add = inputs((2, 96, 13, 17, 32), torch.float16, device)
    assert needs_no_dispatcher(x, weight, bias, add, None)
    direct = group_norm_silu(x, groups, weight, bias, add, implementation=implementation)
    dispatched = torch.ops.rocm_sd.group_norm_silu(x, groups, weight, bias, add, 1e-5, True, implementation)
    assert torch.equal(direct, dispatched)
    assert direct.stride() == dispatched.stride()


def test_gradients_and_traced_tensors_go_through_the_dispatcher():
    plain, wanted = torch.ones(2), torch.ones(2, requires_grad=True)
    assert not needs_no_dispatcher(plain, wanted)
    with torch.no_grad():
        assert needs_no_dispatcher(plain, wanted)
    with FakeTensorMode():
        assert not needs_no_dispatcher(torch.ones(2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    x, groups, weight, bias, add = inputs((2, 32, 4, 4, 8), torch.float16, device)
    y = group_norm_silu(x[:0], groups, weight, bias, add[:0], implementation=implementation)
    assert y.shape == (0, 32, 4, 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_opcheck(implementation, device):
    x, groups, weight, bias, add = inputs((2, 32, 6, 5, 8), torch.float32, device)
    tensors = [t.requires_grad_() for t in (x, weight, bias, add)]
    x, weight, bias, add = tensors
    torch.library.opcheck(
        torch.ops.rocm_sd.group_norm_silu.default, (x, groups, weight, bias, add, 1e-5, True, implementation)
    )


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("parts", ["all", "none"])
def test_gradcheck(silu, parts):
    x, groups, weight, bias, add = inputs((2, 6, 3, 4, 3), torch.float64, torch.device("cpu"))
    if parts == "none":
        weight = bias = add = None
    tensors = tuple(t.requires_grad_() for t in (x, weight, bias, add) if t is not None)

    def function(*values):
        rest = values[1:] if len(values) > 1 else (None, None, None)
        return group_norm_silu(values[0], groups, *rest, silu=silu)

    assert torch.autograd.gradcheck(function, tensors)


def test_half_precision_gradients_follow_float64(device):
    x, groups, weight, bias, add = inputs((2, 32, 6, 5, 8), torch.float16, device)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)

    def gradients(function, tensors, gradient):
        tensors = [t.detach().requires_grad_() for t in tensors]
        y = function(tensors[0], groups, *tensors[1:])
        return torch.autograd.grad(y, tensors, gradient)

    def stock(x, groups, weight, bias, add):
        return torch.nn.functional.silu(
            torch.nn.functional.group_norm(x + add[:, :, None, None], groups, weight, bias, 1e-5)
        )

    tensors = (x, weight, bias, add)
    exact = gradients(reference.group_norm_silu, in_float64(tensors), gradient.double())
    ours = gradients(group_norm_silu, tensors, gradient)
    theirs = gradients(stock, tensors, gradient)
    for name, a, e, s in zip(("x", "weight", "bias", "add"), ours, exact, theirs, strict=True):
        numerics.require(f"gradient of {name}", a, e, s)


def test_compiles_as_one_graph(device):
    arguments = inputs((2, 32, 6, 5, 8), torch.float32, device)

    def block(x, *rest):
        return group_norm_silu(x * 2, *rest) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), block(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 5}, "32 channels in 5 groups"),
        ({"groups": 0}, "32 channels in 0 groups"),
        ({"x": torch.zeros(2, 32, 4)}, "x of 3 dimensions"),
        ({"x": torch.zeros(2, 32, 4, 4, dtype=torch.int32)}, "dtype torch.int32"),
        ({"weight": torch.zeros(31)}, "weight of shape"),
        ({"add": torch.zeros(32)}, "add of shape"),
        ({"weight": torch.zeros(32, device="meta")}, "weight on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32, 4, 4), "groups": 8, "weight": None, "bias": None, "add": None} | change
    with pytest.raises(Unsupported, match=message):
        group_norm_silu(**arguments)


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x = torch.zeros(1, 32, 4, 4, dtype=torch.float64)
    with pytest.raises(Unsupported, match="float64"):
        group_norm_silu(x, 8, implementation="triton")
    with pytest.raises(InvalidOption, match="torch, triton"):
        group_norm_silu(x, 8, implementation="cuda")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "group_norm_silu=triton")
    with pytest.raises(Unsupported, match="float64"):
        group_norm_silu(x, 8)


def test_a_cpu_tensor_gets_stock_torch():
    problem = {"n": 1, "c": 32, "hw": 16, "groups": 8, "dtype": "float16"}
    choice = OP.choose(problem, torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")
