"""The last GroupNorm + SiLU of a UNet or of a VAE's encoder and decoder, which are two modules: the first does the work
of both, the second hands on what it gets.
"""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import group_norm_silu
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import falls_back, of_diffusers, of_kind, through_op
from rocm_sd.rewrite.layers import hooked

__all__ = ["RULE"]

# In each of them `conv_act` takes what `conv_norm_out` returned, and nothing else does.
_MODELS = ("Decoder", "Encoder", "UNet2DConditionModel", "UNet2DModel")
# On a CPU the gain is that SiLU needs no map of its own. One core: 0.97 of stock's time at 1x64x64x64, 0.99 at
# 1x64x128x128, 0.63 at 1x128x256x256.
_WORTH_IT_ON_CPU = 2**18

# Kept beside the modules: whose norm it is, and which tensors have been activated already.
_OWNERS: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()
_ACTIVATED: dict[int, weakref.ref[torch.Tensor]] = {}


def _applies(module: nn.Module) -> bool:
    return getattr(module, "conv_norm_out", None) is not None


def _why_not(module: nn.Module) -> str | None:
    if type(module.conv_norm_out) is not nn.GroupNorm:
        return f"its last norm is {type(module.conv_norm_out).__name__}, not GroupNorm"
    if type(module.conv_act) is not nn.SiLU:
        return f"its last activation is {type(module.conv_act).__name__}, not SiLU"
    return None


def _begin(module: Any) -> None:
    _OWNERS[module.conv_norm_out] = weakref.ref(module)


def _undo(module: Any) -> None:
    _OWNERS.pop(module.conv_norm_out, None)


def _norm(self: Any, input: torch.Tensor) -> Any:  # noqa: A002 -- torch's name for it
    if not _activates(self, input):
        return NotImplemented
    if through_op("group_norm_silu", input):
        y = group_norm_silu(input, self.num_groups, self.weight, self.bias, None, self.eps)
    else:
        y = F.silu(nn.GroupNorm.forward(self, input), inplace=True)
    key = id(y)
    _ACTIVATED[key] = weakref.ref(y, lambda _: _ACTIVATED.pop(key, None))
    return y


def _activates(norm: Any, x: torch.Tensor) -> bool:
    """Whether what is returned here goes to the other half of this rule as it is, now."""
    owner = _OWNERS.get(norm)
    model: Any = None if owner is None else owner()
    # A copy of the model has an owner that is not known here. Hooks may hand on another tensor than they got.
    if model is None or model.conv_norm_out is not norm or hooked(norm.__dict__):
        return False
    if not RULE.works_alone(model.conv_act, "conv_act"):
        return False
    return (norm.weight is None or of_kind(norm.weight, x)) and not falls_back(
        x, norm.weight, "group_norm_silu", _WORTH_IT_ON_CPU
    )


def _act(_self: Any, input: torch.Tensor) -> Any:  # noqa: A002 -- torch's name for it
    activated = _ACTIVATED.pop(id(input), None)
    if activated is not None and activated() is input:
        return input
    return NotImplemented


RULE = Rule(
    name="norm_out",
    summary="the last GroupNorm + SiLU as one op",
    channels_last=True,
    of_kind=of_diffusers(*_MODELS),
    applies=_applies,
    why_not=_why_not,
    forward={"conv_norm_out": _norm, "conv_act": _act},
    undo=_undo,
    begin=_begin,
)
