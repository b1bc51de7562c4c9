"""One call of ComfyUI's UNet as a graph: one for each kind of call, replayed with the call's tensors copied in.

As engine/captured.py does for Diffusers: the first call of a kind runs what the recording will have, the second is
recorded and compared with the host's own forward, and before each replay all that is baked in is looked at. The
host's loop stays its own, so previews, interrupts and samplers see nothing of it. What another node has put into the
model, and what is not known, is never recorded: the call then runs as it would without graphs, and the reason is told.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine import warmup
from rocm_sd.engine.calls import Call, flatten
from rocm_sd.engine.memory import free_memory
from rocm_sd.engine.recording import Recording, record
from rocm_sd.engine.shelf import Shelf, half_of_the_free_memory
from rocm_sd.engine.snapshot import Snapshot
from rocm_sd.integrations.comfyui.attention import OPTION, is_our_override
from rocm_sd.integrations.comfyui.comfyui_policy import fused
from rocm_sd.integrations.comfyui.dormant import Dormant
from rocm_sd.integrations.comfyui.host import belongs_to_the_host, say
from rocm_sd.integrations.ldm import is_replacement
from rocm_sd.ops import library_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

__all__ = ["StepGraph"]

# A model that changes itself at every call would be begun anew at every call.
_MOST_BEGINNINGS = 4
# Of the reference's norm, in units of the dtype's rounding, as in engine/captured.py.
_ROUNDINGS = 32.0
# Level auto records while so much of the card's memory is free.
_FREE_FOR_AUTO = 0.25
# What the host puts there for patches and for its own bookkeeping. A UNet without patches reads none of them.
_READ_BY_PATCHES_ONLY = frozenset({
    "activations_shape", "block", "block_index", "callbacks", "cond_or_uncond", "original_shape", "patches",
    "patches_replace", "sample_sigmas", "sigmas", "transformer_index", "uuids", "wrappers", OPTION,
})  # fmt: skip


@dataclass
class _Entry:
    """One kind of call: `body` runs it on `inputs`; `snapshot` is of the model after its first run, and while the host
    may be changing models `dormant` stands in for it.
    """

    key: Hashable
    inputs: list[torch.Tensor]
    body: Callable[[], list[torch.Tensor]]
    snapshot: Snapshot | None = None
    dormant: Dormant | None = None
    recording: Recording | None = None

    @property
    def memory(self) -> int:
        held = sum(tensor.nbytes for tensor in self.inputs)
        return held + (self.recording.memory if self.recording is not None else 0)


class StepGraph:
    """`wrapper` is what the host calls around the UNet (WrappersMP.DIFFUSION_MODEL)."""

    def __init__(self, unet: nn.Module, level: str) -> None:
        self._unet = ref(unet)
        self._level = level
        self._device: torch.device | None = None
        self._entries: Shelf[_Entry] = Shelf(self._bound)
        self._refused: dict[Hashable, str] = {}
        self._firsts: Counter[Hashable] = Counter()
        self._eager: Counter[str] = Counter()
        self._busy = threading.Lock()
        self._stream: Any = None
        self.replays = 0
        self.stale: str | None = None

    def _bound(self) -> int:
        return 2**62 if self._device is None else half_of_the_free_memory(self._device)

    def wrapper(
        self,
        executor: Any,
        x: torch.Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options

        def eager() -> Any:
            return executor(x, timesteps, context, y, _copied(control), options, **kwargs)

        if torch.compiler.is_compiling():
            return eager()
        unet = self._unet()
        try:
            reason = self._why_eager(executor, unet, options, kwargs)
        except (AttributeError, TypeError) as error:
            reason = f"this ComfyUI's wrappers are not as they are known here ({error})"
        if reason is not None or unet is None or _must_run_eagerly(x):
            if reason is not None:
                self._eager[reason] += 1
            return eager()
        given = (x, timesteps, context, y, control)
        call = flatten(given, {}, x.device)
        if call is None:
            self._eager["an input is no tensor on the device of the others"] += 1
            return eager()
        if call.key in self._refused or not self._busy.acquire(blocking=False):
            return eager()
        try:
            return self._answer(unet, _Forward(executor.original, options.get(OPTION)), call, eager)
        finally:
            self._busy.release()

    def _why_eager(
        self, executor: Any, unet: nn.Module | None, options: dict[str, Any], kwargs: dict[str, Any]
    ) -> str | None:
        if unet is None or executor.class_obj is not unet:
            return "it is another model than the one that was optimised"
        # Those around this one run as always. One inside of it would run once, when recorded.
        if executor.idx != len(executor.wrappers) - 1:
            return "another node wraps the model inside of this one"
        if any(value is not None for value in kwargs.values()):
            return f"it is called with {min(kwargs)}"
        for name in ("patches", "patches_replace"):
            for kind, found in options.get(name, {}).items():
                if found:
                    return f"another node patches it ({kind})"
        unknown = sorted(options.keys() - _READ_BY_PATCHES_ONLY)
        if unknown:
            return f"its options have {unknown[0]}, which is not known here"
        override = options.get(OPTION)
        return None if override is None or is_our_override(override) else "another node computes its attention"

    def _answer(self, unet: nn.Module, forward: _Forward, call: Call, eager: Callable[[], Any]) -> Any:
        self._device = call.tensors[0].device
        self._wake(unet)
        entry = self._current(call.key)
        if entry is not None and entry.recording is not None:
            self._fill(entry, call)
            entry.recording.replay()
            self.replays += 1
            self._firsts[call.key] = 0
            return entry.recording.outputs[0].clone()
        reason = _why_not_recorded(unet, self._device) or self._why_no_room(self._device)
        if reason is not None:
            self._eager[reason] += 1
            return eager()
        try:
            with library_scratch.given_back():
                if entry is None:
                    return self._first(unet, forward, call)
                return self._second(entry, call, eager)
        except Exception as error:
            self._entries.drop(call.key)
            # An interrupt is reset by being raised: it must reach the host. Memory may do for the call itself.
            if belongs_to_the_host(error) and not isinstance(error, torch.OutOfMemoryError):
                raise
            refused = f"{type(error).__name__}: {error}".splitlines()[0]
        # Not while the error is at hand: its frames hold the memory that may just have run out.
        self._refused[call.key] = refused
        say(f"a step is not replayed from a graph, because of {refused}")
        return eager()

    def _current(self, key: Hashable) -> _Entry | None:
        """The entry of that kind, if the model still is as it was."""
        entry = self._entries.get(key)
        stale = None if entry is None or entry.snapshot is None else entry.snapshot.difference()
        if stale is None:
            return entry
        self.stale = stale
        self._entries.drop(key)
        return None

    def _wake(self, unet: nn.Module) -> None:
        """After the host may have changed the model: what fits it no more is given up."""
        asleep = [entry for entry in self._entries if entry.dormant is not None]
        same: dict[Dormant | None, bool] = {}
        for entry in asleep:
            if entry.dormant not in same:
                same[entry.dormant] = entry.dormant is not None and entry.dormant.same(unet)
            if same[entry.dormant]:
                entry.snapshot, entry.dormant = Snapshot(unet), None
            else:
                self.stale = "the host has loaded it anew, or with other patches"
                self._entries.drop(entry.key)

    def _first(self, unet: nn.Module, forward: _Forward, call: Call) -> torch.Tensor:
        self._firsts[call.key] += 1
        if self._firsts[call.key] > _MOST_BEGINNINGS:
            raise RuntimeError(f"the model keeps changing ({self.stale})")
        device = call.tensors[0].device
        inputs = [torch.empty_like(tensor, device=device).copy_(tensor) for tensor in call.tensors]
        # What is kept of the call must not keep its tensors.
        entry = _Entry(call.key, inputs, partial(_body, forward, replace(call, tensors=[]), inputs))
        warmup.compile_kernels(entry.body, device, call.tensors[0].dtype)
        result = entry.body()[0]
        entry.snapshot = Snapshot(unet)
        self._entries.put(call.key, entry)
        return result

    def _second(self, entry: _Entry, call: Call, eager: Callable[[], Any]) -> torch.Tensor:
        self._fill(entry, call)
        recording = record(entry.body, call.tensors[0].device)
        recording.replay()
        changed = None if entry.snapshot is None else entry.snapshot.difference()
        if changed is not None:
            raise RuntimeError(f"{changed} by being run")
        ours = recording.outputs[0].clone()
        stock: torch.Tensor = eager()
        distance, allowed = _distance(ours, stock)
        if not distance <= allowed:
            self._entries.drop(call.key)
            self._refused[call.key] = f"its replay differs by {distance:.1e} of its norm, and {allowed:.1e} is allowed"
            say(f"a step is not replayed from a graph: {self._refused[call.key]}")
            return stock
        entry.recording = recording
        self._entries.put(call.key, entry)
        return ours

    def _fill(self, entry: _Entry, call: Call) -> None:
        if call.tensors[0].is_cuda:
            stream = torch.cuda.current_stream(call.tensors[0].device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        for buffer, tensor in zip(entry.inputs, call.tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)

    def _why_no_room(self, device: torch.device) -> str | None:
        if self._level == "performance" or device.type != "cuda":
            return None
        free, total = free_memory(device), torch.cuda.get_device_properties(device).total_memory
        if free is None or free >= _FREE_FOR_AUTO * total:
            return None
        return f"level auto records while {_FREE_FOR_AUTO:.0%} of the memory is free, and {free / total:.0%} is"

    def detached(self, _patcher: Any, unpatch_all: bool) -> None:
        """The host's call once a model is given up; also between two uses of one that stays where it is."""
        unet = self._unet()
        if unpatch_all or unet is None:
            self.clear()
            return
        asleep: Dormant | None = None
        for entry in list(self._entries):
            if entry.snapshot is not None and entry.snapshot.difference() is not None:
                self._entries.drop(entry.key)
            elif entry.snapshot is not None:
                asleep = asleep or Dormant(unet)
                entry.snapshot, entry.dormant = None, asleep

    def clear(self) -> None:
        """Give the memory back."""
        self._entries.clear()
        self._firsts.clear()

    def notes(self) -> list[str]:
        told = []
        graphs = sum(entry.recording is not None for entry in self._entries)
        if graphs or self.replays:
            megabytes = self._entries.memory / 2**20
            told.append(f"steps: {graphs} graphs held ({megabytes:.0f} MiB), replayed {self.replays} times")
        if self._entries.dropped:
            told.append(f"steps: {self._entries.dropped} graphs gave way to others, to keep half of the memory free")
        told += [f"steps: {count} without a graph, because {reason}" for reason, count in self._eager.items()]
        if self.stale is not None:
            told.append(f"steps: last captured anew because {self.stale}")
        told += [f"steps: a kind is not captured, because {why}" for why in dict.fromkeys(self._refused.values())]
        return told


