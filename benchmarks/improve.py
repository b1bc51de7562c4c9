"""What the tuner's search and small changes of the shipped kernels win in modelled time, kept as a record.

    python benchmarks/improve.py --arch gfx1100 --out benchmarks/improve-cpu [--ops upsample,geglu] [--budget 5m]

Each op has its own budget, as the command has; proposals are those of the built-in proposers, with no language model
and no card. The rounds are those that `rocm-sd improve OP --arch ARCH --device cpu` makes with the same seed, and each
climbs the same ladder.
ARCH.json has the machine, the versions, the command, and of every op all rounds with their rungs and modelled times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from rocm_sd.agents import keeping
from rocm_sd.agents.improving import improve, run_of
from rocm_sd.agents.judging import Judge
from rocm_sd.agents.proposers import BuiltIn
from rocm_sd.bench.machine import machine
from rocm_sd.cli.terminal import budget_seconds, parts
from rocm_sd.ops import OPS

MOST_SHOWN = 160
# The emulated rung: on no card, the last.
GREEN = 4


def told(done):
    why = done.proposal[0].why if done.proposal else "no proposal"
    print(f"{done.number:>4}  {done.judged.verdict:<10} {why}\n      {done.judged.finding[:MOST_SHOWN]}", flush=True)


def searched(name, arch, seconds, seed, folder):
    """The rounds of one op, and why they ended."""
    op, architectures = OPS[name], (arch,)
    proposer = BuiltIn(op, architectures, seed)
    run = run_of(op, architectures, proposer.name, seed)
    print(f"{name} on {arch}", flush=True)
    with keeping.keeping(folder, run) as kept:
        judge = Judge(op, architectures, gains_alone=True)
        ended = improve(op, kept, proposer, judge, seconds=seconds, told=told)
        record = keeping.Improvement(keeping.FORMAT, run, kept.rounds)
    verdicts = Counter(each.judged.verdict for each in record.rounds)
    failed = Counter(each.judged.height + 1 for each in record.rounds if each.judged.verdict == "refused")
    green = [each.judged for each in record.rounds if each.judged.height == GREEN]
    ratios = [each.ratio[arch] for each in green if each.ratio]
    return {
        "op": name,
        "ended": ended,
        "rounds": len(record.rounds),
        "verdicts": dict(verdicts),
        "refused_at_rung": {str(rung): count for rung, count in sorted(failed.items())},
        "best_ratio_with_all_rungs_green": min(ratios, default=None),
        "record": asdict(record),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default="group_norm_silu,upsample")
    parser.add_argument("--budget", default="5m", help="of each op: 90s, 5m, 1h")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = {
        "format": "rocm-sd-improve-benchmark/1",
        "arch": options.arch,
        "command": " ".join(["python", "benchmarks/improve.py", *sys.argv[1:]]),
        "machine": {"cpu": machine(torch.device("cpu")).device, "cores": os.cpu_count()},
        "python": platform.python_version(),
        "budget_s_per_op": budget_seconds(options.budget),
        "ops": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in parts(options.ops):
            found = searched(name, options.arch, budget_seconds(options.budget), options.seed, Path(folder))
            result["versions"] = {key: found["record"]["run"]["versions"][key] for key in ("torch", "triton")}
            result["ops"].append(found)
            # After each op, so that one that is ended by hand leaves those before it.
            path = options.out / f"{options.arch}.json"
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
