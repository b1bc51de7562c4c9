"""Where the time of a trace went: by family, by module and by kernel, each against its roofline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.profiling.families import (
    ATTENTION,
    BOOKKEEPING,
    CONVOLUTION,
    ELEMENTWISE,
    FAMILIES,
    GEMM,
    IDLE,
    NORM,
    OTHER,
    kernel_family,
    op_family,
)
from rocm_sd.bench.profiling.trace import MODULE, Span, Trace, union
from rocm_sd.bench.profiling.work import OpWork, floor_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.bench.profiling.findings import SlowPath

__all__ = ["ARITHMETIC", "Analysis", "Piece", "TimePart", "analyse", "family_work", "module_name", "pieces"]

# The families whose work is the same however a model is fused: the others' bytes depend on what is fused with what.
ARITHMETIC = (CONVOLUTION, GEMM, ATTENTION)
OUTSIDE = "outside modules"


@dataclass(frozen=True)
class Piece:
    """One kernel on a GPU, or one op's own time on a CPU. `place` is the range of the host that it belongs to."""

    name: str
    us: float
    family: str
    place: Span | None = None
    graph: bool = False


@dataclass(frozen=True)
class TimePart:
    """A family, a module or a kernel. `share` is of the whole time; `families` is its own time, divided further.

    `floor_ms` is the least that the counted part of its work can take on this card, `counted_ms` the time that part
    took: `percent` of the one to the other. Both are None where the work or the card's peak is not known.
    """

    name: str
    ms: float
    share: float
    calls: int
    flops: float | None = None
    floor_ms: float | None = None
    counted_ms: float | None = None
    bound: str | None = None
    families: Mapping[str, float] = field(default_factory=dict)

    @property
    def percent(self) -> float | None:
        return 100 * self.floor_ms / self.counted_ms if self.floor_ms and self.counted_ms else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "families": dict(self.families), "percent": self.percent}


@dataclass(frozen=True)
class Analysis:
    """`wall_ms` is what the shares are of. `profiled_ms` is how long the same took under the profiler."""

    device: str
    arch: str
    wall_ms: float
    profiled_ms: float
    busy_ms: float
    families: tuple[TimePart, ...]
    modules: tuple[TimePart, ...]
    kernels: tuple[TimePart, ...]
    on_gpu: bool
    sees_host: bool = True
    graph_share: float = 0.0
    float32_share: float = 0.0
    findings: tuple[SlowPath, ...] = ()
    notes: tuple[str, ...] = ()
    subject: Mapping[str, Any] = field(default_factory=dict)

    def family(self, name: str) -> TimePart | None:
        return next((part for part in self.families if part.name == name), None)

    @property
    def unknown(self) -> tuple[TimePart, ...]:
        """Kernels that no rule knows, by name."""
        return tuple(part for part in self.kernels if OTHER in part.families)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for name in ("families", "modules", "kernels"):
            values[name] = [part.to_dict() for part in getattr(self, name)]
        return {"format": "rocm-sd-profile/1", **values, "subject": dict(self.subject)}


def pieces(trace: Trace) -> list[Piece]:
    if not trace.kernels:
        return [Piece(span.name, span.own, _host_family(span), span) for span in trace.ops if span.own > 0]
    found, previous = [], defaultdict[str, str](lambda: OTHER)
    for kernel in trace.kernels:
        family = kernel_family(kernel.name, previous[kernel.stream])
        previous[kernel.stream] = family
        family = _in_context(family, kernel.launched_in)
        found.append(Piece(kernel.name, kernel.end - kernel.start, family, kernel.launched_in, kernel.graph))
    return found


def analyse(
    trace: Trace,
    arch: Arch,
    *,
    device: str = "",
    plain_ms: float | None = None,
    reference: Mapping[str, tuple[OpWork, ...]] | None = None,
    modules: Trace | None = None,
) -> Analysis:
    """`plain_ms`: how long the same takes without a profiler, which a GPU's idle time is measured against.

    `reference`: work of convolutions, products and attention counted elsewhere, for a trace that shows no torch ops.
    `modules`: another trace of the same picture, eager, where this one replays a graph and so has no modules.
    """
    found = pieces(trace)
    on_gpu = bool(trace.kernels)
    intervals = ((each.start, each.end) for each in (trace.kernels or trace.ops))
    busy = union(intervals)
    # On a CPU the profiler slows the ops themselves, so that only its own wall time fits them.
    wall = trace.wall if plain_ms is None or not on_gpu else max(plain_ms * 1e3, busy)
    idle = max(0.0, wall - busy)
    total = sum(piece.us for piece in found) + idle
    works = _attributed(found)
    by_module = found if modules is None else pieces(modules)
    parts = _TimeParts(total, arch)
    families = [
        parts.part(name, [p for p in found if p.family == name], works)
        for name in FAMILIES
        if any(p.family == name for p in found)
    ]
    if reference is not None:
        families = [parts.by_reference(part, reference.get(part.name, ())) for part in families]
    families.append(TimePart(IDLE, idle / 1e3, idle / total if total else 0.0, 0))
    module_parts = _TimeParts(sum(piece.us for piece in by_module) + (idle if modules is None else 0.0), arch)
    return Analysis(
        device=device,
        arch=arch.name,
        wall_ms=wall / 1e3,
        profiled_ms=trace.wall / 1e3,
        busy_ms=busy / 1e3,
        families=tuple(families),
        modules=tuple(module_parts.grouped(by_module, _attributed(by_module), _module_groups)),
        kernels=tuple(parts.grouped(found, works, lambda piece: (piece.name,))),
        on_gpu=on_gpu,
        sees_host=bool(trace.ops),
        graph_share=sum(p.us for p in found if p.graph) / max(1e-9, sum(p.us for p in found)),
        float32_share=_float32_share(by_module),
    )


