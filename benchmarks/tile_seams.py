"""How visible the borders of tiles are: emoji-sd's larger pictures, whole and in tiles of its own size.

Seams are gradients across the borders against those elsewhere (rocm_sd.quality.seams), of the same lines in each.

    python benchmarks/tile_seams.py --out benchmarks/tiles-emoji-cpu/seams.json [--save PICTURES]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch

import rocm_sd
from rocm_sd import models
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import now
from rocm_sd.engine import tiles_of
from rocm_sd.files import write_text
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.quality.seams import seams
from rocm_sd.quality.similarity import as_tensor

PROMPTS = ("a red apple", "a frog on a pink background")
SIDE, OVERLAPS = 192, (None, 0.0, 0.25, 0.5)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--steps", type=int, default=6)
    asked.add_argument("--save", type=Path)
    given = asked.parse_args()
    hush()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipe = host.load_pipeline(models.resolve(), device)
    rows: list[dict[str, object]] = []
    for overlap in OVERLAPS:
        # Of a whole picture, at the borders that tiles with no overlap would have.
        rocm_sd.tile(pipe, overlap=overlap or 0.0)
        own = tiles_of(pipe).borders(SIDE)
        if overlap is None:
            rocm_sd.untile(pipe)
        found = []
        for seed, prompt in enumerate(PROMPTS):
            request = host.Request(prompt, steps=given.steps, guidance=3.0, seed=seed, width=SIDE, height=SIDE)
            image = host.generate(pipe, request).images[0]
            found.append(seams(as_tensor([image]), own, own))
            if given.save:
                given.save.mkdir(parents=True, exist_ok=True)
                image.save(given.save / f"{'whole' if overlap is None else overlap}-{seed}.png")
        rows.append({"overlap": overlap, "borders": own, "seams": found, "median": statistics.median(found)})
        print(rows[-1], flush=True)
        rocm_sd.untile(pipe)
    values = {
        "what": f"emoji-sd, {SIDE}x{SIDE}, tiles of 128", "prompts": PROMPTS, "steps": given.steps, "rows": rows,
        "machine": asdict(machine(device)), "when": now(),
        "command": f"python benchmarks/tile_seams.py --steps {given.steps}",
    }  # fmt: skip
    write_text(given.out, json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
