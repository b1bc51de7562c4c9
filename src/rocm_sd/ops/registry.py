"""Which implementation of an op runs: by name, by a measurement on this card, by the shipped data, else stock torch.

Choosing is the same for every op. What is not stock and was chosen is tested at its first use; what cannot run gives
way to stock torch, with the reason in the log.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from rocm_sd import arch, plugging, settings, transforms
from rocm_sd.errors import Unsupported
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.kernels.unavailable import KernelUnavailable
from rocm_sd.ops import accepted, plugins, self_test
from rocm_sd.ops.bound_calls import BoundCalls, key_of
from rocm_sd.ops.candidates import OpCandidates
from rocm_sd.ops.definition import Implementation
from rocm_sd.tuning import Choice, Problem, resolve
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.environment import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning.database import Entry

__all__ = [
    "OPS",
    "Implementation",
    "Observer",
    "Op",
    "forget_choices",
    "note_self_tests",
    "observed",
    "preferring",
    "register",
    "require_named",
]

log = logging.getLogger("rocm_sd")

# Where an implementation that is not stock is tested before it is used; on a CPU stock alone runs by itself, or a
# plug-in, which is tested anywhere.
SELF_TESTED = frozenset({"cuda"})


class Observer(Protocol):
    """Hears of every call of every op, and answers for what an op would choose. Stock torch computes meanwhile."""

    def called(self, op: Op, problem: Problem, arguments: tuple[Any, ...]) -> None: ...

    def chosen(self, op: Op, problem: Problem, device: torch.device) -> Choice: ...


_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Of all ops, in all threads."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


_preferred: list[str] = []


@contextmanager
def preferring(implementation: str) -> Iterator[None]:
    """Within, in all threads, ops choose it wherever they have it and it can do the problem, with the config that the
    data have for it. Asked for by name, another still runs.
    """
    _preferred.append(implementation)
    forget_choices()
    try:
        yield
    finally:
        _preferred.remove(implementation)
        forget_choices()


@dataclass(frozen=True)
class Op(OpCandidates):
    """An op, which chooses among its candidates for each problem and runs what it has chosen."""

    # What was chosen before: looking it up again would take longer than launching a kernel.
    _chosen: dict[tuple[Any, ...], Choice] = field(default_factory=dict, init=False, repr=False, compare=False)
    _bound: BoundCalls = field(default_factory=BoundCalls, init=False, repr=False, compare=False)

    def choose(self, problem: Problem, device: torch.device, forced: str | None = None) -> Choice:
        """Asked for by name, an implementation that cannot do it raises. Chosen automatically, stock takes over."""
        if _observers:
            return _observers[-1].chosen(self, problem, device)
        name = forced or settings.implementation_for(self.name)
        key = (*problem.values(), device, name)
        choice = self._chosen.get(key)
        if choice is None:
            choice, settled = self._choose(problem, device, name)
            if settled:
                self._chosen[key] = choice
        return choice

    def _choose(self, problem: Problem, device: torch.device, name: str | None) -> tuple[Choice, bool]:
        """The choice, and whether it holds for good."""
        architecture = arch.detect(device).name
        choice = self._by_layers(problem, device, architecture)
        if name:
            reason = self.implementation(name).why_not(problem, device)
            if reason:
                raise Unsupported(f"{self.name} ({name})", reason)
            config = self.config_at(name, choice, problem, device)
            return Choice(name, config, "forced", "asked for by name"), True
        if _preferred and self.has(_preferred[-1]) and self.own[_preferred[-1]].why_not(problem, device) is None:
            return Choice(_preferred[-1], self.config_of(_preferred[-1], choice), "forced", "preferred here"), True
        instead = self._instead_of_stock(choice, problem, device, architecture)
        if instead is not None:
            return instead
        reason = self.implementation(choice.implementation).why_not(problem, device)
        settled = True
        tested = device.type in SELF_TESTED or not self.has(choice.implementation)
        if reason is None and not choice.is_stock and tested:
            reason, settled = self._why_not_trusted(choice, problem, device)
        if reason:
            if settled and not triton_kernels.is_said(reason):
                _say_once(f"{self.name}: stock torch on {architecture}, because {reason}")
            return Choice(STOCK, why=reason), settled
        return choice, settled

    def _instead_of_stock(
        self, choice: Choice, problem: Problem, device: torch.device, architecture: str
    ) -> tuple[Choice, bool] | None:
        """What runs where stock would take memory without a bound; None where stock may. A measurement is obeyed."""
        if self.instead_of_stock is None or not choice.is_stock or choice.source == "measured here":
            return None
        for name in self.instead_of_stock(problem, device):
            if self.own[name].why_not(problem, device) is not None:
                continue
            why = f"stock torch on {architecture} has no kernel for it that bounds its memory"
            other = Choice(name, self.config_of(name, choice), choice.source, why, choice.others)
            reason, settled = self._why_not_trusted(other, problem, device)
            if reason is None:
                return other, settled
            if not settled:
                return choice, False
            _say_once(f"{self.name}: {name} is passed over on {architecture}, because {reason}")
        return None

    def named(self, problem: Problem, device: torch.device) -> Choice:
        """What measurements and data name, whether or not it can run and passes its test."""
        return self._by_layers(problem, device, arch.detect(device).name)

    def _by_layers(self, problem: Problem, device: torch.device, architecture: str) -> Choice:
        if not resolve.has_database():
            return self.lookup(architecture, problem)
        here = current(device)
        database = resolve.user_database()

        def chosen(plugged: Sequence[Entry], defaults: Mapping[str, Config]) -> Choice:
            return resolve.choose(
                self.name, architecture, problem, here, self.kernel_hashes(), tuple(self.own), plugged, defaults
            )

        with database.reading():
            measured = database.by_others(self.name, problem, here, self.own)
            if not measured:
                return chosen((), self.defaults)
        # Not within: a plug-in is tested at its first use, and that is written down.
        plugged = self._plugged(problem, device, measured)
        theirs = {entry.candidate: self.implementation(entry.candidate).default for entry in plugged}
        return chosen(plugged, self.defaults | theirs)

    def _plugged(self, problem: Problem, device: torch.device, measured: Sequence[Entry]) -> Sequence[Entry]:
        """Of measurements of plug-ins those that hold."""
        holding, notes = plugins.usable(self.name, measured, problem, device)
        for note in notes:
            _say_once(f"{self.name}: {note}")
        return holding

    def _why_not_trusted(self, choice: Choice, problem: Problem, device: torch.device) -> tuple[str | None, bool]:
        """The reason that what was chosen must not be used here, and whether it holds for good."""
        if self.verification is None:
            return None, True
        found = self_test.verdict(self, choice.implementation, problem, device, choice.config)
        if found.state in {"passed", "unseen"}:
            return None, found.state == "passed"
        return f"{choice.implementation} is set aside: {found.reason}", found.state == "failed"

    def __reduce__(self) -> tuple[Any, ...]:
        # Samples are closures: another process has the op by its name.
        return _registered, (self.name,)

    def fuses_adds(self, problem: Problem, device: torch.device) -> bool:
        """Whether what is chosen adds bias, add and residual in the pass in which it computes."""
        return self.implementation(self.choose(problem, device).implementation).fuses_adds

    def reads_two(self, problem: Problem, device: torch.device) -> bool:
        """Whether what is chosen reads x and `concat` where they lie."""
        choice = self.choose(problem, device)
        asked = self.implementation(choice.implementation).reads_two
        return asked is not None and asked(problem, choice.config)

    def overwrites(self, problem: Problem, device: torch.device) -> bool:
        """Whether what is chosen needs no memory for its result where it may have that of x."""
        return self.implementation(self.choose(problem, device).implementation).overwrites

    def scratch_bytes(self, arguments: tuple[Any, ...], device: torch.device) -> int | None:
        """The memory that what is chosen takes for the time of a call; None where nobody knows.

        The arguments may lie on the meta device: `device` is where they would be.
        """
        assert self.verification is not None
        choice = self.choose(self.verification.problem(*arguments), device)
        needed = self.implementation(choice.implementation).scratch_bytes
        return None if needed is None else needed(arguments, choice.config, device)

    def run(self, problem: Problem, device: torch.device, forced: str | None, *arguments: Any) -> Any:
        if _observers:
            _observers[-1].called(self, problem, arguments)
            return self.implementations[0](*arguments)
        choice = self.choose(problem, device, forced)
        implementation = self.own.get(choice.implementation) or self.implementation(choice.implementation)
        try:
            return implementation(*arguments, config=choice.config)
        except KernelUnavailable as error:
            if choice.source == "forced":
                raise
            return self._run_stock(error, choice.implementation, problem, device, *arguments)
        except plugging.FAULTS as error:
            if choice.source == "forced" or self.has(choice.implementation) or _out_of_memory(error):
                raise
            return self._run_without(choice.implementation, error, problem, device, *arguments)

    def bound(self, implementation: str | None, *arguments: Any) -> Callable[..., Any] | None:
        """What computes this call, found by its tensors' layouts alone; None where it is to be asked for by `bind`.

        That is so at the first call of a kind, and where anything but the plain case is at hand: a compiler, an
        observer, a gradient, a tensor of another class.
        """
        if torch.compiler.is_compiling() or _observers or transforms.at_hand():
            return None
        name = implementation or settings.implementation_for(self.name)
        try:
            return self._bound.by_key.get(key_of(name, arguments))
        except TypeError:
            # A list, say, is no key: the op has words for it.
            return None

    def bind(
        self, problem: Problem, device: torch.device, forced: str | None, arguments: tuple[Any, ...]
    ) -> Callable[..., Any] | None:
        """What `bound` will find from now on, until choices are forgotten; None where each call is to be `run`.

        Not kept is what has to be asked for again: a choice that is not settled, and a plug-in, which may go.
        """
        if _observers:
            return None
        name = forced or settings.implementation_for(self.name)
        # Before the choice: of one that is forgotten meanwhile nothing is kept.
        keep = self._bound.keeper(name, arguments)
        choice = self.choose(problem, device, name)
        if keep is None or not self.has(choice.implementation) or (*problem.values(), device, name) not in self._chosen:
            return None
        run = self.own[choice.implementation].bound(arguments, choice.config)

        def or_stock(*arguments: Any) -> Any:
            try:
                return run(*arguments)
            except KernelUnavailable as error:
                return self._run_stock(error, choice.implementation, problem, device, *arguments)

        return keep(run if choice.source == "forced" or choice.is_stock else or_stock)

    def run_carrying(self, implementation: str | None, arguments: tuple[Any, ...], *, differentiable: bool) -> Any:
        """By the definition: torch's plain ops carry derivatives and batches through, which kernels and some of torch's
        fused ops do not.
        """
        if not differentiable and transforms.derivatives(arguments):
            raise Unsupported(self.name, "a derivative in forward mode: it has none")
        name = implementation or settings.implementation_for(self.name)
        if name == STOCK:
            return self.own[STOCK](*arguments)
        if name or self.verification is None:
            what = "derivatives in forward mode, and transforms of torch.func"
            raise Unsupported(f"{self.name} ({name})", what, hint="Name no implementation: the definition has them.")
        return self.verification.reference(*arguments)

    def run_over(self, problem: Problem, device: torch.device, x: torch.Tensor, *arguments: Any) -> Any:
        """The result in the memory of x, the first argument; None, and x as it was, where what is chosen cannot."""
        if _observers:
            return None
        choice = self.choose(problem, device)
        implementation = self.implementation(choice.implementation)
        if not implementation.overwrites:
            return None
        try:
            return implementation(x, *arguments, config=choice.config, out=x)
        except KernelUnavailable:
            # Then nothing has touched x.
            return None

    def _run_stock(
        self, error: KernelUnavailable, name: str, problem: Problem, device: torch.device, *arguments: Any
    ) -> Any:
        """In place of a kernel that was trusted, but is of another size than the one tested, and cannot be had."""
        architecture, reason = arch.detect(device).name, error.message.rstrip(".")
        if error.reported:
            _say_once(f"{self.name}: stock torch on {architecture}, because {reason}")
        if error.crashed:
            # At no size and in no process again: the next might compile it where the crash is the user's.
            self_test.set_aside(self, name, device, reason)
            self._chosen.clear()
            self._bound.forget()
        if error.lasting:
            self._settle_on_stock(problem, device, reason)
        return self.own[STOCK](*arguments)

    def _run_without(
        self, name: str, error: BaseException, problem: Problem, device: torch.device, *arguments: Any
    ) -> Any:
        """In place of a plug-in, which was right when tested, on other strides perhaps."""
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{name} raised {type(error).__name__}: {first_line}"
        _say_once(f"{self.name}: stock torch on {arch.detect(device).name}, because {reason}")
        self._settle_on_stock(problem, device, reason)
        return self.own[STOCK](*arguments)

    def _settle_on_stock(self, problem: Problem, device: torch.device, why: str) -> None:
        key = (*problem.values(), device, None)
        self._chosen[key] = Choice(STOCK, why=why)
        self._bound.forget()


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


OPS: dict[str, Op] = {}
plugins.add_source(lambda: accepted.plug_ins(OPS))

AnyOp = TypeVar("AnyOp", bound=Op)


def register(op: AnyOp) -> AnyOp:
    OPS[op.name] = op
    settings.note_op(op.name)
    plugins.reserve(op.name, op.own)
    return op


def require_named() -> None:
    """Refuse an implementation in ROCM_SD_IMPLEMENTATION that its op has not, be the op called or not."""
    for op, name in settings.current().implementations:
        OPS[op].implementation(name)


def _registered(name: str) -> Op:
    return OPS[name]


def forget_choices() -> None:
    """Choose anew from now on: the database has changed, or is another."""
    resolve.forget()
    for op in OPS.values():
        op._chosen.clear()  # noqa: SLF001 -- of this module
        op._bound.forget()  # noqa: SLF001


def note_self_tests(dtype: str, device: torch.device) -> None:
    """While launches are only noted: what all ops will launch to test themselves, so that it is compiled at once."""
    if device.type in SELF_TESTED:
        for op in OPS.values():
            if op.verification is not None:
                self_test.note(op, dtype, device)


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)
