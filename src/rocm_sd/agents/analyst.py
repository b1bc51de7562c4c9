"""Where the most time can be won: a profile, a bench record or timings of ops, ranked by their distance to the floor.

    gain  = max(0, time - floor)
    floor = max(FLOPs / peak, bytes / bandwidth)      as bench.profiling and the ops' own `Tuning.work` have it

Times are measured, work is counted, and floors are modelled: counted work at the data sheet's peak and bandwidth. What
has no floor has no gain here: nothing is claimed for it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from rocm_sd import arch
from rocm_sd.bench import profiling, report
from rocm_sd.bench.profiling import TimePart
from rocm_sd.bench.profiling.families import FAMILIES, IDLE, OTHER
from rocm_sd.bench.profiling.work import OpWork, floor_seconds
from rocm_sd.bench.projection import LABEL as MODELLED
from rocm_sd.bench.records import OURS, STOCK
from rocm_sd.bench.verdict import EXACT
from rocm_sd.errors import RocmSdError, first_line
from rocm_sd.ops import OPS
from rocm_sd.plain_json import read_json, shortened
from rocm_sd.tuning.ranking import LAUNCH_S
from rocm_sd.typed_json import is_number, violations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rocm_sd.arch import Arch
    from rocm_sd.bench.records import Record
    from rocm_sd.bench.report.reading import OpRun, OpTiming
    from rocm_sd.ops.registry import Op

__all__ = ["Analysis", "Chance", "Unanalysable", "analyse", "as_table", "improvable", "to_dict"]

MEMORY, MATRIX, LAUNCHES, UNKNOWN = "memory", "matrix unit", "launches", "unknown"
_CLEAR = 1.02  # less is within what two runs differ by (benchmarks/ops.py)
_LEAVE = 0.9  # the share of its floor's speed from which on it is left as it is
_LOW = 0.5  # libraries reach half of the peak and more on the shapes of Stable Diffusion
_SHORT_US = 4 * LAUNCH_S * 1e6  # of a call this short the launch is a quarter or more
_HINT = "Give profile.json of: rocm-sd profile WORKLOAD --out FOLDER; or a record of: rocm-sd bench ops --out FOLDER"
_FIGURE, _TEXT = {"type": "number", "minimum": 0, "maximum": 1e12}, {"type": "string"}
_MAYBE = {**_FIGURE, "type": ["number", "null"]}
_PART: dict[str, Any] = {"properties": {
    "name": _TEXT, "ms": _FIGURE, "calls": {**_FIGURE, "type": "integer"}, "floor_ms": _MAYBE, "counted_ms": _MAYBE,
    "bound": {"type": ["string", "null"]}, "families": {"type": "object", "additionalProperties": _FIGURE},
}}  # fmt: skip
_PARTS = {"type": "array", "items": {"type": "object", "required": [*_PART["properties"]], **_PART}}
_STORED: dict[str, Any] = {"properties": {
    **dict.fromkeys(("device", "arch"), _TEXT), **dict.fromkeys(("families", "kernels"), _PARTS),
    **dict.fromkeys(("wall_ms", "profiled_ms", "busy_ms", "graph_share"), _FIGURE),
    "subject": {"type": "object"}, "notes": {"type": "array", "items": _TEXT},
}}  # fmt: skip


class Unanalysable(RocmSdError):
    """A file in which no time can be held against a floor."""

    def __init__(self, path: Path, why: str, *, hint: str = _HINT) -> None:
        super().__init__(f"{path} cannot be analysed: {why}.", hint=hint)


@dataclass(frozen=True)
class Chance:
    """`op`: or a family, with no shape. `ms`: of a call in a record of ops, else of a picture, or all drawn at once."""

    op: str
    shape: str
    calls: int | None
    ms: float
    floor_ms: float | None
    bound: str
    runs: str
    change: str

    @property
    def gain_ms(self) -> float:
        return 0.0 if self.floor_ms is None else max(0.0, self.ms - self.floor_ms)


@dataclass(frozen=True)
class Analysis:
    """`chances`: the most to win first. `notes`: what could not be said, and why. `total_ms`: None for calls of ops."""

    source: str
    kind: str
    device: str
    chances: tuple[Chance, ...]
    total_ms: float | None
    notes: tuple[str, ...]


def analyse(path: Path) -> Analysis:
    """Of a stored or printed profile, or its trace; of a record of `rocm-sd bench` or benchmarks/ops.py.

    Raises Unanalysable, or what the reader of such a record raises.
    """
    if path.suffix == ".txt":
        return _printed(path)
    if path.suffix == ".gz":
        return _of_trace(path, profiling.load(path))
    # A trace has half a kilobyte a kernel.
    values = read_json(path, partial(Unanalysable, path), of=dict, most=2**31)
    if "traceEvents" in values:
        return _of_trace(path, values)
    if values.get("format") == "rocm-sd-profile/1":
        return _stored(path, values)
    records = report.read([path])
    if records.op_runs:
        return _of_ops(path, records.op_runs[0], values.get("rows", ()))
    if not records.timed:
        raise Unanalysable(path, "it is a record of another kind, with no times of ops or of pictures")
    return _of_pictures(path, records.timed[0])


def improvable(analysis: Analysis) -> Chance | None:
    """The first chance whose op has a kernel of ours. What is within 10% of its floor is left alone."""
    ours = (c for c in analysis.chances if c.op in OPS and _kernels(OPS[c.op]))
    return next((c for c in ours if c.floor_ms is not None and c.floor_ms < _LEAVE * c.ms), None)


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """Plain values, with what kind of figures they are."""
    chances = [{**asdict(chance), "gain_ms": chance.gain_ms} for chance in analysis.chances]
    labels = {"ms": "measured", "calls": "counted", "floor_ms": MODELLED}
    return {"format": "rocm-sd-analysis/1", **asdict(analysis), "chances": chances, "labels": labels}


def as_table(analysis: Analysis, *, rows: int = 12) -> Table:
    """In 80 columns words give way, and figures do not."""
    unit, factor = ("us", 1e3) if analysis.kind == "ops" else ("ms", 1.0)
    whole = "" if analysis.total_ms is None else f", {analysis.total_ms:.1f} ms"
    table = Table(title=escape(f"What can be won: {analysis.kind} on {analysis.device}{whole}"), title_justify="left")
    table.caption = f"the first {rows} of {len(analysis.chances)}" if len(analysis.chances) > rows else None
    table.show_lines = True
    table.add_column("where, and what could win it", overflow="fold")
    for head in (f"{unit}\nmeasured", f"floor\n{MODELLED}", "to win"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("bound\nby", max_width=8)
    for c in analysis.chances[:rows]:
        where = ", ".join(filter(None, (f"{c.op} {c.shape}".strip(), f"{c.calls} calls" if c.calls else "", c.runs)))
        floor = ("?", "?") if c.floor_ms is None else (f"{c.floor_ms * factor:.1f}", f"{c.gain_ms * factor:.1f}")
        table.add_row(escape(f"{where}\n{c.change}"), f"{c.ms * factor:.1f}", *floor, c.bound)
    return table


def _card(path: Path, name: str) -> Arch:
    """By its architecture; or by its product, which is the one that has all the words. Its peaks are known."""
    words = set(name.lower().split()) - {"nvidia", "amd"}
    products = [each for each in arch.ARCHS.values() if words <= set((each.product or "").lower().split())]
    card = products[0] if len(products) == 1 else arch.get(name)
    if floor_seconds(OpWork(1.0, 1.0, "float16", OTHER), card) is None:
        known = ", ".join(each.name for each in arch.ARCHS.values() if each.peak("float16") and each.bandwidth_gbps)
        why = f"no peak rate and bandwidth of {shortened(name)!r} are known, so that nothing has a floor"
        raise Unanalysable(path, why, hint=f"Known are {known}. On one of these: rocm-sd profile --out FOLDER")
    return card


def _finished(
    path: Path, kind: str, device: str, card: Arch, chances: Sequence[Chance], total_ms: float | None, *notes: str
) -> Analysis:
    if not chances:
        raise Unanalysable(path, "it holds no times")
    ranked = sorted(chances, key=lambda each: (-each.gain_ms, -each.ms, each.op, each.shape))
    named = [(f"{c.op} {c.shape}".strip(), c.ms, c.floor_ms) for c in ranked]
    unknown = [name for name, _, floor in named if floor is None]
    faster = [name for name, ms, floor in named if floor is not None and ms < floor]
    every = (
        f"floors are {MODELLED}: counted work at the peak and bandwidth of {card.product} in the table of cards",
        f"no floor is known, and so no gain, of: {_listed(unknown)}" if unknown else "",
        f"faster than the floor, by caches or by a faster card than the table's: {_listed(faster)}" if faster else "",
        *notes,
    )
    return Analysis(str(path), kind, f"{device} ({card.name})", tuple(ranked), total_ms, tuple(filter(None, every)))


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(shortened(name) for name in names[:most]) + (f", {len(names) - most} more" * (len(names) > most))


def _judged(us: float | None, ms: float, floor_ms: float | None, bound: str | None) -> tuple[str, str]:
    """What bounds it, and what could win it; `us`: of one of its calls, where they are counted."""
    where = {"memory": MEMORY, "compute": MATRIX}.get(bound or "", UNKNOWN)
    share = None if floor_ms is None else floor_ms / ms
    if share is not None and share >= _LEAVE:
        return where, "faster than its floor: leave it" if share > 1 else "within 10% of its floor: leave it"
    if us is not None and us < _SHORT_US and (share is None or share < _LOW):
        return LAUNCHES, f"calls of {us:.1f} us, of which a launch is about {LAUNCH_S * 1e6:.0f}: fuse with a neighbour"
    if share is None:
        return UNKNOWN, "its floor is not known here: rocm-sd bench ops times known calls against theirs"
    if where == MEMORY:
        return where, f"{share:.0%} of the bandwidth: fewer passes, wider loads, or fusing with its neighbour"
    if share < _LOW:
        return where, f"{share:.0%} of the peak: another tile, a persistent kernel or split K"
    return where, f"{share:.0%} of the peak, as libraries reach: a persistent kernel, or a fused epilogue"


def _stored(path: Path, values: Mapping[str, Any]) -> Analysis:
    """As `bench.profiling.Analysis.to_dict` writes it."""
    if wrong := violations(values, {"required": [*_STORED["properties"]], **_STORED}):
        raise Unanalysable(path, "; ".join(wrong[:3]))
    families, kernels = (
        tuple(TimePart(share=0.0, flops=None, **{name: each[name] for name in _PART["properties"]}) for each in parts)
        for parts in (values["families"], values["kernels"])
    )
    profile = profiling.Analysis(
        values["device"], values["arch"], values["wall_ms"], values["profiled_ms"], values["busy_ms"], families, (),
        kernels, True, graph_share=values["graph_share"],
    )  # fmt: skip
    run = shortened(", ".join(map(str, values["subject"].values())), 200)
    # Without a time of its own it was timed under the profiler.
    return _of_profile(path, profile, (run, *values["notes"]), idle=profile.wall_ms != profile.profiled_ms)


def _of_trace(path: Path, values: Mapping[str, Any]) -> Analysis:
    try:
        device = next((str(each["name"]) for each in values.get("deviceProperties", ())), "no card")
        profile = profiling.analyse(profiling.read(values), _card(path, device), device=device)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unanalysable(path, f"it is a damaged trace ({type(error).__name__}: {first_line(error)})") from error
    return _of_profile(path, profile, (), idle=False)


_NUMBER = r"\d{1,9}(?:\.\d{1,3})?"
_HEADER = re.compile(
    r"rocm-sd profile (?P<run>.+?), one (?P<device>[^,]+), .+? "
    rf"(?P<wall>{_NUMBER}) ms, of which the card is busy for (?P<busy>{_NUMBER}) and idle for (?P<idle>{_NUMBER}); "
    r"(?P<graphs>[^.]+)\. By family, ms(?P<cut>, figures without a point are cut and not rounded)?: "
    r"(?P<families>.+?)\. Of the floor, by FLOPs of the stock model at the data sheet's peak: (?P<floors>.+?)\. "
    r"Below: ms, calls, family, kernel; the (?P<rows>\d{1,6}) that take longest\."
)
_ROW = re.compile(r" *(\d{1,9}\.\d\d) +(\d{1,9}) (\S+(?: \S+)*?) {2,}(\S.*)")


def _printed(path: Path) -> Analysis:
    """As benchmarks/engine-h200/ keeps what was printed: lines of comment with the sums, then the longest kernels."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Unanalysable(path, first_line(error)) from error
    # A header has some hundred characters, and more would be searched again and again.
    header = _HEADER.fullmatch(" ".join(line[1:].strip() for line in lines if line.startswith("#"))[:4000])
    if header is None:
        raise Unanalysable(path, "it is no printed profile with its whole header")
    kernels = []
    for number, line in enumerate(lines, 1):
        row = _ROW.fullmatch(line)
        if row and set(row[3].split(" + ")) <= set(FAMILIES):
            kernels.append(TimePart(row[4], float(row[1]), 0.0, int(row[2]), families={row[3]: float(row[1])}))
        elif not line.startswith("#"):
            raise Unanalysable(path, f"line {number} is not milliseconds, calls, family and kernel")
    if len(kernels) != int(header["rows"]):
        raise Unanalysable(path, f"it has {len(kernels)} of its {header['rows']} kernels")
    wall, busy, idle = (float(header[name]) for name in ("wall", "busy", "idle"))
    # What the sum of parts may be off: where figures are cut by 1 ms, and by their rounding.
    off = 1.1 if header["cut"] else 0.1
    if not -0.1 <= wall - busy - idle <= off:
        raise Unanalysable(path, f"busy for {busy} ms and idle for {idle} ms are not {wall} ms")
    percents, families = _figures(path, header["floors"], "%"), [TimePart(IDLE, idle, 0.0, 0)]
    for name, ms in _figures(path, header["families"]).items():
        here = [kernel for kernel in kernels if name in kernel.families]
        if sum(kernel.ms for kernel in here) > ms + off:
            raise Unanalysable(path, f"kernels of {name} take longer than all {ms} ms of it")
        floor = percents[name] / 100 * ms if name in percents else None
        families.append(TimePart(name, ms, 0.0, sum(each.calls for each in here), None, floor, ms, "compute"))
    profile = profiling.Analysis(
        header["device"], _card(path, header["device"]).name, wall, wall, busy, tuple(families), (), tuple(kernels),
        True, graph_share=float("all kernels are in replayed graphs" in header["graphs"]),
    )  # fmt: skip
    cut = "families without a point are cut: up to 1 ms more may be won" if header["cut"] else ""
    return _of_profile(path, profile, (header["run"], f"calls are those of the {len(kernels)} longest kernels", cut))


