"""What a walled-in process does with one proposal: rungs of the proof ladder, and what they found, as plain values.

Each function takes a job, a mapping of plain values, and gives one; `agents.confinement` runs it where there is no
network, no user's file and no variable of the user's. Kernels in Triton lie in the process's folder as `kernels.py`, a
source in HIP as `source.hip`. Nobody unpickles what comes back.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import deterministic

from rocm_sd import arch as archs
from rocm_sd.errors import RocmSdError
from rocm_sd.kernels import hip, triton
from rocm_sd.numerics import compare, in_float64, outputs
from rocm_sd.ops import OPS
from rocm_sd.tuning.choice import within
from rocm_sd.tuning.static import tasks
from rocm_sd.verify import ladder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import Implementation, Verification
    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample

    Job = Mapping[str, Any]
    Found = dict[str, Any]
    Call = tuple[str, Sample]

__all__ = [
    "KERNELS", "MANY", "SOURCE", "Tried", "attempt", "compile_and_execute", "figures_of_each", "interpret",
    "interpret_each", "poisoned", "worded",
]  # fmt: skip

KERNELS, SOURCE = "kernels.py", "source.hip"
# A fault in one value of a million is met by a call of as many.
_MANY, MANY = 2**20, "a million values"
_SHOWN = 4  # of the wrong elements


class Tried:
    """A proposal with its op: `module` are its kernels in Triton, `implementation` the one whose launcher it takes."""

    def __init__(self, job: Job) -> None:
        self.op: Op = OPS[job["op"]]
        assert self.op.verification is not None
        assert self.op.tuning is not None
        self.source: str = job["source"]
        self.bucket: str = job["bucket"]
        self.architectures: tuple[str, ...] = tuple(job["architectures"])
        # Those whose machine code is read: gates, emulator and model.
        self.read = tuple(name for name in self.architectures if archs.get(name).has_gates)
        self.module = _loaded(Path(KERNELS)) if Path(KERNELS).exists() else None
        own = self.op.verification
        self.implementation: Implementation = (
            next(each for each in self.op.implementations if each.kernels is not None)
            if self.source
            else self.op.implementation(own.implementation)
        )
        self.config = self.implementation.config_from(job["config"]) if job["config"] else None
        self.verification = self._of_bucket(own.of_its_own(self.implementation) if self.source else own)

    def _of_bucket(self, verification: Verification) -> Verification:
        """With the kernels that are tried; a config for one bucket is held to the real calls of that bucket alone."""
        if self.module is not None:
            verification = replace(verification, kernels=self.module)  # type: ignore[arg-type]  # as good as its name
        if not self.bucket:
            return verification
        limits = next(each for each in self._tuning.buckets if each.sample.name == self.bucket)
        real = [
            sample
            for sample in verification.real
            if within(limits.when, verification.problem(*sample.make(filled=False))) and sample.name != self.bucket
        ]
        return replace(verification, real=(limits.sample, *real))

    @property
    def _tuning(self) -> Any:
        return self.op.tuning

    @contextmanager
    def launched(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.module is not None:
                stack.enter_context(triton.launched_by(self.op.name, self.module))
            if self.source:
                stack.enter_context(hip.with_sources({self.source: Path(SOURCE).resolve()}))
            yield

    @cached_property
    def modelled(self) -> list[Sample]:
        """The calls whose time is modelled: those of the buckets, or of the one."""
        return [each.sample for each in self._tuning.buckets if self.bucket in {"", each.sample.name}]

    def config_at(self, arch: str, sample: Sample) -> Config:
        if self.config is not None:
            return self.config
        problem = self.verification.problem(*sample.make(filled=False))
        return self.op.config_of(self.implementation.name, self.op.lookup(arch, problem))


def _loaded(file: Path) -> ModuleType:
    name = "rocm_sd_proposed"
    specification = importlib.util.spec_from_file_location(name, file.resolve())
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def _rung(number: int, arch: str, result: ladder.RungResult) -> Found:
    state, sentence, figures = result
    return {"rung": number, "arch": arch, "state": state, "finding": sentence, "figures": _small(figures)}


def _small(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What of the figures a person or a proposer reads: those of every kernel would be pages."""
    return {name: value for name, value in figures.items() if isinstance(value, (int, float, str))}


