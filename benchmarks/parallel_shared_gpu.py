"""Every plan on two processes that share one GPU: is the picture that of one process, with graphs on?

    torchrun --nproc-per-node 2 benchmarks/parallel_shared_gpu.py --out results

Two ranks on one card send through the host (gloo), since NCCL wants a card for each. That shows what is right, and
nothing of speed. emoji-sd draws with its own weights, SD 1.5 with random ones: alone by stock in the card's dtype,
alone in float64, and by both ranks with each plan, twice. Both times have the same bits on both ranks, and their error
is at most twice stock's. With `patch` and `tensor` a UNet is replayed from the graphs between its exchanges, or the
run has failed. A pipeline begins in the host's memory, and what comes of it to the card is counted. On a CPU the
command tries itself, with emoji-sd alone; by ROCM_SD_STEP_GRAPH=1 traces stand for graphs.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from pathlib import Path

import torch
from torch import distributed as dist

import rocm_sd
from rocm_sd.bench import workloads
from rocm_sd.engine import graphs_wanted
from rocm_sd.files import write_text
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.numerics import compare
from rocm_sd.parallel import join, leave, parallel_report, parallelize, unparallelize
from rocm_sd.parallel.homes import size_of
from rocm_sd.parallel.placing import whole_of
from rocm_sd.parallel.sharing import everybody

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# Those that have graphs between exchanges come first: nobody has to wait for the others to see them.
PLANS = ("patch", "tensor", "cfg", "data", "pipeline")
BETWEEN_EXCHANGES = ("patch", "tensor")
_GRAPHS = re.compile(r"(\w+): graphs between its exchanges \((\d+) for a call\), replayed (\d+) times")
# Errors of one picture are luck.
SEEDS = range(4)


def drawn(workload, pipe, steps):
    with torch.no_grad():
        pictures = [workload.picture(pipe, 1, seed=seed, steps=steps) for seed in SEEDS]
    return torch.cat(pictures).double().cpu()


def begin_counting():
    """Bytes that this process has on the card by now."""
    if DEVICE.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def most_since(before):
    """So many bytes more were there at one moment; a CPU's processes have no card."""
    return None if before is None else torch.cuda.max_memory_allocated() - before


def tried(workload, plan, steps, exact, stock):
    """What one plan gives: within the rule or not, the same bits or not, and what its reports say."""
    began = time.monotonic()
    pipe = workload.pipeline().to("cpu")
    whole = size_of(whole_of(pipe))
    before = begin_counting()
    parallelize(pipe, plan, device=DEVICE)
    most = most_since(before)
    try:
        first, second = (drawn(workload, pipe, steps) for _ in range(2))
        found = compare(first, exact, stock)
        everybodys = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, first)
        twice, on_all = torch.equal(first, second), all(torch.equal(each, first) for each in everybodys)
        report = str(parallel_report(pipe))
        graphs = [line.strip() for line in str(rocm_sd.report(pipe)).splitlines() if "graph" in line]
    finally:
        unparallelize(pipe)
    captured = {name: {"for a call": int(parts), "replayed": int(times)}
                for name, parts, times in _GRAPHS.findall(report)}  # fmt: skip
    # A rank decides for itself, so one that has none must not hide behind rank 0.
    on_ranks = everybody().agree(captured)
    wanted = plan in BETWEEN_EXCHANGES and graphs_wanted(DEVICE)
    replayed = all(each.get("UNet2DConditionModel", {}).get("replayed", 0) > 0 for each in on_ranks)
    return {
        "within": found.ok, "same bits": twice and on_all, "same bits twice": twice, "same bits on all ranks": on_all,
        "graphs as wanted": replayed or not wanted, "found": str(found),
        "bytes of weights": whole, "most bytes on the card while it was split, by rank": everybody().agree(most),
        "graphs between exchanges, by rank": on_ranks, "graphs": graphs, "said": report.splitlines(),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def right(row):
    return row["within"] and row["same bits"] and row["graphs as wanted"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--workload", action="append", choices=("emoji", "sd15-512"), help="both, if none is given")
    parser.add_argument("--plan", action="append", choices=PLANS, help="all of them, if none is given")
    parser.add_argument("--seconds", type=float, help="no plan is begun after so many; it stands in the record as left")
    options = parser.parse_args()
    began = time.monotonic()
    hush()
    join(DEVICE)
    leads = everybody().rank == 0
    asked = [f"--steps {options.steps}", *(f"--workload {name}" for name in options.workload or ())]
    asked += [f"--plan {name}" for name in options.plan or ()]
    record = {
        "command": " ".join(["torchrun --nproc-per-node 2 benchmarks/parallel_shared_gpu.py", *asked]),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU", "backend": dist.get_backend(),
        "rocm_sd": rocm_sd.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "left": [], "seconds": {}, "rows": [],
    }  # fmt: skip
    for name in options.workload or (("emoji", "sd15-512") if DEVICE.type == "cuda" else ("emoji",)):
        workload = workloads.make(name, DEVICE)
        exact = drawn(workload, workload.pipeline(torch.float64), options.steps)
        stock = drawn(workload, workload.pipeline(), options.steps)
        for plan in options.plan or PLANS:
            spent = everybody().agree(time.monotonic() - began)[0]
            record["seconds"] |= {f"before {name} by {plan}": round(spent, 1)}
            if options.seconds is not None and spent > options.seconds:
                record["left"].append(f"{name} by {plan}")
            else:
                row = {"workload": name, "plan": plan} | tried(workload, plan, options.steps, exact, stock)
                record["rows"].append(row)
                if leads:
                    bits = "the same bits" if row["same bits"] else "OTHER BITS"
                    between = row["graphs between exchanges, by rank"]
                    print(name, plan, row["found"], bits, between, f"{row['seconds']} s", flush=True)
            record["seconds"]["all"] = round(time.monotonic() - began, 1)
            if leads:
                write_text(options.out / "parallel-shared-gpu.json", json.dumps(record, indent=1) + "\n")
    leave()
    if record["left"] or not all(right(row) for row in record["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
