"""The stand-ins of ComfyUI's interfaces have the names and the signatures of the real ones."""

from __future__ import annotations

import importlib
import inspect

import comfyui_in_process
import fake_comfyui


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_stand_ins_have_the_real_hosts_names_and_signatures():
    comfyui_in_process.need()
    extension = importlib.import_module("comfy.patcher_extension")
    patcher = importlib.import_module("comfy.model_patcher").ModelPatcher
    for name in ("WrappersMP", "CallbacksMP", "PatcherInjection", "WrapperExecutor"):
        assert hasattr(extension, name)
    assert extension.WrappersMP.DIFFUSION_MODEL == fake_comfyui.WrappersMP.DIFFUSION_MODEL
    assert extension.WrappersMP.SAMPLER_SAMPLE == fake_comfyui.WrappersMP.SAMPLER_SAMPLE
    assert extension.CallbacksMP.ON_DETACH == fake_comfyui.CallbacksMP.ON_DETACH
    assert parameters(extension.PatcherInjection) == parameters(fake_comfyui.PatcherInjection)
    assert parameters(extension.WrapperExecutor) == parameters(fake_comfyui.WrapperExecutor)
    for name, method in inspect.getmembers(fake_comfyui.ModelPatcher, inspect.isfunction):
        assert parameters(getattr(patcher, name)) == parameters(method), name
    fakes, reals = fake_comfyui.patcher(), comfyui_in_process.patcher()
    assert vars(fakes).keys() <= vars(reals).keys()
    found = {type(module).__name__: module for module in reals.model.diffusion_model.modules()}
    for module in fakes.model.diffusion_model.modules():
        kind = type(module)
        if kind.__module__.startswith("comfy."):
            real = found[kind.__name__]
            assert (type(real).__module__, type(real).__qualname__) == (kind.__module__, kind.__qualname__)
            missing = [name for name in _names(module) if not hasattr(real, name) and name != "time_embed"]
            assert not missing, (kind, missing)
            if not kind.__qualname__.startswith("disable_weight_init"):
                assert parameters(type(real).forward)[: len(parameters(kind.forward))] == parameters(kind.forward)
    attention = importlib.import_module(fake_comfyui.ATTENTION)
    assert parameters(attention.attention_pytorch) == parameters(fake_comfyui.plain_attention)
    assert hasattr(attention, "wrap_attn")


def _names(module):
    own = [name for name in vars(module) if not name.startswith("_")]
    return [*own, *module._modules, *module._parameters]