def _figures(path: Path, text: str, unit: str = "") -> dict[str, float]:
    found = [re.fullmatch(rf"([A-Za-z ]+) ({_NUMBER}){unit}", each) for each in text.split(", ")]
    figures = {each[1]: float(each[2]) for each in found if each and each[1] in FAMILIES}
    if len(figures) != len(found):
        raise Unanalysable(path, f"{shortened(text)!r} are not families with a figure each")
    return figures


def _of_profile(path: Path, profile: profiling.Analysis, notes: Sequence[str], *, idle: bool = True) -> Analysis:
    card = _card(path, profile.arch)
    chances = [_of_family(part, profile.kernels) for part in profile.families if part.ms and part.name != IDLE]
    waits = profile.family(IDLE)
    if idle and chances and waits is not None and waits.ms:
        between = "between graphs: more of a picture in one graph, less work for the host"
        launched = "for launches: capture the steps as a graph, fuse short calls"
        chances.append(_waiting(waits.ms, between if profile.graph_share >= _LOW else launched))
    partly = [each.name for each in profile.families if (each.counted_ms or each.ms) < 0.99 * each.ms]
    return _finished(
        path, "profile", profile.device, card, chances, profile.wall_ms if idle else profile.busy_ms, *notes,
        f"of {_listed(partly)} only the time is here whose work was counted" if partly else "",
        "" if idle else "how long the card waits is not said: the host was slowed by the profiler",
    )  # fmt: skip


