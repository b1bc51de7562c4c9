"""How long a picture would take on a card that nobody has timed: modelled, never measured.

    roofline = max(FLOPs / peak, bytes / bandwidth)                     of one call on one card
    time     = fixed + roofline / share                                 for each family of ops, fitted on timed calls
    target   = fixed + (measured - fixed) x target's roofline / card's roofline / occupancy     where the call was timed
    target   = fixed + target's roofline / share / occupancy                                    where it was not

`fixed` is what a call costs however small it is, and `share` the part of the roofline that is reached. Both are carried
over from the card that was timed. `occupancy` is below 1 where our compiled kernel leaves too few waves on a SIMD to
keep the target's memory busy (Little's law) or its matrix unit fed. docs/projection.md has what this ignores.

On a card whose machine code the emulator executes, FLOPs and bytes of the target are those that were counted there,
launch by launch, by one of two plans: `shipped` is what the card does by its data alone, `every` all rules with our
kernels. No launch takes less than its counted instructions take to issue. Other cards have the ops' own estimates.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.tuning.choice import within
from rocm_sd.tuning.ranking import LATENCY_S, LAUNCH_S, seconds_at_least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "COUNTED_PLANS", "ESTIMATED", "LABEL", "TARGETS", "CountedCall", "Deviation", "Fit", "Projection", "WorkItem",
    "counted", "deviation", "fit", "fits", "project", "project_counted", "project_items", "projections", "rows",
]  # fmt: skip

LABEL = "modelled"
TARGETS = ("gfx942", "gfx1100", "gfx1200", "gfx1201")
COUNTED_PLANS = ("shipped", "every")
ESTIMATED = "every rule, estimated"
# Compiled from the same source to the same kind of code, and not executed by the emulator.
_COUNTED_AS = {"gfx1200": "gfx1201"}
DTYPE = "float16"

# What no record times is of the family that it is most like.
_LIKE = {"layer_norm": "layer_norm_residual", "concatenate": "copy", "linear_geglu": "linear_residual"}
_PRODUCTS = frozenset({"attention", "conv2d", "linear_residual", "upsample_conv2d", "linear_geglu"})
_LOAD_BYTES = 16  # of one lane's access, as rung 3 of the proof ladder demands
_WAVES_FOR_MATRICES = 2  # one loads while the other multiplies


@dataclass(frozen=True)
class WorkItem:
    """`count` calls of one op on one problem in one part of a picture; `flops` and `bytes` are those of a call.

    `us` is the time of a call on the timed card, or None if none was timed.
    """

    part: str
    op: str
    problem: Mapping[str, int | str]
    count: int
    flops: float
    bytes: float
    us: float | None = None


@dataclass(frozen=True)
class CountedCall:
    """`count` launches of one kind that were counted on a card, or calls of stock torch where it is not `ours`.

    `cycles`: if one CU did all of it; `waves` a SIMD.
    """

    part: str
    op: str
    ours: bool
    count: int
    workgroups: int
    cycles: float
    flops: float
    bytes: float
    waves: int


@dataclass(frozen=True)
class Fit:
    """us = fixed_us + roofline / share, over `calls` timed calls."""

    fixed_us: float
    share: float
    calls: int


@dataclass(frozen=True)
class Deviation:
    """What the model says of the card that it was fitted on, in percent of what was measured there.

    `without_shapes`: no call's own timing is used, only its family's fit. `without_ops`: nor its family's, but that of
    the other ops of its kind.
    """

    measured_ms: float
    as_used: float
    without_shapes: float
    without_ops: float
    source: str


@dataclass(frozen=True)
class Projection:
    """`timed_share`: the part of the modelled time whose calls were timed at that shape; the rest is by family.

    `plan`: what is assumed to run, one of COUNTED_PLANS or ESTIMATED.
    """

    workload: str
    arch: str
    product: str
    ms: float
    step_ms: float
    decode_ms: float
    steps: int
    timed_share: float
    derated: tuple[str, ...]
    deviation: Deviation | None
    plan: str = ESTIMATED
    label: str = LABEL

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.ms * 1e3

    @property
    def model_error(self) -> str:
        if self.deviation is None:
            return "no recorded picture to compare with"
        # What was counted has no timing of its own: a family's fit is all that is carried over.
        error = self.deviation.as_used if self.plan == ESTIMATED else self.deviation.without_shapes
        return f"{error:+.0f}% of the time on the card that was timed"


@cache
def _data() -> dict[str, Any]:
    text = files("rocm_sd.bench").joinpath("data/work.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _workload(name: str) -> dict[str, Any]:
    known: dict[str, Any] = _data()["workloads"]
    require_one_of("workload to project", name, known)
    workload: dict[str, Any] = known[name]
    return workload


def _items(workload: str) -> tuple[WorkItem, ...]:
    return tuple(WorkItem(**item) for item in _workload(workload)["items"])


def _roofline_us(card: arch.Arch, flops: float, moved: float) -> float:
    return arch.roofline(card, flops, moved, DTYPE).seconds * 1e6


def fit(card: arch.Arch, rows: Iterable[tuple[float, float, float]]) -> Fit:
    """Of (flops, bytes, us) rows: least squares of the relative error, with no negative fixed cost."""
    points = [(1 / us**2, _roofline_us(card, flops, moved), us) for flops, moved, us in rows]
    if not points:
        raise Unsupported("A projection", "a family of ops of which no call was timed")
    total = sum(w for w, _, _ in points)
    x_mean = sum(w * x for w, x, _ in points) / total
    y_mean = sum(w * y for w, _, y in points) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x, _ in points)
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, x, y in points) / spread if spread else 0.0
    fixed = y_mean - slope * x_mean
    if slope <= 0 or fixed < 0:
        # All of one size, or no fixed cost to be seen: a plain share.
        slope = sum(w * x * y for w, x, y in points) / sum(w * x * x for w, x, _ in points)
        fixed = 0.0
    return Fit(fixed, 1 / slope, len(points))


def _timed() -> dict[str, list[tuple[float, float, float]]]:
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for op, flops, moved, us in _data()["timed"]:
        rows.setdefault(op, []).append((flops, moved, us))
    return rows


@cache
def fits() -> dict[str, Fit]:
    """By family, on the card that was timed."""
    card = arch.get(_data()["arch"])
    return {op: fit(card, rows) for op, rows in _timed().items()}


@cache
def _fits_of_others() -> dict[str, Fit]:
    """By family, from the timings of all other families of its kind (products, or passes over memory)."""
    card, rows = arch.get(_data()["arch"]), _timed()
    found = {}
    for op in rows:
        others = [o for o in rows if o != op and (o in _PRODUCTS) == (op in _PRODUCTS)]
        found[op] = fit(card, [row for other in others for row in rows[other]])
    return found


def _family(families: Mapping[str, Fit], op: str) -> Fit:
    return families[op] if op in families else families[_LIKE[op]]


def _occupancy(target: arch.Arch, item: WorkItem, *, by_memory: bool) -> float:
    """The share of its speed that too few waves leave to our kernel; 1 where a library's runs, or nothing is known."""
    waves = _waves(target.name, item.op, tuple(item.problem.items()))
    return 1.0 if waves is None else _kept_busy(target, waves, by_memory=by_memory)


