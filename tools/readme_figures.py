"""The charts and badges of README.md, and its figures in words, from records under benchmarks/ and from proofs.

python tools/readme_figures.py          writes docs/assets/speed-light.svg, -dark.svg and their like
python tools/readme_figures.py --check  changes nothing, and fails when a chart is not what the records say

What stands in words is filled in by tools/docs_tables.py, as the tables of the documents are.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.bench import sending
from rocm_sd.bench.ablation import ROWS, STOCK_ROW
from rocm_sd.bench.projection import projections
from rocm_sd.bench.records import COMPILE, OURS, STOCK, Comparison, Measurement, Record
from rocm_sd.bench.report.charts import tag
from rocm_sd.verify.proofs import proofs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rocm_sd.bench.report.parts import Svg

__all__ = [
    "ABLATION",
    "ENGINES",
    "badge_links",
    "figures",
    "gpus",
    "main",
    "measured_where",
    "modelled",
    "stale",
    "status",
]

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("benchmarks/engine-h200/sd15-512.json", "benchmarks/engine-h200/sdxl-mlperf.json")
# The one record with the card's own time of every row.
ABLATION = "benchmarks/ablation-h200/sd15-512-ablation-earlier.json"
FIRST_RUN = "benchmarks/first-run-h200/plans.json"
COMFYUI = "benchmarks/comfyui-h200/comfyui-sd15-512.json"
_TITLES = {"sd15": "Stable Diffusion 1.5", "sdxl": "SDXL"}
_WORKLOADS = {"sd15-512": "SD 1.5", "sdxl-mlperf": "SDXL"}
_NAMES = {STOCK: "Diffusers", COMPILE: "torch.compile", OURS: "rocm-sd"}
WIDTH, ROW, BAR = 860, 30, 18
# Where a bar begins and how long the longest is.
_BEGIN, _LONGEST = 190, 380
_FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    text: str
    quiet: str
    ours: str
    other: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#c8102e", "#afb8c1"),
    "dark": Theme("#f0f6fc", "#9198a1", "#ff6b6b", "#57606a"),
}


def _text(
    words: str, x: float, y: float, colour: str, *, size: int = 14, anchor: str = "start", bold: bool = False
) -> Svg:
    return tag(
        "text", words, x=float(x), y=float(y), fill=colour, font_size=size, text_anchor=anchor,
        font_weight="600" if bold else None,
    )  # fmt: skip


def _picture(title: str, description: str, height: int, parts: Iterable[Svg], width: int = WIDTH) -> str:
    whole = tag(
        "svg", tag("title", title), tag("desc", description), *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=width, height=height, role="img",
        aria_label=f"{title}. {description}", font_family=_FONT,
    )  # fmt: skip
    return f"{whole}\n"


def _measured(record: Record, engine: str) -> Measurement:
    return next(one for one in record.measurements if (one.engine, one.batch) == (engine, 1))


def _compared(record: Record, engine: str, batch: int = 1) -> Comparison:
    asked = (engine, STOCK, batch)
    return next(one for one in record.comparisons if (one.engine, one.against, one.batch) == asked)


def _waited(measured: Measurement) -> str:
    return f"{measured.first_picture_s:.1f} s"


def _peak(measured: Measurement) -> str:
    return f"{max(measured.first_run_mib or 0, measured.second_run_mib or 0) / 1024:.1f} GiB"


def speed(theme: Theme) -> str:
    """Milliseconds a picture of each engine, with what is waited for once and the memory that it takes."""
    parts, told, y = [], [], 14
    for x, words in ((700, "first picture"), (WIDTH - 4, "peak memory")):
        parts.append(_text(words, x, y, theme.quiet, size=12, anchor="end"))
    for name in ENGINES:
        record = Record.load(ROOT / name)
        facts = record.workload
        title = f"{_TITLES[facts.model]}, {facts.width}x{facts.height}, {facts.steps} steps"
        slowest = _measured(record, STOCK).p50_ms
        parts.append(_text(title, 0, y, theme.text, bold=True))
        y += 12
        for engine in (STOCK, COMPILE, OURS):
            measured, is_ours = _measured(record, engine), engine == OURS
            colour = theme.ours if is_ours else theme.other
            long = max(2.0, measured.p50_ms / slowest * _LONGEST)
            middle = y + ROW / 2 + 5
            figure = f"{measured.p50_ms:.0f} ms" + (
                f", {_compared(record, engine).ratio:.2f}x" if engine != STOCK else ""
            )
            parts += [
                _text(_NAMES[engine], _BEGIN - 12, middle, theme.text, anchor="end", bold=is_ours),
                tag("rect", x=_BEGIN, y=float(y + (ROW - BAR) / 2), width=long, height=BAR, rx=3, fill=colour),
                _text(figure, _BEGIN + long + 8, middle, theme.text, size=13, bold=is_ours),
                _text(_waited(measured), 700, middle, theme.text if is_ours else theme.quiet, size=13, anchor="end"),
                _text(
                    _peak(measured), WIDTH - 4, middle, theme.text if is_ours else theme.quiet, size=13, anchor="end"
                ),
            ]
            told.append(f"{title}, {_NAMES[engine]}: {figure}")
            y += ROW
        y += 30
    return _picture("Time for one picture", "; ".join(told), y - 22, parts)


def _rows_of(record: Record) -> list[str]:
    """From stock as it comes to the last; one that is younger than the record has no figure in it."""
    recorded = {one.engine for one in record.measurements}
    return [row.name for row in ROWS if row.name not in {"float32", "float16"} and row.name in recorded]


def ablation(theme: Theme) -> str:
    """How long the card itself works on one picture of SD 1.5, each row with one optimisation more."""
    record = Record.load(ROOT / ABLATION)
    names = _rows_of(record)
    found = {name: _measured(record, name) for name in (*names, COMPILE)}
    longest = max(one.card_ms or 0.0 for one in found.values())
    parts, told, y = [], [], 4
    for name, measured in found.items():
        assert measured.card_ms is not None
        words = {STOCK_ROW: "Diffusers as it comes", COMPILE: "torch.compile"}.get(name, f"+ {name}")
        is_last = name == names[-1]
        long, middle = measured.card_ms / longest * 560, y + ROW / 2 + 5
        parts += [
            _text(words, _BEGIN - 12, middle, theme.text, anchor="end", bold=is_last),
            tag("rect", x=_BEGIN, y=float(y + (ROW - BAR) / 2), width=long, height=BAR, rx=3,
                fill=theme.ours if is_last else theme.other),
            _text(f"{measured.card_ms:.0f} ms", _BEGIN + long + 8, middle, theme.text, size=13, bold=is_last),
        ]  # fmt: skip
        told.append(f"{words}: {measured.card_ms:.0f} ms")
        y += ROW
    return _picture("Time that the card itself works on one picture of SD 1.5", "; ".join(told), y + 4, parts)


def _day(record: Record) -> str:
    day = datetime.fromisoformat(record.when)
    return f"{day.day} {day:%B %Y}"


def _wrapped(text: str, begin: str = "") -> str:
    return "\n".join(textwrap.wrap(text, 120, initial_indent=begin, subsequent_indent=begin, break_long_words=False,
                                   break_on_hyphens=False)) + "\n"  # fmt: skip


def measured_where() -> str:
    """The lines beneath the chart, and what a card that nobody has timed reaches."""
    record = Record.load(ROOT / ENGINES[0])
    found = json.loads((ROOT / FIRST_RUN).read_text(encoding="utf-8"))["plans"]["results"]["sd15-512 batch 1"]
    comfyui = json.loads((ROOT / COMFYUI).read_text(encoding="utf-8"))["sampling_s"]["speedup"]
    where = (
        f"*One {record.machine.device}, {_day(record)}, torch {record.machine.versions['torch']}, "
        f"{record.workload.dtype}, random weights of the real size, engines in turns of one run: "
        f"[SD 1.5]({ENGINES[0]}), [SDXL]({ENGINES[1]}). "
        "[BENCHMARKS.md](BENCHMARKS.md) has all that was measured.*"
    )
    new_card = (
        f"Your card needs no shipped measurements. The same H200 with its own hidden [times itself]"
        f"({Path(FIRST_RUN).parent / 'README.md'}) for {found['calibration_s']:.0f} seconds at the first picture, and "
        f"then draws SD 1.5 in {found['ours_ms']:.0f} ms; stock took {found['stock_ms']:.0f} in that run. In ComfyUI, "
        f"sampling is [{comfyui:.1f} times as fast]({COMFYUI})."
    )
    return f"{_wrapped(where)}\n{host_and_card()}\n{_wrapped(new_card)}"


def host_and_card() -> str:
    """What the ratios of one picture owe to the host, and what is left of them where the card is the limit."""
    records = [Record.load(ROOT / name) for name in ENGINES]
    alone, eight = ([_compared(record, OURS, batch) for record in records] for batch in (1, 8))
    rows = Record.load(ROOT / ABLATION)
    before, after = (_measured(rows, name).card_ms or 0.0 for name in (STOCK_ROW, _rows_of(rows)[-1]))
    ended = "".join(
        f" {_TITLES[record.workload.model]}'s run was ended before its last turns."
        for record in records
        if not record.complete
    )
    intervals = " and ".join(f"{one.ratio:.2f} times ({one.low:.2f} to {one.high:.2f})" for one in alone)
    return _wrapped(
        f"One picture is drawn {intervals} as fast as by Diffusers, which leaves such a card waiting for its host. The "
        f"card's own time for SD 1.5 fell from {before:.0f} to {after:.0f} ms, {before / after:.1f} times; eight "
        f"pictures at once are {' and '.join(f'{one.ratio:.2f}' for one in eight)} times as fast.{ended}"
    )


def modelled() -> str:
    """Of cards that nobody has timed, by the model of docs/projection.md."""
    told = []
    for name in ("gfx1100", "gfx942"):
        of_card = [one for one in projections() if one.arch == name]
        seconds = {
            workload: sorted(one.ms / 1e3 for one in of_card if one.workload == workload)
            for workload in dict.fromkeys(one.workload for one in of_card)
        }
        ranges = " and ".join(
            f"{_WORKLOADS[workload]} {found[0]:.2g} to {found[-1]:.2g} s" for workload, found in seconds.items()
        )
        told.append(f"{arch.get(name).product}: {ranges}")
    return _wrapped(
        f"**Modelled, not measured**, for one picture with 50 and 20 steps: {'; '.join(told)}. [Expect a factor of "
        "two](docs/projection.md#how-far-it-carries)."
    )


def _reached() -> dict[str, list[arch.Arch]]:
    """GPUs by the highest rung that any op has reached there."""
    rungs = ("tested", "emulated", "compiled")
    by_arch = {proof.arch: {p.rung for p in proofs() if p.arch == proof.arch} for proof in proofs()}
    found: dict[str, list[arch.Arch]] = defaultdict(list)
    for name, reached in by_arch.items():
        best = next((rung for rung in rungs if rung in reached), None)
        if best is not None:
            found[best].append(arch.get(name))
    return found


def _on_amd(rung: str) -> list[arch.Arch]:
    return [gpu for gpu in _reached().get(rung, []) if gpu.vendor is arch.Vendor.AMD]


def _compiled() -> int:
    return sum(len(_on_amd(rung)) for rung in ("tested", "emulated", "compiled"))


def status() -> str:
    """Where it stands on AMD, in a box."""
    emulated, ran = _on_amd("emulated"), [gpu.product or gpu.name for gpu in _on_amd("tested")]
    stands = (
        f"**{'Run on ' + ', '.join(ran) if ran else 'Not yet run on AMD silicon'}.** The kernels are compiled for "
        f"{_compiled()} AMD GPU targets. The machine code of {len(emulated)} of them "
        f"({', '.join(gpu.name for gpu in emulated)}) is executed by an emulator in every test run, and [whole "
        "pictures were drawn by it](docs/emulated-cards.md). On your card each kernel is tested before its first "
        "use, and stock torch runs wherever one fails or is slower."
    )
    asked = (
        "**Have an AMD card?** `rocm-sd contribute` tells how it does, in ten minutes and one file with nothing "
        f"private in it. Its place is [{sending.PLACE}]({sending.PAGE})."
    )
    return f"> [!NOTE]\n{_wrapped(stands, '> ')}>\n{_wrapped(asked, '> ')}"


def badges() -> dict[str, tuple[str, str]]:
    """(what, how much) by name."""
    return {
        "python": ("python", "3.10 to 3.13"),
        "licence": ("licence", "MIT"),
        "compiled": ("compiled for", f"{_compiled()} AMD targets"),
        "emulated": ("executed in emulation on", str(len(_on_amd("emulated")))),
    }


def badge_links() -> str:
    return _wrapped(" ".join(f"![{a} {b}](docs/assets/badge-{name}.svg)" for name, (a, b) in badges().items()))


def _badge(what: str, how_much: str) -> str:
    wide = [round(6.3 * len(words)) + 14 for words in (what, how_much)]
    parts = [
        tag("rect", width=sum(wide), height=20, rx=4, fill="#59636e"),
        tag("rect", x=wide[0], width=wide[1], height=20, rx=4, fill="#c8102e"),
        tag("rect", x=wide[0], width=6, height=20, fill="#c8102e"),
        _text(what, wide[0] / 2, 14, "#ffffff", size=11, anchor="middle"),
        _text(how_much, wide[0] + wide[1] / 2, 14, "#ffffff", size=11, anchor="middle"),
    ]
    return _picture(what, how_much, 20, parts, width=sum(wide))


def gpus() -> str:
    """A row for each status."""
    meaning = {
        "tested": "ran there, compared with float64, timed against stock",
        "emulated": "machine code executed by an emulator, whole pictures drawn",
        "compiled": "machine code made and inspected: no spills, no scratch, LDS within limits",
    }
    rows = ["| status | what that means | GPUs |", "| --- | --- | --- |"]
    for rung, words in meaning.items():
        listed = sorted(_reached().get(rung, []), key=lambda gpu: gpu.name)
        names = ", ".join(f"{gpu.product} (`{gpu.name}`)" if gpu.product else f"`{gpu.name}`" for gpu in listed)
        rows.append(f"| **{rung}** | {words} | {names} |")
    rows.append("| any other | stock torch runs; graphs and memory planning remain | |")
    return "\n".join(rows) + "\n"


def figures() -> dict[Path, str]:
    charts = {"speed": speed, "ablation": ablation}
    drawn = {f"{name}-{shade}": draw(theme) for name, draw in charts.items() for shade, theme in THEMES.items()}
    drawn |= {f"badge-{name}": _badge(*words) for name, words in badges().items()}
    return {ROOT / f"docs/assets/{name}.svg": svg for name, svg in drawn.items()}


def stale() -> list[str]:
    """The files that are not what the records say."""
    return [
        str(path.relative_to(ROOT))
        for path, drawn in figures().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn
    ]


def main() -> None:
    if "--check" in sys.argv[1:]:
        old = stale()
        sys.exit(f"out of date: {', '.join(old)}. Type: python tools/readme_figures.py" if old else 0)
    for path, drawn in figures().items():
        path.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
