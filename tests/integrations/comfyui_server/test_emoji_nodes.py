"""emoji-sd's nodes against small fakes of the host; the fakes against a real host where there is one."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from pathlib import Path

import fake_comfy
import pytest
import real_comfyui
import torch

from rocm_sd.integrations.comfyui import emoji
from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.models.single_file import checkpoint_weights, read_part


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Classes are made from the host's once: each test has a host of its own."""

    def forget():
        emoji._configuration.cache_clear()
        emoji._text_classes.cache_clear()

    forget()
    yield
    forget()


def weights():
    return checkpoint_weights(*(read_part(MODEL_FOLDER, part) for part in ("unet", "vae", "text_encoder")))


def test_registered_once_and_last(monkeypatch):
    host = fake_comfy.put(monkeypatch)
    known = host["comfy.supported_models"].models
    assert emoji.register()
    assert emoji.register()
    assert [kind.__name__ for kind in known] == ["SD15", "EmojiSD"]  # the host's own come first
    assert not known[1].matches({"model_channels": 320, "context_dim": 768})


@pytest.mark.parametrize("missing", ["comfy.supported_models", "comfy.latent_formats"])
def test_another_host_is_warned_once_and_nothing_is_raised(monkeypatch, caplog, missing):
    host = fake_comfy.put(monkeypatch)
    for name in list(vars(host[missing])):
        if not name.startswith("__"):
            delattr(host[missing], name)
    with caplog.at_level(logging.WARNING):
        assert not emoji.register()
    assert len(caplog.records) == 1
    assert "cannot be taught emoji-sd" in caplog.text
    with pytest.raises(RuntimeError, match="too old or too new"):
        emoji.ROCmEmojiCheckpointLoader().load_checkpoint(emoji.BUILT_IN)


def test_without_any_host_nothing_is_raised(monkeypatch, caplog):
    # Tests with a real host may have loaded one in this process.
    monkeypatch.setitem(sys.modules, "comfy.supported_models", None)
    assert not emoji.register()
    assert "ModuleNotFoundError" in caplog.text


def test_what_the_host_gets(monkeypatch):
    fake_comfy.put(monkeypatch)
    kind = emoji._configuration()
    described = kind(fake_comfy.detect_unet_config(weights(), "model.diffusion_model."))
    assert described.model_type({}).name == "V_PREDICTION"
    assert kind.sampling_settings == {"beta_schedule": "linear", "linear_start": 0.00085, "linear_end": 0.027}
    assert kind.unet_extra_config == {"num_heads": 4, "num_head_channels": -1}
    assert kind.latent_format.scale_factor == pytest.approx(0.7783, abs=1e-4)
    assert torch.tensor(kind.latent_format.latent_rgb_factors).shape == (4, 3)
    target = described.clip_target()
    text = target.clip().clip_l
    assert text.special_tokens == {"start": 3070, "end": 3071, "pad": 3071}
    assert (text.config["hidden_size"], text.config["num_hidden_layers"]) == (192, 4)
    operations = type("Operations", (), {"Embedding": staticmethod(lambda words, width, **_: (words, width))})
    assert text.model_class(text.config, None, None, operations).embeddings == (3072, 192)
    words = target.tokenizer().clip_l
    assert (Path(words.path), words.size) == (MODEL_FOLDER / "tokenizer", 192)


def test_the_hosts_own_loader_gets_no_vae_and_is_reported_why(monkeypatch, caplog):
    fake_comfy.put(monkeypatch)
    assert emoji._configuration()({}).process_vae_state_dict({"decoder.conv_in.weight": 1}) == {}
    assert "emoji-sd Loader (ROCm)" in caplog.text


def test_the_loader_gives_model_clip_and_a_vae_of_sixteen_groups(monkeypatch):
    fake_comfy.put(monkeypatch, {"emoji.safetensors": weights(), "sd15.safetensors": {}})
    node = emoji.ROCmEmojiCheckpointLoader
    assert node.INPUT_TYPES()["required"]["ckpt_name"][0] == [emoji.BUILT_IN, "emoji.safetensors", "sd15.safetensors"]
    for name in (emoji.BUILT_IN, "emoji.safetensors"):
        model, clip, vae = node().load_checkpoint(name)
        assert type(model).__name__ == "EmojiSD"
        assert clip == "clip"
        norms = [layer for layer in vae.first_stage_model if isinstance(layer, torch.nn.GroupNorm)]
        assert [norm.num_groups for norm in norms] == [16, 16]
        assert (vae.downscale_ratio, vae.upscale_ratio) == (4, 4)
        assert vae.layout["ddconfig"]["ch_mult"] == [1, 2, 3]
        assert "decoder.conv_in.weight" in vae.weights


def test_another_checkpoint_is_refused_by_name(monkeypatch):
    other = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(320, 4, 3, 3)}
    fake_comfy.put(monkeypatch, {"sd15.safetensors": other})
    with pytest.raises(ValueError, match=r"sd15\.safetensors is not emoji-sd\. Load it with the node Load Checkpoint"):
        emoji.ROCmEmojiCheckpointLoader().load_checkpoint("sd15.safetensors")


def test_the_latent_has_the_size_that_comes_out():
    (latent,) = emoji.ROCmEmojiEmptyLatent().generate(128, 96, 2)
    assert latent["samples"].shape == (2, 4, 24, 32)
    assert not latent["samples"].any()


def parameters_in(file, name):
    """The parameters of a function or a method in a source file, without running it."""
    scope = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        node = next((node for node in scope if getattr(node, "name", None) == part), None)
        assert node is not None, f"{file.name} has no {name}"
        scope = node.body
    return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]


@pytest.mark.parametrize("file", fake_comfy.USED)
def test_the_fakes_and_a_real_host_take_what_is_given(file, monkeypatch):
    host = fake_comfy.modules()
    for name, used in fake_comfy.USED[file].items():
        thing = host[file.removesuffix(".py").replace("/", ".")]
        for part in name.split("."):
            thing = getattr(thing, part)
        assert set(used) <= set(inspect.signature(thing).parameters), name
        if real_comfyui.HOST:
            assert set(used) <= set(parameters_in(Path(real_comfyui.HOST) / file, name)), name


def test_a_real_host_has_what_else_is_touched():
    if not real_comfyui.HOST:
        pytest.skip("ROCM_SD_COMFYUI names no folder")
    root = Path(real_comfyui.HOST) / "comfy"
    assert "\nmodels = [" in (root / "supported_models.py").read_text()
    assert "V_PREDICTION = " in (root / "model_base.py").read_text()
    formats = (root / "latent_formats.py").read_text()
    for name in ("scale_factor", "latent_rgb_factors", "latent_rgb_factors_bias"):
        assert f"    {name} = " in formats
    vae = (root / "sd.py").read_text()
    for name in ("downscale_ratio", "upscale_ratio", "first_stage_model"):
        assert f"self.{name} = " in vae
