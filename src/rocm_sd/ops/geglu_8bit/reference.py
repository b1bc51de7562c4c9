"""The definition, in plain torch: every implementation is measured against it."""

from __future__ import annotations

import torch

from rocm_sd.ops.geglu import reference
from rocm_sd.ops.quantize_rows.reference import quantize_rows

__all__ = ["geglu_8bit"]


def geglu_8bit(x: torch.Tensor, to: str = "int8") -> tuple[torch.Tensor, torch.Tensor]:
    """q * scales = x[..., :F] * gelu(x[..., F:]) in 8 bits; x: [..., 2F]; q: [..., F]; scales: [...].

    As `geglu` and then `quantize_rows`, but that nothing is rounded between them.
    """
    return quantize_rows(reference.geglu(x.to(torch.promote_types(x.dtype, torch.float32))), to)
