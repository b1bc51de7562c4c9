"""Classifier-free guidance, a scheduler's update and the scale of the next model input, in one pass.

It is guidance, a scheduler's update and the scale of the next model input as one linear map whose coefficients are read
on the device: `ops/guided_step/tables.py` writes DDIM, Euler, Euler ancestral, DPM++ 2M, PNDM, UniPC and LCM as such
tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import triton
from rocm_sd.kernels.configs.guided_step import GuidedStepConfig
from rocm_sd.ops.defining import FLOATS, Saved, define
from rocm_sd.ops.definition import UP_TO_FLOAT32, Implementation, where
from rocm_sd.ops.guided_step.workload import TUNING, VERIFICATION
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "guided_step"]

Pair = tuple[torch.Tensor, torch.Tensor]


def guided_step(
    prediction: torch.Tensor,
    states: torch.Tensor,
    table: torch.Tensor,
    step: torch.Tensor,
    guidance: torch.Tensor | float | None = None,
    noise: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[new_states, model_input] = table[step] @ [e, noise, states], with e = u + guidance * (c - u), in float32.

    prediction: [2B, ...], first u for every picture, then c, or [B, ...], e itself, where guidance is None; fp16, bf16,
    fp32 or fp64. states: [S, B, ...], the sample first, then what the scheduler remembers, in a float dtype of their
    own. table: [steps, S + 1, S + 2], fp32 or fp64; row k < S gives new_states[k] and row S the next model input, as
    coefficients of e, of the noise and of each state. step: one int32 or int64, read on the device, which never waits
    for the host; beyond the table, the kernel gives NaN and stock torch fails. guidance: a number, or a tensor with one
    or with B of them. noise: [B, ...], zeros where None.

    new_states is in states' dtype, model_input, doubled where there is guidance, in prediction's; both are contiguous,
    or channels-last image by image where prediction is. What comes in another layout is copied first.
    `implementation` names one and never falls back; without it the tuning data decides.
    """
    if guidance is not None and not isinstance(guidance, torch.Tensor):
        guidance = float(guidance)
    _validate(prediction, states, table, step, guidance, noise)
    return OP.call(prediction, states, table, step, guidance, noise, implementation=implementation)