def family_work(trace: Trace) -> dict[str, tuple[OpWork, ...]]:
    """Work of every op in a trace, each counted once, by family."""
    found: dict[str, list[OpWork]] = defaultdict(list)
    for span in trace.ops:
        # An op inside one that was counted has that one's work.
        if span.counted is not None and span.counted[0] is span:
            found[span.counted[1].family].append(span.counted[1])
    return {family: tuple(works) for family, works in found.items()}


def module_name(span: Span) -> str:
    """`rocm_sd.module:unet.mid_block (UNetMidBlock2D)` -> `unet.mid_block`."""
    return span.name.removeprefix(MODULE).split(" ", 1)[0]


def _host_family(span: Span) -> str:
    """Views and allocations belong to the op that made them; what attention is made of is attention."""
    family = None
    for each in reversed(span.path):
        if not each.is_module:
            family = op_family(each.name)
            if family is not None:
                break
    return _in_context(family or BOOKKEEPING, span)


def _in_context(family: str, place: Span | None) -> str:
    """A product inside a convolution is that convolution's way; a layout copy stays one wherever it is made."""
    if family not in (GEMM, ELEMENTWISE, NORM, BOOKKEEPING, OTHER) or place is None:
        return family
    asked = [op_family(span.name) for span in place.path if not span.is_module]
    for context in (CONVOLUTION, ATTENTION):
        if context in asked:
            return context
    if family == OTHER:
        return next((each for each in asked if each not in (None, OTHER)), OTHER) or OTHER
    return family


def _attributed(found: Sequence[Piece]) -> dict[int, OpWork]:
    """Work by the number of the piece. An op's goes to its pieces of its own family, by the time that each took."""
    groups: dict[int, tuple[OpWork, list[int]]] = {}
    for number, piece in enumerate(found):
        counted = piece.place.counted if piece.place else None
        if counted is not None and counted[1].family == piece.family:
            groups.setdefault(id(counted[0]), (counted[1], []))[1].append(number)
    works = {}
    for work, numbers in groups.values():
        whole = sum(found[number].us for number in numbers)
        for number in numbers:
            part = found[number].us / whole if whole else 0.0
            works[id(found[number])] = OpWork(work.flops * part, work.bytes * part, work.dtype, work.family)
    return works


def _module_groups(piece: Piece) -> tuple[str, ...]:
    """`unet.down_blocks.0.resnets.1` counts for `unet` and for `unet.down_blocks.0`."""
    names = [module_name(span) for span in (piece.place.path if piece.place else ()) if span.is_module]
    if not names:
        return (OUTSIDE,)
    component, *rest = names[-1].split(".")
    if not rest:
        return (component,)
    inner = rest[:2] if len(rest) > 1 and rest[1].isdigit() else rest[:1]
    return component, ".".join([component, *inner])


def _float32_share(found: Sequence[Piece]) -> float:
    """Of the time in convolutions and products whose dtype is known, how much is in float32."""
    times = {"float32": 0.0, "": 0.0}
    for piece in found:
        if piece.family in (CONVOLUTION, GEMM):
            counted = piece.place.counted if piece.place else None
            if counted is not None:
                times["float32" if counted[1].dtype == "float32" else ""] += piece.us
    return times["float32"] / max(1e-9, sum(times.values()))


class _TimeParts:
    def __init__(self, total: float, arch: Arch) -> None:
        self.total, self.arch = total, arch

    def grouped(self, found: Sequence[Piece], works: Mapping[int, OpWork], groups: Any) -> list[TimePart]:
        by_name: dict[str, list[Piece]] = defaultdict(list)
        for piece in found:
            for name in groups(piece):
                by_name[name].append(piece)
        parts = [self.part(name, members, works) for name, members in by_name.items()]
        return sorted(parts, key=lambda part: -part.ms)

    def part(self, name: str, members: Sequence[Piece], works: Mapping[int, OpWork]) -> TimePart:
        us = sum(piece.us for piece in members)
        families: dict[str, float] = defaultdict(float)
        for piece in members:
            families[piece.family] += piece.us / 1e3
        plain = TimePart(
            name, us / 1e3, us / self.total if self.total else 0.0, len(members),
            families=dict(sorted(families.items(), key=lambda item: -item[1])),
        )  # fmt: skip
        counted = [(piece.us, works[id(piece)]) for piece in members if id(piece) in works]
        return self._with_work(plain, [work for _, work in counted], sum(us for us, _ in counted) / 1e3)

    def by_reference(self, part: TimePart, works: Sequence[OpWork]) -> TimePart:
        plain = replace(part, flops=None, floor_ms=None, counted_ms=None, bound=None)
        return self._with_work(plain, works, part.ms) if part.name in ARITHMETIC else plain

    def _with_work(self, part: TimePart, works: Sequence[OpWork], ms: float) -> TimePart:
        """`ms` is the time that this work took."""
        floor, bound = self._floor(works)
        if floor is not None:
            part = replace(part, floor_ms=floor * 1e3, counted_ms=ms, bound=bound)
        return replace(part, flops=sum(work.flops for work in works)) if works else part

    def _floor(self, works: Iterable[OpWork]) -> tuple[float | None, str | None]:
        times: dict[str, float] = defaultdict(float)
        for work in works:
            least = floor_seconds(work, self.arch)
            if least is None:
                return None, None
            times[least[1]] += least[0]
        return (sum(times.values()), max(times, key=times.__getitem__)) if times else (None, None)
