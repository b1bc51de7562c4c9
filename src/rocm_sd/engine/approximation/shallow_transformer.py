"""The forward of SD3's and Flux's transformers in three parts, so that a step can leave out most of the blocks.

The head embeds what is given and computes the first `depth` blocks, the rest the other blocks, the tail what comes
after them. A shallow pass takes what the rest has added to the picture's tokens from an earlier step; text tokens end
with the last block, so that nothing of them is kept. Flux's blocks are counted through, those of two streams first. The
parts one after the other give the bits of the model's own forward.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine.capture import why_foreign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = [
    "PARTS", "after_head", "changed_by", "controlled", "head", "is_known", "rest", "run", "tail", "used", "why_not",
    "why_not_call", "why_not_inside",
]  # fmt: skip

_SD3, _FLUX = "SD3Transformer2DModel", "FluxTransformer2DModel"
_BLOCKS = {_SD3: ("JointTransformerBlock",), _FLUX: ("FluxTransformerBlock", "FluxSingleTransformerBlock")}
_OF_ALL = {
    "hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "joint_attention_kwargs", "return_dict",
}  # fmt: skip
# What a ControlNet adds is added where stock adds it: after the blocks that a pass computes.
_CONTROLS = {
    _SD3: ("block_controlnet_hidden_states",),
    _FLUX: ("controlnet_block_samples", "controlnet_single_block_samples"),
}
_ARGUMENTS = {
    _SD3: _OF_ALL | {*_CONTROLS[_SD3]},
    _FLUX: _OF_ALL | {*_CONTROLS[_FLUX], "img_ids", "txt_ids", "guidance", "controlnet_blocks_repeat"},
}
# The largest value of float16, at which Flux's own blocks clip.
_LARGEST = 65504

# Tokens of the picture, tokens of the text, the embedding of the time, and Flux's two tables of a rotation.
State = tuple[torch.Tensor, ...]


def is_known(model: Any) -> bool:
    return type(model).__name__ in _BLOCKS


def _blocks(model: Any) -> list[Any]:
    return [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]


def why_not(model: Any, depth: int) -> str | None:
    """Why the transformer has no pass that computes the first `depth` blocks alone, in words."""
    if getattr(model, "is_cache_enabled", False):
        return "another cache is enabled on it"
    if model.gradient_checkpointing:
        return "it has gradient checkpointing"
    blocks = _blocks(model)
    for block in blocks:
        kind: Any = type(block)
        if kind.__name__ not in _BLOCKS[type(model).__name__] or not kind.__module__.startswith("diffusers."):
            return f"it has a {kind.__name__} of {kind.__module__}"
    if depth >= len(blocks):
        return f"it has {len(blocks)} blocks, and a shallow step would compute {depth}"
    return None


def why_not_inside(model: Any) -> str | None:
    """The same of all that is inside of it. To look at each module takes a millisecond: it is for once a run."""
    # In groups weights are brought in by the layers before, in the order of a whole pass.
    grouped = any(
        "group_offloading" in getattr(vars(part).get("_diffusers_hook"), "hooks", ()) for part in model.modules()
    )
    return "its layers are offloaded in groups" if grouped else why_foreign(model)


def why_not_call(model: Any, named: Mapping[str, Any]) -> str | None:
    known = _ARGUMENTS[type(model).__name__]
    given = next((name for name in named if name not in known and named[name] is not None), None)
    if given is not None:
        return f"it is given {given}"
    # A scale is put on a LoRA's layers by the forward itself; an IP-Adapter's pictures come this way, too.
    attention = named["joint_attention_kwargs"] or {}
    told = next((name for name in attention if name != "scale" or attention[name] != 1), None)
    if told is not None:
        return f"it is given {told} among its joint_attention_kwargs"
    tensors = ["encoder_hidden_states", "pooled_projections", *(["img_ids", "txt_ids"] if _is_flux(model) else [])]
    missing = next((name for name in tensors if not isinstance(named[name], torch.Tensor)), None)
    if missing is not None:
        return f"it is given no {missing}"
    if _is_flux(model) and (named["img_ids"].dim() != 2 or named["txt_ids"].dim() != 2):
        return "it is given positions for each sample"
    return None


def controlled(model: Any, named: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether ControlNets say something in a call; what was kept of one in which they did not is of another kind."""
    return tuple(named[name] is not None for name in _CONTROLS[type(model).__name__])


