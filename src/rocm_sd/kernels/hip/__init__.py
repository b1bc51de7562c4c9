"""HIP kernels: C++ headers in `include`, one source file an op in `sources`, one Python launcher an op beside them.

A launcher decides on the CPU what is compiled (`Kernel`: entry point and template parameters) and with which grid and
arguments it runs, and hands both to a `Launcher`: a card's runtime, or the proof ladder's emulator. Ask
`why_not(device)` first; importing this package needs no torch.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from rocm_sd.kernels.hip.launch import Argument, Kernel, Launcher

__all__ = ["launch_op", "launched_by", "launcher_for", "only_loading", "why_not"]

_instead: list[Launcher] = []


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
        return _instead[-1]
    from rocm_sd.kernels.hip import runtime  # noqa: PLC0415 -- needs torch

    return runtime.launcher_for(device)


def why_not(device: torch.device) -> str | None:
    """The reason that HIP kernels cannot run on this device, or None if they can."""
    if _instead:
        return None
    if device.type != "cuda":
        return f"HIP has no code for a tensor on {device.type}"
    from rocm_sd.kernels.hip import runtime  # noqa: PLC0415 -- as above

    return runtime.why_not(device)
