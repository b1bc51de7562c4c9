"""Whether a picture depends on who else is drawn: random requests at random moments, each held against float64.

    python benchmarks/serve_exactness.py --out results/exactness.json [--requests 2000] [--clients 12]

Clients draw through one shared pipeline, one after the other picture, each with sizes, steps, guidance, schedulers,
seeds, start images and masks by chance, and pauses between them. Each picture is drawn again alone by stock in the
same dtype: its error against float64 is at most twice stock's, and a rounding of its pixels (one of 255). Where it is
no more than that rounding from stock's own picture, this follows. Where it is more, and of every tenth, float64 draws
as well. Ctrl-C keeps what is done, and the same command goes on there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting
from PIL import Image

import rocm_sd
from rocm_sd import models
from rocm_sd.cli.terminal import bar
from rocm_sd.engine import graphs_wanted
from rocm_sd.engine.batching import LADDER, StepBatcher
from rocm_sd.files import write_text
from rocm_sd.integrations import diffusers as host
from rocm_sd.integrations.diffusers import SCHEDULERS, Drawing, SharedPipeline
from rocm_sd.integrations.diffusers.loading import default_device, default_dtype, hush
from rocm_sd.models.emoji import trained_prompts

# Mostly two, so that many calls agree.
SIDES, SHARES = (64, 128, 96, 160), (6, 4, 1, 1)
WORDS = [prompt.text for prompt in trained_prompts(64)]


def drawing_of(number: int) -> Drawing:
    """The same for the same number."""
    chance = random.Random(number)  # noqa: S311 -- nothing is kept secret by it
    task = chance.choices(("text", "image", "inpaint"), (6, 2, 2))[0]
    width, height = chance.choices(SIDES, SHARES, k=2)
    given = {"width": width, "height": height}
    if task != "text":
        pixels = np.random.default_rng(number).integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        given["image"] = Image.fromarray(pixels).resize((width, height))
    if task == "inpaint":
        given["mask"] = Image.new("L", (width, height), 0)
        given["mask"].paste(255, (width // 2, 0, width, height))
    given["scheduler"] = chance.choice((None, *sorted(set(SCHEDULERS) - {"lcm"})))
    given |= {"negative": chance.choice(("", "", "blue")), "guidance": chance.choice((1.0, 2.0, 3.0, 7.5))}
    steps, strength = chance.randint(1, 6), chance.choice((0.5, 0.75, 1.0))
    strength = strength if int(steps * strength) else 1.0
    return Drawing(chance.choice(WORDS), steps=steps, seed=chance.randint(0, 2**32), strength=strength, **given)


class Alone:
    """Stock's own pipelines, in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        text = host.load_pipeline(models.resolve(), device, dtype)
        self._pipes = {
            "text": text,
            "image": AutoPipelineForImage2Image.from_pipe(text),
            "inpaint": AutoPipelineForInpainting.from_pipe(text),
        }
        self._scheduler = text.scheduler

    def draw(self, drawing: Drawing) -> np.ndarray:
        pipe = self._pipes[drawing.task]
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = type(self._scheduler).from_config(self._scheduler.config)
        if drawing.scheduler is not None:
            host.set_scheduler(pipe, drawing.scheduler)
        given = {"width": drawing.width, "height": drawing.height} if drawing.task != "image" else {}
        given |= {} if drawing.image is None else {"image": drawing.image, "strength": drawing.strength}
        given |= {} if drawing.mask is None else {"mask_image": drawing.mask}
        made = pipe(
            drawing.prompt, negative_prompt=drawing.negative, num_inference_steps=drawing.steps,
            guidance_scale=drawing.guidance, generator=torch.Generator().manual_seed(drawing.seed), **given,
        ).images[0]  # fmt: skip
        return np.asarray(made).astype(int)


