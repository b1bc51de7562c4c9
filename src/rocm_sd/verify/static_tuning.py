"""Tuning data with no GPU: every config of an op's space is compiled, what cannot be used is dropped, the rest ranked.

Two kinds of task run in worker processes: `count` interprets the first workgroup of each launch (what it moves and
multiplies), `build` compiles the launches for one architecture and reads the machine code. The model of
`rocm_sd.tuning.ranking` turns both into a time. A config is also held to the gates at every real call of the op's
verification that falls into the bucket, since those are what rung 3 compiles.

The file of an (op, architecture) is written as soon as its last config is in, beside and renamed; code that was
compiled once is found in the cache, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rocm_sd.tuning
from rocm_sd import arch as archs
from rocm_sd.errors import InvalidOption, MissingDependency, RocmSdError, Unsupported
from rocm_sd.ops import OPS
from rocm_sd.tuning.choice import within
from rocm_sd.tuning.ranking import Candidate, Code, Part, Program, model
from rocm_sd.verify import workers
from rocm_sd.verify.compiler import targets
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.programs import counted
from rocm_sd.verify.runner import emulated
from rocm_sd.verify.tuning_files import Found, require_writable, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.ops.registry import Op, Verification
    from rocm_sd.ops.samples import Sample
    from rocm_sd.tuning import Problem
    from rocm_sd.verify.isa import Report
    from rocm_sd.verify.programs import Known
    from rocm_sd.verify.runner import Call

__all__ = ["DATA", "Plan", "plan", "tune"]

DATA = Path(rocm_sd.tuning.__file__).parent / "data"
TIMEOUT_S = 600.0  # one config: several kernels at several sizes, each allowed 180 s by the compiler
UNUSABLE = ("spills", "scratch", "lds", "matrix")  # gates that no config may fail; the others come before the time

Config = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Search:
    """One bucket on one architecture: the calls that a config must serve, the first of which is modelled."""

    op: str
    arch: str
    when: Mapping[str, Any]
    samples: tuple[str, ...]
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Plan:
    searches: tuple[_Search, ...]

    @property
    def counts(self) -> dict[tuple[str, str, Config], list[str]]:
        """What is to be interpreted: (op, call, config), with the architectures that want it."""
        wanted: dict[tuple[str, str, Config], list[str]] = {}
        for search in self.searches:
            for config in search.configs:
                wanted.setdefault((search.op, search.samples[0], config), []).append(search.arch)
        return wanted

    @property
    def tasks(self) -> int:
        return len(self.counts) + sum(len(search.configs) for search in self.searches)


def plan(ops: Iterable[str] = (), architectures: Iterable[str] = ()) -> Plan:
    """Nothing named means every op that declares what to tune, on all that Triton compiles for."""
    known = [a.name for a in targets()]
    named = list(architectures) or known
    for name in named:
        if name not in known:
            raise InvalidOption("architecture", name, known)
    chosen = list(ops) or [name for name, op in OPS.items() if op.tuning is not None]
    for op in chosen:
        if op not in OPS:
            raise InvalidOption("op", op, list(OPS))
    return Plan(tuple(search for op in chosen for search in _searches(OPS[op], [archs.get(name) for name in named])))


def _searches(op: Op, architectures: Iterable[Arch]) -> list[_Search]:
    if op.tuning is None or op.verification is None:
        raise Unsupported("Static tuning", f"{op.name}, which declares no configs", hint="See docs/adding-an-op.md.")
    problem_of = op.verification.problem
    limits = [
        {name: list(limit) if isinstance(limit, (list, tuple)) else limit for name, limit in bucket.when.items()}
        for bucket in op.tuning.buckets
    ]
    calls: dict[int, list[str]] = {}
    for sample in op.verification.real:
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
            configs = dict.fromkeys(tuple(config.items()) for config in op.tuning.space(problems[index], arch))
            found.append(_Search(op.name, arch.name, when, tuple(samples), tuple(configs)))
    return found


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
    versions: set[str] = set()
    left: Counter[tuple[str, str]] = Counter()
    found: list[Found] = []
    pool = _pool(jobs, interpret=False)
    futures: dict[Future[Any], tuple[int, Config]] = {}
    try:
        for index, search in enumerate(planned.searches):
            left[search.op, search.arch] += max(1, len(search.configs))
            for config in search.configs:
                task = {"op": search.op, "arch": search.arch, "config": dict(config), "samples": list(search.samples)}
                futures[pool.submit("rocm_sd.verify.static_tuning:build", task, timeout=TIMEOUT_S)] = (index, config)
        for search in planned.searches:
            if not search.configs:
                left[search.op, search.arch] -= 1
                found += _finished(planned, search, left, candidates, versions, out)
        for future in as_completed(futures):
            index, config = futures[future]
            search = planned.searches[index]
            counted_here = counts.get((search.op, search.samples[0], config), {})
            candidates[index].append(_candidate(search, config, future, counted_here, versions))
            left[search.op, search.arch] -= 1
            progress(f"{search.op} {search.arch}")
            found += _finished(planned, search, left, candidates, versions, out)
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    finally:
        if jobs is not None:
            pool.close()
    order = [(search.op, search.arch, repr(search.when)) for search in planned.searches]
    return sorted(found, key=lambda each: order.index((each.op, each.arch, repr(each.when))))


def _finished(
    planned: Plan,
    search: _Search,
    left: Mapping[tuple[str, str], int],
    candidates: Mapping[int, list[Candidate]],
    versions: set[str],
    out: Path,
) -> list[Found]:
    """The buckets of an (op, architecture), written, once the last config of the last of them is in."""
    if left[search.op, search.arch]:
        return []
    found = []
    for index, each in enumerate(planned.searches):
        if (each.op, each.arch) == (search.op, search.arch):
            order = {config: place for place, config in enumerate(each.configs)}
            tried = sorted(candidates[index], key=lambda c, o=order: o[tuple(c.config.items())])  # type: ignore[misc]
            found.append(Found(each.op, each.arch, each.when, each.samples[0], tuple(tried)))
    tuning = OPS[search.op].tuning
    assert tuning is not None
    write(found, out, tuning.untimed, ", ".join(sorted(versions)))
    return found


Counts = dict[tuple[str, str, Config], dict[str, Any]]


def _counted(planned: Plan, jobs: int | None, progress: Callable[[str], object]) -> Counts:
    counts: Counts = {}
    pool = _pool(jobs, interpret=True)
    futures: dict[Future[Any], tuple[str, str, Config]] = {}
    try:
        for (op, sample, config), architectures in planned.counts.items():
            task = {"op": op, "sample": sample, "config": dict(config), "architectures": architectures}
            futures[pool.submit("rocm_sd.verify.static_tuning:count", task, timeout=TIMEOUT_S)] = (op, sample, config)
        for future in as_completed(futures):
            try:
                counts[futures[future]] = future.result()
            except MissingDependency:
                raise
            except RocmSdError as error:
                counts[futures[future]] = {"error": error.message}
            progress(f"{futures[future][0]} workgroups")
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    finally:
        if jobs is not None:
            pool.close()
    return counts


def _pool(jobs: int | None, *, interpret: bool) -> workers.Pool:
    """A pool of the size asked for, which the caller closes, or the one that all of this process share."""
    return workers.pool(interpret=interpret) if jobs is None else workers.Pool(interpret=interpret, size=jobs)


def _sample(op: Op, name: str) -> Sample:
    assert op.tuning is not None
    assert op.verification is not None
    calls = [bucket.sample for bucket in op.tuning.buckets] + list(op.verification.real)
    return next(sample for sample in calls if sample.name == name)


def count(op: str, sample: str, config: dict[str, int], architectures: list[str]) -> dict[str, Any]:
    """What an interpreting worker runs: for each architecture, its launches and what a workgroup of each does."""
    subject = OPS[op]
    assert subject.verification is not None
    run = subject.implementation(subject.verification.implementation).run
    known: Known = {}
    found = {}
    for arch in architectures:
        with counted(subject.verification.kernels, arch, known) as launches:
            run(*_sample(subject, sample).make(filled=False), config=config)
        found[arch] = [asdict(launch) for launch in launches]
    return found


def build(op: str, arch: str, config: dict[str, int], samples: list[str]) -> dict[str, Any]:
    """What a compiling worker runs: the machine code of each call's launches, in figures, with the gates it fails."""
    import triton  # noqa: PLC0415 -- optional, and slow to import

    subject = OPS[op]
    assert subject.verification is not None
    run = subject.implementation(subject.verification.implementation).run
    launches = []
    for name in samples:
        with emulated(subject.verification.kernels, arch, execute=False) as recorded:
            run(*_sample(subject, name).make(filled=False), config=config)
        launches.append([_figures(call, subject.verification) for call in recorded.calls])
    return {"triton": triton.__version__, "calls": dict(zip(samples, launches, strict=True))}


