"""How fast approximations are on models of real size with random weights: speed alone, nothing of quality.

    python benchmarks/quality_speed.py --out results [--turns 4] [--label "fp8 alone"]

SDXL draws 20 steps at 1024x1024, SD 1.5 draws 50 at 512x512. Of each setting: exact and the setting take turns, each
optimised anew and warmed up, then four pictures by the clock; milliseconds of each, the ratio of the medians of turns
with its interval, and the peak of allocated memory. With `--profile`, the kernels of one picture of some settings.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from statistics import median

import torch

import rocm_sd
from rocm_sd import measuring
from rocm_sd.bench import workloads
from rocm_sd.engine import Approximation, Skipping, optimize, report

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PICTURES, WARM_UP = 4, 3
SETTINGS = {
    ("sdxl-1024", 20): {
        "fp8 alone": Approximation(eight_bits="fp8"),
        "int8 alone": Approximation(eight_bits="int8"),
        "deep layers every 2": Approximation(Skipping(depth=3, every=2, order=1)),
        "deep layers and guidance every 3, fp8": Approximation(
            Skipping(depth=3, every=3, order=1, guided_every=3), eight_bits="fp8"
        ),
        "deep layers and guidance every 4, fp8": Approximation(
            Skipping(depth=3, every=4, order=1, guided_every=4), eight_bits="fp8"
        ),
    },
    ("sd15-512", 50): {
        "deep layers and guidance every 3": Approximation(Skipping(depth=1, every=3, order=1, guided_every=3)),
        "deep layers and guidance every 5": Approximation(Skipping(depth=1, every=5, order=1, guided_every=5)),
    },
}


def milliseconds(made, pipe):
    torch.cuda.synchronize()
    began = time.perf_counter()
    made.picture(pipe, 1)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def turn(made, pipe, quality):
    """Milliseconds of the pictures, and the peak of memory while they were drawn."""
    optimize(pipe, quality=quality)
    for _ in range(WARM_UP):
        made.picture(pipe, 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return [milliseconds(made, pipe) for _ in range(PICTURES)], torch.cuda.max_memory_allocated()


def kernels(made, pipe):
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        made.picture(pipe, 1)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:24]
    return [[round(event.device_time_total / 1e3, 2), event.count, event.key[:100]] for event in events]


def compared(made, pipe, label, quality, options):
    exact, ours, peaks = [], [], {}
    for _ in range(options.turns):
        for name, setting, times in (("exact", "exact", exact), (label, quality, ours)):
            pictures, peaks[name] = turn(made, pipe, setting)
            times.append(pictures)
    middles = [[median(pictures) for pictures in times] for times in (ours, exact)]
    low, high = measuring.interval(*middles)
    found = {
        "setting": quality.to_dict(), "label": label, "exact_ms": exact, "ours_ms": ours,
        "exact_median_ms": round(median(middles[1]), 1), "ours_median_ms": round(median(middles[0]), 1),
        "times": round(median(middles[1]) / median(middles[0]), 3), "interval": [round(low, 3), round(high, 3)],
        "peak_gib": {name: round(peak / 2**30, 2) for name, peak in peaks.items()},
        "notes": list(report(pipe).approximations),
    }  # fmt: skip
    if options.profile:
        found["kernels"] = kernels(made, pipe)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--label", action="append", help="only this setting; may be given again (default: all)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "rocm_sd": rocm_sd.__version__,
        "torch": torch.__version__, "python": platform.python_version(), "weights": "random: speed alone", "rows": [],
    }  # fmt: skip
    for (workload, steps), every in SETTINGS.items():
        settings = {label: each for label, each in every.items() if not options.label or label in options.label}
        if not settings:
            continue
        made = workloads.make(workload, DEVICE, steps=steps)
        pipe = made.pipeline()
        for label, quality in settings.items():
            row = {"workload": workload, "steps": steps, **compared(made, pipe, label, quality, options)}
            result["rows"].append(row)
            (options.out / "quality-speed.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(
                *(row[name] for name in ("workload", "label", "exact_median_ms", "ours_median_ms", "times")), flush=True
            )
            print("   ", row["interval"], row["peak_gib"], row["notes"], flush=True)
        del pipe, made
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
