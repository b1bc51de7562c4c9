"""Products in 8 bits: what they are defined to be, which layers keep their dtype, and the way back to stock's bits."""

from __future__ import annotations

import copy

import pytest
import torch
from approximated import as_if_the_cpu_multiplied_fp8
from torch import nn

import rocm_sd
from pipelines import CASES, call, exactly, picture_of, require_as_exact_as_stock, small_blocks_too
from rocm_sd.engine.approximation import Approximation, Skipping, eight_bits, observing
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops.quantize_rows.reference import quantize_rows
from rocm_sd.rewrite.eight_bits import EightBitLayer, EightBitLinear

FORMATS = ("int8", "fp8")


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    # The layers of a model this small are all below it.
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    as_if_the_cpu_multiplied_fp8(monkeypatch)
    return request.param


def drawn(pipe, name="sd15", seed=0, **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": 3, **options})


def standing(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, EightBitLayer)}


def optimised(folder, to, name="sd15", skipping=None):
    pipe = CASES[name].build(folder)
    return rocm_sd.optimize(pipe, quality=Approximation(skipping or Skipping(), eight_bits=to))


def denoiser(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer


def define(model, layers):
    """Layers of a stock model as `layers` compute, in its own dtype, by the definition of each part."""
    for name, ours in layers.items():
        layer = model.get_submodule(name)
        rows = (-1, *[1] * (ours.weight.dim() - 1))
        scales = ours.weight_scale.double()
        weight = ours.weight.double() * (scales.view(rows) if scales.dim() else scales)

        def forward(x, layer=layer, ours=ours, weight=weight):
            x = x if ours.smoothing is None else x * ours.smoothing.to(x.dtype)
            given = None if ours.x_scale is None else ours.x_scale.view(1)
            q, scales = quantize_rows(x, str(ours.weight.dtype).removeprefix("torch."), given)
            scale = scales.unsqueeze(-1) if given is None else given
            rounded = (q.to(torch.float32).double() * scale.double()).to(x.dtype)
            if isinstance(layer, nn.Conv2d):
                return nn.functional.conv2d(rounded, weight.to(x.dtype), layer.bias, layer.stride, layer.padding)
            return nn.functional.linear(rounded, weight.to(x.dtype), layer.bias)

        layer.forward = forward


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux-dev"])
def test_a_picture_is_what_it_is_defined_to_be(tmp_path, name, to):
    ours = optimised(tmp_path, to, name)
    layers = standing(denoiser(ours))
    assert layers
    assert any(f"{len(layers)} layers multiply in" in note for note in rocm_sd.report(ours).approximations)
    stock, exact = (CASES[name].build(tmp_path).to(dtype) for dtype in (torch.float32, torch.float64))
    for pipe in (stock, exact):
        define(denoiser(pipe), layers)
    seeds = range(6)
    mine, theirs = ([drawn(pipe, name, seed) for seed in seeds] for pipe in (ours, stock))
    with exactly(torch.float32):
        right = [drawn(exact, name, seed) for seed in seeds]
    require_as_exact_as_stock(mine, right, theirs, times=2)
    assert torch.equal(drawn(ours, name, 1), mine[1]), "the same input gives the same bits"


@pytest.fixture
def linears_alone(monkeypatch):
    """Convolutions of a model this small add more error than what is looked for."""
    monkeypatch.setattr(eight_bits, "_convolutions", lambda _name, _block: ())


@pytest.mark.parametrize("to", FORMATS)
def test_it_is_near_the_exact_one(tmp_path, to, linears_alone):
    stock = CASES["sd15"].build(tmp_path)
    exact = [drawn(stock, seed=seed) for seed in range(3)]
    rocm_sd.optimize(stock, quality=Approximation(eight_bits=to))
    for seed, right in enumerate(exact):
        error = (drawn(stock, seed=seed) - right).square().mean().sqrt() / right.std()
        assert 0 < error < 0.1


@pytest.mark.parametrize("to", FORMATS)
def test_it_is_restored_to_its_bits(tmp_path, to):
    stock = CASES["sd15"].build(tmp_path)
    exact = [drawn(stock, seed=seed) for seed in range(3)]
    before = dict(stock.unet.named_modules())
    weights = {name: value.clone() for name, value in stock.unet.state_dict().items()}
    rocm_sd.optimize(stock, quality=Approximation(eight_bits=to))
    kinds = {type(layer).__name__ for layer in standing(stock.unet).values()}
    assert kinds == {"EightBitLinear", "EightBitConv2d"}
    assert not torch.equal(drawn(stock), exact[0])
    rocm_sd.restore(stock)
    assert dict(stock.unet.named_modules()) == before
    assert all(torch.equal(value, weights[name]) for name, value in stock.unet.state_dict().items())
    assert all(torch.equal(drawn(stock, seed=seed), right) for seed, right in enumerate(exact))


@pytest.mark.parametrize("to", FORMATS)
def test_a_layer_that_was_made_delicate_keeps_its_dtype_and_the_picture_its_quality(
    tmp_path, to, monkeypatch, linears_alone
):
    """One column of what comes into a feed-forward is so many times the others, and its weights are as much less: more
    than smoothing evens out.
    """
    times = 1e12
    pipe = CASES["sd15"].build(tmp_path)

    def error():
        """Of the pipeline as it is, against its exact pictures."""
        rocm_sd.restore(pipe)
        exact = torch.stack([drawn(pipe, seed=seed) for seed in range(3)])
        rocm_sd.optimize(pipe, quality=Approximation(eight_bits=to))
        ours = torch.stack([drawn(pipe, seed=seed) for seed in range(3)])
        return float((ours - exact).square().mean().sqrt() / exact.std())

    usual = error()
    rocm_sd.restore(pipe)
    name = next(n for n, _ in pipe.unet.named_modules() if n.endswith("transformer_blocks.0"))
    block = pipe.unet.get_submodule(name)
    with torch.no_grad():
        for part in (block.norm3.weight, block.norm3.bias):
            part[3] *= times
        block.ff.net[0].proj.weight[:, 3] /= times
    assert error() < 1.5 * usual
    assert type(block.ff.net[0].proj) is nn.Linear
    assert any(
        f"too delicate for {to}" in note and f"{name}.ff" in note for note in rocm_sd.report(pipe).approximations
    )
    monkeypatch.setattr(eight_bits, "too_far", lambda _errors: frozenset())
    assert error() > 1.5 * usual, "it would have been as bad as that"
    assert type(block.ff.net[0].proj) is EightBitLinear


@pytest.mark.parametrize("to", FORMATS)
def test_a_convolution_that_was_made_delicate_keeps_its_dtype(tmp_path, to, monkeypatch):
    """One channel of what comes into it is so many times the others, and its weights are as much less."""
    times, errors, own = 1e6, {}, eight_bits.too_far
    pipe = CASES["sd15"].build(tmp_path)
    block = pipe.unet.mid_block.resnets[0]
    with torch.no_grad():
        for part in (block.norm2.weight, block.norm2.bias):
            part[3] *= times
        block.conv2.weight[:, 3] /= times
    before = block.conv2

    def noted(found):
        errors.update(found)
        return own(found)

    monkeypatch.setattr(eight_bits, "too_far", noted)
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits=to))
    name = "mid_block.resnets.0.conv2"
    assert block.conv2 is before
    assert name not in standing(pipe.unet)
    assert "mid_block.resnets.0.conv1" in standing(pipe.unet)
    others = sorted(error for other, error in errors.items() if other != name)
    assert errors[name] > 3 * others[-1]
    assert any(f"too delicate for {to}" in note and name in note for note in rocm_sd.report(pipe).approximations)


