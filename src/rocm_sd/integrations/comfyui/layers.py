"""ComfyUI's layers through their weights where calling them is nothing else, and as the layers they are elsewhere.

A layer of `comfy.ops` may cast or move its weight at each call, or pass it through functions (a LoRA on a model that is
loaded in part). It is looked at anew in every call: the host loads and unloads models between two of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.ops import OPS, conv2d, group_norm_silu, layer_norm_residual, linear_residual, upsample, upsample_conv2d
from rocm_sd.ops.upsample_conv2d.workload import problem as upsampling_problem
from rocm_sd.rewrite.convolutions import fuses_adds, of_kind, through_op, unusual
from rocm_sd.rewrite.layers import untouched
from rocm_sd.tuning.choice import STOCK

__all__ = [
    "add_and_norm",
    "convolution",
    "convolution_and_add",
    "doubled",
    "idle",
    "is_plain",
    "linear",
    "map_of",
    "norm_silu",
    "ours",
    "takes",
    "tokens_of",
]

# Those of `comfy.ops.disable_weight_init`; its others (fp8, scaled, mixed precision) have products of their own.
_PLAIN = frozenset(f"disable_weight_init.{name}" for name in ("Linear", "Conv2d", "GroupNorm", "LayerNorm"))
# As rewrite/sampling.py has it: from so many pixels on, fewer multiplications outweigh the sums of the weights.
_PIXELS_THAT_PAY_FOR_SUMS = 8192


@lru_cache(maxsize=128)
def _is_known(kind: Any) -> bool:
    return kind in {nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm} or (
        kind.__module__ == "comfy.ops" and kind.__qualname__ in _PLAIN
    )


def is_plain(layer: Any, x: torch.Tensor) -> bool:
    """Whether layer(x) is its weights' product with x, or norm of x, and nothing else, now."""
    kind: Any = type(layer)
    if not _is_known(kind) or not untouched(layer):
        return False
    if getattr(layer, "comfy_cast_weights", False):
        return False
    if getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None):
        return False
    parameters = layer.__dict__["_parameters"]
    return all(parameter is None or of_kind(parameter, x) for parameter in parameters.values())


def ours(op: str, x: torch.Tensor) -> bool:
    """Whether a block's work on x may be done by ops at all. On a CPU they are stock torch, which the host has."""
    if type(x) is not torch.Tensor or not x.numel() or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled(x.device.type) or (torch.is_grad_enabled() and x.requires_grad):
        return False
    return x.device.type != "meta" and through_op(op, x)


def takes(layer: Any, x: torch.Tensor) -> bool:
    """Whether layer(x) is `conv2d` of its weights, and these lie as the op reads them: else it would copy them."""
    if not isinstance(layer, nn.Conv2d) or not is_plain(layer, x) or "_conv_forward" in layer.__dict__:
        return False
    return unusual(layer) is None and layer.weight.is_contiguous(memory_format=torch.channels_last)


def idle(*layers: nn.Module) -> bool:
    """Whether these hand on what they get: no dropout at work, no hook."""
    for layer in layers:
        dropping = isinstance(layer, nn.Dropout) and layer.training and layer.p > 0
        if dropping or type(layer) not in {nn.Dropout, nn.Identity} or not untouched(layer):
            return False
    return True


def convolution(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x) + residual."""
    if not takes(layer, x):
        y: torch.Tensor = layer(x)
        return y if residual is None else residual + y
    stride, padding = layer.stride[0], int(layer.padding[0])
    keeps_size = stride == 1 and 2 * padding == layer.kernel_size[0] - 1
    like = (x.shape[0], layer.weight.shape[0], *x.shape[2:])
    if residual is None or (keeps_size and residual.dtype == x.dtype and residual.shape == like):
        return conv2d(x, layer.weight, layer.bias, None, residual, stride, padding)
    return residual + conv2d(x, layer.weight, layer.bias, None, None, stride, padding)


def convolution_and_add(layer: Any, x: torch.Tensor, add: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, later) with y + later = layer(x) + add; add: [N, C]. A library would go over the picture again for bias and
    add: there the norm that comes next adds them, as it reads the picture in any case.
    """
    if not takes(layer, x) or add.dtype != x.dtype or add.shape != (x.shape[0], layer.weight.shape[0]):
        return layer(x), add
    stride, padding = layer.stride[0], int(layer.padding[0])
    if fuses_adds(layer, x):
        return conv2d(x, layer.weight, layer.bias, add, None, stride, padding), None
    later = add if layer.bias is None else add + layer.bias
    return conv2d(x, layer.weight, None, None, None, stride, padding), later


def norm_silu(norm: Any, x: torch.Tensor, add: torch.Tensor | None = None, *, silu: bool = True) -> torch.Tensor:
    """silu(norm(x + add)); add: [N, C]."""
    fits = add is None or (add.dtype == x.dtype and add.shape == x.shape[:2])
    if fits and isinstance(norm, nn.GroupNorm) and is_plain(norm, x):
        return group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, add, norm.eps, silu)
    y: torch.Tensor = norm(x if add is None else x + add[:, :, None, None])
    return F.silu(y) if silu else y


def linear(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """layer(x) + residual over tokens [..., K], of a linear or of a convolution of one point."""
    if is_plain(layer, x):
        return linear_residual(x, layer.weight.flatten(1), layer.bias, residual)
    y: torch.Tensor = layer(x)
    return y if residual is None else y + residual


def add_and_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(x + residual), x + residual)."""
    same = residual is None or (x.dtype == residual.dtype and x.shape == residual.shape)
    if same and isinstance(norm, nn.LayerNorm) and is_plain(norm, x):
        return layer_norm_residual(x, residual, norm.weight, norm.bias, norm.eps)
    total = x if residual is None else x + residual
    return norm(total), total


def doubled(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The 3x3 convolution of x enlarged by nearest 2x; None where the layer is not one that `takes`."""
    if not takes(layer, x) or (layer.kernel_size, layer.stride, layer.padding) != ((3, 3), (1, 1), (1, 1)):
        return None
    N, _, H, W = x.shape
    if N * H * W >= _PIXELS_THAT_PAY_FOR_SUMS:
        asked = upsampling_problem(x, layer.weight)
        if OPS["upsample_conv2d"].choose(asked, x.device).implementation != STOCK:
            return upsample_conv2d(x, layer.weight, layer.bias)
    return conv2d(upsample(x), layer.weight, layer.bias, padding=1)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, HW, C]; a view where x is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def map_of(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, HW, C] -> [B, C, H, W] that is channels-last."""
    return tokens.reshape(tokens.shape[0], height, width, tokens.shape[2]).permute(0, 3, 1, 2)
