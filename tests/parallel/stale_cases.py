"""Rows that are a step old, as each rank of a test's job runs them; and their definition, in one process."""

from __future__ import annotations

import os

import torch
from cases import built, emoji, mesh_of
from torch.nn import functional as F

from pipelines import CASES, call
from rocm_sd.engine import Approximation
from rocm_sd.numerics import compare
from rocm_sd.parallel import parallel_report, parallelize, unparallelize
from rocm_sd.parallel.patch import PatchMode
from rocm_sd.parallel.ranks import Traffic, along
from rocm_sd.parallel.rows import deal
from rocm_sd.parallel.sharing import everybody
from rocm_sd.parallel.stale import StaleExchanges


def _weight(dtype):
    return torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(1)).to(dtype) / 8


def _attended(x):
    pixels = x.flatten(2).transpose(1, 2).unsqueeze(1)
    seen = F.scaled_dot_product_attention(pixels, pixels, pixels).squeeze(1)
    return seen.transpose(1, 2).unflatten(2, (-1, x.shape[3]))


# Each looks beyond its own rows in its own way.
OPERATIONS = (
    lambda x: F.conv2d(x, _weight(x.dtype), padding=1),
    lambda x: F.group_norm(x, 2),
    _attended,
)


def samples(count, height=9, width=5, dtype=torch.float64):
    chance = torch.Generator().manual_seed(5)
    first = torch.randn(2, 8, height, width, generator=chance)
    changes = [0.3 * torch.randn(2, 8, height, width, generator=chance) for _ in range(count)]
    return [(first + sum(changes[:number], torch.zeros(()))).to(dtype) for number in range(count)]


def defined(calls, rows, late):
    """By each operation, what every rank has of its own rows, where those of the others are of the call before."""
    before, answers = None, []
    for x, is_late in zip(calls, late, strict=True):
        seen, now = [], x
        for place, operation in enumerate(OPERATIONS):
            seen.append(now)
            parts = []
            for rank in range(len(rows.counts)):
                begin, end = rows.of(rank)
                mixed = (before[place] if is_late else now).clone()
                mixed[:, :, begin:end] = now[:, :, begin:end]
                parts.append(operation(mixed)[:, :, begin:end])
            now = torch.cat(parts, 2)
        before = seen
        answers.append(now)
    return answers


def exchanges_case(late, last=(), fails_at=None):
    """Calls of the operations above, some of them late; each with its definition. One call may fail half-way."""
    mesh = mesh_of(patch=2)
    ranks, traffic = along(mesh, "patch", Traffic()), Traffic()
    ranks.traffic = traffic
    rows = deal(9, 0, [1.0, 1.0])
    stale, answers, sent = StaleExchanges(ranks), [], []
    for number, x in enumerate(samples(len(late), dtype=torch.float32)):
        stale.begin(late=late[number], last=number in last)
        mode = PatchMode(ranks, rows, stale)
        part = mode.own(x)
        with mode:
            for operation in OPERATIONS[: 2 if number == fails_at else None]:
                part = operation(part)
        answers.append(mode.whole(part))
        sent.append(traffic.times["patch"])
    stale.forget()
    exact, alone = (defined(samples(len(late), dtype=dtype), rows, late) for dtype in (torch.float64, torch.float32))
    found = [compare(*each) if number != fails_at else None
             for number, each in enumerate(zip(answers, exact, alone, strict=True))]  # fmt: skip
    return {"found": found, "answers": answers, "sent": sent}


def drawn(pipe, steps, size=128, seeds=range(2)):
    options = {"num_inference_steps": steps, "height": size, "width": size, "guidance_scale": 3.0, "output_type": "np"}
    made = []
    for seed in seeds:
        noise = torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(seed))
        latents = noise.to(pipe.unet.dtype) * pipe.scheduler.init_noise_sigma
        made.append(torch.from_numpy(pipe("a red apple", latents=latents, **options).images))
    return torch.cat(made)


def emoji_case(plan, steps, stale_after):
    """Twice with stale rows and once in float64, which is their definition; with rows that every step waits for."""
    quality = Approximation(stale_after=stale_after)
    with torch.no_grad():
        exact = drawn(parallelize(emoji(torch.float64), plan, quality=quality), steps)
        pipe = emoji()
        alone = drawn(pipe, steps)
        waited = drawn(parallelize(pipe, plan), steps)
        parallelize(pipe, plan, quality=quality)
        stale = [drawn(pipe, steps) for _ in range(2)]
        said = str(parallel_report(pipe))
        unparallelize(pipe)
        again = drawn(pipe, steps)
    return {"exact": exact, "alone": alone, "waited": waited, "stale": stale, "said": said, "again": again}


def small_case():
    """A picture whose smallest level has a row for one rank alone."""
    with torch.no_grad():
        pipe = parallelize(emoji(), "patch", quality=Approximation(stale_after=1))
        picture = drawn(pipe, 3, size=64, seeds=[0])
    return picture, str(parallel_report(pipe))


def pipeline_case(name, plan, stale_after, options):
    with torch.no_grad():
        pipe = built(name)
        alone = call(pipe, CASES[name], **options)
        parallelize(pipe, plan, quality=Approximation(stale_after=stale_after))
        stale = [call(pipe, CASES[name], **options) for _ in range(2)]
        said = str(parallel_report(pipe))
    return {"alone": alone, "stale": stale, "said": said}


def search_case(budgets, speedup, cache):
    """`tune --quality --gpus` on two prompts, where a timing comes out as given; what is found is used by its name."""
    from rocm_sd.bench.stale_search import StaleSearcher
    from rocm_sd.cli.tune_quality import _keep
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.quality.budget import parse_budget

    mesh_of(patch=2)
    os.environ["ROCM_SD_CACHE"] = cache
    pipe = emoji()
    requests = [host.Request(text, steps=8, width=128, height=128) for text in ("a red apple", "a frog")]
    StaleSearcher._speedup = lambda *_: speedup
    with torch.no_grad():
        searcher = StaleSearcher(pipe, "patch", requests, None, lambda _: None)
        found = {name: searcher.search(parse_budget(name)[1]) for name in budgets}
        for name, one in found.items():
            if os.environ["RANK"] == "0":
                _keep(pipe.unet, name, parse_budget(name)[1], 8, 2, one, searcher)
        everybody().agree(None)
        said = {}
        for name in budgets:
            parallelize(pipe, "patch", quality=name)
            drawn(pipe, 8, seeds=[0])
            said[name] = str(parallel_report(pipe))
        unparallelize(pipe)
    return found, said
