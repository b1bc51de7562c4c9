"""torch's switches between libraries of a GPU build, and why one of them cannot be switched to here.

A switch is global to the process: it is set around one call and put back. It is read on the CPU when a call is made, so
what a graph captured keeps the library that was set then.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rocm_sd.arch.torch_libraries import build_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["preferred", "refusal", "why_not_built"]


@contextmanager
def preferred(switch: str, library: str) -> Iterator[None]:
    """`switch` is a function of torch.backends.cuda, `library` its word for one."""
    choose = getattr(torch.backends.cuda, switch)
    before = choose()
    choose(library)
    try:
        yield
    finally:
        choose(before)


def refusal(switch: str, library: str, title: str) -> str | None:
    """torch refuses a library that it was built without, and quietly takes another where the card has none."""
    with warnings.catch_warnings():
        # What torch has to say, once for each process, is said here, and not in the middle of a picture.
        warnings.simplefilter("ignore")
        try:
            with preferred(switch, library):
                taken = getattr(torch.backends.cuda, switch)()
        except RuntimeError as error:
            return f"torch's refusal of {title}: {str(error).splitlines()[0].rstrip('.')}"
    name = str(taken).rpartition(".")[2].lower()
    return None if name == library else f"{title} on this card: torch takes {name} instead"


def why_not_built(title: str, build: str, device: torch.device) -> str | None:
    here = build_of_torch()
    if here != build:
        return f"{title}, a library of {build}, in a {here or 'CPU'} build of torch"
    return f"a tensor on {device.type}: {title} runs on a GPU" if device.type != "cuda" else None
