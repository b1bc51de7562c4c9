"""What an op is to dispatch: a name and its implementations. Choosing one is the same for every op."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rocm_sd import arch, settings
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels.hip.launch import HipUnavailable
from rocm_sd.tuning import Choice, Problem, lookup, resolve
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from rocm_sd.ops.samples import Sample
    from rocm_sd.tuning.database import Entry

__all__ = [
    "OPS",
    "Beside",
    "Bucket",
    "Implementation",
    "KernelPromise",
    "Kernels",
    "Op",
    "Tuning",
    "Verification",
    "Work",
    "forget_choices",
    "needs_no_dispatcher",
    "note_self_tests",
    "register",
]

log = logging.getLogger("rocm_sd")

# Where an implementation that is not stock is tested before it is used; on a CPU stock alone runs by itself, or what
# another package brings, which is tested anywhere.
SELF_TESTED = frozenset({"cuda"})


@dataclass(frozen=True)
class KernelPromise:
    """What a kernel is meant to be, so that the gates know what to hold it to."""

    uses_dot: bool = False
    bound_by_memory: bool = False
    narrow_loads_because: str | None = None


@dataclass(frozen=True)
class Kernels:
    """Kernels of one implementation alone, in another language than those that the op's `Verification` names.

    `module` is the launcher's. `space(problem, arch)` gives the configs worth a trial; without one there is nothing to
    configure. `real` are calls beside the op's own that take a kernel of their own; with `small_configs` beside the
    default, the op's small calls take every kernel, and the first real one is compiled with them, too.
    `narrow_loads(problem)` gives the reason that the loads of this very problem cannot be wide, or None if they can.
    """

    module: str
    promises: Mapping[str, KernelPromise]
    default_config: Mapping[str, int] = field(default_factory=dict)
    space: Callable[[Problem, arch.Arch], Iterable[Mapping[str, int]]] | None = None
    real: tuple[Sample, ...] = ()
    small_configs: tuple[Mapping[str, int], ...] = ()
    narrow_loads: Callable[[Problem], str | None] | None = None

    def for_problem(self, promise: KernelPromise, problem: Problem) -> KernelPromise:
        """The promise of a kernel, with the reason of this problem where the kernel has none of its own."""
        reason = self.narrow_loads(problem) if self.narrow_loads else None
        return replace(promise, narrow_loads_because=promise.narrow_loads_because or reason)


@dataclass(frozen=True)
class Implementation:
    """`run` takes the op's own arguments and, by name, the `config` that dispatch chose.

    `why_not(problem, device)` gives the reason that it cannot take this problem, or None if it can. Without `kernels`
    it runs the op's own, or none of this project.
    """

    name: str
    run: Callable[..., Any]
    why_not: Callable[[Problem, torch.device], str | None]
    kernels: Kernels | None = None


@dataclass(frozen=True)
class Beside:
    """Another implementation with a kernel in the same module, and the calls that it is proven on."""

    implementation: str
    small: tuple[Sample, ...]
    real: tuple[Sample, ...]


@dataclass(frozen=True)
class Verification:
    """What the proof ladder needs of an op: its kernels' module, its definition, and calls to try.

    `small` samples are computed on every rung, odd sizes among them; `real` ones are compiled only. The reference
    returns a tensor or a tuple of them. `problem(*arguments)` is what tuning data is keyed by. `promises` has an entry
    for every kernel.
    """

    implementation: str
    kernels: str
    reference: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    problem: Callable[..., Problem]
    small: tuple[Sample, ...]
    real: tuple[Sample, ...]
    promises: Mapping[str, KernelPromise]
    beside: tuple[Beside, ...] = ()

    def calls(self, *, real: bool = False) -> Iterator[tuple[str, Sample]]:
        """(implementation, sample) of every small or every real call."""
        for one in (Beside(self.implementation, self.small, self.real), *self.beside):
            for sample in one.real if real else one.small:
                yield one.implementation, sample


@dataclass(frozen=True)
class Work:
    """The least that a call must do: operations in its dtype, and bytes where each tensor is moved once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Bucket:
    """Problems that one config serves: limits as in the tuning data, and the call that stands for them."""

    when: Mapping[str, Any]
    sample: Sample


