"""A model's calls from graphs: one graph for each kind of call, replayed with the call's tensors copied in.

The first call of a kind compiles and lays out what is needed, and gives the bits that the graph will give. The second
is captured, and compared with the model's own answer: a graph that differs is not used. Whatever a graph has baked in
is looked at before each replay (snapshot.py). What does not fit, or cannot be captured, is answered as if there were no
graphs, and the reason is noted. What a host program decides for itself is in its policy.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from rocm_sd import settings
from rocm_sd.engine.capture import warmup
from rocm_sd.engine.capture.graph import Graph, GraphCache, capture_graph
from rocm_sd.engine.capture.snapshot import DormantSnapshot, FlatCall, Snapshot, flatten
from rocm_sd.engine.memory import free_memory, is_capturing
from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from rocm_sd.engine.capture.hoisting import PreparedCall
    from rocm_sd.engine.capture.policy import HostCall, Policy

__all__ = ["CapturedCalls", "graphs_wanted"]

# A model that changes itself at every call would be captured anew at every second call.
_MOST_FIRST_CALLS = 4
# Of the reference's norm, in units of the dtype's rounding. Products of other shapes round in another order: a whole
# UNet differs by 2 units in float16 and by 8 in float32. A graph that reads the wrong memory differs by all of it.
_ROUNDINGS = 32.0


def graphs_wanted(device: torch.device, *, allowed: bool = True) -> bool:
    """On a GPU, where the level allows it, unless switched off; on a CPU only where asked for: it saves no launches."""
    asked = settings.current().step_graph
    if device.type == "cpu":
        return bool(asked)
    return allowed and asked is not False


@dataclass
class _Entry:
    """One kind of call: `run` computes it on `inputs`. `snapshot` is of the model after its first run; while the host
    may be changing models, `dormant` stands in for it.
    """

    form: FlatCall
    inputs: list[torch.Tensor]
    body: Callable[..., Any]
    prepared: PreparedCall | None
    output_tree: pytree.TreeSpec | None = None
    snapshot: Snapshot | None = None
    dormant: DormantSnapshot | None = None
    graph: Graph | None = None

    @property
    def memory(self) -> int:
        held = sum(tensor.nbytes for tensor in self.inputs)
        held += 0 if self.prepared is None else self.prepared.memory
        return held + (0 if self.graph is None else self.graph.memory)

    def run(self) -> list[torch.Tensor]:
        args, kwargs = self.form.with_tensors(self.inputs)
        with nullcontext() if self.prepared is None else self.prepared.in_use():
            result = self.body(*args, **kwargs)
        leaves, self.output_tree = pytree.tree_flatten(result)
        if not leaves or not all(type(leaf) is torch.Tensor for leaf in leaves):
            raise TypeError(f"{type(result).__name__} is not made of tensors alone")
        return leaves

    def answer(self, outputs: list[torch.Tensor]) -> Any:
        """The outputs as the model gives them. Copies: those of a graph are overwritten by its next replay."""
        assert self.output_tree is not None
        return pytree.tree_unflatten([output.clone() for output in outputs], self.output_tree)


class CapturedCalls:
    """Of one model, which it does not keep alive."""

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._model = ref(model)
        self._policy = policy
        self._device: torch.device | None = None
        self._entries: GraphCache[_Entry] = GraphCache(self._room)
        self._refused: dict[Hashable, str] = {}
        self._first_calls: Counter[Hashable] = Counter()
        self._eager: Counter[str] = Counter()
        self._busy = threading.Lock()
        self._stream: Any = None
        self.replays = 0
        self.stale: str | None = None

    def _room(self) -> int:
        """Half of the free memory is left to everything else; no bound where it is not known."""
        free = None if self._device is None else free_memory(self._device)
        return 2**62 if free is None else free // 2

    def __call__(self, call: HostCall) -> Any:
        if torch.compiler.is_compiling() or not self._busy.acquire(blocking=False):
            # Another thread is using the graphs' memory.
            return call.eager()
        try:
            return self._answer(call)
        finally:
            self._busy.release()

    def _answer(self, call: HostCall) -> Any:
        model = self._model()
        if model is None or self._runs_eagerly(call.device):
            return call.eager()
        flat = flatten(call.args, call.kwargs, call.device, call.also)
        if flat is None:
            self.count_eager("an input is neither a tensor on its device nor a plain value")
        if flat is None or flat.key in self._refused:
            return call.eager()
        self._device = call.device
        self._wake(model)
        entry = self._current(flat.key)
        if entry is not None and entry.graph is not None:
            self._fill(entry, call, flat)
            entry.graph.replay()
            self.replays += 1
            self._first_calls[flat.key] = 0
            return entry.answer(entry.graph.outputs)
        reason = self._policy.why_not(model, call.device)
        if reason is not None:
            self.count_eager(reason)
            return call.eager()
        if entry is not None and not self._policy.captures:
            self._fill(entry, call, flat)
            return entry.answer(entry.run())
        return self._first_or_second(model, entry, call, flat)

    def count_eager(self, reason: str) -> None:
        """Note that a call is answered without a graph."""
        self._eager[reason] += 1

    def _runs_eagerly(self, device: torch.device) -> bool:
        # Weights that an offload puts aside between the calls lie on no device.
        if device.type == "meta" or torch.is_grad_enabled():
            return True
        if torch.is_autocast_enabled(device.type) and not self._policy.under_autocast:
            return True
        # By somebody else, around this call.
        return is_capturing(device)

    def _first_or_second(self, model: nn.Module, entry: _Entry | None, call: HostCall, flat: FlatCall) -> Any:
        """Whatever comes between, the model's own answer is there."""
        try:
            with library_scratch.given_back():
                if entry is None:
                    return self._first(model, call, flat)
                return self._second(entry, call, flat)
        except Exception as error:
            self._entries.drop(flat.key)
            if self._policy.propagates(error):
                raise
            reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        # Not while the error is at hand: its frames hold the memory that may just have run out.
        result = call.eager()
        # What the model itself cannot do either is not refused: it has said so.
        self._refused[flat.key] = reason
        self._policy.say(f"a call of {self._policy.name} is not replayed from a graph, and runs as it is: {reason}")
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

    def _first(self, model: nn.Module, call: HostCall, flat: FlatCall) -> Any:
        self._first_calls[flat.key] += 1
        if self._first_calls[flat.key] > _MOST_FIRST_CALLS:
            raise RuntimeError(f"the model keeps changing ({self.stale})")
        inputs = [torch.empty_like(tensor, device=call.device) for tensor in flat.tensors]
        entry = _Entry(flat.without_tensors(), inputs, call.body, self._policy.prepare(model, call))
        self._fill(entry, call, flat)

        def both_ways() -> None:
            entry.run()
            # What is prepared in advance there is computed in place by the model itself, which the graph will be held
            # against.
            call.eager()

        warmup.compile_kernels(both_ways, call.device, self._policy.dtype(model, call))
        result = entry.answer(entry.run())
        # Weights that are laid together have moved by now.
        entry.snapshot = Snapshot(model)
        self._entries.put(flat.key, entry)
        return result

    def _second(self, entry: _Entry, call: HostCall, flat: FlatCall) -> Any:
        eager = call.eager()
        self._fill(entry, call, flat)
        if entry.prepared is not None:
            entry.prepared.capture(call.device)
        graph = capture_graph(entry.run, call.device)
        graph.replay()
        changed = None if entry.snapshot is None else entry.snapshot.difference()
        if changed is not None:
            raise RuntimeError(f"{changed} by being run")
        ours = entry.answer(graph.outputs)
        worst = _difference(ours, eager)
        if worst is not None:
            raise RuntimeError(f"its replay differs from the model's forward {worst}")
        entry.graph = graph
        self._entries.put(flat.key, entry)
        return ours

    def _fill(self, entry: _Entry, call: HostCall, flat: FlatCall) -> None:
        stream = _current_stream(call.device)
        if stream is not None and self._stream is not None and self._stream != stream:
            # For the last use of the same memory.
            stream.wait_stream(self._stream)
        self._stream = stream
        for buffer, tensor in zip(entry.inputs, flat.tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if entry.prepared is not None:
            entry.prepared.fill(call.args, call.kwargs)

    def sleep(self) -> None:
        """Keep no weights alive until the next call: the host may put others in their place."""
        model = self._model()
        if model is None:
            self.clear()
            return
        asleep: DormantSnapshot | None = None
        for entry in list(self._entries):
            if entry.snapshot is not None and entry.snapshot.difference() is not None:
                self._entries.drop(entry.form.key)
            elif entry.snapshot is not None:
                asleep = asleep or DormantSnapshot(model)
                entry.snapshot, entry.dormant = None, asleep

    def _wake(self, model: nn.Module) -> None:
        """What no longer fits the model is given up."""
        same: dict[DormantSnapshot, bool] = {}
        for entry in [entry for entry in self._entries if entry.dormant is not None]:
            assert entry.dormant is not None
            if entry.dormant not in same:
                same[entry.dormant] = entry.dormant.is_of(model)
            if same[entry.dormant]:
                entry.snapshot, entry.dormant = Snapshot(model), None
            else:
                self.stale = "the host has loaded it anew, or with other patches"
                self._entries.drop(entry.form.key)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether calls with such a first input are replayed, so that they take no memory but what is held already."""
        captured = [entry.inputs[0] for entry in self._entries if entry.graph is not None]
        return any(known.shape == x.shape and known.dtype == x.dtype for known in captured)

    def clear(self) -> None:
        """Give the memory back. What was refused stays so: the model is the same."""
        self._entries.clear()
        self._first_calls.clear()
        self._policy.cleared()

    def notes(self) -> list[str]:
        name, graphs = self._policy.name, sum(entry.graph is not None for entry in self._entries)
        found = []
        if graphs or self.replays:
            held = f"{_counted(graphs, 'graph')} of its forward ({self._entries.memory / 2**20:.0f} MiB)"
            found.append(f"{name}: {held}, replayed {self.replays} times")
        if self._entries.dropped:
            found.append(f"{name}: {self._entries.dropped} graphs gave way to others, to keep half of the memory free")
        for reason, count in self._eager.items():
            found.append(f"{name}: {_counted(count, 'call')} without a graph, because {reason}")
        if self.stale is not None:
            found.append(f"{name}: last captured anew because {self.stale}")
        refusals = dict.fromkeys(self._refused.values())
        return [*found, *(f"{name}: a call is not captured, because {reason}" for reason in refusals)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


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
