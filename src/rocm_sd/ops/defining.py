"""define(function, ...) -> the op whose public function it is: all that follows from the function's signature.

    def scale(x: torch.Tensor, by: torch.Tensor | None = None, implementation: str | None = None) -> torch.Tensor:
        # refuse what is not to be had
        return OP.call(x, by, implementation=implementation)

    OP = define(scale, ...)

The op's arguments are those of the function but `implementation`, in its order; implementations, reference and samples
take them in that order, too. From the annotations comes the schema of `torch.ops.rocm_sd.scale`. `OP.call` refuses what
no op takes (dtypes, tensors on several devices), and computes at once where torch's dispatcher has nothing to add.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args, get_type_hints

import torch

from rocm_sd import transforms
from rocm_sd.errors import Unsupported
from rocm_sd.ops.registry import Op, register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rocm_sd.ops.definition import Family, Implementation, Tuning, Verification
    from rocm_sd.tuning import Problem

__all__ = ["FLOATS", "Argument", "DefinedOp", "Saved", "Signature", "define"]

R = TypeVar("R")
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_TYPES = {torch.Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_TENSOR = "_tensor"  # after the name of what is a number or a tensor: torch's schemas have no such type


@dataclass(frozen=True)
class Argument:
    name: str
    schema: str
    is_tensor: bool
    is_either: bool
    default: Any


@dataclass(frozen=True)
class Signature:
    """`arguments` are those of the op; `dispatched` those of them that torch's dispatcher is given."""

    arguments: tuple[Argument, ...]
    dispatched: tuple[Argument, ...]
    schema: str

    @classmethod
    def of(cls, function: Callable[..., Any], eager_only: tuple[str, ...]) -> Signature:
        hints = get_type_hints(function)
        arguments = tuple(
            _argument(name, hints[name], given.default)
            for name, given in inspect.signature(function).parameters.items()
            if name != "implementation"
        )
        dispatched = tuple(each for each in arguments if each.name not in eager_only)
        assert dispatched == arguments[: len(dispatched)], f"{eager_only} must be the last of {function.__name__}"
        returned = hints["return"]
        results = f"({', '.join('Tensor' for _ in get_args(returned))})" if get_args(returned) else "Tensor"
        inside = ", ".join((*(each.schema for each in dispatched), "str? implementation=None"))
        return cls(arguments, dispatched, f"({inside}) -> {results}")

    def schema_names(self) -> list[str]:
        """Of what torch's op is given, in the order of the schema."""
        return [name for each in self.dispatched for name in (each.name, each.name + _OF_TENSOR)[: 1 + each.is_either]]

    def spread(self, arguments: tuple[Any, ...]) -> list[Any]:
        """As the schema has them: a number and a tensor, one of which is None, for what may be either."""
        given: list[Any] = []
        for place, each in enumerate(self.dispatched):
            # Those at the end may be left out.
            value = arguments[place] if place < len(arguments) else each.default
            if each.is_either:
                given += [None, value] if isinstance(value, torch.Tensor) else [value, None]
            else:
                given.append(value)
        return given

    def named(self, arguments: Iterable[Any]) -> dict[str, Any]:
        return {each.name: value for each, value in zip(self.dispatched, arguments, strict=True)}

    def gathered(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[list[Any], str | None]:
        """The op's arguments and the implementation, of what torch's op was given; torch may leave defaults out."""
        found = {**dict(zip((*self.schema_names(), "implementation"), given, strict=False)), **named}
        arguments = []
        for each in self.dispatched:
            value = found.get(each.name, None if each.default is inspect.Parameter.empty else each.default)
            tensor = found.get(each.name + _OF_TENSOR) if each.is_either else None
            arguments.append(value if tensor is None else tensor)
        return arguments, found.get("implementation")


@dataclass(frozen=True)
class DefinedOp(Op, Generic[R]):
    """An op that has a public function and is one of torch's. `call` is the function's body, after its own refusals.

    `at_once` refuses what no op takes, and says whether torch's dispatcher would have nothing to add: plain tensors, no
    gradient wanted, nothing traced. Through it a call costs about 0.2 ms of Python, which a small model on a CPU feels.
    """

    signature: Signature = field(kw_only=True)
    call: Callable[..., R] = field(kw_only=True)
    at_once: Callable[..., bool] = field(kw_only=True)
    differentiable: bool = field(default=True, kw_only=True)

    if TYPE_CHECKING:

        def bound(self, implementation: str | None, *arguments: Any) -> Callable[..., R] | None:
            """What computes this call: it returns what the function does."""

    def require_shape(self, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
        """Refuse a part of another shape than this."""
        if tensor is not None and tensor.shape != shape:
            raise Unsupported(self.name, f"{name} of shape {tuple(tensor.shape)}: it takes {tuple(shape)}")


class Saved:
    """What a backward pass is given: arguments and results by name, and in `wanted` whose gradients are asked for.

    A backward pass is run by torch with gradients enabled where those of the gradients may be asked for: what it
    computes of the saved tensors with torch's ops is then differentiable, too. It must not detach them.
    """

    def __init__(self, values: Mapping[str, Any], wanted: set[str]) -> None:
        self._values, self.wanted = values, wanted

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"{name} was not saved") from None

    def through(
        self, function: Callable[..., torch.Tensor], names: Iterable[str], gradient: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The gradients that are wanted, by running `function` of these arguments anew: torch knows its gradient."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # A view is a tensor of its own to torch, where one was given as several arguments, too.
            given = {
                name: (value.view_as(value) if again else value.detach().requires_grad_())
                if name in self.wanted
                else value
                for name, value in ((name, self._values[name]) for name in names)
            }
            result = function(*given.values())
        wanted = sorted(self.wanted)
        asked = [given[name] for name in wanted]
        found = torch.autograd.grad(result, asked, gradient, create_graph=again, materialize_grads=True)
        return dict(zip(wanted, found, strict=True))


def _argument(name: str, hint: Any, default: Any) -> Argument:
    options = [each for each in get_args(hint) or (hint,) if each is not type(None)]
    optional = "?" if type(None) in get_args(hint) else ""
    if torch.Tensor in options and len(options) > 1:
        (number,) = (each for each in options if each is not torch.Tensor)
        schema = f"{_TYPES[number]}? {name}=None, Tensor? {name}{_OF_TENSOR}=None"
        return Argument(name, schema, is_tensor=True, is_either=True, default=default)
    (kind,) = options
    schema = f"{_TYPES[kind]}{optional} {name}"
    if default is not inspect.Parameter.empty:
        schema += f'="{default}"' if isinstance(default, str) else f"={default}"
    return Argument(name, schema, is_tensor=kind is torch.Tensor, is_either=False, default=default)


def define(
    function: Callable[..., R],
    *,
    summary: str,
    family: Family,
    implementations: tuple[Implementation, ...],
    allocate: Callable[..., R],
    backward: Callable[..., Mapping[str, torch.Tensor | None]] | None,
    verification: Verification,
    tuning: Tuning,
    same_dtype: tuple[str, ...] = (),
    dtypes: frozenset[torch.dtype] = FLOATS,
    saves: tuple[str, ...] | None = None,
    results: tuple[str, ...] = ("y",),
    eager_only: tuple[str, ...] = (),
    derived: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    composed: bool = False,
    instead_of_stock: Callable[[Problem, torch.device], tuple[str, ...]] | None = None,
) -> DefinedOp[R]:
    """The op of that function, registered here and with torch.

    `allocate` makes the results, unfilled; its parameters are some of the op's arguments, by name. It is what torch
    traces with, and implementations allocate by it, too: so layouts cannot differ.
    `backward(saved, *gradients)` gives the gradients of arguments by name, in any dtype; those that it does not name
    have none. `saves` are the tensors, arguments or `results`, that it reads: all arguments where nothing is said.
    Without a backward an op refuses tensors that want a gradient. `dtypes` are those of the first tensor; `same_dtype`
    are those that must be of its dtype. `eager_only` are arguments that never reach torch's dispatcher: the function
    has to do without them there. `derived`, `composed` and `instead_of_stock`: as of
    `OpCandidates`.
    """
    name, signature = function.__name__, Signature.of(function, eager_only)
    at_once = _refusals(name, signature, same_dtype, dtypes, differentiable=backward is not None)
    problem_of = verification.problem

    def call(*arguments: Any, implementation: str | None = None) -> R:
        if at_once(*arguments):
            problem, device = problem_of(*arguments), arguments[0].device
            result: R = op.run(problem, device, implementation, *arguments)
            # After it: a kernel that cannot be had has given way by now, to stock torch for good.
            op.bind(problem, device, implementation, arguments)
            return result
        if not torch.compiler.is_compiling() and transforms.carry(arguments):
            return cast("R", op.run_carrying(implementation, arguments, differentiable=backward is not None))
        traced: R = dispatched(*signature.spread(arguments), implementation)
        return traced

    op: DefinedOp[R] = register(
        DefinedOp(
            name,
            summary,
            implementations,
            verification,
            tuning,
            family,
            derived or {},
            composed,
            instead_of_stock,
            signature=signature,
            call=call,
            at_once=at_once,
            differentiable=backward is not None,
        )
    )

    @torch.library.custom_op(f"rocm_sd::{name}", mutates_args=(), schema=signature.schema)
    def body(*given: Any, **named: Any) -> Any:
        arguments, implementation = signature.gathered(given, named)
        return op.run(problem_of(*arguments), arguments[0].device, implementation, *arguments)

    taken = tuple(inspect.signature(allocate).parameters)

    @body.register_fake
    def _(*given: Any, **named: Any) -> Any:
        arguments = signature.named(signature.gathered(given, named)[0])
        return allocate(*(arguments[each] for each in taken))

    if backward is not None:
        _register_backward(body, backward, signature, saves, results)
    dispatched = getattr(torch.ops.rocm_sd, name)
    return op


def _refusals(
    op: str, signature: Signature, same_dtype: tuple[str, ...], dtypes: frozenset[torch.dtype], *, differentiable: bool
) -> Callable[..., bool]:
    """`DefinedOp.at_once`: one pass over the tensors, made a thousand times a step where nothing is replayed."""
    first = signature.arguments[0].name
    tensors = tuple(
        (place, each.name, each.is_either, each.name in same_dtype)
        for place, each in enumerate(signature.arguments)
        if each.is_tensor
    )

    def at_once(*arguments: Any) -> bool:
        dtype, device = arguments[0].dtype, arguments[0].device
        if dtype not in dtypes:
            known = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
            raise Unsupported(op, f"dtype {dtype}", hint=f"Use one of {known}.")
        plain = not torch.compiler.is_compiling() and not transforms.carry(arguments)
        gradients = torch.is_grad_enabled()
        for place, name, is_either, same in tensors:
            # Those at the end may be left out.
            tensor = arguments[place] if place < len(arguments) else None
            if tensor is None or (is_either and not isinstance(tensor, torch.Tensor)):
                continue
            if tensor.device != device:
                raise Unsupported(op, f"{first} on {device} with {name} on {tensor.device}")
            if same and tensor.dtype != dtype:
                raise Unsupported(op, f"{first} of {dtype} with {name} of {tensor.dtype}")
            if gradients and tensor.requires_grad:
                if not differentiable:
                    raise Unsupported(op, f"{name} that wants a gradient: it has none", hint="Use torch.no_grad().")
                plain = False
            elif type(tensor) not in _PLAIN:
                plain = False
        return plain

    return at_once


def _register_backward(
    body: Any,
    backward: Callable[..., Mapping[str, torch.Tensor | None]],
    signature: Signature,
    saves: tuple[str, ...] | None,
    results: tuple[str, ...],
) -> None:
    names = signature.schema_names()
    kept = tuple(each.name for each in signature.dispatched if each.is_tensor) if saves is None else saves

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        arguments, _ = signature.gathered(inputs, {})
        values = signature.named(arguments)
        tensors = {**values, **dict(zip(results, output if isinstance(output, tuple) else (output,), strict=True))}
        # A number where a tensor may be is not for torch to save.
        ctx.save_for_backward(*(t if isinstance(t := tensors[name], torch.Tensor) else None for name in kept))
        ctx.dtypes = {name: value.dtype for name, value in values.items() if isinstance(value, torch.Tensor)}
        ctx.plain = {name: value for name, value in values.items() if name not in ctx.dtypes}

    def backward_by_place(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = {name: tensor for name, tensor in zip(kept, ctx.saved_tensors, strict=True) if tensor is not None}
        wanted = {
            name.removesuffix(_OF_TENSOR)
            for name, is_wanted in zip(names, ctx.needs_input_grad, strict=False)
            if is_wanted
        }
        found = backward(Saved({**ctx.plain, **saved}, wanted), *gradients)
        by_place: list[torch.Tensor | None] = []
        for each in signature.dispatched:
            gradient = found.get(each.name) if each.name in ctx.dtypes else None
            by_place += [None] * each.is_either
            by_place.append(None if gradient is None else gradient.to(ctx.dtypes[each.name]))
        return *by_place, None

    body.register_autograd(backward_by_place, setup_context=setup_context)
