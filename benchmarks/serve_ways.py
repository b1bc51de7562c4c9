"""One server of the comparison in serve_speed.py, which starts it: `python benchmarks/serve_ways.py WAY sd15-512`.

Three ways are `rocm-sd serve` itself, its queue, API and page, before another drawer: pictures that share their steps,
one at a time, and batches of whole requests. The fourth is a FastAPI app around the stock pipeline, as people write it:
a lock, a call of the pipeline, a PNG. All answer the same requests at the same address with the same JSON. Texts get
random embeddings, so that text encoders are left out of all.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import socket
import sys
import threading

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

import rocm_sd
from rocm_sd.bench import workloads
from rocm_sd.engine import calibration, graphs_wanted, optimize_with
from rocm_sd.engine.batching import LADDER, BatchDone, Gathering, StepBatcher
from rocm_sd.integrations.diffusers import Drawing, SharedPipeline
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.integrations.diffusers.shared import UNCALIBRATED
from rocm_sd.serve import Limits, ServeConfig, create_app
from rocm_sd.serve.service import ModelFacts

SHARED, ALONE, WHOLE, STOCK = WAYS = "shared steps", "one at a time", "whole requests", "plain Diffusers"
MODEL = "model"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_WARM_UP_STEPS = 4
# Whole requests are batched with those that ask for the same: they are looked for among so many times a batch.
_LOOKED_THROUGH = 8


def embedding_of(pipe, text):
    """Random numbers, for the same text always the same ones."""
    random = torch.Generator().manual_seed(len(text) * 1009 + sum(map(ord, text)))
    config, weight = pipe.unet.config, next(pipe.unet.parameters())

    def noise(*shape):
        return torch.randn(shape, generator=random).to(weight.device, weight.dtype)

    if config.addition_embed_type != "text_time":
        return (noise(1, 77, config.cross_attention_dim),)
    width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return noise(1, 77, config.cross_attention_dim), noise(1, width)


@torch.no_grad()
def called(pipe, drawings, output):
    """One call of the pipeline: all begin and end together, with the steps and the guidance of the first."""
    first, given = drawings[0], {}
    for prefix, texts in (("", [one.prompt for one in drawings]), ("negative_", [one.negative for one in drawings])):
        parts = zip(*(embedding_of(pipe, text) for text in texts), strict=True)
        for name, several in zip(("prompt_embeds", "pooled_prompt_embeds"), parts, strict=False):
            given[f"{prefix}{name}"] = torch.cat(several)
    return pipe(
        **given, num_inference_steps=first.steps, guidance_scale=first.guidance, width=first.width, height=first.height,
        output_type=output, generator=[torch.Generator().manual_seed(one.seed) for one in drawings],
    ).images  # fmt: skip


class WithoutTexts(SharedPipeline):
    def _text(self, text, _loras):
        return embedding_of(self.pipe, text)


class Way:
    """A drawer: one of the three."""

    def __init__(self, name, workload, in_flight, metrics):
        self._name, self._workload, self._metrics = name, workload, metrics
        self._batcher = StepBatcher(
            DEVICE, most=2 * in_flight, ladder=LADDER if graphs_wanted(DEVICE) else (), on_batch=metrics.batch
        )
        self._shared, self._one = WithoutTexts(_optimised(workload), self._batcher), threading.Lock()
        self._requests = Gathering("whole requests", self._draw_all, most=in_flight) if name == WHOLE else None
        self._warm_up(in_flight)

    def models(self):
        facts = self._workload.facts
        return {MODEL: ModelFacts(MODEL, facts.width, facts.height, facts.guidance, ("exact",))}

    def draw(self, _model, drawing, on_step, stop):
        if self._name == SHARED:
            return self._shared.draw(drawing, on_step, stop)
        if self._requests is not None:
            return self._requests.ask(drawing, (drawing.steps, drawing.width, drawing.height, drawing.guidance))
        with self._one:
            (image,) = self._draw_all([drawing])
            return image

    def _draw_all(self, drawings):
        self._metrics.batch(BatchDone(MODEL, len(drawings), 2 * len(drawings), 0, 0.0))
        latents = called(self._shared.pipe, drawings, "latent")
        return self._shared._decode(list(latents.split(1)))  # noqa: SLF001 -- the same decode for all

    def _warm_up(self, in_flight):
        """Each number of pictures is a graph: before the first request, not in it."""
        facts = self._workload.facts
        given = {"steps": _WARM_UP_STEPS, "width": facts.width, "height": facts.height, "guidance": facts.guidance}
        sizes = {SHARED: [size for size in LADDER if size <= in_flight], WHOLE: range(1, in_flight + 1), ALONE: [1]}
        for size in sizes[self._name]:
            drawings = [Drawing("to warm up", seed=number, **given) for number in range(size)]
            if self._name != SHARED:
                self._draw_all(drawings)
                continue
            threads = [threading.Thread(target=self._shared.draw, args=(one,)) for one in drawings]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def close(self):
        self._batcher.close()
        self._shared.close()
        if self._requests is not None:
            self._requests.close()


def _optimised(workload):
    """As `rocm-sd serve` has it: what a card is to be measured for is measured before anybody waits."""
    pipe = workload.pipeline()
    if calibration.wanted(DEVICE, graphs=graphs_wanted(DEVICE)):
        workload.picture(rocm_sd.optimize(pipe), 1, steps=_WARM_UP_STEPS)
    return optimize_with(pipe, "auto", "exact", UNCALIBRATED)


def ours(name, workload, in_flight):
    at_once = in_flight if name != WHOLE else in_flight * _LOOKED_THROUGH
    config = ServeConfig(limits=Limits(in_flight=at_once, queue=100_000, seconds=3600))
    return create_app(config, lambda _config, metrics: Way(name, workload, in_flight, metrics))


class Asked(BaseModel):
    """What the clients send that this app reads."""

    prompt: str
    size: str
    steps: int
    guidance: float
    seed: int


def plain(workload):
    """Stock Diffusers behind FastAPI."""
    pipe, lock, app = workload.pipeline(), threading.Lock(), FastAPI()

    def drawn(asked):
        width, height = map(int, asked.size.split("x"))
        drawing = Drawing(asked.prompt, "", asked.steps, asked.guidance, asked.seed, width=width, height=height)
        # The scheduler has the state of one picture.
        with lock:
            return called(pipe, [drawing], "pil")[0]

    @app.post("/v1/images/generations")
    def generate(asked: Asked) -> dict:
        png = io.BytesIO()
        drawn(asked).save(png, "PNG")
        return {"data": [{"b64_json": base64.b64encode(png.getvalue()).decode()}]}

    @app.get("/readyz")
    def ready() -> dict:
        return {"status": "ready"}

    facts = workload.facts
    drawn(Asked(prompt="to warm up", size=f"{facts.width}x{facts.height}", steps=_WARM_UP_STEPS, guidance=7.5, seed=0))
    return app


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("workload")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    # Libraries print; the address has a descriptor of its own.
    says = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # It ends with whoever started it, however that ends.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    hush()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        says.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
        says.flush()
        workload = workloads.make(options.workload, DEVICE, tiny=options.tiny)
        app = plain(workload) if options.way == STOCK else ours(options.way, workload, options.in_flight)
        uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    main()
