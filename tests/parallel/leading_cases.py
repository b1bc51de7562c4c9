"""What each rank of a test's job runs: rank 0 leads, and the others follow."""

from __future__ import annotations

import os
import time

import torch
from cases import CPU, inputs_of, model_of
from torch import distributed as dist
from torch import nn

from rocm_sd.parallel import leading
from rocm_sd.parallel.ranks import Ranks, Traffic, join


class Together(nn.Module):
    """The sum over ranks; one that meets -1 fails everywhere before it has sent anything, and -2 on rank 1 alone."""

    def __init__(self, traffic):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.ranks, self.seen = Ranks("sum", dist.group.WORLD, traffic), []

    def forward(self, x, times=1, more=None):
        self.seen.append((tuple(x.shape), x.dtype, times, None if more is None else more["state"].shape))
        if x.flatten()[0] == -1 or (x.flatten()[0] == -2 and dist.get_rank() == 1):
            raise ValueError("it does not fit")
        if x.flatten()[0] == -2:
            # As on a GPU: the host goes on while the others are waited for.
            return x
        return self.ranks.add(x * times * self.weight)


def _ranks(folder, modules, traffics, lead, on_told=lambda _value: None):
    place = folder / "ranks"
    if dist.get_rank():
        return leading.follow(modules, traffics, leading.connect(place), CPU, on_told)
    listening = leading.listen(place)
    dist.barrier()
    wires = [leading.Connection(listening.accept()[0].detach()) for _ in range(dist.get_world_size() - 1)]
    leader = leading.Leader(modules, traffics, wires, CPU)
    try:
        return lead(leader)
    finally:
        leader.close()
        place.unlink()


def calls_case(folder):
    """Calls of two modules, in words, in tensors and with nested inputs; failures that are met by all."""
    join(CPU)
    traffic, told = Traffic(), []
    modules = [Together(traffic), Together(traffic)]
    if dist.get_rank():
        dist.barrier()

    def lead(leader):
        first, second = modules
        answers = [first(torch.ones(2, 3)), second(torch.full((4,), 2.0), 3, more={"state": torch.zeros(1, 5)})]
        leader.tell(("style", 0.5))
        try:
            first(torch.full((2,), -1.0))
        except ValueError as error:
            answers.append(str(error))
        answers.append(first(torch.tensor(1.0)))
        second.double()
        answers.append(second(torch.ones(2, dtype=torch.float64)))
        return answers, leader.failed, leader.traffic.sent["inputs"]

    found = _ranks(folder, modules, [traffic], lead, told.append)
    return found, [module.seen for module in modules], told, modules[1].weight.dtype


def alone_case(folder):
    """Rank 1 fails, and rank 0 does not: the rank ends with its error, and rank 0 hears of it at the next call."""
    join(CPU)
    leading._ALIKE_S = 0.5
    traffic = Traffic()
    modules = [Together(traffic)]
    if dist.get_rank():
        dist.barrier()

    def lead(leader):
        modules[0](torch.full((2,), -2.0))
        time.sleep(1)
        try:
            modules[0](torch.full((2,), -1.0))
        except Exception as error:  # noqa: BLE001 -- looked at by the test
            return type(error).__name__, leader.failed is error

    try:
        return _ranks(folder, modules, [traffic], lead)
    except ValueError as error:
        return f"rank {os.environ['RANK']}: {error}"


class Rows(nn.Module):
    """Each rank's neighbours have a row of it, of which those at the edges have one alone; then all fail."""

    def __init__(self, traffic):
        super().__init__()
        self.ranks = Ranks("rows", dist.group.WORLD, traffic)

    def forward(self, x):
        near = [rank for rank in (self.ranks.rank - 1, self.ranks.rank + 1) if 0 <= rank < self.ranks.size]
        self.ranks.hand_over(dict.fromkeys(near, x), {rank: torch.empty_like(x) for rank in near})
        raise ValueError("it does not fit")


def rows_case(folder):
    """A failure on every rank after an exchange; whether it is the end of the job."""
    join(CPU)
    leading._ALIKE_S = 5.0
    traffic = Traffic()
    modules = [Rows(traffic)]
    if dist.get_rank():
        dist.barrier()

    def lead(leader):
        try:
            modules[0](torch.ones(3))
        except ValueError as error:
            return str(error), leader.failed

    return _ranks(folder, modules, [traffic], lead)


def unet_case(folder):
    """A UNet by rows, and a VAE that decodes on rank 1, called by rank 0 alone."""
    from rocm_sd.parallel.patch_models import install_patches
    from rocm_sd.parallel.stages import install_owned
    from tiny_models import vae_of

    join(CPU)
    traffic = Traffic()
    model, given = model_of("sdxl"), inputs_of("sdxl", 9, 8)
    torch.manual_seed(3)
    vae = vae_of()
    with torch.no_grad():
        alone = model(**given, return_dict=False)[0], vae.decode(given["sample"], return_dict=False)[0]
        install_owned(vae, "decode", 1, vae.decoder, Ranks("pipeline", dist.group.WORLD, traffic))
        install_patches(model, Ranks("patch", dist.group.WORLD, traffic), [1.0] * dist.get_world_size())
        if dist.get_rank():
            dist.barrier()

        def lead(_leader):
            return model(**given, return_dict=False)[0], vae.decode(given["sample"], return_dict=False)[0]

        found = _ranks(folder, [model, vae], [traffic], lead)
    return alone, found
