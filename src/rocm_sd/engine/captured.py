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
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine import snapshot
from rocm_sd.engine.calls import Call, flatten
from rocm_sd.engine.hoisting import Hoist, TimeInputs
from rocm_sd.engine.recording import Recording, record
from rocm_sd.engine.shelf import Shelf, half_of_the_free_memory
from rocm_sd.rewrite import conditioning

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from rocm_sd.engine.runs import Run

__all__ = ["CapturedForward", "bound"]

log = logging.getLogger(__name__)

# A model that changes itself at every call would be recorded anew at every call.
_MOST_RECORDINGS_OF_A_KIND = 4
# Of the reference's norm, in units of the dtype's rounding. Products of other shapes round in another order: a whole
# UNet differs by 2 units in float16 and by 8 in float32. A recording that reads the wrong memory differs by all of it.
_ROUNDINGS = 32.0


@dataclass
class _Entry:
    """One kind of call: `body` runs it on `inputs`; `snapshot` is of the model after its first run."""

    inputs: list[torch.Tensor]
    hoisted: _Hoisted | None
    body: Callable[[], list[torch.Tensor]]
    output_tree: pytree.TreeSpec | None = None
    snapshot: snapshot.Snapshot | None = None
    recording: Recording | None = None

    @property
    def memory(self) -> int:
        held = sum(tensor.nbytes for tensor in self.inputs)
        if self.hoisted is not None:
            held += self.hoisted.memory
        return held + (self.recording.memory if self.recording is not None else 0)


@dataclass
class _Hoisted:
    """What the recording takes in place of the prompt and the timestep, and for which prompt it was filled."""

    hoist: Hoist
    row: torch.Tensor
    text: torch.Tensor
    of_the_run: list[torch.Tensor]
    batch: int
    run_recording: Recording | None = None
    prompt: _Identity | None = None
    table: torch.Tensor | None = None
    table_of: _Identity | None = None

    @property
    def memory(self) -> int:
        return sum(tensor.nbytes for tensor in (self.row, self.text, *self.of_the_run))


