"""parallelize(pipe): every process of a job calls it, and each call of the pipeline is then drawn by all of them.

torchrun --nproc-per-node 2 draw.py        # or: rocm-sd generate --gpus 2 "a frog"

pipe = rocm_sd.parallelize(pipe, device="cuda")   # in draw.py, in place of optimize, and of pipe.to("cuda")
image = pipe("a frog").images[0]                  # the same picture, on every rank
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from rocm_sd.arch.host import pci_address
from rocm_sd.arch.links import Link, slowest_link
from rocm_sd.engine import (
    EVERYTHING,
    Approximation,
    Installed,
    follow_schedule,
    free_memory,
    graphs_wanted,
    optimize_with,
    report,
    restore,
)
from rocm_sd.engine.approximation import PictureSteps, known_with_plan
from rocm_sd.engine.levels import reckon_with
from rocm_sd.engine.vae import decode_together
from rocm_sd.errors import Unsupported
from rocm_sd.parallel import sharing
from rocm_sd.parallel.batch import install_batch
from rocm_sd.parallel.graphs import install_graphs
from rocm_sd.parallel.groups import mesh_of, neighbours
from rocm_sd.parallel.homes import size_of
from rocm_sd.parallel.inputs import install_check
from rocm_sd.parallel.patch_models import Staleness, can_be_patched, install_patches
from rocm_sd.parallel.placing import SPLIT_WEIGHTS, Seat, fullest, of_others, part_of, require_at_home, whole_of
from rocm_sd.parallel.plans import Facts, Plan, choose, parse
from rocm_sd.parallel.ranks import Ranks, Traffic, along, join, own_card
from rocm_sd.parallel.sharing import everybody
from rocm_sd.parallel.stages import install_owned, install_stages, owned_parts
from rocm_sd.parallel.tensor import install_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from rocm_sd.engine.approximation import Setting

__all__ = ["ParallelReport", "parallel_report", "parallelize", "share_out", "unparallelize"]

Target = TypeVar("Target")
R = TypeVar("R")
# Inside of a model: its operations are looked at one by one, so they are stock's, captured between exchanges.
_INSIDE: dict[str, Callable[..., Installed]] = {
    "pipeline": install_stages, "patch": install_patches, "tensor": install_tensor,
}  # fmt: skip
# Blocks are shared out by their whole size, so before their layers are cut.
_ORDER = ("pipeline", "tensor", "patch", "cfg")
_STOCK = replace(EVERYTHING, rules=frozenset(), captured=False, hoisted=False, calibrated=False)
_SENT = 16 << 20  # bytes, to measure a link with


@dataclass
class ParallelReport:
    """`traffic`: what this rank has sent until now; `picture`: the ranks that draw one together. `link`: bytes a
    second, measured; `wired`: how the cards are connected, where the driver says it. `split`: models that all ranks
    have to call at once. `placed`: how weights came to this rank's card, where `parallelize` has put them there.
    """

    plan: Plan
    rank: int
    ranks: int
    link: float | None
    traffic: Traffic
    wired: Link | None = None
    picture: Ranks | None = None
    installed: list[Installed] = field(default_factory=list)
    split: list[nn.Module] = field(default_factory=list)
    placed: Installed | None = None

    def __str__(self) -> str:
        lines = [f"{self.plan} ({self.ranks} ranks), because {self.plan.why}."]
        if self.link is not None:
            wired = "" if self.wired is None else f"; the driver says that the cards are connected by {self.wired}"
            lines.append(f"  the link took {self.link / 1e9:.1f} GB/s, measured{wired}")
        placed = [] if self.placed is None else [self.placed]
        lines += [f"  {note}" for each in (*placed, *self.installed) for note in each.notes()]
        if "data" in self.plan.dims:
            lines.append("  share_out gives each picture to whoever is free; a call by itself is drawn by all")
        sent = ", ".join(f"{bytes_ / 1e6:.1f} MB for {name}" for name, bytes_ in sorted(self.traffic.sent.items()))
        return "\n".join([*lines, f"  rank {self.rank} has sent {sent or 'nothing'}"])


_PARALLEL: WeakKeyDictionary[Any, ParallelReport] = WeakKeyDictionary()


def parallelize(
    pipe: Target,
    plan: str = "auto",
    level: str = "auto",
    quality: Any = "exact",
    pictures: int = 1,
    *,
    device: str | torch.device | None = None,
    served: bool = False,
    guided: bool = True,
) -> Target:
    """Have a pipeline drawn by all processes of this job, and return it. `level` and `quality` are as in `optimize`.

    `plan`: data, cfg, pipeline, patch, tensor, a mesh of them (`cfg=2,patch=2`), or `auto`. Each process loads the
    pipeline, calls this, and then draws the same: what comes is the same picture on all of them. `device`: "cuda" takes
    a pipeline that was not moved anywhere, and puts on each rank's card the part that it computes, never the whole: for
    models larger than a card. `pictures`: how many are to be drawn, and `guided`: whether with guidance, by which
    `auto` chooses. `served`: many callers share each call, and nothing is measured in one.
    """
    target: Any = pipe
    if not hasattr(target, "components"):
        raise Unsupported("parallelize", f"a {type(target).__name__}: it takes a Diffusers pipeline")
    unparallelize(pipe)
    place = torch.device(target.device) if device is None else own_card(torch.device(device))
    if device is not None:
        require_at_home(target, place)
    join(place)
    world = everybody()
    job = _Job(world, place, _link_speed(world, place), _speeds(world, place))
    models = _models(target)
    if plan != "auto":
        chosen = parse(plan, world.size)
    else:
        chosen = choose(_facts(target, models, job, pictures, served=served, guided=guided))
    said = ParallelReport(chosen, world.rank, world.size, job.link, Traffic(), _wired(world, place))
    # Before anything is split: what fails half-way is undone.
    _PARALLEL[target] = said
    try:
        coming = None
        if device is not None:
            part = part_of(target, models, job.seats(chosen))
            said.placed = part.place(target, place)
            coming = part.bytes_cut
        _put_to_work(target, models, said, job, level, quality, coming, served=served)
    except BaseException:
        unparallelize(pipe)
        raise
    return pipe


@dataclass(frozen=True)
class _Job:
    """`device`: this rank's; `link`: bytes a second; `speeds`: of every rank."""

    world: Ranks
    device: torch.device
    link: float | None
    speeds: list[float]

    def mesh(self, plan: Plan) -> Any:
        return mesh_of(self.device.type, plan.dims)

    def weights(self, ranks: Ranks) -> list[float]:
        return [self.speeds[rank] for rank in ranks.members]

    def seats(self, plan: Plan) -> dict[str, Seat]:
        """Of what splits weights."""
        found = {name: along(self.mesh(plan), name, Traffic()) for name in SPLIT_WEIGHTS if name in plan.dims}
        return {name: Seat(ranks.rank, self.weights(ranks)) for name, ranks in found.items()}