def attempt(number: int, arch: str, climb: Callable[[], ladder.RungResult]) -> Found:
    """Whatever a proposal raises is its finding, and the process lives on."""
    try:
        return _rung(number, arch, climb())
    except Exception as error:  # noqa: BLE001 -- Triton's interpreter and compiler raise anything
        return _rung(number, arch, ("failed", worded(error), {}))


def worded(error: Exception) -> str:
    if isinstance(error, RocmSdError):
        return error.message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The last line has the reason; those before it show the place in the text.
    said = " / ".join(dict.fromkeys([*lines[:1], *lines[-2:]]))[:600]
    return f"{type(error).__name__}: {said}"


def interpret(job: Job) -> Found:
    """Rung 2 at small sizes and at a million values; and what workgroups of the real launches do, for the model."""
    tried = Tried(job)
    with tried.launched():
        rungs = _interpreted(tried) if job["climb"] else []
        failed = any(each["state"] == "failed" for each in rungs)
        return {"rungs": rungs, "counted": {} if failed else _counted(tried)}


def interpret_each(job: Job) -> Found:
    """Of each of the job's configs: whether it passes rung 2 at small sizes, where it climbs; and what is counted."""
    found = []
    for config in job["configs"]:
        entry: Found = {"fault": "", "figures": {}}
        try:
            tried = Tried({**job, "config": config})
            rung = _at_small_sizes(tried) if job["climb"] else None
            if rung is not None and rung["state"] != "passed":
                entry["fault"] = rung["finding"]
            else:
                entry["figures"] = _counted(tried)
        except Exception as error:  # noqa: BLE001 -- as below: another config may be right
            entry["fault"] = worded(error)
        found.append(entry)
    return {"found": found}


def figures_of_each(job: Job) -> Found:
    """The same of the machine code in figures, with the gates that it fails."""
    found = []
    for config in job["configs"]:
        entry: Found = {"fault": "", "figures": {}}
        try:
            entry["figures"] = _figures(Tried({**job, "config": config}))
        except Exception as error:  # noqa: BLE001 -- as above
            entry["fault"] = worded(error)
        found.append(entry)
    return {"found": found}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory is full of NaN before a kernel writes, so that what it leaves out is seen."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


def _interpreted(tried: Tried) -> list[Found]:
    rungs = [_at_small_sizes(tried)]
    if rungs[0]["state"] == "passed":
        with poisoned():
            rungs.append(attempt(2, MANY, lambda: _many_values(tried)))
    return rungs


def _at_small_sizes(tried: Tried) -> Found:
    with poisoned():
        return attempt(2, ladder.HOST, lambda: _small_calls(tried))


def _small_calls(tried: Tried) -> ladder.RungResult:
    result = ladder.step(2, tried.op, tried.verification, ladder.HOST, tried.config)
    return (
        result if result[0] == "passed" else _explained(tried, list(tried.verification.calls()), result, tried.config)
    )


def _many_values(tried: Tried) -> ladder.RungResult:
    """The real call of as many values as make one fault in a million likely, and with the least arithmetic; with each
    config that one of the architectures has for it, since a kernel may do something else for another.
    """
    calls = []
    for implementation, sample in tried.verification.calls(real=True):
        arguments = sample.make(filled=False)
        largest = max(each.numel() for each in arguments if isinstance(each, torch.Tensor))
        if implementation == tried.implementation.name and largest >= _MANY:
            calls.append((tried._tuning.work(*arguments).flops, implementation, sample))  # noqa: SLF001 -- of this module
    if not calls:
        return "skipped", "no real call of this op has a million values", {}
    _, implementation, sample = min(calls, key=lambda each: each[0])
    chosen = [(implementation, sample)]
    passed: list[ladder.RungResult] = []
    for config in dict.fromkeys(tried.config_at(arch, sample) for arch in tried.architectures):
        result = ladder.numbers(tried.op, tried.verification, chosen, partial(_computed, tried, config))
        if result[0] != "passed":
            return _explained(tried, chosen, result, config)
        passed.append(result)
    return max(passed, key=lambda each: each[2]["largest_error"])


