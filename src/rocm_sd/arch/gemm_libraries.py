"""Which GEMM libraries a build of torch can have: the vendors' difference, as a table.

torch has one switch for both vendors and calls it by CUDA's names: "cublas" is rocBLAS in a ROCm build, "cublaslt" is
hipBLASLt.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIBRARIES", "Library", "build_of_torch"]


@dataclass(frozen=True)
class Library:
    """`switch` is torch's word for it; `adds_bias` where its GEMM can add a bias on the way out."""

    name: str
    build: str
    switch: str
    adds_bias: bool


LIBRARIES = (
    Library("cublas", "CUDA", "cublas", adds_bias=False),
    Library("cublaslt", "CUDA", "cublaslt", adds_bias=True),
    Library("rocblas", "ROCm", "cublas", adds_bias=False),
    Library("hipblaslt", "ROCm", "cublaslt", adds_bias=True),
    Library("ck", "ROCm", "ck", adds_bias=False),
)


def build_of_torch() -> str | None:
    """The vendor platform by name, ROCm or CUDA; None of a build for CPUs."""
    import torch  # noqa: PLC0415 -- importing `arch` needs no torch

    if torch.version.hip is not None:
        return "ROCm"
    return "CUDA" if torch.version.cuda is not None else None