def _waiting(ms: float, how: str) -> Chance:
    # While it waits there is nothing that it must do.
    return Chance(IDLE, "", None, ms, 0.0, LAUNCHES, "the host", f"the card waits {how}")


def _of_family(part: TimePart, kernels: Sequence[TimePart]) -> Chance:
    ms = part.counted_ms or part.ms
    us = part.ms / part.calls * 1e3 if part.calls else None
    bound, change = _judged(us, ms, part.floor_ms, part.bound)
    here = [(each.name.removesuffix(".kd"), each.families.get(part.name, 0.0)) for each in kernels]
    own = {name for op in OPS.values() for names in _kernels(op).values() for name in names}
    ours, listed = sum(ms for name, ms in here if name in own), sum(ms for _, ms in here)
    runs = f"{ours / listed:.0%} in our kernels" if listed else "kernels not listed"
    return Chance(part.name, "", part.calls or None, ms, part.floor_ms, bound, runs, change)


def _kernels(op: Op) -> dict[str, tuple[str, ...]]:
    """The kernels of this project, by implementation."""
    found = {each.name: tuple(each.kernels.promises) for each in op.implementations if each.kernels is not None}
    if op.verification is not None and op.verification.kernels:
        found[op.verification.implementation] = tuple(op.verification.promises)
    return found


