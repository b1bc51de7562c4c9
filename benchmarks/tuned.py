"""The picture with what `rocm-sd tune` measured here, beside the one with the shipped choices: in turns of one run.

    ROCM_SD_CACHE=tuned rocm-sd tune sd15-512 --budget 90s
    python benchmarks/tuned.py --cache tuned --out results [--workload sd15-512] [--repeats 12] [--device cpu]

Both engines are rocm-sd with the same weights; one chooses by the database in FOLDER, the other has an empty one. The
numerics gate of `rocm-sd bench` comes first. results/WORKLOAD.json is its record, and choices.json tells for each op
how many of the measured calls are given to whom, and the largest time of the choice as a share of stock torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch

import rocm_sd
from rocm_sd.bench import runner, workloads
from rocm_sd.bench.engines import Engine
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import resolve
from rocm_sd.tuning.environment import current


def by_choices_in(folder):
    """What is chosen is decided when the first picture is drawn, right after this; then it is part of the graphs."""

    def prepare(pipe):
        os.environ["ROCM_SD_CACHE"] = str(folder)
        forget_choices()
        return rocm_sd.optimize(pipe)

    return prepare


def choices(folder, device):
    """Of each op: what the measured calls are given to, and the worst time of a choice as a share of stock's."""
    os.environ["ROCM_SD_CACHE"] = str(folder)
    forget_choices()
    environment = current(device)
    measured = defaultdict(list)
    for entry in resolve.user_database().all(environment=environment):
        if entry.numerics == "ok" and entry.median_us is not None:
            measured[entry.op, json.dumps(entry.problem, sort_keys=True), entry.kernel_hash].append(entry)
    found = defaultdict(lambda: {"calls": Counter(), "worst share of stock's time": 0.0})
    for (op, problem, kernel_hash), entries in measured.items():
        chosen = resolve.choose(op, environment.arch, json.loads(problem), environment, kernel_hash)
        used = [e for e in entries if e.candidate == chosen.implementation and e.stock_us]
        row = found[op]
        row["calls"][chosen.implementation] += 1
        if chosen.implementation != "torch" and used:
            best = min(used, key=lambda each: each.median_us)
            row["worst share of stock's time"] = max(row["worst share of stock's time"], best.median_us / best.stock_us)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", default="sd15-512")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as empty:
        engines = [
            Engine(name, "rocm-sd", by_choices_in(folder), lambda _device: None, lambda: rocm_sd.__version__)
            for name, folder in (("shipped", empty), ("rocm-sd", options.cache.resolve()))
        ]
        command = f"python benchmarks/tuned.py --workload {options.workload} --repeats {options.repeats}"
        record = runner.run(
            workloads.make(options.workload, device), engines, [1],
            out=options.out, repeats=options.repeats, command=command, against="shipped",
        )  # fmt: skip
    for one in record.measurements:
        print(one.engine, one.left_out or f"{one.p50_ms:.1f} ms", f"error {one.error:.3g} of {one.stock_error:.3g}")
    for each in record.comparisons:
        print(f"{each.engine} {each.ratio:.3f} times as fast ({each.low:.3f} to {each.high:.3f}): {each.verdict}")
    chosen = {op: {**row, "calls": dict(row["calls"])} for op, row in choices(options.cache.resolve(), device).items()}
    (options.out / "choices.json").write_text(json.dumps(chosen, indent=2) + "\n")
    print(json.dumps(chosen))


if __name__ == "__main__":
    main()
