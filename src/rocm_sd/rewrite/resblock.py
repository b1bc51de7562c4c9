"""ResNet block of a UNet or VAE: five ops with no pass over memory between them.

Both GroupNorm + SiLU pairs become `group_norm_silu` and the convolutions `conv2d`: the second one adds the shortcut as
it writes, and the time embedding's add is in the first one or in the norm after it, wherever it is free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rocm_sd.ops import conv2d, group_norm_silu
from rocm_sd.rewrite import conditioning
from rocm_sd.rewrite import eight_bit_convolutions as eight_bits
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import (
    Maps,
    convolution,
    convolution_and_add,
    falls_back,
    norm_overwrites,
    norm_silu,
    norm_silu_for,
    of_diffusers,
    read_two,
    takes,
)
from rocm_sd.rewrite.eight_bits import Rounded
from rocm_sd.rewrite.layers import idle

__all__ = ["RULE", "WORTH_IT_ON_CPU", "consume", "consumes", "hoistable", "of_two", "takes_two"]

# One core: 1.009 of stock's time at 2x128x16x16, 1.004 at 2x64x32x32, 0.994 at 1x64x64x64.
WORTH_IT_ON_CPU = 2**18


def _why_not(module: nn.Module) -> str | None:
    if type(module.nonlinearity) is not nn.SiLU:
        return f"its activation is {type(module.nonlinearity).__name__}, not SiLU"
    # A VAE's blocks say "group" and have no time embedding at all.
    if module.time_embedding_norm != "default" and module.time_emb_proj is not None:
        return f"its time embedding is applied by {module.time_embedding_norm}"
    if module.time_embedding_norm == "scale_shift":
        return "its time embedding is applied by scale_shift"
    if not (isinstance(module.norm1, nn.GroupNorm) and isinstance(module.norm2, nn.GroupNorm)):
        return "its norms are not GroupNorm"
    return None


def _forward(self: Any, input_tensor: torch.Tensor, temb: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
    # Without a projection stock adds the embedding as it comes, of any shape that broadcasts.
    unprojected = temb is not None and self.time_emb_proj is None and self.time_embedding_norm == "default"
    deprecated = args or kwargs.get("scale") is not None
    if unprojected or deprecated or falls_back(input_tensor, self.norm1.weight, "conv2d", WORTH_IT_ON_CPU):
        return NotImplemented
    hidden: Maps
    if self.upsample is None and self.downsample is None:
        hidden = norm_silu_for(self.conv1, self.norm1, input_tensor)
    else:
        input_tensor, hidden = _resized(self, input_tensor, norm_silu(self.norm1, input_tensor))
    held = [hidden]
    del hidden
    hidden = _conditioned(self, held, temb)
    shortcut = input_tensor if self.conv_shortcut is None else convolution(self.conv_shortcut, input_tensor)
    return _finished(self, hidden, shortcut)


def _resized(self: Any, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if self.upsample is None:
        return self.downsample(x), self.downsample(hidden)
    if len(hidden) >= 64:
        # Stock's way round a kernel of torch that fails on large channels-last batches.
        x, hidden = x.contiguous(), hidden.contiguous()
    return self.upsample(x), self.upsample(hidden)


def _conditioned(self: Any, held: list[Maps], temb: torch.Tensor | None) -> Maps:
    """From the first norm to the second one. The tensor is taken out of the list, so that nobody else holds it."""
    ready = conditioning.time_add(self)
    # Named anew at each step: the picture before is then free, which in a VAE is the peak of its memory.
    if ready is not None:
        hidden, later = convolution_and_add(self.conv1, held.pop(), ready.value, bias_in_add=ready.with_bias)
    else:
        add = None
        if self.time_emb_proj is not None:
            add = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
        hidden, later = convolution_and_add(self.conv1, held.pop(), add)
    if idle(self.dropout):
        return norm_silu_for(self.conv2, self.norm2, hidden, later)
    made: torch.Tensor = self.dropout(norm_silu(self.norm2, hidden, later))
    return made


def _finished(self: Any, hidden: Maps, shortcut: torch.Tensor) -> torch.Tensor:
    out = convolution(self.conv2, hidden, residual=shortcut)
    # Dividing by one is a pass over memory that stock makes and that changes nothing.
    return out if self.output_scale_factor == 1.0 else out / self.output_scale_factor


def takes_two(module: Any, x: torch.Tensor, concat: torch.Tensor) -> bool:
    """Whether `of_two` is module(x and concat joined), and joins nothing, now."""
    if not RULE.works_alone(module) or module.upsample is not None or module.downsample is not None:
        return False
    if module.conv_shortcut is None:
        return False
    if falls_back(x, module.norm1.weight, "conv2d", WORTH_IT_ON_CPU) or module.time_emb_proj is None:
        return False
    return read_two(module.norm1, module.conv_shortcut, x, concat)


def of_two(module: Any, x: torch.Tensor, concat: torch.Tensor, temb: torch.Tensor | None) -> torch.Tensor:
    """module(x and concat joined), which are read where they lie: joining them is two passes over both."""
    norm, layer = module.norm1, module.conv_shortcut
    given, rounding = (x, norm.num_groups, norm.weight, norm.bias, None, norm.eps), eight_bits.rounding(module.conv1)
    held: list[Maps] = []
    if rounding is None:
        held.append(group_norm_silu(*given, concat=concat))
    else:
        scale, to = rounding
        held.append(Rounded(group_norm_silu(*given, concat=concat, scale=scale.view(1), to=to), scale, x.dtype))
    hidden = _conditioned(module, held, temb)
    shortcut = conv2d(x, layer.weight, layer.bias, concat=concat)
    return _finished(module, hidden, shortcut)


def consumes(module: Any, x: torch.Tensor) -> bool:
    """Whether `consume` may take it: a block of a VAE, rewritten, with nothing but plain layers inside, now."""
    if not RULE.works_alone(module) or not idle(module.dropout) or module.time_emb_proj is not None:
        return False
    if module.upsample is not None or module.downsample is not None:
        return False
    convolutions = (module.conv1, module.conv2, module.conv_shortcut)
    plain = all(layer is None or takes(layer, x) for layer in convolutions)
    return plain and not falls_back(x, module.norm1.weight, "conv2d", WORTH_IT_ON_CPU)


def consume(module: Any, held: list[torch.Tensor]) -> torch.Tensor:
    """module(x) of the one tensor in the list, which is taken out: its memory is used again as soon as it can be.

    Where a block changes the number of channels, x is needed for its norm and its shortcut alone: if the norm can
    overwrite it, the shortcut comes first.
    """
    x = held.pop()
    last_use = module.conv_shortcut is not None and norm_overwrites(module.norm1, x)
    shortcut = convolution(module.conv_shortcut, x) if last_use else x
    hidden = norm_silu(module.norm1, x, overwrite=last_use)
    del x
    hidden, later = convolution_and_add(module.conv1, hidden, None)
    hidden = norm_silu(module.norm2, hidden, later, overwrite=True)
    if module.conv_shortcut is not None and not last_use:
        shortcut = convolution(module.conv_shortcut, shortcut)
    return _finished(module, hidden, shortcut)


def hoistable(module: Any) -> bool:
    """Whether the add of its time embedding is a linear of the embedding's SiLU, and this rule's to make, now."""
    if not RULE.works_alone(module) or module.time_emb_proj is None:
        return False
    return module.time_embedding_norm == "default" and not module.skip_time_act


RULE = Rule(
    name="resblock",
    summary="GroupNorm + SiLU as one op; convolutions with the time embedding's and the shortcut's adds in them",
    channels_last=True,
    of_kind=of_diffusers("ResnetBlock2D"),
    why_not=_why_not,
    forward=_forward,
)
