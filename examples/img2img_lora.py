#!/usr/bin/env python
"""Image to image with a LoRA that is loaded, scaled and unloaded after `optimize`.

    python examples/img2img_lora.py
    python examples/img2img_lora.py --model ./stable-diffusion-v1-5 --lora ./style.safetensors --scales 0.5 1.0

It draws --prompt, then draws --change over that picture: without the LoRA, with it at each of --scales, and once more
without it, which must give the same picture as before. All are written side by side into one file. Without --lora it
makes one of random weights: not a style, but enough to see what a scale does. Without --model it uses emoji-sd, a small
model that comes with the package: it needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoPipelineForImage2Image
from PIL import Image, ImageChops
from rich.console import Console

import rocm_sd
from rocm_sd.errors import NumericsFailure, RocmSdError
from rocm_sd.integrations.diffusers.loading import default_device, hush, load_pipeline
from rocm_sd.models import EMBEDDED, resolve

ADAPTER = "example"
# Of 255: sums in another order may round a value the other way.
MOST = 2


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it takes 1 or more")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="a frog on a pink background", help="what to draw first")
    parser.add_argument("--change", default="a frog on a blue background", help="what to draw over it")
    parser.add_argument("--strength", type=float, default=0.8, help="how much is drawn anew, 0 to 1 (default: 0.8)")
    parser.add_argument("--model", default=EMBEDDED, help="a Diffusers folder, a .safetensors file or a hub id")
    parser.add_argument("--lora", type=Path, help="a LoRA for this model (default: random weights)")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.5, 1.0], help="of the LoRA (default: 0.5 1.0)")
    parser.add_argument("--steps", type=positive, default=20, help="denoising steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same pictures (default: 0)")
    parser.add_argument("--device", help="cuda (AMD and NVIDIA) or cpu (default: what is there)")
    parser.add_argument("--out", type=Path, default=Path("img2img-lora.png"), help="the file to write")
    return parser.parse_args()


def load_lora(pipe: Any, file: Path | None, seed: int) -> None:
    try:
        from peft import LoraConfig  # noqa: PLC0415 -- Diffusers needs it for LoRAs, and for nothing else
    except ModuleNotFoundError as error:
        raise RocmSdError(
            "peft is not installed, without which Diffusers loads no LoRA.", hint="Type: pip install peft"
        ) from error
    if file is not None:
        pipe.load_lora_weights(file.parent, weight_name=file.name, adapter_name=ADAPTER)
        return
    torch.manual_seed(seed)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    # A LoRA that is to be trained begins as nothing; without this it is random.
    pipe.unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets), adapter_name=ADAPTER)


def beside(pictures: list[Image.Image]) -> Image.Image:
    width, height = pictures[0].size
    paper = Image.new("RGB", (width * len(pictures), height))
    for number, picture in enumerate(pictures):
        paper.paste(picture, (number * width, 0))
    return paper


def main() -> None:
    given = arguments()
    console = Console()
    hush()

    source = resolve(given.model)
    text_to_image = load_pipeline(source, default_device(given.device))
    # Both have the same parts: what is optimised in one is so in the other. Without a dtype, float16 would be lost.
    pipe = AutoPipelineForImage2Image.from_pipe(text_to_image, dtype=text_to_image.dtype)
    rocm_sd.optimize(pipe)

    def drawn(with_pipe: Any, prompt: str, **options: Any) -> Image.Image:
        with_pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator("cpu").manual_seed(given.seed)
        named = {"num_inference_steps": given.steps, "guidance_scale": source.guidance, "generator": generator}
        picture: Image.Image = with_pipe(prompt, **named, **options).images[0]
        return picture

    first = drawn(text_to_image, given.prompt)
    changed = {"image": first, "strength": given.strength}
    without = drawn(pipe, given.change, **changed)
    pictures = [first, without]

    load_lora(pipe, given.lora, given.seed)
    for scale in given.scales:
        pipe.set_adapters(ADAPTER, adapter_weights=scale)
        pictures.append(drawn(pipe, given.change, **changed))
    pipe.unload_lora_weights()
    again = ImageChops.difference(drawn(pipe, given.change, **changed), without)
    farthest = max(high for _, high in again.getextrema())
    if farthest > MOST:
        message = f"Once the LoRA was unloaded, a value of the picture differed by {farthest} of 255 from before."
        raise NumericsFailure(message)

    given.out.parent.mkdir(parents=True, exist_ok=True)
    beside(pictures).save(given.out)
    scales = ", ".join(f"at {scale:g}" for scale in given.scales)
    console.print(f"wrote {given.out}: the first picture, the second without the LoRA, then with it {scales}")
    console.print(rocm_sd.report(pipe))


if __name__ == "__main__":
    try:
        main()
    except (RocmSdError, OSError) as error:
        sys.exit(f"error: {error}")
