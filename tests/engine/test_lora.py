"""LoRA after `optimize`: each operation gives the picture that it gives in a stock pipeline of the same weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
from safetensors.torch import save_file

import rocm_sd
from pipelines import CASES, Twins, small_blocks_too
from tiny_models import copied, lora_of

# Layers that the rules replace, and layers that they do not.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
EVERYWHERE = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "conv1", "conv_shortcut", "time_emb_proj")
JOINT = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "norm1.linear", "ff.net.0.proj")
WORDS = ("q_proj", "v_proj", "fc1")


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


@pytest.fixture
def twins(tmp_path):
    return Twins(CASES["sd15"], tmp_path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """State dicts by name, made from a pipeline without adapters: with one, the layers have other names."""
    pipe = CASES["sd15"].build(tmp_path_factory.mktemp("files"))
    return {
        "one": lora_of(pipe.unet, "unet", EVERYWHERE, seed=1),
        "other": lora_of(pipe.unet, "unet", EVERYWHERE, seed=2),
        "small": lora_of(pipe.unet, "unet", ("attn2.to_k", "attn2.to_v"), seed=3, rank=1),
        "words": lora_of(pipe.text_encoder, "text_encoder", WORDS, seed=4),
    }


def load(twins, files, name, **options):
    twins.each(lambda pipe: pipe.load_lora_weights(copied(files[name]), **{"adapter_name": name} | options))


def differ(one, other):
    """By far more than rounding."""
    return float((one - other).norm() / other.norm()) > 1e-3


def test_load_and_unload(twins, files):
    without = twins.check()
    load(twins, files, "one")
    assert differ(twins.check(), without)
    twins.each(lambda pipe: pipe.unload_lora_weights())
    assert not differ(twins.check(), without)


def test_load_before_optimize_and_unload_after(twins, files):
    without = twins.check()
    rocm_sd.restore(twins.ours)
    load(twins, files, "one")
    rocm_sd.optimize(twins.ours)
    assert differ(twins.check(), without)
    twins.each(lambda pipe: pipe.unload_lora_weights())
    assert not differ(twins.check(), without)


def test_load_from_a_file(twins, files, tmp_path):
    without = twins.check()
    save_file(files["one"], tmp_path / "lora.safetensors")
    twins.each(lambda pipe: pipe.load_lora_weights(str(tmp_path), weight_name="lora.safetensors"))
    assert differ(twins.check(), without)


def test_scale_by_weights_of_adapters(twins, files):
    load(twins, files, "one")
    pictures = []
    for weight in (1.0, 0.4, 0.0, -0.5):
        twins.each(lambda pipe, weight=weight: pipe.set_adapters(["one"], [weight]))
        pictures.append(twins.check())
    assert all(differ(*pair) for pair in pairwise(pictures))


def test_scale_by_block(twins, files):
    load(twins, files, "one")
    whole = twins.check()
    blocks = {"unet": {"down": 0.2, "mid": 1.0, "up": 0.7}}
    twins.each(lambda pipe: pipe.set_adapters(["one"], [blocks]))
    assert differ(twins.check(), whole)


def test_scale_by_arguments_of_a_call(twins, files):
    load(twins, files, "one")
    pictures = [twins.check(cross_attention_kwargs={"scale": scale}) for scale in (1.0, 0.3)]
    assert differ(*pictures)
    # The scale of a call holds for that call.
    assert not differ(twins.check(), pictures[0])


def test_two_adapters(twins, files):
    load(twins, files, "one")
    alone = twins.check()
    load(twins, files, "small")
    for weights in ([1.0, 1.0], [0.3, 1.5]):
        twins.each(lambda pipe, weights=weights: pipe.set_adapters(["one", "small"], weights))
        assert differ(twins.check(), alone)
    twins.each(lambda pipe: pipe.set_adapters("small"))
    assert differ(twins.check(), alone)
    twins.each(lambda pipe: pipe.delete_adapters("small"))
    twins.each(lambda pipe: pipe.set_adapters("one"))
    assert not differ(twins.check(), alone)


def test_disable_and_enable(twins, files):
    without = twins.check()
    load(twins, files, "one")
    loaded = twins.check()
    twins.each(lambda pipe: pipe.disable_lora())
    assert not differ(twins.check(), without)
    twins.each(lambda pipe: pipe.enable_lora())
    assert not differ(twins.check(), loaded)


def test_fuse_and_unfuse(twins, files):
    without = twins.check()
    load(twins, files, "one")
    loaded = twins.check()
    twins.each(lambda pipe: pipe.fuse_lora())
    assert not differ(twins.check(), loaded)
    twins.each(lambda pipe: pipe.unfuse_lora())
    assert not differ(twins.check(), loaded)
    twins.each(lambda pipe: pipe.unload_lora_weights())
    assert not differ(twins.check(), without)


def test_fuse_then_unload_keeps_the_fused_weights(twins, files):
    """Fusing changes weights in place, and nothing tells of it: what was computed from the old ones must be gone."""
    without = twins.check()
    load(twins, files, "one")
    twins.each(lambda pipe: pipe.fuse_lora(lora_scale=0.6))
    twins.each(lambda pipe: pipe.unload_lora_weights())
    fused = twins.check()
    assert differ(fused, without)
    load(twins, files, "other")
    assert differ(twins.check(), fused)
    rocm_sd.restore(twins.ours)
    assert twins.are_equal()


def test_fuse_between_two_pictures_of_an_adapter_never_run(twins, files):
    """The layers are those that the last picture was made with; only the values of their weights are others."""
    without = twins.check()
    load(twins, files, "one")
    twins.each(lambda pipe: pipe.fuse_lora())
    twins.each(lambda pipe: pipe.unload_lora_weights())
    assert differ(twins.check(), without)


@pytest.mark.parametrize("way", ["in place", "elsewhere", "by name"])
def test_weights_changed_with_no_word_to_anyone_are_seen(twins, way):
    """As trainers and merging tools do it."""
    without = twins.check()
    endings = ("to_k.weight", "linear_1.weight", "time_emb_proj.weight", "conv1.weight", "norm1.weight")

    def change(pipe):
        changed = {}
        for name, weight in pipe.unet.named_parameters():
            if name.endswith(endings):
                changed[name] = weight.detach() * 1.5
                if way == "in place":
                    weight.data *= 1.5
                elif way == "elsewhere":
                    weight.data = weight.data * 1.5
        if way == "by name":
            pipe.unet.load_state_dict(changed, strict=False, assign=True)

    for _ in range(2):
        twins.each(change)
        with_changes = twins.check()
        assert differ(with_changes, without)
        without = with_changes


def test_hot_swap(twins, files):
    load(twins, files, "one")
    first = twins.check()
    load(twins, files, "other", adapter_name="one", hotswap=True)
    second = twins.check()
    assert differ(second, first)
    load(twins, files, "one", hotswap=True)
    assert not differ(twins.check(), first)


def test_hot_swap_of_another_rank(twins, files):
    twins.each(lambda pipe: pipe.enable_lora_hotswap(target_rank=4))
    load(twins, files, "one")
    first = twins.check()
    load(twins, files, "small", adapter_name="one", hotswap=True)
    assert differ(twins.check(), first)


def test_a_lora_of_the_text_encoder(twins, files):
    without = twins.check()
    load(twins, files, "words")
    words = twins.check()
    assert differ(words, without)
    load(twins, files, "one")
    twins.each(lambda pipe: pipe.set_adapters(["words", "one"], [0.5, 0.8]))
    assert differ(twins.check(), words)
    twins.each(lambda pipe: pipe.fuse_lora(components=["unet", "text_encoder"]))
    assert differ(twins.check(), words)
    twins.each(lambda pipe: pipe.unfuse_lora(components=["unet", "text_encoder"]))
    twins.each(lambda pipe: pipe.unload_lora_weights())
    assert not differ(twins.check(), without)


@pytest.mark.parametrize("name", ["sdxl", "sd21", "sd15-controlnet", "lcm-sd15", "sd3", "flux-dev"])
def test_load_scale_fuse_and_unload_in_other_pipelines(tmp_path, name):
    twins = Twins(CASES[name], tmp_path)
    part = "unet" if hasattr(twins.stock, "unet") else "transformer"
    tensors = lora_of(getattr(twins.stock, part), part, EVERYWHERE if part == "unet" else JOINT, seed=5)
    without = twins.check()
    twins.each(lambda pipe: pipe.load_lora_weights(copied(tensors), adapter_name="one"))
    loaded = twins.check()
    assert differ(loaded, without)
    twins.each(lambda pipe: pipe.set_adapters(["one"], [0.5]))
    halved = twins.check()
    assert differ(halved, loaded)
    twins.each(lambda pipe: pipe.fuse_lora(components=[part]))
    assert not differ(twins.check(), halved)
    twins.each(lambda pipe: pipe.unfuse_lora(components=[part]))
    twins.each(lambda pipe: pipe.unload_lora_weights())
    assert not differ(twins.check(), without)


def test_names_of_weights_stay_stocks(twins, files, tmp_path):
    def names(pipe):
        return {part: list(getattr(pipe, part).state_dict()) for part in ("unet", "vae", "text_encoder")}

    plain = names(twins.stock)
    twins.check()
    assert names(twins.ours) == plain
    load(twins, files, "one")
    load(twins, files, "words")
    twins.check()
    assert names(twins.ours) == names(twins.stock) != plain
    twins.each(lambda pipe: pipe.unload_lora_weights())
    twins.check()
    assert names(twins.ours) == plain


@pytest.mark.parametrize("when", ["loaded", "unloaded", "fused"])
def test_restore_gives_stocks_bits_with_an_adapter_too(twins, files, when):
    twins.check()
    load(twins, files, "one")
    twins.check()
    if when == "fused":
        twins.each(lambda pipe: pipe.fuse_lora())
    if when == "unloaded":
        twins.each(lambda pipe: pipe.unload_lora_weights())
    twins.check()
    rocm_sd.restore(twins.ours)
    assert twins.are_equal()
