"""How fast a step would be on many cards, by strategy: modelled, never measured.

    alone    = fixed + rest                                           a step on one card; `fixed` does not shrink
    computed = fixed + rest x the largest share of the work that a rank has
    an exchange = latency + bytes / (bandwidth of the links that it uses)
    sent     = all exchanges of a step, one after the other           their bytes are those of `volume`
    step     = computed + sent - min(computed, overlap x sent)
    efficiency = pictures x alone / (cards x rounds x step)           1 where no card ever waits

Entries of a batch pass through a `pipeline` one behind the other: its step is the end of a schedule, stage by stage.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rocm_sd.errors import Unsupported, require_known
from rocm_sd.parallel.rows import shares
from rocm_sd.parallel.volume import Sent, is_split, stages, volume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.parallel.layers import Call, Layer

__all__ = [
    "COUNTS", "LABEL", "MI300X", "OVERLAP", "RX_7900_XTX", "Link", "Machine", "Prediction", "Work", "assumptions",
    "exchange_s", "meshes", "overlapped", "predict", "predictions",
]  # fmt: skip

LABEL = "modelled"
COUNTS = tuple(2**power for power in range(11))
# From the outside to the inside: ranks of the last are neighbours on the machine, as in a plan.
_ORDER = ("data", "cfg", "pipeline", "patch", "tensor")
# What share of its exchanges a rank computes behind. All of `cfg`, `patch` and `tensor` are waited for where they are
# begun: the next layer reads them. Samples and skips of a `pipeline` leave while their rank goes on.
OVERLAP: Mapping[str, float] = {"cfg": 0.0, "patch": 0.0, "tensor": 0.0, "pipeline": 1.0}
# Operations are looked at one by one there, and launched so where no graph is captured between the exchanges.
_LAUNCHED = frozenset({"patch", "tensor", "pipeline"})
_TO_SOME = frozenset({"halo", "sample", "skip"})


@dataclass(frozen=True)
class Link:
    """`rate`: bytes a second in each direction. `each`: there is one to every peer; else one for all of them.

    `latency`: seconds of an exchange of next to nothing.
    """

    name: str
    rate: float
    latency: float
    each: bool
    source: str


@dataclass(frozen=True)
class Machine:
    """`node`: cards that `link` joins; `network`: what joins nodes, through one port for each card."""

    card: str
    arch: str
    link: Link
    node: int
    network: Link | None = None


MI300X = Machine(
    "Instinct MI300X",
    "gfx942",
    Link(
        "Infinity Fabric (xGMI)",
        # "Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X", AMD's ROCm blog, March 2025: of
        # 64 GB/s about 48 are usable, and a link goes to each of the seven others.
        48e9,
        # A small sum by RCCL, of 16 dies of MI250X: 25 us (ROCm/rccl#929). Eight MI300X sum 8 MiB in 91 us
        # (crickett-hpe/hpc-ai-envs#30), for which these two figures give 69.
        25e-6,
        each=True,
        source="AMD's ROCm blog of March 2025 on xGMI; ROCm/rccl#929",
    ),
    8,
    Link(
        "a network of 400 Gb/s a card",
        # RCCL between two nodes of eight ports: 360 GB/s of bus bandwidth (ROCm/rccl#2078), 45 of 50 of each.
        45e9,
        # A small sum by RCCL between two machines: 36 to 47 us (Radeon AI PRO R9700, ROCm/legacy-rocm-build#5571).
        40e-6,
        each=False,
        source="ROCm/rccl#2078; ROCm/legacy-rocm-build#5571",
    ),
)
RX_7900_XTX = Machine(
    "Radeon RX 7900 XTX",
    "gfx1100",
    Link(
        "PCIe 4.0 x16",
        # Two of them see none of each other's memory, and copy 48 GB/s to and from the host's at once
        # (ROCm/legacy-rocm-build#2253): half of it each way.
        24e9,
        # A small sum by RCCL through the host, of four Radeon AI PRO R9700: 32 us (ROCm/rccl-tests#162).
        32e-6,
        each=False,
        source="ROCm/legacy-rocm-build#2253; ROCm/rccl-tests#162",
    ),
    2,
)


@dataclass(frozen=True)
class Work:
    """A step of one picture on one card: `step` seconds, of which `fixed` do not shrink with the tensors.

    `host`: seconds that the host needs to launch a step's operations one by one. `source`: where these are from.
    """

    name: str
    call: Call
    step: float
    fixed: float
    host: float
    source: str


@dataclass(frozen=True)
class Prediction:
    """Of one step: seconds that the busiest rank computes, seconds and bytes of what one rank exchanges."""

    work: str
    card: str
    dims: Mapping[str, int]
    cards: int
    step: float
    computed: float
    sent: float
    bytes: int
    efficiency: float
    label: str = LABEL

    @property
    def speedup(self) -> float:
        """Pictures a second, times those of one card."""
        return self.efficiency * self.cards


def overlapped(computed: float, sent: float, share: float) -> float:
    """Seconds of both together, where that share of the exchanges needs nobody who waits."""
    return computed + sent - min(computed, share * sent)


def exchange_s(sent: Sent, machine: Machine, size: int, apart: int = 1) -> float:
    """Of one exchange among `size` ranks, which are so many places apart on the machine."""
    here = max(1, min(size, machine.node // apart))
    nodes = math.ceil(size / here)
    link, network = machine.link, machine.network
    if nodes > 1 and network is None:
        raise Unsupported("scaling", f"{size} cards of {machine.card}, of which a machine has {machine.node}")
    if sent.what in _TO_SOME:
        way = network if nodes > 1 and network is not None else link
        return way.latency + sent.bytes / (way.rate * (max(1, sent.times) if way.each else 1))
    inside = link.rate * (here - 1 if link.each else 1) if here > 1 else math.inf
    if nodes == 1 or network is None:
        return link.latency + sent.bytes / inside
    # Between nodes every card uses its own port, and nodes are called as a tree is.
    latency = network.latency * math.ceil(math.log2(nodes)) + (link.latency if here > 1 else 0.0)
    return latency + sent.bytes / min(inside, network.rate * here)


def predict(
    work: Work,
    machine: Machine,
    dims: Mapping[str, int],
    *,
    pictures: int | None = None,
    captured: bool = True,
    overlap: Mapping[str, float] = OVERLAP,
) -> Prediction:
    """A step on a mesh such as {"cfg": 2, "patch": 4}; `pictures`: to draw, by default one for each part of `data`.

    `captured`: nobody waits for the host. Otherwise strategies that look into a model are launched one by one.
    """
    require_known("strategy", dims, _ORDER)
    sizes = {name: dims[name] for name in _ORDER if dims.get(name, 1) > 1}
    inside = _LAUNCHED & sizes.keys()
    if len(inside) > 1 or ("pipeline" in inside and "cfg" in sizes):
        raise Unsupported("scaling", f"a mesh of {' and '.join(sizes)}")
    if "pipeline" in inside:
        step, computed, sent, moved = _one_behind_the_other(work, machine, sizes["pipeline"], overlap["pipeline"])
    else:
        step, computed, sent, moved = _side_by_side(work, machine, sizes, overlap)
    if inside and not captured:
        step = max(step, work.host)
    cards, parts = math.prod(sizes.values()), sizes.get("data", 1)
    drawn = parts if pictures is None else pictures
    efficiency = drawn * work.step / (cards * math.ceil(drawn / parts) * step)
    return Prediction(work.name, machine.card, sizes, cards, step, computed, sent, moved, efficiency)


_Parts = tuple[float, float, float, int]


def _side_by_side(work: Work, machine: Machine, sizes: Mapping[str, int], overlap: Mapping[str, float]) -> _Parts:
    call, rest = work.call, work.step - work.fixed
    sent = hideable = 0.0
    moved = 0
    for name, size in sizes.items():
        if name == "data":
            continue
        exchanged = volume(call, name, size, (size - 1) // 2)
        apart = math.prod(sizes[inner] for inner in _ORDER[_ORDER.index(name) + 1 :] if inner in sizes)
        took = sum(exchange_s(each, machine, size, apart) for each in exchanged.sent)
        sent, hideable, moved = sent + took, hideable + overlap[name] * took, moved + exchanged.bytes
        rest *= _largest_share(call, name, size)
        if name == "cfg":
            # What is split further has these entries.
            call = replace(call, batch=max(shares(call.batch, [1.0] * size)))
    computed = work.fixed + rest
    return overlapped(computed, sent, hideable / sent if sent else 0.0), computed, sent, moved


def _largest_share(call: Call, strategy: str, size: int) -> float:
    """Of the work of a call, that of the rank that has most of it; all products take as long."""
    if strategy == "cfg":
        return max(shares(call.batch, [1.0] * size)) / call.batch
    rows = call.rows(size)

    def share(layer: Layer) -> float:
        if strategy == "patch":
            counts = rows[layer.level + (layer.stride > 1)].counts
            return max(counts) / sum(counts)
        parts = layer.heads if layer.kind == "attention" else 4 * layer.channels
        return max(shares(parts, [1.0] * size)) / parts if is_split(layer, size) else 1.0

    flops = [call.flops(layer) for layer in call.layers]
    return sum(each * share(layer) for each, layer in zip(flops, call.layers, strict=True)) / sum(flops)


def _one_behind_the_other(work: Work, machine: Machine, size: int, overlap: float) -> _Parts:
    """A schedule: a stage begins an entry when it is free, and has what earlier stages send it of that entry."""
    call = replace(work.call, batch=1)
    if size > len(call.blocks):
        raise Unsupported("pipeline", f"{size} ranks for {len(call.blocks)} blocks", hint="Use fewer ranks.")
    owners = stages(call, size)
    computes = [_stage_s(work, [block for block in owners if owners[block] == rank]) for rank in range(size)]
    ways = _ways(call, owners)
    took = {way: exchange_s(Sent("sample", moved), machine, size) for way, moved in ways.items()}
    entries = work.call.batch
    sends = [sum(seconds for (source, _), seconds in took.items() if source == rank) for rank in range(size)]
    free = [0.0] * size
    for _ in range(entries):
        ends: list[float] = []
        for rank in range(size):
            arrived = [ends[source] + seconds for (source, to), seconds in took.items() if to == rank]
            ends.append(max([free[rank], *arrived]) + computes[rank])
            free[rank] = ends[rank] + (1 - overlap) * sends[rank]
    answer = volume(work.call, "pipeline", size, size - 1).sent[-1]
    told = exchange_s(answer, machine, size)
    moved = max(volume(work.call, "pipeline", size, rank).bytes for rank in range(size))
    return max(free) + told, entries * max(computes), entries * max(sends) + told, moved


def _stage_s(work: Work, blocks: Sequence[str]) -> float:
    """Seconds of one entry: every rank computes what is in no block, too."""
    call = replace(work.call, batch=1)
    own = [layer for layer in call.layers if layer.block in blocks or layer.block not in call.blocks]
    part = sum(map(call.flops, own)) / sum(map(call.flops, call.layers))
    return work.fixed * len(own) / len(call.layers) + (work.step - work.fixed) / work.call.batch * part


def _ways(call: Call, owners: Mapping[str, int]) -> dict[tuple[int, int], int]:
    """Bytes of an entry, from rank to rank."""
    found = Counter[tuple[int, int]]()
    for block, following in pairwise(owners):
        level, channels = call.result(block)
        found[owners[block], owners[following]] += channels * call.pixels(level) * call.itemsize
    for block, reader, level, channels in call.skips:
        if block in owners:
            found[owners[block], owners[reader]] += channels * call.pixels(level) * call.itemsize
    return {way: moved for way, moved in found.items() if way[0] != way[1]}


def meshes(call: Call, cards: int) -> dict[str, dict[str, int]]:
    """What so many cards can be, by name, as far as each of them has something to do."""
    rows, heads = min(call.heights), max(layer.heads for layer in call.layers)
    half, quarter = cards // 2, cards // 4
    found: dict[str, tuple[bool, dict[str, int]]] = {
        "data": (True, {"data": cards}),
        "cfg": (cards <= call.batch, {"cfg": cards}),
        "patch": (cards <= rows, {"patch": cards}),
        "tensor": (cards <= heads, {"tensor": cards}),
        "pipeline": (cards <= len(call.blocks), {"pipeline": cards}),
        "cfg x patch": (cards == 2 * half and 1 < half <= rows, {"cfg": 2, "patch": half}),
        "data x cfg x patch": (cards == 4 * quarter and quarter > 1, {"data": quarter, "cfg": 2, "patch": 2}),
    }
    return {name: dims for name, (possible, dims) in found.items() if possible}


def predictions(
    work: Work, machine: Machine, counts: Sequence[int] = COUNTS, *, captured: bool = True
) -> dict[str, list[Prediction]]:
    """By the mesh's name: one for each number of cards that it can use."""
    found: dict[str, list[Prediction]] = {}
    for cards in counts:
        for name, dims in meshes(work.call, cards).items():
            found.setdefault(name, []).append(predict(work, machine, dims, captured=captured))
    return found


