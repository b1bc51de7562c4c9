"""A server under load: every request as a point over the time of the run, and the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.bench import serving_tables as tables
from rocm_sd.bench.report.charts import GUTTER, Scale, chart, label, line, lines, percent, tag
from rocm_sd.bench.report.parts import Figure, Section, Table, shown
from rocm_sd.bench.serving import ANSWERED, FAILED, LOST, REJECTED, percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.report.parts import Svg
    from rocm_sd.bench.serving import Request, ServingRecord

__all__ = ["memory", "over_time", "serving"]

_HEIGHT = 300.0
# Where points end, in percent, and names of the dashed lines begin; and how far apart two of those are, in pixels.
_RIGHT, _ROW = 92.0, 14.0
# More than are told apart; of each neighbourhood the slowest stays.
_MOST_DOTS = 600
_LEAST_S = 1e-6


def serving(records: Sequence[ServingRecord]) -> Section | None:
    if not records:
        return None
    figures = []
    for record in records:
        title = tables.title(record)
        table = Table.of(title, tables.HEADINGS, tables.rows(record))
        drawn = over_time(title, record) if record.latencies else None
        notes = (tables.verdict(record), tables.conditions(record), *tables.notes(record))
        figures.append(Figure(title, drawn, table, notes, folded=False))
        if len(record.memory) > 1:
            figures.append(memory(f"Memory of the server: {title}", record))
    lead = (
        "Requests come when they are due, whether or not earlier ones are over. A point is one that was answered: when "
        "it was due, across, and how long its answer took, up. Dashed are the times that half, and 95% of them, stay "
        "within. A ring at the foot is one that was rejected, failed or lost."
    )
    commands = tuple(dict.fromkeys(record.command for record in records if record.command))
    return Section("serving", "A server under load", lead, tuple(figures), commands=commands)


def over_time(title: str, record: ServingRecord) -> Svg:
    """Latency of each answer by when its request was due."""
    top, bottom = 24.0, _HEIGHT - 44
    latencies = record.latencies
    x = Scale(0.0, max(_LEAST_S, record.sent_for_s, *(request.start_s for request in record.requests)), GUTTER, _RIGHT)
    y = Scale(0.0, max(*latencies, _LEAST_S) * 1.1, bottom, top)
    parts: list[Svg] = []
    for value in y.ticks(4):
        parts.append(line(GUTTER, y(value), _RIGHT, y(value), "grid"))
        parts.append(label(f"{value:g}", GUTTER - 1.5, y(value) + 4, "tick", anchor="end"))
    parts += [label(f"{value:g}", x(value), bottom + 18, "tick", anchor="middle") for value in x.ticks()]
    parts += [label("seconds until the answer", 0, top - 10, "axis")]
    parts += [label("seconds of the run", _RIGHT, bottom + 38, "axis", anchor="end")]
    half, most = (y(percentile(latencies, share)) for share in (0.5, 0.95))
    parts += [line(GUTTER, at, _RIGHT, at, "mark") for at in (half, most)]
    # Beside the points, and apart from each other where the times are not.
    parts += [label("half", 100, half + 4, "tick", anchor="end")]
    parts += [label("95%", 100, min(most, half - _ROW) + 4, "tick", anchor="end")]
    for request in _thinned(record.of(ANSWERED)):
        parts.append(_dot(x(request.start_s), y(request.seconds or 0.0), "ours", request))
    for outcome in (REJECTED, FAILED, LOST):
        parts += [_dot(x(request.start_s), bottom, "other", request) for request in _thinned(record.of(outcome))]
    return chart(title, tables.verdict(record), _HEIGHT, *parts)


def memory(title: str, record: ServingRecord) -> Figure:
    """What its processes held over the time of the run."""
    host = [(each.at_s, each.host_bytes / tables.MIB) for each in record.memory]
    device = [(each.at_s, each.device_bytes / tables.MIB) for each in record.memory]
    series = {"rocm-sd": host} | ({"its GPU memory": device} if any(value for _, value in device) else {})
    rows = [
        (name, *(f"{value:.0f}" for value in (points[0][1], max(value for _, value in points), points[-1][1])))
        for name, points in series.items()
    ]
    table = Table.of(title, ("memory", "first, MiB", "highest, MiB", "last, MiB"), rows)
    return Figure(title, lines(title, series, unit="MiB"), table, folded=True)


def _dot(x: float, y: float, kind: str, request: Request) -> Svg:
    why = f" ({request.why})" if request.why else ""
    said = f"{request.outcome} after {shown(request.seconds)} s{why}"
    return tag("circle", tag("title", said), cx=percent(x), cy=y, r=3.5, class_=f"dot {kind}")


def _thinned(requests: Sequence[Request]) -> list[Request]:
    size = -(-len(requests) // _MOST_DOTS) or 1
    return [max(requests[n : n + size], key=lambda one: one.seconds or 0.0) for n in range(0, len(requests), size)]
