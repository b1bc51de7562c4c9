"""What is asked of a device: how much memory can be had now, what torch says when there was not enough, and whether a
graph is being captured.
"""

from __future__ import annotations

import torch

from rocm_sd.arch import host_memory

__all__ = ["free_memory", "is_capturing", "is_out_of_memory", "release"]


def free_memory(device: torch.device) -> int | None:
    """Bytes that an allocation could have: unused ones, and those that torch's allocator keeps; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return host_memory.free() if device.type == "cpu" else None


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The host's allocator has no error of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def release(device: torch.device) -> None:
    """Give what torch's allocator keeps back to the device, so that it can be cut anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