def _figures(call: Call, verification: Verification) -> dict[str, Any]:
    facts = report(call.code)
    failed = [gate for gate in check(facts, verification.promises[call.kernel]) if gate.ok is False]
    share = facts.share_of_wide_loads()
    return {
        "kernel": call.kernel,
        "grid": call.grid,
        "failed": {gate.name: gate.sentence for gate in failed},
        "code": asdict(_code(facts, call.config.num_stages)),
        "vgprs": facts.vgprs,
        "lds": facts.lds,
        "waves_per_simd": facts.waves_per_simd,
        "wide_loads": None if share is None else round(share, 3),
        "matrix_in_main": facts.matrix_in_main,
    }


def _code(facts: Report, stages: int) -> Code:
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


def _candidate(
    search: _Search, config: Config, future: Future[Any], counts: Mapping[str, Any], versions: set[str]
) -> Candidate:
    try:
        built = future.result()
    except MissingDependency:
        raise
    except RocmSdError as error:
        return Candidate(dict(config), dropped=f"compiler: {error.message}")
    versions.add(built["triton"])
    failed: dict[str, str] = {}
    for name, launches in built["calls"].items():
        for launch in launches:
            for gate, sentence in launch["failed"].items():
                failed.setdefault(gate, f"{gate}: {launch['kernel']} ({name}): {sentence}")
    for gate in UNUSABLE:
        if gate in failed:
            return Candidate(dict(config), dropped=failed[gate])
    if "error" in counts:
        return Candidate(dict(config), dropped=f"interpreter: {counts['error']}")
    calls, programs = built["calls"][search.samples[0]], counts[search.arch]
    if [(c["kernel"], c["grid"]) for c in calls] != [(p["kernel"], p["grid"]) for p in programs]:
        return Candidate(dict(config), dropped="interpreter: it launched other kernels or grids than were compiled")
    return _modelled(archs.get(search.arch), config, calls, programs, tuple(failed.values()))


