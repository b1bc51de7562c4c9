"""A VAE's decoder that lets go of each map once nobody needs it: its last block is the peak of all memory that a whole
picture takes.

Stock's decoder has a name for what a block was called with until the block returns. The last one's input has twice its
channels: half a gigabyte for a picture of 1024x1024, kept to the end. Here blocks are gone through one by one, and a
map is overwritten by its own norm where only its shortcut is still to be had. The values are those of the other rules.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from rocm_sd.rewrite import resblock
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import is_diffusers, of_diffusers

__all__ = ["RULE", "lets_go"]


def _applies(module: nn.Module) -> bool:
    return hasattr(module, "up_blocks")


def _why_not(module: Any) -> str | None:
    for block in module.up_blocks:
        if not is_diffusers(block, "UpDecoderBlock2D"):
            return f"it has a {type(block).__name__}"
    return None


def lets_go(decoder: Any) -> bool:
    """Whether it goes through its blocks one by one, now: nothing may wait for a block's call, or keep what it gave."""
    if decoder.training or torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:  # noqa: SLF001 -- torch has no public question for it
        return False
    if any("forward" in block.__dict__ for block in decoder.up_blocks):
        return False
    return not any(map(_watched, chain(decoder.mid_block.modules(), decoder.up_blocks.modules())))


def _watched(module: nn.Module) -> bool:
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"]) or "_hf_hook" in own or "_diffusers_hook" in own


def _forward(self: Any, sample: torch.Tensor, latent_embeds: torch.Tensor | None = None) -> Any:
    if latent_embeds is not None or torch.is_grad_enabled() or not lets_go(self):
        return NotImplemented
    # In a list, for a block to take it out: an argument would keep the name that it has here.
    held = [self.mid_block(self.conv_in(sample))]
    for block in self.up_blocks:
        for resnet in block.resnets:
            take = resblock.consume if resblock.consumes(resnet, held[0]) else _called
            held.append(take(resnet, held))
        for upsampler in block.upsamplers or ():
            held.append(upsampler(held.pop()))
    return self.conv_out(self.conv_act(self.conv_norm_out(held.pop())))


def _called(resnet: Any, held: list[torch.Tensor]) -> Any:
    return resnet(held.pop(), None)


RULE = Rule(
    name="vae_decoder",
    summary="each map of the decoder let go of as soon as nobody needs it",
    channels_last=True,
    of_kind=of_diffusers("Decoder"),
    applies=_applies,
    why_not=_why_not,
    forward=_forward,
)
