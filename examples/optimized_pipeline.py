#!/usr/bin/env python
"""ROCmOptimizedPipeline: a pipeline by its path, at a level, used like any pipeline of Diffusers.

    python examples/optimized_pipeline.py
    python examples/optimized_pipeline.py --model ./sdxl --level memory --scheduler dpm++2m-karras --steps 25

It draws each prompt of --prompts, shows the steps as they come, and says at the end what was done to the pipeline.
Without --model it uses emoji-sd, a small model that comes with the package: it needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from rocm_sd.engine import LEVELS
from rocm_sd.errors import RocmSdError
from rocm_sd.integrations.diffusers import SCHEDULERS, set_scheduler
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.models import EMBEDDED, resolve
from rocm_sd_ops import ROCmOptimizedPipeline

PROMPTS = ("a frog on a pink background", "a red apple")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it takes 1 or more")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, metavar="PROMPT", help="what to draw")
    parser.add_argument("--model", default=EMBEDDED, help="a Diffusers folder, a .safetensors file or a hub id")
    parser.add_argument("--level", choices=LEVELS, default="auto", help="memory against speed (default: auto)")
    parser.add_argument("--scheduler", choices=tuple(SCHEDULERS), help="(default: the model's own)")
    parser.add_argument("--steps", type=positive, default=20, help="denoising steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same pictures (default: 0)")
    parser.add_argument("--device", help="cuda (AMD and NVIDIA) or cpu (default: what is there)")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="the folder to write to")
    return parser.parse_args()


def draw(pipe: ROCmOptimizedPipeline, prompt: str, given: argparse.Namespace, console: Console) -> Any:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(prompt, total=given.steps)

        def after_step(_pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress.update(task, completed=step + 1)
            return tensors

        return pipe(
            prompt,
            num_inference_steps=given.steps,
            guidance_scale=resolve(given.model).guidance,
            generator=torch.Generator("cpu").manual_seed(given.seed),
            callback_on_step_end=after_step,
        ).images[0]


def main() -> None:
    given = arguments()
    console = Console()
    hush()

    pipe = ROCmOptimizedPipeline(given.model, optimization_level=given.level, device=given.device)
    # Attributes are the pipeline's own: a scheduler, a LoRA or a setting of the VAE goes where it always went.
    pipe.set_progress_bar_config(disable=True)
    if given.scheduler:
        set_scheduler(pipe, given.scheduler)

    given.out.mkdir(parents=True, exist_ok=True)
    for prompt in given.prompts:
        name = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"
        path = given.out / f"{name}.png"
        draw(pipe, prompt, given, console).save(path)
        console.print(f"wrote {path}")

    console.print(pipe.report())
    # The pipeline as it was loaded, to go on with or to save: pipe.restore().save_pretrained(...).
    stock = pipe.restore()
    console.print(f"restored: a {type(stock).__name__} on {stock.device}")


if __name__ == "__main__":
    try:
        main()
    except (RocmSdError, OSError) as error:
        sys.exit(f"error: {error}")
