"""A load test in words: rows of a table, the verdict in one sentence, and what a reader should know beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from rocm_sd.bench.serving import ANSWERED, FAILED, LOST, OPEN, REJECTED, percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.bench.serving import ServingRecord

__all__ = ["HEADINGS", "MIB", "conditions", "notes", "rich_table", "rows", "title", "verdict", "wrong"]

HEADINGS = ("figure", "value", "95% interval")
_INTERVALS = (0.5, 0.95)
# Of the time that half of the requests take: then it is not the server's latency alone that is seen.
_LATE = 0.1
# With fewer in a quarter of the run, its median is luck.
_LEAST_IN_A_QUARTER, _GROWN = 8, 2.0
MIB = 2**20
# Of memory: less comes and goes with the pictures of the moment.
_LEAST_LOOKS, _MORE, _MORE_BYTES = 3, 1.05, 32 * MIB


def title(record: ServingRecord) -> str:
    return f"{record.setting.model} under {_shown(record.setting.rate)} requests/s"


def conditions(record: ServingRecord) -> str:
    s = record.setting
    where = "Server and clients on" if record.server.own else "Clients on"
    return f"{s.width}x{s.height}, {s.steps} steps, seed {s.seed}. {where} {record.machine.device}; {record.when[:10]}."


def rows(record: ServingRecord) -> list[tuple[str, str, str]]:
    found = [("requests sent", str(len(record.requests)), "")]
    found += [
        (name, str(record.count(outcome)), "")
        for name, outcome in (("answered", ANSWERED), ("rejected (429)", REJECTED), ("failed", FAILED), ("lost", LOST))
    ]
    if record.count(OPEN):
        found.append(("open at the end", str(record.count(OPEN)), ""))
    capacity = record.server.capacity
    of = f" ({record.setting.asked} of {_shown(capacity)})" if capacity else ""
    found.append(("rate asked for, requests/s", _shown(record.setting.rate) + of, ""))
    found.append(("rate achieved, requests/s", _shown(record.achieved_rate), ""))
    if record.throughput is not None:
        found.append(("throughput, pictures/s", _shown(record.throughput), _between(record.throughput_interval)))
    latencies = record.latencies
    if latencies:
        for share in (0.5, 0.9, 0.95, 0.99):
            bounds = record.latency_interval(share) if share in _INTERVALS else None
            found.append((f"latency p{100 * share:.0f}, s", _shown(percentile(latencies, share)), _between(bounds)))
        found.append(("latency max, s", _shown(max(latencies)), ""))
    if record.pictures_a_step is not None:
        found.append(("pictures a step", _shown(record.pictures_a_step), ""))
    return found + list(_memory(record))


def _memory(record: ServingRecord) -> Iterator[tuple[str, str, str]]:
    for name, before, after, between in (
        (
            "server's memory, MiB", record.before.host_bytes, record.after.host_bytes,
            [each.host_bytes for each in record.memory],
        ),
        (
            "its GPU memory, MiB", record.before.device_bytes, record.after.device_bytes,
            [each.device_bytes for each in record.memory],
        ),
    ):  # fmt: skip
        if before and after:
            most = f", {max(between) / MIB:.0f} at most" if between else ""
            yield name, f"{before / MIB:.0f} before, {after / MIB:.0f} after{most}", ""


def _grown(record: ServingRecord) -> Iterator[str]:
    """From the second quarter on: in the first one a server gets what it needs for its work."""
    quarter = len(record.memory) // 4
    if quarter < _LEAST_LOOKS:
        return
    for name, values in (
        ("memory", [each.host_bytes for each in record.memory]),
        ("GPU memory", [each.device_bytes for each in record.memory]),
    ):
        second, last = (percentile(values[n * quarter : (n + 1) * quarter], 0.5) for n in (1, 3))
        if last > max(_MORE * second, second + _MORE_BYTES):
            yield (
                f"The server's {name} grew: half of the second quarter it held {second / MIB:.0f} MiB at most, of the "
                f"last {last / MIB:.0f} MiB. A longer run shows whether that ends."
            )


def wrong(record: ServingRecord) -> str | None:
    """The sentence where a request was lost or failed."""
    lost, failed = record.count(LOST), record.count(FAILED)
    if not lost and not failed:
        return None
    reasons: dict[str, int] = {}
    for request in record.requests:
        if request.outcome in {LOST, FAILED} and request.why:
            reasons[request.why] = reasons.get(request.why, 0) + 1
    most = max(reasons, key=lambda why: reasons[why], default="")
    why = f", {reasons[most]} of them with: {most}" if most else ""
    return f"Of {len(record.requests)} requests {lost} were lost and {failed} failed{why.rstrip('.')}."


def verdict(record: ServingRecord) -> str:
    """What to say of the run where there is room for one sentence."""
    sentence = wrong(record)
    if sentence is not None:
        return sentence
    sent, answered, rejected = len(record.requests), record.count(ANSWERED), record.count(REJECTED)
    if not answered:
        return f"No request was answered of {sent} that were sent."
    latencies = record.latencies
    took = f"half within {_shown(percentile(latencies, 0.5))} s, 95% within {_shown(percentile(latencies, 0.95))} s"
    if answered == sent:
        return f"All {sent} requests were answered, {took}." if sent > 1 else f"The request was answered, {took}."
    later = f"; {rejected} were told to come later" if rejected else ""
    still = f"; {record.count(OPEN)} were still open" if record.count(OPEN) else ""
    return f"Nothing was lost: {answered} of {sent} requests were answered, {took}{later}{still}."


def notes(record: ServingRecord) -> tuple[str, ...]:
    found = [*record.notes]
    impolite = sum(request.retry_after_s is None for request in record.of(REJECTED))
    if impolite:
        found.append(f"{impolite} of the rejections did not say when to come again (Retry-After).")
    latencies = record.latencies
    quarter = len(latencies) // 4
    if quarter >= _LEAST_IN_A_QUARTER:
        medians = [percentile(latencies[n * quarter : (n + 1) * quarter], 0.5) for n in range(4)]
        # A queue that fills and empties again has grown between two quarters, and not through all four.
        if medians == sorted(medians) and medians[3] > _GROWN * medians[0]:
            found.append(
                f"The server fell behind: half of the first quarter took {_shown(medians[0])} s at most, of the last "
                f"{_shown(medians[3])} s, and it grew all the time. A longer run may show longer ones."
            )
    found += _grown(record)
    if latencies:
        late = percentile([request.late_s for request in record.requests], 0.99)
        if late > _LATE * percentile(latencies, 0.5):
            found.append(
                f"Requests were sent up to {_shown(late)} s after they were due: the machine that sent them was too "
                "busy. Latencies count from when they were due."
            )
    return tuple(found)


def rich_table(record: ServingRecord) -> Table:
    table = Table(*HEADINGS, title=escape(title(record)), title_justify="left", caption=escape(conditions(record)))
    table.caption_justify = "left"
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows(record):
        table.add_row(*map(escape, row))
    return table


def _between(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"{_shown(bounds[0])} to {_shown(bounds[1])}"


def _shown(value: float) -> str:
    """Three figures: 0.0123, 1.23, 12.3, 123."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
