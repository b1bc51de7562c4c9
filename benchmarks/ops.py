"""Time every op against stock torch on this GPU: numerics first, variants interleaved, medians of device events.

python benchmarks/ops.py --out results [--op attention --op geglu] [--tune] [--compile] [--jobs 12]

--tune     every implementation and every config of each op's space is timed first; the winners are written as tuning
           data (exact shapes and buckets) to results/data/<arch>/<op>.json. Without it the installed data decides.
--compile  torch.compile of the stock expression is one of the variants.

For each op, results/<op>.json has a row for each call of its workload. Nothing is timed that fails the numerics gate.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from rocm_sd import arch, numerics
from rocm_sd.errors import NumericsFailure
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.measuring import as_graph
from rocm_sd.numerics import in_float64, outputs
from rocm_sd.ops import OPS
from rocm_sd.tuning import Choice

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVINGS = ((3, 8), (7, 4), (15, 3))  # repeats, and how many go on to the next round


def plain_group_norm(x, groups, weight, bias, add, eps, silu):
    """What a stock model runs; the op's own stock path also copies the result back to channels-last."""
    x = x if add is None else x + add[:, :, None, None]
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.silu(y) if silu else y


# Where stock, as users run it, does less than the op's stock implementation.
STOCK = {"group_norm_silu": plain_group_norm}


class Clock:
    """Microseconds of calls that are interleaved, so that a drifting clock meets all of them alike; caches cold."""

    def __init__(self):
        self.flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE) if DEVICE.type == "cuda" else None

    def prepared(self, call):
        """Launch overhead is not what is measured, the engine replays graphs; on a CPU the call itself."""
        if DEVICE.type == "cpu":
            call()
            return call
        return as_graph(call, DEVICE)[0]

    def once(self, call):
        if DEVICE.type == "cpu":
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def interleaved(self, calls, repeats):
        times = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(self.once(call))
        return times


def samples_of(op, *, small=False):
    if small:
        return list(op.verification.small)
    seen = {}
    for sample in (*(bucket.sample for bucket in op.tuning.buckets), *op.tuning.timed):
        seen.setdefault(sample.name, sample)
    return list(seen.values())


def candidates(op, problem):
    """Name to (implementation, config) of all that can take the problem here; the stock one is the first."""
    found = {}
    for implementation in op.implementations:
        if implementation.why_not(problem, DEVICE):
            continue
        if implementation.name != op.verification.implementation:
            found[implementation.name] = (implementation, NO_CONFIG)
            continue
        for config in op.tuning.space(problem, arch.detect(DEVICE)):
            found[f"{implementation.name} {config}"] = (implementation, config)
    return found


def compile_share(names, share, of, small):
    """One of several processes: call every candidate once, so that Triton's cache has it for the one that times."""
    torch.set_num_threads(1)
    tasks = [(op, sample) for op in names for sample in samples_of(OPS[op], small=small)]
    number = 0
    for name, sample in tasks:
        op, arguments = OPS[name], None
        problem = op.verification.problem(*sample.make(filled=False))
        for implementation, config in candidates(op, problem).values():
            number += 1
            if not config or number % of != share:
                continue
            arguments = arguments or sample.make(DEVICE)
            try:
                implementation(*arguments, config=config)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 -- a candidate that fails is dropped when it is timed
                print(f"{name} {sample.name} {config}: {type(error).__name__}", flush=True)


def usable(clock, op, sample, arguments, dropped):
    """The candidates' calls, prepared; one that cannot run is noted and skipped."""
    calls, chosen = {}, {}
    for name, (implementation, config) in candidates(op, op.verification.problem(*arguments)).items():
        try:
            calls[name] = clock.prepared(lambda i=implementation, c=config: i(*arguments, config=c))
            chosen[name] = (implementation, config)
        except Exception as error:  # noqa: BLE001, PERF203 -- out of shared memory: one candidate is lost
            dropped.append(f"{sample.name}: {name}: {type(error).__name__}: {str(error)[:80]}")
    return calls, chosen


def tune(clock, op, sample, dropped):
    """Successive halving over all candidates: (median microseconds, implementation, config), best first."""
    arguments = sample.make(DEVICE)
    calls, chosen = usable(clock, op, sample, arguments, dropped)
    medians = {}
    for repeats, keep in HALVINGS:
        medians |= {name: statistics.median(t) for name, t in clock.interleaved(calls, repeats).items()}
        ranked = sorted(calls, key=medians.__getitem__)
        calls = {name: calls[name] for name in ranked[:keep]}
    # The last round's order first; those that fell out keep the time of their last round.
    ranked += sorted(set(chosen) - set(ranked), key=medians.__getitem__)
    return [(medians[name], *chosen[name]) for name in ranked]