@contextmanager
def noise_of(dtype: torch.dtype):
    """Runs in float64 draw the noise that a run in `dtype` draws."""
    own = torch.randn

    def drawn(*size, dtype=None, **named):
        return own(*size, dtype=used, **named).double() if dtype is torch.float64 else own(*size, dtype=dtype, **named)

    used = dtype
    torch.randn = drawn
    try:
        yield
    finally:
        torch.randn = own


def drawn_together(numbers: list[int], clients: int, device: torch.device, told) -> tuple[dict[int, np.ndarray], list]:
    """Every picture, by clients that each take the next one; and what was run at once."""
    batches: list = []
    batcher = StepBatcher(device, most=16, ladder=LADDER if graphs_wanted(device) else (), on_batch=batches.append)
    pipe = rocm_sd.optimize(host.load_pipeline(models.resolve(), device))
    shared = SharedPipeline(pipe, batcher)
    left, found, lock = list(reversed(numbers)), {}, threading.Lock()

    def client(own: int) -> None:
        pause = random.Random(own)  # noqa: S311 -- as above
        while True:
            with lock:
                if not left:
                    return
                number = left.pop()
            time.sleep(pause.random() * 0.05)
            made = np.asarray(shared.draw(drawing_of(number))).astype(int)
            with lock:
                found[number] = made
                told(len(found))

    threads = [threading.Thread(target=client, args=(own,)) for own in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batcher.close()
    shared.close()
    rocm_sd.restore(pipe)
    return found, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=200, help="requests between two savings")
    parser.add_argument("--device")
    options = parser.parse_args()
    hush()
    device = default_device(options.device)
    dtype = default_dtype(device)
    stock, exact = Alone(device, dtype), Alone(device, torch.float64)
    record = {
        "command": f"python benchmarks/serve_exactness.py --requests {options.requests} --clients {options.clients}",
        "model": "emoji-sd", "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "dtype": str(dtype), "rocm_sd": rocm_sd.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "steps run": 0, "pictures a step": 0.0, "requests": [],
    }  # fmt: skip
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    with bar("requests", options.requests) as update:
        while len(record["requests"]) < options.requests:
            done = len(record["requests"])
            numbers = list(range(done, min(done + options.at_once, options.requests)))
            found, batches = drawn_together(
                numbers, options.clients, device, lambda count, done=done: update(completed=done + count / 2)
            )
            for number in numbers:
                drawing = drawing_of(number)
                theirs = stock.draw(drawing)
                beside = int(abs(found[number] - theirs).max())
                said = {"task": drawing.task, "steps": drawing.steps, "scheduler": drawing.scheduler, "apart": beside}
                within = beside <= 1
                if not within or number % 10 == 0:
                    with noise_of(dtype):
                        right = exact.draw(drawing)
                    ours, usual = (int(abs(each - right).max()) for each in (found[number], theirs))
                    said |= {"ours": ours, "stock": usual}
                    within = ours <= 2 * usual + 1
                record["requests"].append(said | {"within": within})
                update(completed=done + len(numbers) / 2 + (number - done) / 2)
            before, steps = record["pictures a step"] * record["steps run"], record["steps run"] + len(batches)
            record["steps run"] = steps
            record["pictures a step"] = round((before + sum(each.pictures for each in batches)) / steps, 3)
            rows = record["requests"]
            record["within"] = sum(row["within"] for row in rows)
            record["farthest from stock"] = max(row["apart"] for row in rows)
            judged = [row for row in rows if "ours" in row]
            record["judged by float64"] = len(judged)
            record["largest error"] = max(row["ours"] for row in judged)
            record["stock's largest error"] = max(row["stock"] for row in judged)
            write_text(options.out, json.dumps(record, indent=None) + "\n")
    errors = record["largest error"], record["stock's largest error"]
    print(f"farthest from stock's own picture: {record['farthest from stock']} of 255")
    print(
        f"{record['within']} of {len(record['requests'])} within the rule; {record['pictures a step']} pictures a step"
    )
    print(f"largest error {errors[0]} of 255, stock's {errors[1]}")
    if record["within"] < len(record["requests"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
