"""What approximations cost in quality: emoji-sd's pictures with each setting beside its exact ones.

Prompt match and PSNR do not depend on the machine's speed; `cost` is the work of a picture's UNet calls beside that of
the exact ones, counted. Speed is measured by `rocm-sd demo` and `rocm-sd bench`.

    python benchmarks/quality_emoji.py --steps 50 --prompts 1000 --out results/quality.json
    python benchmarks/quality_emoji.py --steps 50 --prompts 200 --sweep --out results/sweep.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from pathlib import Path

import numpy as np
import torch

import rocm_sd
from rocm_sd import models
from rocm_sd.engine import optimize, restore
from rocm_sd.engine.approximation import Skipping
from rocm_sd.errors import MissingDependency
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.models.emoji import trained_prompts
from rocm_sd.quality import prompt_match, similarity
from rocm_sd.quality.embedding import load_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of a whole call of two samples, what a shallow one takes on a CPU; by depth. A call of one half takes half.
SHALLOW = {1: 0.19, 2: 0.58, 3: 0.66}


def draw(pipe, prompts, steps, guidance, batch):
    images = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(start + number) for number in range(len(part))]
        pipe.set_progress_bar_config(disable=True)
        drawn = pipe(
            [prompt.text for prompt in part], num_inference_steps=steps, guidance_scale=guidance,
            generator=generators, output_type="pt",
        ).images  # fmt: skip
        images.append(drawn.float().cpu())
    # As files have them.
    return (torch.cat(images) * 255).round() / 255


def save(images, path):
    np.savez_compressed(path, images=(images * 255).round().to(torch.uint8).numpy())


def nearness(exact, images):
    """PSNR of each pair, and the mean SSIM; None of the latter where scikit-image is missing."""
    try:
        near = similarity.similarity(exact, images)
    except MissingDependency:
        mse = (exact.double() - images.double()).square().mean((1, 2, 3)).clamp_min(1e-12)
        return (-10 * mse.log10()).tolist(), None
    return near.psnr, round(near.mean_ssim, 4)


def cost(skipping, steps):
    shallow = SHALLOW.get(skipping.depth, 1.0)
    taken = [skipping.step(number, 0, steps) for number in range(steps)]
    return sum((1 if step.whole else shallow) * (1 if step.guided else 0.5) for step in taken) / steps


def swept():
    for depth, every, order, guided, end in itertools.product(
        (1, 2, 3), (2, 3, 4, 5), (0, 1), (1, 2, 3, 5), (1.0, 0.6)
    ):
        yield Skipping(depth, every, order=order, guided_every=guided, guidance_end=end)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--sweep", action="store_true", help="settings of all kinds, and not those that are shipped")
    parser.add_argument("--settings", type=json.loads, help="one JSON list of settings to try in place of the shipped")
    parser.add_argument("--least-cost", type=float, default=0.0)
    parser.add_argument("--most-cost", type=float, default=1.0)
    parser.add_argument("--pictures", type=Path, help="a folder to keep the pictures in, one file for each setting")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    hush()
    source = models.resolve()
    pipe = host.load_pipeline(source, torch.device(DEVICE))
    prompts = trained_prompts(options.prompts)
    embedding = load_embedding(device=DEVICE)
    given = (pipe, prompts, options.steps, source.guidance, options.batch)
    if options.sweep:
        settings = {str(number): setting for number, setting in enumerate(swept())}
    elif options.settings:
        settings = {str(number): Skipping(**setting) for number, setting in enumerate(options.settings)}
    else:
        settings = {"high": "high", "balanced": "balanced"}
    optimize(pipe)
    exact = draw(*given)
    matched = prompt_match.match(exact, prompts, embedding)
    result = {
        "model": source.name, "steps": options.steps, "prompts": options.prompts, "guidance": source.guidance,
        "rocm_sd": rocm_sd.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
        "exact": {name: str(interval) for name, interval in matched.intervals().items()}, "settings": [],
    }  # fmt: skip
    print("exact", result["exact"], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        save(exact, options.pictures / "exact.npz")
    for name, setting in settings.items():
        work = cost(setting, options.steps) if isinstance(setting, Skipping) else None
        if work is not None and not options.least_cost <= work <= options.most_cost:
            continue
        restore(pipe)
        optimize(pipe, quality=setting)
        images = draw(*given)
        psnr, ssim = nearness(exact, images)
        mine = prompt_match.match(images, prompts, embedding)
        drop = prompt_match.difference_interval(mine.top1, matched.top1)
        row = {
            "setting": setting.to_dict() if isinstance(setting, Skipping) else name,
            "cost": None if work is None else round(work, 3),
            "psnr median": round(statistics.median(psnr), 2), "psnr worst": round(min(psnr), 2),
            "ssim mean": ssim, "top-1": round(sum(mine.top1) / len(prompts), 4),
            "top-1 difference": [round(value, 4) for value in (drop.value, drop.low, drop.high)],
            "colour": round(sum(mine.colour) / len(prompts), 4),
        }  # fmt: skip
        result["settings"].append(row)
        if options.pictures:
            save(images, options.pictures / f"{name}.npz")
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
