"""What stands in for a GPU that is not there: another launch for a module's kernels, and the facts of a product."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from rocm_sd.arch import Arch

    # The kernel, the grid, positional and named arguments.
    Launch = Callable[[Any, Any, tuple[Any, ...], Mapping[str, Any]], None]

__all__ = ["ModuleKernels", "facts_of"]


class _StandIn:
    """Stands where a triton.jit function stood: `kernel[grid](...)` goes to `launch`."""

    def __init__(self, kernel: Any, launch: Launch) -> None:
        self._kernel, self._launch = kernel, launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *positional, **named: self._launch(self._kernel, grid, positional, named)


class ModuleKernels:
    """The functions of `kind` in a module, by name."""

    def __init__(self, module: str | ModuleType, kind: type) -> None:
        self._module = importlib.import_module(module) if isinstance(module, str) else module
        self.kernels = {name: value for name, value in vars(self._module).items() if isinstance(value, kind)}

    @contextmanager
    def launched_by(self, launch: Launch) -> Iterator[None]:
        """Within, the module's own launchers call `launch`."""
        with self._with({name: _StandIn(kernel, launch) for name, kernel in self.kernels.items()}):
            yield

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Within, the module has its own kernels: they call one another through it, and compilers read them there."""
        with self._with(self.kernels):
            yield

    @contextmanager
    def _with(self, others: Mapping[str, Any]) -> Iterator[None]:
        before = {name: getattr(self._module, name) for name in self.kernels}
        vars(self._module).update(others)
        try:
            yield
        finally:
            vars(self._module).update(before)


@contextmanager
def facts_of(arch: Arch) -> Iterator[None]:
    """Within, `arch.device_facts` tells of the architecture's product."""
    facts = archs.DeviceFacts(arch.product or arch.name, arch, arch.compute_units, None, None)
    original = archs.device_facts

    def device_facts(device: object = None) -> archs.DeviceFacts:  # noqa: ARG001 -- the signature it stands for
        return facts

    archs.device_facts = device_facts
    try:
        yield
    finally:
        archs.device_facts = original
