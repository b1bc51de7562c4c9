"""8-bit layers in a file: loaded they compute the same bits as saved, and whatever is wrong changes nothing."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from approximated import as_if_the_cpu_multiplied_fp8
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import rocm_sd
from pipelines import CASES, call, small_blocks_too
from rocm_sd import arch
from rocm_sd.arch import Fp8
from rocm_sd.engine.approximation import Approximation, eight_bit_files, eight_bits
from rocm_sd.engine.approximation.fp8_formats import as_other_format
from rocm_sd.errors import CorruptModel, ModelNotFound, NoDiskSpace, RocmSdError, Unsupported
from rocm_sd.rewrite.eight_bits import EightBitLayer

FORMATS = ("int8", "fp8")
KEY = "rocm_sd_eight_bits"
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    # The layers of a model this small are all below it.
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    as_if_the_cpu_multiplied_fp8(monkeypatch)
    return request.param


@pytest.fixture
def only_once(step_graph):
    """Of what no graph takes part in."""
    if step_graph == "1":
        pytest.skip("the same without graphs")


def denoiser(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer


def standing(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, EightBitLayer)}


def drawn(pipe, name="sd15", seed=0):
    return call(pipe, CASES[name], seed, num_inference_steps=3)


def saved(folder, to="int8", name="sd15", outlier=None):
    """(pipeline that was saved, file)."""
    pipe = CASES[name].build(folder)
    if outlier:
        stand_out(pipe, outlier)
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits=to))
    return pipe, rocm_sd.save_eight_bits(pipe, folder / f"{to}.safetensors")


def stand_out(pipe, times):
    """One column of what comes into a feed-forward is so many times the others, and its weights are as much less."""
    block = next(part for name, part in pipe.unet.named_modules() if name.endswith("transformer_blocks.0"))
    with torch.no_grad():
        for part in (block.norm3.weight, block.norm3.bias):
            part[3] *= times
        block.ff.net[0].proj.weight[:, 3] /= times


def header_of(file):
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()[KEY])


def rewritten(file, change):
    """With another header, and with other tensors."""
    with safe_open(file, framework="pt") as opened:
        header, tensors = json.loads(opened.metadata()[KEY]), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    text = change(header, tensors)
    save_file(tensors, file, {KEY: json.dumps(header) if text is None else text})


def refused(pipe, file, kind, match, **options):
    """It is, with what to type next, and the pipeline is as it was."""
    model = denoiser(pipe)
    before, weights = dict(model.named_modules()), {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(kind, match=match) as caught:
        rocm_sd.load_eight_bits(pipe, file, **options)
    assert caught.value.hint
    assert dict(model.named_modules()) == before
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux-dev"])
def test_pictures_of_loaded_layers_are_those_of_saved_ones(tmp_path, name, to, monkeypatch):
    ours, file = saved(tmp_path, to, name)
    right = [drawn(ours, name, seed) for seed in range(2)]
    pipe = CASES[name].build(tmp_path)
    monkeypatch.setattr(eight_bits, "observe", None)  # nothing is calibrated
    assert rocm_sd.load_eight_bits(pipe, file) is pipe
    assert standing(denoiser(pipe)).keys() == standing(denoiser(ours)).keys()
    without = drawn(pipe, name)
    assert (without - right[0]).square().mean().sqrt() < 0.1 * right[0].std()
    rocm_sd.optimize(pipe)
    assert all(torch.equal(drawn(pipe, name, seed), each) for seed, each in enumerate(right))
    notes = rocm_sd.report(pipe).approximations
    assert any(f"{len(standing(denoiser(pipe)))} layers multiply in" in note and "loaded" in note for note in notes)
    rocm_sd.restore(pipe)
    assert standing(denoiser(pipe)), "what optimize found"
    assert torch.equal(drawn(pipe, name), without)


@pytest.mark.parametrize("to", FORMATS)
def test_a_smoothed_layer_is_saved_with_its_smoothing(tmp_path, to):
    times = {"int8": 3e3, "fp8": 3e6}[to]
    pipe, file = saved(tmp_path, to, outlier=times)
    loaded = CASES["sd15"].build(tmp_path)
    stand_out(loaded, times)
    rocm_sd.load_eight_bits(loaded, file)
    mine, theirs = standing(loaded.unet), standing(pipe.unet)
    assert any(layer.smoothing is not None for layer in theirs.values())
    for name, layer in theirs.items():
        for buffer, value in layer.named_buffers():
            assert torch.equal(mine[name].get_buffer(buffer), value)
    rocm_sd.optimize(loaded)
    assert torch.equal(drawn(loaded), drawn(pipe))


def test_the_header_says_how_each_layer_is_kept(tmp_path, only_once, monkeypatch):
    usual = eight_bits.too_far
    monkeypatch.setattr(eight_bits, "too_far", lambda errors: usual(errors) | {next(iter(errors))})
    pipe, file = saved(tmp_path, "fp8")
    header, layers = header_of(file), standing(pipe.unet)
    assert (header["version"], header["model"]) == (1, "UNet2DConditionModel")
    assert header["layers"].keys() == layers.keys()
    for name, said in header["layers"].items():
        told = {key: said[key] for key in ("kind", "bits", "format", "granularity", "x_scale", "dtype")}
        assert told == {
            "kind": "conv2d" if ".conv" in name else "linear", "bits": 8,
            "format": "float8_e4m3fn", "granularity": "tensor", "x_scale": "static",
            "dtype": "float32",
        }  # fmt: skip
        assert said["shape"] == list(layers[name].weight.shape)
        assert 0 < said["error"] < 0.1
    assert header["kept"]
    assert all(each["why"] == "too delicate for fp8" and each["error"] > 0 for each in header["kept"].values())
    loaded = rocm_sd.load_eight_bits(CASES["sd15"].build(tmp_path), file)
    again = rocm_sd.save_eight_bits(loaded.unet, tmp_path / "again.safetensors")
    assert header_of(again) == header
    with safe_open(file, framework="pt") as one, safe_open(again, framework="pt") as two:
        assert all(torch.equal(one.get_tensor(key).float(), two.get_tensor(key).float()) for key in one.keys())  # noqa: SIM118


def test_a_lora_is_no_part_of_the_file_and_comes_after_it(tmp_path, only_once):
    peft = pytest.importorskip("peft")
    pipe, file = saved(tmp_path)
    pipe.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    assert header_of(rocm_sd.save_eight_bits(pipe, tmp_path / "with.safetensors")) == header_of(file)
    other = CASES["sd15"].build(tmp_path)
    other.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    refused(other, file, Unsupported, "with more to it")


def test_weights_lie_together_again_after_a_move(tmp_path, only_once):
    _, file = saved(tmp_path, "int8", "sdxl")
    pipe = rocm_sd.load_eight_bits(CASES["sdxl"].build(tmp_path), file)
    for layer in standing(pipe.unet).values():
        # As `to` of another device does.
        layer._apply(torch.clone)
    attention = next(part for name, part in pipe.unet.named_modules() if name.endswith("attn1"))
    q, k = attention.to_q.weight, attention.to_k.weight
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()
    rocm_sd.optimize(pipe)
    q, k = attention.to_q.weight, attention.to_k.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_what_is_asked_of_a_model_that_was_loaded_so_is_said(tmp_path, only_once):
    _, file = saved(tmp_path)
    pipe = rocm_sd.load_eight_bits(CASES["sd15"].build(tmp_path), file)
    before = standing(pipe.unet)
    rocm_sd.optimize(pipe, quality=Approximation(eight_bits="fp8"))
    assert standing(pipe.unet) == before
    assert any("multiply in int8, as they were loaded" in note for note in rocm_sd.report(pipe).approximations)
    refused(pipe, file, Unsupported, "in 8 bits already")


def test_another_model_is_refused(tmp_path, only_once):
    _, file = saved(tmp_path)
    pipe = CASES["sd15"].build(tmp_path)
    with torch.no_grad():
        pipe.unet.get_submodule(next(iter(header_of(file)["layers"]))).weight[0] += 0.1
    refused(pipe, file, Unsupported, "has other weights")
    refused(CASES["sd3"].build(tmp_path), file, Unsupported, "it is of a UNet2DConditionModel")
    refused(CASES["sdxl"].build(tmp_path), file, Unsupported, "not those of this|has no|has a weight of")
    pipe = CASES["sd15"].build(tmp_path)
    with torch.no_grad():
        pipe.unet.conv_in.weight += 0.1
    refused(pipe, file, Unsupported, "made from, in float32, are not those")
    with pytest.raises(Unsupported, match="takes a Diffusers pipeline"):
        rocm_sd.load_eight_bits("a model", file)


def test_a_model_without_the_layer_is_refused(tmp_path, only_once):
    _, file = saved(tmp_path)

    def change(header, _tensors):
        name, layer = next(iter(header["layers"].items()))
        header["layers"]["nowhere"] = layer | {"input": name}
        header["layers"].pop(name)

    rewritten(file, change)
    refused(CASES["sd15"].build(tmp_path), file, CorruptModel, "it has no nowhere.weight")

    def also(header, tensors):
        name = header["layers"]["nowhere"]["input"]
        tensors |= {f"nowhere.{key}": tensors[f"{name}.{key}"].clone() for key in ("weight", "weight_scale")}
        header["crc32"] |= {f"nowhere.{key}": header["crc32"][f"{name}.{key}"] for key in ("weight", "weight_scale")}

    rewritten(file, also)
    refused(CASES["sd15"].build(tmp_path), file, Unsupported, "has no nowhere")


def test_a_torn_file_is_refused(tmp_path, only_once):
    _, file = saved(tmp_path)
    pipe, whole = CASES["sd15"].build(tmp_path), file.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(pipe, file, CorruptModel, "cannot be read")
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(pipe, file, CorruptModel, "not those that were written")
    file.write_bytes(whole)
    assert standing(rocm_sd.load_eight_bits(pipe, file).unet)
    refused(CASES["sd15"].build(tmp_path), tmp_path / "none.safetensors", ModelNotFound, "There is no file")


def first_layer(header, **values):
    next(iter(header["layers"].values())).update(values)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lambda header, _: header.update(version=2), Unsupported, "version 2 of the format"),
        (lambda header, _: first_layer(header, bits=4), Unsupported, "4 bits of int8: it reads 8 bits"),
        (lambda header, _: first_layer(header, format="int6", bits=6), Unsupported, "6 bits of int6"),
        (lambda header, _: first_layer(header, granularity="group", group_size=64), Unsupported, "each group"),
        (lambda header, _: first_layer(header, kind="conv2d"), Unsupported, "a conv2d"),
        (lambda header, _: first_layer(header, shape=[1, 2]), CorruptModel, "weight is int8 of"),
        (lambda header, _: first_layer(header, smoothing=True), CorruptModel, "it has no .*smoothing"),
        (lambda header, _: first_layer(header, bits="8"), CorruptModel, "bits should be integer"),
        (lambda header, _: header.pop("layers") and None, CorruptModel, "its header has no layers"),
        (lambda _, tensors: tensors.popitem() and None, CorruptModel, "it has no "),
        (lambda _header, _tensors: "{", CorruptModel, "it is no JSON"),
        (lambda _header, _tensors: "[1]", CorruptModel, "its header should be object"),
    ],
)
def test_a_header_that_is_not_known_is_refused(tmp_path, only_once, change, kind, match):
    _, file = saved(tmp_path)
    rewritten(file, change)
    refused(CASES["sd15"].build(tmp_path), file, kind, match)


def test_layers_of_one_input_have_one(tmp_path, only_once):
    _, file = saved(tmp_path, "int8", "sdxl")

    def change(header, _tensors):
        name = next(name for name in header["layers"] if name.endswith("attn1.to_k"))
        header["layers"][name]["input"] = name

    rewritten(file, change)
    refused(CASES["sdxl"].build(tmp_path), file, Unsupported, "share one input here")


def test_a_file_of_something_else_is_refused(tmp_path, only_once):
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    refused(CASES["sd15"].build(tmp_path), tmp_path / "other.safetensors", Unsupported, "save_eight_bits did not write")


def test_nothing_in_eight_bits_is_not_saved(tmp_path, only_once):
    pipe = CASES["sd15"].build(tmp_path)
    with pytest.raises(Unsupported, match=r"no layer in 8 bits.*Approximation\(eight_bits='int8'\)"):
        rocm_sd.save_eight_bits(pipe, tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


def test_a_copy_of_a_pipeline_can_be_saved(tmp_path, only_once):
    pipe, file = saved(tmp_path)
    copied = rocm_sd.save_eight_bits(copy.deepcopy(pipe.unet), tmp_path / "copied.safetensors")
    assert header_of(copied)["layers"] == header_of(file)["layers"]


def test_what_fails_half_way_is_taken_back(tmp_path, only_once, monkeypatch):
    _, file = saved(tmp_path)
    usual, calls = eight_bit_files._made, []

    def made(*given):
        calls.append(1)
        if len(calls) == 9:
            raise RocmSdError("no memory", hint="none")
        return usual(*given)

    monkeypatch.setattr(eight_bit_files, "_made", made)
    refused(CASES["sd15"].build(tmp_path), file, RocmSdError, "no memory")


def test_several_write_and_read_it_at_once(tmp_path, only_once):
    pipe, file = saved(tmp_path)
    others = [CASES["sd15"].build(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(rocm_sd.save_eight_bits, pipe, file) for _ in range(8)]
        reading = [pool.submit(rocm_sd.load_eight_bits, other, file) for other in others]
        loaded = [each.result() for each in reading]
        assert all(each.result() == file for each in writing)
    assert all(standing(other.unet).keys() == standing(pipe.unet).keys() for other in loaded)
    assert sorted(tmp_path.glob("*int8*")) == [file]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_said(tmp_path, only_once):
    pipe, _ = saved(tmp_path)
    with pytest.raises(NoDiskSpace):
        rocm_sd.save_eight_bits(pipe, "/dev/full")


def as_if_it_multiplied(monkeypatch, fp8):
    here = replace(arch.CPU, fp8=fp8)
    monkeypatch.setattr(eight_bit_files.arch, "detect", lambda _device: here)


def test_fp8_of_one_card_is_exactly_that_of_the_other(tmp_path, only_once, monkeypatch):
    ours, file = saved(tmp_path, "fp8")
    right = drawn(rocm_sd.restore(rocm_sd.load_eight_bits(CASES["sd15"].build(tmp_path), file)))
    pipe = CASES["sd15"].build(tmp_path)
    as_if_it_multiplied(monkeypatch, Fp8.FNUZ)
    rocm_sd.load_eight_bits(pipe, file)
    for name, layer in standing(pipe.unet).items():
        assert layer.weight.dtype is FNUZ
        assert torch.equal(layer.dequantized(torch.float64), standing(ours.unet)[name].dequantized(torch.float64))
        assert layer.x_scale == 2 * standing(ours.unet)[name].x_scale
    assert torch.equal(drawn(pipe), right)
    # And back, where the largest value is among the weights and the smallest are.
    back = rocm_sd.save_eight_bits(pipe, tmp_path / "fnuz.safetensors")
    assert {layer["format"] for layer in header_of(back)["layers"].values()} == {"float8_e4m3fnuz"}
    as_if_it_multiplied(monkeypatch, Fp8.OCP)
    other = rocm_sd.load_eight_bits(CASES["sd15"].build(tmp_path), back)
    for name, layer in standing(other.unet).items():
        theirs = standing(ours.unet)[name]
        assert layer.weight.dtype is FN
        assert torch.equal(layer.dequantized(torch.float64), theirs.dequantized(torch.float64))
        assert layer.x_scale == theirs.x_scale


def test_fp8_that_the_other_card_has_not_is_refused(tmp_path, only_once, monkeypatch):
    monkeypatch.setattr(eight_bits, "format_of", lambda _to, _device: FNUZ)
    _, file = saved(tmp_path, "fp8")
    with safe_open(file, framework="pt") as opened:
        smallest = any(
            bool(((opened.get_tensor(key).float().abs() * 2**10) % 2 == 1).any())
            for key in opened.keys()  # noqa: SIM118
            if key.endswith(".weight")
        )
    assert smallest, "one of them has the largest value and the smallest"
    as_if_it_multiplied(monkeypatch, Fp8.OCP)
    refused(
        CASES["sd15"].build(tmp_path), file, Unsupported, "has values of float8_e4m3fnuz that float8_e4m3fn has not"
    )


def every(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    return values[values.float().isfinite()]


def test_every_value_of_one_format_in_the_other(only_once):
    scale = torch.tensor(0.37)
    ours = every(FN)
    other, twice = as_other_format(ours, scale)
    assert other.dtype is FNUZ
    assert torch.equal(other.float() * twice, ours.float() * scale)
    ours = every(FNUZ)
    assert as_other_format(ours, scale) is None
    largest, smallest = ours.float().abs() == 240, (ours.float() * 2**10).remainder(2) == 1
    for fitting in (ours[~largest], ours[~smallest]):
        other, others = as_other_format(fitting, scale)
        assert other.dtype is FN
        assert torch.equal(other.float() * others, fitting.float() * scale)
    for dtype in (FN, FNUZ):
        bad = torch.full((1,), float("nan")).to(dtype)
        assert as_other_format(bad, scale) is None


def test_the_weights_of_16_bits_are_let_go(tmp_path, only_once):
    _, file = saved(tmp_path)
    pipe = CASES["sd15"].build(tmp_path)
    before = sum(each.numel() for each in pipe.unet.parameters())
    names = header_of(file)["layers"]
    gone = sum(pipe.unet.get_submodule(name).weight.numel() for name in names)
    rocm_sd.load_eight_bits(pipe, file)
    assert sum(each.numel() for each in pipe.unet.parameters()) == before - gone
    assert not any(type(pipe.unet.get_submodule(name)) is nn.Linear for name in names)
