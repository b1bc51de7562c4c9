"""What of ComfyUI is used, whether the one that runs has it, and what is reported to its user.

The host is imported when it is needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine import count_replaced, is_out_of_memory
from rocm_sd.errors import Unsupported
from rocm_sd.rewrite import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["KEY", "PatchReport", "belongs_to_the_host", "is_comfy", "log", "require", "say", "the"]

log = logging.getLogger(__name__)

# Under this name everything of ours is kept in a ModelPatcher.
KEY = "rocm_sd"
_OLDEST_TORCH = (2, 11)
_METHODS = (
    "clone", "add_object_patch", "add_wrapper_with_key", "remove_wrappers_with_key", "add_callback_with_key",
    "remove_callbacks_with_key", "set_injections", "remove_injections", "set_attachments", "get_attachment",
)  # fmt: skip
_SAID: set[str] = set()


def the(module: str) -> Any:
    """A module of the host, e.g. the("comfy.sample")."""
    return import_module(module)


def is_comfy(kind: type, name: str, module: str) -> bool:
    """By name: what is asked of a class must not import the host."""
    return kind.__name__ == name and kind.__module__ == f"comfy.{module}"


def say(sentence: str) -> None:
    """Once in the host's console, however often it happens."""
    if sentence not in _SAID:
        _SAID.add(sentence)
        log.warning("ROCm Optimizations: %s", sentence)


def belongs_to_the_host(error: BaseException) -> bool:
    """Interrupts are the user's, and a host that runs out of memory has ways of its own to go on."""
    return type(error).__name__ == "InterruptProcessingException" or (
        isinstance(error, Exception) and is_out_of_memory(error)
    )


def require(patcher: Any) -> None:
    """Raise Unsupported, in words for the user, where this host or this torch cannot be worked with."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise Unsupported("rocm-sd", f"torch {torch.__version__}", hint=f"Install torch {oldest} or newer.")
    missing = [name for name in _METHODS if not callable(getattr(patcher, name, None))]
    if missing:
        raise _too_old(f"its {type(patcher).__name__} has no {missing[0]}")
    try:
        extension: Any = the("comfy.patcher_extension")
    except ImportError as error:
        raise _too_old(str(error)) from None
    for name, attribute in (
        ("WrappersMP", "DIFFUSION_MODEL"),
        ("WrappersMP", "SAMPLER_SAMPLE"),
        ("CallbacksMP", "ON_DETACH"),
        ("PatcherInjection", ""),
    ):
        found = getattr(extension, name, None)
        if found is None or (attribute and not hasattr(found, attribute)):
            raise _too_old(f"comfy.patcher_extension has no {name}{attribute and '.'}{attribute}")


def _too_old(reason: str) -> Unsupported:
    return Unsupported("rocm-sd", f"this ComfyUI: {reason}", hint="Update ComfyUI to 0.3.64 (October 2025) or newer.")


@dataclass
class PatchReport:
    """What was done to one model of the host: replaced, or skipped and why; and what has happened to it since.

    `sources` are asked anew for every report: a graph that was captured, or a reason to fall back, comes with use.

    `failed`: what raised an error, by the rule's name; the fallback to the host holds from then on.
    """

    what: str
    arch: str
    level: str
    quality: str = "exact"
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[Callable[[], Sequence[str]]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def fail(self, rule: str, error: Exception) -> None:
        first_line = (str(error).splitlines() or [""])[0]
        self.failed[rule] = f"{type(error).__name__}: {first_line}"
        say(f"{rule} of the {self.what}: fallback to ComfyUI from here on, because of {self.failed[rule]}")

    def lines(self) -> list[str]:
        changes = list(map(Change.now, self.changes))
        replaced, count = count_replaced(changes)
        blocks = f": {replaced} of {count} blocks replaced" if count else ""
        lines = [f"{self.what} on {self.arch}{blocks}, level {self.level}, quality {self.quality}"]
        counts = Counter((change.kind, change.rule, change.why_skipped) for change in changes)
        for (kind, rule, reason), count in counts.items():
            done = f"replaced by {rule}" if reason is None else f"skipped, because {reason}"
            lines.append(f"  {count} x {kind}: {done}")
        lines += [f"  {rule}: fallback to ComfyUI after an error ({reason})" for rule, reason in self.failed.items()]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {note}" for source in self.sources for note in source()]
        return lines
