"""Calls of the UNet as recordings: one for each kind of call, replayed with the call's tensors copied in.

As engine/captured.py does for Diffusers' models: the first call of a kind compiles what is needed, the second is
recorded and compared with the call itself, and before each replay everything that was baked in is looked at. The model
here is the host's, so is what may be found in it, and the host says what else decides about a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine.capture import warmup
from rocm_sd.engine.capture.cache import Shelf, half_of_the_free_memory
from rocm_sd.engine.capture.call import flatten
from rocm_sd.engine.capture.graph import Recording, record
from rocm_sd.engine.capture.snapshot import Snapshot
from rocm_sd.integrations.a1111 import messages
from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from rocm_sd.engine.capture.call import Call

__all__ = ["RecordedCalls"]

# A model that changes itself at every call would be begun anew at every call.
_MOST_BEGINNINGS = 4
# Of the reference's norm, in units of the dtype's rounding: as engine/captured.py allows a whole UNet.
_ROUNDINGS = 32.0
_PACKAGES = frozenset({"torch", "ldm", "sgm"})


@dataclass
class _Entry:
    """One kind of call: `body` runs it on `inputs`; `snapshot` is of the model after its first run."""

    inputs: list[torch.Tensor]
    body: Callable[[], list[torch.Tensor]]
    snapshot: Snapshot | None = None
    recording: Recording | None = None

    @property
    def memory(self) -> int:
        held = sum(tensor.nbytes for tensor in self.inputs)
        return held + (self.recording.memory if self.recording is not None else 0)


class RecordedCalls:
    """Of one UNet. It does not keep the UNet alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._device = next(model.parameters()).device
        self._entries: Shelf[_Entry] = Shelf(lambda: half_of_the_free_memory(self._device))
        self._refused: dict[Hashable, str] = {}
        self._beginnings: dict[Hashable, int] = {}
        self.replays = 0

    def __call__(
        self, run: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], more: Hashable
    ) -> torch.Tensor:
        """run(*args, **kwargs), from a recording where there is one. `more`: what else the call depends on."""
        model = self._model()
        if model is None or _must_run_eagerly(self._device):
            return run(*args, **kwargs)
        call = flatten(args, kwargs, self._device)
        key = None if call is None else (call.key, more)
        if call is None or key in self._refused:
            return run(*args, **kwargs)
        entry = self._current(key)
        if entry is not None and entry.recording is not None:
            _fill(entry, call)
            entry.recording.replay()
            self.replays += 1
            self._beginnings.pop(key, None)
            # A copy: the next replay overwrites it.
            return entry.recording.outputs[0].clone()
        if _strange(model) is not None:
            return run(*args, **kwargs)
        return self._begin(model, key, entry, call, run, args, kwargs)

    def _begin(
        self,
        model: nn.Module,
        key: Hashable,
        entry: _Entry | None,
        call: Call,
        run: Callable[..., torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """The first two calls of a kind. Whatever comes between, the call itself is there to answer."""
        try:
            with library_scratch.given_back():
                if entry is None:
                    return self._first(model, key, call, run)
                return self._second(entry, key, call, run(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- whatever it was, the model itself can say it, or do without
            reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        # Not while the error is at hand: its frames hold the memory that may just have run out.
        self._entries.drop(key)
        self._refused[key] = reason
        messages.say(f"a call of the UNet is not replayed from a recording, and runs as it is: {reason}")
        return run(*args, **kwargs)

    def _first(self, model: nn.Module, key: Hashable, call: Call, run: Callable[..., torch.Tensor]) -> torch.Tensor:
        self._beginnings[key] = self._beginnings.get(key, 0) + 1
        if self._beginnings[key] > _MOST_BEGINNINGS:
            raise RuntimeError("the model keeps changing between its calls")
        inputs = [torch.empty_like(tensor, device=self._device).copy_(tensor) for tensor in call.tensors]

        def body() -> list[torch.Tensor]:
            args, kwargs = call.with_tensors(inputs)
            return [run(*args, **kwargs)]

        warmup.compile_kernels(body, self._device, next(model.parameters()).dtype)
        result = body()[0]
        # Weights that are laid together have moved by now.
        self._entries.put(key, _Entry(inputs, body, Snapshot(model)))
        return result

    def _second(self, entry: _Entry, key: Hashable, call: Call, expected: torch.Tensor) -> torch.Tensor:
        _fill(entry, call)
        recording = record(entry.body, self._device)
        recording.replay()
        changed = None if entry.snapshot is None else entry.snapshot.difference()
        if changed is not None:
            raise RuntimeError(f"{changed} by being run")
        distance = _distance(recording.outputs[0], expected)
        if not distance <= _ROUNDINGS * _rounding(expected):
            raise RuntimeError(f"its replay differs from the call itself by {distance:.1e} of its norm")
        entry.recording = recording
        self._entries.put(key, entry)
        return recording.outputs[0].clone()

    def _current(self, key: Hashable) -> _Entry | None:
        """The entry of that kind, if the model still is as it was."""
        entry = self._entries.get(key)
        if entry is None or entry.snapshot is None or entry.snapshot.difference() is None:
            return entry
        self._entries.drop(key)
        return None

    def clear(self) -> None:
        self._entries.clear()
        self._refused.clear()
        self._beginnings.clear()

    def note(self) -> str | None:
        graphs = sum(entry.recording is not None for entry in self._entries)
        return f"{graphs} recorded kinds of calls, replayed {self.replays} times" if graphs else None


def _fill(entry: _Entry, call: Call) -> None:
    for buffer, tensor in zip(entry.inputs, call.tensors, strict=True):
        buffer.copy_(tensor, non_blocking=True)


def _must_run_eagerly(device: torch.device) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _strange(model: nn.Module) -> str | None:
    """What in the model has to be called every time: a hook, another class, a forward of somebody else's."""
    for module in model.modules():
        own, kind = module.__dict__, type(module)
        # The UNet's own hooks are called around the recording.
        if module is not model and (own["_forward_hooks"] or own["_forward_pre_hooks"]):
            return f"{kind.__name__} has a hook"
        if kind.__module__.partition(".")[0] not in _PACKAGES:
            return f"{kind.__name__} is of {kind.__module__}"
        for name in ("forward", "_forward"):
            function = getattr(own.get(name), "__func__", own.get(name))
            ours = str(getattr(function, "__module__", "")).startswith("rocm_sd.")
            if function is not None and not ours and function is not getattr(kind, name, None):
                return f"{kind.__name__} has a {name} of its own"
    return None


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    if torch.equal(ours, expected):
        return 0.0
    exact = expected.double()
    return float((ours.double() - exact).norm()) / max(float(exact.norm()), 1e-30)


def _rounding(tensor: torch.Tensor) -> float:
    """Of one operation; TF32, in which float32 is computed unless forbidden, keeps 10 bits."""
    eps = torch.finfo(tensor.dtype).eps
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return max(eps, 2.0**-10) if tensor.is_cuda and tensor.dtype == torch.float32 and tf32 else eps