def test_rows_of_a_weight_get_scales_where_one_for_all_would_be_too_coarse(tmp_path, linears_alone):
    """A value that takes the digits of all others and is multiplied with nothing."""
    pipe = CASES["sd15"].build(tmp_path)
    name = next(n for n, _ in pipe.unet.named_modules() if n.endswith("transformer_blocks.0"))
    block = pipe.unet.get_submodule(name)
    with torch.no_grad():
        block.norm3.weight[3] = block.norm3.bias[3] = 0
        block.ff.net[0].proj.weight[5, 3] = 3e6
    exact = torch.stack([drawn(pipe, seed=seed) for seed in range(3)])
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits="fp8"))
    by_row = {other for other, layer in standing(pipe.unet).items() if layer.weight_scale.dim()}
    assert by_row == {f"{name}.ff.net.0.proj"}
    ours = torch.stack([drawn(pipe, seed=seed) for seed in range(3)])
    assert 0 < (ours - exact).square().mean().sqrt() / exact.std() < 0.1
    file = rocm_sd.save_eight_bits(pipe, tmp_path / "rows.safetensors")
    rocm_sd.restore(pipe)
    rocm_sd.load_eight_bits(pipe, file)
    rocm_sd.optimize(pipe)
    # Pictures in the same order: where the first is captured, its last digits may round to another fp8.
    assert torch.equal([drawn(pipe, seed=seed) for seed in range(3)][1], ours[1])


