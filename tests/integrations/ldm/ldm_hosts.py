"""Both hosts of ldm's classes, each with small models of its own and its rules on them.

ComfyUI's classes are forks of the ones that Automatic1111 has: the same fakes, with the layers of `comfy.ops`. Those
that have another signature there are in fake_comfyui.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType

import fake_comfyui
import torch
from a1111_world import FAKE_LDM, SmallVae, place_package, randomise, real_or_skip, small_unet
from torch import nn

from rocm_sd.integrations.a1111.a1111_policy import CAPTURED_RULES, POLICY, RULES
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.comfyui.attention import OPTION, override_for
from rocm_sd.integrations.comfyui.comfyui_policy import MODEL_RULES, VAE_RULES, ComfyUIPolicy, find, fused
from rocm_sd.integrations.comfyui.host import PatchReport
from rocm_sd.rewrite.apply import apply, undo


def picture(*shape, seed=1, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


class Automatic1111:
    """`options`: what a transformer is called with where its attention is to be ours."""

    def __init__(self, package, source):
        self.package = place_package(package, FAKE_LDM if source == "fake" else real_or_skip(package))
        self.policy, self.options = POLICY, {}

    def dressed(self, module):
        """As the host has it: random weights, with its layers; and laid out as where rules are applied."""
        return randomise(module).eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def unet(self, **more):
        return self.dressed(small_unet(self.package, **more))

    def unet_inputs(self, dtype=torch.float32, size=(8, 8), classes=False):
        given = {"x": picture(2, 4, *size, seed=11, dtype=dtype), "context": picture(2, 7, 24, seed=12, dtype=dtype)}
        given |= {"y": picture(2, 16, seed=13, dtype=dtype)} if classes else {}
        return {"timesteps": torch.tensor([7.0, 801.0]), **given}

    def resblock(self, **more):
        return self.dressed(self.package.unet.ResBlock(64, 16, more.pop("dropout", 0), **more))

    def upsample(self):
        return self.dressed(self.package.unet.Upsample(32, True))

    def downsample(self):
        return self.dressed(self.package.unet.Downsample(32, True))

    def spatial(self, **more):
        return self.dressed(self.package.attention.SpatialTransformer(32, 2, 16, context_dim=24, **more))

    def vae(self):
        return self.dressed(SmallVae(self.package))

    def replace(self, module):
        return apply(module, (*RULES, *CAPTURED_RULES))

    def undo(self, changes):
        undo(changes)

    def captured(self):
        return PERMISSION.a_whole_call()

    def failure(self):
        return PERMISSION.broken


class ComfyUI(Automatic1111):
    def __init__(self, package, source):
        super().__init__(package, source)
        self.report = PatchReport("model", "cpu", "auto")
        self.policy = ComfyUIPolicy(self.report)
        self.options = {"transformer_options": {OPTION: override_for(self.report)}}
        self._replaced = []

    def dressed(self, module):
        kinds = {nn.Linear: "Linear", nn.Conv2d: "Conv2d", nn.LayerNorm: "LayerNorm"}
        for layer in module.modules():
            name = "GroupNorm" if isinstance(layer, nn.GroupNorm) else kinds.get(type(layer))
            if name is not None:
                layer.__class__ = getattr(fake_comfyui, name)
        return super().dressed(module)

    def unet(self, **more):
        return self.dressed(fake_comfyui.UNetModel(context_dim=24, **more))

    def upsample(self):
        return self.dressed(fake_comfyui.Upsample(32))

    def downsample(self):
        return self.dressed(fake_comfyui.Downsample(32))

    def spatial(self, **more):
        return self.dressed(fake_comfyui.SpatialTransformer(32, 2, 24, **more))

    def replace(self, module):
        changes = []
        for rule, found, change in find(module, (*MODEL_RULES, *VAE_RULES), self.policy, {}, {}):
            changes.append(change)
            if change.replaced:
                found.forward = MethodType(rule.replacement(self.policy).stand_in, found)
                self._replaced.append(found)
        return changes

    def undo(self, _changes):
        while self._replaced:
            del self._replaced.pop().forward

    def captured(self):
        return fused()

    def failure(self):
        return next(iter(self.report.failed.values()), None)


HOSTS = {
    "a1111-fake-ldm": lambda: Automatic1111("ldm", "fake"),
    "a1111-fake-sgm": lambda: Automatic1111("sgm", "fake"),
    "a1111-real-ldm": lambda: Automatic1111("ldm", "real"),
    "a1111-real-sgm": lambda: Automatic1111("sgm", "real"),
    "comfyui-fake": lambda: ComfyUI("comfy.ldm", "fake"),
}
FAKES = ("a1111-fake-ldm", "comfyui-fake")


@contextmanager
def whole(host):
    with torch.no_grad(), host.captured():
        yield


def run(host, module, *args, **kwargs):
    """As in a call that is captured as a whole."""
    with whole(host):
        return module(*args, **kwargs)


def error(result, exact):
    return float((result.double() - exact.double()).norm() / exact.double().norm())
