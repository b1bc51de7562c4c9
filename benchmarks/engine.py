"""Time whole pictures: rocm-sd beside stock Diffusers and torch.compile, in one run on one GPU, numerics first.

python benchmarks/engine.py --model sd15 --out results [--batch 1] [--no-compile] [--profile] [--tiny]

The weights are random, of the real architectures: speed does not depend on them. Every engine runs the same Diffusers
pipeline with the same weights, prompt embeddings and seeds. rocm-sd comes first and with an empty kernel cache, so its
time to the first picture has everything in it. Nothing is timed before the latents were compared with a float32 run.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="kernels-"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

import rocm_sd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16 if DEVICE.type == "cuda" else torch.float32
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SCHEDULERS = {
    "DDIM": lambda: DDIMScheduler(clip_sample=False, **NOISE),
    "Euler": lambda: EulerDiscreteScheduler(**NOISE),
    "DPM++ 2M": lambda: DPMSolverMultistepScheduler(**NOISE),
}
UNETS = {
    "sd15": {
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 2048,
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 512,
    # The weights that overflow in float16 are real ones; without this, stock would decode in float32.
    "force_upcast": False,
}
TINY = {"block_out_channels": (32, 64, 64, 64), "attention_head_dim": 8, "cross_attention_dim": 32, "sample_size": 16}
WORKLOADS = {"sd15": ("DDIM", 50, 7.5), "sdxl": ("Euler", 20, 8.0)}


class Workload:
    """One model at one batch size, and its pipelines, which all have the same weights."""

    def __init__(self, model, batch, *, tiny=False, whole_pipeline=False):
        torch.manual_seed(0)
        self.model, self.batch, self.tiny, self.whole_pipeline = model, batch, tiny, whole_pipeline
        self.scheduler, self.steps, self.guidance = WORKLOADS[model]
        unet, vae = dict(UNETS[model]), dict(VAE)
        if tiny:
            self.steps = 4
            unet.update(TINY if model == "sd15" else {"block_out_channels": (32, 64, 64), "sample_size": 16})
            unet.update(attention_head_dim=8, cross_attention_dim=32, transformer_layers_per_block=1)
            vae.update(block_out_channels=(32, 32, 64, 64), sample_size=64)
        # In the dtype that is timed, so that the float32 run has the very same weights.
        with DEVICE:
            self.unet = UNet2DConditionModel(**unet).eval().requires_grad_(False).to(DTYPE)
            self.vae = AutoencoderKL(latent_channels=4, **vae).eval().requires_grad_(False).to(DTYPE)
        self.side = unet["sample_size"] * 8
        self.text = torch.randn(2, batch, 77, unet["cross_attention_dim"], device=DEVICE)
        self.pooled = torch.randn(2, batch, 1280, device=DEVICE)

    def pipeline(self, dtype=DTYPE):
        unet, vae = (copy.deepcopy(part).to(dtype) for part in (self.unet, self.vae))
        scheduler = SCHEDULERS[self.scheduler]()
        if self.model == "sdxl":
            pipe = StableDiffusionXLPipeline(vae, None, None, None, None, unet, scheduler)
        else:
            pipe = StableDiffusionPipeline(vae, None, None, unet, scheduler, None, None, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def picture(self, pipe, seed=0, steps=None, output="pt"):
        """The loop that the published baselines were measured with, or the pipeline's own call."""
        # The noise is float32 on the host, so that every engine and dtype starts from the same.
        latents = torch.randn(self.batch, 4, self.side // 8, self.side // 8, generator=torch.manual_seed(seed))
        latents = latents.to(DEVICE, pipe.unet.dtype)
        run = self._pipeline_call if self.whole_pipeline else self._loop
        return run(pipe, latents, steps or self.steps, output)

    @torch.no_grad()
    def _loop(self, pipe, latents, steps, output):
        dtype = latents.dtype
        text, added = self.text.flip(0).flatten(0, 1).to(dtype), None
        if self.model == "sdxl":
            sizes = torch.tensor([[self.side, self.side, 0, 0, self.side, self.side]] * (2 * self.batch), device=DEVICE)
            added = {"text_embeds": self.pooled.flip(0).flatten(0, 1).to(dtype), "time_ids": sizes.to(dtype)}
        pipe.scheduler.set_timesteps(steps, device=DEVICE)
        latents = latents * pipe.scheduler.init_noise_sigma
        for t in pipe.scheduler.timesteps:
            both = pipe.scheduler.scale_model_input(torch.cat([latents, latents]), t)
            noise = pipe.unet(both, t, encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False)[0]
            uncond, cond = noise.chunk(2)
            guided = uncond + self.guidance * (cond - uncond)
            latents = pipe.scheduler.step(guided, t, latents, return_dict=False)[0]
        return latents if output == "latent" else pipe.vae.decode(latents / 0.18215, return_dict=False)[0]

    def _pipeline_call(self, pipe, latents, steps, output):
        dtype = latents.dtype
        given = {"prompt_embeds": self.text[0].to(dtype), "negative_prompt_embeds": self.text[1].to(dtype)}
        if self.model == "sdxl":
            given["pooled_prompt_embeds"] = self.pooled[0].to(dtype)
            given["negative_pooled_prompt_embeds"] = self.pooled[1].to(dtype)
        return pipe(
            **given,
            latents=latents,
            num_inference_steps=steps,
            guidance_scale=self.guidance,
            height=self.side,
            width=self.side,
            output_type=output,
        ).images


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(call):
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - started) * 1e3


