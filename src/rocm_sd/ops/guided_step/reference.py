"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

__all__ = ["guided_step"]


def guided_step(
    prediction: torch.Tensor,
    states: torch.Tensor,
    table: torch.Tensor,
    step: torch.Tensor,
    guidance: torch.Tensor | float | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[new_states, model_input] = table[step] @ [e, noise, states], with e = u + guidance * (c - u).

    prediction: [u, c] one after the other, [2B, ...], or e itself, [B, ...], where guidance is None; states:
    [S, B, ...]; table: [steps, S + 1, S + 2]; step: one number; guidance: a number, one or B of them; noise: [B, ...],
    or zeros.
    model_input is doubled where there is guidance. The arithmetic is float32, or float64 where an input is.
    """
    wide = torch.promote_types(torch.promote_types(prediction.dtype, states.dtype), torch.float32)
    e = prediction.to(wide)
    if guidance is not None:
        unconditional, conditional = e.chunk(2)
        scale = torch.as_tensor(guidance, dtype=wide, device=e.device).reshape([-1] + [1] * (e.dim() - 1))
        e = unconditional + scale * (conditional - unconditional)
    other = torch.zeros_like(e) if noise is None else noise.to(wide)
    known = torch.cat([torch.stack([e, other]), states.to(wide)])
    rows = table.to(wide).index_select(0, step.reshape(1))[0]
    new = (rows.reshape(*rows.shape, *[1] * e.dim()) * known).sum(dim=1)
    model_input = new[-1].to(prediction.dtype)
    return new[:-1].to(states.dtype), model_input if guidance is None else torch.cat([model_input, model_input])
