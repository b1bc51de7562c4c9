from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.configs.linear_geglu import LinearGegluConfig
from rocm_sd.ops import linear_geglu
from rocm_sd.ops.linear_geglu.op import OP

# (..., K) and F: edge, odd and real.
SHAPES = [((1, 1), 1), ((3, 45), 77), ((2, 13, 96), 48), ((2, 77, 64), 80), ((20, 320), 160), ((9, 1280), 64)]
DTYPES = [torch.float16, torch.bfloat16]
IMPLEMENTATIONS = ["torch", "library_geglu", "triton"]
SMALL = LinearGegluConfig(block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2)


check = partial(op_checks.check, OP)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, bias, dtype, implementation, device):
    check(inputs(shape, dtype, device, bias=bias), implementation)


def test_float32_is_for_stock_and_on_a_cpu_for_the_two_ops(device):
    arguments = inputs(((2, 7, 64), 40), torch.float32, device)
    check(arguments, "torch")
    check([argument.cpu() for argument in arguments], "library_geglu")
    with pytest.raises(Unsupported, match="float32"):
        linear_geglu(*arguments, implementation="triton")
    # There it was seen to err six times as much as stock.
    problem = OP.verification.problem(*arguments)
    why_not = OP.implementation("library_geglu").why_not
    assert "more than twice stock's" in why_not(problem, torch.device("cuda"))
    assert why_not(problem | {"dtype": "float16"}, torch.device("cuda")) is None


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
    first, second = (check(arguments, "triton", replace(SMALL, **change)) for _ in range(2))
    assert torch.equal(first, second)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(())}, "x of shape"),
        ({"x": torch.zeros(2, 0)}, "x of shape"),
        ({"weight": torch.zeros(16, 31)}, "weight of shape"),
        ({"weight": torch.zeros(15, 32)}, r"\[2F, 32\]"),
        ({"weight": torch.zeros(0, 32)}, "weight of shape"),
        ({"weight": torch.zeros(32)}, "weight of shape"),
        ({"weight": torch.zeros(16, 32, dtype=torch.float16)}, "weight of torch.float16"),
        ({"bias": torch.zeros(8)}, r"bias of shape \(8,\): it takes \(16,\)"),
        ({"bias": torch.zeros(16, dtype=torch.float16)}, "bias of torch.float16"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32), "weight": torch.zeros(16, 32), "bias": None} | change
    with pytest.raises(Unsupported, match=message):
        linear_geglu(**arguments)


def test_the_two_ops_of_library_geglu_choose_for_themselves(monkeypatch):
    """Asked for by name within it, an op that cannot do it raises: it is the one that runs."""
    x, weight = torch.zeros(2, 32, dtype=torch.float64), torch.zeros(16, 32, dtype=torch.float64)
    for op in ("linear_residual", "geglu"):
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", f"{op}=triton")
        with pytest.raises(Unsupported, match=rf"{op} \(triton\)"):
            linear_geglu(x, weight, implementation="library_geglu")


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_where_no_card_was_timed_the_library_multiplies(arch):
    from rocm_sd.tuning import lookup

    for bucket in OP.tuning.buckets:
        choice = lookup(OP.name, arch, OP.verification.problem(*bucket.sample.make(filled=False)))
        assert (choice.implementation, choice.source) == ("library_geglu", "bucket")
        assert choice.config_for("triton")
