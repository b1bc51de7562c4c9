"""What the worker processes of a static sweep run: `count` and `build`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping  # noqa: TC003 -- typed_json reads it
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning.ranking import Code, CodePart
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.programs import counted, counted_hip
from rocm_sd.verify.runner import emulated, emulated_hip

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import KernelPromise
    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample
    from rocm_sd.verify.isa import IsaReport
    from rocm_sd.verify.programs import CountedLaunch
    from rocm_sd.verify.runner import Call

__all__ = ["Built", "CompiledLaunch", "build", "count", "machine_code"]


@dataclass(frozen=True)
class CompiledLaunch:
    """The machine code of one launch in figures, and the gates that it fails: {name: sentence}."""

    kernel: str
    grid: tuple[int, int, int]
    failed: Mapping[str, str]
    code: Code
    vgprs: int
    lds: int
    waves_per_simd: int
    wide_loads: float | None
    matrix_in_main: int


@dataclass(frozen=True)
class Built:
    """The launches of each call, and the version of their compiler."""

    version: str
    calls: Mapping[str, Sequence[CompiledLaunch]]


def _sample(op: Op, name: str) -> Sample:
    assert op.tuning is not None
    assert op.verification is not None
    calls = [bucket.sample for bucket in op.tuning.buckets] + list(op.verification.real)
    calls += [sample for each in op.implementations if each.kernels is not None for sample in each.kernels.real]
    return next(sample for sample in calls if sample.name == name)


def count(
    op: str,
    implementation: str | None,
    sample: str,
    config: Config,
    architectures: Sequence[str],
    module: ModuleType | None = None,
) -> dict[str, Sequence[CountedLaunch]]:
    """What a counting worker runs: for each architecture, its launches and what a workgroup of each does.

    `module`: the kernels in Triton, where they are not the op's own.
    """
    subject = OPS[op]
    assert subject.verification is not None
    run = subject.implementation(implementation or subject.verification.implementation)
    known: dict[Any, Any] = {}
    found = {}
    for arch in architectures:
        arguments = _sample(subject, sample).make(filled=False)
        counting: AbstractContextManager[Sequence[CountedLaunch]] = (
            counted(module or subject.verification.kernels, arch, known)
            if implementation is None
            else counted_hip(arch, known)
        )
        with counting as found[arch]:
            run(*arguments, config=config)
    return found


def build(
    op: str,
    implementation: str | None,
    arch: str,
    config: Config,
    samples: Sequence[str],
    module: ModuleType | None = None,
) -> Built:
    """What a compiling worker runs: the machine code of each call's launches, in figures, with the gates it fails.

    `module` as in `count`.
    """
    subject = OPS[op]
    assert subject.verification is not None
    kernels = None if implementation is None else subject.implementation(implementation).kernels
    run = subject.implementation(implementation or subject.verification.implementation)
    promises = subject.verification.promises if kernels is None else kernels.promises
    calls = {}
    for name in samples:
        emulation = (
            emulated(module or subject.verification.kernels, arch, execute=False)
            if kernels is None
            else emulated_hip(arch, execute=False)
        )
        arguments = _sample(subject, name).make(filled=False)
        with emulation as ran:
            run(*arguments, config=config)
        problem = subject.verification.problem(*arguments)
        calls[name] = [
            _compiled(
                call,
                promises[call.kernel] if kernels is None else kernels.for_problem(promises[call.kernel], problem),
                in_hip=kernels is not None,
            )
            for call in ran.calls
        ]
    return Built(_version(in_hip=kernels is not None), calls)


def _version(*, in_hip: bool) -> str:
    if in_hip:
        found = re.search(r"clang version (\S+)", toolchain.find_compiler().version)
        return found[1] if found else "unknown"
    import triton  # noqa: PLC0415 -- optional, and slow to import

    version: str = triton.__version__
    return version


def _compiled(call: Call, promise: KernelPromise, *, in_hip: bool) -> CompiledLaunch:
    facts = report(call.code)
    failed = {gate.name: gate.sentence for gate in check(facts, promise) if gate.ok is False}
    share = facts.share_of_wide_loads()
    # A product in HIP has the next step's loads under way in registers, however many steps stand in LDS.
    code = (
        replace(machine_code(facts, 2), ahead=promise.uses_dot)
        if in_hip
        else machine_code(facts, call.config.num_stages)
    )
    return CompiledLaunch(
        call.kernel, call.grid, failed, code, facts.vgprs, facts.lds, facts.waves_per_simd,
        None if share is None else round(share, 3), facts.matrix_in_main,
    )  # fmt: skip


def machine_code(facts: IsaReport, stages: int) -> Code:
    """A kernel, as the model of `rocm_sd.tuning.ranking` sees it."""
    main = _part(facts, main=True)
    whole = _part(facts, main=False)
    rest = CodePart(
        whole.vector - main.vector,
        whole.transcendental - main.transcendental,
        whole.matrix_flops - main.matrix_flops,
        whole.lds_bytes - main.lds_bytes,
        whole.load_bytes - main.load_bytes,
        tuple((Counter(whole.global_widths) - Counter(main.global_widths)).elements()),
    )
    return Code(facts.waves, facts.wave_size, facts.workgroups, stages, main, rest, facts.has_main_loop)


def _part(facts: IsaReport, *, main: bool) -> CodePart:
    accesses = facts.accesses_in_main if main else facts.accesses
    transcendental = facts.transcendental_in_main if main else facts.transcendental
    return CodePart(
        (facts.vector_in_main if main else facts.vector) - transcendental,
        transcendental,
        facts.matrix_flops_in_main if main else facts.matrix_flops,
        sum(a.width for a in accesses if a.space == "lds"),
        sum(a.width for a in accesses if a.space == "global" and a.is_load),
        tuple(sorted(a.width for a in accesses if a.space == "global")),
    )
