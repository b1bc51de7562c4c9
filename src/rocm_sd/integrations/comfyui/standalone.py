"""ComfyUI's sampling, stock and optimised, without its server: python -m rocm_sd.integrations.comfyui.standalone FOLDER

It runs in the Python of the host whose folder is named, and prints one line of JSON at the end: seconds a step of each
run, or the error. Stable Diffusion 1.5 with random weights on a GPU, and a small model of its kind with --cpu.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from typing import Any

import torch

from rocm_sd.errors import first_line
from rocm_sd.integrations.comfyui import benchmark, random_model
from rocm_sd.integrations.comfyui.host import the
from rocm_sd.measuring import compare

__all__ = ["main", "timed"]

# Of a picture with a GPU, and of a small one without.
_STEPS, _REPEATS = 10, 8
_CPU_SIDE, _CPU_STEPS, _CPU_REPEATS = 128, 4, 4
_MOST_LINES = 24


def timed(*, cpu: bool) -> dict[str, Any]:
    """Of the host that can be imported."""
    if cpu:
        # Before anything of the host asks for its device.
        the("comfy.cli_args").args.cpu = True
    dtype = torch.float32 if cpu else torch.float16
    side = _CPU_SIDE if cpu else random_model.MODELS["sd15"][2]
    with torch.inference_mode():
        model = random_model.patcher("sd15", dtype, tiny=cpu)
        steps, repeats = (_CPU_STEPS, _CPU_REPEATS) if cpu else (_STEPS, _REPEATS)
        measured = benchmark.measure(model, steps, repeats, side, side, "auto")
    what = f"{'a small model' if cpu else 'SD 1.5'} at {side}x{side}"
    compared = compare("rocm-sd", "stock", 1, measured.optimized, measured.stock)
    return {"model": what, **asdict(measured), "compared": asdict(compared)}


def main(arguments: list[str]) -> None:
    sys.path.append(arguments[0])
    # The host prints to standard output, and so may a driver: the answer is the last line.
    try:
        answer = timed(cpu="--cpu" in arguments[1:])
    except Exception as error:  # noqa: BLE001 -- whatever this host raises is the answer
        lines = traceback.format_exc().strip().splitlines()[-_MOST_LINES:]
        answer = {"error": f"{type(error).__name__}: {first_line(error)}", "lines": lines}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
