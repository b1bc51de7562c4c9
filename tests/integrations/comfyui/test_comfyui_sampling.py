"""Sampling and decoding of a real ComfyUI with the nodes' models: the host's own features, on, off and mixed."""

# ruff: noqa: ARG002 -- the signatures are the host's
from __future__ import annotations

import gc
import logging

import comfyui_in_process
import pytest
import torch

from rocm_sd.integrations.comfyui import benchmark, host, patching
from rocm_sd.integrations.comfyui.attention import OPTION
from rocm_sd.integrations.comfyui.nodes import ROCmBenchmark, ROCmOptimizationReport, ROCmOptimizedModel
from rocm_sd.integrations.ldm import blocks
from rocm_sd.ops import OPS

NAMED = ",".join(f"{name}=torch" for name in OPS)
WEIGHT = "diffusion_model.input_blocks.1.0.in_layers.2.weight"
ATTENTION = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight"


@pytest.fixture(autouse=True)
def real_host():
    comfyui_in_process.need()
    with torch.inference_mode():
        yield
    import comfy.model_management

    comfy.model_management.unload_all_models()
    host._SAID.clear()


@pytest.fixture
def ops(monkeypatch):
    """As on a GPU: the ops do the work, and steps are captured."""
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")


def prompt(patcher, seed, **more):
    ((text, options),) = benchmark.Sampling._prompt(patcher, seed)
    return [[text[:, :7], {**options, **more}]]


def sample(patcher, steps=4, cfg=3.0, batch=1, size=(8, 8), positive=None, callback=None):
    import comfy.sample

    noise = torch.randn(batch, 4, *size, generator=torch.Generator().manual_seed(0))
    positive = prompt(patcher, 1) if positive is None else positive
    return comfy.sample.sample(
        patcher, noise, steps, cfg, "euler", "normal", positive, prompt(patcher, 2), torch.zeros_like(noise),
        callback=callback, disable_pbar=True, seed=0,
    )  # fmt: skip


def near(ours, stock, factor=64.0):
    distance = float((ours.double() - stock.double()).norm() / stock.double().norm())
    assert 0 <= distance <= factor * torch.finfo(torch.float32).eps, distance
    return distance


def notes(patcher):
    return "\n".join(patching.report_of(patcher).lines())


def replays(patcher):
    import comfy.patcher_extension

    wrappers = patcher.get_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, host.KEY)
    return wrappers[0].__self__.calls.replays


@pytest.mark.parametrize("kind", comfyui_in_process.KINDS)
def test_a_picture_is_the_same_and_steps_are_replayed(ops, kind):
    stock = comfyui_in_process.patcher(kind)
    (ours,) = ROCmOptimizedModel().optimize_model(stock)
    expected = sample(stock)
    near(sample(ours), expected)
    assert replays(ours) == 2
    near(sample(ours), expected)
    # The host has unpatched and patched it in between; the weights are where they were.
    assert replays(ours) == 6
    assert torch.equal(sample(stock), expected)
    near(sample(ours, batch=2), sample(stock, batch=2))
    near(sample(ours, cfg=1.0), sample(stock, cfg=1.0))
    near(sample(ours, size=(6, 10)), sample(stock, size=(6, 10)))


def test_without_settings_a_cpu_gives_the_hosts_own_bits():
    stock = comfyui_in_process.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    expected = sample(stock)
    assert torch.equal(sample(ours), expected)
    assert "on a CPU each call is ComfyUI's own" in notes(ours)
    assert torch.equal(sample(stock), expected)


def test_nothing_is_left_on_the_model_when_the_original_is_used(ops):
    stock = comfyui_in_process.patcher()
    before = {name: tensor.clone() for name, tensor in stock.model.state_dict().items()}
    sample(patching.optimize_model(stock, "auto", "exact"))
    sample(stock)
    for name, tensor in stock.model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.stride() == before[name].stride()
    for module in stock.model.modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.__func__ is type(module).forward
    assert OPTION not in stock.model_options["transformer_options"]
    assert not stock.object_patches
    assert not stock.injections