def test_layers_stand_out_by_their_errors():
    usual = {str(n): 0.01 + n / 1000 for n in range(9)}
    assert observing.too_far(usual) == frozenset()
    assert observing.too_far(usual | {"far": 0.2, "none": float("nan")}) == {"far", "none"}
    assert observing.too_far({"near": 0.05}) == frozenset()
    assert observing.too_far({}) == frozenset()


def test_what_cannot_be_tried_on_a_picture_is_exact_and_says_why(tmp_path, monkeypatch):
    pipe = CASES["sd15"].build(tmp_path)
    right = drawn(pipe)

    def fails(*_given):
        raise RuntimeError("no prompt")

    monkeypatch.setattr(observing, "_draw", fails)
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits="int8"))
    assert not standing(pipe.unet)
    assert any("could not be tried on a picture (no prompt)" in note for note in rocm_sd.report(pipe).approximations)
    rocm_sd.restore(pipe)
    assert torch.equal(drawn(pipe), right)


def test_a_pipeline_that_is_given_embeddings_is_tried_on_noise(tmp_path):
    pipe = CASES["sdxl"].build(tmp_path)
    for part in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"):
        setattr(pipe, part, None)
        pipe.register_modules(**{part: None})
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits="fp8"))
    assert standing(pipe.unet)


@pytest.mark.parametrize("to", FORMATS)
def test_another_dtype_is_for_the_rest_of_the_model(tmp_path, to):
    pipe = optimised(tmp_path, to)
    layer = next(iter(standing(pipe.unet).values()))
    weight, scale = layer.weight.clone(), layer.weight_scale.clone()
    pipe.unet.to(torch.bfloat16)
    assert pipe.unet.dtype is torch.bfloat16
    assert layer.weight.dtype == weight.dtype
    assert torch.equal(layer.weight_scale, scale)
    moved = copy.deepcopy(layer)
    x = torch.randn(5, layer.in_features, dtype=torch.bfloat16)
    assert torch.equal(moved(x), layer(x))
    assert layer(x).dtype is torch.bfloat16


@pytest.mark.parametrize("to", FORMATS)
def test_a_gradient_is_that_of_the_rounded_weights(tmp_path, to):
    pipe = optimised(tmp_path, to)
    layer = next(iter(standing(pipe.unet).values()))
    x = torch.randn(5, layer.in_features, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized(torch.float32).sum(0).expand(5, -1))


def test_a_lora_works_on_top(tmp_path):
    pipe = optimised(tmp_path, "int8")
    before = drawn(pipe)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipe.unet.add_adapter(config)
    with_lora = drawn(pipe)
    assert not torch.equal(with_lora, before)
    pipe.unet.disable_adapters()
    torch.testing.assert_close(drawn(pipe), before, rtol=0.02, atol=0.02)


def test_with_steps_left_out(tmp_path):
    pipe = optimised(tmp_path, "int8", skipping=Skipping(depth=1, every=2))
    drawn(pipe, num_inference_steps=5)
    notes = " ".join(rocm_sd.report(pipe).approximations)
    assert "2 shallow" in notes
    assert "products in int8" in notes


def decoded(pipe, name="sd15", seed=0):
    return drawn(pipe, name, seed, output_type="pt")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3"])