def _computed(tried: Tried, config: Config, _name: str, arguments: tuple[Any, ...]) -> Any:
    return tried.implementation(*arguments, config=config)


def _explained(
    tried: Tried, calls: Sequence[Call], result: ladder.RungResult, config: Config | None
) -> ladder.RungResult:
    """A failed rung, with the elements that are wrong; a config of None is the implementation's own."""
    _state, sentence, figures = result
    for implementation, sample in calls:
        arguments = sample.make()
        exact = outputs(tried.verification.reference(*in_float64(arguments)))
        stock = outputs(tried.op.implementations[0](*arguments))
        run = tried.op.implementation(implementation)
        ours_alone = implementation == tried.implementation.name
        ours = outputs(run(*arguments, config=config if config is not None and ours_alone else run.default))
        for number, each in enumerate(zip(ours, exact, stock, strict=True)):
            if not compare(*each).ok:
                where = _wrong_elements(*each)
                return "failed", f"{sentence}. Wrong at {sample.name}, output {number}: {where}", figures
    return "failed", sentence, figures


def _wrong_elements(ours: torch.Tensor, exact: torch.Tensor, stock: torch.Tensor) -> str:
    allowed = compare(ours, exact, stock).allowed_largest
    off = (ours.double() - exact).abs()
    wrong = ~(off <= allowed)
    places = wrong.nonzero()
    shown = [
        f"{tuple(place.tolist())} is {ours[tuple(place)].item():.6g} and should be {exact[tuple(place)].item():.6g}"
        for place in places[:_SHOWN]
    ]
    if not shown:
        return "no element alone is beyond what is allowed, but all of them together are"
    return f"{len(places)} of {ours.numel()} elements; {'; '.join(shown)}"


def _counted(tried: Tried) -> dict[str, dict[str, list[Found]]]:
    """By architecture and call: each launch, and what one of its workgroups does."""
    found: dict[str, dict[str, list[Found]]] = {}
    for arch in tried.read:
        found[arch] = {}
        for sample in tried.modelled:
            given = (tried.op.name, tried.implementation.name if tried.source else None, sample.name)
            launches = tasks.count(*given, tried.config_at(arch, sample), [arch], tried.module)[arch]
            found[arch][sample.name] = [asdict(launch) for launch in launches]
    return found


def compile_and_execute(job: Job) -> Found:
    """Rungs 3 and 4 on each architecture, to the first that fails; and the machine code in figures, for the model."""
    tried = Tried(job)
    rungs: list[Found] = []
    with tried.launched():
        for number, arch in product((3, 4) if job["climb"] else (), tried.read):
            if number == 4 and arch not in ladder.EMULATED:
                continue
            rungs.append(attempt(number, arch, partial(_step, tried, number, arch)))
            if rungs[-1]["state"] == "failed":
                return {"rungs": rungs, "compiled": {}, "counted": {}}
        return {"rungs": rungs, "compiled": _figures(tried), "counted": _counted(tried) if tried.source else {}}


def _figures(tried: Tried) -> dict[str, dict[str, list[Found]]]:
    """By architecture and call: the machine code of each launch."""
    found: dict[str, dict[str, list[Found]]] = {}
    given = tried.op.name, tried.implementation.name if tried.source else None
    for arch in tried.read:
        found[arch] = {}
        for sample in tried.modelled:
            built = tasks.build(*given, arch, tried.config_at(arch, sample), [sample.name], tried.module)
            found[arch][sample.name] = [asdict(launch) for launch in built.calls[sample.name]]
    return found


def _step(tried: Tried, number: int, arch: str) -> ladder.RungResult:
    if not any(True for _ in tried.verification.calls(real=True, arch=archs.get(arch))):
        return "skipped", "none of the calls is for this architecture", {}
    return ladder.step(number, tried.op, tried.verification, arch, tried.config)
