"""Whose methods a scheduler has: Diffusers' own, or what somebody has put on the instance or on the class.

A table stands in for what Diffusers wrote. A function is known by the file that its code is from: its name, its module
and its signature are handed on by `functools.wraps`, and a subclass inherits them.
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Methods", "own_on_instance"]


def own_on_instance(scheduler: Any) -> str | None:
    """A method that was put on the instance, and whose it is, in words; None where it has its class's methods."""
    for name, value in vars(scheduler).items():
        if callable(getattr(type(scheduler), name, None)) and forwards.is_foreign(scheduler, value, name):
            return f"a {name} of its own on the instance ({_whose(value)})"
    return None


class Methods:
    """A scheduler's methods as they stand: a class may be patched at any time, and the patch taken off again."""

    def __init__(self, scheduler: Any) -> None:
        self._of_the_class = tuple(vars(type(scheduler)).items())
        self._on_the_instance = _on_the_instance(scheduler)
        # In words, what of them is not Diffusers' own.
        self.own = own_on_instance(scheduler) or _own_on_class(type(scheduler))

    def stand(self, scheduler: Any) -> bool:
        """Whether they are the same ones. Without a look at their code: asked in every step."""
        # Tuples and dicts compare what they hold by identity first.
        same = tuple(vars(type(scheduler)).items()) == self._of_the_class
        return same and _on_the_instance(scheduler) == self._on_the_instance


def _on_the_instance(scheduler: Any) -> dict[str, Any]:
    of_the_class = vars(type(scheduler))
    return {name: value for name, value in vars(scheduler).items() if name in of_the_class}


def _own_on_class(kind: type) -> str | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    for name, value in vars(kind).items():
        # What Diffusers wraps itself: it keeps the options, and is over before a run begins.
        if name == "__init__":
            continue
        for function in _functions(value):
            if not isinstance(function, FunctionType) or function.__code__.co_filename != file:
                return f"a {name} of its own on the class ({_whose(function)})"
            helper = _own_helper(function)
            if helper is not None:
                return helper
    return None


def _own_helper(function: FunctionType) -> str | None:
    """What a method calls by a name of its module, such as the function that draws the noise."""
    names = function.__globals__
    package = sys.modules.get(names["__name__"].partition(".")[0])
    folder = next(iter(getattr(package, "__path__", [])), "")
    for name in function.__code__.co_names:
        helper = names.get(name)
        if isinstance(helper, FunctionType) and not helper.__code__.co_filename.startswith(folder):
            return f"a {name} of its own in {names['__name__']} ({_whose(helper)})"
    return None


def _functions(value: Any) -> Iterator[Any]:
    """What is called where an attribute of a class is used; nothing for plain values."""
    if isinstance(value, property):
        yield from (part for part in (value.fget, value.fset, value.fdel) if part is not None)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif callable(value) and not isinstance(value, type):
        yield value


def _whose(method: Any) -> str:
    function = method.__func__ if isinstance(method, MethodType) else method
    if isinstance(function, FunctionType):
        # Not by its own name and module, which may be those of what it wraps.
        return f"{function.__code__.co_name} of {function.__globals__['__name__']}"
    return f"an object of {type(function).__module__}.{type(function).__qualname__}"
