"""One model's forward as recordings: one for each kind of call, replayed with the call's tensors copied in.

The first call of a kind compiles and lays out what is needed, and gives the bits that the recording will give. The
second is recorded, and compared with the model's own forward: a recording that differs is not used. Whatever a
recording has baked in is looked at before each replay (snapshot.py); what does not fit, or cannot be recorded, runs as
if there were no recordings, and the reason is on record.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import Signature, signature
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from rocm_sd import settings
from rocm_sd.engine.capture import foreign, snapshot, warmup
from rocm_sd.engine.capture.cache import Shelf, half_of_the_free_memory
from rocm_sd.engine.capture.call import Call, flatten
from rocm_sd.engine.capture.graph import Recording, record
from rocm_sd.engine.capture.prepared import Prepared
from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from rocm_sd.engine.capture.hoisting import Hoist
    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["CapturedForward", "bound", "graphs_wanted"]

log = logging.getLogger(__name__)

# A model that changes itself at every call would be begun anew at every call.
_MOST_BEGINNINGS = 4
# Of the reference's norm, in units of the dtype's rounding. Products of other shapes round in another order: a whole
# UNet differs by 2 units in float16 and by 8 in float32. A recording that reads the wrong memory differs by all of it.
_ROUNDINGS = 32.0


@dataclass
class _Entry:
    """One kind of call: `body` runs it on `inputs`; `snapshot` is of the model after its first run."""

    inputs: list[torch.Tensor]
    prepared: Prepared | None
    body: Callable[[], list[torch.Tensor]]
    output_tree: pytree.TreeSpec | None = None
    snapshot: snapshot.Snapshot | None = None
    recording: Recording | None = None

    @property
    def memory(self) -> int:
        held = sum(tensor.nbytes for tensor in self.inputs)
        if self.prepared is not None:
            held += self.prepared.memory
        return held + (self.recording.memory if self.recording is not None else 0)


def graphs_wanted(device: torch.device, *, allowed: bool = True) -> bool:
    """On a GPU, where the level allows it, unless switched off; on a CPU only where asked for: it saves no launches."""
    asked = settings.current().step_graph
    if device.type == "cpu":
        return bool(asked)
    return allowed and asked is not False


class CapturedForward:
    """Stands in for `inner`, the forward that the module had.

    `runs`, one for each pipeline that has the model, tell which schedule is being run, or None: within one, weights do
    not change, so that what depends on the prompt alone is computed once, if it `hoists`. If it does not record, every
    call is as the first one.
    """

    def __init__(
        self, module: nn.Module, inner: Callable[..., Any], *, hoists: bool = True, records: bool = True
    ) -> None:
        # Held weakly, or the model would live as long as its recordings.
        self._module = ref(module)
        bound_to_it = getattr(inner, "__self__", None) is module
        self._function = inner.__func__ if bound_to_it else inner  # type: ignore[attr-defined]
        self._bound = bound_to_it
        self._hoists, self._records = hoists, records
        self.runs: list[Callable[[], ScheduleRun | None]] = []
        self._device = next(module.parameters()).device
        self._entries: Shelf[_Entry] = Shelf(lambda: half_of_the_free_memory(self._device))
        self._refused: dict[Hashable, str] = {}
        self._firsts: Counter[Hashable] = Counter()
        self._busy = threading.Lock()
        self._stream: Any = None
        self._packed: Hoist | None = None
        # Whether the forward that this stands in for was an attribute of the model, and not its class's.
        self.was_on_the_instance = False
        self.replays = 0
        self.stale: str | None = None
        self.left_eager: str | None = None

    def inner(self) -> Callable[..., Any]:
        return MethodType(self._function, self._module()) if self._bound else self._function

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), *args, **kwargs) if self._bound else self._function(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._busy.acquire(blocking=False):
            # Another thread is using the recordings' memory.
            return self._inner(*args, **kwargs)
        try:
            return self._answer(args, kwargs)
        finally:
            self._busy.release()

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        if module is None or _must_run_eagerly(self._device):
            return self._inner(*args, **kwargs)
        args, kwargs = _timestep_as_tensor(args, kwargs)
        call = flatten(args, kwargs, self._device)
        if call is None or call.key in self._refused:
            return self._inner(*args, **kwargs)
        entry = self._current(call.key)
        if entry is not None and entry.recording is not None:
            self._fill(entry, call, module, args, kwargs)
            entry.recording.replay()
            self.replays += 1
            self._firsts[call.key] = 0
            return _unflattened(entry, entry.recording.outputs)
        self.left_eager = _why_eager(module)
        if self.left_eager is not None:
            return self._inner(*args, **kwargs)
        if entry is not None and not self._records:
            self._fill(entry, call, module, args, kwargs)
            return _unflattened(entry, entry.body())
        return self._begin(module, entry, call, args, kwargs)

    def _begin(
        self, module: nn.Module, entry: _Entry | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The first two calls of a kind. Whatever comes between, the model's own forward is there to answer."""
        try:
            with library_scratch.given_back():
                if entry is None:
                    return self._first(module, call, args, kwargs)
                return self._second(module, entry, call, args, kwargs)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the model itself can say it, or do without
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        # Not while the error is at hand: its frames hold the memory that may just have run out.
        self._entries.drop(call.key)
        result = self._inner(*args, **kwargs)
        self._refuse(call.key, reason)
        return result

    def _current(self, key: Hashable) -> _Entry | None:
        """The entry of that kind, if the model still is as it was."""
        entry = self._entries.get(key)
        stale = None if entry is None or entry.snapshot is None else entry.snapshot.difference()
        if stale is None:
            return entry
        self.stale = stale
        self._entries.drop(key)
        return None

    def _first(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._firsts[call.key] += 1
        if self._firsts[call.key] > _MOST_BEGINNINGS:
            raise RuntimeError(f"the model keeps changing ({self.stale})")
        inputs = [_buffer_for(tensor, self._device) for tensor in call.tensors]
        prepared = Prepared.of(module, bound(module, args, kwargs)) if self._hoists else None
        entry = _Entry(inputs, prepared, list)
        if entry.prepared is not None:
            self._packed = entry.prepared.hoist
        entry.body = partial(self._body, entry, call)
        self._fill(entry, call, module, args, kwargs)

        def both_ways() -> None:
            entry.body()
            # What is prepared in advance there is computed in place by the model itself, which the recording will be
            # held against.
            self._inner(*args, **kwargs)

        warmup.compile_kernels(both_ways, self._device, next(module.parameters()).dtype)
        result = _unflattened(entry, entry.body())
        # Weights that are laid together have moved by now.
        entry.snapshot = snapshot.Snapshot(module)
        self._entries.put(call.key, entry)
        return result

    def _second(
        self, module: nn.Module, entry: _Entry, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        eager = self._inner(*args, **kwargs)
        self._fill(entry, call, module, args, kwargs)
        if entry.prepared is not None:
            entry.prepared.record(self._device)
        recording = record(entry.body, self._device)
        recording.replay()
        changed = entry.snapshot.difference() if entry.snapshot is not None else None
        if changed is not None:
            raise RuntimeError(f"{changed} by being run")
        ours = _unflattened(entry, recording.outputs)
        worst = _difference(ours, eager)
        if worst is not None:
            raise RuntimeError(f"its replay differs from the model's forward {worst}")
        entry.recording = recording
        self._entries.put(call.key, entry)
        return ours

    def _body(self, entry: _Entry, call: Call) -> list[torch.Tensor]:
        args, kwargs = call.with_tensors(entry.inputs)
        with nullcontext() if entry.prepared is None else entry.prepared.in_use():
            result = self._inner(*args, **kwargs)
        leaves, entry.output_tree = pytree.tree_flatten(result)
        if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(f"{type(result).__name__} is not made of tensors alone")
        return leaves

    def _fill(
        self, entry: _Entry, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._wait_for_the_last_use()
        for buffer, tensor in zip(entry.inputs, call.tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if entry.prepared is not None:
            named = bound(module, args, kwargs)
            entry.prepared.fill(self._run_of(named["timestep"]), named)

    def _run_of(self, timestep: torch.Tensor) -> ScheduleRun | None:
        """The run that the timestep is of, if it is of one."""
        current = [run for run in (ask() for ask in self.runs) if run is not None]
        return next((run for run in current if run.number_of(timestep) is not None), None)

    def _wait_for_the_last_use(self) -> None:
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _refuse(self, key: Hashable, reason: str) -> None:
        self._refused[key] = reason
        log.warning("A call of %s is not replayed from a graph: %s", type(self._module()).__name__, reason)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether calls with such a first input are replayed, so that they take no memory but what is held already."""
        recorded = [entry.inputs[0] for entry in self._entries if entry.recording is not None]
        return any(known.shape == x.shape and known.dtype == x.dtype for known in recorded)

    def clear(self) -> None:
        """Give the memory back, and let each weight have its own again."""
        self._entries.clear()
        self._firsts.clear()
        if self._packed is not None:
            self._packed.unpack()
            self._packed = None

    def notes(self) -> list[str]:
        kind = type(self._module()).__name__
        told = []
        graphs = sum(entry.recording is not None for entry in self._entries)
        if graphs:
            megabytes = self._entries.memory / 2**20
            plural = "" if graphs == 1 else "s"
            told.append(
                f"{kind}: {graphs} graph{plural} of its forward ({megabytes:.0f} MiB), replayed {self.replays} times"
            )
        if self._entries.dropped:
            told.append(f"{kind}: {self._entries.dropped} graphs gave way to others, to keep half of the memory free")
        if self.left_eager is not None:
            told.append(f"{kind}: not captured as it is, because {self.left_eager}")
        if self.stale is not None:
            told.append(f"{kind}: last captured anew because {self.stale}")
        told += [
            f"{kind}: a call is not captured, because {reason}" for reason in dict.fromkeys(self._refused.values())
        ]
        return told


def _why_eager(module: nn.Module) -> str | None:
    """What in the model has to be called every time, in words. Looked for before a recording: whatever comes later
    makes the recording stale.
    """
    if foreign.moves_weights(module):
        return "its weights are moved around its calls"
    return foreign.found_in(module)


def _must_run_eagerly(device: torch.device) -> bool:
    # Weights that an offload puts aside between the calls lie on no device.
    if device.type == "meta" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    if torch.is_autocast_enabled(device.type):
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _timestep_as_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A number would be baked in, and each step be a kind of its own. Stock makes the same tensor of it."""
    if "timestep" in kwargs:
        if isinstance(kwargs["timestep"], (int, float)):
            kwargs = {**kwargs, "timestep": _as_tensor(kwargs["timestep"])}
    elif len(args) > 1 and isinstance(args[1], (int, float)):
        args = (args[0], _as_tensor(args[1]), *args[2:])
    return args, kwargs


def _as_tensor(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def _buffer_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device, memory_format=torch.preserve_format).copy_(tensor)


def _unflattened(entry: _Entry, outputs: list[torch.Tensor]) -> Any:
    """The outputs as the model gives them. Copies: those of a recording are overwritten by its next replay."""
    assert entry.output_tree is not None
    return pytree.tree_unflatten([output.clone() for output in outputs], entry.output_tree)


@lru_cache(maxsize=64)
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; empty where they do not fit the forward, which will say so itself."""
    kind: Any = type(module)
    try:
        arguments = _signature(kind).bind(module, *args, **kwargs)
    except TypeError:
        return {}
    arguments.apply_defaults()
    return arguments.arguments


def _difference(ours: Any, eager: Any) -> str | None:
    for mine, theirs in zip(pytree.tree_leaves(ours), pytree.tree_leaves(eager), strict=True):
        if torch.equal(mine, theirs):
            continue
        exact = theirs.double()
        distance = float((mine.double() - exact).norm()) / max(float(exact.norm()), 1e-30)
        allowed = _ROUNDINGS * _rounding(theirs)
        if not distance <= allowed:
            return f"by {distance:.1e} of its norm, and {allowed:.1e} is allowed"
    return None


def _rounding(tensor: torch.Tensor) -> float:
    """Of one operation; TF32, which convolutions of float32 are computed in unless forbidden, keeps 10 bits."""
    eps = torch.finfo(tensor.dtype).eps
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return max(eps, 2.0**-10) if tensor.is_cuda and tensor.dtype == torch.float32 and tf32 else eps
