"""How far rocm-sd's latents are from a float32 run, beside stock's: several seeds, three schedulers.

    python benchmarks/exactness.py --out results [--workload sd15-512] [--seeds 5] [--steps 20] [--tiny]

The pipelines have the same weights, text and noise. The float32 pipeline computes without TF32. results/
exactness-WORKLOAD.json has each error, with the machine and the versions. The script fails where an error is above 1.5
times that of stock in the same dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler

import rocm_sd
from rocm_sd.bench import workloads
from rocm_sd.bench.machine import machine

SCHEDULERS = {"DDIM": DDIMScheduler, "Euler": EulerDiscreteScheduler, "DPM++ 2M": DPMSolverMultistepScheduler}
ALLOWED = 1.5


def latents(work, pipe, steps, seeds):
    """By scheduler and seed, in float64 on the host."""
    found = {}
    for name, scheduler in SCHEDULERS.items():
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        for seed in range(seeds):
            found[name, seed] = work.picture(pipe, 1, seed=seed, steps=steps, output="latent").double().cpu()
    return found


def measure(work, steps, seeds):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = latents(work, work.pipeline(torch.float32), steps, seeds)
    stock = latents(work, work.pipeline(), steps, seeds)
    ours = latents(work, rocm_sd.optimize(work.pipeline()), steps, seeds)

    def error(found, key):
        return float((found[key] - exact[key]).norm() / exact[key].norm())

    return [
        {"scheduler": name, "seed": seed, "error": error(ours, (name, seed)), "stock_error": error(stock, (name, seed))}
        for name, seed in exact
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", default="sd15-512")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="as many as the workload has")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see the script work on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = workloads.make(options.workload, device, tiny=options.tiny)
    steps = options.steps or work.facts.steps
    rows = measure(work, steps, options.seeds)
    # On a CPU stock computes in float32 too, and both errors may be 0.
    ratios = [row["error"] / row["stock_error"] if row["stock_error"] else float(row["error"] > 0) for row in rows]
    command = f"python benchmarks/exactness.py --workload {options.workload} --seeds {options.seeds} --steps {steps}"
    figures = {
        "workload": work.name,
        "dtype": work.facts.dtype,
        "steps": steps,
        "machine": asdict(machine(device)),
        "command": command,
        "allowed": ALLOWED,
        "median_of_stock": statistics.median(ratios),
        "worst_of_stock": max(ratios),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"exactness-{work.name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{work.name}: {statistics.median(ratios):.2f} of stock's error, {max(ratios):.2f} at worst")
    if max(ratios) > ALLOWED:
        raise SystemExit(f"An error is above {ALLOWED} times stock's.")


if __name__ == "__main__":
    main()
