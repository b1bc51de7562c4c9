"""Guidance, a scheduler's update and the scale of the next model input, in one pass over the latents.

Every tensor is dense in one layout, so an item is a run of `inner` values and no index is taken apart. The step's
coefficients are read from the device's memory at a step number that is read there too: a captured graph is replayed
for every step.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rocm_sd.kernels.sizes import ceil_div

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.configs.guided_step import GuidedStepConfig

__all__ = ["launch"]


@triton.jit
def _scale_of(n, guidance, scale, STRIDE: tl.constexpr):
    value = scale
    if guidance is not None:
        value = tl.load(guidance + n * STRIDE).to(tl.float32)
    return value


@triton.jit
def _guided_step(
    prediction, states, noise, table, step, guidance, scale, new_states, model_input, inner, steps,
    STATES: tl.constexpr, GUIDED: tl.constexpr, SCALE_STRIDE: tl.constexpr, HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n, batch = tl.program_id(1), tl.num_programs(1)
    number = tl.load(step).to(tl.int64)
    row = table + tl.minimum(tl.maximum(number, 0), steps - 1) * ((STATES + 1) * (STATES + 2))
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < inner
    # 64-bit only in the scalar bases.
    item = n.to(tl.int64) * inner
    all_items = batch.to(tl.int64) * inner

    e = tl.load(prediction + item + offset, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        conditional = tl.load(prediction + all_items + item + offset, mask=inside, other=0.0).to(tl.float32)
        e += _scale_of(n, guidance, scale, SCALE_STRIDE) * (conditional - e)
    # The host never sees the step, so it cannot refuse one beyond the table; NaN is seen at once.
    e = tl.where((number >= 0) & (number < steps), e, float("nan"))
    if HAS_NOISE:
        z = tl.load(noise + item + offset, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(STATES + 1):
        # States are read again for each output: they are small and near, and Triton 3.6 has no list to keep them in.
        value = tl.load(row + k * (STATES + 2)).to(tl.float32) * e
        if HAS_NOISE:
            value += tl.load(row + k * (STATES + 2) + 1).to(tl.float32) * z
        for j in tl.static_range(STATES):
            state = tl.load(states + j * all_items + item + offset, mask=inside, other=0.0).to(tl.float32)
            value += tl.load(row + k * (STATES + 2) + 2 + j).to(tl.float32) * state
        if k < STATES:
            new = new_states + k * all_items + item + offset
            tl.store(new, value.to(new_states.dtype.element_ty), mask=inside)
        else:
            value = value.to(model_input.dtype.element_ty)
            tl.store(model_input + item + offset, value, mask=inside)
            if GUIDED:
                tl.store(model_input + all_items + item + offset, value, mask=inside)


def launch(
    prediction: torch.Tensor,
    states: torch.Tensor,
    table: torch.Tensor,
    step: torch.Tensor,
    guidance: torch.Tensor | float | None,
    noise: torch.Tensor | None,
    new_states: torch.Tensor,
    model_input: torch.Tensor,
    config: GuidedStepConfig,
) -> None:
    """Fill `new_states` and `model_input`; every image is dense in prediction's layout, the table is contiguous."""
    count, batch = states.shape[:2]
    inner = prod(states.shape[2:])
    scales = None if guidance is None or isinstance(guidance, (int, float)) else guidance
    scale = 1.0 if guidance is None or scales is not None else guidance
    _guided_step[(ceil_div(inner, config.block), batch)](
        prediction, states, noise, table, step, scales, scale, new_states, model_input, inner, table.shape[0],
        STATES=count, GUIDED=guidance is not None, SCALE_STRIDE=0 if scales is None or scales.numel() == 1 else 1,
        HAS_NOISE=noise is not None, BLOCK=config.block, num_warps=config.warps,
    )  # fmt: skip
