"""The setting of the convolution library that `rocm-sd tune` found to be faster here, in force while a model is called.

`searched`: cuDNN or MIOpen tries its algorithms at the first call of each size. `none`: torch convolves without it.
Both are flags of torch for the whole process, under the name of cuDNN on ROCm, too. So they are set around a call of
the model and put back after it, also after an error; of calls within one another, or of several threads, the first
sets them and the last puts them back. Flags that are not as torch comes are the user's or the host's, and stay.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.arch.torch_libraries import convolution_library
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.memory import is_capturing
from rocm_sd.rewrite import forwards
from rocm_sd.tuning import environment, resolve
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rocm_sd.tuning import Choice

__all__ = ["ChosenLibrary", "Flags", "choose_library", "convolving_models", "flags_set_by_hand", "install_library"]

_OP = "convolution_library"
_SEARCHED, _WITHOUT = "searched", "none"
_MOST_KINDS = 1024


class Flags(NamedTuple):
    """torch.backends.cudnn.enabled and .benchmark."""

    enabled: bool
    benchmark: bool


_AS_TORCH_COMES = Flags(enabled=True, benchmark=False)
_WANTED = {_SEARCHED: Flags(enabled=True, benchmark=True), _WITHOUT: Flags(enabled=False, benchmark=False)}


class _Process:
    """The flags that calls have set: of the process, and so of all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls = 0
        self._ours = _AS_TORCH_COMES

    def by_hand(self) -> Flags:
        """As they are outside of these calls."""
        with self._lock:
            now = _now()
            if not self._calls:
                return now
            # What has changed since a call set it was changed by somebody else.
            each = zip(now, self._ours, _AS_TORCH_COMES, strict=True)
            return Flags(*(stock if value == ours else value for value, ours, stock in each))

    def enter(self, wanted: Flags) -> str | None:
        """The reason, where they stay as they are."""
        with self._lock:
            if self._calls:
                if wanted != self._ours:
                    return "a call with another setting was under way"
            else:
                reason = _why_kept(_now())
                if reason is not None:
                    return reason
                self._ours = wanted
                _put(wanted)
            self._calls += 1
            return None

    def leave(self) -> None:
        with self._lock:
            outside = self.by_hand()
            self._calls -= 1
            if not self._calls:
                _put(outside)


_PROCESS = _Process()


def _now() -> Flags:
    # Before each replay: by their names in torch.backends it takes twice as long.
    return Flags(torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark())  # noqa: SLF001


def _put(flags: Flags) -> None:
    # As torch.backends.cudnn.flags() does it, which would also overwrite the precision that convolutions compute in.
    torch._C._set_cudnn_enabled(flags.enabled)  # noqa: SLF001
    torch._C._set_cudnn_benchmark(flags.benchmark)  # noqa: SLF001


def _why_kept(flags: Flags) -> str | None:
    changed = [
        f"torch.backends.cudnn.{name} is {value}, and torch comes with {stock}"
        for name, value, stock in zip(Flags._fields, flags, _AS_TORCH_COMES, strict=True)
        if value != stock
    ]
    return " and ".join(changed) or None


def flags_set_by_hand() -> Flags:
    """The flags as the user or the host program has them, also within a call that has set others."""
    return _PROCESS.by_hand()


def choose_library(device: torch.device) -> ChosenLibrary:
    """What was measured on this device; as torch is set where nothing was."""
    known = (STOCK, *_WANTED)
    found = resolve.choose(_OP, arch.detect(device).name, {}, environment.current(device), "", known)
    return ChosenLibrary(found, device)


