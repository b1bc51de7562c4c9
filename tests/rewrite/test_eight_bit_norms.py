"""Transformer blocks whose linears multiply in 8 bits: norms and gates round what they give, and nobody else does."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from rounding import as_if_the_cpu_multiplied_fp8, passes_that_round
from torch import nn

from rocm_sd.errors import Unsupported
from rocm_sd.ops import geglu, layer_norm_residual
from rocm_sd.rewrite import eight_bits
from rocm_sd.rewrite.eight_bits import EightBitLinear, quantized
from rocm_sd.rewrite.transformer import RULE

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def fp8(monkeypatch):
    as_if_the_cpu_multiplied_fp8(monkeypatch)


def block_in_eight_bits(to=FP8, *, calibrated=True):
    torch.manual_seed(0)
    block = BasicTransformerBlock(32, 2, 16, cross_attention_dim=24).eval().requires_grad_(requires_grad=False)
    for name, layer in list(block.named_modules()):
        if isinstance(layer, nn.Linear):
            x_scale = torch.tensor(0.02) if calibrated else None
            parent, _, last = name.rpartition(".")
            ours = EightBitLinear(layer, *quantized(layer.weight, to, by_row=not calibrated), x_scale)
            block.get_submodule(parent)._modules[last] = ours
    return block


@pytest.fixture
def rounded(monkeypatch):
    return passes_that_round(monkeypatch, eight_bits)


def given():
    torch.manual_seed(1)
    return torch.randn(2, 12, 32), torch.randn(2, 5, 24)


@torch.no_grad()
def drawn(block, x, text):
    return RULE.forward(block, x, encoder_hidden_states=text)


@pytest.mark.parametrize("to", [FP8, torch.int8])
def test_norms_and_the_gate_round_for_the_layers_after_them(to, rounded, monkeypatch):
    block, (x, text) = block_in_eight_bits(to), given()
    rounded.clear()
    ours = drawn(block, x, text)
    # What both attentions give, and the text, for keys and values.
    assert sorted(rounded) == sorted([(2, 12, 32), (2, 12, 32), (2, 5, 24)])
    rounded.clear()
    monkeypatch.setattr(eight_bits, "rounding", lambda *_: None)
    assert torch.equal(ours, drawn(block, x, text))
    assert len(rounded) == 7


def test_norms_and_the_gate_give_each_row_a_scale_where_none_was_calibrated(rounded, monkeypatch):
    block, (x, text) = block_in_eight_bits(torch.int8, calibrated=False), given()
    rounded.clear()
    ours = drawn(block, x, text)
    assert sorted(rounded) == sorted([(2, 12, 32), (2, 12, 32), (2, 5, 24)])
    rounded.clear()
    monkeypatch.setattr(eight_bits, "rounding", lambda *_: None)
    assert torch.equal(ours, drawn(block, x, text))
    assert len(rounded) == 7


def test_layers_that_are_smoothed_take_what_comes_as_it_is(rounded):
    block, (x, text) = block_in_eight_bits(torch.int8, calibrated=False), given()
    before = drawn(block, x, text)
    proj = block.ff.net[0].proj
    proj.smoothing = torch.ones(32)
    rounded.clear()
    assert torch.equal(drawn(block, x, text), before)
    assert rounded.count((2, 12, 32)) == 3


def test_a_layer_that_somebody_watches_gets_what_stock_gives_it(rounded):
    block, (x, text) = block_in_eight_bits(), given()
    before, seen = drawn(block, x, text), []
    block.attn1.to_q.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    rounded.clear()
    assert torch.equal(drawn(block, x, text), before)
    assert torch.equal(seen[0], block.norm1(x))


def test_what_is_rounded_has_no_gradient():
    x, scale = torch.randn(3, 8, requires_grad=True), torch.ones(1)
    for function, arguments in ((geglu, (x, None)), (layer_norm_residual, (x, None, None, None, 1e-5))):
        with pytest.raises(Unsupported, match="gradient"):
            function(*arguments, scale, "int8")
        with pytest.raises(Unsupported, match="without"):
            function(*arguments, scale)
        with torch.no_grad():
            assert function(*arguments, scale, "int8") is not None