def _modelled(
    arch: Arch,
    config: Config,
    calls: list[dict[str, Any]],
    programs: list[dict[str, Any]],
    blemishes: tuple[str, ...],
) -> Candidate:
    kernels = []
    left_out: dict[str, None] = {}
    total = 0.0
    for call, counted_program in zip(calls, programs, strict=True):
        code = Code(**{**call["code"], "main": _as_part(call["code"]["main"]), "rest": _as_part(call["code"]["rest"])})
        program = counted_program["program"]
        program = Program(**{**program, "dots": tuple(tuple(dot) for dot in program["dots"])})
        x, y, z = call["grid"]
        modelled = model(arch, x * y * z, code, program)
        left_out.update(dict.fromkeys(modelled.left_out))
        total += modelled.seconds
        kernels.append(
            {
                "kernel": call["kernel"],
                "workgroups": x * y * z,
                **{name: call[name] for name in ("vgprs", "lds", "waves_per_simd", "wide_loads", "matrix_in_main")},
                "modelled_us": round(modelled.seconds * 1e6, 3),
                "bound_by": max(modelled.terms, key=lambda term: modelled.terms[term], default="unknown"),
            }
        )
    figures = {
        "vgprs": max(k["vgprs"] for k in kernels),
        "spills": 0,
        "lds": max(k["lds"] for k in kernels),
        "waves_per_simd": min(k["waves_per_simd"] for k in kernels),
        "kernels": kernels,
        "left_out": list(left_out),
    }
    return Candidate(dict(config), round(total * 1e6, 3), None, blemishes, figures)


def _as_part(values: Mapping[str, Any]) -> Part:
    return Part(**{**values, "global_widths": tuple(values["global_widths"])})
