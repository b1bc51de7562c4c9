"""The libraries of flash attention in a ROCm build of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from rocm_sd.ops import library_switch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["LIBRARIES", "AttentionLibrary", "preferred", "why_not"]

_SWITCH = "preferred_rocm_fa_library"


@dataclass(frozen=True)
class AttentionLibrary:
    """`switch` is torch's word for it, `title` its own name."""

    name: str
    switch: str
    title: str


LIBRARIES = (
    AttentionLibrary("sdpa_aotriton", "aotriton", "AOTriton"),
    AttentionLibrary("sdpa_ck", "ck", "Composable Kernel"),
)


def preferred(library: AttentionLibrary) -> AbstractContextManager[None]:
    return library_switch.preferred(_SWITCH, library.switch)


@cache
def _refusal(library: AttentionLibrary) -> str | None:
    # An older torch has no switch; a newer one may be built without Composable Kernel, and says so.
    if not hasattr(torch.backends.cuda, _SWITCH):
        return f"{library.title}: torch {torch.__version__} has no switch between libraries of attention"
    has_ck = getattr(torch.backends.cuda, "is_ck_sdpa_available", None)
    if library.switch == "ck" and has_ck is not None and not has_ck():
        return f"{library.title}: this torch was built without its attention"
    return library_switch.refusal(_SWITCH, library.switch, library.title)


def why_not(library: AttentionLibrary, device: torch.device) -> str | None:
    return library_switch.why_not_built(library.title, "ROCm", device) or _refusal(library)
