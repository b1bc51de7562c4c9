"""torch.profiler around a region, with a range for every module of the models that are given.

`card_ms` records the device alone: how long the card itself is busy with a picture. That is what an optimisation saves
it, whatever the host needs to launch.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from rocm_sd.bench.profiling.trace import MODULE, REGION, load, read, union
from rocm_sd.rewrite.guarding import observer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

__all__ = ["Recording", "busy_ms", "card_ms", "module_ranges", "synchronize"]

# Containers only hold others, and these do nothing at inference: a range around them would be noise.
_SILENT = (nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Dropout)
# Of the machine and the person, not of the run; whoever is sent a trace need not know them.
_PRIVATE = ("host_name", "traceName", "trace_id")


class Recording:
    """start(), the work, stop(); then `trace` is the Chrome trace as values. The models get their ranges in between.

    `host=False` records nothing but the device: no ranges and no shapes, and the host is hardly slowed down. Where
    torch sees no device, the host is recorded all the same.
    """

    def __init__(self, model: Any = None, *, host: bool = True) -> None:
        self._model, self._host = model, host
        self._stack: ExitStack | None = None
        self.trace: dict[str, Any] | None = None

    @property
    def is_running(self) -> bool:
        return self._stack is not None

    def start(self) -> None:
        if self._stack is not None:
            return
        on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        activities = on_device if on_device and not self._host else [ProfilerActivity.CPU, *on_device]
        synchronize()
        with ExitStack() as stack:
            # record_shapes: FLOPs and bytes are counted from them.
            running = stack.enter_context(profile(activities=activities, record_shapes=self._host))
            if self._host:
                if self._model is not None:
                    stack.enter_context(module_ranges(self._model))
                stack.enter_context(record_function(REGION))
            self._running = running
            self._stack = stack.pop_all()

    def stop(self) -> None:
        if self._stack is None:
            return
        # Inside the region: what was launched in it must have ended in it.
        synchronize()
        stack, self._stack = self._stack, None
        stack.close()
        self.trace = _exported(self._running)

    def _drop(self) -> None:
        """After an exception, Ctrl-C perhaps: nobody asks for the trace, and writing one may take seconds, or fail."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._drop()


def card_ms(draw: Callable[[], object]) -> float | None:
    """Milliseconds in which the device worked on one call of `draw`, recorded by torch.profiler; None without a device.

    The call should be warm: what it compiles or captures counts too.
    """
    with Recording(host=False) as recording:
        draw()
    return None if recording.trace is None else busy_ms(recording.trace)


def busy_ms(trace: Mapping[str, Any]) -> float | None:
    """The time in which at least one kernel, copy or fill was under way; what runs at the same time counts once.

    None, and not 0, where the trace has nothing of a device: then it was not measured.
    """
    kernels = read(trace).kernels
    return union((kernel.start, kernel.end) for kernel in kernels) / 1e3 if kernels else None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def module_ranges(model: Any) -> Iterator[None]:
    """A range of the profiler around every forward, while this is open. `model`: a module, or a Diffusers pipeline.

    torch calls the hooks for every module there is, and no module has one of its own: what `optimize` has replaced
    leaves modules with hooks to stock, and the profile would be one of stock. These are known to look on only.
    """
    named = {module: f"{MODULE}{name} ({type(module).__name__})" for name, module in _named(model)}
    open_ranges = []

    def before(module: nn.Module, _arguments: Any) -> None:
        name = named.get(module)
        if name is not None:
            opened = record_function(name)
            opened.__enter__()  # type: ignore[no-untyped-call]
            open_ranges.append(opened)

    def after(module: nn.Module, _arguments: Any, _result: Any) -> None:
        if module in named and open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    entering = register_module_forward_pre_hook(observer(before))
    # Called after an exception too: a range that stays open would hold everything after it.
    leaving = register_module_forward_hook(observer(after), always_call=True)
    try:
        yield
    finally:
        entering.remove()
        leaving.remove()


def _named(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, under the first of its names."""
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        components = {type(model).__name__: model}
    for component, part in components.items():
        if isinstance(part, nn.Module):
            for name, module in part.named_modules():
                if not isinstance(module, _SILENT):
                    yield ".".join(filter(None, (component, name))), module


def _exported(recorded: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rocm-sd-trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        values = load(path)
    for key in _PRIVATE:
        values.pop(key, None)
    return values
