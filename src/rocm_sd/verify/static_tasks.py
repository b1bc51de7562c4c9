"""What the worker processes of a static search run: `count` and `build`, whose answers are plain values."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning.ranking import Code, Part
from rocm_sd.verify.gates import check
from rocm_sd.verify.hip_programs import KnownHip, counted_hip
from rocm_sd.verify.hip_runner import emulated_hip
from rocm_sd.verify.isa import report
from rocm_sd.verify.programs import counted
from rocm_sd.verify.runner import emulated

if TYPE_CHECKING:
    from rocm_sd.ops.definition import KernelPromise
    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample
    from rocm_sd.verify.isa import Report
    from rocm_sd.verify.programs import Known
    from rocm_sd.verify.runner import Call

__all__ = ["build", "count", "machine_code"]


def _sample(op: Op, name: str) -> Sample:
    assert op.tuning is not None
    assert op.verification is not None
    calls = [bucket.sample for bucket in op.tuning.buckets] + list(op.verification.real)
    calls += [sample for each in op.implementations if each.kernels is not None for sample in each.kernels.real]
    return next(sample for sample in calls if sample.name == name)


def count(
    op: str, sample: str, config: dict[str, int], architectures: list[str], implementation: str | None = None
) -> dict[str, Any]:
    """What a counting worker runs: for each architecture, its launches and what a workgroup of each does."""
    subject = OPS[op]
    assert subject.verification is not None
    run = subject.implementation(implementation or subject.verification.implementation)
    chosen = run.config_from(config)
    known: Known = {}
    known_hip: KnownHip = {}
    found = {}
    for arch in architectures:
        arguments = _sample(subject, sample).make(filled=False)
        if implementation is None:
            with counted(subject.verification.kernels, arch, known) as launches:
                run(*arguments, config=chosen)
            found[arch] = [asdict(launch) for launch in launches]
        else:
            with counted_hip(arch, known_hip) as executed:
                run(*arguments, config=chosen)
            found[arch] = [asdict(launch) for launch in executed]
    return found


def build(
    op: str, arch: str, config: dict[str, int], samples: list[str], implementation: str | None = None
) -> dict[str, Any]:
    """What a compiling worker runs: the machine code of each call's launches, in figures, with the gates it fails."""
    subject = OPS[op]
    assert subject.verification is not None
    kernels = None if implementation is None else subject.implementation(implementation).kernels
    run = subject.implementation(implementation or subject.verification.implementation)
    chosen = run.config_from(config)
    promises = subject.verification.promises if kernels is None else kernels.promises
    launches = []
    for name in samples:
        recording = (
            emulated(subject.verification.kernels, arch, execute=False)
            if kernels is None
            else emulated_hip(arch, execute=False)
        )
        arguments = _sample(subject, name).make(filled=False)
        with recording as recorded:
            run(*arguments, config=chosen)
        problem = subject.verification.problem(*arguments)
        launches.append(
            [
                _figures(
                    call,
                    promises[call.kernel] if kernels is None else kernels.for_problem(promises[call.kernel], problem),
                    in_hip=kernels is not None,
                )
                for call in recorded.calls
            ]
        )
    return {"version": _version(in_hip=kernels is not None), "calls": dict(zip(samples, launches, strict=True))}


def _version(*, in_hip: bool) -> str:
    if in_hip:
        found = re.search(r"clang version (\S+)", toolchain.find_compiler().version)
        return found[1] if found else "unknown"
    import triton  # noqa: PLC0415 -- optional, and slow to import

    version: str = triton.__version__
    return version


def _figures(call: Call, promise: KernelPromise, *, in_hip: bool) -> dict[str, Any]:
    facts = report(call.code)
    failed = [gate for gate in check(facts, promise) if gate.ok is False]
    share = facts.share_of_wide_loads()
    # A product in HIP has the next step's loads under way in registers, however many steps stand in LDS.
    code = (
        replace(machine_code(facts, 2), ahead=promise.uses_dot)
        if in_hip
        else machine_code(facts, call.config.num_stages)
    )
    return {
        "kernel": call.kernel,
        "grid": call.grid,
        "failed": {gate.name: gate.sentence for gate in failed},
        "code": asdict(code),
        "vgprs": facts.vgprs,
        "lds": facts.lds,
        "waves_per_simd": facts.waves_per_simd,
        "wide_loads": None if share is None else round(share, 3),
        "matrix_in_main": facts.matrix_in_main,
    }


def machine_code(facts: Report, stages: int) -> Code:
    """A kernel, as the model of `rocm_sd.tuning.ranking` sees it."""
    main = _part(facts, main=True)
    whole = _part(facts, main=False)
    rest = Part(
        whole.vector - main.vector,
        whole.transcendental - main.transcendental,
        whole.matrix_flops - main.matrix_flops,
        whole.lds_bytes - main.lds_bytes,
        whole.load_bytes - main.load_bytes,
        tuple((Counter(whole.global_widths) - Counter(main.global_widths)).elements()),
    )
    return Code(facts.waves, facts.wave_size, facts.workgroups, stages, main, rest, facts.has_main_loop)


def _part(facts: Report, *, main: bool) -> Part:
    accesses = facts.accesses_in_main if main else facts.accesses
    transcendental = facts.transcendental_in_main if main else facts.transcendental
    return Part(
        (facts.vector_in_main if main else facts.vector) - transcendental,
        transcendental,
        facts.matrix_flops_in_main if main else facts.matrix_flops,
        sum(a.width for a in accesses if a.space == "lds"),
        sum(a.width for a in accesses if a.space == "global" and a.is_load),
        tuple(sorted(a.width for a in accesses if a.space == "global")),
    )
