"""What ONNX Runtime computes with here; where that is a GPU, plain and fused exports beside stock and rocm-sd.

    python benchmarks/onnx_providers.py --out results [--workload sd15-512] [--batch 1] [--steps 20] [--repeats 8]

results/providers.json has the packages, `onnxruntime.get_available_providers()`, and of each provider what came of a
sum of two tensors: one that is listed may find no library or no card. Where one of a GPU computes, `rocm-sd bench`
times all four in turns of one run, whose record is results/WORKLOAD.json. Elsewhere providers.json says why nothing was
timed. `--tiny` tries the command on a CPU with a small model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from rocm_sd.arch import host
from rocm_sd.bench.machine import machine
from rocm_sd.errors import first_line
from rocm_sd.onnx.providers import AUTOMATIC, PROVIDERS

PACKAGES = ("onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "onnxruntime-rocm")
ENGINES = ("stock", "rocm-sd", "onnxruntime", "onnxruntime_fused")
USABLE = "computes"


def installed():
    """The packages, and the module onnxruntime or why there is none."""
    versions = {name: version for name in PACKAGES if (version := host.installed(name)) is not None}
    try:
        import onnxruntime  # noqa: PLC0415 -- that it may be missing is what is recorded
    except ImportError as error:
        return versions, None, f"onnxruntime is not installed ({first_line(error)})"
    return versions, onnxruntime, ""


def sum_of_two():
    from onnx import TensorProto, helper  # noqa: PLC0415 -- optional, as onnxruntime is

    names = ("first", "second", "sum")
    first, second, total = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in names)
    graph = helper.make_graph([helper.make_node("Add", names[:2], names[2:])], "sum", [first, second], [total])
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def outcome(runtime, provider):
    """`USABLE`, or what stands in the way."""
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    if provider != PROVIDERS["cpu"]:
        # What a provider cannot compute goes to the CPU, and the session says nothing of it.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    given = np.arange(4, dtype=np.float32)
    try:
        session = runtime.InferenceSession(sum_of_two(), options, providers=[provider])
        if provider not in session.get_providers():
            return f"is listed, and the session has {', '.join(session.get_providers())} in its place"
        (found,) = session.run(None, {"first": given, "second": given})
    except Exception as error:  # noqa: BLE001 -- of onnxruntime's own classes, one a cause
        return first_line(error)
    return USABLE if np.array_equal(found, given * 2) else f"computes {found.tolist()} for {(given * 2).tolist()}"


def why_not_timed(providers, *, tiny):
    """Nothing where a GPU's provider computes, or with `tiny` the CPU's: then there is something to time."""
    wanted = ["cpu"] if tiny else [name for name in AUTOMATIC if name != "cpu"]
    if any(providers.get(PROVIDERS[name]) == USABLE for name in wanted):
        return ""
    return f"none of the providers {', '.join(PROVIDERS[name] for name in wanted)} computes here"


def bench_command(asked):
    given = {"--batch": asked.batch, "--engines": ",".join(ENGINES), "--repeats": asked.repeats, "--out": asked.out}
    given |= {} if asked.steps is None else {"--steps": asked.steps}
    flags = [str(word) for pair in given.items() for word in pair]
    return ["bench", asked.workload, *flags, *(["--tiny", "--device", "cpu"] if asked.tiny else []), "--fresh"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", default="sd15-512")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    versions, runtime, why_not = installed()
    listed = [] if runtime is None else runtime.get_available_providers()
    providers = {name: outcome(runtime, name) for name in listed}
    why_not = why_not or why_not_timed(providers, tiny=asked.tiny)
    found = asdict(machine(torch.device("cuda" if torch.cuda.is_available() and not asked.tiny else "cpu")))
    record = {
        "format": "rocm-sd-onnx-providers/1",
        "what": "ONNX Runtime's providers on this machine",
        "command": f"python benchmarks/onnx_providers.py --out results{' --tiny' if asked.tiny else ''}",
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {**found, "versions": {**found["versions"], **versions}},
        "available_providers": listed,
        "providers": providers,
        "timed": None if why_not else " ".join(["rocm-sd", *bench_command(asked)]),
        "why_not_timed": why_not,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "providers.json").write_text(json.dumps(record, indent=1) + "\n")
    json.dump({name: record[name] for name in ("available_providers", "providers", "why_not_timed")}, sys.stdout)
    print(flush=True)
    if not why_not:
        subprocess.run([sys.executable, "-m", "rocm_sd.cli.main", *bench_command(asked)], check=True)


if __name__ == "__main__":
    main()
