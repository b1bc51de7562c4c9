"""Every op on every rung of the proof ladder, for every architecture: what passed, with the figures that show it.

1 reference    the definition in the sample's dtype against itself in float64
2 interpreted  the Triton kernels in Triton's interpreter
3 compiled     machine code at real sizes, through the gates
4 emulated     machine code executed at small sizes, compared with the reference
5 tested       a recorded run on a card: proofs.json names it

Each (op, architecture, rung) is a task of its own in a worker process. `group_norm_silu:hip` names the kernels that the
implementation `hip` of that op has for itself: they climb rungs 3 to 5.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Union

from rocm_sd import arch as archs
from rocm_sd import numerics
from rocm_sd.errors import MissingDependency, RocmSdError, require_known
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip import toolchain
from rocm_sd.kernels.hip.runtime import tagged
from rocm_sd.numerics import in_float64, outputs
from rocm_sd.ops import OPS
from rocm_sd.tuning import lookup
from rocm_sd.verify.compiler import pool, targets
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.proofs import EMULATED, RUNGS, recorded
from rocm_sd.verify.runner import emulated, emulated_hip, total
from rocm_sd.workers import cancelling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    import torch

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import Kernels, Verification
    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample
    from rocm_sd.verify.emulator import Counters
    from rocm_sd.verify.runner import Run

__all__ = ["EMULATED", "Outcome", "RungResult", "Task", "names", "numbers", "plan", "step", "verify"]

TIMEOUT_S = 900.0
HOST = "cpu"
State = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Task:
    op: str
    arch: str
    rung: int

    @property
    def rung_name(self) -> str:
        return RUNGS[self.rung - 1]


@dataclass(frozen=True)
class Outcome:
    """One cell of the table. `wrong_numbers` parts a result that is wrong from code that breaks a gate."""

    op: str
    arch: str
    rung: str
    state: State
    sentence: str
    wrong_numbers: bool = False
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def names() -> list[str]:
    """Every op, and `op:implementation` for every implementation with kernels of its own."""
    own = [f"{op.name}:{i.name}" for op in OPS.values() for i in op.implementations if i.kernels is not None]
    return [*OPS, *own]


def plan(ops: Iterable[str] = (), architectures: Iterable[str] = (), rungs: Iterable[int] = ()) -> list[Task]:
    """The tasks asked for: nothing named means all. Rungs 1 and 2 need no architecture and stand under `cpu`."""
    chosen = list(ops) or names()
    named = list(architectures) or [a.name for a in targets()]
    wanted = sorted(set(rungs)) or [1, 2, 3, 4, 5]
    require_known("op", chosen, names())
    require_known("architecture", named, [a.name for a in archs.ARCHS.values() if a.vendor is archs.Vendor.AMD])
    require_known("rung", map(str, wanted), "12345")
    tasks = []
    for op in chosen:
        if ":" in op:
            # What clang is proven for, where nothing is named: gfx1030 among them, and not all that Triton knows.
            proven = list(architectures) or list(toolchain.TARGETS)
            tasks += [Task(op, name, rung) for name in proven for rung in wanted if rung > 2]
            continue
        tasks += [Task(op, HOST, rung) for rung in wanted if rung <= 2]
        tasks += [Task(op, name, rung) for name in named for rung in wanted if rung > 2]
    return tasks


def verify(tasks: Sequence[Task], progress: Callable[[Outcome], object] = lambda _outcome: None) -> list[Outcome]:
    """Run the tasks over as many processes as cores; the outcomes are in the order of the tasks."""
    outcomes: dict[int, Outcome] = {}
    futures: dict[Future[Outcome], int] = {}
    for index, task in enumerate(tasks):
        at_once = _without_running(task)
        if at_once is not None:
            outcomes[index] = at_once
            progress(at_once)
            continue
        futures[pool(interpret=task.rung == 2).submit(climb, task, timeout=TIMEOUT_S)] = index
    with cancelling(futures):
        for future in as_completed(futures):
            task = tasks[futures[future]]
            outcomes[futures[future]] = _outcome(task, future)
            progress(outcomes[futures[future]])
    return [outcomes[index] for index in range(len(tasks))]


def _without_running(task: Task) -> Outcome | None:
    def outcome(state: State, sentence: str) -> Outcome:
        return Outcome(task.op, task.arch, task.rung_name, state, sentence)

    name, _, implementation = task.op.partition(":")
    verification = OPS[name].verification
    if verification is None:
        return outcome("failed", f"{task.op} declares no verification: see docs/adding-an-op.md")
    if task.rung > 1 and not implementation and not verification.kernels:
        return outcome("skipped", f"it has no kernel in Triton: see {name}:{verification.implementation}")
    if task.rung == 5:
        evidence = _recorded_run(name, implementation, task.arch)
        return outcome("passed", f"recorded in {evidence}") if evidence else outcome("skipped", "never ran there")
    if task.rung > 2:
        reason = _why_not_hip(task.arch) if implementation else _why_not_triton(name, task.arch)
        if reason:
            return outcome("skipped", reason)
    if task.rung == 4 and task.arch not in EMULATED:
        return outcome("skipped", f"emulated on {', '.join(EMULATED)}")
    return None


def _recorded_run(op: str, implementation: str, arch: str) -> str | None:
    own = {i.name for i in OPS[op].implementations if i.kernels is not None}
    for proof in recorded():
        ours = proof.implementation == implementation if implementation else proof.implementation not in own
        if ours and (proof.op, proof.arch, proof.rung) == (op, arch, "tested"):
            return proof.evidence
    return None


def _why_not_triton(op: str, arch: str) -> str | None:
    if not archs.get(arch).triton_supported:
        return f"Triton does not compile for {arch}"
    choice = lookup(op, arch, {})
    verification = OPS[op].verification
    has_config = verification is not None and choice.config_for(verification.implementation)
    return None if has_config else f"stock torch there: {choice.why}"


def _why_not_hip(arch: str) -> str | None:
    if arch not in tagged():
        return f"the HIP kernels have no code for {arch}"
    try:
        toolchain.find_compiler()
    except toolchain.NoHipCompiler as error:
        return str(error)
    return None


def _outcome(task: Task, future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except MissingDependency:
        raise
    except RocmSdError as error:
        return Outcome(task.op, task.arch, task.rung_name, "failed", str(error))


def climb(task: Task) -> Outcome:
    """What a worker runs."""
    started = time.perf_counter()
    name, _, implementation = task.op.partition(":")
    subject = OPS[name]
    assert subject.verification is not None
    verification = subject.verification
    if implementation:
        verification = verification.of_its_own(subject.implementation(implementation))
    state, sentence, figures = step(task.rung, subject, verification, task.arch)
    wrong = state == "failed" and task.rung != 3
    seconds = time.perf_counter() - started
    return Outcome(task.op, task.arch, task.rung_name, state, sentence, wrong, figures, seconds)


def step(rung: int, op: Op, verification: Verification, arch: str, config: Config | None = None) -> RungResult:
    """One rung, in this process; `config` is for the verification's implementation, in place of what data name."""
    if rung == 1:
        return _reference(op, verification)
    return {2: _interpreted, 3: _compiled, 4: _emulated}[rung](op, verification, arch, config)


