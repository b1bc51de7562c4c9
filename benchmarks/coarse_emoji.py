"""What merged tokens, eight bits and the small decoder bring and cost: emoji-sd's pictures with each and exact ones.

Nearness is of pictures to the exact ones of the same prompts and seeds. Times are of whole pictures in turns, by the
processor time of the process on a CPU, which does not count what others do there, and by the clock on a GPU.

    OMP_NUM_THREADS=1 python benchmarks/coarse_emoji.py --out results/coarse.json [--label "decoder int8"]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

import rocm_sd
from rocm_sd import measuring, models
from rocm_sd.errors import MissingDependency
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.models.emoji import trained_prompts
from rocm_sd.quality import prompt_match, similarity
from rocm_sd.quality.embedding import load_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {
    "merged 30%": rocm_sd.Approximation(merged=0.3),
    "merged 50%": rocm_sd.Approximation(merged=0.5),
    "merged 80%": rocm_sd.Approximation(merged=0.8),
    "products int8": rocm_sd.Approximation(eight_bits="int8"),
    "products fp8": rocm_sd.Approximation(eight_bits="fp8"),
    "decoder int8": rocm_sd.Approximation(eight_bit_decoder="int8"),
    "decoder fp8": rocm_sd.Approximation(eight_bit_decoder="fp8"),
    "small decoder": rocm_sd.Approximation(small_decoder=True),
    "merged 50%, small decoder": rocm_sd.Approximation(merged=0.5, small_decoder=True),
}


def latents_of(pipe, prompts, steps, guidance, batch):
    parts = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(start + number) for number in range(len(part))]
        options = {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "latent"}
        parts.append(pipe([prompt.text for prompt in part], generator=generators, **options).images)
    return torch.cat(parts)


@torch.no_grad()
def pictures_of(pipe, latents):
    """As files have them."""
    parts = [pipe.vae.decode(part / pipe.vae.config.scaling_factor).sample for part in latents.split(8)]
    return ((torch.cat(parts).float().cpu() / 2 + 0.5).clamp(0, 1) * 255).round() / 255


def seconds(pipe, steps, guidance):
    clock = time.perf_counter if DEVICE == "cuda" else time.process_time
    began = clock()
    generator = torch.Generator().manual_seed(0)
    pipe("a frog", num_inference_steps=steps, guidance_scale=guidance, generator=generator)
    return clock() - began


def decode_seconds(pipe, latents):
    clock = time.perf_counter if DEVICE == "cuda" else time.process_time
    with torch.no_grad():
        began = clock()
        pipe.vae.decode(latents).sample.cpu()
        return clock() - began


def nearness(exact, images):
    """PSNR of each pair, and the mean SSIM; None of the latter where scikit-image is missing."""
    try:
        near = similarity.similarity(exact, images)
    except MissingDependency:
        mse = (exact.double() - images.double()).square().mean((1, 2, 3)).clamp_min(1e-12)
        return (-10 * mse.log10()).tolist(), None
    return near.psnr, round(near.mean_ssim, 4)


def compared(ours, exact):
    low, high = measuring.interval(ours, exact)
    ratio = statistics.median(exact) / statistics.median(ours)
    return {"times exact": [round(value, 3) for value in (ratio, low, high)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--label", action="append", choices=SETTINGS, help="only this setting; may be given again")
    options = parser.parse_args()
    settings = {label: each for label, each in SETTINGS.items() if not options.label or label in options.label}
    hush()
    source = models.resolve()
    pipes = {}
    for name in ("exact", *settings):
        pipes[name] = host.load_pipeline(source, torch.device(DEVICE))
        pipes[name].set_progress_bar_config(disable=True)
        rocm_sd.optimize(pipes[name], quality=settings.get(name, "exact"))
    result = {
        "model": source.name, "steps": options.steps, "prompts": options.prompts, "guidance": source.guidance,
        "rocm_sd": rocm_sd.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", "threads": torch.get_num_threads(),
        "settings": {},
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep():
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    one = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, pipes["exact"].vae.dtype)
    times, decodes = ({name: [] for name in pipes} for _ in range(2))
    for number in range(-1, options.turns):
        for name in measuring.turn(list(pipes), max(number, 0)):
            taken = seconds(pipes[name], options.steps, source.guidance)
            drawn = statistics.median(decode_seconds(pipes[name], one) for _ in range(3))
            if number >= 0:
                times[name].append(taken)
                decodes[name].append(drawn)
    for name, setting in settings.items():
        row = result["settings"][name] = {"setting": setting.to_dict()}
        row |= {"picture s": round(statistics.median(times[name]), 3), **compared(times[name], times["exact"])}
        row["decode"] = {"ms": round(1000 * statistics.median(decodes[name]), 1)}
        row["decode"] |= compared(decodes[name], decodes["exact"])
        print(name, row, flush=True)
    result["exact"] = {
        "picture s": round(statistics.median(times["exact"]), 3),
        "decode ms": round(1000 * statistics.median(decodes["exact"]), 1),
    }
    keep()
    prompts = trained_prompts(options.prompts)
    embedding = load_embedding(device=DEVICE)
    given = (prompts, options.steps, source.guidance, options.batch)
    latents = {(0.0, None): latents_of(pipes["exact"], *given)}
    exact = pictures_of(pipes["exact"], latents[0.0, None])
    matched = prompt_match.match(exact, prompts, embedding)
    for name, setting in settings.items():
        # What is about the decoder alone decodes the exact ones.
        of = setting.merged, setting.eight_bits
        if of not in latents:
            latents[of] = latents_of(pipes[name], *given)
        images = pictures_of(pipes[name], latents[of])
        psnr, ssim = nearness(exact, images)
        mine = prompt_match.match(images, prompts, embedding)
        drop = prompt_match.difference_interval(mine.top1, matched.top1)
        result["settings"][name] |= {
            "psnr median": round(statistics.median(psnr), 2), "psnr worst": round(min(psnr), 2), "ssim mean": ssim,
            "top-1 difference": [round(value, 4) for value in (drop.value, drop.low, drop.high)],
        }  # fmt: skip
        print(name, result["settings"][name], flush=True)
        keep()


if __name__ == "__main__":
    main()