def _of_ops(path: Path, run: OpRun, rows: Sequence[Mapping[str, Any]]) -> Analysis:
    """`rows`: what benchmarks/ops.py has beyond the run, the times of every implementation."""
    card = _card(path, run.arch)
    more = [row["us"] for row in rows] or [{}] * len(run.timings)
    chances = [_of_timing(one, one.ours, us, card) for one, us in zip(run.timings, more, strict=True) if one.ours]
    left = [f"{each.op} {each.call} ({each.why_skipped})" for each in run.timings if not each.ours]
    return _finished(
        path, "ops", run.device, card, chances, None,
        "times are of one call: how many a picture makes is not in the record", run.note,
        f"not timed: {_listed(left)}" if left else "",
    )  # fmt: skip


def _of_timing(timing: OpTiming, us: float, measured: Mapping[str, Any], card: Arch) -> Chance:
    op, ms, floor_ms, bound = OPS.get(timing.op), us / 1e3, None, None
    if op is not None and op.tuning is not None and op.verification is not None:
        samples = [each.sample for each in op.tuning.buckets]
        samples += (*op.tuning.timed, *op.verification.small, *op.verification.real)
        for arguments in [each.make(filled=False) for each in samples if each.name == timing.call][:1]:
            # Products of 8-bit values are made at their own rate, whatever the result's dtype.
            dtype = str(op.verification.problem(*arguments).get("of", timing.dtype))
            work = op.tuning.work(*arguments)
            least = floor_seconds(OpWork(work.flops, work.bytes, dtype, op.family or OTHER), card)
            floor_ms, bound = (None, None) if least is None else (least[0] * 1e3, least[1])
    runs = timing.implementation.partition(" (")[0]
    where, change = _judged(us, ms, floor_ms, bound)
    if op is not None and (floor_ms is None or floor_ms < _LEAVE * ms):
        times = {name: each for name, each in measured.items() if is_number(each) and each > 0}
        change = _by_comparison(op, runs, us, times, where) or change
    return Chance(timing.op, timing.call, None, ms, floor_ms, where, runs, change)


