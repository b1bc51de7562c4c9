"""What each rank of a test's job runs; each has the same model from the same seed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from pipelines import CASES, call, exactly
from rocm_sd.numerics import compare
from rocm_sd.parallel import parallel_report, parallelize, ranks, share_out, unparallelize
from rocm_sd.parallel.batch import install_batch
from rocm_sd.parallel.patch_models import install_patches
from rocm_sd.parallel.ranks import Traffic, along, join
from rocm_sd.parallel.stages import install_stages
from rocm_sd.parallel.tensor import install_tensor
from tiny_models import lora_of, unet_of

CPU = torch.device("cpu")
# From the inside to the outside.
STRATEGIES = {
    "tensor": install_tensor,
    "pipeline": install_stages,
    "patch": install_patches,
    "cfg": install_batch,
}


def mesh_of(**dims):
    join(CPU)
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def inputs_of(family, height, width, batch=2, dtype=torch.float32):
    chance = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(*shape, generator=chance).to(dtype)

    given = {"sample": random(batch, 4, height, width), "timestep": 7}
    given["encoder_hidden_states"] = random(batch, 16, 64 if family == "sdxl" else 32)
    if family == "sdxl":
        given["added_cond_kwargs"] = {"text_embeds": random(batch, 32), "time_ids": random(batch, 6)}
    return given


def model_of(family, dtype=torch.float32):
    torch.manual_seed(3)
    return unet_of(family).to(dtype)


@contextmanager
def products():
    """Of each convolution and linear here: how many numbers it gave, times how many were multiplied for one."""
    made, kept = [], {name: getattr(F, name) for name in ("conv2d", "linear")}
    for name, function in kept.items():

        def counted(x, weight, *rest, function=function, **named):
            answer = function(x, weight, *rest, **named)
            made.append(answer.numel() * weight[0].numel())
            return answer

        setattr(F, name, counted)
    try:
        yield made
    finally:
        for name, function in kept.items():
            setattr(F, name, function)


def unet_case(family, dims, height, width, batch=2, weights=None):
    mesh, traffic = mesh_of(**dims), Traffic()
    given = inputs_of(family, height, width, batch)
    exact = inputs_of(family, height, width, batch, torch.float64)
    with torch.no_grad():
        right = model_of(family, torch.float64)(**exact).sample
        model = model_of(family)
        alone = model(**given).sample
        installed = []
        for name, install in STRATEGIES.items():
            ranks = along(mesh, name, traffic)
            if ranks.size > 1:
                installed.append(install(model, ranks, weights or [1.0] * ranks.size))
        with products() as multiplied:
            split = [model(**given).sample for _ in range(2)]
        for each in reversed(installed):
            each.restore()
        again = model(**given).sample
    return {
        "found": compare(split[0], right, alone), "same": torch.equal(*split), "restored": torch.equal(again, alone),
        "split": split[0], "sent": dict(traffic.sent), "multiplied": sum(multiplied),
        "notes": [note for each in installed for note in each.notes()],
    }  # fmt: skip


def built(name, dtype=torch.float32):
    with tempfile.TemporaryDirectory() as folder:
        return CASES[name].build(Path(folder)).to(dtype)


def with_lora(pipe):
    tensors = lora_of(pipe.unet, "unet", ("to_q", "to_k", "to_v", "to_out.0", "net.2"), seed=4)
    pipe.load_lora_weights({key: value.to(pipe.unet.dtype) for key, value in tensors.items()})
    return pipe


def pipeline_case(name, plan, lora=False, options=None):
    """A pipeline of a small model: split, alone and in float64."""
    options = {"num_inference_steps": 2} | (options or {})
    prepare = with_lora if lora else (lambda pipe: pipe)
    with torch.no_grad():
        with exactly(torch.float32):
            exact = call(prepare(built(name, torch.float64)), CASES[name], **options)
        pipe = prepare(built(name))
        alone = call(pipe, CASES[name], **options)
        parallelize(pipe, plan)
        split = call(pipe, CASES[name], **options)
        said = parallel_report(pipe)
        words, sent = str(said), dict(said.traffic.sent)
        unparallelize(pipe)
        again = call(pipe, CASES[name], **options)
    return {"found": compare(split, exact, alone), "split": split, "restored": torch.equal(again, alone),
            "said": words, "sent": sent}  # fmt: skip


def emoji(dtype=torch.float32):
    from rocm_sd import models
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import hush

    hush()
    pipe = host.load_pipeline(models.resolve(), CPU, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe, height, width, seeds=range(4)):
    """With the noise of float32, in whatever the pipeline computes. Several pictures: errors of one are luck."""
    given = {"num_inference_steps": 2, "height": height, "width": width, "guidance_scale": 3.0, "output_type": "np"}
    made = []
    for seed in seeds:
        noise = torch.randn(1, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
        latents = noise.to(pipe.unet.dtype) * pipe.scheduler.init_noise_sigma
        made.append(torch.from_numpy(pipe("a red apple", latents=latents, **given).images))
    return torch.cat(made)


def emoji_case(plan, height=64, width=64):
    """The whole pipeline of a model with trained weights, to the pixels."""
    with torch.no_grad():
        exact = drawn(emoji(torch.float64), height, width)
        pipe = emoji()
        alone = drawn(pipe, height, width)
        parallelize(pipe, plan)
        split = drawn(pipe, height, width)
        words = str(parallel_report(pipe))
        unparallelize(pipe)
        again = drawn(pipe, height, width)
    return {"found": compare(split, exact, alone), "split": split, "restored": torch.equal(again, alone), "said": words}


def shared_case(count, slow):
    """Who drew which of them, where one rank takes ten times as long."""
    join(CPU)
    mine = int(os.environ["RANK"])

    def draw(index):
        time.sleep(0.5 if mine == slow else 0.05)
        return index * index, mine

    return share_out(count, draw)


def killed_case(who):
    """One rank is gone in the middle of a picture."""
    mesh_of(patch=int(os.environ["WORLD_SIZE"]))
    pipe = built("sd15")
    parallelize(pipe, "patch")

    def after_step(*_):
        if int(os.environ["RANK"]) == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    call(pipe, CASES["sd15"], num_inference_steps=3, callback_on_step_end=after_step)


def versions_case():
    if os.environ["RANK"] == "1":
        ranks.installed = lambda _: "0.0.9"
    join(CPU)
