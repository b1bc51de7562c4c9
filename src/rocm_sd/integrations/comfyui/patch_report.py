"""What was done to one model of the host: replaced, or skipped and why; and what has happened to it since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocm_sd.integrations.comfyui.host import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.rewrite import Change

__all__ = ["PatchReport"]


@dataclass
class PatchReport:
    """`sources` are asked anew for every report: a graph that was captured, or a reason to fall back, comes with use.

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
        lines = [f"{self.what} on {self.arch}, level {self.level}, quality {self.quality}"]
        counts = Counter((change.kind, change.rule, change.left_because) for change in self.changes)
        for (kind, rule, reason), count in counts.items():
            done = f"replaced by {rule}" if reason is None else f"skipped, because {reason}"
            lines.append(f"  {count} x {kind}: {done}")
        lines += [f"  {rule}: fallback to ComfyUI after an error ({reason})" for rule, reason in self.failed.items()]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {note}" for source in self.sources for note in source()]
        return lines