def compiled(work):
    pipe = work.pipeline()
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)
    pipe.unet.forward = torch.compile(pipe.unet.forward, mode="reduce-overhead", fullgraph=True)
    pipe.vae.decode = torch.compile(pipe.vae.decode, mode="reduce-overhead", fullgraph=True)
    return pipe


ENGINES = {
    "rocm-sd": lambda work: rocm_sd.optimize(work.pipeline()),
    "stock": lambda work: work.pipeline(),
    "compile": compiled,
}


class Engine:
    """A pipeline, how long its first picture took, and its peak memory above what else is there, weights included."""

    def __init__(self, name, work):
        self.name, self.work = name, work
        synchronize()
        if DEVICE.type == "cuda":
            # Of memory that others left in larger pieces, each weight would be counted with its rest.
            torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        started = time.perf_counter()
        self.pipe = ENGINES[name](work)
        self.built_s = time.perf_counter() - started
        self.peak = None
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.first_s = milliseconds(lambda: work.picture(self.pipe)) / 1e3
        self.second_s = milliseconds(lambda: work.picture(self.pipe)) / 1e3
        # Captures are in the second picture at the latest: the peak has them in it.
        milliseconds(lambda: work.picture(self.pipe))
        if DEVICE.type == "cuda":
            self.peak = (torch.cuda.max_memory_allocated() - before) / 2**20

    def to_dict(self):
        return {
            "engine": self.name,
            "optimize_s": self.built_s,
            "first_picture_s": self.first_s,
            "second_picture_s": self.second_s,
            "peak_MiB": self.peak,
        }


def exactness(work, ours, stock, seeds, steps):
    """Errors of the final latents against float32, of ours and of stock, each over every seed and scheduler."""
    torch.backends.cudnn.allow_tf32 = False
    exact_pipe = work.pipeline(torch.float32 if torch.float16 == DTYPE else torch.float64)
    rows = []
    for name, make in SCHEDULERS.items():
        kept = [pipe.scheduler for pipe in (ours, stock)]
        ours.scheduler, stock.scheduler, exact_pipe.scheduler = make(), make(), make()
        for seed in range(seeds):
            exact = work.picture(exact_pipe, seed, steps, "latent").double()
            errors = [
                float((work.picture(pipe, seed, steps, "latent").double() - exact).norm() / exact.norm())
                for pipe in (ours, stock)
            ]
            rows.append({"scheduler": name, "seed": seed, "error": errors[0], "stock_error": errors[1]})
        ours.scheduler, stock.scheduler = kept
    torch.backends.cudnn.allow_tf32 = True
    return rows


