"""Single ops under the roof of their card: how near each call comes to the least time that it can take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.bench.report.charts import Dot, roof
from rocm_sd.bench.report.parts import Figure, Section, Table, ratio_words, shown
from rocm_sd.ops import OPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rocm_sd.bench.report.reading import OpRun, OpTiming
    from rocm_sd.ops.definition import Work

__all__ = ["rooflines"]

TITLE = "Operators under the roof"


@dataclass(frozen=True)
class _TimedCall:
    """One timed call and the least that it must do; `share` is of the roof: 1 is as fast as the card can be."""

    timing: OpTiming
    work: Work | None
    share: float | None


def rooflines(runs: Sequence[OpRun]) -> Section:
    if not runs:
        return Section("roofline", TITLE, missing="No single ops were timed. Type: rocm-sd bench ops")
    figures = []
    for device, architecture in dict.fromkeys((run.device, run.arch) for run in runs):
        here = [run for run in runs if (run.device, run.arch) == (device, architecture)]
        calls = [_call(timing, architecture) for run in here for timing in run.timings]
        figures += _figures(device, architecture, calls, [run.note for run in here if run.note])
    lead = (
        "Each point is one call as Stable Diffusion makes it. The roof is what the card allows: memory on the slope, "
        "arithmetic on the flat part. Filled is what rocm-sd picked, hollow is stock torch. Bytes are counted once for "
        "each tensor, so a point above the slope was served by a cache."
    )
    commands = tuple(dict.fromkeys(run.command for run in runs if run.command))
    return Section("roofline", TITLE, lead, tuple(figures), commands=commands)


def _call(timing: OpTiming, architecture: str) -> _TimedCall:
    work = _work(timing)
    card = arch.get(architecture)
    # The table's word is "float16"; a dtype that the card has no rate for has no roof.
    known = card.peak(timing.dtype) is not None and card.bandwidth_gbps is not None
    if work is None or timing.ours is None or not known:
        return _TimedCall(timing, work, None)
    return _TimedCall(
        timing, work, arch.roofline(card, work.flops, work.bytes, timing.dtype).seconds / timing.ours * 1e6
    )


def _work(timing: OpTiming) -> Work | None:
    """FLOPs and bytes as the op itself counts them, for the sample of that name; None where it has no such sample."""
    op = OPS.get(timing.op)
    if op is None or op.tuning is None:
        return None
    samples = [*(bucket.sample for bucket in op.tuning.buckets), *op.tuning.timed]
    if op.verification is not None:
        samples += [*op.verification.small, *op.verification.real]
    sample = next((sample for sample in samples if sample.name == timing.call), None)
    return None if sample is None else op.tuning.work(*sample.make(filled=False))


def _figures(device: str, architecture: str, calls: list[_TimedCall], notes: list[str]) -> list[Figure]:
    card = arch.get(architecture)
    figures = []
    drawable = [c for c in calls if c.work and c.work.flops > 0 and c.work.bytes > 0 and c.timing.ours]
    # Dtypes of one rate stand under one roof.
    dtypes: dict[float | None, list[str]] = {}
    for dtype, _ in Counter(c.timing.dtype for c in drawable).most_common():
        dtypes.setdefault(card.peak(dtype), []).append(dtype)
    for peak, named in dtypes.items():
        here = [c for c in drawable if c.timing.dtype in named]
        bandwidth = card.bandwidth_gbps
        title = f"{' and '.join(named)} on {device}"
        words = (
            f"Roof: {card.product} by the table of architectures, {shown(peak)} TFLOP/s and {shown(bandwidth)} GB/s."
            if peak and bandwidth
            else f"No roof is drawn: the peak rate of {architecture} in {', '.join(named)} is not known."
        )
        chart = roof(
            title,
            [dot for c in here for dot in _dots(c)],
            peak_tflops=peak if bandwidth else None,
            bandwidth_gbps=bandwidth if peak else None,
        )
        figures.append(Figure(title, chart, _every_call(title, here), (words,)))
    title = f"Every op on {device}"
    still = sorted({c.timing.op for c in calls if c not in drawable})
    left = (f"Not drawn, since they compute nothing or are not known here: {', '.join(still)}.",) if still else ()
    figures.append(Figure(title, None, _by_op(title, calls), (*left, *dict.fromkeys(notes)), folded=False))
    return figures


def _dots(c: _TimedCall) -> Iterable[Dot]:
    assert c.work is not None
    for kind, us in (("other", c.timing.stock), ("ours", c.timing.ours)):
        if us:
            tflops = c.work.flops / us / 1e6
            who = "stock" if kind == "other" else f"rocm-sd ({c.timing.implementation})"
            text = f"{c.timing.op} {c.timing.call}, {who}: {shown(us)} µs, {shown(tflops)} TFLOP/s"
            yield Dot(c.work.flops / c.work.bytes, tflops, kind, text)


def _every_call(title: str, calls: list[_TimedCall]) -> Table:
    headings = ("op", "call", "picked", "µs", "stock µs", "times stock", "FLOP/byte", "TFLOP/s", "GB/s", "% of roof")
    rows = []
    for c in calls:
        t, work = c.timing, c.work
        assert work is not None
        assert t.ours is not None
        rows.append(
            (
                t.op, t.call, t.implementation, shown(t.ours), shown(t.stock),
                ratio_words(t.stock / t.ours) if t.stock else "",
                shown(work.flops / work.bytes), shown(work.flops / t.ours / 1e6), shown(work.bytes / t.ours / 1e3),
                shown(c.share * 100) if c.share else "",
            )
        )  # fmt: skip
    return Table.of(title, headings, rows, text=(0, 1, 2))


def _by_op(title: str, calls: list[_TimedCall]) -> Table:
    """One row an op: how many calls, and the geometric mean of the speed-ups with the slowest and fastest call."""
    rows = []
    for op in dict.fromkeys(c.timing.op for c in calls):
        here = [c for c in calls if c.timing.op == op]
        ratios = [c.timing.stock / c.timing.ours for c in here if c.timing.ours and c.timing.stock]
        shares = [c.share for c in here if c.share]
        skipped = [c.timing.why_skipped for c in here if c.timing.why_skipped]
        rows.append(
            (
                op,
                len(here),
                ratio_words(geometric_mean(ratios)) if ratios else "",
                f"{ratio_words(min(ratios))} to {ratio_words(max(ratios))}" if ratios else "",
                shown(100 * median(shares)) if shares else "",
                f"no speed for {len(skipped)}: {skipped[0]}" if skipped else "",
            )
        )
    headings = ("op", "calls", "times stock", "from, to", "median % of roof", "note")
    return Table.of(title, headings, rows, text=(0, 5))
