"""What rules of convolutional blocks share: convolutions and norms through their weights, or as the layers they are.

A layer is looked at anew in every call: a LoRA, an offload hook or another padding may have come since the last one.
Functions named `plain_*` do not look: their layers are nothing but their weights, and whoever calls them has asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd import arch, settings
from rocm_sd.errors import Unsupported
from rocm_sd.ops import OPS, conv2d, group_norm_silu
from rocm_sd.ops.conv2d.workload import problem
from rocm_sd.ops.group_norm_silu.op import group_norm_silu_
from rocm_sd.ops.group_norm_silu.workload import problem as norm_problem
from rocm_sd.rewrite import eight_bit_convolutions
from rocm_sd.rewrite.eight_bits import Rounded
from rocm_sd.rewrite.layers import is_plain, untouched, weight_and_bias

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.tuning import Problem

__all__ = [
    "Maps", "convolution", "convolution_and_add", "falls_back", "fuses_adds", "is_diffusers", "norm_overwrites",
    "norm_silu", "norm_silu_for", "of_diffusers", "of_kind", "parameters_of_kind", "plain_convolution",
    "plain_convolution_and_add", "plain_norm_silu", "read_two", "takes", "through_op", "unusual",
]  # fmt: skip

# [N, C, H, W]; where a convolution in 8 bits comes next, as it takes them.
Maps = torch.Tensor | Rounded
_TENSORS = (torch.Tensor, nn.Parameter)
_KERNELS = ((1, 1), (3, 3))


def is_diffusers(module: nn.Module, name: str) -> bool:
    return of_diffusers(name)(type(module))


def of_diffusers(*names: str) -> Callable[[type], bool]:
    """Whether a class is one of these, by name: the rules import no host program."""
    return lambda kind: kind.__name__ in names and kind.__module__.startswith("diffusers.")


def falls_back(x: torch.Tensor, weight: torch.Tensor | None, op: str, worth_it_on_cpu: int = 0) -> bool:
    """Whether a call is stock's own, whatever the layers are. `op` is the one that the rule is for.

    Size: on a CPU, what is saved outweighs the questions to the layers from x of so many values on.
    Gradients: the ops have them, but nothing says that they are faster, and each would go through the dispatcher.
    Autocast: it chooses a dtype for each of stock's operations, and knows none of the ops.
    """
    if x.dim() != 4 or torch.is_autocast_enabled(x.device.type):
        return True
    if x.numel() < worth_it_on_cpu and not through_op(op, x):
        return True
    return torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))


def through_op(name: str, x: torch.Tensor) -> bool:
    """Whether to ask the op of that name. On a CPU each is stock torch unless the settings name another, and asking
    costs 15 us a call, which the small blocks of a small model feel.
    """
    if arch.computes_on_gpu(x.device):
        return True
    return not torch.compiler.is_compiling() and settings.implementation_for(name) is not None


def unusual(layer: nn.Module) -> str | None:
    """What keeps a convolution from `conv2d`, in words; None of a layer that is none, as a LoRA's wrapper is."""
    if not isinstance(layer, nn.Conv2d):
        return None
    if layer.padding_mode != "zeros":
        return f"its convolution pads with {layer.padding_mode}"
    if layer.groups != 1 or layer.dilation != (1, 1):
        return f"its convolution has {layer.groups} groups and dilation {layer.dilation}"
    if layer.kernel_size not in _KERNELS or isinstance(layer.padding, str):
        return f"its convolution is {layer.kernel_size} with padding {layer.padding}"
    if layer.stride[0] != layer.stride[1] or layer.padding[0] != layer.padding[1]:
        return f"its convolution has stride {layer.stride} and padding {layer.padding}"
    return None


def _is_plain_convolution(layer: Any, x: torch.Tensor) -> bool:
    return type(layer) is nn.Conv2d and is_plain(layer) and parameters_of_kind(layer, x)


def takes(layer: Any, x: torch.Tensor, plain: Callable[[Any, torch.Tensor], bool] = _is_plain_convolution) -> bool:
    """Whether layer(x) is `conv2d` of its weights, now, and these lie as the op reads them: it would copy others.

    `plain` says whether calling a layer is nothing but its weights: a host may have classes of its own.
    """
    if not _is_conv2d(layer, x, plain):
        return False
    as_read: bool = layer.weight.is_contiguous(memory_format=torch.channels_last)
    return as_read


def _is_conv2d(layer: Any, x: torch.Tensor, plain: Callable[[Any, torch.Tensor], bool]) -> bool:
    # Scripts that make seamless textures give layers another padding, or another `_conv_forward`, while in use.
    known = isinstance(layer, nn.Conv2d) and "_conv_forward" not in layer.__dict__ and plain(layer, x)
    return known and unusual(layer) is None