def timed(engines, repeats):
    """Milliseconds a picture, the engines in turns."""
    times = {engine.name: [] for engine in engines}
    for _ in range(repeats):
        for engine in engines:
            times[engine.name].append(milliseconds(lambda: engine.work.picture(engine.pipe)))  # noqa: B023
    return times


def ratios(times, of="rocm-sd"):
    """Of each other engine's time to ours, turn by turn: the median and the quartiles."""
    told = {}
    for name, values in times.items():
        if name != of:
            each = sorted(theirs / ours for theirs, ours in zip(values, times[of], strict=True))
            told[name] = [each[len(each) // 4], statistics.median(each), each[3 * len(each) // 4]]
    return told


def profiled(work, pipe, out, name):
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 -- only where it is asked for

    work.picture(pipe, steps=4)
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work.picture(pipe, steps=4)
        synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.device_time_total)
    lines = [f"{row.device_time_total:10.0f} us {row.count:6d} {row.key[:140]}" for row in rows[:60]]
    (out / f"profile-{name}.txt").write_text("\n".join(lines) + "\n")


def machine():
    facts = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
    if DEVICE.type == "cuda":
        import triton  # noqa: PLC0415

        facts.update(gpu=torch.cuda.get_device_name(), triton=triton.__version__, cuda=torch.version.cuda,
                     hip=torch.version.hip, cudnn=torch.backends.cudnn.version())  # fmt: skip
    return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=UNETS, default="sd15")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5, help="for the comparison with float32; 0 leaves it out")
    parser.add_argument("--exact-steps", type=int, default=20)
    parser.add_argument(
        "--pipeline", action="store_true", help="time the pipeline's call, not the loop of the baselines"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script without a GPU")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rocm_sd").setLevel(logging.INFO)
    work = Workload(arguments.model, arguments.batch, tiny=arguments.tiny, whole_pipeline=arguments.pipeline)
    names = [name for name in ENGINES if not (name == "compile" and arguments.no_compile)]
    told = f"{arguments.model}, {work.side}x{work.side}, {work.steps} steps {work.scheduler}, batch {arguments.batch}"
    result = {
        "workload": f"{told}, guidance {work.guidance}, {DTYPE}",
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]).replace(str(arguments.out), "results"),
        "engines": [],
    }
    target = arguments.out / f"engine-{arguments.model}-b{arguments.batch}.json"

    def keep():
        target.write_text(json.dumps(result, indent=2) + "\n")

    engines = []
    for name in names:
        engines.append(Engine(name, work))
        result["engines"].append(engines[-1].to_dict())
        print(json.dumps(result["engines"][-1]), flush=True)
        keep()
        if name == "stock":
            ours, stock = engines[0].pipe, engines[1].pipe
            if arguments.seeds:
                result["exactness"] = rows = exactness(work, ours, stock, arguments.seeds, arguments.exact_steps)
                total = (
                    sum(row["error"] ** 2 for row in rows) ** 0.5 / sum(row["stock_error"] ** 2 for row in rows) ** 0.5
                )
                result["error_against_stock"] = total
                worst = max(row["error"] / row["stock_error"] for row in rows)
                print(f"error {total:.3f} of stock's over all, {worst:.3f} at worst", flush=True)
                if not worst <= 1.5:
                    keep()
                    raise SystemExit("rocm-sd's error is more than 1.5 times stock's: nothing is timed")
    if arguments.profile:
        profiled(work, ours, arguments.out, f"{arguments.model}-b{arguments.batch}")
    times = timed(engines, arguments.repeats)
    result["ms"] = {name: [min(t), statistics.median(t), max(t)] for name, t in times.items()}
    result["times_as_fast"] = ratios(times)
    result["report"] = list(rocm_sd.report(ours).notes)
    keep()
    print(json.dumps({"ms": result["ms"], "times_as_fast": result["times_as_fast"]}), flush=True)
    print("\n".join(result["report"]))


if __name__ == "__main__":
    main()
