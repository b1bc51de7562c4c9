"""Stand-ins for a method of one object, mostly a module's forward: put on it, known by a mark, taken off in any order.

A stand-in is a function that is bound to the object. accelerate's offload hooks wrap `forward` and keep what they
wrapped in `_old_forward`: a stand-in goes inside of the wrapper, and is found where a hook that was added or removed
since then has moved it. What it stands in for is kept beside the object, so that there is nothing to pickle or to copy,
and nothing that keeps the object alive: a copy has its class's method inside of the stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Answer = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

__all__ = [
    "discard", "inner", "innermost", "is_foreign", "is_ours", "is_placed", "is_placed_with", "is_rule", "is_shared",
    "mark", "on_instance", "original", "replace", "share", "surround",
]  # fmt: skip

Function = TypeVar("Function", bound="Callable[..., Any]")

# Every stand-in, and whether it is a rule's. Not an attribute of the function: functools.wraps would hand it on to a
# wrapper of another program.
_MARKED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
# By object and stand-in: what was on the instance, and whether that was a method of it, of which the function is kept.
_PLACED: WeakKeyDictionary[Any, dict[Any, tuple[Any, bool]]] = WeakKeyDictionary()
# By object and key: how many models that were optimised have it in them, and how it is brought back after the last of
# them. Two pipelines may share a UNet, and may be restored in any order.
_USERS: WeakKeyDictionary[Any, dict[Hashable, list[Any]]] = WeakKeyDictionary()


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


def is_foreign(owner: Any, method: Any, name: str = "forward") -> bool:
    """Whether a method that was found on the instance is neither its class's own nor a stand-in of this project."""
    return method is not None and not is_ours(method) and _function(method) is not getattr(type(owner), name, None)


def is_placed(owner: Any, method: Any) -> bool:
    """Whether the method is a stand-in that was put on this very object; that of a copy was not."""
    return is_ours(method) and _function(method) in _PLACED.get(owner, {})


def is_placed_with(owner: Any, function: Callable[..., Any]) -> bool:
    """Whether this stand-in was put on the object, and not taken off; something else may be around it."""
    return function in _PLACED.get(owner, {})


def on_instance(owner: Any, name: str = "forward") -> Any:
    """The method that the instance has, inside of accelerate's hook; None where it has its class's."""
    return owner.__dict__.get(f"_old_{name}", owner.__dict__.get(name))


def original(owner: Any, name: str = "forward") -> Any:
    """The method that the instance has, inside of all that this project has put around it; None for its class's."""
    found = on_instance(owner, name)
    while is_ours(found):
        before, is_method = _PLACED.get(owner, {}).get(_function(found), (None, False))
        found = MethodType(before, owner) if is_method else before
    return found


def innermost(owner: Any, name: str = "forward") -> Any:
    """What the first stand-in of that name was put in place of, whatever is around it by now; None for the class's."""
    for function, (before, is_method) in _PLACED.get(owner, {}).items():
        if function.__name__ == name and not is_ours(before):
            return MethodType(before, owner) if is_method else before
    return None


def discard(owner: Any) -> bool:
    """Take stand-ins off a copy of an object that had them: nobody else would. Whether it had any."""
    found = [name for name, value in owner.__dict__.items() if is_ours(value) and not is_placed(owner, value)]
    for name in found:
        if name.startswith("_old_"):
            setattr(owner, name, MethodType(getattr(type(owner), name.removeprefix("_old_")), owner))
        else:
            delattr(owner, name)
    # One that Diffusers' hooks were put around since then is kept by these.
    inside = [
        (kept, name)
        for kept in getattr(owner.__dict__.get("_diffusers_hook"), "_fn_refs", ())
        for name in ("forward", "original_forward")
        if is_ours(getattr(kept, name)) and not is_placed(owner, getattr(kept, name))
    ]
    for kept, name in inside:
        setattr(kept, name, MethodType(type(owner).forward, owner))
    return bool(found or inside)


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def inner(owner: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """What the stand-in was put in place of: the class's own in a copy of the object."""
    before, is_method = _PLACED.get(owner, {}).get(function, (None, False))
    if before is None:
        before, is_method = getattr(type(owner), function.__name__), True
    # Dynamo traces this, and not the making of a MethodType.
    bound: Callable[..., Any] = before.__get__(owner) if is_method else before
    return bound


def replace(owner: Any, function: Callable[..., Any]) -> Callable[[], None]:
    """Put a marked function in place of the method of its name; how to take it off."""
    name = function.__name__
    before = on_instance(owner, name)
    if is_ours(before) and not is_placed(owner, before):
        # The object is a copy: nobody would take that one off.
        before = None
    # A submodule of two blocks may be given the same one twice.
    if _function(before) is not function:
        is_method = getattr(before, "__self__", None) is owner
        _PLACED.setdefault(owner, {})[function] = (_function(before) if is_method else before, is_method)
        setattr(owner, f"_old_{name}" if f"_old_{name}" in owner.__dict__ else name, MethodType(function, owner))
    held = ref(owner)

    def restore() -> None:
        alive = held()
        if alive is not None and function in _PLACED.get(alive, {}):
            _take_off(alive, function)

    return restore


def _take_off(owner: Any, function: Callable[..., Any]) -> None:
    name, placed = function.__name__, _PLACED[owner]
    for place in (name, f"_old_{name}"):
        if _function(owner.__dict__.get(place)) is function:
            if placed[function][0] is None and place == name:
                delattr(owner, place)
            else:
                setattr(owner, place, inner(owner, function))
            del placed[function]
            return
    for outer in [outer for outer, (before, _) in placed.items() if before is function]:
        placed[outer] = placed.pop(function)
    # Otherwise a wrapper of another program still calls it, and it hands every call on.


@dataclass(frozen=True)
class _Inner:
    owner: ref[Any]
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return inner(self.owner(), self.function)(*args, **kwargs)


def surround(owner: Any, answer: Answer, name: str = "forward") -> Callable[[], None]:
    """Have `answer(owner, inner, args, kwargs)` called in place of the method `inner`; how to take it off.

    `inner` may be kept: it does not keep the object alive. A compiler traces the method alone, and by way of the class
    where it is the class's: what it found in a dictionary of weak references, it looks for by its place, and a garbage
    collection meanwhile moves the places.
    """
    kind, in_class = type(owner), name in vars(type(owner))
    plain = original(owner, name) is None

    # A function of its own for each: one that a wrapper keeps alive must not find what a later one calls.
    @wraps(getattr(type(owner), name))
    def stand_in(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if plain and type(self) is kind:
                return (kind.__dict__[name] if in_class else getattr(kind, name))(self, *args, **kwargs)
            return inner(self, stand_in)(*args, **kwargs)
        return answer(self, _Inner(ref(self), stand_in), args, kwargs)

    return replace(owner, mark(stand_in, name=name))


def is_shared(owner: Any, key: Hashable) -> bool:
    return key in _USERS.get(owner, {})


def share(owner: Any, key: Hashable, install: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Call `install` for the first user of `key`, and what it returned after the last one has called the result."""
    users = _USERS.setdefault(owner, {})
    if key not in users:
        users[key] = [0, install()]
    users[key][0] += 1
    held = ref(owner)

    def restore() -> None:
        users = _USERS.get(held(), {}) if held() is not None else {}
        if key in users:
            users[key][0] -= 1
            if not users[key][0]:
                users.pop(key)[1]()

    return restore
