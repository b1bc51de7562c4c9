from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels.configs.linear_geglu import LinearGegluConfig
from rocm_sd.ops import linear_geglu
from rocm_sd.ops.linear_geglu import reference
from rocm_sd.ops.linear_geglu.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher
from rocm_sd.verify import numerics

# (..., K) and F: edge, odd and real.
SHAPES = [((1, 1), 1), ((3, 45), 77), ((2, 13, 96), 48), ((2, 77, 64), 80), ((20, 320), 160), ((9, 1280), 64)]
DTYPES = [torch.float16, torch.bfloat16]
IMPLEMENTATIONS = ["torch", "library_geglu", "triton"]
SMALL = LinearGegluConfig(block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2)


def shape_id(shape: tuple[tuple[int, ...], int]) -> str:
    return "x".join(map(str, shape[0])) + f"to{shape[1]}"


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(shape, dtype, device, *, bias=True, seed=0):
    (*batch, K), features = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        return (torch.randn(*size, generator=generator) * std).to(device, dtype)

    # A standard deviation of 2 puts gates on both flanks of GELU and into its tails.
    return (
        normal(*batch, K),
        normal(2 * features, K, std=2 * K**-0.5),
        normal(2 * features) if bias else None,
    )


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(arguments, implementation):
    y = linear_geglu(*arguments, implementation=implementation)
    assert y.dtype == arguments[0].dtype
    assert y.is_contiguous()
    close(arguments, y, implementation)
    return y


def close(arguments, y, name):
    exact = reference.linear_geglu(*in_float64(arguments))
    stock = linear_geglu(*arguments, implementation="torch")
    numerics.require(f"linear_geglu ({name})", y, exact, stock)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, bias, dtype, implementation, device):
    check(inputs(shape, dtype, device, bias=bias), implementation)


