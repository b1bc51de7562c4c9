"""Tuning data with no GPU: every config of an op's space is compiled, what cannot be used is dropped, the rest ranked.

Two kinds of task run in worker processes (`static_tasks`). `count` runs the first workgroup of each launch, in Triton's
interpreter, or in the emulator for kernels in HIP: what it moves and multiplies. `build` compiles the launches for one
architecture and reads the machine code. The model of `rocm_sd.tuning.ranking` turns both into a time. A config is also
held to the gates at every real call of the op's verification that falls into the bucket, since those are what rung 3
compiles.

The file of an (op, architecture) is written as soon as its last config is in, beside and renamed; code that was
compiled once is found in the cache, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rocm_sd.tuning
from rocm_sd import arch as archs
from rocm_sd.errors import InvalidOption, MissingDependency, RocmSdError, Unsupported
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning.choice import within
from rocm_sd.tuning.ranking import Candidate
from rocm_sd.verify import workers
from rocm_sd.verify.compiler import targets
from rocm_sd.verify.modelled import modelled_candidate
from rocm_sd.verify.tuning_files import Found, require_writable, write, write_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.definition import Kernels
    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning import Problem

__all__ = ["DATA", "Plan", "plan", "tune"]

DATA = Path(rocm_sd.tuning.__file__).parent / "data"
TIMEOUT_S = 600.0  # one config: several kernels at several sizes, each allowed 180 s by the compiler
UNUSABLE = ("spills", "scratch", "lds", "matrix")  # gates that no config may fail; the others come before the time


@dataclass(frozen=True)
class _Search:
    """One bucket on one architecture: the calls that a config must serve, the first of which is modelled.

    `implementation` is one with kernels of its own; None means the op's.
    """

    op: str
    arch: str
    when: Mapping[str, Any]
    samples: tuple[str, ...]
    configs: tuple[Config, ...]
    implementation: str | None = None

    @property
    def file(self) -> tuple[str, str | None, str]:
        """Buckets that are written together."""
        return self.op, self.implementation, self.arch


Counted = tuple[str, "str | None", str, "Config"]


@dataclass(frozen=True)
class Plan:
    """`left_out` says what was not asked for by name and cannot be had here, or is empty."""

    searches: tuple[_Search, ...]
    left_out: str = ""

    @property
    def counts(self) -> dict[Counted, list[str]]:
        """What is to be counted: (op, implementation, call, config), with the architectures that want it."""
        wanted: dict[Counted, list[str]] = {}
        for search in self.searches:
            for config in search.configs:
                key = (search.op, search.implementation, search.samples[0], config)
                wanted.setdefault(key, []).append(search.arch)
        return wanted

    @property
    def tasks(self) -> int:
        return len(self.counts) + sum(len(search.configs) for search in self.searches)


def plan(ops: Iterable[str] = (), architectures: Iterable[str] = ()) -> Plan:
    """`op` means its own kernels, on all that Triton compiles for; `op:hip` those in HIP, on what clang is proven for.

    Nothing named means all of both; where there is no compiler for HIP, all but those.
    """
    named = list(ops)
    tuned = [op for op in OPS.values() if op.tuning is not None]
    own = [f"{op.name}:{i.name}" for op in tuned for i in op.implementations if i.kernels is not None]
    wanted = list(architectures)
    _known("architecture", wanted, list(dict.fromkeys((*_compiled_for("op"), *_compiled_for("op:hip")))))
    _known("op", named, [*OPS, *own])
    left_out = ""
    if not named or any(":" in name for name in named):
        try:
            toolchain.find_compiler()
        except toolchain.NoHipCompiler as error:
            if named:
                raise
            own, left_out = [], f"Kernels in HIP are left out. {error}"
    searches = []
    for name in named or [*(op.name for op in tuned), *own]:
        possible = _compiled_for(name)
        if named:
            _known("architecture", wanted, possible)
        gpus = [archs.get(gfx) for gfx in wanted or possible if gfx in possible]
        op, _, implementation = name.partition(":")
        searches += _searches(OPS[op], implementation or None, gpus)
    return Plan(tuple(searches), left_out)


def _compiled_for(name: str) -> list[str]:
    return list(toolchain.TARGETS) if ":" in name else [a.name for a in targets()]


def _known(option: str, values: Iterable[str], choices: list[str]) -> None:
    for value in values:
        if value not in choices:
            raise InvalidOption(option, value, choices)


def _searches(op: Op, implementation: str | None, architectures: Iterable[Arch]) -> list[_Search]:
    if op.tuning is None or op.verification is None:
        raise Unsupported("Static tuning", f"{op.name}, which declares no configs", hint="See docs/adding-an-op.md.")
    problem_of = op.verification.problem
    limits = [
        {name: list(limit) if isinstance(limit, (list, tuple)) else limit for name, limit in bucket.when.items()}
        for bucket in op.tuning.buckets
    ]
    kernels = None if implementation is None else op.implementation(implementation).kernels
    calls: dict[int, list[str]] = {}
    for sample in (*op.verification.real, *(kernels.real if kernels is not None else ())):
        # As dispatch does it: the first bucket that fits is the one that counts.
        first = _first(limits, problem_of(*sample.make(filled=False)))
        calls.setdefault(-1 if first is None else first, []).append(sample.name)
    problems = []
    for index, (when, bucket) in enumerate(zip(limits, op.tuning.buckets, strict=True)):
        problems.append(problem_of(*bucket.sample.make(filled=False)))
        if _first(limits, problems[-1]) != index:
            raise Unsupported(f"The bucket {when} of {op.name}", f"its own call: {bucket.sample.name} falls elsewhere")
    found = []
    for arch in architectures:
        for index, (when, bucket) in enumerate(zip(limits, op.tuning.buckets, strict=True)):
            samples = dict.fromkeys((bucket.sample.name, *calls.get(index, ())))
            # A space may come upon the same config twice.
            configs = dict.fromkeys(_space(op, kernels, problems[index], arch))
            found.append(_Search(op.name, arch.name, when, tuple(samples), tuple(configs), implementation))
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
    planned: Plan,
    out: Path = DATA,
    *,
    jobs: int | None = None,
    progress: Callable[[str], object] = lambda _what: None,
) -> list[Found]:
    """Run the plan and write a file for each (op, architecture). Where no config of a bucket is usable, see `error`."""
    require_writable(out)
    counts = _counted(planned, jobs, progress)
    candidates: dict[int, list[Candidate]] = {index: [] for index in range(len(planned.searches))}
    versions: dict[str | None, set[str]] = defaultdict(set)
    left: Counter[tuple[str, str | None, str]] = Counter()
    found: list[Found] = []
    pool = _pool(jobs, interpret=False)
    futures: dict[Future[Any], tuple[int, Config]] = {}
    try:
        for index, search in enumerate(planned.searches):
            left[search.file] += max(1, len(search.configs))
            for config in search.configs:
                task = {
                    "op": search.op,
                    "arch": search.arch,
                    "config": config.to_dict(),
                    "samples": list(search.samples),
                    "implementation": search.implementation,
                }
                futures[pool.submit("rocm_sd.verify.static_tasks:build", task, timeout=TIMEOUT_S)] = (index, config)
        for search in planned.searches:
            if not search.configs:
                left[search.file] -= 1
                found += _finished(planned, search, left, candidates, versions, out)
        for future in as_completed(futures):
            index, config = futures[future]
            search = planned.searches[index]
            counted_here = counts.get((search.op, search.implementation, search.samples[0], config), {})
            versions_here = versions[search.implementation]
            candidates[index].append(_candidate(search, config, future, counted_here, versions_here))
            left[search.file] -= 1
            progress(f"{_name(search.op, search.implementation)} {search.arch}")
            found += _finished(planned, search, left, candidates, versions, out)
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    finally:
        if jobs is not None:
            pool.close()
    order = [(*search.file, repr(search.when)) for search in planned.searches]
    return sorted(found, key=lambda each: order.index((each.op, each.implementation, each.arch, repr(each.when))))


def _name(op: str, implementation: str | None) -> str:
    return f"{op}:{implementation}" if implementation else op


def _finished(
    planned: Plan,
    search: _Search,
    left: Mapping[tuple[str, str | None, str], int],
    candidates: Mapping[int, list[Candidate]],
    versions: Mapping[str | None, set[str]],
    out: Path,
) -> list[Found]:
    """The buckets of an (op, architecture), written, once the last config of the last of them is in."""
    if left[search.file]:
        return []
    found = []
    for index, each in enumerate(planned.searches):
        if each.file == search.file:
            order = {config: place for place, config in enumerate(each.configs)}
            tried = sorted(candidates[index], key=lambda c, o=order: o[c.config])  # type: ignore[misc]
            found.append(Found(each.op, each.arch, each.when, each.samples[0], tuple(tried), each.implementation))
    _write(OPS[search.op], found, out, ", ".join(sorted(versions[search.implementation])))
    return found


def _write(op: Op, found: list[Found], out: Path, version: str) -> None:
    assert op.tuning is not None
    assert op.verification is not None
    untimed, implementation = op.tuning.untimed, found[0].implementation
    if implementation is None:
        write(found, out, untimed, version)
    elif archs.get(found[0].arch).triton_supported:
        write_beside(found, out, version)
    else:
        # The one kernel that there is stands where Triton's would, and is trusted as that one would be.
        trusted = untimed == op.verification.implementation
        write(found, out, implementation if trusted else untimed, version, compiler="clang")


Counts = dict[Counted, dict[str, Any]]


def _counted(planned: Plan, jobs: int | None, progress: Callable[[str], object]) -> Counts:
    counts: Counts = {}
    # The emulator executes what is compiled, so it runs where that is not interpreted.
    wanted = planned.counts
    pools = {interpret: _pool(jobs, interpret=interpret) for interpret in {key[1] is None for key in wanted}}
    futures: dict[Future[Any], Counted] = {}
    try:
        for key, architectures in wanted.items():
            op, implementation, sample, config = key
            task = {
                "op": op,
                "sample": sample,
                "config": config.to_dict(),
                "architectures": architectures,
                "implementation": implementation,
            }
            pool = pools[implementation is None]
            futures[pool.submit("rocm_sd.verify.static_tasks:count", task, timeout=TIMEOUT_S)] = key
        for future in as_completed(futures):
            try:
                counts[futures[future]] = future.result()
            except MissingDependency:
                raise
            except RocmSdError as error:
                counts[futures[future]] = {"error": error.message}
            progress(f"{_name(*futures[future][:2])} workgroups")
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    finally:
        if jobs is not None:
            for pool in pools.values():
                pool.close()
    return counts


def _pool(jobs: int | None, *, interpret: bool) -> workers.Pool:
    """A pool of the size asked for, which the caller closes, or the one that all of this process share."""
    return workers.pool(interpret=interpret) if jobs is None else workers.Pool(interpret=interpret, size=jobs)


def _candidate(
    search: _Search, config: Config, future: Future[Any], counts: Mapping[str, Any], versions: set[str]
) -> Candidate:
    try:
        built = future.result()
    except MissingDependency:
        raise
    except RocmSdError as error:
        return Candidate(config, dropped=f"compiler: {error.message}")
    versions.add(built["version"])
    failed: dict[str, str] = {}
    for name, launches in built["calls"].items():
        for launch in launches:
            for gate, sentence in launch["failed"].items():
                failed.setdefault(gate, f"{gate}: {launch['kernel']} ({name}): {sentence}")
    for gate in UNUSABLE:
        if gate in failed:
            return Candidate(config, dropped=failed[gate])
    counter = "interpreter" if search.implementation is None else "emulator"
    if "error" in counts:
        return Candidate(config, dropped=f"{counter}: {counts['error']}")
    calls, programs = built["calls"][search.samples[0]], counts[search.arch]
    if [(c["kernel"], c["grid"]) for c in calls] != [(p["kernel"], p["grid"]) for p in programs]:
        return Candidate(config, dropped=f"{counter}: it launched other kernels or grids than were compiled")
    return modelled_candidate(archs.get(search.arch), config, calls, programs, tuple(failed.values()))
