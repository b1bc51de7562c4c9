"""UNets that may stand in for the host's own."""

from __future__ import annotations

import torch

from modules import devices, script_callbacks, shared

unet_options: list = []
current_unet_option = None
current_unet = None
original_forward = None


def list_unets():
    unet_options[:] = script_callbacks.list_unets_callback()


def get_unet_option(option=None):
    option = option or shared.opts.sd_unet
    if option == "Automatic":
        name = shared.sd_model.sd_checkpoint_info.model_name
        option = next((one.label for one in unet_options if one.model_name == name), "None")
    return next((one for one in unet_options if one.label == option), None)


def apply_unet(option=None):
    global current_unet_option, current_unet  # noqa: PLW0603 -- as the host keeps it
    wanted = get_unet_option(option)
    if wanted == current_unet_option:
        return
    if current_unet is not None:
        current_unet.deactivate()
    current_unet_option, current_unet = wanted, None
    unet = shared.sd_model.model.diffusion_model
    if wanted is None:
        unet.to(devices.device)
        return
    unet.to(devices.cpu)
    devices.torch_gc()
    current_unet = wanted.create_unet()
    current_unet.option = wanted
    current_unet.activate()


class SdUnetOption:
    model_name = None
    label = None

    def create_unet(self):
        raise NotImplementedError


class SdUnet(torch.nn.Module):
    def forward(self, x, timesteps, context, *args, **kwargs):
        raise NotImplementedError

    def activate(self):
        pass

    def deactivate(self):
        pass


def create_unet_forward(original_forward):
    def UNetModel_forward(self, x, timesteps=None, context=None, *args, **kwargs):  # noqa: N802 -- the host's name
        if current_unet is not None:
            return current_unet.forward(x, timesteps, context, *args, **kwargs)
        return original_forward(self, x, timesteps, context, *args, **kwargs)

    return UNetModel_forward
