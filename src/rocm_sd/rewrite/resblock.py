"""ResNet block of a UNet or VAE: both GroupNorm + SiLU pairs become `group_norm_silu`, the second one with the time
embedding's add inside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import group_norm_silu
from rocm_sd.rewrite.apply import Rule

__all__ = ["RULE"]


def _applies(module: nn.Module) -> bool:
    return type(module).__name__ == "ResnetBlock2D" and type(module).__module__.startswith("diffusers.")


def _why_not(module: nn.Module) -> str | None:
    if not isinstance(module.nonlinearity, nn.SiLU):
        return f"its activation is {type(module.nonlinearity).__name__}, not SiLU"
    # A VAE's blocks say "group" and have no time embedding at all.
    if module.time_embedding_norm != "default" and module.time_emb_proj is not None:
        return f"its time embedding is applied by {module.time_embedding_norm}"
    if not (isinstance(module.norm1, nn.GroupNorm) and isinstance(module.norm2, nn.GroupNorm)):
        return "its norms are not GroupNorm"
    return None


def _forward(self: Any, input_tensor: torch.Tensor, temb: torch.Tensor | None, *_args: Any, **_kwargs: Any) -> Any:
    hidden = _norm(self.norm1, input_tensor)
    if self.upsample is not None:
        input_tensor, hidden = self.upsample(input_tensor), self.upsample(hidden)
    elif self.downsample is not None:
        input_tensor, hidden = self.downsample(input_tensor), self.downsample(hidden)
    hidden = self.conv1(hidden)
    add = None
    if self.time_emb_proj is not None and temb is not None:
        add = self.time_emb_proj(temb if self.skip_time_act else F.silu(temb))
    hidden = self.conv2(self.dropout(_norm(self.norm2, hidden, add)))
    shortcut = input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)
    out = shortcut + hidden
    # Dividing by one is a pass over memory that stock makes and that changes nothing.
    return out if self.output_scale_factor == 1.0 else out / self.output_scale_factor


def _norm(norm: nn.GroupNorm, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
    return group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, add, norm.eps)


RULE = Rule(
    name="resblock",
    summary="GroupNorm + SiLU and the time embedding's add as one op",
    channels_last=True,
    applies=_applies,
    why_not=_why_not,
    forward=_forward,
)