def of_kind(weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Of x's dtype and device, and no quantised or distributed tensor. Otherwise the layer knows what to do or say."""
    return type(weight) in _TENSORS and weight.dtype == x.dtype and weight.device == x.device


def parameters_of_kind(layer: nn.Module, x: torch.Tensor) -> bool:
    """`of_kind` of weight and bias, where the layer has them."""
    # Not through attributes: nn.Module looks those up in Python.
    for parameter in layer.__dict__["_parameters"].values():
        if parameter is not None and not of_kind(parameter, x):
            return False
    return True


def _fits(add: torch.Tensor, x: torch.Tensor, channels: int) -> bool:
    """Stock broadcasts and promotes in its sums; the ops take one value for each picture and channel, of x's dtype."""
    return add.dtype == x.dtype and add.shape == (x.shape[0], channels)


def convolution(
    layer: Any, x: Maps, add: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """layer(x) + add + residual; add: [N, C]; residual: like layer(x)."""
    if eight_bit_convolutions.is_eight_bit_convolution(layer):
        return _in_eight_bits(layer, x, add, residual)
    assert isinstance(x, torch.Tensor)
    return plain_convolution(layer, x, add, residual) if takes(layer, x) else _summed(layer(x), add, residual)


def _in_eight_bits(
    layer: eight_bit_convolutions.EightBitConv2d,
    x: Maps,
    add: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    maps = x.q if isinstance(x, Rounded) else x
    fits = add is None or (add.dtype == x.dtype and add.shape == (len(maps), layer.out_channels))
    if residual is not None:
        fits = fits and residual.dtype == x.dtype and _like_output(residual, maps, layer)
    if fits:
        return eight_bit_convolutions.convolved(layer, x, add, residual)
    return _summed(eight_bit_convolutions.convolved(layer, x), add, residual)


def _summed(y: torch.Tensor, add: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    if add is not None:
        y = y + add[:, :, None, None]
    return y if residual is None else residual + y


def plain_convolution(
    layer: nn.Conv2d, x: torch.Tensor, add: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`convolution` of a layer that `takes`."""
    (weight, bias), stride, padding = weight_and_bias(layer), layer.stride, layer.padding
    fits = add is None or _fits(add, x, weight.shape[0])
    if residual is not None:
        fits = fits and residual.dtype == x.dtype and _like_output(residual, x, layer)
    if through_op("conv2d", x):
        parts = (add, residual) if fits else (None, None)
        y = conv2d(x, weight, bias, *parts, stride[0], int(padding[0]))
        return y if fits else _summed(y, add, residual)
    y = F.conv2d(x, weight, bias, stride, padding)
    if not fits:
        return _summed(y, add, residual)
    if add is not None:
        y += add[:, :, None, None]
    if residual is not None:
        y += residual
    return y


def _like_output(residual: torch.Tensor, x: torch.Tensor, layer: nn.Conv2d) -> bool:
    """Of a convolution that keeps the size of the picture; other residuals are added by themselves."""
    same_size = layer.stride[0] == 1 and 2 * int(layer.padding[0]) == layer.kernel_size[0] - 1
    N, _, H, W = x.shape
    return same_size and residual.shape == (N, layer.weight.shape[0], H, W)


def norm_silu_for(layer: Any, norm: Any, x: torch.Tensor, add: torch.Tensor | None = None) -> Maps:
    """`norm_silu`, as the layer after it takes it: in 8 bits where that multiplies them."""
    rounding = eight_bit_convolutions.rounding(layer)
    fits = add is None or _fits(add, x, x.shape[1])
    if rounding is None or not fits or not _is_plain_norm(norm, x):
        return norm_silu(norm, x, add)
    scale, to = rounding
    given = x, norm.num_groups, *weight_and_bias(norm), add, norm.eps
    return Rounded(group_norm_silu(*given, scale=scale.view(1), to=to), scale, x.dtype)


def norm_silu(
    norm: Any, x: torch.Tensor, add: torch.Tensor | None = None, *, silu: bool = True, overwrite: bool = False
) -> torch.Tensor:
    """silu(norm(x + add)); add: [N, C]. `overwrite`: nobody reads x after this, so its memory may take the result."""
    if add is not None and not _fits(add, x, x.shape[1]):
        x, add = x + add[:, :, None, None], None
    if _is_plain_norm(norm, x):
        return plain_norm_silu(norm, x, add, silu=silu, overwrite=overwrite)
    y: torch.Tensor = norm(x if add is None else x + add[:, :, None, None])
    return F.silu(y) if silu else y


def plain_norm_silu(
    norm: Any, x: torch.Tensor, add: torch.Tensor | None = None, *, silu: bool = True, overwrite: bool = False
) -> torch.Tensor:
    """`norm_silu` of a norm that is nothing but its weights; add: [N, C] of x's dtype."""
    if through_op("group_norm_silu", x):
        op = group_norm_silu_ if overwrite else group_norm_silu
        return op(x, norm.num_groups, *weight_and_bias(norm), add, norm.eps, silu)
    x = x if add is None else x + add[:, :, None, None]
    y = F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    # Nobody else can hold what the norm returned.
    return F.silu(y, inplace=True) if silu else y


def norm_overwrites(norm: Any, x: torch.Tensor) -> bool:
    """Whether `norm_silu` needs no memory for its result where it may overwrite x."""
    dense = x.is_contiguous(memory_format=torch.channels_last)
    if not dense or not _is_plain_norm(norm, x) or not through_op("group_norm_silu", x):
        return False
    if torch.compiler.is_compiling():
        return False
    return OPS["group_norm_silu"].overwrites(norm_problem(x, norm.num_groups), x.device)


def read_two(norm: Any, layer: Any, x: torch.Tensor, concat: torch.Tensor) -> bool:
    """Whether the norm and the convolution are ops, now, that read x and `concat` where they lie."""
    if torch.compiler.is_compiling() or not (through_op("conv2d", x) and through_op("group_norm_silu", x)):
        return False
    if x.dtype != concat.dtype or x.device != concat.device:
        return False
    if not (takes(layer, x) and _is_plain_norm(norm, x)):
        return False
    if not OPS["group_norm_silu"].reads_two(norm_problem(x, norm.num_groups, concat=concat), x.device):
        return False
    shape = problem(x, layer.weight, stride=layer.stride[0], padding=int(layer.padding[0]), concat=concat)
    return OPS["conv2d"].reads_two(shape, x.device)


def _is_plain_norm(norm: Any, x: torch.Tensor) -> bool:
    return type(norm) is nn.GroupNorm and untouched(norm) and parameters_of_kind(norm, x)


def convolution_and_add(
    layer: Any, x: Maps, add: torch.Tensor | None, *, bias_in_add: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, later) with y + later = layer(x) + add: bias and add where they cost no pass over memory of their own.

    The kernels of `conv2d` have them in their epilogue, and on a CPU that op adds in place. A GPU's library would go
    over the picture again, for the bias alone too: there the norm after it adds them, as it reads the picture in any
    case. `bias_in_add`: the layer's bias is in `add` already.
    """
    if not bias_in_add and eight_bit_convolutions.is_eight_bit_convolution(layer):
        return _in_eight_bits(layer, x, add), None
    assert isinstance(x, torch.Tensor)
    if bias_in_add:
        # The bias cannot be taken out of `layer(x)`: weights of another layout are copied.
        if not _is_conv2d(layer, x, _is_plain_convolution):
            raise Unsupported("A bias that was added in advance", f"a convolution that is a {type(layer).__name__}")
        now, later = (add, None) if fuses_adds(layer, x) else (None, add)
        return conv2d(x, layer.weight, None, now, None, layer.stride[0], int(layer.padding[0])), later
    return plain_convolution_and_add(layer, x, add) if takes(layer, x) else (layer(x), add)


def plain_convolution_and_add(
    layer: nn.Conv2d, x: torch.Tensor, add: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`convolution_and_add` of a layer that `takes`."""
    fits = add is None or _fits(add, x, layer.weight.shape[0])
    if not fits or fuses_adds(layer, x):
        return plain_convolution(layer, x, add), None
    if layer.bias is not None:
        add = layer.bias.expand(x.shape[0], -1) if add is None else add + layer.bias
    return conv2d(x, layer.weight, None, None, None, layer.stride[0], int(layer.padding[0])), add


def fuses_adds(layer: nn.Conv2d, x: torch.Tensor) -> bool:
    """Whether `conv2d` of a plain layer adds bias and time embedding in its own pass over the picture, now."""
    # What an op chooses cannot be asked for while it is traced; in place is then the better guess for any device.
    if not arch.computes_on_gpu(x.device) or torch.compiler.is_compiling():
        return True
    asked: Problem = problem(x, layer.weight, stride=layer.stride[0], padding=int(layer.padding[0]))
    return OPS["conv2d"].fuses_adds(asked, x.device)
