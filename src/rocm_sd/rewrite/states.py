"""What modules are at a time, and whether they still are: their classes, the forwards of these, and all attributes.

No list says which attributes matter, but for a few of torch that no call reads. A call of a model goes through
this hundreds of times: all modules are compared in a few passes in C, most values by identity, and nothing is looked at
closer unless something differs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["CLASS", "WHATEVER", "Difference", "Held", "States", "bare", "equal"]

CLASS = "class"
_MISSING = object()
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type)
# Of nn.Module: read where weights are saved or loaded and never in a call, or told by the hooks that they are about.
_NOT_COMPARED = frozenset({
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
})  # fmt: skip


class _Whatever:
    """Equal to all: in place of a value that may be any."""

    __hash__ = None  # type: ignore[assignment]
    # In C, and True of anything: hundreds of these are compared before each call of a model.
    __eq__ = object.__instancecheck__


WHATEVER = _Whatever()


class Held:
    """Equal to the one object that it does not keep alive."""

    __slots__ = ("_object",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._object = ref(value)

    def __eq__(self, other: object) -> bool:
        return self._object() is other


class _Children:
    """Equal to a dict of the same modules, which it does not keep alive; `kinds`: the classes of those that were there,
    without what wraps them.
    """

    __slots__ = ("kinds", "names", "places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, children: Mapping[str, nn.Module | None]) -> None:
        self.names = list(children)
        self.kinds = {name: type(bare(child)) for name, child in children.items() if child is not None}
        self.places = [_none if child is None else ref(child) for child in children.values()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or list(other) != self.names:
            return False
        found = [place() for place in self.places]
        # A reference to a module that is gone gives None, as an empty place does.
        return found == list(other.values()) and found.count(None) == len(found) - len(self.kinds)

    def get(self, name: str) -> Any:
        return self.places[self.names.index(name)]() if name in self.names else None


def _none() -> None:
    return None


def bare(module: Any) -> Any:
    """The layer inside of a LoRA's wrapper, or of several."""
    while module is not None and "base_layer" in module._modules:  # noqa: SLF001 -- hasattr would ask more than a dict
        module = module._modules["base_layer"]  # noqa: SLF001
    return module


class Difference(NamedTuple):
    """`name` of an attribute, or CLASS; without a module, `path` is the name of a method of the class."""

    path: str
    module: nn.Module | None
    name: str
    then: Any = None
    now: Any = None

    def __str__(self) -> str:
        if self.name == CLASS and self.module is not None:
            return f"a {self.then.__name__} has become a {self.now.__name__} of {self.now.__module__}"
        if self.name == CLASS:
            return f"{self.then.__name__}.{self.path} has been replaced"
        if self.module is None:
            return f"{self.path} is gone"
        return f"{self.path}: {self.name} has changed"


