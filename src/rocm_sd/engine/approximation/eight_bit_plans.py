"""How layers come into 8 bits: the scales of their x and of their weights, what smooths them, and the error then.

x has one scale, which what was observed gives, or in int8 one for each row. A weight in int8 has a scale for each row,
too. In fp8, where each value has an exponent of its own, one scale loses little, and libraries may be quicker with it:
there rows have their own where the architecture multiplies as quickly with them, and in groups that would be too
delicate without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.engine.approximation import smoothing
from rocm_sd.engine.approximation.observing import too_far
from rocm_sd.ops.eight_bits import LIMITS
from rocm_sd.ops.quantize_rows.reference import quantize_rows
from rocm_sd.rewrite.eight_bits import quantized, rounds_x

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rocm_sd.engine.approximation.observing import Observed

__all__ = ["Group", "Planned", "planned", "weights"]

# So large is what came into a layer at most, over what came in while it was observed.
_HEADROOM = 2.0


@dataclass(frozen=True)
class Group:
    """Layers of one input, by their names in the model."""

    names: tuple[str, ...]
    layers: tuple[nn.Linear | nn.Conv2d, ...]

    def named(self) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
        return zip(self.names, self.layers, strict=True)


@dataclass(frozen=True)
class Planned:
    """How a group comes into 8 bits, and its error then: of its results on the rows that were seen, the root mean
    square error over that of the results. `by_row`: whether each row of a weight has its scale.
    """

    x_scale: torch.Tensor | None
    smoothing: torch.Tensor | None
    by_row: bool
    error: float


def planned(
    every: Sequence[Group], seen: Mapping[str, Observed], to: torch.dtype, device: torch.device
) -> list[Planned]:
    """Of each group, by what was seen of the first of its layers. `device`: where they will multiply."""
    rounds = rounds_x(to, device)
    by_row = to is torch.int8 or _is_quick_by_row(device)
    found = [_planned(group, seen[group.names[0]], to, rounds=rounds, by_row=by_row) for group in every]
    if by_row:
        return found
    delicate = too_far({group.names[0]: one.error for group, one in zip(every, found, strict=True)})
    for place, group in enumerate(every):
        if group.names[0] in delicate:
            other = _planned(group, seen[group.names[0]], to, rounds=rounds, by_row=True)
            # Written so that an error that is no number gives way.
            if not other.error >= found[place].error:
                found[place] = other
    return found


def _is_quick_by_row(device: torch.device) -> bool:
    """Of fp8. Where nobody knows, weights have one scale."""
    return bool(arch.detect(device).quick_fp8_by_channel)


@torch.no_grad()
def _planned(group: Group, seen: Observed, to: torch.dtype, *, rounds: bool, by_row: bool) -> Planned:
    """Smoothed where that is worth it. `rounds`: whether x is rounded, too."""
    exact = torch.cat([seen.rows.double() @ layer.weight.detach().flatten(1).double().T for layer in group.layers], -1)
    name = str(to).removeprefix("torch.")
    # Pixels with scales of their own could not be summed over the taps.
    convolves = isinstance(group.layers[0], nn.Conv2d)

    def tried(factors: torch.Tensor | None) -> Planned:
        largest = seen.largest if factors is None else (seen.columns * factors.float()).amax()
        most = max(float(largest) * _HEADROOM / LIMITS[name], 1e-12)
        x_scale = None if to is torch.int8 and not convolves else largest.new_tensor(most)
        rows = seen.rows if factors is None else seen.rows * factors.to(seen.rows.dtype)
        left = rows.double()
        if rounds:
            q, own = quantize_rows(rows, name, None if x_scale is None else x_scale.view(1))
            left = q.double() * (own.double().unsqueeze(-1) if x_scale is None else x_scale.double())
        rounded = weights(group, to, factors, by_row=by_row)
        right = [weight.double() * scale.double().view(-1, *[1] * scale.dim()) for weight, scale in rounded]
        ours = torch.cat([left @ weight.T for weight in right], -1)
        error = (ours - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30)
        return Planned(x_scale, factors, by_row, float(error))

    plain = tried(None)
    if convolves:
        return plain
    factors = smoothing.factors(seen.columns, [layer.weight for layer in group.layers])
    smoothed = plain if factors is None else tried(factors)
    return smoothed if smoothing.worth_it(smoothed.error, plain.error) else plain


def weights(
    group: Group, to: torch.dtype, factors: torch.Tensor | None, *, by_row: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(weight in 8 bits, its scales), flat. Layers with one scale for all share it, and so can be read as one."""
    flat = [layer.weight.flatten(1) for layer in group.layers]
    wide = [weight if factors is None else weight.float() / factors.float() for weight in flat]
    if by_row:
        return [quantized(weight, to, by_row=True) for weight in wide]
    q, scale = quantized(torch.cat(wide), to, by_row=False)
    parts = torch.split(q.view(torch.int8), [len(weight) for weight in flat])
    return [(part.view(to), scale) for part in parts]