def _launching(op: Op, verification: Verification, arch: str, *, execute: bool) -> AbstractContextManager[Run]:
    if _kernels(op, verification) is not None:
        return emulated_hip(arch, execute=execute)
    return emulated(verification.kernels, arch, execute=execute)


def _kernels(op: Op, verification: Verification) -> Kernels | None:
    return op.implementation(verification.implementation).kernels


RungResult = tuple[State, str, dict[str, Any]]
Tensors = Union["torch.Tensor", tuple["torch.Tensor", ...]]


def _reference(op: Op, verification: Verification) -> RungResult:
    calls = list(verification.calls())
    return numbers(op, verification, calls, lambda _implementation, arguments: verification.reference(*arguments))


def _interpreted(op: Op, verification: Verification, _arch: str, config: Config | None = None) -> RungResult:
    if find_spec("triton") is None:
        raise MissingDependency("triton", "verify")

    def compute(implementation: str, arguments: tuple[Any, ...]) -> Tensors:
        given = config if config is not None and implementation == verification.implementation else NO_CONFIG
        result: Tensors = op.implementation(implementation)(*arguments, config=given)
        return result

    return numbers(op, verification, list(verification.calls()), compute)


def numbers(
    op: Op,
    verification: Verification,
    calls: Sequence[tuple[str, Sample]],
    compute: Callable[[str, tuple[Any, ...]], Tensors],
) -> RungResult:
    """Calls against float64, by the numerics gate; the sentence is the worst one's."""
    worst: tuple[float, str, numerics.Comparison] | None = None
    for implementation, sample in calls:
        arguments = sample.make()
        exact = outputs(verification.reference(*in_float64(arguments)))
        stock = outputs(op.implementations[0](*arguments))
        for number, results in enumerate(zip(outputs(compute(implementation, arguments)), exact, stock, strict=True)):
            comparison = numerics.compare(*results)
            # A NaN error compares as nothing does, so a failed sample counts as the worst by itself.
            ratio = comparison.largest / (comparison.allowed_largest or 1.0) if comparison.ok else float("inf")
            if worst is None or ratio > worst[0]:
                name = sample.name if len(exact) == 1 else f"{sample.name}, output {number}"
                name += "" if implementation == verification.implementation else f" ({implementation})"
                worst = (ratio, name, comparison)
    assert worst is not None
    _, name, comparison = worst
    figures = {"largest_error": comparison.largest, "allowed": comparison.allowed_largest, "samples": len(calls)}
    return ("passed" if comparison.ok else "failed"), f"{name}: {comparison}", figures


