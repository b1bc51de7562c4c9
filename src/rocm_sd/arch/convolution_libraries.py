"""Which library torch convolves with: the vendors' difference, as a table. torch calls its switches by cuDNN's name."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.arch.gemm_libraries import build_of_torch

__all__ = ["ConvolutionLibrary", "convolution_library"]


@dataclass(frozen=True)
class ConvolutionLibrary:
    """`no_search_because`: why asking it to search can bring nothing, or None if it can."""

    name: str
    no_search_because: str | None = None


_OF_BUILD = {
    "CUDA": ConvolutionLibrary("cuDNN"),
    # ATen's Conv_miopen.cpp looks its findings up by the sizes alone: beside stock, which runs first, stock would be
    # timed twice, and every fortieth time luck would have MIOpen search through all that it has at a user's picture.
    "ROCm": ConvolutionLibrary("MIOpen", "torch keeps what MIOpen found first for a size, with or without a search"),
}


def convolution_library(device_type: str) -> ConvolutionLibrary:
    """Of this build of torch, for tensors on such a device."""
    if device_type != "cuda":
        return ConvolutionLibrary("oneDNN", f"a tensor on {device_type}: there is nothing to search")
    return _OF_BUILD[build_of_torch() or "CUDA"]
