"""What `rocm-sd onnx optimize` finds, takes and gains on a CPU.

    python benchmarks/onnx_fusions.py --out results --optimize sd15=FOLDER [--optimize sdxl=FOLDER]
        [--provider cpu] [--float16] [--speed PLAIN=FUSED] [--one-core] [--turns 16]

`--optimize`: each folder is optimized by a process of its own: seconds, the most memory that it held, fusions found and
the sites of the torch model. `--speed`: emoji-sd's parts, exported and optimized, on ONNX Runtime with its default
options, in turns; a picture is one text, 20 steps of the UNet at batch 2, and one decoding. `--one-core`: the same on
one thread, by the clock of its processor, which does not count what neighbours take on a machine that is in use.
Entries of a file that is there stay, so that the parts of a record can be made one after the other.
results/fusions.json has all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime

from rocm_sd import measuring
from rocm_sd.onnx.layout import GUIDED_BATCH

STEPS = 20
# emoji-sd: latents of 32 by 32, and the two texts of guidance.
SHAPES = {
    "text_encoder": {"input_ids": (2, 77)},
    "unet": {"sample": (2, 4, 32, 32), "timestep": (), "encoder_hidden_states": (2, 77, 192)},
    "vae_decoder": {"latent_sample": (1, 4, 32, 32)},
}


def machine():
    names = ("torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxruntime")
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "device": model,
        "cores": os.cpu_count(),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


def optimized(folder, provider, *, float16):
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as scratch:
        out = Path(scratch) / "fused"
        command = ["-m", "rocm_sd.onnx.optimize_pipeline", "-i", str(folder), "-o", str(out), "--provider", provider]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *command, *(["--float16"] if float16 else [])], check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        manifest = json.loads((out / "rocm_sd_onnx.json").read_text())
    before = sum(file.stat().st_size for file in Path(folder).rglob("model.onnx*"))
    after = sum(file["size"] for part in manifest["parts"] for file in part["files"])
    return {
        "seconds": round(seconds, 1),
        "peak_rss_mib": round(peak),
        "bytes_before": before,
        "bytes_after": after,
        "optimized": manifest["optimized"],
    }


class ProcessorClock:
    """A stopwatch that counts what this process computes, and not what it waits."""

    @staticmethod
    def milliseconds(call):
        began = time.process_time()
        call()
        return (time.process_time() - began) * 1e3


def session(folder, part, *, one_core):
    options = onnxruntime.SessionOptions()
    # As in ROCmOnnxPipeline: threads of one session that spin take the cores of the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if one_core:
        options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(folder / part / "model.onnx"), options, providers=["CPUExecutionProvider"])


def feeds(part):
    random = np.random.default_rng(0)
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES[part].items()}
    if "input_ids" in made:
        made["input_ids"] = random.integers(0, 3000, (2, 77))
    if "timestep" in made:
        # Guidance hands each picture over twice.
        made["timestep"], made["sample"] = np.asarray(501, np.float32), made["sample"][:1].repeat(2, axis=0)
    return made


def as_called(session, inputs):
    """As ROCmOnnxPipeline does: half of a doubled sample, where the model repeats what the halves share."""
    shapes = {each.name: each.shape for each in session.get_inputs()}
    if GUIDED_BATCH in shapes.get("encoder_hidden_states", ()):
        return {**inputs, "sample": inputs["sample"][:1]}
    return inputs


def speed(plain, fused, turns, *, one_core):
    stopwatch = measuring.Stopwatch("cpu")
    if one_core:
        stopwatch = ProcessorClock()
    found, times = {}, {"plain": np.zeros(turns), "fused": np.zeros(turns)}
    for part in SHAPES:
        inputs = feeds(part)
        sessions = {
            "plain": session(plain, part, one_core=one_core),
            "fused": session(fused, part, one_core=one_core),
        }
        calls = {name: partial(each.run, None, as_called(each, inputs)) for name, each in sessions.items()}
        first = {name: call()[0] for name, call in calls.items()}
        for call in calls.values():
            measuring.settled(call, stopwatch)
        taken = measuring.interleaved(calls, stopwatch, repeats=turns)
        found[part] = {
            **compared(taken["fused"], taken["plain"]),
            "largest_difference": float(np.abs(first["plain"] - first["fused"]).max()),
            "largest_value": float(np.abs(first["plain"]).max()),
        }
        for name in times:
            times[name] += np.asarray(taken[name]) * (STEPS if part == "unet" else 1)
    found["picture"] = compared(times["fused"].tolist(), times["plain"].tolist())
    return found


def compared(fused, plain):
    result = measuring.compare("fused", "plain", 1, fused, plain)
    return {
        "plain_ms": [round(each, 3) for each in plain],
        "fused_ms": [round(each, 3) for each in fused],
        "ratio": round(result.ratio, 3),
        "interval": [round(result.low, 3), round(result.high, 3)],
        "verdict": result.verdict,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimize", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--float16", action="store_true")
    parser.add_argument("--speed", metavar="PLAIN=FUSED")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--turns", type=int, default=16)
    options = parser.parse_args()
    file = options.out / "fusions.json"
    record = json.loads(file.read_text()) if file.is_file() else {"format": "rocm-sd-onnx-fusions/1"}
    about = {"machine": machine(), "when": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    shown = "python benchmarks/onnx_fusions.py --out results"
    for given in options.optimize:
        name, folder = given.split("=", 1)
        flags = f" --provider {options.provider}" + (" --float16" if options.float16 else "")
        key = f"{name}-{options.provider}" + ("-float16" if options.float16 else "")
        made = optimized(folder, options.provider, float16=options.float16)
        command = f"{shown} --optimize {name}=FOLDER{flags}"
        record.setdefault("optimize", {})[key] = {**about, "command": command, **made}
        print(key, made["seconds"], "s", made["peak_rss_mib"], "MiB")
    if options.speed:
        plain, fused = map(Path, options.speed.split("=", 1))
        made = speed(plain, fused, options.turns, one_core=options.one_core)
        command = f"{shown} --speed PLAIN=FUSED --turns {options.turns}" + (" --one-core" if options.one_core else "")
        record["speed_of_one_core" if options.one_core else "speed"] = {
            **about,
            "command": command,
            "workload": f"emoji-sd, {STEPS} steps",
            **made,
        }
        for part, each in made.items():
            print(part, each["ratio"], each["interval"], each["verdict"])
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
