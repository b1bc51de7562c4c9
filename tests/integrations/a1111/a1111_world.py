"""A host in the test's own process: fakes of its modules, and an ldm or sgm package, a fake or a checkout."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

HERE = Path(__file__).parent
FAKE_LDM = HERE / "fake_ldm"
FAKE_HOST = HERE / "fake_host"
_OWN = ("modules", "gradio", "launch", "ldm", "sgm", "networks", "comfy")


def checkout_of(package):
    """The folder of a real `ldm` or `sgm`, in or below the folder that ROCM_SD_LDM names."""
    named = os.environ.get("ROCM_SD_LDM")
    found = [] if not named else [*Path(named).glob(package), *Path(named).glob(f"*/{package}")]
    return found[0] if found else None


def real_or_skip(package):
    folder = checkout_of(package)
    if folder is None:
        pytest.skip(f"ROCM_SD_LDM names no folder with the package {package}")
    for needed in ("einops", "omegaconf"):
        pytest.importorskip(needed)
    return folder


@contextmanager
def clean_imports():
    """Within, the host's packages can be imported; after, they never were."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _OWN}
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
            del sys.modules[name]
        sys.modules.update(before)
        invalidate_caches()


@contextmanager
def fresh():
    """Everything of ours is as new, and the host's packages can be imported within and leave no trace."""
    from rocm_sd.integrations.a1111 import host_lists, messages
    from rocm_sd.integrations.a1111.approximated_steps import DENOISER
    from rocm_sd.integrations.a1111.permission import PERMISSION
    from rocm_sd.integrations.a1111.switch import SWITCH

    def reset():
        SWITCH.restore()
        DENOISER.leave()
        SWITCH._wish = None
        PERMISSION.reset()
        PERMISSION.whole = False
        messages.forget()
        host_lists._unet_option.cache_clear()

    reset()
    with clean_imports():
        yield
    reset()


def place_package(name, folder):
    """As an empty package: the real sgm imports a training framework in its __init__."""
    for below in ("", ".modules", ".modules.diffusionmodules"):
        path = name + below
        module = ModuleType(path)
        module.__path__ = [str(Path(folder, *below.split(".")))]
        sys.modules[path] = module
    return SimpleNamespace(
        attention=import_module(f"{name}.modules.attention"),
        unet=import_module(f"{name}.modules.diffusionmodules.openaimodel"),
        vae=import_module(f"{name}.modules.diffusionmodules.model"),
    )


def small_unet(package, **more):
    kind = package.unet.UNetModel
    # The original of SDXL knows these no longer.
    known = signature(kind.__init__).parameters
    old = {"image_size": 8, "legacy": False, "use_spatial_transformer": True}
    old = {name: value for name, value in old.items() if name in known}
    unet = kind(
        in_channels=4, model_channels=32, out_channels=4, num_res_blocks=1, attention_resolutions=[1, 2],
        channel_mult=[1, 2], num_heads=2, context_dim=24, use_checkpoint=False, **old,
        **{"transformer_depth": 1, **more},
    )  # fmt: skip
    return randomise(unet).eval()


def randomise(module):
    """The original begins some layers with zeros, which would hide what they compute."""
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        spread = 0.5 if parameter.dim() == 1 else 1.5 / max(1, parameter[0].numel()) ** 0.5
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return module


class SmallVae(nn.Module):
    def __init__(self, package):
        super().__init__()
        vae = package.vae
        self.first = nn.Conv2d(4, 32, 3, padding=1)
        self.block = vae.ResnetBlock(in_channels=32, out_channels=64, dropout=0.0, temb_channels=0)
        self.attn = vae.AttnBlock(64)
        self.up = vae.Upsample(64, True)
        self.down = vae.Downsample(64, True)
        self.last = vae.ResnetBlock(in_channels=64, dropout=0.0, temb_channels=0)

    def forward(self, x):
        return self.last(self.down(self.up(self.attn(self.block(self.first(x), None)))), None)


class Wrapper(nn.Module):
    """Between the host's model and its UNet there is one of these."""

    def __init__(self, unet):
        super().__init__()
        self.diffusion_model = unet

    def forward(self, x, t, context, **more):
        return self.diffusion_model(x, t, context=context, **more)


class SdModel(nn.Module):
    def __init__(self, package, **more):
        super().__init__()
        self.model = Wrapper(small_unet(package, **more))
        self.first_stage_model = randomise(SmallVae(package)).eval()
        self.sd_checkpoint_info = SimpleNamespace(model_name="a-checkpoint")
        self.lowvram = False


def host_or_skip():
    """The folder of a real host."""
    folder = os.environ.get("ROCM_SD_A1111")
    if not folder:
        pytest.skip("ROCM_SD_A1111 names no folder of the host")
    return Path(folder)


def place_file(name, path):
    """A file of the real host, under its own name."""
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    setattr(import_module(parent), child, module)


def start_host(package_folder=FAKE_LDM, real=()):
    """The fakes are the host; its model is loaded, and nothing of ours is in it yet. `real`: files of a real one."""
    sys.path.insert(0, str(FAKE_HOST))
    invalidate_caches()
    for name in real:
        place_file(f"modules.{name}", host_or_skip() / "modules" / f"{name}.py")
    package = place_package("ldm", package_folder)
    names = ("shared", "devices", "scripts", "script_callbacks", "sd_unet", "sd_hijack", "processing",
             "sd_hijack_optimizations", "hypernetworks.hypernetwork")  # fmt: skip
    found = {name.rpartition(".")[2]: import_module(f"modules.{name}") for name in names}
    host = SimpleNamespace(**found, ldm=package, gradio=import_module("gradio"), launch=import_module("launch"))
    host.sd_hijack.hijack()
    host.shared.sd_model = SdModel(package)
    return host
