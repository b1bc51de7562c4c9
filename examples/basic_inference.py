#!/usr/bin/env python
"""Draw a picture with a Diffusers pipeline that one line has made faster.

    python examples/basic_inference.py
    python examples/basic_inference.py "a castle at night" --model ./stable-diffusion-v1-5 --steps 30

Without --model it uses emoji-sd, a small model that comes with the package: it needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

import rocm_sd
from rocm_sd.errors import RocmSdError
from rocm_sd.integrations.diffusers.loading import default_device, hush, load_pipeline
from rocm_sd.models import EMBEDDED, resolve


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it takes 1 or more")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a frog on a pink background", help="what to draw")
    parser.add_argument("--model", default=EMBEDDED, help="a Diffusers folder, a .safetensors file or a hub id")
    parser.add_argument("--steps", type=positive, default=20, help="denoising steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same picture (default: 0)")
    parser.add_argument("--device", help="cuda (AMD and NVIDIA) or cpu (default: what is there)")
    parser.add_argument("--out", type=Path, default=Path("picture.png"), help="the file to write")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    console = Console()
    hush()

    source = resolve(given.model)
    # Any way of loading does, such as diffusers.StableDiffusionPipeline.from_pretrained(...).to("cuda").
    pipe = load_pipeline(source, default_device(given.device))

    rocm_sd.optimize(pipe)

    picture = pipe(
        given.prompt,
        num_inference_steps=given.steps,
        guidance_scale=source.guidance,
        generator=torch.Generator("cpu").manual_seed(given.seed),
    ).images[0]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    picture.save(given.out)
    console.print(f"wrote {given.out}")

    console.print(rocm_sd.report(pipe))


if __name__ == "__main__":
    try:
        main()
    except (RocmSdError, OSError) as error:
        sys.exit(f"error: {error}")
