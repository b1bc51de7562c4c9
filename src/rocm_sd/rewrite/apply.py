"""Apply rules to the modules of one model, and undo them.

A rule gives a module instance another `forward`. Parameters, buffers and submodules stay where they are, so loading a
LoRA, moving to a device and saving work as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

__all__ = ["Change", "Rule", "apply", "is_applied", "undo"]


@dataclass(frozen=True)
class Rule:
    """`applies` says whether a module is of the kind; `why_not` gives the reason to skip such a module, if there may be
    one before the first call.

    A rule with `channels_last` uses ops of that layout: where convolutions keep another, each use would cost copies.
    One that is not `on_cpu` would call stock's own forward there every time.
    `undo` takes back what the rule's forward has done to the module (weights laid together), once forward is gone.
    `forward` is the module's own, or for a rule of several submodules at once a forward for each of them by name.
    `begin` gets the module before any forward is replaced: a submodule does not know whose it is.
    One `for_graphs` is exact as the others, and is applied where a whole step is captured once and replayed. Called one
    by one from Python, a rewritten transformer block takes 0.62 to 0.80 ms of the host's time where stock's own takes
    0.87 to 0.98 (SD 1.5 on an H200's host, benchmarks/launch-cost-h200): there a measurement is to say whether it pays.
    """

    name: str
    summary: str
    channels_last: bool
    applies: Callable[[nn.Module], bool]
    forward: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    why_not: Callable[[nn.Module], str | None] = lambda _module: None
    undo: Callable[[nn.Module], None] | None = None
    on_cpu: bool = True
    begin: Callable[[nn.Module], None] | None = None
    for_graphs: bool = False

    def __post_init__(self) -> None:
        for forward in self.parts().values():
            forwards.mark(forward, rule=True)

    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """What is replaced, by path inside the module; the module itself is the empty path."""
        return {"": self.forward} if callable(self.forward) else self.forward


@dataclass(frozen=True)
class Change:
    """What happened to one module: replaced, or skipped with the reason."""

    path: str
    kind: str
    rule: str
    why_skipped: str | None = None
    restore: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def replaced(self) -> bool:
        return self.why_skipped is None


def is_applied(module: nn.Module, rule: Rule) -> bool:
    return forwards.is_shared(module, rule.name)


def _replaced(module: nn.Module, rule: Rule) -> Callable[[], None]:
    if rule.begin is not None:
        rule.begin(module)
    restores = [forwards.replace(module.get_submodule(path), forward) for path, forward in rule.parts().items()]
    held = ref(module)

    def restore() -> None:
        for one in restores:
            one()
        alive = held()
        if rule.undo is not None and alive is not None:
            rule.undo(alive)

    return restore


def apply(
    model: nn.Module, rules: Sequence[Rule], *, prefix: str = "", not_channels_last: str | None = None
) -> list[Change]:
    """`not_channels_last` is the reason that the model is not laid out so, or None if it is."""
    changes = []
    for path, module in model.named_modules(prefix=prefix):
        for rule in rules:
            if not rule.applies(module):
                continue
            kind = type(module).__name__
            reason = (not_channels_last if rule.channels_last else None) or rule.why_not(module)
            if reason is not None:
                changes.append(Change(path, kind, rule.name, why_skipped=reason))
                continue
            restore = forwards.share(module, rule.name, partial(_replaced, module, rule))
            changes.append(Change(path, kind, rule.name, restore=restore))
            if "" in rule.parts():
                break
    return changes


def undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.restore()