def _kept_busy(target: arch.Arch, waves: int, *, by_memory: bool) -> float:
    needed = float(_WAVES_FOR_MATRICES)
    if by_memory:
        figures = (target.compute_units, target.simds_per_cu, target.wave_size, target.bandwidth_gbps)
        if any(figure is None for figure in figures):
            return 1.0
        lanes = (target.compute_units or 1) * (target.simds_per_cu or 1) * (target.wave_size or 1)
        needed = (target.bandwidth_gbps or 0.0) * 1e9 * LATENCY_S / (lanes * _LOAD_BYTES)
    return min(1.0, waves / needed)


@cache
def _waves(architecture: str, op: str, problem: tuple[tuple[str, int | str], ...]) -> int | None:
    """Waves a SIMD of the kernel that runs there, from the compiler's figures; None where it is not ours."""
    resource = files("rocm_sd.tuning").joinpath(f"data/{architecture}/{op}.json")
    if not resource.is_file():
        return None
    from rocm_sd.ops import OPS  # noqa: PLC0415 -- importing torch is left until there is something to look up

    verification = OPS[op].verification
    for entry in json.loads(resource.read_text(encoding="utf-8")).get("bucket", ()):
        if within(entry["when"], dict(problem)):
            ours = verification is not None and entry["implementation"] == verification.implementation
            return entry.get("figures", {}).get("waves_per_simd") if ours else None
    return None