@dataclass(frozen=True)
class Tuning:
    """What a tuner needs of an op: `space(problem, arch)` gives the configs worth compiling there.

    `untimed` is the implementation that runs where no card was timed: a kernel that saves whole passes over memory may
    be trusted to, one that competes with a vendor's library may not. `timed` are further calls that a benchmark
    measures, beside those of the buckets.
    """

    space: Callable[[Problem, arch.Arch], Iterable[Mapping[str, int]]]
    buckets: tuple[Bucket, ...]
    work: Callable[..., Work]
    untimed: str
    timed: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Op:
    name: str
    summary: str
    implementations: tuple[Implementation, ...]
    # What an implementation is run with when it is asked for by name where nothing was tuned (the CPU interpreter).
    default_config: Mapping[str, int]
    verification: Verification | None = None
    tuning: Tuning | None = None
    # What was chosen before: looking it up again would take longer than launching a kernel.
    _chosen: dict[tuple[Any, ...], Choice] = field(default_factory=dict, init=False, repr=False, compare=False)

    def implementation(self, name: str) -> Implementation:
        for candidate in self.implementations:
            if candidate.name == name:
                return candidate
        from rocm_sd.ops import plugins  # noqa: PLC0415 -- other packages are looked for where a name asks for it

        brought = plugins.of_op(self.name)
        for extra in brought:
            if extra.implementation.name == name:
                return extra.implementation
        known = [*(i.name for i in self.implementations), *(extra.implementation.name for extra in brought)]
        raise InvalidOption(f"{self.name} implementation", name, known)

    def has(self, name: str) -> bool:
        """Whether it is one of the op's own, and not of another package."""
        return any(each.name == name for each in self.implementations)

    def config_of(self, name: str, choice: Choice) -> Mapping[str, int]:
        """What an implementation runs with where the data say `choice`: another kernel's config is not for it."""
        kernels = self.implementation(name).kernels
        default = self.default_config if kernels is None else kernels.default_config
        config = choice.config_for(name)
        return config if config.keys() == default.keys() else default

    def config_at(self, name: str, choice: Choice, problem: Problem, device: torch.device) -> Mapping[str, int]:
        """`config_of`; for what another package brings, the config chosen for it, else the first of its space."""
        if self.has(name):
            return self.config_of(name, choice)
        if choice.implementation == name:
            return choice.config
        from rocm_sd.ops import plugins  # noqa: PLC0415 -- as above

        extra = plugins.find(self.name, name)
        return (extra.first_config(problem, device) if extra is not None else None) or {}

    def kernel_hashes(self) -> tuple[str, ...]:
        """Of all kernels that the op has, whoever runs them."""
        own = (each.name for each in self.implementations if each.kernels is not None)
        return (self.kernel_hash(), *(self.kernel_hash(name) for name in own))

    def kernel_hash(self, implementation: str | None = None) -> str:
        """Of the source that it depends on: of its own kernels, of the op's, or nothing for what has none of them.

        Of what another package brings it is the version that the package gives.
        """
        if implementation is not None and not self.has(implementation):
            from rocm_sd.ops import plugins  # noqa: PLC0415 -- as above

            extra = plugins.find(self.name, implementation)
            return "" if extra is None else extra.version
        kernels = None if implementation is None else self._kernels_of(implementation)
        if kernels is not None:
            from rocm_sd.tuning.environment import kernel_hash  # noqa: PLC0415 -- as below

            return kernel_hash(kernels.module)
        known = self.verification
        if known is None or not known.kernels:
            return ""
        own = {known.implementation, *(beside.implementation for beside in known.beside)}
        if implementation is not None and implementation not in own:
            return ""
        from rocm_sd.tuning.environment import kernel_hash  # noqa: PLC0415 -- where nothing is measured, nothing asks

        return kernel_hash(known.kernels)

    def _kernels_of(self, name: str) -> Kernels | None:
        return next((each.kernels for each in self.implementations if each.name == name), None)

    def choose(self, problem: Problem, device: torch.device, forced: str | None = None) -> Choice:
        """Asked for by name, an implementation that cannot do it raises. Chosen automatically, stock takes over."""
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
        reason = self.implementation(choice.implementation).why_not(problem, device)
        settled = True
        tested = device.type in SELF_TESTED or not self.has(choice.implementation)
        if reason is None and choice.implementation != STOCK and tested:
            reason, settled = self._why_not_trusted(choice.implementation, problem, device)
        if reason:
            if settled:
                _say_once(f"{self.name}: stock torch on {architecture}, because {reason}")
            return Choice(STOCK, why=reason), settled
        return choice, settled

    def named(self, problem: Problem, device: torch.device) -> Choice:
        """What measurements and data name, whether or not it can run and passes its test."""
        return self._by_layers(problem, device, arch.detect(device).name)

    def _by_layers(self, problem: Problem, device: torch.device, architecture: str) -> Choice:
        if not resolve.has_database():
            return lookup(self.name, architecture, problem)
        from rocm_sd.tuning.environment import current  # noqa: PLC0415 -- as above

        known = tuple(implementation.name for implementation in self.implementations)
        here = current(device)
        brought = self._brought(problem, device, resolve.user_database().by_others(self.name, problem, here, known))
        choice = resolve.choose(self.name, architecture, problem, here, self.kernel_hashes(), known, brought)
        if choice.implementation not in known:
            return choice
        config = self.config_of(choice.implementation, choice)
        if config is choice.config or (not choice.config and self._kernels_of(choice.implementation) is None):
            return choice
        shipped = lookup(self.name, architecture, problem)
        if choice.config == shipped.config_for(choice.implementation):
            # It was stored without a config, and was given that of the data, which is for another kernel.
            return replace(choice, config=config)
        # Not from a tuner: a kernel would stop the picture with an error about its arguments.
        return shipped

    def _brought(self, problem: Problem, device: torch.device, measured: Sequence[Entry]) -> Sequence[Entry]:
        """Of measurements of what is not the op's own, those that hold; where there are none, nothing is looked for."""
        if not measured:
            return ()
        from rocm_sd.ops import plugins  # noqa: PLC0415 -- as above

        holding, told = plugins.usable(self.name, measured, problem, device)
        for sentence in told:
            _say_once(f"{self.name}: {sentence}")
        return holding

    def _why_not_trusted(self, name: str, problem: Problem, device: torch.device) -> tuple[str | None, bool]:
        """The reason that an implementation must not be used here, and whether it holds for good."""
        if self.verification is None:
            return None, True
        from rocm_sd.ops import self_test  # noqa: PLC0415 -- nothing is tested where stock runs

        found = self_test.verdict(self, name, problem, device)
        if found.state in {"passed", "unseen"}:
            return None, found.state == "passed"
        return f"{name} is set aside: {found.reason}", found.state == "failed"

    def run(self, problem: Problem, device: torch.device, forced: str | None, *arguments: Any) -> Any:
        choice = self.choose(problem, device, forced)
        try:
            return self.implementation(choice.implementation).run(*arguments, config=choice.config)
        except HipUnavailable as error:
            if choice.source == "forced":
                raise
            return self._run_stock(error, problem, device, *arguments)
        except Exception as error:
            if choice.source == "forced" or self.has(choice.implementation) or _out_of_memory(error):
                raise
            return self._run_without(choice.implementation, error, problem, device, *arguments)

    def _run_stock(self, error: HipUnavailable, problem: Problem, device: torch.device, *arguments: Any) -> Any:
        """In place of a kernel that was trusted, but is of another size than the one tested, and cannot be had."""
        architecture, reason = arch.detect(device).name, error.message.rstrip(".")
        if error.told:
            _say_once(f"{self.name}: stock torch on {architecture}, because {reason}")
        if error.lasting:
            key = (*problem.values(), device, None)
            self._chosen[key] = Choice(STOCK, why=reason)
        return self.implementation(STOCK).run(*arguments, config={})

    def _run_without(self, name: str, error: Exception, problem: Problem, device: torch.device, *arguments: Any) -> Any:
        """In place of what another package brings, which was right when tested, on other strides perhaps."""
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{name} raised {type(error).__name__}: {first_line}"
        _say_once(f"{self.name}: stock torch on {arch.detect(device).name}, because {reason}")
        key = (*problem.values(), device, None)
        self._chosen[key] = Choice(STOCK, why=reason)
        return self.implementation(STOCK).run(*arguments, config={})


def needs_no_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Plain tensors, no gradient wanted, nothing traced: the op's body can be called as it is.

    Through torch's dispatcher a call of a custom op costs about 0.2 ms of Python, which a small model on a CPU feels.
    """
    import torch  # noqa: PLC0415 -- only annotations need it above

    if torch.compiler.is_compiling():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in given)


def _out_of_memory(error: Exception) -> bool:
    import torch  # noqa: PLC0415 -- as above

    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    OPS[op.name] = op
    return op


def forget_choices() -> None:
    """Choose anew from now on: the database has changed, or is another."""
    resolve.forget()
    for op in OPS.values():
        op._chosen.clear()  # noqa: SLF001 -- of this module


def note_self_tests(dtype: str, device: torch.device) -> None:
    """While launches are only noted: what all ops will launch to test themselves, so that it is compiled at once."""
    if device.type in SELF_TESTED:
        from rocm_sd.ops import self_test  # noqa: PLC0415 -- as above

        for op in OPS.values():
            if op.verification is not None:
                self_test.note(op, dtype, device)


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)