class States:
    """Of these modules, by path. `any_value`: attributes of the first one that are not compared. `methods`: those of
    other classes to look at besides; None for none at all.

    `strongly`: parameters and children are compared and kept alive, as a graph needs it. Without it nothing is: a
    parameter may be another one at any time, and what another program has put on a module may hold the whole model.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        *,
        strongly: bool = False,
        methods: Iterable[tuple[type, str]] | None = (),
        any_value: Iterable[str] = (),
    ) -> None:
        found = list(modules)
        self._paths = [path for path, _ in found]
        self._modules: list[Any] = [module if strongly else ref(module) for _, module in found]
        self._strongly = strongly
        self._kinds = [type(module) for _, module in found]
        self._states = [_state(module, strongly=strongly) for _, module in found]
        for name in self._states[0].keys() & set(any_value) if found else ():
            self._states[0][name] = WHATEVER
        self._sizes = [len(vars(module)) for _, module in found]
        # Most attributes are hooks, of which there are none. What has them must stay empty; all else, stay the same.
        self._empty = [_getter(name for name, value in each.items() if _is_empty(value)) for each in self._states]
        compared = [
            {name: value for name, value in each.items() if value is not WHATEVER and not _is_empty(value)}
            for each in self._states
        ]
        self._get = [_getter(each) for each in compared]
        self._values = [get(each) for get, each in zip(self._get, compared, strict=True)]
        # All children at once: a comparison in Python for each module would be most of the time.
        self._children = [] if strongly else [_Children(vars(module)["_modules"]) for _, module in found]
        self._counts = [len(children.names) for children in self._children]
        self._places = [place for children in self._children for place in children.places]
        self._child_kinds = [type(place()) for place in self._places]
        self._methods: list[tuple[Any, str]] = []
        if methods is not None:
            self._methods = [*methods, *_methods(module for _, module in found)]
        self._owners, self._called = [kind for kind, _ in self._methods], [name for _, name in self._methods]
        self._functions = list(map(getattr, self._owners, self._called))

    def _alive(self) -> list[Any]:
        return self._modules if self._strongly else [module() for module in self._modules]

    def same(self) -> bool:
        modules = self._alive()
        if list(map(type, modules)) != self._kinds:
            return False
        own = [module.__dict__ for module in modules]
        if list(map(len, own)) != self._sizes:
            return False
        # One that is gone is no key; tensors and arrays that are compared have no one answer.
        try:
            if (
                any(chain.from_iterable(map(_call, self._empty, own)))
                or list(map(_call, self._get, own)) != self._values
            ):
                return False
        except (KeyError, RuntimeError, ValueError, TypeError):
            return False
        if not self._strongly and not self._same_children(own):
            return False
        return list(map(getattr, self._owners, self._called)) == self._functions

    def _same_children(self, own: Sequence[Mapping[str, Any]]) -> bool:
        now = list(map(_modules_of, own))
        found = list(chain.from_iterable(map(dict.values, now)))
        # A reference to a module that is gone gives None, as an empty place does: their types differ.
        if [place() for place in self._places] != found or list(map(type, found)) != self._child_kinds:
            return False
        # Of the same modules in the same order, a name could only be another one where stock's forward fails, too.
        return list(map(len, now)) == self._counts

    def _then(self) -> list[dict[str, Any]]:
        if self._strongly:
            return self._states
        return [{**state, "_modules": children} for state, children in zip(self._states, self._children, strict=True)]

    def differences(self) -> Iterator[Difference]:
        for path, module, kind, then in zip(self._paths, self._alive(), self._kinds, self._then(), strict=True):
            if module is None:
                yield Difference(path, None, "")
                continue
            if type(module) is not kind:
                yield Difference(path, module, CLASS, kind, type(module))
            now = vars(module)
            for name in sorted(now.keys() | then.keys()):
                before, after = then.get(name, _MISSING), now.get(name, _MISSING)
                if not equal(before, after):
                    yield Difference(path, module, name, before, after)
        for (kind, name), function in zip(self._methods, self._functions, strict=True):
            if getattr(kind, name) is not function:
                yield Difference(name, None, CLASS, kind, kind)


def _methods(modules: Iterable[nn.Module]) -> Iterator[tuple[type, str]]:
    """What is called of each class, once: of an attention's processor as well."""
    seen: dict[tuple[type, str], None] = {}
    for module in modules:
        seen[type(module), "forward"] = None
        if isinstance(module, nn.Conv2d):
            seen[type(module), "_conv_forward"] = None
        processor = vars(module).get("processor")
        if processor is not None and callable(processor):
            seen[type(processor), "__call__"] = None
    yield from seen


_modules_of = itemgetter("_modules")
_call = getattr(operator, "call", lambda function, value: function(value))


def _getter(names: Iterable[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Of what a module has under these names; always a tuple."""
    several = tuple(names)
    if len(several) > 1:
        return itemgetter(*several)
    return (lambda _: ()) if not several else lambda own: (own[several[0]],)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, set)) and not value


def _state(module: nn.Module, *, strongly: bool) -> dict[str, Any]:
    own = vars(module)
    # Hooks, children and a LoRA's scales are dicts inside, which change in place.
    kept = {name: _copied(value) if strongly else _kept(value) for name, value in own.items()}
    kept.update(dict.fromkeys(_NOT_COMPARED & own.keys(), WHATEVER))
    if strongly:
        return kept
    for name in ("_parameters", "_buffers", "_modules"):
        # The last by itself; of the others, whatever there is.
        kept[name] = WHATEVER if own[name] or name == "_modules" else {}
    return kept


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return value.copy() if isinstance(value, (list, set)) else value


def _kept(value: Any) -> Any:
    if type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value)):
        return value
    if isinstance(value, dict):
        return {name: _kept(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_kept(part) for part in value]) if type(value) in (list, tuple) else value
    if isinstance(value, set):
        return value.copy()
    try:
        return Held(value)
    except TypeError:
        return value


def equal(then: Any, now: Any) -> bool:
    try:
        return then is now or bool(then == now)
    except (RuntimeError, ValueError, TypeError):
        return False
