"""What this host decides about the rules of ldm: casting layers, its options, carries of a video, errors.

What holds in every host of ldm's classes is in tests/integrations/ldm.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import MethodType

import fake_comfyui
import pytest
import torch
from torch import nn

from rocm_sd.integrations.comfyui import host as host_module
from rocm_sd.integrations.comfyui.attention import OPTION, override_for
from rocm_sd.integrations.comfyui.comfyui_policy import MODEL_RULES, VAE_RULES, find, fused
from rocm_sd.integrations.ldm import blocks
from rocm_sd.ops import OPS
from rocm_sd.rewrite.forwards import is_ours

sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("ldm", "a1111")]


@pytest.fixture
def host(monkeypatch):
    from a1111_world import fresh
    from ldm_hosts import HOSTS

    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{name}=torch" for name in OPS))
    host_module._SAID.clear()
    with fresh(), torch.no_grad():
        yield HOSTS["comfyui-fake"]()


def picture(*shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def rule_of(name):
    (rule,) = [rule for rule in (*MODEL_RULES, *VAE_RULES) if rule.name == name]
    return rule


def test_what_casts_its_weights_or_has_functions_is_called_itself(host):
    x, layer, is_plain = torch.randn(1, 8), fake_comfyui.Linear(8, 8), host.policy.is_plain
    assert is_plain(layer, x)
    assert is_plain(nn.Linear(8, 8), x)
    assert not is_plain(layer, x.half())
    for name, value in (
        ("weight_function", [lambda w: w]),
        ("bias_function", [lambda b: b]),
        ("comfy_cast_weights", 1),
    ):
        setattr(layer, name, value)
        assert not is_plain(layer, x)
        delattr(layer, name)
        assert is_plain(layer, x)
    other = type("Linear", (fake_comfyui.Linear,), {})
    other.__module__, other.__qualname__ = "comfy.ops", "fp8_ops.Linear"
    assert not is_plain(other(8, 8), x)


def test_a_picture_of_odd_size_is_enlarged_by_the_host(host):
    block, x, rule = host.upsample(), picture(1, 32, 4, 4), rule_of("upsample")
    stock = block(x, output_shape=[1, 1, 7, 8])
    host.replace(block)
    for given in ({"output_shape": [1, 1, 8, 8]}, {"output_shape": None}, {}):
        assert rule.forward(host.policy, block, x, **given) is not None
    assert rule.forward(host.policy, block, x, [1, 1, 8, 8]) is not None
    assert rule.forward(host.policy, block, x, output_shape=[1, 1, 7, 8]) is None
    ours = block(x, output_shape=[1, 1, 7, 8])
    assert ours.shape[2:] == (7, 8)
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("name", ["vae_resblock", "vae_upsample", "vae_downsample"])
def test_frames_that_a_video_carries_are_the_hosts_affair(host, name):
    vae, rule = host.vae(), rule_of(name)
    block = {"vae_resblock": vae.last, "vae_upsample": vae.up, "vae_downsample": vae.down}[name]
    x, none = picture(1, 64, 4, 4), (None,) if name == "vae_resblock" else ()
    assert rule.forward(host.policy, block, x, *none, None, None) is not None
    assert rule.forward(host.policy, block, x, *none, conv_carry_in=None) is not None
    assert rule.forward(host.policy, block, x, *none, [x], None) is None
    assert rule.forward(host.policy, block, x, *none, conv_carry_in=None, conv_carry_out=[]) is None


def raising(error):
    def fail(*_arguments, **_named):
        raise error

    return fail


def test_memory_that_runs_out_reaches_the_host_and_its_slices(host, monkeypatch):
    """The host tiles and unloads by itself; its attention of a VAE goes on in slices where it was called."""
    monkeypatch.setattr(blocks, "plain_norm_silu", raising(torch.OutOfMemoryError("out of memory")))
    vae, block = host.vae(), host.resblock()
    x = picture(1, 64, 4, 4)
    stock = vae.attn(x)
    host.replace(vae)
    host.replace(block)
    assert torch.equal(vae.attn(x), stock)
    for call in (lambda: vae.last(x, None), lambda: block(x, picture(1, 16))):
        with pytest.raises(torch.OutOfMemoryError):
            call()
    assert not host.report.failed
    monkeypatch.undo()
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{name}=torch" for name in OPS))
    assert torch.allclose(vae.attn(x), stock, atol=1e-4)


def test_an_interrupt_reaches_the_host(host, monkeypatch):
    class InterruptProcessingException(Exception):
        pass

    monkeypatch.setattr(blocks, "plain_norm_silu", raising(InterruptProcessingException()))
    block = host.resblock()
    host.replace(block)
    with pytest.raises(InterruptProcessingException):
        block(picture(1, 64, 4, 4), picture(1, 16))
    assert not host.report.failed


def test_an_error_is_of_one_rule_and_of_one_model(host, monkeypatch):
    from ldm_hosts import HOSTS

    other = HOSTS["comfyui-fake"]()
    block, another, up = host.resblock(), other.resblock(), host.upsample()
    for one, module in ((host, block), (other, another), (host, up)):
        one.replace(module)
    x, emb = picture(1, 64, 4, 4), picture(1, 16)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "plain_norm_silu", raising(ValueError("the kernel is broken")))
        block(x, emb)
    assert host.report.failed == {"resblock": "ValueError: the kernel is broken"}
    assert (
        host.report.lines()[-1] == "  resblock: fallback to ComfyUI after an error (ValueError: the kernel is broken)"
    )
    assert not host.policy.allows(rule_of("resblock"), block, x)
    assert host.policy.allows(rule_of("upsample"), up, x)
    assert other.policy.allows(rule_of("resblock"), another, x)


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"patches": {"attn1_patch": [1]}},
        {"patches_replace": {"attn2": {1: 2}}},
        {OPTION: lambda func, *args, **kwargs: func(*args, **kwargs)},
    ],
    ids=["none", "empty", "patch", "replaced", "override"],
)
def test_a_transformer_that_another_node_is_in_is_the_hosts(host, options):
    (block,) = host.spatial().transformer_blocks
    x, text, rule = picture(2, 20, 32), picture(2, 7, 24), rule_of("transformer")
    ours = {OPTION: override_for(host.report)}
    with fused():
        assert rule.forward(host.policy, block, x, text, ours) is not None
        assert rule.forward(host.policy, block, x, text, transformer_options=ours, mask=None) is None
        given = options if options is None or OPTION in options else {**options, **(ours if options else {})}
        assert rule.forward(host.policy, block, x, text, given) is None


def test_what_patches_look_up_in_the_options_is_there(host):
    module, seen = host.spatial(depth=2), []
    host.replace(module)
    for block in module.transformer_blocks:

        def forward(_self, x, context=None, transformer_options=None):
            seen.append((transformer_options["activations_shape"], transformer_options["block_index"], context))
            return x

        block.forward = MethodType(forward, block)
    module(picture(2, 32, 4, 5), "text", {})
    assert seen == [([2, 32, 4, 5], 0, "text"), ([2, 32, 4, 5], 1, "text")]


def test_a_forward_of_another_node_stays(host):
    class Other(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

    model = Other(host.resblock())
    reason = "another node has replaced its forward"

    def reasons(patched, backup=()):
        found = find(model, MODEL_RULES, host.policy, patched, dict.fromkeys(backup))
        return [change.why_skipped for _, _, change in found]

    ours = MethodType(rule_of("resblock").replacement(host.policy).stand_in, model.block)
    assert is_ours(ours)
    assert not is_ours(model.block.forward)
    assert not is_ours(None)
    assert reasons({}) == reasons({"block.forward": ours}) == [None]
    assert reasons({"block.forward": model.block.forward}) == [reason]
    model.block.forward = lambda x, _emb: x
    assert reasons({}) == ["it has a hook or a forward of its own"]
    # What another node has put on a model that is loaded: the host puts the class's own back first.
    assert reasons({}, backup=["block.forward"]) == [None]


def test_padding_of_another_kind_is_skipped_with_the_reason(host):
    block = host.resblock()
    block.in_layers[2].padding_mode = "circular"
    assert host.replace(block)[0].why_skipped == "its convolution pads with circular"


def test_autocast_is_the_hosts(host, monkeypatch):
    block = host.resblock().to(torch.bfloat16)
    host.replace(block)
    x, emb = picture(1, 64, 4, 4).to(torch.bfloat16), picture(1, 16).to(torch.bfloat16)
    monkeypatch.setattr(blocks, "plain_norm_silu", raising(AssertionError("the rule did the work")))
    with torch.autocast("cpu", torch.bfloat16):
        block(x, emb)
    assert not host.report.failed


def test_a_vaes_bias_is_in_its_convolution(host, monkeypatch):
    seen = []
    whole = blocks.plain_convolution
    monkeypatch.setattr(blocks, "plain_convolution_and_add", raising(AssertionError("the norm would add it")))
    monkeypatch.setattr(blocks, "plain_convolution", lambda layer, *a, **k: seen.append(layer) or whole(layer, *a, **k))
    vae = host.vae()
    host.replace(vae)
    vae.block(picture(1, 32, 4, 4), None)
    assert not host.report.failed
    assert seen == [vae.block.conv1, vae.block.nin_shortcut, vae.block.conv2]
