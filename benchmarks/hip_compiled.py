"""What level 2's kernels are, with no GPU: registers, LDS and waves beside Triton's, and lines moved beside naive ones.

python benchmarks/hip_compiled.py --out benchmarks/hip-compiled/kernels.json

`compiled` is what `rocm-sd tune --static` found by compiling: of each op with a kernel in HIP, architecture and bucket,
the best config in HIP and the best in Triton, at the same call, by the same model. `lines` is the same work done by a
naive kernel of `hip-naive` and by ours, executed by the emulator: bytes asked for, and cache lines that they lie in. A
result that is not right is not counted. Nothing here was timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import attention, conv2d, layout_copy, linear_geglu, toolchain, upsample, upsample_conv2d
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64
from rocm_sd.ops import OPS
from rocm_sd.ops.upsample_conv2d.parity import parity_weights
from rocm_sd.tuning.static.sweep import DATA
from rocm_sd.verify.ladder import EMULATED
from rocm_sd.verify.runner import EmulatedLauncher, total

NAIVE = Path(__file__).parent / "hip-naive"
_FIGURES = ("vgprs", "lds", "waves_per_simd", "modelled_us")


def compiled():
    """One row for each op, architecture and bucket, from the tuning data."""
    found = []
    for op in OPS.values():
        if op.tuning is None or all(i.name != "hip" for i in op.implementations):
            continue
        for gfx in toolchain.TARGETS:
            file = DATA / gfx / f"{op.name}.json"
            table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            alone = table.get("searched", {}).get("implementation") == "hip"
            ours = table if alone else table.get("others", {}).get("hip")
            if ours is None:
                continue
            theirs = [] if alone else table.get("bucket", ())
            # A size that no config in HIP serves has nothing to compare.
            for entry in (each for each in ours["bucket"] if "figures" in each):
                same = next((other for other in theirs if other["when"] == entry["when"]), {})
                row = {"op": op.name, "arch": gfx, "when": entry["when"], "call": entry["figures"]["modelled_for"]}
                found.append({**row, "hip": _figures(entry), "triton": _figures(same)})
    return found


def _figures(entry):
    figures = entry.get("figures")
    return None if figures is None else {"config": entry["config"], **{name: figures[name] for name in _FIGURES}}


def _random(seed):
    random = torch.Generator().manual_seed(seed)
    return lambda *shape, std=1.0: (torch.randn(shape, generator=random) * std).half()


def _image(draw, N, C, H, W, std=1.0):
    return draw(N, H, W, C, std=std).permute(0, 3, 1, 2)


def _layout_copy(naive, ours):
    x = _random(1)(1, 128, 16, 16)
    y, out = torch.empty(1, 16, 16, 128).half(), torch.empty_like(x, memory_format=torch.channels_last)
    naive.launch(Kernel(NAIVE / "layout_copy.hip", "naive"), (128, 1, 1), (x, y, 128, 256))
    layout_copy.launch(x, out, True, ours)
    return "1x128x16x16 to channels-last", x, y.permute(0, 3, 1, 2), out


def _upsample(naive, ours):
    x = _image(_random(2), 1, 128, 8, 8)
    y, out = (torch.empty(1, 128, 16, 16).half().to(memory_format=torch.channels_last) for _ in range(2))
    naive.launch(Kernel(NAIVE / "upsample.hip", "naive"), (128, 1, 1), (x, y, 128, 8, 8))
    upsample.launch(x, out, 2, "bilinear", ours)
    return "1x128x8x8, bilinear 2x", OPS["upsample"].verification.reference(x.double(), 2, "bilinear"), y, out


def _conv2d(naive, ours):
    draw = _random(3)
    x, weight = _image(draw, 1, 64, 8, 16), _image(draw, 128, 64, 3, 3, std=(64 * 9) ** -0.5)
    y, out = (torch.empty(1, 128, 8, 16).half().to(memory_format=torch.channels_last) for _ in range(2))
    naive.launch(Kernel(NAIVE / "conv2d.hip", "naive"), (64, 1, 1), (x, weight, y, 8, 16, 64, 128))
    conv2d.launch(x, weight, out, None, None, None, 1, 1, conv2d.TILES[ours.arch.matrix_unit][0], ours)
    exact = OPS["conv2d"].verification.reference(*in_float64((x, weight, None, None, None, 1, 1)))
    return "1x64x8x16 to 128, 3x3", exact, y, out


def _upsample_conv2d(naive, ours):
    draw = _random(4)
    x, weight = _image(draw, 1, 64, 8, 8), _image(draw, 64, 64, 3, 3, std=(64 * 9) ** -0.5)
    enlarged, y, out = (torch.empty(1, 64, 16, 16).half().to(memory_format=torch.channels_last) for _ in range(3))
    upsample.launch(x, enlarged, 2, "nearest", naive)
    naive.launch(Kernel(NAIVE / "conv2d.hip", "naive"), (64, 1, 1), (enlarged, weight, y, 16, 16, 64, 64))
    config = upsample_conv2d.TILES[ours.arch.matrix_unit][-1]
    upsample_conv2d.launch(x, parity_weights(weight), out, None, config, ours)
    return "1x64x8x8 to 64, 2x, 3x3", OPS["upsample_conv2d"].verification.reference(x.double(), weight.double()), y, out


def _linear_geglu(naive, ours):
    draw = _random(5)
    x, weight = draw(128, 128), draw(128, 128, std=2 * 128**-0.5)
    h, y, out = torch.empty(128, 128).half(), torch.empty(128, 64).half(), torch.empty(128, 64).half()
    naive.launch(Kernel(NAIVE / "linear_geglu.hip", "product"), (64, 1, 1), (x, weight, h, 128, 128))
    naive.launch(Kernel(NAIVE / "linear_geglu.hip", "gate"), (32, 1, 1), (h, y, 64))
    linear_geglu.launch(x, weight, None, out, linear_geglu.TILES[ours.arch.matrix_unit][0], ours)
    return "128x128 @ 128x128", OPS["linear_geglu"].verification.reference(x.double(), weight.double()), y, out


def _attention(naive, ours):
    draw = _random(6)
    q, k, v = (draw(1, 64, 1, 64) for _ in range(3))
    y, out, scores, scale = torch.empty_like(q), torch.empty_like(q), torch.empty(64, 64), 64**-0.5
    arguments = (q, k, v, y, scores, 64, 64, 64, scale * attention.LOG2_E)
    naive.launch(Kernel(NAIVE / "attention.hip", "naive"), (1, 1, 1), arguments)
    attention.launch(q, k, v, out, scale, attention.configs(64, ours.arch)[0], ours)
    return (
        "64 queries, 64 keys, one head of 64",
        OPS["attention"].verification.reference(*in_float64((q, k, v, None))),
        y,
        out,
    )


CASES = {
    "layout_copy": _layout_copy,
    "upsample": _upsample,
    "linear_geglu": _linear_geglu,
    "conv2d": _conv2d,
    "upsample_conv2d": _upsample_conv2d,
    "attention": _attention,
}
# The naive ones round h, or add in another order, in half precision.
_TOLERANCE = 2e-2


def lines(op, gfx):
    """One row: bytes and lines of the naive way and of ours, both proven right."""
    naive, ours = EmulatedLauncher(gfx), EmulatedLauncher(gfx)
    call, exact, *results = CASES[op](naive, ours)
    for name, result in zip(("naive", "ours"), results, strict=True):
        if not torch.allclose(result.double(), exact.double(), atol=_TOLERANCE):
            raise SystemExit(f"{op} on {gfx}: the {name} result is wrong")
    return {"op": op, "arch": gfx, "call": call, "naive": _moved(naive), "ours": _moved(ours)}


def _moved(launcher):
    counted = total([call.counters for call in launcher.run.calls])
    return {
        "bytes": counted.bytes_loaded + counted.bytes_stored,
        "lines": counted.lines_loaded + counted.lines_stored,
        "used": round(min(1.0, counted.coalescing_efficiency), 4),
        "lds_bank_conflicts": counted.lds_bank_conflicts,
    }


def collect(architectures=EMULATED):
    clang = toolchain.find_compiler().version.splitlines()[0]
    return {
        "command": "python benchmarks/hip_compiled.py --out benchmarks/hip-compiled/kernels.json",
        "versions": {"clang": clang, "triton": version("triton"), "torch": torch.__version__},
        "timed": "never: nothing here ran on a card",
        "products": {gfx: archs.get(gfx).product for gfx in toolchain.TARGETS},
        "compiled": compiled(),
        "lines": [lines(op, gfx) for op in CASES for gfx in architectures],
    }


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(collect(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
