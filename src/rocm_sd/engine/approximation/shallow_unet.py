"""A UNet's forward that hands out what its deep layers made, or takes it from an earlier step.

A UNet goes down in items that each leave a skip connection, and up in as many that each take one, last left first
taken. What comes into the last `depth` items of the way up is all that they need of the deeper layers: a shallow pass
computes the first `depth` skip connections and these items. A whole pass gives the bits of the UNet's own forward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.rewrite import up_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

__all__ = ["deepest", "run", "used", "why_not", "why_not_call"]

_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D")
# What no shallow pass knows what to do with.
_UNKNOWN = ("class_labels", "attention_mask", "encoder_attention_mask", "down_intrablock_additional_residuals")


def deepest(unet: Any) -> int:
    """How many items of the way up there are, but for the first one: with it, nothing would be left out."""
    return sum(len(block.resnets) for block in unet.up_blocks) - 1


def why_not(unet: Any, depth: int) -> str | None:
    """Why the UNet has no shallow pass of that depth, in words."""
    kinds = [*(type(block).__name__ for block in unet.down_blocks), *(type(block).__name__ for block in unet.up_blocks)]
    unknown = sorted({kind for kind in kinds if kind not in (*_DOWN, *_UP)})
    if unknown:
        return f"it has a {unknown[0]}"
    if unet.config.addition_embed_type == "image_hint" or unet.class_embedding is not None:
        return "it has an embedding of another kind"
    if any(getattr(block, name, None) for block in unet.up_blocks for name in ("s1", "s2", "b1", "b2")):
        return "FreeU changes what its blocks join"
    return f"it has {deepest(unet)} layers to leave out" if depth > deepest(unet) else None


def why_not_call(named: Mapping[str, Any]) -> str | None:
    given = next((name for name in _UNKNOWN if named.get(name) is not None), None)
    if given is not None:
        return f"it is given {given}"
    attention = named.get("cross_attention_kwargs") or {}
    if attention.get("gligen") is not None:
        return "it is given boxes (GLIGEN)"
    # It is put on a LoRA's layers by the forward itself.
    if attention.get("scale", 1) != 1:
        return "it is given a scale among its cross_attention_kwargs"
    of_a_controlnet = (named.get("mid_block_additional_residual"), named.get("down_block_additional_residuals"))
    if sum(given is not None for given in of_a_controlnet) == 1:
        return "it is given the states of an adapter"
    return None


def run(
    unet: Any, depth: int, features: torch.Tensor | None, named: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The UNet's answer, and what came into the last `depth` items of the way up: `features`, where given."""
    sample, text, attention = named["sample"], named["encoder_hidden_states"], named["cross_attention_kwargs"]
    added = named["added_cond_kwargs"]
    uneven = any(side % 2**unet.num_upsamplers for side in sample.shape[-2:])
    if unet.config.center_input_sample:
        sample = 2 * sample - 1.0
    emb = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=named["timestep"]), named["timestep_cond"])
    more = unet.get_aug_embed(emb=emb, encoder_hidden_states=text, added_cond_kwargs=added)
    emb = emb if more is None else emb + more
    emb = emb if unet.time_embed_act is None else unet.time_embed_act(emb)
    text = unet.process_encoder_hidden_states(encoder_hidden_states=text, added_cond_kwargs=added)
    sees = {"encoder_hidden_states": text, "cross_attention_kwargs": attention}
    hidden = unet.conv_in(sample)
    skips = [hidden]
    count = depth if features is not None else deepest(unet) + 1
    for item in _down_items(unet, emb, sees):
        if len(skips) == count:
            break
        hidden = item(hidden)
        skips.append(hidden)
    residuals = named["down_block_additional_residuals"]
    if residuals is not None:
        skips = [skip + residual for skip, residual in zip(skips, residuals, strict=features is None)]
    residual = named["mid_block_additional_residual"]
    hidden = _middle(unet, hidden, emb, sees, residual) if features is None else features
    kept = features
    for left, item in enumerate(_up_items(unet, emb, sees, skips, uneven=uneven)):
        remaining = deepest(unet) + 1 - left
        if features is not None and remaining > depth:
            continue
        if remaining == depth:
            kept = hidden
        hidden = item(hidden)
    assert kept is not None
    if unet.conv_norm_out:
        hidden = unet.conv_act(unet.conv_norm_out(hidden))
    return unet.conv_out(hidden), kept


