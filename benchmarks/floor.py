"""What stands between a picture and the time that its kernels take: launches, the host, gaps, memsets.

    python benchmarks/floor.py --out results [--workload sdxl-mlperf] [--turns 8]

1. A graph of 1,400 kernels that do next to nothing, and one of as many memsets: microseconds a node.
2. Pictures of 4 steps and of all of them: the clock, the sum of kernels, the host's time before the first kernel, and
   how long the card is idle between the first and the last one.
3. Which ops launch memsets, in one step without graphs.
4. Pictures in turns, with Diffusers' questions for hooks answered with and without a walk over all modules. Their
   latents are compared first: they must have the same bits.

results/floor-WORKLOAD.json has all of it. `--tiny` tries the command on a CPU, where 2 and 4 have no kernels.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rocm_sd import measuring
from rocm_sd.bench import workloads
from rocm_sd.engine import EVERYTHING, Parts, optimize_with
from rocm_sd.files import write_text

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NODES = 1400


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def node_us(call):
    """Microseconds of one such launch in a graph of many."""
    replay, _ = measuring.as_graph(lambda: [call() for _ in range(NODES)], DEVICE)
    taken = []
    for _ in range(30):
        synchronize()
        began = time.perf_counter()
        replay()
        synchronize()
        taken.append((time.perf_counter() - began) * 1e6 / NODES)
    return round(median(taken), 3)


def drawn_ms(made, pipe, steps):
    synchronize()
    began = time.perf_counter()
    made.picture(pipe, 1, steps=steps)
    synchronize()
    return (time.perf_counter() - began) * 1e3


def kernels_of(call):
    """(begin, end, name) of what the card ran, in microseconds, and when the host began."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded, torch.profiler.record_function("all of it"):
        call()
        synchronize()
    events = recorded.events()
    began = next(each.time_range.start for each in events if each.name == "all of it")
    found = [
        (each.time_range.start, each.time_range.end, each.name)
        for each in events
        if each.device_type == DeviceType.CUDA and each.name != "all of it"
    ]
    return began, sorted(found)


def times_of(made, pipe, steps):
    """By the clock without the profiler; kernels, gaps and the host's start with it."""
    for _ in range(2):
        drawn_ms(made, pipe, steps)
    clock = median(drawn_ms(made, pipe, steps) for _ in range(5))
    began, found = kernels_of(lambda: made.picture(pipe, 1, steps=steps))
    if not found:
        return {"steps": steps, "clock ms": round(clock, 2)}
    busy, idle, longest, last = 0.0, 0.0, [], found[0][0]
    for start, end, name in found:
        if start > last:
            idle += start - last
            longest.append((round(start - last, 1), name[:60]))
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return {
        "steps": steps, "clock ms": round(clock, 2), "kernels": len(found),
        "sum of kernels ms": round(sum(end - start for start, end, _ in found) / 1e3, 2),
        "busy ms": round(busy / 1e3, 2), "before the first kernel ms": round((found[0][0] - began) / 1e3, 2),
        "idle between kernels ms": round(idle / 1e3, 2), "longest gaps us, before": sorted(longest, reverse=True)[:12],
    }  # fmt: skip


def memsets_of(made):
    """Of one step of a UNet with every rule and no graph: how many memsets each op launches."""
    pipe = optimize_with(made.pipeline(), "performance", "exact", Parts(captured=False))
    made.picture(pipe, 1, steps=2)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        made.picture(pipe, 1, steps=2, output="latent")
        synchronize()
    found = Counter()
    for event in recorded.events():
        count = sum(kernel.name.startswith("Memset") for kernel in event.kernels)
        if count:
            above = event.cpu_parent
            found[f"{event.name} < {above.name if above is not None else '-'}"] += count
    return dict(found.most_common(12))


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", action="append")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    for name in options.workload or ("sdxl-mlperf", "sd15-512"):
        made = workloads.make(name, DEVICE, tiny=options.tiny)
        result = {
            "command": f"python benchmarks/floor.py --workload {name} --turns {options.turns}",
            "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU", "torch": torch.__version__,
            "python": platform.python_version(), "weights": "random: speed alone", "workload": made.facts.name,
        }  # fmt: skip
        if DEVICE.type == "cuda":
            one = torch.zeros(1, device=DEVICE)
            result["us a node"] = {"kernel": node_us(partial(one.add_, 1.0)), "memset": node_us(one.zero_)}
        answered = optimize_with(made.pipeline(), "auto", "exact", EVERYTHING)
        walking = optimize_with(made.pipeline(), "auto", "exact", Parts(hook_questions=False))
        steps = made.facts.steps
        result["pictures"] = [times_of(made, answered, number) for number in (min(4, steps), steps)]
        print(name, json.dumps(result), flush=True)
        pipes = {"answered": answered, "walking": walking}
        bits = {key: made.picture(pipe, 1, output="latent") for key, pipe in pipes.items()}
        assert torch.equal(bits["answered"], bits["walking"])
        taken = {key: [] for key in pipes}
        for _ in range(2):
            drawn_ms(made, walking, steps)
        for number in range(options.turns):
            for key in measuring.turn(list(pipes), number):
                drawn_ms(made, pipes[key], steps)
                taken[key].append(median(drawn_ms(made, pipes[key], steps) for _ in range(3)))
        told = measuring.compare("answered", "walking", 1, taken["answered"], taken["walking"])
        result["questions for hooks"] = {
            **{f"{key} ms": [round(each, 2) for each in several] for key, several in taken.items()},
            "times": round(told.ratio, 4), "interval": [round(told.low, 4), round(told.high, 4)],
            "verdict": told.verdict,
        }  # fmt: skip
        print(name, json.dumps(result["questions for hooks"]), flush=True)
        del answered, walking, pipes
        if DEVICE.type == "cuda":
            result["memsets of two steps"] = memsets_of(made)
            print(name, json.dumps(result["memsets of two steps"]), flush=True)
        write_text(options.out / f"floor-{name}.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
