"""Time group_norm_silu against stock torch on this GPU: numerics first, variants interleaved, medians of device events.

python benchmarks/group_norm_silu.py --out result.json [--sweep]

--sweep times every config of the space first and uses the one with the best geometric mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from rocm_sd import arch
from rocm_sd.kernels.triton.group_norm_silu import GroupNormSiluConfig, launch
from rocm_sd.ops.group_norm_silu import reference
from rocm_sd.verify import numerics

# N, C, H, W: UNet and VAE of SD 1.5 at 512x512, then of SDXL at 1024x1024; batch 2 is one picture with guidance.
SHAPES = [
    (2, 320, 64, 64), (2, 640, 32, 32), (2, 1280, 16, 16), (2, 2560, 8, 8), (2, 960, 64, 64),
    (1, 512, 64, 64), (1, 512, 256, 256), (1, 256, 512, 512), (1, 128, 512, 512),
    (2, 320, 128, 128), (2, 1280, 32, 32), (1, 256, 1024, 1024), (1, 128, 1024, 1024),
]  # fmt: skip
GROUPS, EPS = 32, 1e-5
SPACE = [
    GroupNormSiluConfig(block_c, moments_rows, moments_warps, apply_rows, apply_warps, slices_per_cu)
    for block_c, moments_rows, moments_warps, apply_rows, apply_warps, slices_per_cu in itertools.product(
        (64, 128), (32, 64), (4, 8), (32, 64), (4, 8), (2, 4, 8)
    )
    if block_c * moments_rows // moments_warps <= 1024 and block_c * apply_rows // apply_warps <= 1024
]


def interleaved(variants: dict[str, object], milliseconds: float = 60.0) -> dict[str, list[float]]:
    """Microseconds of each call, variants in turn, so that a drifting clock meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(3):
            call()
    spent = 0.0
    while spent < milliseconds * len(variants) and len(next(iter(times.values()))) < 200:
        for name, call in variants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            FLUSH.zero_()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
            times[name].append(elapsed * 1e3)
            spent += elapsed
    return times


def graphed(call):
    """Launch overhead is not what is measured: the engine replays graphs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def arguments_for(shape, dtype=torch.float16):
    N, C, H, W = shape
    x = (torch.randn(N, C, H, W, device="cuda") * 2 + 0.7).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(C, device="cuda", dtype=dtype) for _ in range(2))
    return x, weight, bias


def ours(x, weight, bias, config, units):
    out = torch.empty_like(x)

    def call():
        launch(x, out, GROUPS, weight, bias, None, EPS, True, config, units)
        return out

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    facts = arch.device_facts("cuda")
    units = facts.compute_units or 1
    default = GroupNormSiluConfig(64, 64, 4, 64, 4, 4)
    config, swept = default, []
    if options.sweep:
        totals = dict.fromkeys(SPACE, 0.0)
        for shape in SHAPES:
            x, weight, bias = arguments_for(shape)
            calls = {str(i): graphed(ours(x, weight, bias, c, units)) for i, c in enumerate(SPACE)}
            times = interleaved(calls, milliseconds=1.5)
            for i, candidate in enumerate(SPACE):
                totals[candidate] += math.log(statistics.median(times[str(i)]))
            del calls
            print(f"swept {shape}", flush=True)
        ranked = sorted(SPACE, key=totals.__getitem__)
        config = ranked[0]
        swept = [{"config": c.__dict__, "geomean_us": math.exp(totals[c] / len(SHAPES))} for c in ranked[:8]]

    rows = []
    for shape in SHAPES:
        x, weight, bias = arguments_for(shape)

        def stock(x=x, weight=weight, bias=bias):
            return F.silu(F.group_norm(x, GROUPS, weight, bias, EPS))

        call = ours(x, weight, bias, config, units)
        exact = reference.group_norm_silu(x.double(), GROUPS, weight.double(), bias.double(), None, EPS)
        error = numerics.require(f"group_norm_silu {shape}", call(), exact, stock())
        del exact
        copied = torch.empty_like(x)
        times = interleaved(
            {"stock": graphed(stock), "rocm-sd": graphed(call), "copy": graphed(lambda a=copied, b=x: a.copy_(b))}
        )
        median = {name: statistics.median(values) for name, values in times.items()}
        pairs = [s / o for s, o in zip(times["stock"], times["rocm-sd"], strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        rows.append(
            {
                "shape": shape,
                "stock_us": median["stock"],
                "rocm_sd_us": median["rocm-sd"],
                "copy_us": median["copy"],
                "speedup": median["stock"] / median["rocm-sd"],
                "speedup_quartiles": [low, high],
                "largest_error": error.largest,
                "stock_largest_error": error.stock_largest,
            }
        )
        print(
            f"{shape!s:24} stock {median['stock']:8.1f} us  ours {median['rocm-sd']:8.1f} us  "
            f"{rows[-1]['speedup']:5.2f}x ({low:.2f} to {high:.2f})  copy {median['copy']:7.1f} us",
            flush=True,
        )
    geomean = math.exp(statistics.mean(math.log(row["speedup"]) for row in rows))
    print(f"geometric mean {geomean:.2f}x")
    result = {
        "op": "group_norm_silu",
        "machine": {"gpu": facts.name, "arch": facts.arch.name, "compute_units": units},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "triton": __import__("triton").__version__,
        },
        "command": "python " + " ".join(sys.argv),
        "method": "graph replays, caches flushed before each, interleaved, medians of device events, float16",
        "config": config.__dict__,
        "sweep": swept,
        "geomean_speedup": geomean,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    FLUSH = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    main()
