"""Device code in Triton: one file per op, a kernel body and its launcher; the config is passed in.

Importing this package needs no Triton; importing one of its modules does. Ask `why_not(device)` first.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rocm_sd import arch, settings
from rocm_sd.kernels.unavailable import KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType

    import torch

__all__ = [
    "CompilerCrashed",
    "CompilerFailed",
    "bind_op",
    "launch_op",
    "launched_by",
    "launching",
    "sentence",
    "skips_launches",
    "why_not",
    "why_not_compiled",
]

log = logging.getLogger("rocm_sd")

# Of errors that are plain RuntimeErrors, what tells a compiler's from a card's: of the latter nothing may be hidden.
_OF_COMPILER = ("PassManager", "C compiler", "failed to translate", "LLVM ERROR")

_said: set[str] = set()
_instead: ContextVar[Mapping[str, ModuleType] | None] = ContextVar("kernel modules in place of this project's")


class CompilerFailed(KernelUnavailable):
    """A compiler refused a variant, here or in the process that compiles ahead."""


class CompilerCrashed(CompilerFailed):
    """A compiler took its process with it."""

    crashed = True


def why_not(device: torch.device) -> str | None:
    """The reason that Triton kernels cannot run on this device, or None if they can."""
    if device.type == "cuda":
        return why_not_compiled(device) or _why_not_driven()
    if arch.computes_on_gpu(device):
        return why_not_compiled(device)
    if not settings.current().triton_interpret:
        return f"Triton has no code for a tensor on {device.type}"
    return _why_not_imported()


def why_not_compiled(device: torch.device) -> str | None:
    """The reason that Triton cannot compile for this GPU, or None if it may; its driver is not asked, nor built."""
    # Before Triton is tried: a compiler that does not know the architecture prints pages, or ends the process.
    known = arch.detect(device)
    if known.triton_supported is False:
        return f"Triton does not compile for {known.name} ({known.source('triton_supported')})"
    return _why_not_imported()


@cache
def _why_not_imported() -> str | None:
    """A broken package is one warning, and stops nothing."""
    try:
        if find_spec("triton") is None:
            return "Triton is not installed"
        import_module("triton.language")
        import_module("triton.runtime.driver")
    except Exception as error:  # noqa: BLE001 -- whatever a broken package raises, stock torch runs
        return _broken(f"Triton cannot be imported ({sentence(error)})")
    return None


@cache
def _why_not_driven() -> str | None:
    try:
        import_module("triton.runtime.driver").driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001 -- no driver, no C compiler to build its part in C, another vendor's build
        return _broken(f"Triton cannot use the GPU ({sentence(error)})")
    return None


def _broken(reason: str) -> str:
    log.warning("%s. rocm-sd uses stock torch in its place; to find out more, type: rocm-sd doctor", reason)
    _said.add(reason)
    return reason


def is_said(reason: str) -> bool:
    """Whether the user has heard of this reason, which is one for all ops."""
    return reason in _said


def sentence(error: BaseException) -> str:
    """Its name and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


@contextmanager
def launched_by(op: str, module: ModuleType) -> Iterator[None]:
    """Within, in this thread, the op's kernels are those of that module: of one that was accepted, or is tried out."""
    token = _instead.set({**(_instead.get(None) or {}), op: module})
    try:
        yield
    finally:
        _instead.reset(token)


def _module(op: str) -> ModuleType:
    """Imported at its first use: it needs Triton."""
    instead = _instead.get(None)
    return instead[op] if instead and op in instead else import_module(f"{__name__}.{op}")


def launch_op(op: str, _device: torch.device, *arguments: Any) -> None:
    """Call the launcher of an op."""
    try:
        _module(op).launch(*arguments)
    except Exception as error:
        if not _is_of_compiler(error):
            raise
        raise CompilerFailed(f"its compiler failed ({sentence(error)}).") from error


def _is_of_compiler(error: Exception) -> bool:
    """What was raised before anything was launched; Triton's interpreter raises as the kernel's own fault."""
    if isinstance(error, KernelUnavailable) or settings.current().triton_interpret:
        return False
    return type(error).__module__.startswith("triton.") or any(part in str(error) for part in _OF_COMPILER)


def bind_op(op: str, *arguments: Any, bind: str = "bind") -> Callable[..., None] | None:
    """An op's launch for tensors that lie as these, to be made again and again; None where that would cost no less.

    `bind` is the function of the op's module that binds it.
    """
    module = _module(op)
    if not import_module(f"{__name__}.bound").binds(module):
        return None
    bound: Callable[..., None] = getattr(module, bind)(*arguments)
    return bound


def skips_launches() -> bool:
    """Whether launches of this thread are only noted, to be compiled: then results are garbage (precompile.py)."""
    noting = sys.modules.get(f"{__name__}.precompile")
    return noting is not None and bool(noting.skips_launches())


def launching() -> AbstractContextManager[None]:
    """Launches of this thread are made within, whoever notes them around it."""
    noting = sys.modules.get(f"{__name__}.precompile")
    made: AbstractContextManager[None] = nullcontext() if noting is None else noting.launching()
    return made
