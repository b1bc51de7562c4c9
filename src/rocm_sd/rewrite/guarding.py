"""What every rule's forward is inside of: it does its work while the module is the one that it was put on.

Before each call the module and all that the rule may do the work of are compared with what they were. Where something
differs, or the call is one that ops are not for, the class's own forward runs, called as it came. Layers that a rule
asks about in each call (linears, convolutions, norms) may change, and so may what is known to be asked for; a LoRA, for
one, leaves the rule at work. The rule is asked then whether it still fits.
"""

from __future__ import annotations

from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_modules

from rocm_sd.rewrite import forwards
from rocm_sd.rewrite.layers import hooked
from rocm_sd.rewrite.states import CLASS, States, bare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_sd.rewrite.states import Difference

    WhyNot = Callable[[Any], str | None]

__all__ = ["Guard", "foreign_forward", "global_hooks", "is_transformed", "observer", "whose"]

Hook = TypeVar("Hook")

_LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)
# Asked for in each call that they matter to, or of no matter to any.
_MAY_CHANGE = frozenset({
    "_buffers", "_is_hf_initialized", "_load_state_dict_post_hooks", "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_parameters",
    "gradient_checkpointing", "processor", "training",
})  # fmt: skip
# Of the module itself these are called around the rule's forward, or call it.
_AROUND = frozenset({
    "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl", "_diffusers_hook", "_forward_hooks",
    "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_hf_hook", "_is_full_backward_hook", "_old_forward", "forward",
})  # fmt: skip
_FORWARD = frozenset({"_old_forward", "forward"})
_HOSTS = frozenset({"diffusers", "torch"})
_TORCHS = ((nn.Linear, "forward"), (nn.Conv2d, "forward"), (nn.Conv2d, "_conv_forward"), (nn.GroupNorm, "forward"),
           (nn.LayerNorm, "forward"))  # fmt: skip
_RESTORED = "it was restored"
_OBSERVERS: WeakSet[Any] = WeakSet()


class _Watch:
    """Of one module; `reason`: why the rule does not do its work, in the state that it was last asked about."""

    __slots__ = ("reason", "states")

    def __init__(self, states: States | None, reason: str | None) -> None:
        self.states = states
        self.reason = reason


class Guard:
    """`stand_in` is a rule's forward as it is put on modules. A forward that answers NotImplemented leaves the call to
    the class's own.

    `why_not` says whether the rule fits a module. `looks_at_classes`: False where a host replaces methods of classes
    for itself, and its rules look at them. `calls`: children that the rule calls as stock does, whatever they are.
    """

    def __init__(
        self, forward: Callable[..., Any], why_not: WhyNot, *, looks_at_classes: bool = True, calls: Sequence[str] = ()
    ) -> None:
        self._why_not = why_not
        self._calls = frozenset(calls)
        self._looks_at_classes = looks_at_classes
        self._watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()

        @wraps(forward)
        def stand_in(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # A compiler fuses stock's own steps. It finds the forward in the class's dict only: Diffusers allows
                # its blocks in graphs as they are, and of such a class a compiler sees no attribute.
                return type(module).__dict__["forward"](module, *args, **kwargs)
            if _is_ordinary(args, kwargs) and self.why(module) is None:
                answer = forward(module, *args, **kwargs)
                if answer is not NotImplemented:
                    return answer
            return type(module).forward(module, *args, **kwargs)

        self.stand_in = forwards.mark(stand_in, rule=True)

    def why(self, module: nn.Module) -> str | None:
        """Why the class's own forward runs, now; None where the rule does its work."""
        watch = self._watches.get(module)
        # A copy of a module has the forward, too.
        if watch is None:
            return self.begin(module)
        if watch.states is None or watch.states.same():
            return watch.reason
        return self._again(module, watch.states) if watch.reason is None else self.begin(module)

    def works_alone(self, module: Any) -> bool:
        """Whether calling the module is nothing but the rule's forward, now, so that another rule may do its work."""
        own = getattr(module, "__dict__", {})
        if getattr(own.get("forward"), "__func__", None) is not self.stand_in or hooked(own):
            return False
        return self.why(module) is None

    def begin(self, module: nn.Module) -> str | None:
        """Take the module as it is, if the rule fits it; otherwise why not."""
        reason = self.why_not(module)
        methods = _TORCHS if self._looks_at_classes else None
        inside = _inside(module, self._calls)
        self._watches[module] = _Watch(States(inside, methods=methods, any_value=_AROUND), reason)
        return reason

    def end(self, module: nn.Module) -> None:
        """A wrapper of another program may still call the stand-in: the class's own forward runs."""
        self._watches[module] = _Watch(None, _RESTORED)

    def why_not(self, module: nn.Module) -> str | None:
        """Why the rule does not fit the module as it is, whatever it was before and whatever calls it."""
        reason = _why_foreign(module, self._calls, looks_at_classes=self._looks_at_classes)
        if reason is not None:
            return reason
        try:
            return self._why_not(module)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            return f"it is not built as stock's ({error})"

    def _again(self, module: nn.Module, states: States) -> str | None:
        for difference in states.differences():
            if not _may_be(difference, module):
                if difference.name == CLASS or difference.module is None:
                    return f"{difference} since it was optimised"
                of = f"{difference.path}." if difference.path else ""
                changed = _slot(difference) if difference.name == "_modules" else difference.name
                return f"its {of}{changed} has changed since it was optimised"
        return self.begin(module)


def _is_ordinary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one that ops are for: with values, and nobody traces it, transforms it or hooks all modules."""
    if is_transformed() or global_hooks():
        return False
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(map(torch.Tensor.numel, tensors))


def is_transformed() -> bool:
    """Whether torch.func transforms what is called now, or torch.jit traces it."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 -- torch has no public question for it
        or torch._C._get_tracing_state() is not None  # noqa: SLF001
        or forward_ad._current_level >= 0  # noqa: SLF001
    )