def test_weights_lie_as_the_host_had_them_when_a_loaded_copy_is_dropped(ops):
    stock = comfyui_in_process.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    sample(ours)
    weight = stock.model.diffusion_model.input_blocks[1][0].in_layers[2].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    del ours
    gc.collect()
    assert weight.is_contiguous()
    assert torch.equal(sample(stock), sample(comfyui_in_process.patcher()))


def test_a_node_applied_twice_is_applied_once(ops):
    stock = comfyui_in_process.patcher()
    once = patching.optimize_model(stock, "auto", "exact")
    twice = patching.optimize_model(once, "memory", "exact")
    assert once.object_patches.keys() == twice.object_patches.keys()
    assert not twice.get_all_wrappers("diffusion_model")
    near(sample(twice), sample(stock))
    assert torch.equal(sample(patching.stock_clone(twice)), sample(stock))


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_lora_works_on_either_side_of_the_node(ops, order):
    stock = comfyui_in_process.patcher()
    plain = sample(stock)

    def with_lora(patcher):
        clone = patcher.clone()
        for key in (WEIGHT, ATTENTION):
            weight = dict(stock.model.named_parameters())[key]
            change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
            assert clone.add_patches({key: ("diff", (change,))}, 1.0)
        return clone

    ours = patching.optimize_model(stock, "auto", "exact")
    if order == "after":
        near(sample(ours), plain)
        changed = with_lora(ours)
    else:
        changed = patching.optimize_model(with_lora(stock), "auto", "exact")
    expected = sample(with_lora(stock))
    assert not torch.allclose(expected, plain, rtol=1e-3)
    near(sample(changed), expected)
    near(sample(ours), plain)
    near(sample(changed), expected)
    assert torch.equal(sample(stock), plain)
    assert replays(changed) > 0


def control_of(unet):
    """A ControlNet's answer: tensors that are new in every step."""
    import comfy.controlnet

    class Control(comfy.controlnet.ControlBase):
        calls = 0

        def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
            type(self).calls += 1
            generator = torch.Generator().manual_seed(type(self).calls)
            channels = [
                module.in_channels for module in unet.modules() if type(module).__name__ == "SpatialTransformer"
            ]
            shape = (x_noisy.shape[0], channels[0], *x_noisy.shape[2:])
            return {"input": [None, torch.randn(shape, generator=generator)], "middle": [], "output": []}

        def copy(self):
            return self

        def get_models(self):
            return []

    return Control()


def test_a_controlnet_changes_every_step(ops):
    stock = comfyui_in_process.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    results = []
    for patcher in (stock, ours, ours):
        positive = prompt(stock, 1, control=control_of(stock.model.diffusion_model), control_apply_to_uncond=True)
        results.append(sample(patcher, positive=positive))
    assert not torch.allclose(results[0], sample(stock), rtol=1e-3)
    near(results[1], results[0])
    near(results[2], results[0])
    assert replays(ours) > 0


def test_patches_of_other_nodes_run_in_every_step_and_keep_it_from_being_captured(ops):
    stock = comfyui_in_process.patcher()
    calls = []

    def halved(h, skip, _options):
        calls.append(1)
        return h * 0.5, skip

    patched = stock.clone()
    patched.set_model_output_block_patch(halved)
    expected, times = sample(patched), len(calls)
    ours = patching.optimize_model(patched, "auto", "exact")
    near(sample(ours), expected)
    assert len(calls) == 2 * times
    assert replays(ours) == 0
    assert "another node patches it (output_block_patch)" in notes(ours)


def test_a_replaced_attention_of_another_node_is_called(ops):
    stock = comfyui_in_process.patcher()
    stock.set_model_attn2_replace(lambda q, _k, v, _options: q * v.mean(), "middle", 0)
    ours = patching.optimize_model(stock, "auto", "exact")
    near(sample(ours), sample(stock))
    assert replays(ours) == 0


