"""Apply rules to the modules of one model, and undo them.

A rule gives a module instance another `forward`. Parameters, buffers and submodules stay where they are, so loading a
LoRA, moving to a device and saving work as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

__all__ = ["Change", "Rule", "apply", "is_applied", "undo"]


@dataclass(frozen=True)
class Rule:
    """`applies` says whether a module is of the kind; `why_not` gives the reason to leave such a module alone.

    A rule with `channels_last` uses ops of that layout: where convolutions keep another, each use would cost copies.
    One that is not `on_cpu` would call stock's own forward there every time.
    `undo` takes back what the rule's forward has done to the module (weights laid together), once forward is gone.
    `forward` is the module's own, or for a rule of several submodules at once a forward for each of them by name.
    `begin` is told the module before any forward is replaced: a submodule does not know whose it is.
    One `for_graphs` is exact as the others, but called one by one from Python a rewritten block takes 0.54 ms of a
    CPU's time and stock's own 0.42 ms: it pays where a whole step is captured once and replayed.
    """

    name: str
    summary: str
    channels_last: bool
    applies: Callable[[nn.Module], bool]
    why_not: Callable[[nn.Module], str | None]
    forward: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    undo: Callable[[nn.Module], None] | None = None
    on_cpu: bool = True
    begin: Callable[[nn.Module], None] | None = None
    for_graphs: bool = False

    def __post_init__(self) -> None:
        for forward in self.parts().values():
            # Pickle finds a bound method by its name: a pickled model comes back with its class's own forward.
            forward.__name__ = "forward"

    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """What is replaced, by path inside the module; the module itself is the empty path."""
        return {"": self.forward} if callable(self.forward) else self.forward


@dataclass(frozen=True)
class Change:
    """What happened to one module: replaced, or left alone with the reason."""

    path: str
    kind: str
    rule: str
    left_because: str | None = None
    restore: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def replaced(self) -> bool:
        return self.left_because is None


# How many models that were optimised have the module in them, and how its rule is taken back: two pipelines may share
# a UNet, and may be restored in any order. Kept beside the modules: nothing to pickle or copy.
_SHARED: WeakKeyDictionary[nn.Module, dict[str, list[Any]]] = WeakKeyDictionary()


def is_applied(module: nn.Module, rule: Rule) -> bool:
    return rule.name in _SHARED.get(module, {})


def _replace(module: nn.Module, rule: Rule) -> Callable[[], None]:
    shared = _SHARED.setdefault(module, {})
    if rule.name in shared:
        shared[rule.name][0] += 1
    else:
        shared[rule.name] = [1, _replaced(module, rule)]
    held = ref(module)

    def restore() -> None:
        alive = held()
        users = {} if alive is None else _SHARED.get(alive, {})
        if rule.name not in users:
            return
        users[rule.name][0] -= 1
        if not users[rule.name][0]:
            users.pop(rule.name)[1]()

    return restore


def _replaced(module: nn.Module, rule: Rule) -> Callable[[], None]:
    if rule.begin is not None:
        rule.begin(module)
    restores = [_replace_forward(module.get_submodule(path), forward) for path, forward in rule.parts().items()]
    held = ref(module)

    def restore() -> None:
        for one in restores:
            one()
        alive = held()
        if rule.undo is not None and alive is not None:
            rule.undo(alive)

    return restore


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    # accelerate's offload hooks wrap `forward` and keep what they wrapped in `_old_forward`: go inside the wrapper.
    attribute = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    before = module.__dict__.get(attribute)
    # A copy of an optimised module has the rule's forward, and nobody who takes it back.
    before_function = getattr(before, "__func__", None)
    had = before is not None and before_function is not forward
    # What the registry above holds must not keep the module alive: a method is kept as its function.
    own_method = getattr(before, "__self__", None) is module
    kept: Any = before_function if own_method else before
    held = ref(module)
    setattr(module, attribute, MethodType(forward, module))
    del module, before

    def restore() -> None:
        alive: Any = held()
        # A hook that was added or removed since then has moved our forward to the other attribute.
        for name in ("forward", "_old_forward") if alive is not None else ():
            if getattr(alive.__dict__.get(name), "__func__", None) is not forward:
                continue
            if not had and name == "forward":
                delattr(alive, name)
            elif not had:
                setattr(alive, name, MethodType(type(alive).forward, alive))
            else:
                setattr(alive, name, MethodType(kept, alive) if own_method else kept)

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
                changes.append(Change(path, kind, rule.name, left_because=reason))
                continue
            changes.append(Change(path, kind, rule.name, restore=_replace(module, rule)))
            if "" in rule.parts():
                break
    return changes


def undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.restore()