def _badness(result: RungResult) -> tuple[bool, float]:
    state, _, figures = result
    return state == "failed", figures["largest_error"] / (figures["allowed"] or 1.0)


def _compiled(op: Op, verification: Verification, arch: str, asked: Config | None = None) -> RungResult:
    kernels: dict[str, Any] = {}
    failures = []
    own = _kernels(op, verification)
    calls: list[tuple[str, Sample, Config | None]] = [
        (*c, None) for c in verification.calls(real=True, arch=archs.get(arch))
    ]
    if own is not None:
        calls += [(verification.implementation, verification.real[0], config) for config in own.small_configs]
    for implementation, sample, given in calls:
        arguments = sample.make(filled=False)
        problem = verification.problem(*arguments)
        config = given or (asked if implementation == verification.implementation else None)
        config = config or op.config_of(implementation, op.lookup(arch, problem))
        with _launching(op, verification, arch, execute=False) as compiled:
            op.implementation(implementation)(*arguments, config=config)
        for call in compiled.calls:
            facts = report(call.code)
            promise = verification.promises[call.kernel]
            gates = check(facts, promise if own is None else own.for_problem(promise, problem))
            failures += [f"{call.kernel} ({sample.name}): {g.name}: {g.sentence}" for g in gates if g.ok is False]
            kernels[f"{call.kernel} ({sample.name})"] = {**facts.to_dict(), "gates": [asdict(g) for g in gates]}
    figures = {
        "vgprs": max(k["vgprs"] for k in kernels.values()),
        "lds": max(k["lds"] for k in kernels.values()),
        "waves_per_simd": min(k["waves_per_simd"] for k in kernels.values()),
        "kernels": kernels,
    }
    if failures:
        return "failed", "; ".join(failures), figures
    return "passed", f"{len(kernels)} kernels through every gate", figures


def _emulated(op: Op, verification: Verification, arch: str, asked: Config | None = None) -> RungResult:
    counted: dict[str, list[Counters]] = {}

    def compute(implementation: str, arguments: tuple[Any, ...], given: Config | None = None) -> Tensors:
        config = given or (asked if implementation == verification.implementation else None)
        config = config or op.config_of(implementation, op.lookup(arch, verification.problem(*arguments)))
        with _launching(op, verification, arch, execute=True) as executed:
            result: Tensors = op.implementation(implementation)(*arguments, config=config)
        executed.require_written(*outputs(result))
        for call in executed.calls:
            assert call.counters is not None
            counted.setdefault(call.kernel, []).append(call.counters)
        return result

    kernels = _kernels(op, verification)
    calls = list(verification.calls(arch=archs.get(arch)))
    configs = (None, *(kernels.small_configs if kernels is not None and asked is None else ()))
    results = [numbers(op, verification, calls, partial(compute, given=config)) for config in configs]
    state, sentence, figures = max(results, key=_badness)
    figures["samples"] = sum(each[2]["samples"] for each in results)
    figures["kernels"] = {name: total(counters).as_dict() for name, counters in counted.items()}
    return state, sentence, figures
