"""Fill the tables of BENCHMARKS.md, docs/projection.md and the performance guides from records in benchmarks/.

python tools/benchmarks_page.py          rewrites what lies between <!-- table: NAME --> and <!-- end of table -->
python tools/benchmarks_page.py --check  changes nothing, and fails when a table is not what the records say
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docs_guide
from rocm_sd import arch
from rocm_sd.bench import kpis, projection
from rocm_sd.bench.ablation import STOCK_ROW
from rocm_sd.bench.records import COMPILE, FORMAT, Measurement, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["DOCUMENTS", "TABLES", "elsewhere", "fill", "main", "stale"]

ROOT = Path(__file__).resolve().parents[1]
PROJECTION_DATA = ROOT / "src/rocm_sd/bench/data/work.json"
DOCUMENTS = (
    "BENCHMARKS.md", "docs/projection.md", "docs/performance-guide.md", "docs/performance-guide-instinct.md",
)  # fmt: skip
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]], words: Sequence[str] = ()) -> str:
    """Figures stand on the right; `words` are the headings of columns that are read."""
    lines = [list(headings), ["---" if heading in words else "---:" for heading in headings]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


@cache
def _found(pattern: str, root: Path) -> tuple[tuple[str, dict[str, Any]], ...]:
    paths = sorted((root / "benchmarks").glob(pattern))
    return tuple((str(path.relative_to(root)), json.loads(path.read_text(encoding="utf-8"))) for path in paths)


def _records(pattern: str) -> list[tuple[str, Record]]:
    return [
        (name, Record.load(ROOT / name)) for name, values in _found(pattern, ROOT) if values.get("format") == FORMAT
    ]


def _versions(versions: dict[str, Any], names: Sequence[str] = ("torch", "cuda", "hip", "rocm", "triton")) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


def _file(name: str, record: Record) -> str:
    return f"`{name}`" if record.complete else f"`{name}` (interrupted)"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _peak(measured: Measurement) -> float | None:
    """Of the first picture, in which ops are tested and kernels compiled, and of every other: the larger one."""
    return max((mib for mib in (measured.first_run_mib, measured.second_run_mib) if mib is not None), default=None)


def _card_ms(measured: Measurement) -> str:
    return "" if measured.card_ms is None else f"{measured.card_ms:.0f}"


def _compared(record: Record, measured: Measurement, against: str) -> str:
    for one in record.comparisons:
        if (one.engine, one.against, one.batch) == (measured.engine, against, measured.batch):
            ratio = "no difference" if one.verdict == "no difference" else f"{one.ratio:.2f}"
            return f"{ratio} ({one.low:.2f} to {one.high:.2f})"
    return ""


def _engines() -> str:
    """Whole pictures."""
    headings = (
        "workload", "card", "engine", "batch", "ms a batch", "times as fast as stock", "first picture s", "peak MiB",
        "record",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for name, record in _records("engine-*/*.json"):
        facts = record.workload
        text = f"{facts.name}, {facts.steps} steps, {facts.dtype}, {facts.weights} weights"
        for measured in record.measurements:
            if measured.ms:
                first = "" if measured.first_picture_s is None else f"{measured.first_picture_s:.1f}"
                # An approximation is never listed without what its pictures score.
                lossy = f" ({measured.quality})" if measured.quality.is_lossy else ""
                rows.append(
                    (text, record.machine.device, measured.engine + lossy, measured.batch, f"{measured.p50_ms:.0f}",
                     _compared(record, measured, "stock"), first, _mib(_peak(measured)), _file(name, record))
                )  # fmt: skip
    return _table(headings, rows, ("workload", "card", "engine", "record")) if rows else "Nothing is recorded yet.\n"


def _ablation() -> str:
    """One table for each record: a row adds one optimisation to those before it; torch.compile stands beside them."""
    parts = []
    for name, record in _records("ablation-*/*.json"):
        headings = ["added"]
        with_card = {measured.batch for measured in record.measurements if measured.card_ms is not None}
        for batch in record.batches:
            headings += [f"batch {batch}: ms", *(["card ms"] if batch in with_card else [])]
            headings += ["times the row before", "times stock", "MiB, first run", "second run"]
        rows: list[list[str]] = []
        before: dict[int, float] = {}
        for engine in record.engines:
            is_row = engine != COMPILE
            row = [f"{engine}: stock as it comes" if engine == STOCK_ROW else engine if is_row else f"beside: {engine}"]
            for batch in record.batches:
                measured = record.measurement(engine, batch)
                if measured is None or not measured.ms:
                    row += [measured.left_out or "" if measured else "", *[""] * (4 + (batch in with_card))]
                    continue
                gain = f"{before[batch] / measured.p50_ms:.2f}" if batch in before and is_row else ""
                before[batch] = measured.p50_ms
                peaks = (_mib(measured.first_run_mib), _mib(measured.second_run_mib))
                row += [f"{measured.p50_ms:.0f}", *([_card_ms(measured)] if batch in with_card else [])]
                row += [gain, _compared(record, measured, STOCK_ROW), *peaks]
            rows.append(row)
        facts = record.workload
        text = f"{facts.name}, {facts.steps} steps, {facts.weights} weights, on {record.machine.device}"
        versions = _versions(record.machine.versions)
        parts.append(f"{text} ({versions}); {_file(name, record)}.\n\n{_table(headings, rows, ('added',))}")
    return "\n".join(parts) if parts else "No ablation is recorded yet.\n"


def _ops() -> str:
    headings = ("op", "card", "shapes", "times stock", "least", "most", "times the best stock", "versions", "record")
    rows = []
    for name, values in _found("ops-*/*.json", ROOT):
        if values.get("format") == FORMAT:
            continue
        ratios = [row["against_stock"]["ratio"] for row in values["rows"]]
        mean = values["geomean"]
        rows.append(
            (f"`{values['op']}`", values["machine"]["gpu"], len(ratios), f"{mean['against_stock']:.2f}",
             f"{min(ratios):.2f}", f"{max(ratios):.2f}", f"{mean['against_best_stock']:.2f}",
             _versions(values["versions"]), f"`{name}`" + (f", {values['note']}" if "note" in values else ""))
        )  # fmt: skip
    return _table(headings, rows, ("op", "card", "versions", "record")) if rows else "Nothing is recorded yet.\n"


def _projections() -> str:
    """Every row says that it is modelled."""
    headings = (
        "workload", "card", "plan", "picture ms", "it/s", "UNet step ms", "VAE decode ms", "what it is",
        "model's error",
    )  # fmt: skip
    rows = [
        (p.workload, f"{p.product} ({p.arch})", p.plan, f"{p.ms:.0f}", f"{p.steps_per_s:.1f}", f"{p.step_ms:.1f}",
         f"{p.decode_ms:.1f}", f"**{p.label}**", p.model_error)
        for p in projection.projections()
    ]  # fmt: skip
    return _table(headings, rows, ("workload", "card", "plan", "what it is", "model's error"))


def _short_projections() -> str:
    """A line for each card: the seconds of both plans, from the faster to the slower one."""
    by_card: dict[str, dict[str, list[float]]] = {}
    for made in projection.projections():
        by_card.setdefault(f"{made.product} ({made.arch})", {}).setdefault(made.workload, []).append(made.ms / 1e3)
    workloads = list(dict.fromkeys(made.workload for made in projection.projections()))
    rows = [
        (card, *(f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}" for name in workloads))
        for card, seconds in by_card.items()
    ]
    return _table(("card", *workloads), rows, ("card",))


def elsewhere() -> Iterator[tuple[projection.Projection, kpis.Baseline]]:
    """Cards that the model never saw, each with the fastest figure that somebody published with another engine.

    They show how far the model carries, and no more.
    """
    known: dict[str, Any] = json.loads(PROJECTION_DATA.read_text(encoding="utf-8"))
    for workload, facts in known["workloads"].items():
        fastest: dict[str, kpis.Baseline] = {}
        for figure in kpis.baselines():
            like = (figure.model, figure.height, figure.batch) == (facts["model"], facts["side"], 1)
            card = arch.get(figure.arch)
            # The table's figures are of one product: an H100 is no H200, and half of an MI250X is no MI250X.
            same = set(figure.hardware.split()) <= set((card.product or "").split())
            rate = figure.steps_per_s
            if not like or not same or rate is None or figure.arch == known["arch"]:
                continue
            if figure.arch not in fastest or rate > (fastest[figure.arch].steps_per_s or 0.0):
                fastest[figure.arch] = figure
        for name, figure in sorted(fastest.items()):
            yield projection.project(workload, name), figure


def _elsewhere() -> str:
    headings = ("workload", "card", "modelled it/s", "fastest published it/s", "with", "modelled speed against it")
    rows = []
    for modelled, published in elsewhere():
        percent = 100 * (modelled.steps_per_s / (published.steps_per_s or float("nan")) - 1)
        rows.append(
            (modelled.workload, modelled.product, f"{modelled.steps_per_s:.1f}", f"{published.steps_per_s:.1f}",
             f"[{published.engine}, {published.year}]({published.source})", f"{percent:+.0f}%")
        )  # fmt: skip
    return _table(headings, rows, ("workload", "card", "with"))


def _families() -> str:
    rows = [
        (f"`{op}`", f"{family.fixed_us:.1f}", f"{family.share:.0%}", family.calls)
        for op, family in sorted(projection.fits().items())
    ]
    return _table(("family", "fixed us", "share of the roofline", "timed calls"), rows, ("family",))


def _error() -> str:
    rows: list[tuple[str, ...]] = []
    for workload in dict.fromkeys(made.workload for made in projection.projections()):
        found = projection.deviation(workload)
        if found is None:
            rows.append((workload, "none recorded", "", "", ""))
            continue
        figures = (found.as_used, found.without_shapes, found.without_ops)
        rows.append((workload, f"{found.measured_ms:.0f}", *(f"{figure:+.0f}%" for figure in figures)))
    headings = ("workload", "measured ms", "as it is used", "without shapes", "without ops")
    return _table(headings, rows, ("workload",))


def _kpis() -> str:
    parts = []
    for name, record in _records("engine-*/*.json"):
        found = kpis.kpis(record)
        if found:
            headings, rows = kpis.table(found)
            words = ("engine", "compared with", "target", "what differs")
            parts.append(
                f"{record.workload.name} on {record.machine.device}; `{name}`.\n\n{_table(headings, rows, words)}"
            )
    if not parts:
        return "No record is there that could be compared.\n"
    return "\n".join(parts)


def _targets() -> str:
    headings = ("on", "compared with", "target", "fastest published figures")
    rows = []
    for target in kpis.targets():
        best: dict[str, kpis.Baseline] = {}
        for figure in kpis.baselines():
            rate = figure.steps_per_s
            if figure.hardware in target.hardware and rate is not None and figure.batch == 1:
                held = best.get(figure.model)
                best[figure.model] = figure if held is None or rate > (held.steps_per_s or 0) else held
        text = ", ".join(f"{m}: [{f.steps_per_s:.1f} it/s, {f.engine}]({f.source})" for m, f in sorted(best.items()))
        rows.append((", ".join(target.families), " or ".join(target.hardware), f"{target.percent:.0f}%", text))
    return _table(headings, rows, headings)


TABLES: dict[str, Callable[[], str]] = {
    "bench-engines": _engines,
    "bench-ablation": _ablation,
    "bench-ops": _ops,
    "bench-kpis": _kpis,
    "bench-targets": _targets,
    "projections": _projections,
    "projection-short": _short_projections,
    **{f"guide-{family}": partial(docs_guide.facts, family) for family in docs_guide.FAMILIES},
    "projection-families": _families,
    "projection-error": _error,
    "projection-elsewhere": _elsewhere,
}


def fill(text: str) -> str:
    """The text with every marked table made anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block['name']]()}\n{block[3]}", text)


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Documents whose tables are not what the records say, each with its right text."""
    texts = {root / name: (root / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    filled = {path: fill(text) for path, text in texts.items()}
    return {path: text for path, text in filled.items() if text != texts[path]}


def main(arguments: list[str]) -> int:
    documents = stale()
    for path, text in documents.items():
        name = path.relative_to(ROOT)
        if "--check" in arguments:
            print(f"{name} has tables that are out of date. Type: python tools/benchmarks_page.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"rewrote the tables of {name}")
    return 1 if documents and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
