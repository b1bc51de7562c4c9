"""The two formats of fp8 with four bits of exponent: weights of one as those of the other, to the bit or not at all.

A byte of float8_e4m3fn is twice the value that it is as float8_e4m3fnuz, but for three: 0x80 is -0 and there no number,
0x7f and 0xff are no numbers and there the largest.
"""

from __future__ import annotations

import torch

__all__ = ["as_other_format"]

_SIGN, _LARGEST = 0x80, 0x7F


def as_other_format(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(weight, scale) whose product is the same; None where there are none.

    To fnuz, always: the same bytes with a scale twice as large. To fn, the same bytes with half of it, unless the
    largest value is among them; then the same values, unless the smallest are, of which fn has every other one only.
    """
    raw = weight.view(torch.uint8)
    if bool(weight.float().isnan().any()):
        return None
    if weight.dtype is torch.float8_e4m3fn:
        return torch.where(raw == _SIGN, 0, raw).view(torch.float8_e4m3fnuz), scale * 2
    if not bool((raw & _LARGEST == _LARGEST).any()):
        return raw.clone().view(torch.float8_e4m3fn), scale / 2
    same = weight.float().to(torch.float8_e4m3fn)
    return (same, scale) if torch.equal(same.float(), weight.float()) else None
