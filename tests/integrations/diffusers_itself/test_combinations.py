"""Ways into Diffusers together with its features: backend, processors, LoRA, ControlNets, parts that are offloaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models import attention_dispatch

import pipelines
import rocm_sd
from pipelines import CASES, Twins, call, small_blocks_too
from rocm_sd.engine import levels
from rocm_sd.integrations import diffusers as ours
from rocm_sd.integrations.diffusers import attention_backend
from tiny_models import copied, lora_of

CPU = torch.device("cpu")
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
REGISTRY = attention_dispatch._AttentionBackendRegistry


def in_two_steps(name):
    case = CASES[name]
    return replace(case, arguments=case.arguments | {"num_inference_steps": 2})


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Also on a machine with a GPU: what is offloaded comes to where the others compute."""
    monkeypatch.setattr(pipelines, "DEVICE", CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def captured(monkeypatch):
    small_blocks_too(monkeypatch, "1")


@pytest.fixture
def backend():
    """Diffusers makes a model's backend the default of all others, too."""
    before = REGISTRY._active_backend
    ours.register()
    yield
    REGISTRY.set_active_backend(before)


@pytest.mark.usefixtures("captured", "backend")
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_backend_and_optimize(tmp_path, monkeypatch, when):
    """Flux goes through the dispatcher, whichever of the two comes first."""
    twins = Twins(in_two_steps("flux-dev"), tmp_path)
    twins.check()
    if when == "before":
        rocm_sd.restore(twins.ours)
    twins.ours.transformer.set_attention_backend("rocm_sd")
    # As stock's pipelines have it, whose turn it is.
    monkeypatch.setattr(REGISTRY, "_active_backend", attention_dispatch.AttentionBackendName.NATIVE)
    if when == "before":
        rocm_sd.optimize(twins.ours)
    twins.check(1)
    rocm_sd.restore(twins.ours)
    assert twins.are_equal(2)
    # Asked for by its name alone, everywhere.
    REGISTRY.set_active_backend(attention_dispatch.AttentionBackendName(attention_backend.BACKEND))
    rocm_sd.optimize(twins.ours)
    twins.check(3)


@pytest.mark.parametrize(("name", "step_graph"), [("sd15", "1"), ("sd3", "0")])
def test_lora_with_our_processors(tmp_path, monkeypatch, name, step_graph):
    small_blocks_too(monkeypatch, step_graph)
    twins = Twins(in_two_steps(name), tmp_path)
    part = "unet" if name == "sd15" else "transformer"
    assert ours.set_rocm_processors(getattr(twins.ours, part))
    plain = twins.check()
    first, second = (lora_of(getattr(twins.stock, part), part, TARGETS, seed) for seed in (1, 2))
    twins.each(lambda pipe: pipe.load_lora_weights(copied(first), adapter_name="first"))
    twins.each(lambda pipe: pipe.load_lora_weights(copied(second), adapter_name="second"))
    twins.each(lambda pipe: pipe.set_adapters(["first", "second"], [0.7, 0.4]))
    both = twins.check()
    assert not torch.allclose(both, plain, atol=1e-3)
    twins.each(lambda pipe: pipe.set_adapters("second"))
    assert not torch.allclose(twins.check(), both, atol=1e-4)
    twins.each(lambda pipe: pipe.fuse_lora())
    twins.check()
    twins.each(lambda pipe: pipe.unfuse_lora())
    twins.check()
    twins.each(lambda pipe: pipe.unload_lora_weights())
    torch.testing.assert_close(twins.check(), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("captured")
def test_fused_projections_come_and_go(tmp_path):
    twins = Twins(in_two_steps("sd15"), tmp_path)
    plain = twins.check()
    twins.each(lambda pipe: pipe.unet.fuse_qkv_projections())
    twins.check()
    assert ours.set_rocm_processors(twins.ours.unet)
    twins.check()
    twins.each(lambda pipe: pipe.unet.unfuse_qkv_projections())
    torch.testing.assert_close(twins.check(), plain, rtol=1e-3, atol=1e-3)


def offload_models(pipe):
    pipe.enable_model_cpu_offload(device="cpu")


def offload_layers(pipe):
    """What `enable_sequential_cpu_offload` does; that one says cpu:0, which accelerate takes for another device."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            cpu_offload(part, CPU, offload_buffers=True)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("offload", "step_graph"), [(offload_models, "1"), (offload_layers, "0"), (offload_layers, "1")]
)
@pytest.mark.parametrize("name", ["sd15-two-controlnets", "flux-dev"])
def test_offloaded_and_then_optimized(tmp_path, monkeypatch, name, offload, step_graph):
    small_blocks_too(monkeypatch, step_graph)
    twins = Twins(in_two_steps(name), tmp_path)
    rocm_sd.restore(twins.ours)
    offload(twins.ours)
    rocm_sd.optimize(twins.ours)
    twins.check()
    rocm_sd.restore(twins.ours)
    assert twins.are_equal(1)
    assert levels.placement(twins.ours).by is not None


@pytest.mark.usefixtures("on_the_cpu", "captured")
@pytest.mark.parametrize("offload", [offload_models, offload_layers])
@pytest.mark.parametrize("name", ["sd15-two-controlnets", "sd3"])
def test_optimized_and_then_offloaded(tmp_path, name, offload):
    twins = Twins(in_two_steps(name), tmp_path)
    twins.check()
    offload(twins.ours)
    twins.check(1)
    rocm_sd.restore(twins.ours)
    assert twins.are_equal(2)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", ["sd15-two-controlnets", "sdxl-inpaint4", "sd3", "flux-dev"])
def test_a_pipeline_of_ours_sees_an_offload(tmp_path, name):
    case = CASES[name]
    stock = case.build(tmp_path)
    wanted = call(stock, case)
    pipe = getattr(ours, f"ROCm{case.kind}").from_pipe(stock)
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_model_cpu_offload(device="cpu")
    torch.testing.assert_close(call(pipe, case), wanted, rtol=1e-3, atol=1e-3)
    assert any("model offload that was found is kept" in note for note in pipe.report().notes)
