"""Where and in what precision the host computes."""

from __future__ import annotations

import torch

device = cpu = torch.device("cpu")
unet_needs_upcast = False
fp8 = False
dtype_unet = torch.float32


def torch_gc():
    pass