def _models(pipe: Any) -> list[Any]:
    """The denoiser, and ControlNets."""
    return [getattr(pipe, "unet", None) or getattr(pipe, "transformer", None), *_controlnets(pipe)]


def _put_to_work(
    pipe: Any, models: list[Any], said: ParallelReport, job: _Job, level: str, quality: Any, coming: int | None, *,
    served: bool,
) -> None:  # fmt: skip
    """`coming`: bytes that are still to come to this rank's card; None where the whole pipeline was there."""
    world, device, model = job.world, job.device, models[0]
    chosen = said.plan
    inside = [name for name in chosen.dims if name in _INSIDE]
    if inside and quality != "exact" and "pipeline" in inside:
        raise Unsupported("pipeline", f"quality {quality}: what is left out runs through every block")
    stale = _stale_settings(model, quality, chosen)
    parts = _STOCK if inside else replace(EVERYTHING, calibrated=not served)
    if set(chosen.dims) - {"data"}:
        # A level with halved batches has other exchanges: it is chosen alike, by the fullest card.
        there = free_memory(device)
        free = [each for each in world.agree(None if there is None else there - (coming or 0)) if each is not None]
        in_place = coming is not None and bool(set(chosen.dims) & set(SPLIT_WEIGHTS))
        said.installed.append(Installed(tuple, reckon_with(pipe, min(free, default=None), in_place=in_place)))
    optimize_with(pipe, level, _without_stale(quality) if stale else quality, parts)
    if chosen.dims:
        said.picture = Ranks("vae", neighbours(world.size // chosen.dims.get("data", 1)), said.traffic)
        as_stock = all(world.agree(bool(inside) or not (graphs_wanted(device) or report(pipe).replaced)))
        # What goes by the number of a step cannot be baked into a graph, nor can blocks of other ranks.
        graphs = bool(inside) and quality == "exact" and "pipeline" not in inside and graphs_wanted(device)
        for module, each in _installed(
            pipe, models, chosen, job, said.picture, stale, as_stock=as_stock, graphs=graphs
        ):
            said.installed.append(each)
            said.split += [module] if module not in said.split else []
        # Where rank 0 leads, the others have its inputs.
        if said.picture.size > 1 and model is not None and not served:
            said.installed.append(install_check(pipe, model, said.picture))


def unparallelize(pipe: Target) -> Target:
    """Bring back what `parallelize` found."""
    said = _PARALLEL.pop(pipe, None)
    if said is not None:
        for each in reversed(said.installed):
            each.restore()
        restore(pipe)
        if said.placed is not None:
            said.placed.restore()
    return pipe


def parallel_report(pipe: Any) -> ParallelReport:
    """What `parallelize` has split, and why; `report` says what was optimised besides."""
    if pipe not in _PARALLEL:
        raise Unsupported(
            "parallel_report", "a pipeline that was not parallelized", hint="Call parallelize(pipe) first."
        )
    report(pipe)
    return _PARALLEL[pipe]


def share_out(count: int, draw: Callable[[int], R], pipe: Any = None) -> list[R]:
    """Have `draw(index)` called once for each index, by whoever is free: all results on every rank, in their order.

    `pipe`: what draws, where several ranks draw a picture together.
    """
    said = _PARALLEL.get(pipe) if pipe is not None else None
    return sharing.share_out(count, draw, None if said is None else said.picture)


def _facts(pipe: Any, models: list[Any], job: _Job, pictures: int, *, served: bool, guided: bool) -> Facts:
    model, whole = models[0], whole_of(pipe)
    # A model that takes the scale of guidance as an input computes one half.
    guided = guided and getattr(getattr(model, "config", None), "time_cond_proj_dim", None) is None
    free = free_memory(job.device) if job.device.type != "cpu" else None
    # What lies there already is room for the same weights. The same on every rank: by the fullest card.
    here = size_of(weight for weight in whole if weight.device.type == job.device.type)
    known = [each for each in job.world.agree(None if free is None else free + here) if each is not None]
    by_tensor, by_pipeline = (fullest(pipe, models, name, job.speeds) for name in ("tensor", "pipeline"))
    return Facts(
        job.world.size, size_of(whole), min(known, default=None), job.link,
        type(model).__name__ == "UNet2DConditionModel", pictures, served, guided, by_tensor, by_pipeline,
    )  # fmt: skip


def _installed(
    pipe: Any, models: list[Any], plan: Plan, job: _Job, picture: Ranks, stale: list[Setting], *, as_stock: bool,
    graphs: bool,
) -> Iterator[tuple[nn.Module, Installed]]:  # fmt: skip
    model = models[0]
    names = [name for name in _ORDER if name in plan.dims]
    for name in names:
        if name == "cfg" and graphs:
            yield from ((each, install_graphs(each)) for each in models)
        ranks = along(job.mesh(plan), name, picture.traffic)
        weights = job.weights(ranks)
        for each in models:
            if name == "cfg":
                yield each, install_batch(each, ranks, weights)
            elif name == "patch" and each is model and stale:
                yield each, _with_stale_rows(pipe, model, ranks, weights, stale)
            elif name != "pipeline" or each is model:
                yield each, _inside(name, pipe, models, plan, job)(each, ranks, weights)
        if name == "pipeline":
            yield from _owned(pipe, ranks)
    if "cfg" not in names and graphs:
        yield from ((each, install_graphs(each)) for each in models)
    decoder = getattr(getattr(pipe, "vae", None), "decoder", None)
    # Where it is answered from a graph, or one rank has it, there are no rows to be taken from it.
    if decoder is not None and picture.size > 1 and can_be_patched(decoder) and as_stock and "pipeline" not in names:
        yield decoder, Installed(tuple, decode_together(pipe.vae))
        yield decoder, install_patches(decoder, picture, job.weights(picture))


def _inside(name: str, pipe: Any, models: list[Any], plan: Plan, job: _Job) -> Callable[..., Installed]:
    if name == "tensor" and "pipeline" in plan.dims:
        return partial(install_tensor, away=set(of_others(pipe, models, job.seats(plan))))
    return _INSIDE[name]


def _owned(pipe: Any, ranks: Ranks) -> Iterator[tuple[nn.Module, Installed]]:
    for part, method, owner, unread in owned_parts(pipe, ranks.size):
        yield part, install_owned(part, method, owner, unread, ranks)


def _stale_settings(model: Any, quality: Any, plan: Plan) -> list[Setting]:
    """Where rows of a picture may be a step old; none where every step waits for them."""
    if "patch" not in plan.dims or model is None:
        return []
    found = known_with_plan(model, quality, str(plan))
    return found if any(setting.approximation.stale_after for setting in found) else []


def _without_stale(quality: Any) -> Any:
    """What one GPU would leave out besides; a named quality that was measured with this plan has nothing else."""
    return replace(quality, stale_after=0) if isinstance(quality, Approximation) else "exact"


def _with_stale_rows(
    pipe: Any, model: Any, ranks: Ranks, weights: Sequence[float], settings: list[Setting]
) -> Installed:
    held = ref(pipe)
    run_of, stop = follow_schedule(pipe)
    steps = PictureSteps(run_of, lambda: getattr(held(), "scheduler", None))
    installed = install_patches(model, ranks, weights, Staleness(steps, settings))

    def restore() -> None:
        installed.restore()
        stop()

    return Installed(installed.notes, restore)


def _controlnets(pipe: Any) -> list[Any]:
    found = getattr(pipe, "controlnet", None)
    return [] if found is None else list(getattr(found, "nets", [found]))


def _link_speed(world: Ranks, device: torch.device) -> float | None:
    """Bytes a second that a rank receives while all send, by the clock; the slowest rank's."""
    if world.size == 1 or device.type == "cpu":
        return None
    part = torch.zeros(_SENT, dtype=torch.uint8, device=device)
    sizes = [_SENT] * world.size
    took = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        world.gather(part, sizes, 0)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started)
    slowest: float = min(world.agree(_SENT * (world.size - 1) / min(took[1:])))
    return slowest


def _wired(world: Ranks, device: torch.device) -> Link | None:
    """The slowest link between two of the cards, where all of them are in one machine and the driver lists it."""
    if world.size == 1 or device.type != "cuda":
        return None
    mine = platform.node(), pci_address(torch.cuda.get_device_properties(device))
    machines, addresses = zip(*world.agree(mine), strict=True)
    if len(set(machines)) > 1 or len(set(addresses)) < world.size:
        return None
    return slowest_link(list(addresses))


def _speeds(world: Ranks, device: torch.device) -> list[float]:
    """How much each rank gets to do. Cards of one kind get the same, so that a picture is the same every time."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if len(set(world.agree(kind))) == 1:
        return [1.0] * world.size
    a = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    took = []
    for _ in range(8):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ a
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started)
    speeds: list[float] = world.agree(1 / sorted(took[2:])[2])
    return [round(speed / max(speeds), 2) for speed in speeds]
