#!/usr/bin/env python
"""Stock Diffusers against rocm-sd on this machine: the pictures are compared first, then both are timed in turns.

    python examples/benchmark_comparison.py
    python examples/benchmark_comparison.py --model ./stable-diffusion-v1-5 --steps 50 --runs 10

The model is loaded twice, so that neither pipeline waits for the other's preparations. A third one in a wider dtype
(float32 for float16, float64 for float32) tells how far each is from the exact picture; if rocm-sd is more than twice
as far off as stock, no times are shown. Without --model it uses emoji-sd, a small model that comes with the package:
it needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import rocm_sd
from rocm_sd import numerics
from rocm_sd.engine import LEVELS
from rocm_sd.errors import NumericsFailure, RocmSdError, Unsupported
from rocm_sd.integrations.diffusers import set_scheduler
from rocm_sd.integrations.diffusers.loading import default_device, default_dtype, hush, load_pipeline
from rocm_sd.models import EMBEDDED, ModelSource, resolve

# Those that draw no noise of their own: another dtype would be another noise.
SCHEDULERS = ("ddim", "pndm", "euler", "dpm++2m", "dpm++2m-karras", "unipc")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it takes 1 or more")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="a frog on a pink background", help="what to draw")
    parser.add_argument("--model", default=EMBEDDED, help="a Diffusers folder, a .safetensors file or a hub id")
    parser.add_argument("--level", choices=LEVELS, default="auto", help="memory against speed (default: auto)")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="ddim", help="(default: ddim)")
    parser.add_argument("--steps", type=positive, default=5, help="denoising steps (default: 5)")
    parser.add_argument("--runs", type=int, default=5, help="pictures of each, timed (default: 5, at least 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise that all begin with (default: 0)")
    parser.add_argument("--device", help="cuda (AMD and NVIDIA) or cpu (default: what is there)")
    return parser.parse_args()


def loaded(source: ModelSource, device: torch.device, dtype: torch.dtype, scheduler: str) -> Any:
    pipe = load_pipeline(source, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    set_scheduler(pipe, scheduler)
    return pipe


def noise_for(pipe: Any, seed: int) -> torch.Tensor:
    """The same values for every pipeline, rounded to the dtype that is measured."""
    size = pipe.unet.config.sample_size
    shape = (1, pipe.unet.config.in_channels, size, size)
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).to(pipe.device, pipe.dtype)


def check(
    source: ModelSource, pipes: dict[str, Any], options: dict[str, Any], scheduler: str, wide: torch.dtype
) -> numerics.Comparison:
    """Raises NumericsFailure where our error is more than twice stock's, the bound that every operator has to keep."""
    latents = {name: pipe(**options, output_type="latent").images for name, pipe in pipes.items()}
    stock = pipes["stock"]
    reference = loaded(source, stock.device, wide, scheduler)
    begin = options["latents"].to(wide)
    exact = reference(**options | {"latents": begin}, output_type="latent").images.double()
    compared = numerics.compare(latents["rocm-sd"], exact, latents["stock"])
    # NaN compares false.
    if not compared.rms <= compared.allowed_rms:
        raise NumericsFailure(f"The picture is not stock's: {compared}.")
    return compared


def seconds(pipe: Any, options: dict[str, Any]) -> float:
    on_gpu = pipe.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(pipe.device)
    started = time.perf_counter()
    pipe(**options)
    if on_gpu:
        torch.cuda.synchronize(pipe.device)
    return time.perf_counter() - started


def table(times: dict[str, list[float]]) -> Table:
    """Ratios are of pairs that ran one after the other: what slows the machine down for a while meets both."""
    shown = Table("engine", "median s", "quartiles s", "times stock", "quartiles")
    for name, taken in times.items():
        low, median, high = statistics.quantiles(taken, n=4)
        ratios = [stock / ours for stock, ours in zip(times["stock"], taken, strict=True)]
        worst, usual, best = statistics.quantiles(ratios, n=4)
        shown.add_row(name, f"{median:.3f}", f"{low:.3f} to {high:.3f}", f"{usual:.2f}", f"{worst:.2f} to {best:.2f}")
    return shown


def main() -> None:
    given = arguments()
    if given.runs < 2:
        raise Unsupported("benchmark_comparison", f"--runs {given.runs}: quartiles need 2 at least")
    console = Console()
    hush()

    source, device = resolve(given.model), default_device(given.device)
    dtype = default_dtype(device)
    pipes = {name: loaded(source, device, dtype, given.scheduler) for name in ("stock", "rocm-sd")}
    if not hasattr(pipes["stock"], "unet"):
        raise Unsupported("benchmark_comparison", "a model without a UNet", hint="Give SD 1.5, 2.1 or SDXL.")
    rocm_sd.optimize(pipes["rocm-sd"], level=given.level)
    options = {
        "prompt": given.prompt,
        "num_inference_steps": given.steps,
        "guidance_scale": source.guidance,
        "latents": noise_for(pipes["stock"], given.seed),
    }

    wide = torch.float64 if dtype == torch.float32 else torch.float32
    compared = check(source, pipes, options, given.scheduler, wide)
    console.print(f"error of the latents, root mean square: rocm-sd {compared.rms:.2e}, stock {compared.stock_rms:.2e}")

    times: dict[str, list[float]] = {name: [] for name in pipes}
    # The first round is not counted: first calls pay for what later ones do not.
    for number in range(given.runs + 1):
        for name, pipe in pipes.items():
            taken = seconds(pipe, options)
            if number:
                times[name].append(taken)
    console.print(f"{source.name} on {device}, {given.scheduler}, {given.steps} steps, {given.runs} pictures in turns")
    console.print(table(times))


if __name__ == "__main__":
    try:
        main()
    except (RocmSdError, OSError) as error:
        sys.exit(f"error: {error}")