def _parts(
    items: Sequence[WorkItem], steps: int, us: Callable[[WorkItem], float]
) -> tuple[dict[str, float], list[float]]:
    """Milliseconds of each part of a picture once, and of each item in the whole picture."""
    parts: dict[str, float] = {}
    whole = []
    for item in items:
        once = item.count * us(item) / 1e3
        parts[item.part] = parts.get(item.part, 0.0) + once
        whole.append(once * (steps if item.part == "step" else 1))
    return parts, whole


def project_items(
    items: Sequence[WorkItem], steps: int, timed_on: str, target: str, families: Mapping[str, Fit], workload: str = ""
) -> Projection:
    """For a list of your own, such as a profile of another card: see `fit` for the families."""
    card, other = arch.get(timed_on), arch.get(target)
    for one in (card, other):
        if one.peak(DTYPE) is None or one.bandwidth_gbps is None:
            raise Unsupported("A projection", f"{one.name}: its peak rate or bandwidth is not known")
    derated: dict[str, float] = {}

    def us(item: WorkItem) -> float:
        there = arch.roofline(other, item.flops, item.bytes, DTYPE)
        here = _roofline_us(card, item.flops, item.bytes)
        family = _family(families, item.op)
        speed = _occupancy(other, item, by_memory=there.bound == "memory")
        if speed < 1:
            derated[item.op] = min(speed, derated.get(item.op, 1.0))
        roofline = there.seconds * 1e6
        if item.us is not None and item.us > family.fixed_us:
            return family.fixed_us + (item.us - family.fixed_us) * roofline / here / speed
        return family.fixed_us + roofline / family.share / speed

    parts, each = _parts(items, steps, us)
    total = sum(each)
    counted = list(zip(items, each, strict=True))
    return Projection(
        workload=workload,
        arch=other.name,
        product=other.product or other.name,
        ms=total,
        step_ms=parts.get("step", 0.0),
        decode_ms=parts.get("decode", 0.0),
        steps=steps,
        timed_share=sum(ms for item, ms in counted if item.us is not None) / total,
        derated=tuple(f"{op} to {share:.0%}" for op, share in sorted(derated.items())),
        deviation=None,
    )


@cache
def _counts() -> dict[str, Any]:
    text = files("rocm_sd.bench").joinpath("data/counted.json").read_text(encoding="utf-8")
    counts: dict[str, Any] = json.loads(text)["workloads"]
    return counts


def counted(workload: str, target: str, plan: str) -> tuple[CountedCall, ...]:
    """What was counted there; nothing of a card whose code is not executed."""
    parts = _counts().get(workload, {}).get(_COUNTED_AS.get(target, target), {}).get(plan, {})
    return tuple(CountedCall(part, row[0], bool(row[1]), *row[2:]) for part, rows in parts.items() for row in rows)