def test_an_attention_override_of_another_node_stays(ops):
    stock = comfyui_in_process.patcher()
    calls = []

    def theirs(func, *args, **kwargs):
        calls.append(1)
        return func(*args, **kwargs) * 0.5

    stock.model_options["transformer_options"][OPTION] = theirs
    expected, times = sample(stock), len(calls)
    ours = patching.optimize_model(stock, "auto", "exact")
    near(sample(ours), expected)
    assert len(calls) == 2 * times
    assert "another node computes" in notes(ours)


@pytest.mark.parametrize("inside", [True, False])
def test_wrappers_of_other_nodes_are_called_every_time(ops, inside):
    import comfy.patcher_extension

    calls = []

    def wrapper(executor, *args, **kwargs):
        calls.append(1)
        return executor(*args, **kwargs) * 0.5

    def wrapped(patcher):
        clone = patcher.clone()
        clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "theirs", wrapper)
        return clone

    stock = comfyui_in_process.patcher()
    expected = sample(wrapped(stock))
    times = len(calls)
    # The host calls them in the order in which they were added: the first is outermost.
    optimized = patching.optimize_model(stock, "auto", "exact")
    ours = wrapped(optimized) if inside else patching.optimize_model(wrapped(stock), "auto", "exact")
    near(sample(ours), expected)
    assert len(calls) == 2 * times
    assert (replays(ours) == 0) == inside


def test_an_interrupt_in_any_step_reaches_the_host_and_leaves_it_healthy(ops):
    import comfy.model_management as management

    stock = comfyui_in_process.patcher()
    expected = sample(stock)
    ours = patching.optimize_model(stock, "auto", "exact")
    for at in range(3):

        def interrupt(step, *_pictures, at=at):
            if step == at:
                management.interrupt_current_processing()
                # What the server's progress bar does between steps.
                if at == 2:
                    management.throw_exception_if_processing_interrupted()

        def until_stopped(callback):
            sample(ours, callback=callback)
            # An older host asks between steps only, which is its server's part.
            management.throw_exception_if_processing_interrupted()

        with pytest.raises(management.InterruptProcessingException):
            until_stopped(interrupt)
    for _ in range(2):
        near(sample(ours), expected)
    assert replays(ours) > 0
    assert "a call is not captured" not in notes(ours)


def test_an_area_of_the_picture(ops):
    stock = comfyui_in_process.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    positive = [*prompt(stock, 1), *prompt(stock, 5, area=(4, 4, 2, 2), strength=0.7)]
    near(sample(ours, positive=positive), sample(stock, positive=positive))
    assert "area" not in notes(ours)
    assert replays(ours) > 0


def test_a_model_that_is_unloaded_gives_its_graphs_back(ops):
    import comfy.model_management

    stock = comfyui_in_process.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    sample(ours)
    assert "1 graph of its forward" in notes(ours)
    comfy.model_management.unload_all_models()
    assert "0 graphs of its forward" in notes(ours)
    near(sample(ours), sample(stock))


def test_weights_that_are_computed_around_each_call_are_not_captured(ops):
    stock = comfyui_in_process.patcher()
    plain = sample(stock)
    stock.add_weight_wrapper(WEIGHT, lambda weight: weight * 2)
    ours = patching.optimize_model(stock, "auto", "exact")
    expected = sample(stock)
    assert not torch.allclose(expected, plain, rtol=1e-3)
    near(sample(ours), expected)
    assert replays(ours) == 0
    assert "loaded in part" in notes(ours)