def test_a_decoder_is_what_it_is_defined_to_be_and_is_restored_to_its_bits(tmp_path, name, to):
    """In float64: of so few pixels one that is rounded the other way would be more than all of the rest."""
    ours, exact = (CASES[name].build(tmp_path).to(torch.float64) for _ in range(2))
    before = decoded(ours, name)
    rocm_sd.optimize(ours, quality=Approximation(eight_bit_decoder=to))
    layers = standing(ours.vae)
    assert {type(layer).__name__ for layer in layers.values()} >= {"EightBitConv2d"}
    assert all(each.startswith("decoder.") for each in layers)
    assert not standing(denoiser(ours))
    assert any(f"{len(layers)} layers multiply in" in note for note in rocm_sd.report(ours).approximations)
    define(exact.vae, layers)
    for seed in range(2):
        # Scales are float32, and a sum of products is scaled by them before or after.
        assert torch.allclose(decoded(ours, name, seed), decoded(exact, name, seed), rtol=0, atol=1e-6)
    assert (decoded(ours, name) - before).abs().max() > 1e-3
    assert torch.equal(decoded(rocm_sd.restore(ours), name), before)


@pytest.mark.parametrize("to", FORMATS)
def test_an_encoder_is_what_it_is_defined_to_be_and_is_restored_to_its_bits(tmp_path, to):
    """By the latents of a picture that the pipeline is given, before they are denoised."""

    @torch.no_grad()
    def latents(pipe):
        return pipe.vae.encode(picture_of(3).to(torch.float64) * 2 - 1).latent_dist.mean

    ours, exact = (CASES["sd15-img2img"].build(tmp_path).to(torch.float64) for _ in range(2))
    before, picture = latents(ours), drawn(ours, "sd15-img2img")
    rocm_sd.optimize(ours, quality=Approximation(eight_bit_encoder=to))
    layers = standing(ours.vae)
    assert layers
    assert all(name.startswith("encoder.") for name in layers)
    define(exact.vae, layers)
    assert torch.allclose(latents(ours), latents(exact), rtol=0, atol=1e-6)
    assert (latents(ours) - before).abs().max() > 1e-4
    assert drawn(ours, "sd15-img2img").isfinite().all()
    rocm_sd.restore(ours)
    assert torch.equal(latents(ours), before)
    assert torch.equal(drawn(ours, "sd15-img2img"), picture)


def test_both_halves_of_a_vae_are_in_one_format(tmp_path):
    with pytest.raises(InvalidOption, match="eight_bit_encoder"):
        Approximation(eight_bit_decoder="int8", eight_bit_encoder="fp8")
    both = Approximation(eight_bit_decoder="int8", eight_bit_encoder="int8")
    assert Approximation.from_dict(both.to_dict()) == both
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=both)
    assert {name.partition(".")[0] for name in standing(pipe.vae)} == {"decoder", "encoder"}


@pytest.mark.parametrize("to", FORMATS)
def test_a_decoder_and_a_denoiser_in_files_of_their_own(tmp_path, to):
    ours = CASES["sd15"].build(tmp_path)
    rocm_sd.optimize(ours, quality=Approximation(eight_bits=to, eight_bit_decoder=to))
    with pytest.raises(Unsupported, match="2 models in 8 bits"):
        rocm_sd.save_eight_bits(ours, tmp_path / "both.safetensors")
    files = {part: tmp_path / f"{part}.safetensors" for part in ("unet", "vae")}
    other = CASES["sd15"].build(tmp_path)
    for part, file in files.items():
        rocm_sd.save_eight_bits(getattr(ours, part), file)
        rocm_sd.load_eight_bits(other, file)
    rocm_sd.optimize(other)
    assert torch.equal(decoded(other), decoded(ours))
    assert sum("as they were loaded" in note for note in rocm_sd.report(other).notes) == 2


def test_the_small_decoder_leaves_no_other_to_be_in_eight_bits():
    with pytest.raises(InvalidOption, match="eight_bit_decoder"):
        Approximation(small_decoder=True, eight_bit_decoder="int8")