def _by_comparison(op: Op, runs: str, us: float, times: Mapping[str, float], where: str) -> str:
    """What the times of others in the same run say, where they say more than the floor."""
    best = min((name for name in times if name in {*op.own, STOCK}), key=times.__getitem__, default=runs)
    if best != runs and times[best] * _CLEAR < us:
        return f"{best} took {times[best]:.1f} us in the same run: choose it, rocm-sd tune"
    if where == MEMORY and us * _LEAVE < times.get("copy", 0.0):
        return f"as fast as a copy of its bytes ({times['copy']:.1f} us): only fusing with its neighbour saves time"
    ours = [name for name in _kernels(op) if name in times or not times]
    if runs in _kernels(op) or not ours:
        return ""
    took = f", which took {times[ours[0]]:.1f} us" if times else ""
    return f"{runs} runs: a better config of our kernel ({ours[0]}{took})"


def _of_pictures(path: Path, record: Record) -> Analysis:
    """Of our engine where it was timed, else of the fastest that is exact; of the fewest pictures at once."""
    card, name = _card(path, record.machine.arch), record.workload.name
    timed = sorted(
        (each for each in record.measurements if each.ms and each.quality == EXACT),
        key=lambda each: (each.engine != OURS, each.batch, each.p50_ms),
    )
    if not timed:
        raise Unanalysable(path, "it holds no times")
    one = timed[0]
    busy = min(one.p50_ms, one.card_ms or one.p50_ms)
    share = "" if one.floor_ms is None else f"{one.floor_ms / busy:.0%} of the peak in all: "
    change = f"{share}rocm-sd profile {quote(shortened(name))} --batch {one.batch} --out FOLDER says which work"
    shape = f"{name}, batch {one.batch}"
    chances = [Chance("picture", shape, None, busy, one.floor_ms, UNKNOWN, f"{one.engine} ({one.provider})", change)]
    if busy < one.p50_ms:
        chances.append(_waiting(one.p50_ms - busy, "for the host: the same profile says whether graphs are replayed"))
    others = [f"{each.engine} at batch {each.batch}" for each in timed[1:]]
    notes = [f"timed, too, and not analysed: {_listed(others)}" if others else ""]
    notes += [] if record.complete else ["the run was interrupted: this is what it has"]
    return _finished(path, record.kind, record.machine.device, card, chances, one.p50_ms, *notes)
