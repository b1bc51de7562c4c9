"""The weights of a 3x3 convolution after nearest 2x upsampling, as those of four 2x2 convolutions before it."""

from __future__ import annotations

import torch

__all__ = ["parity_weights"]

# What an output line of even and of odd number sees of the three filter rows, in its two lines of x. Slices: an index
# of numbers would be copied to the device in every call, which a graph cannot capture.
_ROWS = ((slice(0, 1), slice(1, 3)), (slice(0, 2), slice(2, 3)))


def parity_weights(weight: torch.Tensor) -> torch.Tensor:
    """[4, Cout, 2, 2, Cin] of weight [Cout, Cin, 3, 3]; entry 2a + b is for the output pixels (2i + a, 2j + b).

    Summed in float32, or float64 where the weight is, and rounded once to the weight's dtype.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows = [torch.stack([wide[:, :, lines].sum(dim=2) for lines in of_parity], dim=2) for of_parity in _ROWS]
    both = [
        torch.stack([lines[:, :, :, columns].sum(dim=3) for columns in of_parity], dim=3)
        for lines in rows
        for of_parity in _ROWS
    ]
    return torch.stack(both).permute(0, 1, 3, 4, 2).to(weight.dtype).contiguous()
