"""Tuning data with no GPU: every config of an op's space is compiled, what cannot be used is dropped, the rest ranked.

Two kinds of task run in worker processes (`tasks`). `count` runs the first workgroup of each launch, in Triton's
interpreter, or in the emulator for kernels in HIP: what it moves and multiplies. `build` compiles the launches for one
architecture and reads the machine code. The model of `rocm_sd.tuning.ranking` turns both into a time. A config is also
held to the gates at every real call of the op's verification that falls into the bucket, since those are what rung 3
compiles.

The file of an (op, architecture) is written as soon as its last config is in; code that was compiled once is found in
the cache, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rocm_sd.tuning
from rocm_sd import arch as archs
from rocm_sd.errors import MissingDependency, RocmSdError, Unsupported, require_known
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning.choice import within
from rocm_sd.tuning.ranking import RatedConfig, model
from rocm_sd.tuning.static.data_files import ArchBucket, BucketResult, require_writable, write, write_others
from rocm_sd.tuning.static.tasks import build, count
from rocm_sd.verify.compiler import pool, targets
from rocm_sd.verify.programs import CountedHipLaunch, CountedLaunch
from rocm_sd.workers import cancelling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import Kernels
    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning import Problem
    from rocm_sd.tuning.static.tasks import Built, CompiledLaunch

__all__ = ["DATA", "SweepPlan", "plan", "tune"]

DATA = Path(rocm_sd.tuning.__file__).parent / "data"
TIMEOUT_S = 600.0  # one config: several kernels at several sizes, each allowed 180 s by the compiler
_COMPILED = ("vgprs", "lds", "waves_per_simd", "wide_loads", "matrix_in_main")  # figures of a launch
UNUSABLE = ("spills", "scratch", "lds", "matrix")  # gates that no config may fail; the others come before the time


@dataclass(frozen=True)
class _BucketSweep(ArchBucket):
    """What is to be searched: the calls that a config must serve, the first of which is modelled."""

    samples: tuple[str, ...]
    configs: tuple[Config, ...]


Counted = tuple[str, "str | None", str, "Config"]
Counts = Mapping[str, Sequence[CountedLaunch]]  # of the launches on each architecture


@dataclass(frozen=True)
class SweepPlan:
    """`skipped` says what was not asked for by name and cannot be had here, or is empty."""

    buckets: tuple[_BucketSweep, ...]
    skipped: str = ""

    @property
    def counts(self) -> dict[Counted, list[str]]:
        """What is to be counted: (op, implementation, call, config), with the architectures that want it."""
        wanted: dict[Counted, list[str]] = {}
        for bucket in self.buckets:
            for config in bucket.configs:
                key = (bucket.op, bucket.implementation, bucket.samples[0], config)
                wanted.setdefault(key, []).append(bucket.arch)
        return wanted

    @property
    def tasks(self) -> int:
        return len(self.counts) + sum(len(bucket.configs) for bucket in self.buckets)


def plan(ops: Iterable[str] = (), architectures: Iterable[str] = ()) -> SweepPlan:
    """`op` means its own kernels, on all that Triton compiles for; `op:hip` those in HIP, on what clang is proven for.

    Nothing named means all of both; where there is no compiler for HIP, all but those.
    """
    named = list(ops)
    tuned = [op for op in OPS.values() if op.tuning is not None and op.tuning.buckets]
    own = [f"{op.name}:{i.name}" for op in tuned for i in op.implementations if i.kernels is not None]
    wanted = list(architectures)
    require_known("architecture", wanted, list(dict.fromkeys((*_compiled_for("op"), *_compiled_for("op:hip")))))
    require_known("op", named, [*OPS, *own])
    skipped = ""
    if not named or any(":" in name for name in named):
        try:
            toolchain.find_compiler()
        except toolchain.NoHipCompiler as error:
            if named:
                raise
            own, skipped = [], f"Kernels in HIP are skipped. {error}"
    buckets = []
    for name in named or [*(op.name for op in tuned), *own]:
        possible = _compiled_for(name)
        if named:
            require_known("architecture", wanted, possible)
        gpus = [archs.get(gfx) for gfx in wanted or possible if gfx in possible]
        op, _, implementation = name.partition(":")
        buckets += _buckets(OPS[op], implementation or None, gpus)
    return SweepPlan(tuple(buckets), skipped)


def _compiled_for(name: str) -> list[str]:
    return list(toolchain.TARGETS) if ":" in name else [a.name for a in targets()]


def _buckets(op: Op, implementation: str | None, architectures: Iterable[Arch]) -> list[_BucketSweep]:
    if op.tuning is None or not op.tuning.buckets or op.verification is None:
        raise Unsupported("Static tuning", f"{op.name}, which declares no configs", hint="See docs/adding-an-op.md.")
    verification, problem_of, kernels = op.verification, op.verification.problem, None
    if implementation is not None:
        own = op.implementation(implementation)
        verification, kernels = verification.of_its_own(own), own.kernels
    limits = [
        {name: list(limit) if isinstance(limit, (list, tuple)) else limit for name, limit in bucket.when.items()}
        for bucket in op.tuning.buckets
    ]
    calls: dict[int, list[tuple[str, Problem]]] = {}
    for sample in verification.real:
        # As dispatch does it: the first bucket that fits is the one that counts.
        asked = problem_of(*sample.make(filled=False))
        first = _first(limits, asked)
        calls.setdefault(-1 if first is None else first, []).append((sample.name, asked))
    problems = []
    for index, (when, bucket) in enumerate(zip(limits, op.tuning.buckets, strict=True)):
        problems.append(problem_of(*bucket.sample.make(filled=False)))
        if _first(limits, problems[-1]) != index:
            raise Unsupported(f"The bucket {when} of {op.name}", f"its own call: {bucket.sample.name} falls elsewhere")
    found = []
    for arch in architectures:
        for index, (when, bucket) in enumerate(zip(limits, op.tuning.buckets, strict=True)):
            # Those of a format that is not multiplied there are nobody's.
            real = [name for name, asked in calls.get(index, ()) if verification.fits(asked, arch)]
            samples = dict.fromkeys((bucket.sample.name, *real))
            # A space may come upon the same config twice.
            configs = dict.fromkeys(_space(op, kernels, problems[index], arch))
            there = (op.name, arch.name, when, tuple(samples), tuple(configs))
            found.append(_BucketSweep(*there, implementation=implementation))
    return found


def _space(op: Op, kernels: Kernels | None, problem: Problem, arch: Arch) -> Iterable[Config]:
    assert op.tuning is not None
    if kernels is None:
        return op.tuning.space(problem, arch)
    # Where there is nothing to configure there is one config, whose figures are worth as much.
    return kernels.space(problem, arch) if kernels.space is not None else (NO_CONFIG,)


def _first(limits: Iterable[Mapping[str, Any]], problem: Problem) -> int | None:
    return next((index for index, when in enumerate(limits) if within(when, problem)), None)


def tune(
    planned: SweepPlan,
    out: Path = DATA,
    *,
    jobs: int | None = None,
    progress: Callable[[str], object] = lambda _what: None,
) -> list[BucketResult]:
    """Run the plan and write a file for each (op, architecture). Where no config of a bucket is usable, see `error`."""
    require_writable(out)
    counts = _counted(planned, jobs, progress)
    rated: dict[int, list[RatedConfig]] = {index: [] for index in range(len(planned.buckets))}
    versions: dict[str | None, set[str]] = defaultdict(set)
    left: Counter[tuple[str, str | None, str]] = Counter()
    futures: dict[Future[Built], tuple[int, Config]] = {}
    for index, bucket in enumerate(planned.buckets):
        left[bucket.file] += len(bucket.configs)
        for config in bucket.configs:
            task = (bucket.op, bucket.implementation, bucket.arch, config, bucket.samples)
            futures[pool(interpret=False, size=jobs).submit(build, *task, timeout=TIMEOUT_S)] = (index, config)
    found = [
        each for file, configs in left.items() if not configs for each in _written(planned, file, rated, versions, out)
    ]
    with cancelling(futures):
        for future in as_completed(futures):
            index, config = futures[future]
            bucket = planned.buckets[index]
            counted_here = counts.get((bucket.op, bucket.implementation, bucket.samples[0], config), {})
            versions_here = versions[bucket.implementation]
            rated[index].append(_rated(bucket, config, future, counted_here, versions_here))
            left[bucket.file] -= 1
            progress(f"{bucket.name} {bucket.arch}")
            if not left[bucket.file]:
                found += _written(planned, bucket.file, rated, versions, out)
    order = [(*bucket.file, repr(bucket.when)) for bucket in planned.buckets]
    return sorted(found, key=lambda each: order.index((*each.file, repr(each.when))))


def _written(
    planned: SweepPlan,
    file: tuple[str, str | None, str],
    rated: Mapping[int, list[RatedConfig]],
    versions: Mapping[str | None, set[str]],
    out: Path,
) -> list[BucketResult]:
    """The buckets of an (op, architecture), written when the last config of the last of them is in."""
    found = []
    for index, each in enumerate(planned.buckets):
        if each.file == file:
            order = {config: place for place, config in enumerate(each.configs)}
            tried = sorted(rated[index], key=lambda c, o=order: o[c.config])  # type: ignore[misc]
            there = (each.op, each.arch, each.when, each.samples[0], tuple(tried))
            found.append(BucketResult(*there, implementation=each.implementation))
    _write(OPS[file[0]], found, out, ", ".join(sorted(versions[file[1]])))
    return found


def _write(op: Op, found: list[BucketResult], out: Path, version: str) -> None:
    assert op.tuning is not None
    assert op.verification is not None
    untimed, implementation = op.tuning.untimed, found[0].implementation
    if implementation is None:
        write(found, out, untimed, version)
    elif archs.get(found[0].arch).triton_supported:
        write_others(found, out, version)
    else:
        # The one kernel that there is stands where Triton's would, and is trusted as that one would be.
        trusted = untimed == op.verification.implementation
        write(found, out, implementation if trusted else untimed, version, compiler="clang")


def _counted(planned: SweepPlan, jobs: int | None, progress: Callable[[str], object]) -> dict[Counted, Counts | str]:
    """What was counted of each call and config, or the reason that it could not be."""
    counts: dict[Counted, Counts | str] = {}
    futures: dict[Future[dict[str, Sequence[CountedLaunch]]], Counted] = {}
    for key, architectures in planned.counts.items():
        op, implementation, sample, config = key
        # The emulator executes what is compiled, so it runs where that is not interpreted.
        workers = pool(interpret=implementation is None, size=jobs)
        task = (op, implementation, sample, config, architectures)
        futures[workers.submit(count, *task, timeout=TIMEOUT_S)] = key
    with cancelling(futures):
        for future in as_completed(futures):
            try:
                counts[futures[future]] = future.result()
            except MissingDependency:
                raise
            except RocmSdError as error:
                counts[futures[future]] = error.message
            progress(f"{':'.join(filter(None, futures[future][:2]))} workgroups")
    return counts


def _rated(
    bucket: _BucketSweep,
    config: Config,
    future: Future[Built],
    counts: Counts | str,
    versions: set[str],
) -> RatedConfig:
    try:
        built = future.result()
    except MissingDependency:
        raise
    except RocmSdError as error:
        return RatedConfig(config, dropped=f"compiler: {error.message}")
    versions.add(built.version)
    failed: dict[str, str] = {}
    for name, launches in built.calls.items():
        for launch in launches:
            for gate, sentence in launch.failed.items():
                failed.setdefault(gate, f"{gate}: {launch.kernel} ({name}): {sentence}")
    for gate in UNUSABLE:
        if gate in failed:
            return RatedConfig(config, dropped=failed[gate])
    counter = "interpreter" if bucket.implementation is None else "emulator"
    if isinstance(counts, str):
        return RatedConfig(config, dropped=f"{counter}: {counts}")
    calls, programs = built.calls[bucket.samples[0]], counts[bucket.arch]
    if [(c.kernel, c.grid) for c in calls] != [(p.kernel, p.grid) for p in programs]:
        return RatedConfig(config, dropped=f"{counter}: it launched other kernels or grids than were compiled")
    return _modelled(archs.get(bucket.arch), config, calls, programs, tuple(failed.values()))


def _modelled(
    arch: Arch,
    config: Config,
    launches: Sequence[CompiledLaunch],
    workgroups: Sequence[CountedLaunch],
    blemishes: tuple[str, ...],
) -> RatedConfig:
    """A config, rated by its compiled launches and what a workgroup of each does: `ranking` gives the time."""
    kernels: list[dict[str, Any]] = []
    not_modelled: dict[str, None] = {}
    total = 0.0
    for launch, counted in zip(launches, workgroups, strict=True):
        x, y, z = launch.grid
        modelled = model(arch, x * y * z, launch.code, counted.program)
        not_modelled.update(dict.fromkeys(modelled.not_modelled))
        total += modelled.seconds
        kernel: dict[str, Any] = {"kernel": launch.kernel, "workgroups": x * y * z}
        # HIP launches are counted for more than the model needs.
        if isinstance(counted, CountedHipLaunch):
            kernel["threads"] = launch.code.waves * launch.code.wave_size
        kernel |= {name: getattr(launch, name) for name in _COMPILED}
        if isinstance(counted, CountedHipLaunch):
            kernel |= {"coalescing": counted.coalescing, "conflicts": counted.conflicts}
        kernel["modelled_us"] = round(modelled.seconds * 1e6, 3)
        kernel["bound_by"] = max(modelled.terms, key=lambda term: modelled.terms[term], default="unknown")
        kernels.append(kernel)
    figures = {
        "vgprs": max(k["vgprs"] for k in kernels),
        "spills": 0,
        "lds": max(k["lds"] for k in kernels),
        "waves_per_simd": min(k["waves_per_simd"] for k in kernels),
        "kernels": kernels,
        "left_out": list(not_modelled),
    }
    return RatedConfig(config, round(total * 1e6, 3), None, blemishes, figures)
