"""A UNet's up block that never joins what comes from below with a skip connection.

Stock writes both into one tensor before each ResNet block, which reads it twice: for its norm and its shortcut. Here
both read the two where they lie. A block whose ops read one tensor only, such as one of a small map, is given that.
"""

from __future__ import annotations

from typing import Any

import torch

from rocm_sd.rewrite import resblock
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import of_diffusers

__all__ = ["RULE", "joined"]


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    res_hidden_states_tuple: tuple[torch.Tensor, ...],
    temb: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not _is_usual(self, args, kwargs):
        return NotImplemented
    upsample_size = kwargs.pop("upsample_size", None)
    skips = iter(reversed(res_hidden_states_tuple))
    attentions = getattr(self, "attentions", None) or [None] * len(self.resnets)
    for resnet, attention in zip(self.resnets, attentions, strict=True):
        hidden_states = joined(resnet, hidden_states, next(skips), temb)
        if attention is not None:
            hidden_states = attention(hidden_states, **kwargs, return_dict=False)[0]
    for upsampler in self.upsamplers or ():
        hidden_states = upsampler(hidden_states, upsample_size)
    return hidden_states


def joined(resnet: Any, x: torch.Tensor, skip: torch.Tensor, temb: torch.Tensor | None) -> torch.Tensor:
    """A ResNet block of both, which are not joined where it can read two."""
    if resblock.takes_two(resnet, x, skip):
        return resblock.of_two(resnet, x, skip, temb)
    made: torch.Tensor = resnet(torch.cat((x, skip), 1), temb)
    return made


_ATTENTION = {"encoder_hidden_states", "cross_attention_kwargs", "attention_mask", "encoder_attention_mask"}


def _is_usual(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Called as UNets call it, and with nothing between what comes from below, the skip and the ResNet block."""
    known = {"upsample_size"} | (_ATTENTION if hasattr(block, "attentions") else set())
    if args or not kwargs.keys() <= known or (kwargs.get("cross_attention_kwargs") or {}).get("scale") is not None:
        return False
    freeu = all(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2"))
    return not freeu and not (torch.is_grad_enabled() and block.gradient_checkpointing)


RULE = Rule(
    name="up_block",
    summary="what comes from below and the skip connection read where they lie, and never joined",
    channels_last=True,
    # What keeps a block from it may come and go, and is asked for in each call.
    of_kind=of_diffusers("UpBlock2D", "CrossAttnUpBlock2D"),
    forward=_forward,
    calls=("resnets", "attentions", "upsamplers"),
    on_cpu=False,
    for_graphs=True,
)
