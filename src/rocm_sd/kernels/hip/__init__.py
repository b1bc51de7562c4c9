"""HIP kernels: C++ headers in `include`, one source file an op in `sources`, one Python launcher an op beside them.

A launcher decides on the CPU what is compiled (`Kernel`: entry point and template parameters) and with which grid and
arguments it runs, and hands both to a `Launcher`: a card's runtime, or the proof ladder's emulator. Ask
`why_not(device)` first; importing this package needs no torch.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from rocm_sd.kernels.hip.launch import Argument, Kernel, Launcher

__all__ = ["launch_op", "launched_by", "launcher_for", "only_loading", "why_not", "with_sources"]

_instead: list[Launcher] = []
_sources: ContextVar[Mapping[str, Path] | None] = ContextVar("HIP sources in place of this project's")


@contextmanager
def launched_by(launcher: Launcher) -> Iterator[None]:
    """Within, HIP kernels run there and nowhere else, wherever the tensors are: how the proof ladder runs them."""
    _instead.append(launcher)
    try:
        yield
    finally:
        _instead.pop()


@contextmanager
def only_loading(device: torch.device) -> Iterator[None]:
    """Within, HIP kernels are compiled and loaded for the device, and none of them runs."""
    with launched_by(_Loading(launcher_for(device))):
        yield


@contextmanager
def with_sources(sources: Mapping[str, Path]) -> Iterator[None]:
    """Within, in this thread, kernels of these sources come from other files: accepted ones, or such as are tried."""
    token = _sources.set({**(_sources.get(None) or {}), **sources})
    try:
        yield
    finally:
        _sources.reset(token)


class _Replacing:
    """Hands on launches, of kernels from other files."""

    def __init__(self, launcher: Launcher, sources: Mapping[str, Path]) -> None:
        self.arch, self._launcher, self._sources = launcher.arch, launcher, sources

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        self._launcher.launch(self._of_file(kernel), grid, arguments)

    def load(self, kernel: Kernel) -> None:
        self._launcher.load(self._of_file(kernel))  # type: ignore[attr-defined]  # of a card's runtime

    def _of_file(self, kernel: Kernel) -> Kernel:
        file = self._sources.get(str(kernel.source))
        return kernel if file is None else replace(kernel, source=file)


class _Loading:
    def __init__(self, launcher: Any) -> None:
        self.arch, self._load = launcher.arch, launcher.load

    def launch(self, kernel: Kernel, _grid: tuple[int, int, int], _arguments: Sequence[Argument]) -> None:
        self._load(kernel)


def launch_op(op: str, device: torch.device, *arguments: Any) -> None:
    """Call the launcher of an op, whose module is imported at its first use, with what runs kernels on the device."""
    import_module(f"{__name__}.{op}").launch(*arguments, launcher_for(device))


def launcher_for(device: torch.device) -> Launcher:
    """One for each device, with the modules that are loaded there."""
    if _instead:
        found = _instead[-1]
    else:
        from rocm_sd.kernels.hip import runtime  # noqa: PLC0415 -- needs torch

        found = runtime.launcher_for(device)
    sources = _sources.get(None)
    return _Replacing(found, sources) if sources else found


def why_not(device: torch.device) -> str | None:
    """The reason that HIP kernels cannot run on this device, or None if they can."""
    if _instead:
        return None
    if device.type != "cuda":
        return f"HIP has no code for a tensor on {device.type}"
    from rocm_sd.kernels.hip import runtime  # noqa: PLC0415 -- as above

    return runtime.why_not(device)