def test_a_model_that_is_loaded_in_part_runs_layer_by_layer(ops):
    import comfy.model_management

    stock = comfyui_in_process.patcher()
    expected = sample(stock)
    comfy.model_management.unload_all_models()
    ours = patching.optimize_model(stock, "auto", "exact")
    ours.partially_load(ours.load_device, extra_memory=12 * 2**20)
    casting = [module for module in ours.model.modules() if getattr(module, "comfy_cast_weights", False)]
    assert casting
    convolutions = [layer for layer in ours.model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert 0 < sum(layer in casting for layer in convolutions) < len(convolutions)
    assert all(layer.weight.is_contiguous() for layer in convolutions)
    assert "it is loaded in part" in notes(ours)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    text = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2))
    arguments = (x, torch.tensor([3.0, 500.0]), text)
    got = ours.model.diffusion_model(*arguments)
    ours.detach()
    near(got, stock.model.diffusion_model(*arguments))
    assert torch.equal(sample(stock), expected)


def test_a_block_that_fails_falls_back_to_the_host_and_is_said_once(ops, monkeypatch, caplog):
    stock = comfyui_in_process.patcher()

    def fails(*_args, **_named):
        raise ValueError("the kernel is broken")

    monkeypatch.setattr(blocks, "plain_norm_silu", fails)
    ours = patching.optimize_model(stock, "memory", "exact")
    with caplog.at_level(logging.WARNING):
        near(sample(ours), sample(stock))
    assert [message for message in caplog.messages if "the kernel is broken" in message and "resblock" in message]
    assert sum("resblock of the model" in message for message in caplog.messages) == 1
    assert "fallback to ComfyUI after an error" in notes(ours)


def test_decoding_and_encoding_are_the_same_and_the_original_vae_is_untouched(ops):
    stock = comfyui_in_process.vae()
    ours = patching.optimize_vae(stock, "auto")
    z = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    picture = torch.rand(1, 48, 64, 3, generator=torch.Generator().manual_seed(2))
    decoded, encoded = stock.decode(z), stock.encode(picture)
    near(ours.decode(z), decoded)
    near(ours.encode(picture), encoded)
    near(ours.decode_tiled(z, tile_x=4, tile_y=4, overlap=1), stock.decode_tiled(z, tile_x=4, tile_y=4, overlap=1))
    assert torch.equal(stock.decode(z), decoded)
    assert torch.equal(stock.encode(picture), encoded)
    assert ours.first_stage_model is stock.first_stage_model
    assert "vae_resblock" in notes(ours)


def test_a_vae_that_runs_out_of_memory_is_tiled_by_the_host(ops, monkeypatch):
    stock = comfyui_in_process.vae()
    ours = patching.optimize_vae(stock, "auto")
    z = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    whole = blocks.plain_convolution
    attempts = []

    def short(*args, **named):
        if not attempts:
            attempts.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return whole(*args, **named)

    monkeypatch.setattr(blocks, "plain_convolution", short)
    assert ours.decode(z).shape == (1, 48, 64, 3)
    assert attempts
    assert not patching.report_of(ours).failed


def test_the_report_and_the_benchmark_nodes_tell_what_happened(ops):
    stock = comfyui_in_process.patcher()
    (ours,) = ROCmOptimizedModel().optimize_model(stock, "performance", "high")
    sample(ours)
    answer = ROCmOptimizationReport().report(model=ours, vae=patching.optimize_vae(comfyui_in_process.vae(), "memory"))
    (text,) = answer["result"]
    assert answer["ui"]["text"] == [text]
    for words in ("8 x ResBlock: replaced by resblock", "level performance", "quality high", "VAE on cpu", "replayed"):
        assert words in text
    (measured,) = ROCmBenchmark().measure(stock, steps=2, repeats=1, width=64, height=64)["result"]
    assert "times as fast as stock" in measured
    assert "of their norm after one step" in measured


def test_a_model_of_another_kind_gets_its_attention_alone(ops):
    import comfy.model_patcher

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.diffusion_model = torch.nn.Linear(4, 4)

    cpu = torch.device("cpu")
    stock = comfy.model_patcher.ModelPatcher(Other(), load_device=cpu, offload_device=cpu)
    ours = patching.optimize_model(stock, "auto", "exact")
    assert OPTION in ours.model_options["transformer_options"]
    assert not ours.object_patches
    assert "only its attention is replaced: Linear is no UNet" in notes(ours)