def after_head(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call's arguments those that the parts after the head read."""
    names = {"hidden_states", *_CONTROLS[type(model).__name__], "controlnet_blocks_repeat"}
    return {name: value for name, value in named.items() if name in names}


def head(model: Any, depth: int, named: Mapping[str, Any]) -> tuple[State, torch.Tensor]:
    """What is known after the first `depth` blocks, and what they have added to the picture's tokens."""
    embedded = _embedded(model, named)
    state = _through(model, embedded, 0, depth, named)
    return state, state[0] - embedded[0]


def rest(model: Any, depth: int, state: State, named: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's answer, and what the blocks after the first `depth` have added to the picture's tokens."""
    last = _through(model, state, depth, None, named)[0]
    return _answer(model, last, state[2], named), _clipped(model, last - state[0])


def tail(model: Any, state: State, features: torch.Tensor, named: Mapping[str, Any]) -> tuple[torch.Tensor]:
    """The answer where the other blocks add `features`."""
    return (_answer(model, _clipped(model, state[0] + features), state[2], named),)


PARTS = {"head": head, "rest": rest, "tail": tail}


def run(
    model: Any, depth: int, features: torch.Tensor | None, named: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer, and what the blocks after the first `depth` add to the picture's tokens: `features`, where given."""
    state = _through(model, _embedded(model, named), 0, depth, named)
    if features is None:
        return rest(model, depth, state, named)
    return tail(model, state, features, named)[0], features


def used(model: Any, given: tuple[Any, ...]) -> list[nn.Module]:
    """The modules that a part runs, or a shallow pass: what changes in others is for other calls to notice. `given`: as
    a branch is asked for, a part's name or the depth of a shallow pass first.
    """
    ends = dict(model.named_children())
    for name in ("transformer_blocks", "single_transformer_blocks"):
        ends.pop(name, None)
    after, blocks = [ends.pop("norm_out"), ends.pop("proj_out")], _blocks(model)
    if given[0] == "tail":
        return after
    if given[0] == "rest":
        return [*blocks[given[1] :], *after]
    if given[0] == "head":
        return [*ends.values(), *blocks[: given[1]]]
    return [*ends.values(), *blocks[: given[0]], *after]


def changed_by(now: torch.Tensor, before: torch.Tensor) -> float:
    """mean |now - before| / mean |before|, of all samples together; NaN where there is nothing to compare with.

    The host waits for the device here: once a step.
    """
    wide = torch.promote_types(now.dtype, torch.float32)
    return float((now - before).abs().mean(dtype=wide) / before.abs().mean(dtype=wide))


def _is_flux(model: Any) -> bool:
    return type(model).__name__ == _FLUX


def _embedded(model: Any, named: Mapping[str, Any]) -> State:
    timestep, pooled = named["timestep"], named["pooled_projections"]
    if not _is_flux(model):
        x = model.pos_embed(named["hidden_states"]).contiguous()
        temb = model.time_text_embed(timestep, pooled)
        return x, model.context_embedder(named["encoder_hidden_states"]), temb
    x = model.x_embedder(named["hidden_states"])
    times = [timestep.to(x.dtype) * 1000]
    if named["guidance"] is not None:
        times.append(named["guidance"].to(x.dtype) * 1000)
    temb = model.time_text_embed(*times, pooled)
    text = model.context_embedder(named["encoder_hidden_states"])
    cos, sin = model.pos_embed(torch.cat((named["txt_ids"], named["img_ids"]), dim=0))
    return x, text, temb, cos, sin


def _through(model: Any, state: State, first: int, last: int | None, named: Mapping[str, Any]) -> State:
    """What is known after the blocks from `first` to before `last`."""
    x, text, temb, *rotary = state
    more: dict[str, Any] = {"image_rotary_emb": tuple(rotary)} if rotary else {}
    for number, block in enumerate(_blocks(model)[first:last], first):
        text, x = block(hidden_states=x, encoder_hidden_states=text, temb=temb, **more)
        control = _control(model, block, number, named)
        x = x if control is None else x + control
    return x, text, temb, *rotary


def _control(model: Any, block: Any, number: int, named: Mapping[str, Any]) -> torch.Tensor | None:
    """What a ControlNet adds after the block of that number."""
    double, samples, found = len(model.transformer_blocks), None, 0
    if not _is_flux(model):
        samples = named["block_controlnet_hidden_states"] if block.context_pre_only is False else None
        found = 0 if samples is None else int(number / (double / len(samples)))
    elif number < double:
        samples = named["controlnet_block_samples"]
        if samples is not None and named["controlnet_blocks_repeat"]:
            found = number % len(samples)
        elif samples is not None:
            found = number // math.ceil(double / len(samples))
    else:
        samples, number = named["controlnet_single_block_samples"], number - double
        if samples is not None:
            found = number // math.ceil(len(model.single_transformer_blocks) / len(samples))
    return None if samples is None else samples[found]


def _answer(model: Any, x: torch.Tensor, temb: torch.Tensor, named: Mapping[str, Any]) -> torch.Tensor:
    x = model.proj_out(model.norm_out(x, temb))
    if _is_flux(model):
        return x
    side, channels = model.config.patch_size, model.out_channels
    height, width = (length // side for length in named["hidden_states"].shape[-2:])
    x = x.reshape(x.shape[0], height, width, side, side, channels)
    return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], channels, height * side, width * side)


def _clipped(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.clip(-_LARGEST, _LARGEST) if _is_flux(model) and x.dtype == torch.float16 else x