@pytest.mark.parametrize("implementation", ["torch", "library_geglu"])
def test_float32_is_for_the_libraries(implementation, device):
    arguments = inputs(((2, 7, 64), 40), torch.float32, device)
    check(arguments, implementation)
    with pytest.raises(Unsupported, match="float32"):
        linear_geglu(*arguments, implementation="triton")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_stock_is_what_diffusers_computes_to_the_bit(bias, dtype):
    torch.manual_seed(0)
    layer = GEGLU(32, 48, bias=bias).to(dtype)
    x = torch.randn(2, 5, 32).to(dtype)
    with torch.no_grad():
        y = linear_geglu(x, layer.proj.weight, layer.proj.bias, implementation="torch")
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize(
    "change",
    [{}, {"group_m": 1}, {"group_m": 8}, {"block_k": 64}, {"block_m": 64, "block_n": 16}, {"block_n": 128}],
    ids=str,
)
@pytest.mark.parametrize("K", [160, 150])
@pytest.mark.usefixtures("poison_memory")
def test_every_way_to_share_out_the_work(change, K, device):
    arguments = inputs(((37, K), 72), torch.float16, device)
    first, second = (OP.implementation("triton").run(*arguments, config=replace(SMALL, **change)) for _ in range(2))
    close(arguments, first, "triton")
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["sliced_rows", "sliced_columns", "transposed", "expanded"])
def test_inputs_of_any_strides(kind, implementation, device):
    def strided(t):
        return {
            "sliced_rows": lambda: torch.cat([t, t], dim=-1)[..., t.shape[-1] :],
            "sliced_columns": lambda: torch.stack([t, t], dim=-1)[..., 0],
            "transposed": lambda: t.transpose(0, 1).contiguous().transpose(0, 1),
            "expanded": lambda: t[:1].expand(t.shape),
        }[kind]()

    x, weight, bias = inputs(((2, 6, 32), 24), torch.float16, device)
    check((strided(x), strided(weight), torch.stack([bias, bias], dim=1)[:, 0]), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_value_and_gate_are_the_halves_that_they_should_be(implementation, device):
    """The first half is 1 + its bias of 2; the gate is at 0, 10 and -10, where GELU is 0, 10 and 0."""
    x = torch.ones(2, 16, device=device, dtype=torch.float16)
    weight = torch.zeros(6, 16, device=device, dtype=torch.float16)
    weight[:3, 0] = 1
    bias = torch.tensor([2.0, 2.0, 2.0, 0.0, 10.0, -10.0], device=device, dtype=torch.float16)
    y = linear_geglu(x, weight, bias, implementation=implementation)
    torch.testing.assert_close(y, y.new_tensor([[0.0, 30.0, 0.0]] * 2), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # in rows that are masked
def test_products_that_overflow_before_the_gate(device):
    """The value alone is 80000, beyond float16; gated by GELU(-2) it is -3640: rounded once, it stays finite."""
    x = torch.full((2, 32), 50.0, device=device, dtype=torch.float16)
    weight = torch.full((32, 32), 50.0, device=device, dtype=torch.float16)
    weight[16:] = -2 / (50 * 32)
    y = linear_geglu(x, weight, implementation="triton")
    gate = (x[:1].double() @ weight[16:17].double().T).cpu()
    expected = 80000 * float(F.gelu(gate))
    torch.testing.assert_close(y.float(), torch.full_like(y, expected, dtype=torch.float32), rtol=1e-3, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_input_gives_the_same_bits(implementation, device):
    arguments = inputs(((5, 320), 64), torch.float16, device)
    first, second = (linear_geglu(*arguments, implementation=implementation) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(implementation, device):
    arguments = inputs(((2, 5, 96), 32), torch.float16, device)
    assert needs_no_dispatcher(*arguments)
    direct = linear_geglu(*arguments, implementation=implementation)
    dispatched = torch.ops.rocm_sd.linear_geglu(*arguments, implementation)
    assert torch.equal(direct, dispatched)
    assert direct.stride() == dispatched.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    x, weight, bias = inputs(((2, 4, 32), 16), torch.float16, device)
    assert linear_geglu(x[:0], weight, bias, implementation=implementation).shape == (0, 4, 16)


@pytest.mark.parametrize("implementation", ["torch", "library_geglu"])
def test_opcheck(implementation, device):
    arguments = [t.requires_grad_() for t in inputs(((2, 3, 32), 16), torch.float32, device)]
    torch.library.opcheck(torch.ops.rocm_sd.linear_geglu.default, (*arguments, implementation))


def test_opcheck_of_the_kernel(device):
    arguments = inputs(((2, 3, 32), 16), torch.float16, device)
    torch.library.opcheck(torch.ops.rocm_sd.linear_geglu.default, (*arguments, "triton"))


@pytest.mark.parametrize("implementation", ["torch", "library_geglu"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_gradcheck(bias, implementation):
    tensors = inputs(((2, 3, 5), 4), torch.float64, torch.device("cpu"), bias=bias)

    def function(x, weight, bias=None):
        return linear_geglu(x, weight, bias, implementation)

    assert torch.autograd.gradcheck(function, tuple(t.requires_grad_() for t in tensors if t is not None))


def test_only_the_gradients_that_are_wanted_are_computed(device):
    x, weight, bias = inputs(((5, 32), 24), torch.float16, device)
    linear_geglu(x.requires_grad_(), weight, bias).sum().backward()
    assert x.grad is not None
    assert weight.grad is bias.grad is None


def test_half_precision_gradients_follow_float64(device):
    tensors = inputs(((4, 5, 64), 32), torch.float16, device)
    given = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(1)).to(tensors[0])

    def gradients(function, tensors, given):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*tensors), tensors, given)

    def stock(x, weight, bias):
        value, gate = F.linear(x, weight, bias).chunk(2, dim=-1)
        return value * F.gelu(gate)

    exact = gradients(reference.linear_geglu, in_float64(tensors), given.double())
    ours = gradients(linear_geglu, tensors, given)
    theirs = gradients(stock, tensors, given)
    for name, a, e, s in zip(("x", "weight", "bias"), ours, exact, theirs, strict=True):
        numerics.require(f"gradient of {name}", a, e, s)


def test_compiles_as_one_graph(device):
    arguments = inputs(((2, 3, 32), 16), torch.float32, device)

    def block(x, *rest):
        return linear_geglu(x * 2, *rest) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), block(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 32, dtype=torch.int32)}, "dtype torch.int32"),
        ({"x": torch.zeros(())}, "x of shape"),
        ({"x": torch.zeros(2, 0)}, "x of shape"),
        ({"weight": torch.zeros(16, 31)}, "weight of shape"),
        ({"weight": torch.zeros(15, 32)}, r"\[2F, 32\]"),
        ({"weight": torch.zeros(0, 32)}, "weight of shape"),
        ({"weight": torch.zeros(32)}, "weight of shape"),
        ({"weight": torch.zeros(16, 32, dtype=torch.float16)}, "weight of torch.float16"),
        ({"bias": torch.zeros(8)}, r"bias of shape \(8,\): it takes \(16,\)"),
        ({"bias": torch.zeros(16, dtype=torch.float16)}, "bias of torch.float16"),
        ({"bias": torch.zeros(16, device="meta")}, "bias on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32), "weight": torch.zeros(16, 32), "bias": None} | change
    with pytest.raises(Unsupported, match=message):
        linear_geglu(**arguments)


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x, weight = torch.zeros(2, 32, dtype=torch.float64), torch.zeros(16, 32, dtype=torch.float64)
    with pytest.raises(Unsupported, match="float64"):
        linear_geglu(x, weight, implementation="triton")
    with pytest.raises(InvalidOption, match="torch, library_geglu, triton"):
        linear_geglu(x, weight, implementation="cuda")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "linear_geglu=triton")
    with pytest.raises(Unsupported, match="float64"):
        linear_geglu(x, weight)


def test_the_two_ops_of_library_geglu_choose_for_themselves(monkeypatch):
    """Asked for by name within it, an op that cannot do it raises: it is the one that runs."""
    x, weight = torch.zeros(2, 32, dtype=torch.float64), torch.zeros(16, 32, dtype=torch.float64)
    for op in ("linear_residual", "geglu"):
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", f"{op}=triton")
        with pytest.raises(Unsupported, match=rf"{op} \(triton\)"):
            linear_geglu(x, weight, implementation="library_geglu")


def test_a_cpu_tensor_gets_stock_torch():
    problem = {"m": 2, "f": 16, "k": 32, "bias": 0, "dtype": "float16"}
    choice = OP.choose(problem, torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_where_no_card_was_timed_the_library_multiplies(arch):
    from rocm_sd.tuning import lookup

    for bucket in OP.tuning.buckets:
        choice = lookup(OP.name, arch, OP.verification.problem(*bucket.sample.make(filled=False)))
        assert (choice.implementation, choice.source) == ("library_geglu", "bucket")
        assert choice.config_for("triton")
