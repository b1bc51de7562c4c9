"""What an op declares: its implementations and what they can do, the calls that prove it, and what tunes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd.kernels.config import NO_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from types import ModuleType

    import torch

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.samples import Sample
    from rocm_sd.tuning import Problem

    WhyNot = Callable[[Problem, torch.device], str | None]
    Space = Callable[[Problem, Arch], Iterable[Config]]
    Variant = Callable[[Problem, Any, torch.device], str]

__all__ = [
    "HALVES",
    "UP_TO_FLOAT32",
    "Also",
    "Bucket",
    "Family",
    "Implementation",
    "KernelPromise",
    "Kernels",
    "Tuning",
    "Verification",
    "Work",
    "anywhere",
    "where",
]

# What kind of work it is, in the words of profiles (bench/profiling/families.py).
Family = Literal["convolution", "GEMM", "attention", "norm", "elementwise", "layout copies"]

HALVES = frozenset({"float16", "bfloat16"})
UP_TO_FLOAT32 = HALVES | {"float32"}


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
    configure. `real` are further real calls, which take a kernel of their own; with `small_configs` after the default,
    the op's small calls take every kernel, and the first real one is compiled with them, too.
    `narrow_loads(problem)` gives the reason that the loads of this very problem cannot be wide, or None if they can.
    """

    module: str
    promises: Mapping[str, KernelPromise]
    space: Space | None = None
    real: tuple[Sample, ...] = ()
    small_configs: tuple[Config, ...] = ()
    narrow_loads: Callable[[Problem], str | None] | None = None

    def for_problem(self, promise: KernelPromise, problem: Problem) -> KernelPromise:
        """The promise of a kernel, with the reason of this problem where the kernel has none of its own."""
        reason = self.narrow_loads(problem) if self.narrow_loads else None
        return replace(promise, narrow_loads_because=promise.narrow_loads_because or reason)


def anywhere(_problem: Problem, _device: torch.device) -> str | None:
    """The `why_not` of what takes every problem on every device."""
    return None


def where(
    kernels: ModuleType, dtypes: Collection[str], refuse: Callable[[Problem], str | None] | None = None
) -> WhyNot:
    """The `why_not` of a kernel: its dtypes, what it refuses of a problem, and whether its language runs here.

    `kernels` is the package of the language: rocm_sd.kernels.triton or rocm_sd.kernels.hip.
    """

    def why_not(problem: Problem, device: torch.device) -> str | None:
        if problem["dtype"] not in dtypes:
            return f"dtype {problem['dtype']}"
        reason: str | None = (refuse(problem) if refuse else None) or kernels.why_not(device)
        return reason

    return why_not


@dataclass(frozen=True)
class Implementation:
    """`run` takes the op's own arguments and, where there is something to configure, by name the `config`.

    `why_not(problem, device)` gives the reason that it cannot take this problem, or None if it can. `default` is the
    config that it runs with where nothing was tuned; all its configs are of that class. Without `kernels` it runs the
    op's own, or none of this project.

    The rest is what it can do, for those who plan with it. `fuses_adds`: bias, add and residual cost no further pass
    over memory. `reads_two(problem, config)`: x and the `concat` that follows it are read where they lie.
    `overwrites`: `run` takes an `out`, which may be x. `scratch_bytes(arguments, config, device)`: the memory that a
    call takes for itself and gives back; the arguments may lie on the meta device. None: nobody knows.
    `composed`: `run` calls other ops, which are to be tuned before it.
    `variant(problem, config, device)` says in a few words which code of the kernel runs: "2 pieces, tail". What was
    right in one variant may be wrong in another, so each is tested for itself.
    `bind(*arguments, config=config)` gives what computes this call, and every call of tensors that are laid out alike,
    at less cost to the host than `run`, which looks at its tensors anew; None where it cannot. It takes the same
    arguments, and none of the first call's tensors is kept or read.
    """

    name: str
    run: Callable[..., Any]
    why_not: WhyNot = anywhere
    kernels: Kernels | None = None
    default: Config = NO_CONFIG
    fuses_adds: bool = False
    reads_two: Callable[[Problem, Any], bool] | None = None
    overwrites: bool = False
    scratch_bytes: Callable[[tuple[Any, ...], Any, torch.device], int] | None = None
    composed: bool = False
    variant: Variant | None = None
    bind: Callable[..., Callable[..., Any] | None] | None = None

    def __call__(self, *arguments: Any, config: Config = NO_CONFIG, **named: Any) -> Any:
        """`run` with a config, which is not handed to what has nothing to configure."""
        if self.default is NO_CONFIG:
            return self.run(*arguments, **named)
        return self.run(*arguments, config=config or self.default, **named)

    def bound(self, arguments: tuple[Any, ...], config: Config) -> Callable[..., Any]:
        """What computes this call and all that are laid out alike, with that config."""
        named = {} if self.default is NO_CONFIG else {"config": config or self.default}
        found = None if self.bind is None else self.bind(*arguments, **named)
        return found or (partial(self.run, **named) if named else self.run)

    def config_from(self, values: Mapping[str, int]) -> Config:
        """A config that was written down; none at all stands for the default."""
        config = self.default.fitting(values) if values else self.default
        if config is None:
            raise ValueError(f"{self.name} has no config of {dict(values)}")
        return config


