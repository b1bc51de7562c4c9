"""The GEMM libraries of a GPU build of torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from rocm_sd.arch.torch_libraries import GEMM_LIBRARIES, GemmLibrary
from rocm_sd.ops import library_switch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

__all__ = ["GEMM_LIBRARIES", "GemmLibrary", "preferred", "why_not"]

_SWITCH = "preferred_blas_library"


def preferred(library: GemmLibrary) -> AbstractContextManager[None]:
    return library_switch.preferred(_SWITCH, library.switch)


@cache
def _refusal(library: GemmLibrary) -> str | None:
    return library_switch.refusal(_SWITCH, library.switch, library.name)


def why_not(library: GemmLibrary, device: torch.device) -> str | None:
    return library_switch.why_not_built(library.name, library.build, device) or _refusal(library)
