"""Stage 6: how often a picture shows what its prompt says, on trained and on held-out combinations."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from diffusers import StableDiffusionPipeline
from training.emoji_sd.grids import save_grid

from rocm_sd.models.emoji import DEMO_PROMPTS, EMOJI, Prompt, held_out_pair_prompts, held_out_prompts, trained_prompts
from rocm_sd.quality.embedding import load_embedding
from rocm_sd.quality.prompt_match import match, match_pairs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draw", "main", "shares"]


def draw(
    pipe: StableDiffusionPipeline, texts: list[str], *, steps: int, guidance: float, batch: int, seed: int
) -> Tensor:
    """[N, 3, 128, 128] in 0..1; picture i depends on its prompt and (seed, i) alone."""
    parts = []
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + start + i) for i in range(len(part))]
        parts.append(
            pipe(part, num_inference_steps=steps, guidance_scale=guidance, generator=generators, output_type="pt")
            .images.float()
            .cpu()
        )
    return torch.cat(parts)


def shares(hits: dict[str, list[bool]]) -> dict[str, float]:
    return {key: round(sum(values) / len(values), 4) for key, values in hits.items()}


def by_tone(hits: dict[str, list[bool]], prompts: list[Prompt]) -> dict[str, dict[str, float]]:
    """The shares again, apart for skin-tone variants, whose neighbours differ in hue alone."""
    result = {}
    for name, toned in (("base", False), ("toned", True)):
        rows = [i for i, prompt in enumerate(prompts) if EMOJI[prompt.emoji[0]].toned is toned]
        if rows:
            result[name] = shares({key: [values[i] for i in rows] for key, values in hits.items()})
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.evaluate", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/emoji-sd"))
    parser.add_argument("--model", type=Path, help="the Diffusers folder (default: OUT/emoji-sd)")
    parser.add_argument("--embedding", type=Path, help="default: OUT/embedding.safetensors")
    parser.add_argument("--prompts", type=int, default=500, help="prompts of each kind")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, nargs="+", default=[4.0], help="one report for each value")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--grid", type=Path, help="default: OUT/evaluation.png")
    options = parser.parse_args(arguments)
    dtype = torch.float16 if options.device.startswith("cuda") else torch.float32
    folder = options.model or options.out / "emoji-sd"
    pipe = StableDiffusionPipeline.from_pretrained(folder).to(options.device, dtype)
    pipe.set_progress_bar_config(disable=True)
    embedding = load_embedding(options.embedding or options.out / "embedding.safetensors", options.device)
    kinds = {
        "trained": trained_prompts(options.prompts, options.seed),
        "held_out": held_out_prompts(options.prompts, options.seed),
        "held_out_pairs": held_out_pair_prompts(options.prompts // 4, options.seed),
    }
    reports = []
    for guidance in options.guidance:
        settings = {"steps": options.steps, "guidance": guidance, "batch": options.batch, "seed": options.seed}
        report: dict[str, object] = {"prompts": options.prompts, "device": options.device, **settings}
        shown = [draw(pipe, list(DEMO_PROMPTS), **settings)]
        for kind, prompts in kinds.items():
            if not prompts:
                continue
            begin = time.monotonic()
            images = draw(pipe, [prompt.text for prompt in prompts], **settings)
            if kind == "held_out_pairs":
                report[kind] = shares({"both_top5": match_pairs(images, prompts, embedding)})
            else:
                hits = asdict(match(images, prompts, embedding))
                report[kind] = shares(hits)
                report[f"{kind}_by_tone"] = by_tone(hits, prompts)
            shown.append(images[:16])
            print(f"guidance {guidance:g}, {kind}: {report[kind]} ({time.monotonic() - begin:.1f} s)", flush=True)
        reports.append(report)
        grid = options.grid or options.out / "evaluation.png"
        save_grid(torch.cat(shown), grid.with_stem(f"{grid.stem}-g{guidance:g}"))
    file = options.out / "metrics.json"
    file.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    print(f"{file} written")


if __name__ == "__main__":
    main()
