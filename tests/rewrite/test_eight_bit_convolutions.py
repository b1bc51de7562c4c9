"""ResNet blocks whose convolutions multiply in 8 bits: the norms round what they give, and nobody else does."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from rounding import as_if_the_cpu_multiplied_fp8, passes_that_round

from pipelines import small_blocks_too
from rocm_sd.rewrite import eight_bit_convolutions, resblock
from rocm_sd.rewrite.eight_bit_convolutions import EightBitConv2d, convolved, rounding
from rocm_sd.rewrite.eight_bits import quantized

FORMATS = (torch.int8, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_blocks_too(monkeypatch, "0")
    as_if_the_cpu_multiplied_fp8(monkeypatch)


def in_eight_bits(layer, to, x_scale=0.03):
    weight, scale = quantized(layer.weight.flatten(1), to, by_row=to is torch.int8)
    return EightBitConv2d(layer, weight.view(layer.weight.shape), scale, torch.tensor(x_scale))


def block(to, **options):
    torch.manual_seed(0)
    made = ResnetBlock2D(in_channels=32, out_channels=48, temb_channels=24, groups=8, **options)
    made = made.eval().requires_grad_(requires_grad=False)
    made.conv1, made.conv2 = (in_eight_bits(layer, to) for layer in (made.conv1, made.conv2))
    return made


@pytest.fixture
def rounded(monkeypatch):
    return passes_that_round(monkeypatch, eight_bit_convolutions)


def given():
    torch.manual_seed(1)
    return torch.randn(2, 32, 9, 7), torch.randn(2, 24)


@torch.no_grad()
@pytest.mark.parametrize("to", FORMATS)
def test_norms_round_for_the_convolutions_after_them(to, rounded, monkeypatch):
    made, (x, temb) = block(to), given()
    ours = resblock.RULE.forward(made, x, temb)
    assert not rounded
    monkeypatch.setattr(eight_bit_convolutions, "rounding", lambda _layer: None)
    assert torch.equal(ours, resblock.RULE.forward(made, x, temb))
    assert rounded == [(2, 9, 7, 32), (2, 9, 7, 48)]
    # Stock's own forward, whose layers round what they get.
    torch.testing.assert_close(ours, made(x, temb), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_block_at_work_in_training_and_one_that_is_resized_are_not_rounded_ahead(rounded):
    x, temb = given()
    dropping = block(FORMATS[0], dropout=0.5).train()
    assert resblock.RULE.forward(dropping, x, temb).isfinite().all()
    assert rounded == [(2, 9, 7, 48)]
    rounded.clear()
    assert resblock.RULE.forward(block(FORMATS[0], up=True), x, temb).shape == (2, 48, 18, 14)
    assert rounded == [(2, 18, 14, 32)]


@torch.no_grad()
def test_a_convolution_that_somebody_watches_gets_what_stock_gives_it(rounded):
    made, (x, temb) = block(FORMATS[1]), given()
    before, seen = resblock.RULE.forward(made, x, temb), []
    made.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.testing.assert_close(resblock.RULE.forward(made, x, temb), before)
    assert seen[0].dtype is torch.float32
    assert rounded == [(2, 9, 7, 32)]


def test_a_gradient_is_that_of_the_rounded_weights():
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(8, 12, 3, padding=1)
    layer, x = in_eight_bits(plain, torch.int8), torch.randn(1, 8, 5, 5, requires_grad=True)
    assert rounding(layer) is None
    convolved(layer, x).sum().backward()
    wide = torch.nn.functional.conv2d(x.detach().requires_grad_(), layer.dequantized(torch.float32), plain.bias, 1, 1)
    assert wide.shape == (1, 12, 5, 5)
    expected = torch.nn.functional.conv_transpose2d(torch.ones_like(wide), layer.dequantized(torch.float32), padding=1)
    torch.testing.assert_close(x.grad, expected)


def test_it_moves_and_is_copied_with_its_8_bits():
    layer = block(FORMATS[1]).conv1
    other = copy.deepcopy(layer).to(torch.float16)
    assert other.weight.dtype is torch.float8_e4m3fn
    assert other.weight_scale.dtype is other.x_scale.dtype is torch.float32
    assert other.bias.dtype is torch.float16
    assert "float8_e4m3fn" in repr(other)
