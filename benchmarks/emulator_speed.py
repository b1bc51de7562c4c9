"""How fast the emulator of AMD machine code is: wave instructions a second, kernel by kernel.

    python benchmarks/emulator_speed.py --out results [--arch gfx1100,gfx942] [--op conv2d,attention] [--processes 1]

Each launch is one of a small UNet: the ops' own launchers, with the config that the tuning data has for the
architecture. Kernels are compiled before the clock runs; the seconds are those of the emulator's `launch`, with memory
set up and results written back, the fastest of `--turns`. results/emulator-speed.json has every figure, and of every
call a digest of its results and its counters: two versions of the emulator that agree in those did the same work.
`--against FILE` compares with such a file of another version, and fails where a digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from rocm_sd.numerics import outputs
from rocm_sd.ops import OPS
from rocm_sd.ops.samples import Sample
from rocm_sd.verify import emulator
from rocm_sd.verify.proofs import EMULATED
from rocm_sd.verify.runner import emulated

HALF = torch.float16


def _conv2d(draw):
    weight = draw.image(128, 64, 3, 3, std=(64 * 9) ** -0.5)
    residual = draw.image(2, 128, 32, 32)
    return draw.image(2, 64, 32, 32), weight, draw(128), draw(2, 128), residual, 1, 1


def _linear_residual(draw):
    return draw(1024, 256), draw(256, 256, std=256**-0.5), draw(256), draw(1024, 256)


def _linear_geglu(draw):
    return draw(512, 128), draw(1024, 128, std=2 * 128**-0.5), draw(1024)


def _self_attention(draw):
    return *draw(2, 256, 3, 4, 40).unbind(2), None


def _text_attention(draw):
    return draw(2, 256, 4, 40), *draw(2, 77, 2, 4, 40).unbind(2), None


def _group_norm_silu(C, side):
    return lambda draw: (draw.image(2, C, side, side, mean=0.7, std=2.0), 32, draw(C), draw(C), None, 1e-5, True)


def _layer_norm_residual(draw):
    return draw(2048, 256), draw(2048, 256), draw(256), draw(256), 1e-5


# One block of each kind at the sizes of a small UNet, two pictures at once as guidance has them.
SAMPLES = {
    "conv2d": (Sample("2x64x32x32 to 128, 3x3", HALF, _conv2d),),
    "linear_residual": (Sample("1024x256 @ 256x256", HALF, _linear_residual),),
    "linear_geglu": (Sample("512x128 to 512", HALF, _linear_geglu),),
    "attention": (
        Sample("2x256x4x40 to 256 keys", HALF, _self_attention),
        Sample("2x256x4x40 to 77 keys", HALF, _text_attention),
    ),
    "group_norm_silu": (
        Sample("2x64x64x64 in 32 groups", HALF, _group_norm_silu(64, 64)),
        Sample("2x256x16x16 in 32 groups", HALF, _group_norm_silu(256, 16)),
    ),
    "layer_norm_residual": (Sample("2048x256", HALF, _layer_norm_residual),),
}


@contextmanager
def timed(**options):
    """Within, seconds of every launch are listed, and each is given the options."""
    original, seconds = emulator.launch, []

    def launch(*given, **named):
        began = time.perf_counter()
        counters = original(*given, **named, **options)
        seconds.append(time.perf_counter() - began)
        return counters

    emulator.launch = launch
    try:
        yield seconds
    finally:
        emulator.launch = original


def execute(op, arch, sample, options):
    """One call: seconds, wave instructions, waves, and digests of results and counters."""
    arguments = sample.make()
    config = op.config_of("triton", op.lookup(arch, op.verification.problem(*arguments)))
    implementation = op.implementation("triton")
    with emulated(op.verification.kernels, arch, execute=False):
        implementation(*arguments, config=config)
    with timed(**options) as seconds, emulated(op.verification.kernels, arch, budget=2**62) as run:
        result = outputs(implementation(*arguments, config=config))
    counters = [call.counters for call in run.calls]
    counted = json.dumps([[each.as_dict(), sorted(each.by_name.items())] for each in counters], sort_keys=True)
    bits = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in result)
    return {
        "seconds": sum(seconds),
        "launches": len(seconds),
        "waves": sum(each.waves for each in counters),
        "wave_instructions": sum(each.wave_instructions for each in counters),
        "results": hashlib.sha256(bits).hexdigest(),
        "counters": hashlib.sha256(counted.encode()).hexdigest(),
    }


def measure(names, archs, turns, options):
    rows = []
    for arch in archs:
        for name in names:
            for sample in SAMPLES[name]:
                tried = [execute(OPS[name], arch, sample, options) for _ in range(turns)]
                row = {"arch": arch, "op": name, "call": sample.name}
                rows.append(row | min(tried, key=lambda each: each["seconds"]))
                print(_line(arch, name, sample.name, rows[-1:]), flush=True)
    return rows


def rate(rows):
    """Wave instructions a second."""
    return sum(row["wave_instructions"] for row in rows) / sum(row["seconds"] for row in rows)


def _line(arch, name, call, rows):
    done, taken = sum(row["wave_instructions"] for row in rows), sum(row["seconds"] for row in rows)
    return f"{arch:8} {name:20} {call:26} {done:>12,} {taken:>8.2f} {rate(rows):>12,.0f}"


def different(rows, others):
    """The calls whose results or counters are not those of another record; what it does not have is left out."""
    known = {(row["arch"], row["op"], row["call"]): row for row in others}
    for row in rows:
        other = known.get((row["arch"], row["op"], row["call"]))
        for part in ("results", "counters"):
            if other is not None and other[part] != row[part]:
                yield f"{row['arch']} {row['op']} {row['call']}: other {part}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default=",".join(EMULATED))
    parser.add_argument("--op", default=",".join(SAMPLES))
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--processes", type=int, help="as many as the launcher chooses")
    parser.add_argument("--against", type=Path, help="a record of another version, to compare results and rates with")
    options = parser.parse_args()
    archs, names = options.arch.split(","), options.op.split(",")
    print(f"{'':8} {'':20} {'':26} {'instructions':>12} {'seconds':>8} {'a second':>12}")
    given = {} if options.processes is None else {"processes": options.processes}
    rows = measure(names, archs, options.turns, given)
    for arch in archs:
        print(_line(arch, "all", "", [row for row in rows if row["arch"] == arch]))
    print(_line("all", "", "", rows))
    record = {
        "command": f"python benchmarks/emulator_speed.py --arch {options.arch} --op {options.op}",
        "processes": options.processes,
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("numpy", "torch", "triton", "tinygrad")},
        "wave_instructions_a_second": round(rate(rows)),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "emulator-speed.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.against is not None:
        others = json.loads(options.against.read_text(encoding="utf-8"))["rows"]
        same = [row for row in others if row["arch"] in archs and row["op"] in names]
        print(f"{rate(rows) / rate(same):.2f} times the rate of {options.against}")
        wrong = list(different(rows, others))
        if wrong:
            raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
