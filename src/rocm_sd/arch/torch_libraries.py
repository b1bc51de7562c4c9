"""Which libraries torch computes with, and what each gets wrong: the vendors' differences, as tables.

torch has one switch for both vendors and calls it by CUDA's names: "cublas" is rocBLAS in a ROCm build, "cublaslt" is
hipBLASLt, and cuDNN's switches are MIOpen's. On ROCm the fused kernels of scaled_dot_product_attention (flash and
memory-efficient alike) are AOTriton's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocm_sd.arch.types import Arch

__all__ = [
    "FUSED_HEADS", "GEMM_LIBRARIES", "ConvolutionLibrary", "FusedHeads", "GemmLibrary", "build_of_torch",
    "convolution_library", "counter_of_nodes", "why_not_fused",
]  # fmt: skip


@dataclass(frozen=True)
class GemmLibrary:
    """For GEMMs. `switch` is torch's word for it; `adds_bias` where its GEMM can add a bias on the way out."""

    name: str
    build: str
    switch: str
    adds_bias: bool


GEMM_LIBRARIES = (
    GemmLibrary("cublas", "CUDA", "cublas", adds_bias=False),
    GemmLibrary("cublaslt", "CUDA", "cublaslt", adds_bias=True),
    GemmLibrary("rocblas", "ROCm", "cublas", adds_bias=False),
    GemmLibrary("hipblaslt", "ROCm", "cublaslt", adds_bias=True),
    GemmLibrary("ck", "ROCm", "ck", adds_bias=False),
)


def build_of_torch() -> str | None:
    """The vendor platform by name, ROCm or CUDA; None of a build for CPUs."""
    import torch  # noqa: PLC0415 -- importing `arch` needs no torch

    if torch.version.hip is not None:
        return "ROCm"
    return "CUDA" if torch.version.cuda is not None else None


_COUNTERS_OF_NODES = {"CUDA": "cudaGraphGetNodes", "ROCm": "hipGraphGetNodes"}


def counter_of_nodes() -> str | None:
    """The function of the vendor's runtime that counts the nodes of a graph; both take the same arguments."""
    return _COUNTERS_OF_NODES.get(build_of_torch() or "")


@dataclass(frozen=True)
class ConvolutionLibrary:
    """`no_search_because`: why a search by it gains nothing, or None if it may gain something."""

    name: str
    no_search_because: str | None = None


_OF_BUILD = {
    "CUDA": ConvolutionLibrary("cuDNN"),
    # ATen's Conv_miopen.cpp looks its findings up by the sizes alone: beside stock, which runs first, stock would be
    # timed twice, and every fortieth time luck would have MIOpen search through all that it has at a user's picture.
    "ROCm": ConvolutionLibrary("MIOpen", "torch keeps what MIOpen found first for a size, with or without a search"),
}


def convolution_library(device_type: str) -> ConvolutionLibrary:
    """The library that this build of torch convolves with, for tensors on such a device."""
    if device_type != "cuda":
        return ConvolutionLibrary("oneDNN", f"a tensor on {device_type}: there is nothing to search")
    return _OF_BUILD[build_of_torch() or "CUDA"]


@dataclass(frozen=True)
class FusedHeads:
    """Heads of at most `largest` columns are right; `reports` are where larger ones were seen to be wrong."""

    largest: int
    reports: str


# By reports, no measurement of ours; the VAE's middle block of Stable Diffusion has a head of 512. gfx1201 was seen to
# be right at 512 (pytorch/pytorch#189849), and CDNA has no report. No entry: nothing is known against it.
FUSED_HEADS: dict[str, FusedHeads] = dict.fromkeys(
    ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151"),
    FusedHeads(256, "pytorch/pytorch#189849, ROCm/TheRock#6561, vllm-project/vllm-omni#7484"),
)


def why_not_fused(arch: Arch, head: int) -> str | None:
    """The reason to keep a head of so many columns from torch's fused attention there, or None."""
    known = FUSED_HEADS.get(arch.name)
    if known is None or head <= known.largest:
        return None
    limit = f"torch's fused attention is wrong above {known.largest} there: {known.reports}"
    return f"heads of {head} on {arch.name} ({limit})"
