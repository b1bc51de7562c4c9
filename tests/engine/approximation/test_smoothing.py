"""Columns that stand out: which are evened out, that nothing is lost by it, and that it is undone with the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from approximated import as_if_the_cpu_multiplied_fp8
from torch import nn

import rocm_sd
from pipelines import CASES, call, small_blocks_too
from rocm_sd.engine.approximation import Approximation, eight_bit_plans, eight_bits, smoothing
from rocm_sd.engine.approximation.observing import Observed
from rocm_sd.rewrite.eight_bits import EightBitLinear, product, rounding

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# In fp8 a value has its own exponent, and thousands are no matter.
TIMES = {"int8": 3e3, "fp8": 3e6}


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch):
    small_blocks_too(monkeypatch, "0")
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    as_if_the_cpu_multiplied_fp8(monkeypatch)


def drawn(pipe, seed=0):
    return call(pipe, CASES["sd15"], seed, num_inference_steps=3)


def delicate(pipe, times):
    """The projection of a feed-forward, of whose input one column is so many times the others."""
    block = next(part for name, part in pipe.unet.named_modules() if name.endswith("transformer_blocks.0"))
    with torch.no_grad():
        for part in (block.norm3.weight, block.norm3.bias):
            part[3] *= times
        block.ff.net[0].proj.weight[:, 3] /= times
    return block.ff.net[0]


def planned(weights, rows, to):
    layers = [nn.Linear(weight.shape[1], len(weight), bias=False) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight)
    group = eight_bit_plans.Group(tuple(map(str, range(len(layers)))), tuple(layers))
    return eight_bit_plans._planned(group, Observed.of(rows), FORMATS[to], rounds=True, by_row=to == "int8")


def usual(rows=64, width=48):
    random = torch.Generator().manual_seed(0)
    return torch.randn(40, width, generator=random) / width**0.5, torch.randn(rows, width, generator=random)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factors_are_powers_of_two_at_most_one(dtype):
    weight, rows = usual()
    rows[:, 5] *= 4000
    weight[:, 7] *= 1000
    rows[:, 9], weight[:, 11] = 0, 0
    factors = smoothing.factors(rows.abs().amax(0), [weight.to(dtype)])
    assert factors.dtype is dtype
    assert torch.equal(torch.frexp(factors.float()).mantissa, torch.full((48,), 0.5))
    assert factors.max() == 1
    wide = factors.double()
    assert wide[5] < wide[0] / 30, "x's outlier is made smaller by the root of what it is too large"
    assert wide[7] > wide[0], "and one of the weight larger"
    assert wide[9] == wide.median(), "nothing is known of it"


def test_what_is_even_is_left_alone():
    assert smoothing.factors(torch.ones(8), [torch.ones(4, 8)]) is None
    assert smoothing.factors(torch.zeros(8), [torch.ones(4, 8)]) is None
    for to in FORMATS:
        assert planned(usual()[:1], usual()[1], to).smoothing is None


def test_no_more_than_it_is_worth():
    assert smoothing.worth_it(0.049, 0.1)
    assert not smoothing.worth_it(0.051, 0.1)
    assert smoothing.worth_it(0.1, float("nan"))
    assert not smoothing.worth_it(float("nan"), 0.1)
    assert not smoothing.worth_it(0.0, 0.0)


@pytest.mark.parametrize("to", FORMATS)
def test_a_column_that_stands_out_is_evened_out(to):
    weight, rows = usual()
    plain = planned([weight], rows, to)
    rows[:, 3] *= TIMES[to]
    weight[:, 3] /= TIMES[to]
    assert planned([weight, weight.flip(0)], rows, to).error < 2 * plain.error


def test_what_stands_out_in_both_cannot_be():
    """Two columns that take each other away: large in x and in the weight alike, and nothing in the result."""
    weight, rows = usual()
    rows[:, 3] = rows[:, 4] = 100
    weight[:, 3], weight[:, 4] = 20 * weight[:, 3], -20 * weight[:, 3]
    one = planned([weight], rows, "int8")
    assert one.error > 0.06


@pytest.mark.parametrize("to", FORMATS)
def test_a_delicate_layer_is_smoothed_and_put_into_8_bits(tmp_path, to, monkeypatch):
    pipe = CASES["sd15"].build(tmp_path)

    def error():
        rocm_sd.restore(pipe)
        exact = torch.stack([drawn(pipe, seed) for seed in range(3)])
        rocm_sd.optimize(pipe, quality=Approximation(eight_bits=to))
        ours = torch.stack([drawn(pipe, seed) for seed in range(3)])
        return float((ours - exact).square().mean().sqrt() / exact.std())

    before = error()
    rocm_sd.restore(pipe)
    gate = delicate(pipe, TIMES[to])
    linear = gate.proj
    assert error() < 1.5 * before
    assert isinstance(gate.proj, EightBitLinear)
    assert gate.proj.smoothing is not None
    count = sum(getattr(part, "smoothing", None) is not None for part in pipe.unet.modules())
    assert any(f"{count} of these layers are smoothed" in note for note in rocm_sd.report(pipe).approximations)
    rocm_sd.restore(pipe)
    assert gate.proj is linear
    monkeypatch.setattr(smoothing, "_SHARE", 0.0)
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits=to))
    assert gate.proj is linear, "without it the layer keeps its dtype"


def smoothed_layer(to, dtype):
    weight, rows = usual()
    rows[:, 3] *= TIMES["int8"]
    weight[:, 3] /= TIMES["int8"]
    linear = nn.Linear(48, 40, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    factors = smoothing.factors(rows.abs().amax(0), [linear.weight])
    group = eight_bit_plans.Group(("a",), (linear,))
    x_scale = None if to == "int8" else (rows * factors.float()).abs().amax() / 224
    one = eight_bit_plans.Planned(x_scale, factors, to == "int8", 0.01)
    return linear, rows.to(dtype), eight_bits._in_eight_bits(group, one, FORMATS[to])[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("to", FORMATS)
def test_a_smoothed_layer_computes_the_layer(to, dtype):
    linear, x, layer = smoothed_layer(to, dtype)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with torch.no_grad():
        y = layer(x)
        residual = torch.ones_like(y)
        assert torch.equal(product(layer, x, residual), product(copy.deepcopy(layer), x, residual))
    assert y.dtype is dtype
    assert (y.double() - exact).square().mean().sqrt() < 0.06 * exact.square().mean().sqrt()
    weight = layer.dequantized(torch.float64)
    assert (weight - linear.weight).square().mean().sqrt() < 0.05 * linear.weight.double().square().mean().sqrt()
    assert "smoothed" in repr(layer)


@pytest.mark.parametrize("to", FORMATS)
def test_its_gradient_is_that_of_the_rounded_weights(to):
    _, x, layer = smoothed_layer(to, torch.float32)
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized(torch.float32).sum(0).expand(len(x), -1))


def test_another_dtype_is_for_what_comes_in():
    _, x, layer = smoothed_layer("int8", torch.float16)
    factors = layer.smoothing.clone()
    layer.to(torch.bfloat16)
    assert layer.smoothing.dtype is torch.float16
    assert torch.equal(layer.smoothing, factors)
    with torch.no_grad():
        assert layer(x.bfloat16()).dtype is torch.bfloat16


def test_nobody_else_rounds_what_is_smoothed():
    _, _, layer = smoothed_layer("fp8", torch.float16)
    with torch.no_grad():
        assert rounding(layer) is None
        layer.smoothing = None
        assert rounding(layer) is not None


def test_a_lora_works_on_top(tmp_path):
    peft = pytest.importorskip("peft")
    pipe = CASES["sd15"].build(tmp_path)
    gate = delicate(pipe, TIMES["int8"])
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits="int8"))
    x = torch.randn(5, gate.proj.in_features)
    with torch.no_grad():
        right = gate.proj(x)
        pipe.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False))
        lora = gate.proj
        added = lora.lora_B["default"](lora.lora_A["default"](x)) * lora.scaling["default"]
        torch.testing.assert_close(lora(x), right + added)
