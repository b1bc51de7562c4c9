"""Single ops: what dispatch chooses here against what stock torch runs, on every call of the op's workload."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import rocm_sd
from rocm_sd import arch, numerics
from rocm_sd.bench.gate import WRONG, free_memory
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import OURS, STOCK, Measurement, Record, WorkloadFacts, continued, now, record_file
from rocm_sd.bench.turns import failure_line
from rocm_sd.bench.workloads import OP_PREFIX
from rocm_sd.errors import NumericsFailure, Unsupported, require_one_of
from rocm_sd.measuring import Stopwatch, as_graph, compare, interleaved
from rocm_sd.numerics import in_float64, outputs
from rocm_sd.ops import OPS
from rocm_sd.ops.samples import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rocm_sd.bench.turns import Progress
    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample
    from rocm_sd.tuning import Choice

__all__ = ["ALL", "errors", "floor_ms", "is_op", "prepared", "run", "selected"]

ALL = "ops"


def is_op(workload: str) -> bool:
    return workload == ALL or workload.startswith(OP_PREFIX)


def selected(workload: str) -> tuple[Op, ...]:
    """`op:conv2d` is one, `ops` are all."""
    if workload == ALL:
        return tuple(op for op in OPS.values() if op.verification is not None)
    name = workload.removeprefix(OP_PREFIX)
    require_one_of("op", name, OPS)
    if OPS[name].verification is None:
        raise Unsupported(f"bench {workload}", "an op without a reference to compare with")
    return (OPS[name],)


def run(
    workload: str,
    device: torch.device,
    *,
    out: Path,
    repeats: int | None = None,
    resume: bool = True,
    cold: bool | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Record:
    """Caches are flushed before each call unless `cold` is False: in a model, other layers have used them."""
    repeats = repeats or (15 if device.type == "cpu" else 31)
    cold = device.type != "cpu" if cold is None else cold
    calls = [(op, sample) for op in selected(workload) for sample in _samples(op, device)]
    dtypes = dict.fromkeys(dtype_name(sample.dtype) for _, sample in calls)
    facts = WorkloadFacts(workload, workload.removeprefix(OP_PREFIX), "random", 0, 0, 1, "", 0.0, ", ".join(dtypes))
    record = Record(
        "op", facts, machine(device), command, now(), (),
        complete=False, op_cases=tuple(f"{op.name} {sample.name}" for op, sample in calls),
        extra={"planned": {"engines": {OURS: rocm_sd.__version__}, "repeats": repeats, "cold": cold}},
    )  # fmt: skip
    file = record_file(out, workload)
    stopwatch = Stopwatch(device, cold=cold, queued=True)
    with continued(file, record, resume=resume) as begun:
        record = begun
        try:
            for number, (op, sample) in enumerate(calls, start=1):
                if progress:
                    progress(number - 1, len(calls), f"{op.name} {sample.name}")
                if number in record.batches:
                    continue
                record = _with(record, _measured(op, sample, number, stopwatch, repeats))
                free_memory()
                record.save(file)
        except KeyboardInterrupt:
            record.save(file)
            raise
        record = replace(record, complete=True)
        record.save(file)
    if progress:
        progress(len(calls), len(calls), "done")
    return record


def _samples(op: Op, device: torch.device) -> list[Sample]:
    """A GPU gets the sizes that models have, a CPU those that the proof ladder computes on one."""
    assert op.verification is not None
    if device.type == "cpu" or op.tuning is None:
        return list(op.verification.small)
    named = {sample.name: sample for sample in (*(bucket.sample for bucket in op.tuning.buckets), *op.tuning.timed)}
    return list(named.values())


def _with(record: Record, measured: tuple[Measurement, ...]) -> Record:
    comparisons = record.comparisons
    if all(one.ms for one in measured):
        stock, ours = measured
        comparisons += (compare(OURS, STOCK, ours.batch, ours.ms, stock.ms),)
    return replace(record, measurements=record.measurements + measured, comparisons=comparisons)


def _plain_group_norm(
    x: torch.Tensor, groups: int, weight: Any, bias: Any, add: Any, eps: float, silu: bool
) -> torch.Tensor:
    """What a stock model runs; the op's own stock path also copies the result back to channels-last."""
    y = F.group_norm(x if add is None else x + add[:, :, None, None], groups, weight, bias, eps)
    return F.silu(y) if silu else y


def _stock(op: Op, arguments: Sequence[Any]) -> Callable[[], Any]:
    if op.name == "group_norm_silu":
        return lambda: _plain_group_norm(*arguments)
    run_stock = op.implementations[0]
    return lambda: run_stock(*arguments)


def _measured(
    op: Op, sample: Sample, number: int, stopwatch: Stopwatch, repeats: int
) -> tuple[Measurement, Measurement]:
    device = stopwatch.device
    arguments = sample.make(device)
    assert op.verification is not None
    choice = op.choose(op.verification.problem(*arguments), device)

    run_chosen = op.implementation(choice.implementation)

    def ours() -> Any:
        return run_chosen(*arguments, config=choice.config)

    made = partial(_measurement, op, number, choice)
    try:
        error, stock_error = errors(op, sample, arguments, ours)
        calls = {STOCK: prepared(_stock(op, arguments), device), OURS: prepared(ours, device)}
        interleaved(calls, stopwatch, repeats=2)
        times = interleaved(calls, stopwatch, repeats=repeats)
    except NumericsFailure as failure:
        skipped = "not timed: there is nothing right to compare it with"
        return made(STOCK, left_out=skipped), made(OURS, left_out=f"{WRONG}: {failure.message}")
    except Exception as failure:  # noqa: BLE001 -- one call that cannot run: the others go on
        why = failure_line(failure)
        return made(STOCK, left_out=why), made(OURS, left_out=why)
    both = {"stock_error": stock_error, "floor_ms": floor_ms(op, sample, arguments, device)}
    return made(STOCK, times[STOCK], error=stock_error, **both), made(OURS, times[OURS], error=error, **both)


def _measurement(
    op: Op, number: int, choice: Choice, engine: str, ms: Sequence[float] = (), **figures: Any
) -> Measurement:
    version, provider = f"rocm-sd {rocm_sd.__version__}", f"{choice.implementation} ({choice.source})"
    if engine == STOCK:
        version, provider = f"torch {torch.__version__}", op.implementations[0].name
    return Measurement(engine, version, provider, number, tuple(ms), 1, **figures)


def errors(op: Op, sample: Sample, arguments: Sequence[Any], ours: Callable[[], Any]) -> tuple[float, float]:
    """Largest errors against float64, ours and stock's, relative to the largest value. Raises where ours is wrong."""
    assert op.verification is not None
    exact = outputs(op.verification.reference(*in_float64(tuple(arguments))))
    stock = outputs(op.implementations[0](*arguments))
    found = []
    for three in zip(outputs(ours()), exact, stock, strict=True):
        compared = numerics.require(f"{op.name} {sample.name}", *three)
        scale = float(three[1].abs().max()) if three[1].numel() else 0.0
        found.append((compared.largest / (scale or 1.0), compared.stock_largest / (scale or 1.0)))
    return max(found)


def prepared(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        call()
        return call
    return as_graph(call, device)[0]


def floor_ms(op: Op, sample: Sample, arguments: Sequence[Any], device: torch.device) -> float | None:
    if op.tuning is None:
        return None
    work = op.tuning.work(*arguments)
    try:
        return arch.roofline(arch.detect(device), work.flops, work.bytes, sample.dtype).seconds * 1e3
    except Unsupported:
        return None
