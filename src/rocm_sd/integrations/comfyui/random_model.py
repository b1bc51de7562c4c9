"""A model of ComfyUI with random weights of a real architecture: speed does not depend on them. Needs the host."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rocm_sd.integrations.comfyui.host import the

__all__ = ["MODELS", "TINY", "fill", "patcher"]

_UNET = {"image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False}
# The host's classes of the configuration and of the model, the size of its pictures, and the UNet.
MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "sd15": ("SD15", "BaseModel", 512, {
        "model_channels": 320, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4], "num_heads": 8,
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1, "context_dim": 768,
        "transformer_depth_output": [1] * 9 + [0] * 3, "use_linear_in_transformer": False, "adm_in_channels": None,
    }),
    "sdxl": ("SDXL", "SDXL", 1024, {
        "model_channels": 320, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "num_heads": -1,
        "num_head_channels": 64, "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
        "transformer_depth_output": [0] * 3 + [2] * 3 + [10] * 3, "context_dim": 2048, "num_classes": "sequential",
        "use_linear_in_transformer": True, "adm_in_channels": 2816,
    }),
}  # fmt: skip
TINY: dict[str, Any] = {
    "model_channels": 64, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1],
    "transformer_depth_middle": 1, "transformer_depth_output": [1, 1, 1, 1], "context_dim": 32,
}  # fmt: skip


def patcher(name: str, dtype: torch.dtype, *, tiny: bool = False) -> Any:
    """The host's ModelPatcher around such a model, for the host's own device. `tiny`: one that a CPU runs."""
    management = the("comfy.model_management")
    config, base, _, unet = MODELS[name]
    made = copy.deepcopy({**_UNET, **unet, **(TINY if tiny else {}), "dtype": dtype})
    known = getattr(the("comfy.supported_models"), config)(made)
    model = getattr(the("comfy.model_base"), base)(known, device="cpu")
    fill(model.diffusion_model)
    return the("comfy.model_patcher").ModelPatcher(
        model, load_device=management.get_torch_device(), offload_device=management.unet_offload_device()
    )


def fill(module: torch.nn.Module) -> None:
    """Of a trained model's scale: the host's layers come with whatever was in memory."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            values = torch.randn(parameter.shape, generator=generator) * parameter[0].numel() ** -0.5
        else:
            base = 1.0 if name.endswith("weight") else 0.0
            values = base + 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values)
        parameter.requires_grad_(False)