def _validate(
    prediction: Tensor, states: Tensor, table: Tensor, step: Tensor, guidance: Tensor | float | None, noise: Part
) -> None:
    if states.dim() < 2 or not states.shape[0]:
        raise Unsupported(OP.name, f"states of shape {tuple(states.shape)}: it takes [S, B, ...], the sample first")
    S, B, *image = states.shape
    expected: list[tuple[str, torch.Tensor | None, tuple[int, ...]]] = [
        ("prediction", prediction, (B if guidance is None else 2 * B, *image)),
        ("table", table, (max(table.shape[0], 1) if table.dim() else 1, S + 1, S + 2)),
        ("noise", noise, (B, *image)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            both = f"{name} of shape {tuple(tensor.shape)} with states of shape {tuple(states.shape)}"
            raise Unsupported(OP.name, f"{both}: it takes {shape}")
    if step.numel() != 1 or step.dtype not in {torch.int32, torch.int64}:
        raise Unsupported(OP.name, f"step of shape {tuple(step.shape)} and {step.dtype}: it takes one int32 or int64")
    scales = guidance if isinstance(guidance, torch.Tensor) else None
    if scales is not None and (scales.dim() > 1 or scales.numel() not in {1, B}):
        raise Unsupported(OP.name, f"guidance of shape {tuple(scales.shape)}: it takes one number, or {B}")
    floats = (("prediction", prediction), ("states", states), ("table", table), ("guidance", scales), ("noise", noise))
    for name, tensor in floats:
        if tensor is not None and tensor.dtype not in FLOATS:
            raise Unsupported(OP.name, f"{name} of {tensor.dtype}", hint="Use a floating dtype of 16 to 64 bits.")
    if table.dtype not in {torch.float32, torch.float64}:
        raise Unsupported(OP.name, f"table of {table.dtype}", hint="Use float32.")


def _channels_last(prediction: Tensor) -> bool:
    if prediction.dim() != 4 or prediction.is_contiguous():
        return False
    return prediction.is_contiguous(memory_format=torch.channels_last)


def _allocate(prediction: Tensor, states: Tensor) -> Pair:
    if not _channels_last(prediction):
        return states.new_empty(states.shape), prediction.new_empty(prediction.shape)
    S, B, C, H, W = states.shape
    new_states = states.new_empty((S, B, H, W, C)).permute(0, 1, 4, 2, 3)
    return new_states, torch.empty_like(prediction, memory_format=torch.channels_last)


def _guided(prediction: Tensor, guidance: Tensor | float | None, wide: torch.dtype) -> Tensor:
    if guidance is None:
        return prediction.to(wide)
    unconditional, conditional = prediction.to(wide).chunk(2)
    if isinstance(guidance, float):
        return unconditional.add(conditional - unconditional, alpha=guidance)
    return unconditional + _for_each(guidance.to(wide), prediction) * (conditional - unconditional)


def _for_each(scales: Tensor, images: Tensor) -> Tensor:
    return scales.reshape(-1, *[1] * (images.dim() - 1))


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _stock(
    prediction: Tensor, states: Tensor, table: Tensor, step: Tensor, guidance: Tensor | float | None, noise: Part
) -> Pair:
    wide = _wide(prediction, states)
    new_states, model_input = _allocate(prediction, states)
    rows = table.to(wide).index_select(0, step.reshape(1))[0]
    terms = [(0, _guided(prediction, guidance, wide))]
    terms += [] if noise is None else [(1, noise.to(wide))]
    terms += [(2 + number, state.to(wide)) for number, state in enumerate(states)]
    targets = [*new_states, model_input]
    for row, target in zip(rows, targets, strict=True):
        value = row[0] * terms[0][1]
        for column, term in terms[1:]:
            value = torch.addcmul(value, row[column], term)
        if target is model_input and guidance is not None:
            value = torch.cat([value, value])
        target.copy_(value)
    return new_states, model_input


def _triton(
    prediction: Tensor, states: Tensor, table: Tensor, step: Tensor, guidance: Tensor | float | None, noise: Part, *,
    config: GuidedStepConfig,
) -> Pair:  # fmt: skip
    results = _allocate(prediction, states)
    if prediction.numel():
        last = _channels_last(prediction)
        images = _dense(prediction, last), _dense(states, last)
        guidance = guidance.contiguous() if isinstance(guidance, torch.Tensor) else guidance
        noise = None if noise is None else _dense(noise, last)
        given = (*images, table.contiguous(), step, guidance, noise, *results, config)
        triton.launch_op("guided_step", prediction.device, *given)
    return results


def _dense(images: Tensor, channels_last: bool) -> Tensor:
    """The same values in memory in the order of the layout; what is so already is not copied."""
    return images.movedim(-3, -1).contiguous() if channels_last else images.contiguous()


def _refuse(problem: Problem) -> str | None:
    if problem["state_dtype"] not in UP_TO_FLOAT32:
        return f"dtype {problem['state_dtype']}"
    if int(problem["states"]) > 8:
        return f"{problem['states']} states: above 8 their coefficients outgrow the scalar registers"
    return None


def _backward(saved: Saved, d_states: Tensor, d_input: Tensor) -> Mapping[str, Part]:
    """The transpose of the step's rows, then of the guidance; in float32 or wider."""
    prediction, states, table, step = saved.prediction, saved.states, saved.table, saved.step
    guidance, noise = saved.guidance, saved.noise
    wide = _wide(prediction, states)
    d_last = d_input.to(wide)
    if guidance is not None:
        d_last = torch.add(*d_last.chunk(2))
    d_new = torch.cat([d_states.to(wide), d_last[None]])
    rows = table.to(wide).index_select(0, step.reshape(1))[0]
    d_known = (rows.T.reshape(*rows.T.shape, *[1] * d_last.dim()) * d_new).sum(dim=1)
    d_e = d_known[0]
    d_prediction, d_guidance = d_e, None
    if guidance is not None:
        unconditional, conditional = prediction.to(wide).chunk(2)
        by = _for_each(guidance.to(wide), d_e) if isinstance(guidance, torch.Tensor) else guidance
        d_prediction = torch.cat([d_e * (1 - by), d_e * by])
        if isinstance(guidance, torch.Tensor):
            each = (d_e * (conditional - unconditional)).flatten(1).sum(dim=1)
            d_guidance = (each.sum() if guidance.numel() == 1 else each).reshape(guidance.shape)
    e = _guided(prediction, guidance, wide)
    known = torch.cat([torch.stack([e, torch.zeros_like(e) if noise is None else noise.to(wide)]), states.to(wide)])
    d_rows = (d_new[:, None] * known[None]).flatten(2).sum(dim=2)
    d_table = torch.zeros_like(table).index_copy(0, step.reshape(1).long(), d_rows[None].to(table.dtype))
    return {
        "prediction": d_prediction,
        "states": d_known[2:],
        "table": d_table,
        "guidance": d_guidance,
        "noise": d_known[1],
    }


OP = define(
    guided_step,
    summary="guidance, a linear scheduler's update and the next model input, from a table on the device",
    family="elementwise",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("triton", _triton, where(triton, UP_TO_FLOAT32, _refuse), default=GuidedStepConfig()),
    ),
    allocate=_allocate,
    backward=_backward,
    results=("new_states", "model_input"),
    verification=VERIFICATION,
    tuning=TUNING,
)
