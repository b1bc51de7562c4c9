"""What each rank of a test's job runs, where something is unlike on one of them, or fails half-way."""

from __future__ import annotations

import os

import torch
from cases import CPU, built
from torch import distributed as dist

from pipelines import CASES, call
from rocm_sd.engine.levels import decision
from rocm_sd.engine.vae import planned
from rocm_sd.errors import JobFailed
from rocm_sd.parallel import parallel_report, parallelize, parallelizing, unparallelize
from rocm_sd.parallel.ranks import join

PLACES = (decision, planned, parallelizing)


def drawn(pipe, seed=0):
    with torch.no_grad():
        return call(pipe, CASES["sd15"], seed, num_inference_steps=2, output_type="pt")


def memory_case(plan, level):
    """The last rank has next to no memory left."""
    join(CPU)
    pipe, kept = built("sd15"), decision.free_memory
    alone = drawn(pipe)
    free = 2**20 if dist.get_rank() == dist.get_world_size() - 1 else 2**40
    for place in PLACES:
        place.free_memory = lambda _: free
    try:
        parallelize(pipe, plan, level)
        split, said = drawn(pipe), str(parallel_report(pipe))
    finally:
        for place in PLACES:
            place.free_memory = kept
    unparallelize(pipe)
    return {"alone": alone, "split": split, "said": said, "again": drawn(pipe), "left": len(decision._AGREED)}


def half_way_case():
    """The second model of a pipeline cannot be split any more."""
    pipe, split = built("sd15-controlnet"), []
    before = {name: type(module) for name, module in pipe.unet.named_modules()}
    install = parallelizing._INSIDE["tensor"]

    def fails(model, ranks, weights):
        if split:
            raise ValueError("it does not fit")
        split.append(model)
        return install(model, ranks, weights)

    parallelizing._INSIDE["tensor"] = fails
    try:
        parallelize(pipe, "tensor")
    except ValueError as error:
        after = {name: type(module) for name, module in pipe.unet.named_modules()}
        return str(error), split == [pipe.unet], before == after, pipe in parallelizing._PARALLEL
    finally:
        parallelizing._INSIDE["tensor"] = install


def groups_case():
    """How many process groups there are after a pipeline was split once, and once more, and more often."""
    pipe, counts = built("sd15"), []
    for plan in ("patch", "patch", "cfg", "patch", "cfg"):
        parallelize(pipe, plan)
        # Rows for one rank alone, and for both: groups of the first of them.
        drawn(pipe)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    unparallelize(pipe)
    return counts, os.environ["RANK"]


def seeds_case(plan):
    """Each rank with the seed of its number; and once more with the same, which the error has left intact."""
    pipe = parallelize(built("sd15"), plan)
    try:
        drawn(pipe, seed=dist.get_rank())
    except JobFailed as error:
        return str(error), drawn(pipe)
