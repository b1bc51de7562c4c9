"""Summary, speed against engines and ablation: what the timings of whole pictures say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rocm_sd.bench.records import COMPILE, INTERVALS, NOT_LOADED, OURS, STOCK
from rocm_sd.bench.report.charts import Bar, WaterfallRow, bars, waterfall
from rocm_sd.bench.report.parts import Figure, Headline, MachineFacts, Section, Table, ratio_words, shown, times
from rocm_sd.bench.verdict import problems
from rocm_sd.comparison import TURNS_FOR_95, Comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.records import Measurement, Record
    from rocm_sd.bench.serving import ServingRecord
    from rocm_sd.bench.several_gpus_record import GpusRecord

__all__ = ["ablation", "cards", "commands_of", "headlines", "speed"]

ONCE = "1×"  # noqa: RUF001 -- the sign of multiplication is meant


def workload_words(record: Record) -> str:
    """The workload as anyone would set it up."""
    facts = record.workload
    return (
        f"{facts.name}: {facts.width}×{facts.height}, {facts.steps} steps {facts.scheduler}, "  # noqa: RUF001
        f"guidance {facts.guidance:g}, {facts.dtype}, weights {facts.weights}"
    )


def _usable(measurement: Measurement | None) -> bool:
    """No speed is shown for a result that is not a number, nor for an approximation whose pictures nobody scored."""
    if measurement is None or not measurement.ms or _unscored(measurement):
        return False
    return measurement.error is None or math.isfinite(measurement.error)


def _unscored(m: Measurement) -> str | None:
    return next(problems(m.engine, m.quality, claims=False), None)


def _comparison(record: Record, engine: str, against: str, batch: int) -> Comparison | None:
    return next((c for c in record.comparisons if (c.engine, c.against, c.batch) == (engine, against, batch)), None)


def _interval(comparison: Comparison) -> str:
    ends = (comparison.low, comparison.high)
    # An interval that ends near 1 has three places: 1.003 is not 1.00.
    if any(0.995 <= end < 1.005 for end in ends):
        return " to ".join(f"{end:.3f}" for end in ends)
    return " to ".join(ratio_words(end) for end in ends)


def headlines(records: Sequence[Record]) -> tuple[Headline, ...]:
    """For each workload and batch: rocm-sd against stock, then against the best of the others."""
    found: list[Headline] = []
    for record in records:
        if record.kind != "engines":
            continue
        for batch in record.batches:
            ours = [c for c in record.comparisons if c.engine == OURS and c.batch == batch]
            rivals = sorted((c for c in ours if c.against != STOCK), key=lambda c: c.ratio)[:1]
            found += [_headline(record, c) for c in (*(c for c in ours if c.against == STOCK), *rivals)]
    return tuple(found)


def _headline(record: Record, c: Comparison) -> Headline:
    pictures = "one picture" if c.batch == 1 else f"{c.batch} pictures at once"
    if c.verdict == "no difference":
        sentence = f"No difference between {c.engine} and {c.against} beyond the spread, {pictures}."
    elif c.verdict == "slower":
        sentence = f"{c.engine} is slower than {c.against}: {ratio_words(c.ratio)} times its speed, {pictures}."
    else:
        sentence = f"{c.engine} is {ratio_words(c.ratio)} times as fast as {c.against}, {pictures}."
    kind = "95% interval" if record.turns(c) >= TURNS_FOR_95 else "Extremes of fewer than eight turns:"
    detail = f"{kind} {_interval(c)}. {record.workload.name} on {record.machine.device}."
    return Headline(times(c.ratio), sentence, detail, verdict=c.verdict)


def cards(records: Sequence[Record | ServingRecord | GpusRecord]) -> tuple[MachineFacts, ...]:
    """Each machine once, with its versions."""
    found: dict[str, MachineFacts] = {}
    for record in records:
        m = record.machine
        facts = [("architecture", m.arch)]
        if m.compute_units:
            facts.append(("compute units", str(m.compute_units)))
        if m.memory_mib:
            facts.append(("memory", f"{m.memory_mib / 1024:.1f} GiB"))
        if m.driver:
            facts.append(("driver", str(m.driver)))
        facts += [("system", str(m.system)), *((str(k), str(v)) for k, v in m.versions.items() if v)]
        found.setdefault(repr((m.device, facts)), MachineFacts(m.device, tuple(facts)))
    return tuple(found.values())


_COLUMNS = (
    "engine", "version", "provider", "average ms", "p50 ms", "p90 ms", "images/s", "it/s", "times stock",
    "interval", "first picture s", "warm-up s", "power W", "J/image", "clock MHz", "°C",
    "% of floor", "error vs fp32", "pictures", "note",
)  # fmt: skip


def _row(record: Record, m: Measurement) -> tuple[object, ...]:
    if not _usable(m):
        unscored = _unscored(m)
        wrong = f"it {unscored}" if unscored else "its result is not a number"
        why = m.left_out or "not timed yet" if not m.ms else wrong
        return (m.engine, m.version, m.provider, *[None] * (len(_COLUMNS) - 4), f"no speed: {why}")
    c = _comparison(record, m.engine, STOCK, m.batch)
    figures = (m.average_ms, m.p50_ms, m.p90_ms, m.images_per_s, m.steps_per_s)
    after = (
        m.first_picture_s,
        m.warm_up_s,
        m.power_watt,
        m.energy_joule,
        m.clock_mhz,
        m.temperature_c,
        m.floor_percent,
        m.error,
    )
    return (
        m.engine, m.version, m.provider, *map(shown, figures), c and ratio_words(c.ratio), c and _interval(c),
        *map(shown, after), str(m.quality) if m.quality.is_lossy else None,
        "; ".join((*((c.verdict,) if c and c.verdict == "no difference" else ()), *m.notes)),
    )  # fmt: skip


def _bar(record: Record, m: Measurement, stock: Measurement | None) -> Bar:
    if not _usable(m):
        return Bar(m.engine, None, "no speed, see below" if m.left_out else "not timed")
    kind = "ours" if m.engine == OURS else "other"
    text = f"{shown(m.p50_ms)} ms"
    c = _comparison(record, m.engine, STOCK, m.batch)
    if c is None:
        return Bar(m.engine, m.images_per_s, f"{text} · {ONCE}" if stock and m.engine == STOCK else text, kind=kind)
    # Stock's rate times the ratio, so that the whisker is the interval of the ratio and not of one of the two.
    rate = stock.images_per_s if stock else m.images_per_s / c.ratio
    undecided = c.verdict == "no difference"
    text += " · no difference" if undecided else f" · {times(c.ratio)} ({_interval(c)})"
    text += f" · {m.quality.verdict}" if m.quality.is_lossy else ""
    return Bar(m.engine, rate * c.ratio, text, rate * c.low, rate * c.high, "undecided" if undecided else kind)


def speed(records: Sequence[Record]) -> Section:
    chosen = [record for record in records if record.kind == "engines"]
    if not chosen:
        return Section(
            "speed",
            "Speed against engines",
            missing="No engines were timed side by side. Type: rocm-sd bench emoji, and give its record to the report.",
        )
    figures = []
    for record in chosen:
        for batch in record.batches:
            found = [m for m in record.measurements if m.batch == batch]
            stock = record.measurement(STOCK, batch)
            stock = stock if _usable(stock) else None
            title = f"{record.workload.name}, batch {batch}, on {record.machine.device}"
            mark = (stock.images_per_s, "stock") if stock else None
            chart = bars(title, [_bar(record, m, stock) for m in found], unit="images/s", mark=mark)
            table = Table.of(
                title,
                _COLUMNS,
                [_row(record, m) for m in found],
                text=(0, 1, 2, len(_COLUMNS) - 2, len(_COLUMNS) - 1),
                marked=[n for n, m in enumerate(found) if m.engine == OURS],
            )
            reasons = tuple(f"{m.engine}: {m.left_out}." for m in found if m.left_out)
            reasons += tuple(f"{m.engine} approximates: {m.quality}." for m in found if m.ms and m.quality.is_lossy)
            figures.append(Figure(title, chart, table, (*_notes(record), *reasons)))
    lead = (
        "Pictures a second, whole pictures from noise to pixels; the engines took turns in one run. The value is the "
        "median time of a batch, then how many times as fast as stock it is, with its interval: the whisker. "
        f"{INTERVALS}"
    )
    return Section("speed", "Speed against engines", lead, tuple(figures), commands=commands_of(chosen))


def _notes(record: Record) -> tuple[str, ...]:
    """With the day: two records of one workload have the same title."""
    first = (f"{workload_words(record)}; {record.when[:10]}.",)
    unfinished = () if record.complete else ("The run was interrupted; this is what it has.",)
    loaded = () if record.loading == NOT_LOADED else (f"{record.loading}.",)
    return (*first, *unfinished, *loaded, *map(str, record.notes))


def commands_of(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.command for record in records if record.command))


def ablation(records: Sequence[Record]) -> Section:
    title = "What each optimisation gives"
    chosen = [record for record in records if record.kind == "ablation"]
    if not chosen:
        return Section(
            "ablation", title, missing="No ablation was recorded. Type: rocm-sd bench sd15-512 --ablation --batch 1,8"
        )
    figures = [
        _waterfall(record, batch, of_card=of_card)
        for record in chosen
        for batch in record.batches
        for of_card in (False, True)
    ]
    lead = (
        "One optimisation is added a row. Grey is the time that is left, colour is what the row took away. A pale end "
        f"is a difference inside the spread: nothing can be said about it. {INTERVALS}"
    )
    if any(COMPILE in record.engines for record in chosen):
        lead += f" {COMPILE} is no such row: it was timed in the same turns."
    return Section("ablation", title, lead, tuple(f for f in figures if f), commands=commands_of(chosen))


_CARD_TIME = (
    "How long the card was busy with one batch, without the gaps: what a row saves the card, whether or not it waits "
    "for the host. One batch was recorded by torch.profiler, after all turns; it has no interval, and no end here is "
    "pale."
)


def _waterfall(record: Record, batch: int, *, of_card: bool) -> Figure | None:
    """What each row took away. `of_card`: by the card's own time, where it was measured."""
    title = f"{record.workload.name}, batch {batch}, on {record.machine.device}"
    title = f"The card's own time: {title}" if of_card else title
    drawn: list[WaterfallRow] = []
    rows: list[tuple[object, ...]] = []
    first: Measurement | None = None
    before: Measurement | None = None
    for m in (m for m in record.measurements if m.batch == batch):
        ms = _ms(m, of_card=of_card)
        if ms is None:
            if not of_card:
                rows.append((m.engine, *[None] * 7, f"no speed: {m.left_out or 'not timed yet'}"))
            continue
        above = None if m.engine == COMPILE else before
        gained = _gain(record, m, above, of_card=of_card) if above else None
        whole = _gain(record, m, first, of_card=of_card) if first else None
        decided = gained is None or gained.verdict != "no difference"
        text = f"{shown(ms)} ms"
        if gained:
            text += f" · {times(gained.ratio)}" if decided else " · no difference"
        drawn.append(WaterfallRow(m.engine, _ms(above, of_card=of_card) if above else None, ms, text, decided))
        # What one of the two tables does not have is None, and makes no column there.
        interval, notes = (None, None) if of_card else (gained and _interval(gained), "; ".join(m.notes))
        memory = (None, None) if of_card else (shown(m.first_run_mib), shown(m.second_run_mib))
        rows.append(
            (
                m.engine, shown(ms), gained and ratio_words(gained.ratio), interval, whole and ratio_words(whole.ratio),
                *memory, shown(m.p50_ms) if of_card else None, notes,
            )
        )  # fmt: skip
        first, before = first or m, m
    if not drawn:
        return None
    headings = (
        "with", "card ms" if of_card else "p50 ms", "times the row above", "interval", "times the first row",
        "first-run MiB", "second-run MiB", "p50 ms", "note",
    )  # fmt: skip
    table = Table.of(title, headings, rows, text=(0, 8))
    return Figure(title, waterfall(title, drawn, unit="ms"), table, (_CARD_TIME,) if of_card else _notes(record))


def _ms(m: Measurement, *, of_card: bool) -> float | None:
    if not _usable(m):
        return None
    return (m.card_ms or None) if of_card else m.p50_ms


def _gain(record: Record, m: Measurement, before: Measurement, *, of_card: bool) -> Comparison:
    """As it was recorded, or from the turns. The card's own time was taken once: it has no interval."""
    if of_card and before.card_ms and m.card_ms:
        ratio = before.card_ms / m.card_ms
        return Comparison(m.engine, before.engine, m.batch, ratio, ratio, ratio, "faster")
    from rocm_sd.measuring import compare  # noqa: PLC0415 -- only ablations need it

    recorded = _comparison(record, m.engine, before.engine, m.batch)
    return recorded or compare(m.engine, before.engine, m.batch, m.ms, before.ms)