def observer(hook: Hook) -> Hook:
    """Mark a hook of all modules that changes nothing and is there to see what rules do: they go on under it."""
    _OBSERVERS.add(hook)
    return hook


def global_hooks() -> bool:
    """Whether somebody hooks the calls of all modules there are."""
    hooks = (
        torch_modules._global_forward_hooks,  # noqa: SLF001 -- torch has no public question for it
        torch_modules._global_forward_pre_hooks,  # noqa: SLF001
        torch_modules._global_backward_hooks,  # noqa: SLF001
        torch_modules._global_backward_pre_hooks,  # noqa: SLF001
    )
    return any(hooks) and any(hook not in _OBSERVERS for each in hooks for hook in each.values())


def _is_layer(module: nn.Module | None) -> bool:
    """Whether rules ask about it in each call, and call it where it is not plain: a LoRA's wrapper of one, too."""
    return isinstance(bare(module), _LAYERS)


def _inside(module: nn.Module, calls: frozenset[str] = frozenset(), path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module, and what in it the rule may do the work of: what has a rule itself is asked by that."""
    yield path, module
    for name, child in module._modules.items():  # noqa: SLF001
        if child is None or name == "processor" or name in calls or _is_layer(child):
            continue
        if not forwards.is_rule(forwards.on_instance(child)):
            yield from _inside(child, path=f"{path}.{name}" if path else name)


def _may_be(difference: Difference, owner: nn.Module) -> bool:
    """Whether rules know such a change, and ask for it."""
    module, name = difference.module, difference.name
    if module is None or name == CLASS:
        return False
    if name in _MAY_CHANGE or (module is owner and name in _AROUND):
        return True
    if name in _FORWARD:
        # A rule came or went there, or a hook of accelerate went.
        return not forwards.is_foreign(module, forwards.on_instance(module))
    return name == "_modules" and _slot(difference) is None


def _slot(difference: Difference) -> str | None:
    """The first child that has become something else than a layer of the same kind, or that wrapped."""
    then, now = difference.then, difference.now
    kinds: dict[str, type] = getattr(then, "kinds", {})
    for name in dict.fromkeys((*now, *kinds)):
        before, after = then.get(name), now.get(name)
        # One that is gone by now gives None as well.
        if name == "processor" or (before is after and (after is not None or name not in kinds)):
            continue
        kind = next((kind for kind in _LAYERS if issubclass(kinds.get(name, object), kind)), None)
        if kind is None or not isinstance(bare(after), kind):
            return str(name)
    return None


def _why_foreign(module: nn.Module, calls: frozenset[str], *, looks_at_classes: bool) -> str | None:
    """What of another program is in a module that a rule would do the work of; None: nothing."""
    for path, part in _inside(module, calls):
        named = "its" if part is module else f"its {path}'s"
        own = vars(part)
        other = None if part is module else foreign_forward(part)
        if other is not None:
            return f"{named} forward is one of {other}"
        for name in own.keys() - _FORWARD:
            if isinstance(getattr(type(part), name, None), FunctionType) and not forwards.is_ours(own[name]):
                return f"{named} {name} is not its class's own"
        if part is not module and hooked(own):
            return f"its {path} has a hook"
        patched = _patched(type(part), "forward") if looks_at_classes else None
        if patched is None and looks_at_classes and callable(own.get("processor")):
            patched = _patched(type(own["processor"]), "__call__")
        if patched is not None:
            return patched
    return next(filter(None, (_patched(*method) for method in _TORCHS)), None) if looks_at_classes else None


def foreign_forward(module: nn.Module) -> str | None:
    """Whose forward the module has, inside of what this project has put around it, by the name of a module; None where
    it is its class's own.
    """
    method = forwards.original(module)
    return whose(method) if forwards.is_foreign(module, method) else None


def whose(method: Any) -> str:
    """The name of the module that a method or a function is of."""
    function = getattr(method, "func", method)
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__module__", None) or type(method).__module__)


def _patched(kind: Any, name: str) -> str | None:
    """Who has replaced a method of a class of Diffusers or torch, in words: by where its code is, not by its name."""
    function = getattr(kind, name, None)
    home = str(kind.__module__).partition(".")[0]
    if home not in _HOSTS or not isinstance(function, FunctionType) or forwards.is_ours(function):
        return None
    found = str(function.__globals__.get("__name__"))
    if found.partition(".")[0] in _HOSTS:
        return None
    return f"{kind.__name__}.{name} was replaced by {found}"
