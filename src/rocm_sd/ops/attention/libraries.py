"""The libraries of flash attention in a ROCm build of torch: the switch between them, and why one is not to be had.

The switch is global to the process: it is set around one call and put back. It is read on the CPU when a call is made,
so what a graph captured keeps the library that was set then.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from rocm_sd.arch.torch_libraries import build_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LIBRARIES", "Library", "preferred", "why_not"]


@dataclass(frozen=True)
class Library:
    """`switch` is torch's word for it, `title` its own name."""

    name: str
    switch: str
    title: str


LIBRARIES = (
    Library("sdpa_aotriton", "aotriton", "AOTriton"),
    Library("sdpa_ck", "ck", "Composable Kernel"),
)


@contextmanager
def preferred(library: Library) -> Iterator[None]:
    before = torch.backends.cuda.preferred_rocm_fa_library()
    torch.backends.cuda.preferred_rocm_fa_library(library.switch)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_rocm_fa_library(before)


@cache
def _refusal(library: Library) -> str | None:
    """torch refuses a library that it was built without, or quietly stays with another where the card has none."""
    # An older torch has no switch; a newer one may be built without Composable Kernel, and says so.
    if not hasattr(torch.backends.cuda, "preferred_rocm_fa_library"):
        return f"{library.title}: torch {torch.__version__} has no switch between libraries of attention"
    has_ck = getattr(torch.backends.cuda, "is_ck_sdpa_available", None)
    if library.switch == "ck" and has_ck is not None and not has_ck():
        return f"{library.title}: this torch was built without its attention"
    with warnings.catch_warnings():
        # What torch has to say about the card is said here in one sentence, and not in the middle of a picture.
        warnings.simplefilter("ignore")
        try:
            with preferred(library):
                taken = torch.backends.cuda.preferred_rocm_fa_library()
        except RuntimeError as error:
            return f"torch's refusal of {library.title}: {str(error).splitlines()[0].rstrip('.')}"
    name = str(taken).rpartition(".")[2].lower()
    if name != library.switch:
        return f"{library.title} on this card: torch takes {name} instead"
    return None


def why_not(library: Library, device: torch.device) -> str | None:
    build = build_of_torch()
    if build != "ROCm":
        return f"{library.title}, a library of ROCm, in a {build or 'CPU'} build of torch"
    if device.type != "cuda":
        return f"a tensor on {device.type}: {library.title} runs on a GPU"
    return _refusal(library)