def right(op, sample, arguments, run, exact, stock):
    """The comparison of every output, worst first; raises where one is wrong."""
    results = outputs(run(*arguments))
    compared = [
        numerics.require(f"{op.name} {sample.name}", *three) for three in zip(results, exact, stock, strict=True)
    ]
    return max(compared, key=lambda c: c.largest / (c.allowed_largest or 1.0))


def row_of(clock, op, sample, choice, options):
    arguments = sample.make(DEVICE)
    problem = op.verification.problem(*arguments)
    exact = outputs(op.verification.reference(*in_float64(arguments)))
    stock = outputs(op.implementations[0](*arguments))
    variants = {"stock": lambda: STOCK.get(op.name, op.implementations[0].run)(*arguments)}
    for implementation in op.implementations[1:]:
        config = choice.config_for(implementation.name)
        if implementation.why_not(problem, DEVICE) or (
            implementation.name == op.verification.implementation and not config
        ):
            continue
        variants[implementation.name] = lambda i=implementation, c=config: i(*arguments, config=c)
    error, wrong = None, {}
    for name in list(variants)[1:]:
        try:
            comparison = right(op, sample, arguments, lambda *_, v=variants[name]: v(), exact, stock)
            error = comparison if name == choice.implementation else error
        except NumericsFailure as failure:  # noqa: PERF203
            # Stock's own backends are not ours to repair; they are not timed, and are named.
            wrong[name] = str(failure)
            del variants[name]
        except RuntimeError as failure:
            wrong[name] = f"{type(failure).__name__}: {str(failure)[:120]}"
            del variants[name]
    del exact, stock
    if choice.implementation in wrong:
        raise NumericsFailure(wrong[choice.implementation])
    if options.compile:
        torch._dynamo.reset()  # noqa: SLF001 -- each shape is compiled for itself
        compiled = torch.compile(STOCK.get(op.name, op.implementations[0].run), dynamic=False)
        variants["compile"] = lambda: compiled(*arguments)
    work = op.tuning.work(*arguments)
    source = torch.empty(max(1, int(work.bytes) // 2), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    variants["copy"] = lambda: target.copy_(source)
    calls = {name: clock.prepared(call) for name, call in variants.items()}
    first = clock.interleaved(calls, 3)
    longest = sum(statistics.median(t) for t in first.values())
    times = clock.interleaved(calls, max(15, min(101, int(options.milliseconds * 1e3 / longest))))
    medians = {name: statistics.median(t) for name, t in times.items()}
    ours = "stock" if choice.implementation == op.implementations[0].name else choice.implementation
    theirs = [n for n in medians if n not in {"copy", "compile", op.verification.implementation} and n not in OWN]
    best = min(theirs, key=medians.__getitem__)

    def against(name):
        ratios = [a / b for a, b in zip(times[name], times[ours], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        return {"ratio": medians[name] / medians[ours], "quartiles": [low, high]}

    return {
        "call": sample.name,
        "problem": dict(problem),
        "implementation": choice.implementation,
        "config": choice.config_for(op.verification.implementation).to_dict(),
        "us": medians,
        "against_stock": against("stock"),
        "against_best_stock": {"name": best, **against(best)},
        "against_compile": against("compile") if "compile" in medians else None,
        "share_of_copy": medians["copy"] / medians[ours],
        "tflops": work.flops / medians[ours] / 1e6,
        "largest_error": error and error.largest,
        "stock_largest_error": error and error.stock_largest,
        "left_out": wrong,
    }


# Implementations that are this project's own, apart from the kernel; the rest of the names are stock torch's.
OWN = {"gemm_softmax", "library_epilogue", "library_geglu", "library_gemm", "parity_library"}


def geomean(values):
    values = [v for v in values if v]
    return math.exp(statistics.mean(math.log(v) for v in values)) if values else None


CLEAR_GAIN = 1.02  # less than this over stock is within what two runs differ by


def entry(sample_name, timing, rest):
    """A line of tuning data from a measurement: the kernel's best config comes with the winner."""
    microseconds, implementation, config = timing
    config = (config or next((c for _, _, c in rest if c), NO_CONFIG)).to_dict()
    stock = next((m for m, i, _ in rest if i.name == "torch"), None)
    if stock is None or implementation.name == "torch":
        why = f"measured: {microseconds:.1f} us at {sample_name}"
    elif stock < CLEAR_GAIN * microseconds:
        why = f"measured: {stock:.1f} us at {sample_name}, {implementation.name} {microseconds:.1f} us: no clear gain"
        return {"implementation": "torch", "config": config, "why": why}
    else:
        why = f"measured: {microseconds:.1f} us at {sample_name}, stock {stock:.1f} us"
    return {"implementation": implementation.name, "config": config, "why": why}


def tuned(clock, op, options, dropped):
    """Winners of every call: the data file's content, and the choice for each call by name."""
    found, table = (
        {},
        {"op": op.name, "arch": arch.detect(DEVICE).name, "source": "measured", "exact": [], "bucket": []},
    )
    for sample in samples_of(op, small=options.small):
        ranked = tune(clock, op, sample, dropped)
        line = entry(sample.name, ranked[0], ranked)
        config = op.implementation(op.verification.implementation).config_from(line["config"])
        others = {op.verification.implementation: config}
        own = config if line["implementation"] in others else NO_CONFIG
        found[sample.name] = Choice(line["implementation"], own, "exact", line["why"], others)
        problem = op.verification.problem(*sample.make(filled=False))
        table["exact"].append({"when": dict(problem), **line})
        print(f"tuned {op.name} {sample.name}: {line['implementation']} {line['why']}", flush=True)
        torch.cuda.empty_cache() if DEVICE.type == "cuda" else None
    lines = dict(zip(found, table["exact"], strict=True))
    for bucket in () if options.small else op.tuning.buckets:
        line = {k: v for k, v in lines[bucket.sample.name].items() if k != "when"}
        table["bucket"].append({"when": dict(bucket.when), **line})
    table["static"] = {k: v for k, v in (table["bucket"] or table["exact"])[0].items() if k != "when"}
    return table, found


def machine():
    facts = arch.device_facts(DEVICE)
    return {
        "machine": {"gpu": facts.name, "arch": facts.arch.name, "compute_units": facts.compute_units},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "triton": __import__("triton").__version__,
        },
        "command": "python benchmarks/ops.py " + " ".join("results" if "/" in a else a for a in sys.argv[1:]),
        "method": "graph replays, caches flushed before each, interleaved, medians of device events",
    }


def line_of(name, row):
    ours = row["us"].get(row["implementation"], row["us"]["stock"])
    best, compiled = row["against_best_stock"], row["against_compile"]
    parts = [
        f"{name:19} {row['call']:44} {row['implementation']:16} {ours:8.1f} us",
        f"stock x{row['against_stock']['ratio']:.2f}",
        f"{best['name']} x{best['ratio']:.2f}",
        f"copy {row['share_of_copy']:.0%}",
        f"{row['tflops']:.0f} TF",
    ]
    parts += [f"compile x{compiled['ratio']:.2f}"] if compiled else []
    parts += [f"triton {row['us']['triton']:.1f}"] if "triton" in row["us"] else []
    return "  ".join(parts)


def measure(clock, name, options):
    op, dropped = OPS[name], []
    table, found = tuned(clock, op, options, dropped) if options.tune else (None, {})
    if table:
        folder = options.out / "data" / table["arch"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(table, indent=2) + "\n")
    rows, failed = [], []
    for sample in samples_of(op, small=options.small):
        problem = op.verification.problem(*sample.make(filled=False))
        choice = found.get(sample.name) or op.choose(problem, DEVICE)
        try:
            row = row_of(clock, op, sample, choice, options)
        except NumericsFailure as failure:
            failed.append(str(failure))
            print(f"WRONG {name} {sample.name}: {failure}", flush=True)
            continue
        rows.append(row)
        print(line_of(name, row), flush=True)
        torch.cuda.empty_cache() if DEVICE.type == "cuda" else None
    summary = {
        "against_stock": geomean([r["against_stock"]["ratio"] for r in rows]),
        "against_best_stock": geomean([r["against_best_stock"]["ratio"] for r in rows]),
        "against_compile": geomean([r["against_compile"] and r["against_compile"]["ratio"] for r in rows]),
        "kernel_against_stock": geomean(
            [r["us"]["stock"] / r["us"]["triton"] if "triton" in r["us"] else None for r in rows]
        ),
        "share_of_copy": geomean([r["share_of_copy"] for r in rows]),
    }
    result = {"op": name, **machine(), "geomean": summary, "rows": rows, "wrong": failed, "dropped": dropped}
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"== {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in summary.items() if v), flush=True)
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--op", action="append", choices=list(OPS), help="may be given several times (default: all)")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--small", action="store_true", help="the small samples of the proof ladder: a trial without a GPU"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--milliseconds", type=float, default=60.0, help="device time a call, all variants together")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.op or list(OPS)
    torch.backends.cudnn.benchmark = True
    if options.tune and options.jobs > 1:
        started = time.perf_counter()
        context = multiprocessing.get_context("spawn")
        shares = [
            context.Process(target=compile_share, args=(names, i, options.jobs, options.small))
            for i in range(options.jobs)
        ]
        for process in shares:
            process.start()
        for process in shares:
            process.join()
        print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    clock = Clock()
    fine = [measure(clock, name, options) for name in names]
    sys.exit(0 if all(fine) else 7)


if __name__ == "__main__":
    main()
