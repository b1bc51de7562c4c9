"""Diffusers asks a model for its device and its dtype by a walk over all of its modules, in search of hooks that would
say otherwise: for a picture of SDXL eleven times, 2.8 ms each for its UNet on one core.

Asked by those functions of Diffusers, a model of which no module has a hook says that there is none to look at. Its
modules are compared with those that it had when it was last walked over, which takes a tenth of that. Whoever else
walks over them gets torch's own walk.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from rocm_sd.engine.installed import Installed
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["install"]

_KEY, _HOOK = "hook questions", "_diffusers_hook"
# By module and function of Diffusers: all names in its code. One that uses others may ask for more than for a hook.
_ASKING = {
    ("diffusers.hooks.group_offloading", "_get_top_level_group_offload_hook"): frozenset(
        {"modules", "hasattr", _HOOK, "get_hook", "_GROUP_OFFLOADING"}
    ),
    ("diffusers.models.modeling_utils", "get_parameter_dtype"): frozenset(
        {"isinstance", "nn", "Module", "named_modules", "hasattr", _HOOK, "get_hook", "compute_dtype"}
        | {"named_parameters", "dtype", "_keep_in_fp32_modules", "any", "is_floating_point", "buffers"}
        | {"_named_members", "list", "str", "tuple", "Tensor"}
    ),
}


def install(models: Iterable[nn.Module]) -> Installed:
    """For models that several pipelines may share."""
    restores = [forwards.share(model, _KEY, partial(_install, model)) for model in models]

    def restore() -> None:
        for put_back in restores:
            put_back()

    return Installed(tuple, restore)


def _install(model: nn.Module) -> Callable[[], None]:
    _KNOWN[model] = _Modules(model)
    put_back, held = forwards.surround(model, _answer, "named_modules"), ref(model)

    def restore() -> None:
        put_back()
        # What is known holds every layer's attributes, those of layers that were replaced meanwhile among them.
        model = held()
        if model is not None:
            _KNOWN.pop(model, None)

    return restore


def _answer(model: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _KNOWN.get(model)
    if known is None or not forwards.is_shared(model, _KEY) or not _asks_for_hooks():
        return inner(*args, **kwargs)
    if not known.same(model):
        known = _KNOWN[model] = _Modules(model)
    return iter(()) if known.unhooked(model) else inner(*args, **kwargs)


def _asks_for_hooks() -> bool:
    # Above are the answer, the stand-in that gives it, and for `modules` torch's method of that name.
    frame = sys._getframe(3)  # noqa: SLF001 -- who asks decides what the answer may leave out
    asking = frame.f_back if frame.f_code is nn.Module.modules.__code__ else frame
    if asking is None:
        return False
    names = _ASKING.get((str(asking.f_globals.get("__name__")), asking.f_code.co_name))
    return names is not None and names.issuperset(asking.f_code.co_names)


class _Modules:
    """All modules inside of a model, which it does not keep alive."""

    def __init__(self, model: nn.Module) -> None:
        inside = [module for module in model.modules() if module is not model]
        self._own = list(model._modules.values())  # noqa: SLF001 -- its children, without a walk
        self._attributes = [module.__dict__ for module in inside]
        self._leaves = [own for own in self._attributes if not own["_modules"]]
        self._holding = [(own, list(own["_modules"].values())) for own in self._attributes if own["_modules"]]

    def same(self, model: nn.Module) -> bool:
        return (
            list(model._modules.values()) == self._own  # noqa: SLF001
            and not any(own["_modules"] for own in self._leaves)
            and all(list(own["_modules"].values()) == children for own, children in self._holding)
        )

    def unhooked(self, model: nn.Module) -> bool:
        return not hasattr(model, _HOOK) and not any(_HOOK in own for own in self._attributes)


_KNOWN: WeakKeyDictionary[nn.Module, _Modules] = WeakKeyDictionary()