@dataclass(frozen=True)
class Also:
    """Another implementation with a kernel in the same module, and the calls that it is proven on."""

    implementation: str
    small: tuple[Sample, ...]
    real: tuple[Sample, ...]


@dataclass(frozen=True)
class Verification:
    """What the proof ladder needs of an op: its kernels' module, its definition, and calls to try.

    `small` samples are computed on every rung, odd sizes among them; `real` ones are compiled only. `tiny` ones are
    so small that each derivative can be checked: with every optional part, and without. `empty` ones have nothing to
    compute. The reference returns a tensor or a tuple of them. `problem(*arguments)` is what tuning data is keyed by;
    it has a `dtype`. `promises` has an entry for every kernel. `kernels` is the module of those in Triton; it is empty
    where there are none, and the implementation has `Kernels` of its own. `similar(problem)` gives calls that run the
    same code as that problem, the nearest first, then cheaper ones: an op has it where an implementation has variants.
    `fits(problem, arch)`: whether the calls of this problem are for such an architecture; those of 8 bits may not be.
    """

    implementation: str
    kernels: str
    reference: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    problem: Callable[..., Problem]
    small: tuple[Sample, ...]
    real: tuple[Sample, ...]
    promises: Mapping[str, KernelPromise]
    also: tuple[Also, ...] = ()
    tiny: tuple[Sample, ...] = ()
    empty: tuple[Sample, ...] = ()
    similar: Callable[[Problem], Iterable[Sample]] | None = None
    fits: Callable[[Problem, Arch], bool] = lambda _problem, _arch: True

    def of_its_own(self, implementation: Implementation) -> Verification:
        """The same for the kernels that one implementation has for itself: none of them has a result in 8 bits."""
        kernels = implementation.kernels
        assert kernels is not None
        small, real = (
            tuple(sample for sample in samples if not self.problem(*sample.make(filled=False)).get("to"))
            for samples in (self.small, (*self.real, *kernels.real))
        )
        own = replace(self, implementation=implementation.name, small=small, real=real)
        return replace(own, promises=kernels.promises, also=())

    @property
    def proven(self) -> tuple[str, ...]:
        """The implementations whose kernels the module has."""
        return self.implementation, *(each.implementation for each in self.also)

    def calls(self, *, real: bool = False, arch: Arch | None = None) -> Iterator[tuple[str, Sample]]:
        """(implementation, sample) of every small or every real call, or of those that are for an architecture."""
        for one in (Also(self.implementation, self.small, self.real), *self.also):
            for sample in one.real if real else one.small:
                if arch is None or self.fits(self.problem(*sample.make(filled=False)), arch):
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
    measures, after those of the buckets.
    """

    space: Space
    buckets: tuple[Bucket, ...]
    work: Callable[..., Work]
    untimed: str
    timed: tuple[Sample, ...] = ()