@dataclass(frozen=True)
class _Forward:
    """The host's forward with all that is not a tensor decided: no patches, and our attention or the host's own."""

    original: Callable[..., Any]
    override: Any

    def __call__(self, x: Any, timesteps: Any, context: Any, y: Any, control: Any) -> torch.Tensor:
        options = {} if self.override is None else {OPTION: self.override}
        with fused():
            result = self.original(x, timesteps, context, y, control, options)
        if type(result) is not torch.Tensor:
            raise TypeError(f"{type(result).__name__} is not a tensor")
        return result


def _copied(control: Any) -> Any:
    """The host takes a ControlNet's tensors out of these lists as it goes: a call made twice needs them twice."""
    if not isinstance(control, dict):
        return control
    return {name: list(value) if isinstance(value, list) else value for name, value in control.items()}


def _body(forward: _Forward, call: Call, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    args, _ = call.with_tensors(inputs)
    return [forward(*args)]


def _must_run_eagerly(x: Any) -> bool:
    if type(x) is not torch.Tensor or torch.is_grad_enabled():
        return True
    if torch.is_autocast_enabled(x.device.type):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _why_not_recorded(unet: nn.Module, device: torch.device) -> str | None:
    """What in the model has to be called every time. Whatever comes later makes the recording stale."""
    for module in unet.modules():
        own = module.__dict__
        cls: Any = type(module)
        kind = cls.__name__
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return f"its {kind} has a hook"
        if not _is_of_known_package(cls):
            return f"its {kind} is of {cls.__module__}"
        forward = own.get("forward")
        foreign = getattr(forward, "__func__", None) is not cls.forward
        if forward is not None and foreign and not is_replacement(forward):
            return f"its {kind} has a forward that is not its class's own"
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
            return "its weights are computed around each call, as a LoRA's of a model that is loaded in part"
        if any(parameter is not None and parameter.device != device for parameter in own["_parameters"].values()):
            return "its weights are not all on the GPU: the host has loaded it in part"
    return None


@lru_cache(maxsize=256)
def _is_of_known_package(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] in {"comfy", "torch"}


def _distance(ours: torch.Tensor, stock: torch.Tensor) -> tuple[float, float]:
    """Of the two, and how much the dtype's rounding explains; convolutions of float32 may be computed in TF32."""
    exact = stock.double()
    distance = float((ours.double() - exact).norm()) / max(float(exact.norm()), 1e-30)
    eps = torch.finfo(stock.dtype).eps
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    if stock.is_cuda and stock.dtype == torch.float32 and tf32:
        eps = max(eps, 2.0**-10)
    return distance, _ROUNDINGS * eps
