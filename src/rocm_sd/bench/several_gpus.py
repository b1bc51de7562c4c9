"""A workload on several GPUs, in one interleaved run: stock on one rank, rocm-sd on one, and rocm-sd on all of them.

    measure(workload, "auto", repeats=20, command="rocm-sd bench sd15-512 --gpus 2")

Every rank of a job calls it alike. While one rank draws by itself, the others wait. What each way draws is first
compared with float64, on every rank that draws it, and a wrong one is not timed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import engine, numerics
from rocm_sd.bench.gate import STEPS, WRONG, free_memory
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import OURS, STOCK, now
from rocm_sd.bench.several_gpus_record import TOGETHER, WAYS, GpusRecord, Way
from rocm_sd.measuring import Stopwatch, interleaved, settled
from rocm_sd.parallel import parallel_report, parallelize, share_out
from rocm_sd.parallel.sharing import everybody

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rocm_sd.bench.turns import Progress
    from rocm_sd.bench.workloads import Workload
    from rocm_sd.parallel import Ranks

    # Latents of every seed, and their pictures.
    Drawn = tuple[torch.Tensor, torch.Tensor]

__all__ = ["PATIENCE", "JobStopwatch", "judged", "measure"]

# The others wait while rank 0 draws in float64, by layers where there is no room: on a slow card that takes hours. A
# rank that is gone ends the job all the same.
PATIENCE = timedelta(hours=12)

# Compared together, as many as the tests of the strategies draw: the largest error of one picture alone is by chance up
# to 2.1 times stock's where the rms is at most 1.4 times (a small model, 24 seeds of each plan on two ranks).
_SEEDS = (0, 1, 2, 3)
# The gate has drawn some before; the clock that ends other warm-ups would end them at different times on the ranks.
_MOST_WARM_UPS = 5


class JobStopwatch(Stopwatch):
    """Every rank calls it alike. A time is the slowest rank's, from when all of them are ready."""

    def __init__(self, device: torch.device, world: Ranks) -> None:
        super().__init__(device)
        self._world = world

    def milliseconds(self, call: Callable[[], object]) -> float:
        self._world.agree(None)
        # A short call has no second try, as it has in one process: others take part in it.
        return float(max(self._world.agree(self._once(call))))


def measure(
    workload: Workload, plan: str, *, repeats: int, command: str, progress: Progress | None = None
) -> GpusRecord:
    """The same record on every rank."""
    world = everybody()
    leads = world.rank == 0
    told = _teller(len(WAYS) * (2 + repeats) + 1, progress)
    told("exact pictures")
    exact = _exact(workload) if leads else None
    free_memory()
    # Before the others are there: a plan is chosen by the memory that is free.
    world.agree(None)
    pipes = {TOGETHER: parallelize(workload.pipeline(), plan=plan)}
    said = parallel_report(pipes[TOGETHER])
    told(f"{TOGETHER}, compared with exact")
    drawn = {TOGETHER: world.agree(_drawn(workload, pipes[TOGETHER]))}
    ways: dict[str, Way] = {}
    if exact is not None:
        pipes |= {STOCK: workload.pipeline(), OURS: engine.optimize(workload.pipeline())}
        for name in (STOCK, OURS):
            told(f"{name}, compared with exact")
            drawn[name] = [_drawn(workload, pipes[name])]
        ways = judged(drawn, exact)
    ways = world.agree(ways)[0]
    pictures = world.size if "data" in said.plan.dims else 1
    calls = _calls(workload, pipes, pictures, leads=leads)
    calls = {name: calls[name] for name in WAYS if ways[name].left_out is None}
    stopwatch = JobStopwatch(workload.device, world)
    for name, call in calls.items():
        told(f"{name}, warming up")
        settled(call, stopwatch, most=_MOST_WARM_UPS, budget_s=math.inf)
    before = Counter(said.traffic.sent)
    times = interleaved(calls, stopwatch, repeats=repeats, before=told)
    sent: Counter[str] = sum(world.agree(said.traffic.sent - before), Counter())
    return GpusRecord(
        workload.facts, machine(workload.device), command, now(),
        tuple(world.agree(machine(workload.device).device)), str(said.plan), said.plan.why, said.link, pictures,
        tuple(replace(ways[name], ms=tuple(times.get(name, ()))) for name in WAYS),
        {name: bytes_ / (repeats * pictures) for name, bytes_ in sorted(sent.items())},
    )  # fmt: skip


def _teller(total: int, progress: Progress | None) -> Callable[[str], None]:
    done = iter(range(total + 1))

    def told(what: str) -> None:
        if progress is not None:
            progress(next(done, total), total, what)

    return told


def _exact(workload: Workload) -> Drawn:
    try:
        return _drawn(workload, workload.pipeline(torch.float64))
    except Exception as error:
        if not engine.is_out_of_memory(error):
            raise
    # A card with room for the model in half precision need not have it in float64.
    free_memory()
    return _drawn(workload, workload.pipeline(torch.float64, by_layers=True))


def _drawn(workload: Workload, pipe: Any) -> Drawn:
    draw = partial(workload.picture, pipe, 1, steps=min(STEPS, workload.facts.steps))

    def of_every_seed(output: str) -> torch.Tensor:
        return torch.stack([draw(seed=seed, output=output).detach().cpu() for seed in _SEEDS])

    return of_every_seed("latent"), of_every_seed("pt")


def judged(drawn: Mapping[str, Sequence[Drawn]], exact: Drawn) -> dict[str, Way]:
    """Each way by what every rank has drawn with it, without its times; `left_out` where one of them is wrong."""
    (stock,) = drawn[STOCK]
    found = {}
    for name, by_rank in drawn.items():
        way = Way(name, len(by_rank))
        for rank, one in enumerate(by_rank):
            latents, pictures = (numerics.compare(*each) for each in zip(one, exact, stock, strict=True))
            if math.isfinite(latents.rms) and latents.rms >= (way.error or 0.0):
                way = replace(way, error=latents.rms, stock_error=latents.stock_rms)
            for what, comparison in (("latents", latents), ("pictures", pictures)):
                if not comparison.ok and way.left_out is None:
                    of = f" of rank {rank}" if len(by_rank) > 1 else ""
                    way = replace(way, left_out=f"{WRONG}: {what}{of}: {comparison}")
        found[name] = way
    return found


def _calls(
    workload: Workload, pipes: Mapping[str, Any], pictures: int, *, leads: bool
) -> dict[str, Callable[[], object]]:
    """What a turn of each way does on this rank."""
    draw = partial(workload.picture, batch=1)

    def alone(name: str) -> None:
        if leads:
            for _ in range(pictures):
                draw(pipes[name])

    def together() -> object:
        pipe = pipes[TOGETHER]
        # A figure of a picture is there when the picture is; pictures stay on the rank that has drawn them.
        return draw(pipe) if pictures == 1 else share_out(pictures, lambda _: float(draw(pipe).mean()), pipe)

    return {STOCK: partial(alone, STOCK), OURS: partial(alone, OURS), TOGETHER: together}
