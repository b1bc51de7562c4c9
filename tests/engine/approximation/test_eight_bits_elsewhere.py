"""8 bits where fp8 is not multiplied, under an offload, by the level memory, in a copy and in a pipeline beside it."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import rocm_sd
from pipelines import CASES, call, exactly, require_as_exact_as_stock, small_blocks_too
from rocm_sd import arch
from rocm_sd.arch import Fp8
from rocm_sd.engine.approximation import Approximation, Skipping, eight_bit_plans, eight_bits, observing
from rocm_sd.engine.approximation.observing import Observed
from rocm_sd.engine.calibration import model_key
from rocm_sd.rewrite import eight_bit_convolutions
from rocm_sd.rewrite import eight_bits as linears
from rocm_sd.rewrite.eight_bits import EightBitLayer

INT8, FP8 = Approximation(eight_bits="int8"), Approximation(eight_bits="fp8")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_blocks_too(monkeypatch, "0")
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)


def drawn(pipe, seed=0, name="sd15", **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": 3, **options})


def standing(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, EightBitLayer)}


@pytest.mark.parametrize("name", ["sd15", "sd3"])
def test_weights_alone_are_in_fp8_where_it_is_not_multiplied(tmp_path, monkeypatch, name):
    """On this CPU: a picture is that of stock with the weights as they were rounded."""
    for module in (linears, eight_bit_convolutions):
        monkeypatch.setattr(module, "quantize_rows", lambda *_: pytest.fail("x was rounded"))
    ours, stock, exact = (CASES[name].build(tmp_path) for _ in range(3))
    rocm_sd.optimize(ours, quality=FP8)
    part = "unet" if name == "sd15" else "transformer"
    layers = standing(getattr(ours, part))
    assert {type(layer).__name__ for layer in layers.values()} >= {"EightBitLinear"}
    assert not any(layer.rounds_x for layer in layers.values())
    for each, layer in layers.items():
        for pipe in (stock, exact):
            getattr(pipe, part).get_submodule(each).weight.data = layer.dequantized(torch.float32)
    exact.to(torch.float64)
    seeds = range(4)
    with exactly(torch.float32):
        right = [drawn(exact, seed, name) for seed in seeds]
    require_as_exact_as_stock(*([drawn(p, s, name) for s in seeds] if p else right for p in (ours, None, stock)), 2)
    notes = " / ".join(rocm_sd.report(ours).approximations)
    assert f"{len(layers)} layers have weights of float8_e4m3fn" in notes
    assert "cpu does not multiply float8_e4m3fn: weights alone are 8 bits wide" in notes


def test_a_layer_on_its_way_to_a_card_that_multiplies_fp8_rounds_there(tmp_path, monkeypatch):
    layer = next(iter(standing(rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=FP8).unet).values()))
    assert not layer.rounds_x
    assert linears.rounding(layer) is None
    own = arch.detect
    monkeypatch.setattr(arch, "detect", lambda d=None: replace(arch.CPU, fp8=Fp8.OCP) if str(d) == "cpu" else own(d))
    layer.to("cpu")
    assert layer.rounds_x
    with torch.no_grad():
        assert linears.rounding(layer) is not None


def test_what_is_delicate_goes_by_what_is_rounded(monkeypatch):
    """Beside a column that stands out the others are lost where x is rounded, and not where weights alone are."""
    monkeypatch.setattr(eight_bit_plans.smoothing, "factors", lambda *_: None)
    random = torch.Generator().manual_seed(0)
    rows, layer = torch.randn(64, 48, generator=random), nn.Linear(48, 40)
    rows[:, 3] *= 1e7
    layer.weight.data[:, 3] = 0
    group = eight_bit_plans.Group(("a",), (layer,))
    errors = [
        eight_bit_plans._planned(group, Observed.of(rows), torch.float8_e4m3fn, rounds=rounds, by_row=False).error
        for rounds in (True, False)
    ]
    assert errors[0] > 0.5
    assert errors[1] < 0.05


def test_the_format_is_that_of_the_device_that_computes(tmp_path, monkeypatch):
    """Under an offload weights lie on the CPU between the calls of a card with a format of its own."""
    pipe, card = CASES["sd15"].build(tmp_path), torch.device("cuda", 3)
    own = arch.detect
    monkeypatch.setattr(arch, "detect", lambda d=None: replace(arch.CPU, fp8=Fp8.FNUZ) if d == card else own(d))
    installed, reason = eight_bits.install(pipe, pipe.unet, "fp8", card, eight_bits.Tried())
    assert reason is None
    assert {layer.weight.dtype for layer in standing(pipe.unet).values()} == {torch.float8_e4m3fnuz}
    assert any("multiply in float8_e4m3fnuz" in note for note in installed.notes())
    installed.restore()


def test_the_level_memory_leaves_out_no_steps_and_keeps_the_rest(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    right = drawn(pipe)
    both = Approximation(Skipping(depth=1, every=2), eight_bits="int8")
    rocm_sd.optimize(pipe, "memory", both)
    assert standing(pipe.unet)
    ours, notes = drawn(pipe), " / ".join(rocm_sd.report(pipe).approximations)
    assert "leaves out no steps: its level computes the halves of a batch one after the other" in notes
    assert "layers multiply in int8" in notes
    assert "shallow" not in notes
    rocm_sd.optimize(pipe, "performance", INT8)
    # Halves are other products, and a value may be rounded the other way.
    assert (ours - drawn(pipe)).square().mean().sqrt() < 0.05 * right.std()
    assert torch.equal(drawn(rocm_sd.restore(pipe)), right)


def test_a_copy_stays_in_eight_bits_and_says_so(tmp_path, caplog):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=INT8)
    copied, mine = copy.deepcopy(pipe), drawn(pipe)
    rocm_sd.restore(copied)
    assert "this copy of a UNet2DConditionModel stays in 8 bits" in caplog.text
    assert standing(copied.unet)
    rocm_sd.optimize(copied)
    notes = " / ".join(rocm_sd.report(copied).approximations)
    assert "layers multiply in int8, as they were copied" in notes
    assert "restore leaves them, since their 16 bits were not copied" in notes
    assert torch.equal(drawn(copied), mine)
    caplog.clear()
    rocm_sd.restore(pipe)
    assert not standing(pipe.unet)
    assert "stays in 8 bits" not in caplog.text


def test_another_pipeline_with_the_same_model_says_whose_eight_bits_they_are(tmp_path, caplog):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=INT8)
    other = type(pipe)(**pipe.components, requires_safety_checker=False)
    rocm_sd.optimize(other)
    assert any("as another pipeline has them" in note for note in rocm_sd.report(other).approximations)
    assert "stays in 8 bits" not in caplog.text


def test_a_model_in_eight_bits_has_a_key_of_its_own(tmp_path, monkeypatch):
    pipe = CASES["sd15"].build(tmp_path)
    keys = [model_key(pipe.unet)]
    for quality in (INT8, FP8):
        rocm_sd.optimize(pipe, quality=quality)
        keys.append(model_key(pipe.unet))
    assert len({*keys}) == 3
    rocm_sd.restore(pipe)
    assert model_key(pipe.unet) == keys[0]
    # What was measured of models of 16 bits so far is to be found.
    facts = sorted((k, json.dumps(v, default=repr)) for k, v in pipe.unet.config.items() if not k.startswith("_"))
    told = repr((type(pipe.unet).__name__, "float32", facts))
    assert keys[0].endswith(hashlib.sha256(told.encode()).hexdigest()[:12])


@pytest.mark.parametrize("usual", [0.01, 0.1, 0.5])
def test_an_error_that_all_layers_have_is_too_much_for_all(usual):
    """Where the median alone decided, a model that is lost altogether was converted as a whole."""
    errors = {str(number): usual for number in range(9)} | {"worst": 0.13}
    assert observing.too_far(errors) == ({*errors} if usual == 0.5 else {"worst"})
