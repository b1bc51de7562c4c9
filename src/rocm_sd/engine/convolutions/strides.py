"""Does the library answer a channels-last convolution in that layout, or does torch copy there and back around it?

torch asks MIOpen for channels-last only where `PYTORCH_MIOPEN_SUGGEST_NHWC` is set (ATen/native/ConvUtils.h), and
without a library its own convolution answers contiguous: input, weight and result are copied at each call then. One
small convolution shows it, whoever made the card and whatever the versions are.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from rocm_sd import arch

__all__ = ["answers_channels_last"]

# As many channels as the smallest vectors of a library need; the layout does not depend on the size.
_CHANNELS, _SIDE = 64, 8
# Weights of other dtypes are turned to one of these before they are convolved with.
_CONVOLVED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def answers_channels_last(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether `F.conv2d` leaves a channels-last input of this dtype in its layout there; asked once a process."""
    if arch.emulated() is not None:
        return False  # as torch of ROCm does by default; the CPU, which convolves in its place, would say otherwise
    if dtype not in _CONVOLVED:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
    # Hosts switch the library off on some cards, and torch's own convolution has another layout.
    return _answers(device, dtype, bool(torch.backends.cudnn.enabled))


@cache
def _answers(device: torch.device, dtype: torch.dtype, _library: bool) -> bool:
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            x, weight = (
                torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
                for shape in ((1, _CHANNELS, _SIDE, _SIDE), (_CHANNELS, _CHANNELS, 3, 3))
            )
            return F.conv2d(x, weight, padding=1).is_contiguous(memory_format=torch.channels_last)
    except RuntimeError:
        # A library that cannot convolve so is no reason to choose the layout; the model will meet the error itself.
        return False