def project_counted(calls: Sequence[CountedCall], steps: int, target: str, families: Mapping[str, Fit]) -> Projection:
    """As `project_items`, of what was counted on the card itself."""
    other = arch.get(target)
    derated: dict[str, float] = {}

    def us(call: CountedCall) -> float:
        there = arch.roofline(other, call.flops, call.bytes, DTYPE)
        family = _family(families, call.op)
        speed = _kept_busy(other, call.waves, by_memory=there.bound == "memory") if call.ours else 1.0
        if speed < 1:
            derated[call.op] = min(speed, derated.get(call.op, 1.0))
        issue = seconds_at_least(other, call.workgroups, call.cycles, 0.0) if call.ours else None
        at_least = 0.0 if issue is None else (issue - LAUNCH_S) * 1e6
        return family.fixed_us + max(there.seconds * 1e6 / family.share / speed, at_least)

    parts: dict[str, float] = {}
    for call in calls:
        parts[call.part] = parts.get(call.part, 0.0) + call.count * us(call) / 1e3
    return Projection(
        workload="",
        arch=other.name,
        product=other.product or other.name,
        ms=steps * parts.get("step", 0.0) + parts.get("decode", 0.0),
        step_ms=parts.get("step", 0.0),
        decode_ms=parts.get("decode", 0.0),
        steps=steps,
        timed_share=0.0,
        derated=tuple(f"{op} to {share:.0%}" for op, share in sorted(derated.items())),
        deviation=None,
    )


def project(workload: str, target: str, plan: str = "every") -> Projection:
    """One picture of the workload on `target` ("gfx1100"), with the model's error on the card that was timed.

    By `plan` where the target's kernels were counted; elsewhere by every rule, with the ops' own estimates.
    """
    require_one_of("plan", plan, COUNTED_PLANS)
    found = _workload(workload)
    calls = counted(workload, target, plan)
    if calls:
        made = replace(project_counted(calls, found["steps"], target, fits()), workload=workload, plan=plan)
    else:
        made = project_items(_items(workload), found["steps"], _data()["arch"], target, fits(), workload)
    return replace(made, deviation=deviation(workload))


def projections(targets: Iterable[str] = TARGETS, workloads: Iterable[str] = ()) -> tuple[Projection, ...]:
    """Of each card both plans, where its kernels were counted."""
    asked = tuple(workloads) or tuple(_data()["workloads"])
    return tuple(
        project(workload, target, plan)
        for workload in asked
        for target in targets
        for plan in (COUNTED_PLANS if counted(workload, target, "every") else COUNTED_PLANS[-1:])
    )


@cache
def deviation(workload: str) -> Deviation | None:
    """None where no whole picture of this workload is recorded for the card that was timed."""
    picture = _workload(workload).get("picture")
    if picture is None:
        return None
    card, items, steps = arch.get(_data()["arch"]), _items(workload), _workload(workload)["steps"]

    def percent(us: Callable[[WorkItem], float]) -> float:
        return 100 * (sum(_parts(items, steps, us)[1]) / float(picture["ms"]) - 1)

    def by(families: Mapping[str, Fit]) -> Callable[[WorkItem], float]:
        def us(item: WorkItem) -> float:
            family = _family(families, item.op)
            return family.fixed_us + _roofline_us(card, item.flops, item.bytes) / family.share

        return us

    own = by(fits())
    return Deviation(
        measured_ms=picture["ms"],
        as_used=percent(lambda item: own(item) if item.us is None else item.us),
        without_shapes=percent(own),
        without_ops=percent(by(_fits_of_others())),
        source=picture["source"],
    )


def rows(workload: str) -> list[dict[str, Any]]:
    """The targets as plain values, for reports; none of a workload whose work was not counted."""
    if workload not in _data()["workloads"]:
        return []
    return [
        {
            **asdict(made),
            "derated": list(made.derated),
            "steps_per_s": made.steps_per_s,
            "model_error": made.model_error,
        }
        for made in projections(workloads=(workload,))
    ]