class ChosenLibrary:
    """One measured choice, for calls on one device."""

    def __init__(self, choice: Choice, device: torch.device) -> None:
        self._choice = choice
        self._device = device
        self._name = convolution_library(device.type).name
        # Of a CPU nothing but convolutions is timed, and oneDNN is more than those.
        self._left_on = choice.implementation == _WITHOUT and device.type == "cpu"
        self._wanted = None if self._left_on else _WANTED.get(choice.implementation)
        self._ran: set[Any] = set()
        self._left: Counter[str] = Counter()

    @property
    def is_wanted(self) -> bool:
        return self._wanted is not None

    @property
    def serves_a_vae(self) -> bool:
        """Without the library a 3x3 convolution unfolds its input to nine times the memory: 1.2 GB at the end of the
        decoder of SD 1.5 for 512x512 in 16 bits, of which the VAE's plan knows nothing. Its UNet's largest has 71 MB.
        """
        return self._choice.implementation == _SEARCHED

    def why_not(self, model: nn.Module) -> str | None:
        """Why this model is called as torch is set; asked anew at each call, since a layout may change."""
        if self._choice.implementation != _WITHOUT or not _is_channels_last(model):
            return None
        # Torch's own convolution would copy every input and every weight to the other layout, at every call.
        return f"its convolutions are channels-last, and without {self._name} contiguous ones were timed"

    @contextmanager
    def in_force(self, model: nn.Module, *call: Any) -> Iterator[None]:
        """`call`: its arguments, by which a call in a capture is known to have been searched before."""
        if self._wanted is None or torch.compiler.is_compiling():
            yield
            return
        reason = self.why_not(model) or self._why_no_search(call) or _PROCESS.enter(self._wanted)
        if reason is not None:
            self._left[reason] += 1
            yield
            return
        try:
            yield
        finally:
            _PROCESS.leave()

    def _why_no_search(self, call: tuple[Any, ...]) -> str | None:
        if self._choice.implementation != _SEARCHED:
            return None
        if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are asked for, and a search may end otherwise the next time"
        # A search within a capture would break it. cuDNN's findings are those of a thread.
        kind = (threading.get_ident(), *_kinds(call))
        if is_capturing(self._device):
            return None if kind in self._ran else "nothing can be searched while a graph is captured"
        if len(self._ran) >= _MOST_KINDS:
            self._ran.clear()
        self._ran.add(kind)
        return None

    def notes(self, model: nn.Module | None = None) -> list[str]:
        """What is in force and why, for one model or for any; nothing where nothing was measured."""
        choice, name = self._choice, self._name
        if choice.source != "measured here":
            return []
        if self._left_on:
            return [f"{name} stays on: convolutions were faster without it ({choice.why}), but it does more than those"]
        if self._wanted is None:
            return [f"convolutions run with {name} as torch is set ({choice.why})"]
        way = f"without {name}"
        if choice.implementation == _SEARCHED:
            way = f"with what {name} finds by a search at the first call of each size"
        kept = _why_kept(flags_set_by_hand()) or (None if model is None else self.why_not(model))
        if kept is not None:
            notes = [f"convolutions run as torch is set, because {kept}; {way} they were faster ({choice.why})"]
        else:
            notes = [f"convolutions run {way} ({choice.why})"]
        return notes + [
            f"{count} call{'' if count == 1 else 's'} ran as torch is set, because {why}"
            for why, count in self._left.items()
        ]

    def notes_of_a_vae(self) -> list[str]:
        """Why a VAE runs as torch is set where other models do not."""
        if self.serves_a_vae or not self.is_wanted:
            return []
        return [f"the VAE's convolutions keep {self._name}: without it they take memory that is not in its plan"]


def _is_channels_last(model: nn.Module) -> bool:
    """By the first convolution with an extent: all of a model are laid out together."""
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and max(layer.kernel_size) > 1)
    first = next(layers, None)
    return first is not None and not first.weight.is_contiguous()


def _kinds(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value.shape, value.dtype
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _kinds(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _kinds(part)


def convolving_models(module: nn.Module, library: ChosenLibrary, *, is_vae: bool) -> list[nn.Module]:
    """The models whose forwards convolve: of a VAE its two halves, of several ControlNets each.

    A VAE that is decoded in strips calls neither half: strips have many heights, and each would be searched.
    """
    parts: Iterable[Any] = getattr(module, "nets", (module,))
    if is_vae:
        halves = (getattr(module, name, None) for name in ("encoder", "decoder"))
        parts = [half for half in halves if isinstance(half, nn.Module)] if library.serves_a_vae else ()
    return [part for part in parts if any(isinstance(layer, nn.Conv2d) for layer in part.modules())]


def install_library(models: Iterable[nn.Module], library: ChosenLibrary, *, has_vae: bool) -> Installed:
    """Inside of graphs, whose replays cost nothing more then, and of accelerate's hooks: before either is placed."""
    restores: list[Callable[[], None]] = []
    skipped = []
    for model in models if library.is_wanted else ():
        kind, reason = type(model).__name__, library.why_not(model)
        if reason is not None:
            skipped.append(f"{kind} is called with the library as torch is set: {reason}")
            continue
        let_go = _steer(model, library)
        if let_go is None:
            skipped.append(f"{kind} runs as in the pipeline that shares it and was optimised before")
        else:
            restores.append(let_go)

    def notes() -> list[str]:
        in_force = library.notes() if restores or not library.is_wanted else []
        return [*in_force, *skipped, *(library.notes_of_a_vae() if has_vae else ())]

    def restore() -> None:
        for let_go in restores:
            let_go()

    return Installed(notes, restore)


def _steer(model: nn.Module, library: ChosenLibrary) -> Callable[[], None] | None:
    """How the model is let go of; None where the pipeline that shares it was optimised without this before."""
    found = forwards.on_instance(model)
    if not forwards.is_shared(model, _OP) and forwards.is_placed(model, found) and not forwards.is_rule(found):
        return None
    return forwards.share(model, _OP, lambda: _steered(model, library))


def _steered(model: nn.Module, library: ChosenLibrary) -> Callable[[], None]:
    def answer(model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A copy of the model, or one whose wrapper by somebody else outlived `restore`, runs as torch is set.
        with library.in_force(model, args, kwargs) if forwards.is_shared(model, _OP) else nullcontext():
            return inner(*args, **kwargs)

    return forwards.surround(model, answer)
