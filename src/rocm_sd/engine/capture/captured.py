"""A model's calls from graphs: one graph for each kind of call, replayed with the call's tensors copied in.

The first call of a kind compiles and lays out what is needed, and gives the bits that the graph will give. The second
is captured, and compared with the model's own answer. On changed inputs its next replays are compared with eager runs,
and timed (trial.py): a graph that differs is not used, nor one that is slower. Whatever a graph has baked in is looked
at before each replay (snapshot.py). What does not fit, or cannot be captured, is answered as if there were no graphs,
and the reason is noted. What a host program decides for itself is in its policy.
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

from rocm_sd import settings, transforms
from rocm_sd.engine.capture import warmup
from rocm_sd.engine.capture.blocks import TooSmall, capture_blocks
from rocm_sd.engine.capture.graph import Graph, GraphCache, capture_graph
from rocm_sd.engine.capture.randomness import DRAWS_NUMBERS, Drawn, is_training
from rocm_sd.engine.capture.snapshot import DormantSnapshot, FlatCall, Snapshot, flatten
from rocm_sd.engine.capture.trial import Attempts, NotAdopted, Trial
from rocm_sd.engine.capture.turns import capturing, running
from rocm_sd.engine.installed import Graphs
from rocm_sd.engine.memory import free_memory, is_capturing, is_out_of_memory
from rocm_sd.measuring import Stopwatch
from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from rocm_sd.engine.capture.hoisting import PreparedCall
    from rocm_sd.engine.capture.policy import HostCall, Policy

__all__ = ["CapturedCalls", "graphs_wanted"]

# A model that changes itself at every call would be captured anew at every second call.
_MOST_FIRST_CALLS = 4


def graphs_wanted(device: torch.device, *, allowed: bool = True) -> bool:
    """On a GPU, where the level allows it, unless switched off; on a CPU only where asked for: it saves no launches."""
    asked = settings.current().step_graph
    if device.type == "cpu":
        return bool(asked)
    return allowed and asked is not False


@dataclass
class _Entry:
    """One kind of call: `run` computes it on `inputs`. `snapshot` is of the model after its first run; while the host
    may be changing models, `dormant` stands in for it. `eagerly`: why its graph was given up, for being slower.
    """

    form: FlatCall
    inputs: list[torch.Tensor]
    body: Callable[..., Any]
    prepared: PreparedCall | None
    output_tree: pytree.TreeSpec | None = None
    snapshot: Snapshot | None = None
    dormant: DormantSnapshot | None = None
    graph: Graph | None = None
    eagerly: str | None = None

    @property
    def memory(self) -> int:
        held = sum(tensor.nbytes for tensor in self.inputs)
        held += 0 if self.prepared is None else self.prepared.memory
        return held + (0 if self.graph is None else self.graph.memory)

    def take_in(self, tensors: list[torch.Tensor]) -> None:
        for buffer, tensor in zip(self.inputs, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)

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
        self._refused_in_training: set[Hashable] = set()
        self._attempts: dict[Hashable, Attempts] = {}
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
        if torch.compiler.is_compiling():
            return call.eager()
        if not self._busy.acquire(blocking=False):
            # Another thread is using the graphs' memory.
            with running(call.device):
                return call.eager()
        try:
            # Other models of this GPU may be called by other threads.
            with running(call.device):
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
        if flat is None or self._is_refused(model, flat.key):
            return call.eager()
        self._device = call.device
        self._wake(model)
        entry = self._current(flat.key)
        if entry is None or entry.graph is None:
            return self._without_a_graph(model, entry, call, flat)
        self._fill(entry, call, flat)
        entry.graph.replay()
        self.replays += 1
        self._first_calls[flat.key] = 0
        return entry.answer(entry.graph.outputs)

    def _without_a_graph(self, model: nn.Module, entry: _Entry | None, call: HostCall, flat: FlatCall) -> Any:
        settled = entry is not None and entry.eagerly is not None
        reason = None if settled else self._policy.why_not(model, call.device)
        if reason is not None:
            self.count_eager(reason)
            return call.eager()
        if entry is not None and (settled or not self._policy.captures):
            self._fill(entry, call, flat)
            self._first_calls[flat.key] = 0
            return entry.answer(entry.run())
        return self._first_or_second(model, entry, call, flat)

    def count_eager(self, reason: str) -> None:
        """Note that a call is answered without a graph."""
        self._eager[reason] += 1

    def _runs_eagerly(self, device: torch.device) -> bool:
        # Weights that an offload puts aside between the calls lie on no device.
        if device.type == "meta" or torch.is_grad_enabled() or transforms.at_hand():
            return True
        if torch.is_autocast_enabled(device.type) and not self._policy.under_autocast:
            return True
        # By somebody else, around this call.
        return is_capturing(device)

    def _first_or_second(self, model: nn.Module, entry: _Entry | None, call: HostCall, flat: FlatCall) -> Any:
        """Whatever comes between, the model's own answer is there."""
        following: str | None = None
        try:
            with capturing(call.device), library_scratch.given_back():
                if entry is None:
                    return self._first(model, call, flat)
                return self._second(entry, call, flat)
        except NotAdopted as error:
            attempts = self._attempts.setdefault(flat.key, Attempts())
            following = attempts.after(error)
            reason = str(error) if following is not None else attempts.why
        except Exception as error:
            if self._policy.propagates(error):
                self._entries.drop(flat.key)
                raise
            reason = _words(error)
        # Not while the error is at hand: its frames hold the memory that may just have run out.
        if following is None:
            self._entries.drop(flat.key)
        result = call.eager()
        # What the model itself cannot do either is not refused: it has said so.
        if following is None:
            self._refuse(flat.key, reason)
        else:
            self._say_not_replayed(following, reason)
        return result

    def _is_refused(self, model: nn.Module, key: Hashable) -> bool:
        if key in self._refused_in_training and not is_training(model):
            self._refused_in_training.discard(key)
            del self._refused[key]
        return key in self._refused

    def _refuse(self, key: Hashable, reason: str) -> None:
        """Calls of this kind are the model's own from now on."""
        self._refused[key] = reason
        self._say_not_replayed("it runs as it is", reason)

    def _say_not_replayed(self, following: str, reason: str) -> None:
        self._policy.say(f"a call of {self._policy.name} is not replayed from a graph, and {following}: {reason}")

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

        since = Drawn(call.device)
        warmup.compile_kernels(both_ways, call.device, self._policy.dtype(model, call))
        drawn = Drawn(call.device)
        result = entry.answer(entry.run())
        if drawn and self._draws(entry, call.device):
            # The first run after this draws what the model itself would have.
            since.undo()
            if is_training(model):
                self._refused_in_training.add(flat.key)
            self._refuse(flat.key, DRAWS_NUMBERS)
            return entry.answer(entry.run())
        # Weights that are laid together have moved by now.
        entry.snapshot = Snapshot(model, None if call.used is None else call.used(model))
        self._entries.put(flat.key, entry)
        return result

    @staticmethod
    def _draws(entry: _Entry, device: torch.device) -> bool:
        """Whether a run was the reason: another thread that drew meanwhile hardly does so at once again, and again."""
        for _ in range(2):
            drawn = Drawn(device)
            entry.run()
            if not drawn:
                return False
        return True

    def _second(self, entry: _Entry, call: HostCall, flat: FlatCall) -> Any:
        model = call.eager()
        self._fill(entry, call, flat)
        graph = self._captured(entry, call.device, flat.key)
        graph.replay()
        changed = None if entry.snapshot is None else entry.snapshot.difference()
        if changed is not None:
            raise RuntimeError(f"{changed} by being run")
        ours = entry.answer(graph.outputs)
        trial = Trial.begun(ours, model, lambda: entry.answer(entry.run()))
        for turn in range(trial.turns):
            self._take_turn(entry, graph, trial, call, flat.changed(turn + 1))
        entry.eagerly = trial.why_slower(self._policy.name)
        if entry.eagerly is None:
            entry.graph = graph
        else:
            self._policy.say(entry.eagerly)
            if entry.prepared is not None:
                entry.prepared.give_up_graph()
        self._entries.put(flat.key, entry)
        return ours

    def _captured(self, entry: _Entry, device: torch.device, key: Hashable) -> Graph:
        attempts = self._attempts.get(key)
        capture = capture_blocks if attempts is not None and attempts.in_blocks else capture_graph
        try:
            if entry.prepared is not None:
                entry.prepared.capture(device)
            return capture(entry.run, device)
        except TooSmall as error:
            raise NotAdopted(str(error)) from None
        except Exception as error:
            if self._policy.propagates(error) or is_out_of_memory(error):
                raise
            raise NotAdopted(_words(error), again=True) from error

    def _take_turn(self, entry: _Entry, graph: Graph, trial: Trial, call: HostCall, flat: FlatCall) -> None:
        """The graph is replayed first: what is new must not be where it reads before."""
        if entry.prepared is not None:
            entry.prepared.fill(*flat.with_tensors(flat.tensors))
        outputs: list[torch.Tensor] = []

        def replay() -> None:
            entry.take_in(flat.tensors)
            graph.replay()

        def run() -> None:
            entry.take_in(flat.tensors)
            outputs.extend(entry.run())

        graph_ms = _milliseconds(replay, call.device)
        replayed = entry.answer(graph.outputs)
        eager_ms = _milliseconds(run, call.device)
        trial.take(replayed, entry.answer(outputs), graph_ms, eager_ms)

    def _fill(self, entry: _Entry, call: HostCall, flat: FlatCall) -> None:
        stream = _current_stream(call.device)
        if stream is not None and self._stream is not None and self._stream != stream:
            # For the last use of the same memory.
            stream.wait_stream(self._stream)
        self._stream = stream
        entry.take_in(flat.tensors)
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

    def graphs(self) -> Graphs:
        """What has become of them by now."""
        slower = [entry.eagerly for entry in self._entries if entry.eagerly is not None]
        why_none = dict.fromkeys([*self._refused.values(), *slower, *self._eager])
        count = sum(entry.graph is not None for entry in self._entries)
        return Graphs(self._policy.name, count, self.replays, tuple(why_none))

    def notes(self) -> list[str]:
        name, graphs = self._policy.name, [entry.graph for entry in self._entries if entry.graph is not None]
        found = []
        if graphs or self.replays:
            held = f"{_counted(len(graphs), 'graph')} of its forward ({self._entries.memory / 2**20:.0f} MiB)"
            found.append(f"{name}: {held}, replayed {self.replays} times")
        found += dict.fromkeys(
            f"{name}: a graph of it is {graph.blocks} blocks, replayed in order" for graph in graphs if graph.blocks > 1
        )
        if self._entries.dropped:
            found.append(f"{name}: {self._entries.dropped} graphs gave way to others, to keep half of the memory free")
        for reason, count in self._eager.items():
            found.append(f"{name}: {_counted(count, 'call')} without a graph, because {reason}")
        if self.stale is not None:
            found.append(f"{name}: last captured anew because {self.stale}")
        found += dict.fromkeys(f"{name}: {why}" for why in self._why_not_whole())
        refusals = dict.fromkeys(self._refused.values())
        return [*found, *(f"{name}: a call is not captured, because {reason}" for reason in refusals)]

    def _why_not_whole(self) -> list[str]:
        """What was tried first, or is computed without a graph, in words."""
        slower = [entry.eagerly for entry in self._entries if entry.eagerly is not None]
        tried = [attempts for key, attempts in self._attempts.items() if key not in self._refused]
        found = [f"{'captured in blocks' if one.in_blocks else 'captured again'}, because {one.why}" for one in tried]
        wrong = [entry.prepared.wrong for entry in self._entries if entry.prepared is not None]
        once = "what is computed once a picture runs eagerly, because a graph of it differs"
        return [*slower, *found, *(f"{once} {differs}" for differs in wrong if differs is not None)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _words(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of the host and the device together. On a CPU a trace stands for the graph, and its time for nothing: none."""
    if device.type == "cuda":
        return Stopwatch(device).milliseconds(call)
    call()
    return 0.0
