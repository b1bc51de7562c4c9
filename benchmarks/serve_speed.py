"""How fast pictures are served: shared steps, one at a time, batches of whole requests, and plain Diffusers.

    python benchmarks/serve_speed.py --out results [--workload sd15-512] [--seconds 40] [--in-flight 8]

Weights are random (speed alone), and so are the texts' embeddings: text encoders are left out. Every way is put behind
the same queue, as `rocm-sd serve` has it. First each is measured at its limit: as many clients as it takes ask again as
soon as they are answered, and pictures a second are counted. Then shared steps and whole requests get requests at
random moments, at 0.8 of what shared steps manage, and latencies are taken from when a request was due. With `--mixed`
they ask for 40, 60, 80 or 100% of the steps, with one guidance or another: whole requests are then batched with those
that ask for the same. `--tiny` tries all of it on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import rocm_sd
from rocm_sd.bench import workloads
from rocm_sd.engine import graphs_wanted
from rocm_sd.engine.batching import LADDER, Gathering, StepBatcher
from rocm_sd.files import write_text
from rocm_sd.integrations.diffusers import Drawing, SharedPipeline
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.serve import Job, Limits, Service
from rocm_sd.serve.metrics import Metrics
from rocm_sd.serve.service import ModelFacts

if TYPE_CHECKING:
    from rocm_sd.bench.records import WorkloadFacts

SHARED, ALONE, WHOLE, STOCK = "shared steps", "one at a time", "whole requests", "plain Diffusers"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class WithoutTexts(SharedPipeline):
    """Of each text random embeddings, always the same ones."""

    def _text(self, text, _loras):
        random_ = torch.Generator().manual_seed(len(text) * 1009 + sum(map(ord, text)))
        config, weight = self.pipe.unet.config, next(self.pipe.unet.parameters())

        def noise(*shape):
            return torch.randn(shape, generator=random_).to(weight.device, weight.dtype)

        if config.addition_embed_type != "text_time":
            return (noise(1, 77, config.cross_attention_dim),)
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        return noise(1, 77, config.cross_attention_dim), noise(1, width)


class Way:
    """A drawer: one of the four."""

    def __init__(self, name, workload, in_flight):
        self.name, self.workload = name, workload
        # Of each call how many pictures it was of.
        self.together = []
        pipe = workload.pipeline()
        if name != STOCK:
            pipe = rocm_sd.optimize(pipe)
        ladder = LADDER if graphs_wanted(DEVICE) else ()
        self._batcher = StepBatcher(
            DEVICE, most=2 * in_flight, ladder=ladder, on_batch=lambda done: self.together.append(done.pictures)
        )
        self._shared, self._one = WithoutTexts(pipe, self._batcher), threading.Lock()
        self._requests = Gathering("whole requests", self._draw_all, most=in_flight) if name == WHOLE else None

    def models(self):
        facts = self.workload.facts
        return {"model": ModelFacts("model", facts.width, facts.height, facts.guidance, ("exact",))}

    def draw(self, _model, drawing, on_step, stop):
        if self.name == SHARED:
            return self._shared.draw(drawing, on_step, stop)
        if self.name == WHOLE:
            return self._requests.ask(drawing, (drawing.steps, drawing.width, drawing.height, drawing.guidance))
        with self._one:
            (image,) = self._draw_all([drawing])
            return image

    @torch.no_grad()
    def _draw_all(self, drawings):
        """One call of the pipeline: all begin and end together."""
        pipe, first = self._shared.pipe, drawings[0]
        self.together.append(len(drawings))
        texts = [self._shared._text(one.prompt, ()) for one in drawings]  # noqa: SLF001 -- as shared steps get them
        others = [self._shared._text(one.negative, ()) for one in drawings]  # noqa: SLF001 -- as above
        names = ("prompt_embeds", "pooled_prompt_embeds")
        given = {}
        for prefix, several in (("", texts), ("negative_", others)):
            for name, parts in zip(names, zip(*several, strict=True), strict=False):
                given[f"{prefix}{name}"] = torch.cat(parts)
        latents = pipe(
            **given, num_inference_steps=first.steps, guidance_scale=first.guidance, width=first.width,
            height=first.height, output_type="latent",
            generator=[torch.Generator().manual_seed(one.seed) for one in drawings],
        ).images  # fmt: skip
        return self._shared._decode(list(latents.split(1)))  # noqa: SLF001 -- the same decode for all

    def close(self):
        self._batcher.close()
        self._shared.close()
        if self._requests is not None:
            self._requests.close()


@dataclass(frozen=True)
class Requests:
    """The same ones every time, by their numbers."""

    facts: WorkloadFacts
    mixed: bool

    def __getitem__(self, number):
        facts, chance = self.facts, random.Random(number)  # noqa: S311 -- nothing is kept secret by it
        steps, guidance = facts.steps, facts.guidance
        if self.mixed:
            steps = max(1, round(steps * chance.choice((0.4, 0.6, 0.8, 1.0))))
            guidance = chance.choice((guidance, 0.8 * guidance))
        drawing = Drawing(f"a picture {number}", "", steps, guidance, number, width=facts.width, height=facts.height)
        return Job("model", (drawing,), str(number % 16))


def at_its_limit(service, requests, clients, seconds):
    """Pictures a second, and their latencies, while so many clients ask again at once."""
    ends, found, lock = time.monotonic() + seconds, [], threading.Lock()
    numbers = iter(range(10**9))

    def client():
        while time.monotonic() < ends:
            with lock:
                number = next(numbers)
            job = service.submit(requests[number])
            while not job.is_over:
                time.sleep(0.001)
            if job.error is not None:
                raise job.error
            with lock:
                found.append((job.ended, job.ended - job.created))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = sorted(found)
    span = done[-1][0] - done[0][0]
    return (len(done) - 1) / span if span else 0.0, [seconds for _, seconds in done]


def at_a_rate(service, requests, rate, seconds, seed=0):
    """Latencies of requests that come at random moments."""
    chance, due, jobs = random.Random(seed), 0.0, []  # noqa: S311 -- nothing is kept secret by it
    began = time.monotonic()
    while due < seconds:
        due += chance.expovariate(rate)
        time.sleep(max(0.0, began + due - time.monotonic()))
        jobs.append(service.submit(replace_created(requests[len(jobs)], began + due)))
    while not all(job.is_over for job in jobs):
        time.sleep(0.01)
    failed = [job.error for job in jobs if job.error is not None]
    if failed:
        raise failed[0]
    return [job.ended - job.created for job in jobs]


def replace_created(job, when):
    job.created = when
    return job


def percentiles(latencies):
    cut = statistics.quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99
    return {f"p{each}": round(cut[each - 1], 4) for each in (50, 90, 95, 99)} | {"count": len(latencies)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", action="append", help="sd15-512 and sdxl-mlperf if none is given")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--way", action="append", choices=(SHARED, ALONE, WHOLE, STOCK))
    parser.add_argument("--mixed", action="store_true", help="several numbers of steps, and two of guidance")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    hush()
    for name in options.workload or ("sd15-512", "sdxl-mlperf"):
        workload = workloads.make(name, DEVICE, tiny=options.tiny)
        requests, mixed = Requests(workload.facts, options.mixed), " --mixed" if options.mixed else ""
        record = {
            "command": f"python benchmarks/serve_speed.py --workload {name} --seconds {options.seconds:g}{mixed}",
            "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU", "workload": name,
            "steps": workload.facts.steps, "in flight": options.in_flight, "weights": "random: speed alone",
            "rocm_sd": rocm_sd.__version__, "torch": torch.__version__, "python": platform.python_version(),
            "at the limit": {}, "at 0.8": {},
        }  # fmt: skip
        limits = Limits(in_flight=options.in_flight, queue=100_000, seconds=3600)
        for way in options.way or (STOCK, ALONE, SHARED, WHOLE):
            drawer = Way(way, workload, options.in_flight)
            service = Service(drawer, limits, Metrics())
            # Graphs of every size are captured first; one at a time there is one.
            for clients in (1, 2, 3, 4, 6, options.in_flight) if way in {SHARED, WHOLE} else (1,):
                at_its_limit(service, requests, clients, 0.1 if options.tiny else 3.0)
            drawer.together.clear()
            rate, latencies = at_its_limit(service, requests, options.in_flight, options.seconds)
            pictures = statistics.mean(drawer.together)
            record["at the limit"][way] = {
                "pictures a second": round(rate, 4), "pictures a step": round(pictures, 3), **percentiles(latencies),
            }  # fmt: skip
            if way in {SHARED, WHOLE}:
                capacity = record["at the limit"].get(SHARED, {}).get("pictures a second", rate)
                record["at 0.8"][way] = {"rate": round(0.8 * capacity, 4)} | percentiles(
                    at_a_rate(service, requests, 0.8 * capacity, options.seconds)
                )
            service.close()
            print(name, way, record["at the limit"][way], record["at 0.8"].get(way, ""), flush=True)
            write_text(
                options.out / f"serve-{name}{'-mixed' if mixed else ''}.json", json.dumps(record, indent=1) + "\n"
            )
            del drawer, service
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
