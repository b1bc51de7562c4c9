"""One small model as each host has it, called through the host's own policy."""

# ruff: noqa: ARG002 -- the signatures are the hosts'

from __future__ import annotations

import torch
from torch import nn

from integrations.comfyui.fake_comfyui import WrapperExecutor
from rocm_sd.engine import denoising
from rocm_sd.engine.parts import EVERYTHING
from rocm_sd.integrations.a1111.switch import UnetGraphs
from rocm_sd.integrations.comfyui.comfyui_policy import StepGraph


def small_model(package):
    """Of a class of its own in `package`. `watch` is called in each run of it, and not when a graph is replayed."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(4, 8, 3, padding=1)
            self.text = nn.Linear(6, 8)
            self.last = nn.Conv2d(8, 4, 3, padding=1)
            self.scale = 1.0

        @staticmethod
        def watch():
            pass

        def compute(self, x, time, text):
            type(self).watch()
            added = self.text(text).mean(1) + time.to(x.device).reshape(-1, 1) / 1000
            return self.last(torch.nn.functional.silu(self.first(x) + added[..., None, None])) * self.scale

        def forward(self, sample, timestep=None, encoder_hidden_states=None):
            return self.compute(sample, timestep, encoder_hidden_states)

        def _forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None):
            return self.compute(x, timesteps, context)

    Small.__module__ = f"{package}.small"
    torch.manual_seed(0)
    return Small().eval().requires_grad_(False)


class Host:
    """`calls`: the graphs; `notes`: what its report says. Called as the host calls its model."""

    package = ""
    # Whether calls under autocast are captured.
    autocast = False
    # Whether the host's own errors reach it.
    interrupts = False

    def __init__(self, device, **options):
        self.model = small_model(self.package).to(device)
        self.kind = type(self.model)
        self.install(**options)

    def stock(self, *given):
        return self.model.compute(*given)


class Diffusers(Host):
    package = "diffusers"

    def install(self, parts=EVERYTHING):
        self.installed = denoising.install(self.model, [self.model], parts)
        self.calls = denoising._CAPTURED[self.model][0]

    def __call__(self, *given):
        return self.model(*given)

    def notes(self):
        return self.installed.notes()


class ComfyUI(Host):
    package = "comfy"
    interrupts = True

    def install(self):
        self.graph = StepGraph(self.model, "performance")
        self.calls = self.graph.calls

    def __call__(self, *given):
        executor = WrapperExecutor.new_class_executor(self.model._forward, self.model, [self.graph.wrapper])
        return executor.execute(*given, None, None, {})

    def notes(self):
        return self.calls.notes()


class Automatic1111(Host):
    package = "ldm"
    autocast = True

    def install(self):
        self.graphs = UnetGraphs(self.model)
        self.calls = self.graphs.calls

    def __call__(self, *given):
        return self.graphs(self.kind.forward, given, {})

    def notes(self):
        return self.calls.notes()


HOSTS = {kind.__name__: kind for kind in (Diffusers, ComfyUI, Automatic1111)}
