"""Apply rules to the modules of one model, and undo them.

A rule gives a module instance another `forward`. Parameters, buffers and submodules stay where they are, so loading a
LoRA, moving to a device and saving work as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from rocm_sd.rewrite import forwards
from rocm_sd.rewrite.guarding import Guard, foreign_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

__all__ = ["Change", "Rule", "apply", "is_applied", "undo"]


@dataclass(frozen=True)
class Rule:
    """`of_kind` says whether a class is the rule's, and `applies` whether a module of that class is; `why_not` gives
    the reason to skip such a module. It is asked again where the module has changed (guarding.py).

    `forward` may answer NotImplemented: the class's own then runs, called as it came.

    A rule with `channels_last` uses ops of that layout: where convolutions keep another, each use would cost copies.
    One that is not `on_cpu` would call stock's own forward there every time.
    `undo` takes back what the rule's forward has done to the module (weights laid together), once forward is gone.
    `forward` is the module's own, or for a rule of several submodules at once a forward for each of them by name.
    `begin` gets the module before its forward is replaced: a submodule does not know whose it is.
    `looks_at_classes`: whether a method that was replaced on a class is noticed; a host's policy may do that itself.
    `calls`: children that `forward` calls as stock does; what becomes of them is no matter of the rule.
    One `for_graphs` is exact as the others, and is applied where a whole step is captured once and replayed. Called one
    by one from Python, a rewritten transformer block takes 0.62 to 0.80 ms of the host's time where stock's own takes
    0.87 to 0.98 (SD 1.5 on an H200's host, benchmarks/launch-cost-h200): there a measurement is to say whether it pays.
    """

    name: str
    summary: str
    channels_last: bool
    of_kind: Callable[[type], bool]
    forward: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    applies: Callable[[nn.Module], bool] = lambda _module: True
    why_not: Callable[[nn.Module], str | None] = lambda _module: None
    undo: Callable[[nn.Module], None] | None = None
    on_cpu: bool = True
    begin: Callable[[nn.Module], None] | None = None
    for_graphs: bool = False
    looks_at_classes: bool = True
    calls: tuple[str, ...] = ()

    @cached_property
    def guards(self) -> Mapping[str, Guard]:
        """What is replaced, by path inside the module; the module itself is the empty path."""
        if callable(self.forward):
            looks = self.looks_at_classes
            return {"": Guard(self.forward, self._why_not_now, looks_at_classes=looks, calls=self.calls)}
        # Of a part nothing is known but that it is as it was.
        return {path: Guard(forward, lambda _part: None) for path, forward in self.forward.items()}

    def _why_not_now(self, module: nn.Module) -> str | None:
        return self.why_not(module) if self.is_for(module) else "it is no longer of the kind that the rule is for"

    def is_for(self, module: nn.Module) -> bool:
        return self.of_kind(type(module)) and self.applies(module)

    def works_alone(self, module: Any, path: str = "") -> bool:
        """Whether calling the module, or the part of one at that path, is nothing but this rule's forward, now."""
        return self.guards[path].works_alone(module)


@dataclass(frozen=True)
class Change:
    """What happened to one module: replaced, or skipped with the reason."""

    path: str
    kind: str
    rule: str
    why_skipped: str | None = None
    restore: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    why_now: Callable[[], str | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def replaced(self) -> bool:
        return self.why_skipped is None

    def now(self) -> Change:
        """With the reason, if what was replaced runs as stock does by now, because it has changed since."""
        reason = None if not self.replaced else self.why_now()
        return self if reason is None else replace(self, why_skipped=reason)


def is_applied(module: nn.Module, rule: Rule) -> bool:
    return forwards.is_shared(module, rule.name)


def _parts(module: nn.Module, rule: Rule) -> list[tuple[nn.Module, Guard]]:
    return [(module.get_submodule(path), guard) for path, guard in rule.guards.items()]


def _replaced(module: nn.Module, rule: Rule) -> Callable[[], None]:
    if rule.begin is not None:
        rule.begin(module)
    parts = [(ref(part), guard) for part, guard in _parts(module, rule)]
    restores = [forwards.replace(part, guard.stand_in) for part, guard in _parts(module, rule)]
    for part, guard in _parts(module, rule):
        guard.begin(part)
    held = ref(module)

    def restore() -> None:
        for one in restores:
            one()
        for known, guard in parts:
            part = known()
            if part is not None:
                guard.end(part)
        alive = held()
        if rule.undo is not None and alive is not None:
            rule.undo(alive)

    return restore


def _why_not(module: nn.Module, rule: Rule) -> str | None:
    """Why a module of the rule's kind is left as it is: another program's forward on it must not be lost."""
    try:
        parts = _parts(module, rule)
    except AttributeError as error:
        return f"it is not built as stock's ({error})"
    for part, guard in parts:
        whose = foreign_forward(part)
        reason = guard.why_not(part) if whose is None else f"its forward is one of {whose}"
        if reason is not None:
            return reason
    return None if "" in rule.guards else rule.why_not(module)


def _why_now(held: ref[nn.Module], rule: Rule) -> str | None:
    module = held()
    if module is None:
        return None
    # A forward that came later may still call the rule's.
    reasons = (guard.why(part) for part, guard in _parts(module, rule) if forwards.is_placed_with(part, guard.stand_in))
    return next(filter(None, reasons), None)


def apply(
    model: nn.Module, rules: Sequence[Rule], *, prefix: str = "", not_channels_last: str | None = None
) -> list[Change]:
    """`not_channels_last` is the reason that the model is not laid out so, or None if it is.

    What lies inside comes first: what a rule does not look at, because it has a rule itself, is known by then.
    """
    changes: list[list[Change]] = []
    for path, module in reversed(list(model.named_modules(prefix=prefix))):
        changes.append([])
        for rule in rules:
            change = _applied(path, module, rule, not_channels_last if rule.channels_last else None)
            if change is None:
                continue
            changes[-1].append(change)
            if change.replaced and "" in rule.guards:
                break
    return [change for of_one in reversed(changes) for change in of_one]


def _applied(path: str, module: nn.Module, rule: Rule, reason: str | None) -> Change | None:
    kind = type(module)
    skipped = partial(Change, path, kind.__name__, rule.name)
    if not rule.of_kind(kind):
        # Token merging, for one, gives blocks a class of its own.
        if any(map(rule.of_kind, kind.__mro__[1:])):
            return skipped(f"its class is one of {kind.__module__}")
        return None
    if not rule.applies(module):
        return None
    reason = reason or _why_not(module, rule)
    if reason is not None:
        return skipped(reason)
    restore = forwards.share(module, rule.name, partial(_replaced, module, rule))
    return skipped(restore=restore, why_now=partial(_why_now, ref(module), rule))


def undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.restore()