def assumptions(work: Work, machine: Machine) -> tuple[str, ...]:
    """What the figures rest on, to stand beside them."""
    link, network = machine.link, machine.network
    peers = "to each other card" if link.each else "for all other cards together"
    alone = (
        f"{work.name} on one {machine.card}: {work.step * 1e3:.1f} ms a step of one guided picture, of which "
        f"{work.fixed * 1e3:.1f} ms do not shrink with the tensors ({work.source}). A busy host took "
        f"{work.host * 1e3:.1f} ms to launch its operations one by one (measured)."
    )
    cards = (
        f"Between cards: {link.name}, {link.rate / 1e9:.0f} GB/s each way {peers}, {link.latency * 1e6:.0f} us an "
        f"exchange ({link.source})."
    )
    nodes = (
        ""
        if network is None
        else (
            f"Between nodes of {machine.node}: {network.name}, {network.rate / 1e9:.0f} GB/s, "
            f"{network.latency * 1e6:.0f} us an exchange for every doubling of the nodes ({network.source})."
        )
    )
    waits = (
        "Exchanges of cfg, patch and tensor are waited for; in a pipeline the sender goes on. Products take a time in "
        "proportion to their operations. Rows, heads and blocks that cannot be dealt out evenly are not. With data, "
        "that some pictures end later than others is left out."
    )
    host = (
        "Efficiency is of a host that is never waited for, as with graphs. A pipeline launches stock's operations one "
        "by one, and so do patch and tensor where nothing is captured between their exchanges: a step is then no "
        "shorter than that takes. They count as fast as fused ones."
    )
    return tuple(filter(None, (alone, cards, nodes, waits, host)))
