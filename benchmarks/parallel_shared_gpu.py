"""Every plan on two processes that share one GPU: is the picture that of one process, with graphs on?

    torchrun --nproc-per-node 2 benchmarks/parallel_shared_gpu.py --out results

Two ranks on one card send through the host (gloo), since NCCL wants a card for each. That shows what is right, and
nothing of speed. emoji-sd draws with its own weights, SD 1.5 with random ones: alone by stock in the card's dtype,
alone in float64, and by both ranks with each plan, twice. Both times have the same bits on both ranks, and their error
is at most twice stock's. On a CPU the command tries itself, with emoji-sd alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch
from torch import distributed as dist

import rocm_sd
from rocm_sd.bench import workloads
from rocm_sd.files import write_text
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.numerics import compare
from rocm_sd.parallel import join, leave, parallel_report, parallelize, unparallelize

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PLANS = ("cfg", "data", "patch", "tensor", "pipeline")
# Errors of one picture are luck.
SEEDS = range(4)


def drawn(workload, pipe, steps):
    with torch.no_grad():
        pictures = [workload.picture(pipe, 1, seed=seed, steps=steps) for seed in SEEDS]
    return torch.cat(pictures).double().cpu()


def tried(workload, plan, steps, exact, stock):
    """What one plan gives: within the rule or not, the same bits or not, and what its reports say."""
    pipe = parallelize(workload.pipeline(), plan)
    try:
        first, second = (drawn(workload, pipe, steps) for _ in range(2))
        found = compare(first, exact, stock)
        everybodys = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, first)
        same = torch.equal(first, second) and all(torch.equal(each, first) for each in everybodys)
        said = str(parallel_report(pipe)).splitlines()
        graphs = [line.strip() for line in str(rocm_sd.report(pipe)).splitlines() if "graph" in line]
    finally:
        unparallelize(pipe)
    return {"within": found.ok, "same bits": same, "found": str(found), "said": said, "graphs": graphs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--workload", action="append", choices=("emoji", "sd15-512"), help="both, if none is given")
    options = parser.parse_args()
    hush()
    join(DEVICE)
    asked = [f"--steps {options.steps}", *(f"--workload {name}" for name in options.workload or ())]
    record = {
        "command": " ".join(["torchrun --nproc-per-node 2 benchmarks/parallel_shared_gpu.py", *asked]),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU", "backend": dist.get_backend(),
        "rocm_sd": rocm_sd.__version__, "torch": torch.__version__, "python": platform.python_version(), "rows": [],
    }  # fmt: skip
    for name in options.workload or (("emoji", "sd15-512") if DEVICE.type == "cuda" else ("emoji",)):
        workload = workloads.make(name, DEVICE)
        exact = drawn(workload, workload.pipeline(torch.float64), options.steps)
        stock = drawn(workload, workload.pipeline(), options.steps)
        for plan in PLANS:
            row = {"workload": name, "plan": plan} | tried(workload, plan, options.steps, exact, stock)
            record["rows"].append(row)
            if os.environ["RANK"] == "0":
                print(name, plan, row["found"], "the same bits" if row["same bits"] else "OTHER BITS", flush=True)
                write_text(options.out / "parallel-shared-gpu.json", json.dumps(record, indent=1) + "\n")
    leave()
    if not all(row["within"] and row["same bits"] for row in record["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