def used(unet: Any, depth: int) -> list[nn.Module]:
    """The parts that a shallow pass runs: what changes in others is for whole passes to notice."""
    down: list[list[nn.Module]] = []
    for block in unet.down_blocks:
        attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
        down += [[part for part in pair if part is not None] for pair in zip(block.resnets, attentions, strict=True)]
        down += [] if block.downsamplers is None else [list(block.downsamplers)]
    up: list[list[nn.Module]] = []
    before: list[nn.Module] = []
    for block in unet.up_blocks:
        attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
        for pair in zip(block.resnets, attentions, strict=True):
            up.append([*before, *(part for part in pair if part is not None)])
            before = []
        before = [] if block.upsamplers is None else list(block.upsamplers)
    ends = [part for name, part in unet.named_children() if name not in {"down_blocks", "mid_block", "up_blocks"}]
    return [*ends, *(part for item in (*down[: depth - 1], *up[len(up) - depth :]) for part in item)]


def _down_items(unet: Any, emb: torch.Tensor, sees: dict[str, Any]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    for block in unet.down_blocks:
        attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
        for resnet, attention in zip(block.resnets, attentions, strict=True):
            yield partial(_down_layer, resnet, attention, emb, sees)
        if block.downsamplers is not None:
            yield partial(_downsampled, block)


def _down_layer(resnet: Any, attention: Any, emb: torch.Tensor, sees: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return _attended(attention, resnet(x, emb), sees)


def _downsampled(block: Any, x: torch.Tensor) -> torch.Tensor:
    for downsampler in block.downsamplers:
        x = downsampler(x)
    return x


def _attended(attention: Any, x: torch.Tensor, sees: dict[str, Any]) -> torch.Tensor:
    if attention is None:
        return x
    attended: torch.Tensor = attention(x, **sees, attention_mask=None, encoder_attention_mask=None, return_dict=False)[
        0
    ]
    return attended


def _middle(unet: Any, x: torch.Tensor, emb: torch.Tensor, sees: dict[str, Any], residual: Any) -> torch.Tensor:
    block = unet.mid_block
    if block is not None:
        masks = {"attention_mask": None, "encoder_attention_mask": None}
        x = block(x, emb, **sees, **masks) if getattr(block, "has_cross_attention", False) else block(x, emb)
    return x if residual is None else x + residual


def _up_items(
    unet: Any, emb: torch.Tensor, sees: dict[str, Any], skips: list[torch.Tensor], *, uneven: bool
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """The first of a block after the first one begins with the upsampling of the block before."""
    taken = list(skips)
    upsample: Any = None
    blocks = list(unet.up_blocks)
    total = sum(len(block.resnets) for block in blocks)
    for block in blocks:
        attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
        join = up_block.joined if up_block.RULE.works_alone(block) else _concatenated
        for resnet, attention in zip(block.resnets, attentions, strict=True):
            skip = taken.pop() if len(taken) == total else None
            total -= 1
            yield _up_item(join, resnet, attention, skip, upsample, emb, sees)
            upsample = None
        if block.upsamplers is not None:
            # The size is known where the skip is there.
            size = taken[-1].shape[2:] if uneven and len(taken) == total and taken else None
            upsample = partial(_upsampled, block, size)


def _upsampled(block: Any, size: Any, x: torch.Tensor) -> torch.Tensor:
    for upsampler in block.upsamplers:
        x = upsampler(x, size)
    return x


def _concatenated(resnet: Any, x: torch.Tensor, skip: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = resnet(torch.cat((x, skip), 1), emb)
    return made


def _up_item(
    join: Any, resnet: Any, attention: Any, skip: torch.Tensor | None, upsample: Any, emb: torch.Tensor, sees: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    def item(x: torch.Tensor) -> torch.Tensor:
        assert skip is not None
        x = x if upsample is None else upsample(x)
        return _attended(attention, join(resnet, x, skip, emb), sees)

    return item
