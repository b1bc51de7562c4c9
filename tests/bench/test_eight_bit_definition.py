"""Engines in 8 bits are held to their rounding in float64, and what computes something else is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.bench import lossy, runner, subjects
from rocm_sd.bench.eight_bit_definition import EightBitDefinition
from rocm_sd.bench.engines import Engine
from rocm_sd.bench.gate import WRONG
from rocm_sd.bench.pareto import Choice, Survey
from rocm_sd.bench.subjects import Subjects
from rocm_sd.bench.workloads import make
from rocm_sd.engine import Approximation, Skipping
from rocm_sd.engine.approximation import eight_bit_layers, eight_bit_plans, eight_bits
from rocm_sd.rewrite import eight_bit_convolutions
from rocm_sd.rewrite import eight_bits as eight_bit_linears

INT8, FP8 = Approximation(eight_bits="int8"), Approximation(eight_bits="fp8")
DECODER = Approximation(eight_bit_decoder="int8")
STEPS = 3


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder).save_pretrained(folder / "tiny")
    return make("sd15-512", torch.device("cpu"), model=str(folder / "tiny"), steps=STEPS)


@pytest.fixture(autouse=True)
def small(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    # The layers of a model this small are all below it.
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    side = drawn._base.unet.config.sample_size * drawn._base.vae_scale_factor
    drawn.facts = dataclasses.replace(drawn.facts, height=side, width=side)
    monkeypatch.setattr(subjects, "default_count", lambda _device: 2)


def compared(drawn, approximation, spoil=lambda _pipe: None):
    pipe = rocm_sd.optimize(drawn.pipeline(), quality=approximation)
    spoil(pipe)
    return lossy.numerics(drawn, 1, pipe, lossy.definition_of(approximation), steps=STEPS)


@pytest.mark.parametrize(
    "approximation",
    [INT8, FP8, DECODER, Approximation(Skipping(depth=1, every=2, guided_every=2), eight_bits="int8")],
    ids=str,
)
def test_an_engine_in_eight_bits_is_what_it_is_defined_to_be(drawn, approximation):
    found = compared(drawn, approximation)
    assert found.wrong is None
    assert 0 < found.error <= 2 * found.stock_error + torch.finfo(torch.float32).eps


def test_so_is_one_whose_weights_in_fp8_have_a_scale_for_each_row(drawn, monkeypatch):
    monkeypatch.setattr(eight_bit_plans, "_is_quick_by_row", lambda _device: True)
    by_row = []

    def noted(pipe):
        by_row.extend(layer.weight_scale.dim() for layer in eight_bit_layers(pipe.unet).values())

    assert compared(drawn, FP8, noted).wrong is None
    assert by_row
    assert all(by_row)


def some_layer(pipe, kind=nn.Linear):
    """In the middle of the model, where a small error is lost in the picture."""
    layers = {name: each for name, each in eight_bit_layers(pipe.unet).items() if isinstance(each, kind)}
    return list(layers.items())[len(layers) // 2]


def of_weights(pipe):
    some_layer(pipe)[1].weight_scale.mul_(1.02)


def of_a_filter(pipe):
    some_layer(pipe, nn.Conv2d)[1].weight_scale.mul_(1.02)


def of_one_value(pipe):
    some_layer(pipe)[1].weight.view(torch.int8)[0, 0].add_(2)


def of_the_bias(pipe):
    next(each for each in eight_bit_layers(pipe.unet).values() if each.bias is not None).bias.data.add_(0.01)


def of_the_calibration(pipe):
    next(each for each in eight_bit_layers(pipe.unet).values() if each.x_scale is not None).x_scale.mul_(1.02)


def coarser(pipe):
    """As another layer would be whose largest weight is twice as large: each value is right by its own scale."""
    layer = some_layer(pipe)[1]
    if layer.weight.dtype is torch.int8:
        layer.weight.copy_((layer.weight.float() / 2).round())
        layer.weight_scale.mul_(2)
    else:
        layer.weight_scale.mul_(2)


@pytest.mark.parametrize("approximation", [INT8, FP8], ids=str)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (of_weights, "more than half a step"),
        (of_a_filter, "more than half a step"),
        (of_one_value, "1 weights of"),
        (of_the_bias, "the bias of"),
        (of_the_calibration, "from the calibrated one"),
        (coarser, "more than half a step"),
    ],
)
def test_a_scale_that_is_broken_is_found(drawn, approximation, spoil, said):
    found = compared(drawn, approximation, spoil)
    assert found.wrong.startswith(WRONG)
    assert said in found.wrong
    assert "unet." in found.wrong, "the layer is named"


@pytest.mark.parametrize(
    ("module", "op"), [(eight_bit_linears, "linear_8bit"), (eight_bit_convolutions, "conv2d_8bit")]
)
def test_a_product_that_is_wrong_is_found(drawn, monkeypatch, module, op):
    real = getattr(module, op)
    monkeypatch.setattr(module, op, lambda *given: real(*given) * 1.001)
    assert "the product of unet." in compared(drawn, INT8).wrong


def test_what_is_wrong_between_layers_shows_in_the_picture(drawn):
    def spoil(pipe):
        pipe.unet.conv_norm_out.weight.data.mul_(1.5)

    assert "of the latents" in compared(drawn, INT8, spoil).wrong


def test_a_definition_leaves_a_stock_pipeline_alone_where_nothing_is_in_eight_bits(drawn):
    pipe = drawn.pipeline()
    weights = [each.clone() for each in pipe.unet.parameters()]
    assert EightBitDefinition(drawn.pipeline(), torch.float32).define(pipe) is pipe
    assert all(torch.equal(each, before) for each, before in zip(pipe.unet.parameters(), weights, strict=True))


@pytest.mark.parametrize("spoil", [None, of_weights], ids=["right", "broken"])
def test_bench_times_what_is_right_and_lists_what_is_not(drawn, tmp_path, quick, spoil):
    def prepare(pipe):
        rocm_sd.optimize(pipe, quality=INT8)
        if spoil is not None:
            spoil(pipe)
        return pipe

    defined = lossy.Lossy("high", lambda *_: str(INT8), lambda pipe, _steps: lossy.definition_of(INT8)(pipe))
    engine = Engine("coarse", "a test", prepare, lambda _device: None, lambda: "1", defined)
    (found,) = runner.run(drawn, [engine], [1], out=tmp_path, repeats=1).measurements
    if spoil is None:
        assert found.left_out is None
        assert found.notes == ()
        assert found.error <= 2 * found.stock_error
        assert found.quality.is_scored
    else:
        assert found.left_out.startswith(WRONG)
        assert found.ms == ()


def test_a_survey_compares_settings_in_eight_bits_with_their_definition(drawn, tmp_path):
    choices = [Choice("int8", INT8), Choice("decoder int8", DECODER)]
    record = Survey(drawn, Subjects(("a frog", "a dog")), choices, out=tmp_path).go()
    for found in record.measurements[2:]:
        assert found.left_out is None
        assert found.notes == ()
        assert found.error <= 2 * found.stock_error + torch.finfo(torch.float32).eps
