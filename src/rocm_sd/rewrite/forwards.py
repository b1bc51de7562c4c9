"""Stand-ins for the forward of a module instance: put on it, known by a mark, and taken off in any order.

A stand-in is a function that is bound to the module. accelerate's offload hooks wrap `forward` and keep what they
wrapped in `_old_forward`: a stand-in goes inside of the wrapper, and is found where a hook that was added or removed
since then has moved it. What it stands in for is kept beside the module, so that there is nothing to pickle or to copy,
and nothing that keeps the module alive: a copy of a module has its class's forward inside of the stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

__all__ = [
    "inner",
    "is_ours",
    "is_placed",
    "is_rule",
    "is_shared",
    "mark",
    "on_instance",
    "replace",
    "share",
    "surround",
]

_PLACES = ("forward", "_old_forward")

Function = TypeVar("Function", bound="Callable[..., Any]")

# Every stand-in, and whether it is a rule's. Not an attribute of the function: functools.wraps would hand it on to a
# wrapper of another program.
_MARKED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def mark(function: Function, *, name: str = "forward", rule: bool = False) -> Function:
    """Mark a stand-in for the method of that name. `rule`: it computes what the module computes, by other ops.

    Pickle looks a bound method up by its name: a pickled model comes back with its class's own.
    """
    function.__name__ = name
    _MARKED[function] = rule
    return function


def is_ours(method: Any) -> bool:
    """Whether a method, or the function of one, is a stand-in of this project."""
    function = _function(method)
    return isinstance(function, FunctionType) and function in _MARKED


def is_rule(method: Any) -> bool:
    return is_ours(method) and _MARKED[_function(method)]


def on_instance(module: nn.Module) -> Any:
    """The forward that the instance has, inside of accelerate's hook; None where it has its class's."""
    own = module.__dict__
    return own.get("_old_forward", own.get("forward"))


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


@dataclass
class _Kept:
    """What a stand-in found: None for the class's forward, and a function where it was a method of the module."""

    forward: Any = None
    is_method: bool = False

    def bound(self, module: nn.Module) -> Callable[..., Any]:
        if self.forward is None:
            return MethodType(type(module).forward, module)
        found: Callable[..., Any] = MethodType(self.forward, module) if self.is_method else self.forward
        return found


_STAND_INS: WeakKeyDictionary[nn.Module, dict[Any, _Kept]] = WeakKeyDictionary()


def is_placed(module: nn.Module, method: Any) -> bool:
    """Whether the method is a stand-in that was put on this very module; that of a copy was not."""
    return is_ours(method) and _function(method) in _STAND_INS.get(module, {})


def inner(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """What the stand-in `function` was put in place of: the class's forward in a copy of the module."""
    return _STAND_INS.get(module, {}).get(function, _Kept()).bound(module)


def replace(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Put a marked function in place of the module's forward; how to take it off."""
    place = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    stand_ins = _STAND_INS.setdefault(module, {})
    before = module.__dict__.get(place)
    if is_ours(before) and not is_placed(module, before):
        # The module is a copy: nobody would take that one off.
        before = None
    # A submodule of two blocks may be given the same one twice.
    if _function(before) is not function:
        is_method = getattr(before, "__self__", None) is module
        stand_ins[function] = _Kept(_function(before) if is_method else before, is_method)
        setattr(module, place, MethodType(function, module))
    held = ref(module)

    def restore() -> None:
        alive = held()
        if alive is not None:
            _take_off(alive, function)

    return restore


def _take_off(module: nn.Module, function: Callable[..., Any]) -> None:
    stand_ins = _STAND_INS.get(module, {})
    kept = stand_ins.get(function)
    if kept is None:
        return
    for place in _PLACES:
        if _function(module.__dict__.get(place)) is function:
            if kept.forward is None and place == "forward":
                delattr(module, place)
            else:
                setattr(module, place, kept.bound(module))
            stand_ins.pop(function, None)
    for outer in stand_ins.values():
        if outer.forward is function:
            outer.forward, outer.is_method = kept.forward, kept.is_method
            del stand_ins[function]
            return
    # Otherwise a wrapper of another program still calls it, and it hands every call on.


@dataclass(frozen=True)
class _Inner:
    module: ref[nn.Module]
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        return inner(module, self.function)(*args, **kwargs)


def surround(
    module: nn.Module, answer: Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Callable[[], None]:
    """Have `answer(module, inner, args, kwargs)` called in place of the forward `inner`; how to take it off.

    `inner` may be kept: it does not keep the module alive. A compiler traces the forward alone.
    """

    # A function of its own for each: one that a wrapper keeps alive must not find what a later one calls.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(self, forward)(*args, **kwargs)
        return answer(self, _Inner(ref(self), forward), args, kwargs)

    return replace(module, mark(forward))


# How many models that were optimised have the module in them, and how it is brought back after the last of them: two
# pipelines may share a UNet, and may be restored in any order.
_USERS: WeakKeyDictionary[nn.Module, dict[Hashable, list[Any]]] = WeakKeyDictionary()


def is_shared(module: nn.Module, key: Hashable) -> bool:
    return key in _USERS.get(module, {})


def share(module: nn.Module, key: Hashable, install: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Call `install` for the first user of `key`, and what it returned after the last one has called the result."""
    users = _USERS.setdefault(module, {})
    if key not in users:
        users[key] = [0, install()]
    users[key][0] += 1
    held = ref(module)

    def restore() -> None:
        alive = held()
        users = {} if alive is None else _USERS.get(alive, {})
        if key not in users:
            return
        users[key][0] -= 1
        if not users[key][0]:
            users.pop(key)[1]()

    return restore