class CapturedForward:
    """Stands in for `inner`, the forward that the module had.

    `run` tells which schedule is being run, or None: within one, weights do not change, so that what depends on the
    prompt alone is computed once.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any], run: Callable[[], Run | None]) -> None:
        # Held weakly, or the model would live as long as its recordings.
        self._module = ref(module)
        bound_to_it = getattr(inner, "__self__", None) is module
        self._function = inner.__func__ if bound_to_it else inner  # type: ignore[attr-defined]
        self._bound = bound_to_it
        self._run = run
        self._device = next(module.parameters()).device
        self._entries: Shelf[_Entry] = Shelf(lambda: half_of_the_free_memory(self._device))
        self._refused: dict[Hashable, str] = {}
        self._firsts: Counter[Hashable] = Counter()
        self._busy = threading.Lock()
        self._stream: Any = None
        self._packed: Hoist | None = None
        self.replays = 0
        self.stale: str | None = None

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
        entry = self._entries.get(call.key)
        if entry is not None and entry.snapshot is not None:
            stale = entry.snapshot.difference()
            if stale is not None:
                self.stale, entry = stale, None
                self._entries.drop(call.key)
        try:
            if entry is None:
                return self._first(module, call, args, kwargs)
            if entry.recording is None:
                return self._second(module, entry, call, args, kwargs)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the model itself can say it, or do without
            self._entries.drop(call.key)
            result = self._inner(*args, **kwargs)
            self._refuse(call.key, f"{type(error).__name__}: {error}".splitlines()[0])
            return result
        self._fill(entry, call, module, args, kwargs)
        entry.recording.replay()
        self.replays += 1
        return _unflattened(entry, entry.recording.outputs)

    def _first(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._firsts[call.key] += 1
        if self._firsts[call.key] > _MOST_RECORDINGS_OF_A_KIND:
            raise RuntimeError(f"the model keeps changing ({self.stale})")
        named = bound(module, args, kwargs)
        inputs = [_buffer_for(tensor, self._device) for tensor in call.tensors]
        entry = _Entry(inputs, self._hoisted(module, named), list)
        entry.body = partial(self._body, entry, call)
        self._fill(entry, call, module, args, kwargs)
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
        hoisted = entry.hoisted
        if hoisted is not None:
            recorded = record(partial(hoisted.hoist.of_the_run, hoisted.text), self._device)
            recorded.replay()
            hoisted.run_recording, hoisted.of_the_run = recorded, recorded.outputs
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
        hoisted = entry.hoisted
        if hoisted is None:
            result = self._inner(*args, **kwargs)
        else:
            hoist = hoisted.hoist
            ready = hoist.conditioning(hoisted.row, hoisted.batch, hoisted.of_the_run)
            with conditioning.given(ready), hoist.substituted(hoist.embedding(hoisted.row, hoisted.batch)):
                result = self._inner(*args, **kwargs)
            if hoisted.run_recording is None and ready.asked_for:
                hoist.upsamplers += ready.asked_for
                hoisted.of_the_run = hoist.of_the_run(hoisted.text)
        leaves, entry.output_tree = pytree.tree_flatten(result)
        if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(f"{type(result).__name__} is not made of tensors alone")
        return leaves

    def _hoisted(self, module: nn.Module, named: dict[str, Any]) -> _Hoisted | None:
        hoist = Hoist.find(module, named) if named else None
        if hoist is None:
            return None
        self._packed = hoist
        inputs = _time_inputs(named)
        row = hoist.time_rows(_timesteps(named["timestep"], inputs), inputs)[0].clone()
        text = named["encoder_hidden_states"].detach().clone()
        return _Hoisted(hoist, row, text, hoist.of_the_run(text), inputs.batch)

    def _fill(
        self, entry: _Entry, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._wait_for_the_last_use()
        for buffer, tensor in zip(entry.inputs, call.tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if entry.hoisted is not None:
            self._prepare(entry.hoisted, bound(module, args, kwargs))

    def _prepare(self, hoisted: _Hoisted, named: dict[str, Any]) -> None:
        run, text = self._run(), named["encoder_hidden_states"]
        prompt = None if run is None else _Identity.of(run, text)
        if prompt is None or not prompt.same_as(hoisted.prompt):
            hoisted.text.copy_(text)
            if hoisted.run_recording is None:
                hoisted.of_the_run = hoisted.hoist.of_the_run(hoisted.text)
            else:
                hoisted.run_recording.replay()
            hoisted.prompt = prompt
        inputs, timestep = _time_inputs(named), named["timestep"]
        number = None if run is None else run.number_of(timestep)
        made_of = None if run is None else _Identity.of(run, *inputs.tensors)
        if run is None or number is None or made_of is None:
            hoisted.row.copy_(hoisted.hoist.time_rows(_timesteps(timestep, inputs), inputs)[0])
            return
        if hoisted.table is None or not made_of.same_as(hoisted.table_of):
            hoisted.table, hoisted.table_of = hoisted.hoist.time_rows(run.timesteps, inputs), made_of
        hoisted.row.copy_(hoisted.table[number])

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
        if self.stale is not None:
            told.append(f"{kind}: last captured anew because {self.stale}")
        told += [
            f"{kind}: a call is not captured, because {reason}" for reason in dict.fromkeys(self._refused.values())
        ]
        return told


def _must_run_eagerly(device: torch.device) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type):
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


def _time_inputs(named: dict[str, Any]) -> TimeInputs:
    sample = named["sample"]
    return TimeInputs(
        batch=sample.shape[0],
        dtype=sample.dtype,
        device=sample.device,
        condition=named["timestep_cond"],
        text=named["encoder_hidden_states"],
        added=named["added_cond_kwargs"],
    )


def _timesteps(timestep: torch.Tensor, inputs: TimeInputs) -> torch.Tensor:
    """[1]: a call's timestep, which must be one for the whole batch."""
    if timestep.numel() != 1:
        raise ValueError(f"{timestep.numel()} timesteps in a batch of {inputs.batch}")
    return timestep.reshape(1)


@dataclass(frozen=True, eq=False)
class _Identity:
    """Tensors as they were at a time of a run."""

    run: Run
    tensors: tuple[ref[torch.Tensor], ...]
    states: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, run: Run, *tensors: torch.Tensor) -> _Identity | None:
        """None where a tensor keeps no count of its changes."""
        if any(tensor.is_inference() for tensor in tensors):
            return None
        states = tuple((tensor._version, tensor.data_ptr()) for tensor in tensors)  # noqa: SLF001
        return cls(run, tuple(map(ref, tensors)), states)

    def same_as(self, other: _Identity | None) -> bool:
        if other is None or self.run is not other.run or self.states != other.states:
            return False
        # A tensor has one weak reference, and a dead tensor's is no other tensor's.
        return all(mine is theirs for mine, theirs in zip(self.tensors, other.tensors, strict=True))


def _difference(ours: Any, eager: Any) -> str | None:
    for mine, theirs in zip(pytree.tree_leaves(ours), pytree.tree_leaves(eager), strict=True):
        if torch.equal(mine, theirs):
            continue
        exact = theirs.double()
        distance = float((mine.double() - exact).norm()) / max(float(exact.norm()), 1e-30)
        allowed = _ROUNDINGS * torch.finfo(theirs.dtype).eps
        if not distance <= allowed:
            return f"by {distance:.1e} of its norm, and {allowed:.1e} is allowed"
    return None
