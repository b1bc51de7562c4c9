"""Fill the tables in README.md and docs/ from the code and the data that they describe, and the stub of the ops.

python tools/docs_tables.py          rewrites what lies between <!-- table: NAME --> and <!-- end of table -->
python tools/docs_tables.py --check  changes nothing, and fails when a table is not what the data says
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import docs_ops
import readme_figures
import transformer_plan
from rocm_sd import arch, errors
from rocm_sd.arch.types import UNCONFIRMED
from rocm_sd.bench.ablation import ROWS
from rocm_sd.bench.records import COMPILE, OURS, STOCK, Record
from rocm_sd.cli.main import app
from rocm_sd.ops import OPS
from rocm_sd.settings import VARIABLES, Settings
from rocm_sd.verify.compiler import targets
from rocm_sd.verify.proofs import RUNGS, Proof, proofs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rocm_sd.arch import Arch
    from rocm_sd.bench.records import Measurement

__all__ = ["DOCUMENTS", "EXIT_MEANINGS", "RUNG_MEANINGS", "TABLES", "fill", "main", "stale"]

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md", "docs/index.md", "docs/api.md", "docs/settings.md", "docs/cli.md", "docs/gpus.md", "docs/operators.md",
    "docs/engine.md", "docs/hip-figures.md", "docs/transformer-block.md",
)  # fmt: skip
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

RUNG_MEANINGS = {
    "reference": "ran on a CPU, compared with float64",
    "interpreted": "ran on a CPU in Triton's interpreter, compared with float64",
    "compiled": "machine code made and inspected (no spills, no scratch, LDS within limits); **not executed**",
    "emulated": "that machine code executed on an emulator, compared with the reference",
    "tested": "ran on a card, compared with float64 and timed against stock torch",
}
EXIT_MEANINGS = {
    "RocmSdError": "something else went wrong",
    "InvalidOption": "an option or a setting has a value that is not known; also a wrong command line",
    "Unsupported": "what was asked for by name cannot be done",
    "ModelNotFound": "there is no model at the place named",
    "CorruptModel": "the model is damaged, incomplete or pickled",
    "NoDiskSpace": "the disk is full; nothing half-written is left",
    "DeviceUnavailable": "the device asked for is not there",
    "NumericsFailure": "a fast path and the reference disagree; the result is withheld",
    "MissingDependency": "an optional package is not installed",
    "InvalidCodeObject": "a file is not machine code of a known AMD GPU, or is damaged",
    "JobFailed": "a process of a job on several GPUs is gone, cannot be reached, or runs another version",
}


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> str:
    lines = [list(headings), ["---:" if heading in right else "---" for heading in headings]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _record(evidence: str) -> dict[str, Any]:
    path = ROOT / evidence
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
    return record


def _measured(evidence: str) -> str:
    """What a recorded run says of itself: the card, and its speed against stock torch in the same run."""
    record = _record(evidence)
    if "geomean" not in record:
        return ""
    speeds = [row["against_stock"]["ratio"] for row in record["rows"]]
    return (
        f"{record['machine']['gpu']}, {record['geomean']['against_stock']:.2f} times stock torch "
        f"({len(speeds)} shapes, {min(speeds):.2f} to {max(speeds):.2f})"
        + (f", {record['note']}" if "note" in record else "")
    )


def _proofs() -> str:
    """A line for each op, and for its kernels in HIP, with the highest rung that each architecture stands on."""
    reached: dict[str, dict[str, list[Proof]]] = defaultdict(lambda: defaultdict(list))
    for proof in sorted(proofs(), key=lambda p: (p.op, p.arch)):
        reached[f"{proof.op}:hip" if proof.implementation == "hip" else proof.op][proof.rung].append(proof)
    rows = []
    for op, rungs in reached.items():
        cells = [_names([proof.arch for proof in rungs[rung]]) for rung in ("emulated", "compiled")]
        ran = [_measured(proof.evidence) or proof.arch for proof in rungs["tested"]]
        # An op whose kernels all are in HIP has a line for those alone.
        if ran or any(cells):
            rows.append((f"`{op}`", *cells, ", ".join(ran)))
    meanings = [f"- **{rung}**: {RUNG_MEANINGS[rung]}." for rung in ("compiled", "emulated", "tested")]
    table = _table(("op", "emulated", "compiled", "tested"), rows)
    names = ", ".join(a.name for a in targets())
    below = (
        f"Triton compiles for {names}. Every op is also compared with float64 as plain torch and in Triton's "
        "interpreter, on a CPU, in every test run."
    )
    return f"{_on_amd(proofs())}\n\n{table}\n" + "\n".join(meanings) + f"\n\n{below}\n"


def _proofs_in_short() -> str:
    """A line for each op: how many targets each of its languages has reached, and how fast it ran on each card."""
    by_op: dict[str, list[Proof]] = defaultdict(list)
    for proof in sorted(proofs(), key=lambda p: p.op):
        by_op[proof.op].append(proof)
    ran = {(p.op, _record(p.evidence)["machine"]["gpu"]): p.evidence for p in proofs() if p.rung == "tested"}
    cards = sorted({card for _, card in ran})
    languages = {"triton": "Triton", "hip": "HIP"}
    rows = []
    for op, proven in by_op.items():
        counts = [
            [sum((p.implementation, p.rung) == (name, rung) for p in proven) for rung in ("emulated", "compiled")]
            for name in languages
        ]
        cells = [f"{emulated}+{compiled}" if emulated + compiled else "" for emulated, compiled in counts]
        speeds = [_speed_in_short(ran[op, card]) if (op, card) in ran else "" for card in cards]
        if any(cells + speeds):
            rows.append((f"`{op}`", *cells, *speeds))
    named = (f"{language}: emulated+compiled" for language in languages.values())
    table = _table(("op", *named, *(f"times stock torch, {card}" for card in cards)), rows)
    return (
        f"{_on_amd(proofs())}\n\n{table}\nCounted are AMD targets: machine code executed by the emulator, and "
        "inspected alone ([named](docs/operators.md#what-is-proven-and-how)). In brackets: extremes of all shapes.\n"
    )


def _speed_in_short(evidence: str) -> str:
    record = _record(evidence)
    speeds = [row["against_stock"]["ratio"] for row in record["rows"]]
    figures = f"{record['geomean']['against_stock']:.2f} ({min(speeds):.2f} to {max(speeds):.2f})"
    return f"[{figures}]({evidence})"


def _names(architectures: list[str]) -> str:
    few = 4
    return ", ".join(architectures) if len(architectures) <= few else f"{len(architectures)} more"


def _ops() -> str:
    rows = [
        (f"`{op.name}`", op.summary, ", ".join(f"`{i.name}`" for i in op.implementations), f"`{op.tuning.untimed}`")
        for op in OPS.values()
        if op.tuning
    ]
    return _table(("op", "what it computes", "implementations", "runs where no card was timed"), rows)


def _speeds() -> str:
    rows = []
    for proof in sorted({p for p in proofs() if p.rung == "tested"}, key=lambda p: p.op):
        record = _record(proof.evidence)
        geomean, of = record["geomean"], record["rows"]
        chosen = Counter(row["implementation"] for row in of)
        rows.append(
            (
                f"`{proof.op}`",
                len(of),
                f"{geomean['against_stock']:.2f}",
                f"{geomean['against_best_stock']:.2f}",
                f"{geomean['kernel_against_stock']:.2f}",
                f"{geomean['against_compile']:.2f}" if geomean["against_compile"] else "",
                _at_the_limit(proof.op, of),
                ", ".join(f"{name} {count}" for name, count in chosen.most_common()),
            )
        )
    figures = ("shapes", "times stock", "times the best stock", "kernel alone, times stock", "times torch.compile")
    return _table(("op", *figures, "largest shape", "what won, and how often"), rows, right=figures)


MODELS = {"sd15": "SD 1.5", "sd21": "SD 2.1", "sdxl": "SDXL"}


def _glance() -> str:
    """One picture, by the engines of one recorded run; a table for each card."""
    of_card: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for record, batch, (stock, compiled, ours) in _pictures():
        if batch == 1:
            facts = record.workload
            drawn = f"{MODELS.get(facts.model, facts.model)}, {facts.width}x{facts.height}, {facts.steps} steps"
            theirs = (f"{each.p50_ms / 1e3:.2f}&nbsp;s" for each in (stock, compiled))
            cells = (drawn, *theirs, f"**{ours.p50_ms / 1e3:.2f}&nbsp;s**", _times(record, STOCK, batch))
            of_card[record.machine.device].append(cells)
    engines = (STOCK, "torch.compile", OURS, "times stock")
    return "\n".join(_table((f"on an {card}", *engines), rows) for card, rows in of_card.items())


def _engine() -> str:
    rows = []
    for record, batch, (stock, compiled, ours) in _pictures():
        facts = record.workload
        drawn = f"{facts.name}, {facts.steps} steps" + ("" if batch == 1 else f", {batch} at once")
        times = (f"{stock.p50_ms:.0f}", f"{compiled.p50_ms:.0f}", f"**{ours.p50_ms:.0f}**")
        ratios = (_times(record, STOCK, batch), _times(record, COMPILE, batch))
        peaks = (f"{_peak_mib(each):.0f}" for each in (stock, ours))
        rows.append((drawn, record.machine.device, *times, *ratios, *peaks, f"{ours.first_picture_s:.1f}"))
    figures = (
        "stock ms", "torch.compile ms", "rocm-sd ms", "times stock", "times torch.compile", "stock's peak MiB",
        "rocm-sd's", "first picture s",
    )  # fmt: skip
    return _table(("what is drawn", "card", *figures), rows, right=figures)


def _pictures() -> Iterable[tuple[Record, int, tuple[Measurement, Measurement, Measurement]]]:
    """Each record and batch that has all three engines."""
    for path in sorted((ROOT / "benchmarks").glob("engine-*/*.json")):
        record = Record.load(path)
        for batch in record.batches:
            stock, compiled, ours = (record.measurement(name, batch) for name in (STOCK, COMPILE, OURS))
            if stock is not None and compiled is not None and ours is not None:
                yield record, batch, (stock, compiled, ours)


def _times(record: Record, against: str, batch: int) -> str:
    for one in record.comparisons:
        if (one.engine, one.against, one.batch) == (OURS, against, batch):
            return f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
    return ""


def _peak_mib(measured: Measurement) -> float:
    return max(measured.first_run_mib or 0, measured.second_run_mib or 0)


def _status() -> str:
    """What an AMD card can count on today, in one paragraph."""
    amd = [proof for proof in proofs() if arch.get(proof.arch).vendor is arch.Vendor.AMD]
    compiled = {proof.arch for proof in amd}
    emulated = sorted({proof.arch for proof in amd if proof.rung == "emulated"})
    ran = sorted({proof.arch for proof in amd if proof.rung == "tested"})
    silicon = f"They ran on {', '.join(ran)}." if ran else "**They have not run on AMD silicon yet.**"
    return (
        f"The kernels are compiled for {len(compiled)} AMD GPU targets, and executed on an emulator as the machine "
        f"code of {len(emulated)} of them ({', '.join(emulated)}), where they drew whole pictures. {silicon} A card "
        "that nobody has timed measures itself at its first picture.\n"
    )


def _ablation_rows() -> str:
    rows = [(f"`{row.name}`", row.what, "" if row.on_cpu is None else f"not there: {row.on_cpu}") for row in ROWS]
    return _table(("row", "what it adds to those before it", "on a CPU"), rows)


def _at_the_limit(op: str, rows: list[dict[str, Any]]) -> str:
    """Products are held against arithmetic, all else against a copy of as many bytes."""
    verification = OPS[op].verification
    if verification and any(promise.uses_dot for promise in verification.promises.values()):
        most = max(rows, key=lambda row: row["tflops"] * row["us"].get(row["implementation"], row["us"]["stock"]))
        return f"{most['tflops']:.0f} TFLOP/s"
    largest = max(rows, key=lambda row: row["us"]["copy"])
    return f"{largest['share_of_copy']:.0%} of copy speed"


def _on_amd(proven: Iterable[Proof]) -> str:
    ran = sorted({p.arch for p in proven if p.rung == "tested" and arch.get(p.arch).vendor is arch.Vendor.AMD})
    if not ran:
        return "**Nothing has run on AMD silicon yet.** This is what was proven instead:"
    return f"Run on AMD silicon: {', '.join(ran)}. All that was proven:"


def _hip() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/hip-compiled/kernels.json").read_text(encoding="utf-8"))
    return found


def _hip_compiled() -> str:
    """A row for each op and architecture: the most registers and LDS and the fewest waves of all its sizes."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in _hip()["compiled"]:
        grouped[row["op"], row["arch"]].append(row)
    rows = []
    for (op, gfx), sizes in grouped.items():
        both = [(row["hip"]["modelled_us"], row["triton"]["modelled_us"]) for row in sizes if row["triton"]]
        cells = [_hip_beside(sizes, *figure) for figure in (("vgprs", max), ("lds", max), ("waves_per_simd", min))]
        mean = f"{math.exp(sum(math.log(h / t) for h, t in both) / len(both)):.2f}" if both else "no Triton"
        fewer = f"{sum(h < t for h, t in both)} of {len(both)}" if both else ""
        rows.append((f"`{op}`", gfx, *cells, mean, fewer))
    right = (
        "VGPRs",
        "LDS, bytes",
        "waves a SIMD",
        "modelled time, HIP over Triton",
        "sizes where HIP is modelled faster",
    )
    return _table(("op", "gfx", *right), rows, right)


def _hip_beside(sizes: list[dict[str, Any]], figure: str, worst: Callable[[list[int]], int]) -> str:
    """HIP's, and Triton's in brackets."""
    ours, theirs = ([row[who][figure] for row in sizes if row[who]] for who in ("hip", "triton"))
    return f"{worst(ours)} ({worst(theirs)})" if theirs else f"{worst(ours)}"


def _hip_lines() -> str:
    rows = [
        (
            f"`{row['op']}`", row["call"], row["arch"],
            *(f"{row[who][what]:,}" for what in ("bytes", "lines") for who in ("naive", "ours")),
            f"{row['naive']['lines'] / row['ours']['lines']:,.1f}",
        )
        for row in _hip()["lines"]
    ]  # fmt: skip
    right = ("bytes, naive", "bytes, ours", "lines, naive", "lines, ours", "times fewer lines")
    return _table(("op", "call", "gfx", *right), rows, right)


def _settings() -> str:
    defaults = Settings().to_dict()
    rows = [(f"`{v.name}`", _shown(defaults[v.name]), v.effect) for v in VARIABLES]
    return _table(("variable", "default", "effect"), rows)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "`1`" if value else "`0`"
    return "unset" if value in (None, {}) else f"`{value}`"


def error_names() -> list[str]:
    return [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def _exit_codes() -> str:
    by_code: dict[int, list[str]] = defaultdict(list)
    for name in error_names():
        by_code[getattr(errors, name).exit_code].append(name)
    rows: list[Sequence[object]] = [(0, "", "all went well")]
    for code, names in sorted(by_code.items()):
        rows.append((code, ", ".join(f"`{n}`" for n in names), "; ".join(EXIT_MEANINGS[n] for n in names)))
    rows.append((130, "", "Ctrl-C; nothing half-written is left"))
    return _table(("exit code", "error", "when"), rows)


def _verbs() -> dict[str, Any]:
    """By name; the verbs of a group as "onnx-export"."""
    verbs: dict[str, Any] = {}
    for name, verb in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(verb, "commands", None)
        verbs |= {name: verb} if inner is None else {f"{name}-{each}": found for each, found in inner.items()}
    return verbs


def _options(verb: str) -> str:
    rows = []
    for option in _verbs()[verb].params:
        if option.param_type_name == "option" and "--help" not in option.opts:
            has_none = option.default is None or isinstance(option.default, bool) or option.default == ""
            rows.append((f"`{option.opts[0]}`", "" if has_none else f"`{option.default}`", option.help))
    return _table(("option", "default", "effect"), rows)


def _figure(value: Arch, field: str, shown: object = None) -> str:
    """A figure; `?` where it is not known here, and a dagger where no public document was read for it."""
    raw = getattr(value, field, None) if shown is None else shown
    if raw is None:
        return "?"
    text = f"{raw:g}" if isinstance(raw, float) else str(raw)
    return text if value.is_confirmed(field) else f"{text}†"


def _in(value: Arch, field: str, unit: int) -> str:
    raw = getattr(value, field)
    return _figure(value, field, None if raw is None else raw / unit)


def _short(dtypes: Iterable[str]) -> str:
    return " ".join(sorted(dtype.replace("float", "f") for dtype in dtypes)) or "none"


def _gpus() -> list[Arch]:
    return [value for value in arch.ARCHS.values() if value.vendor is not arch.Vendor.NONE]


def _arch_shape() -> str:
    rows = []
    for value in _gpus():
        rungs = [p.rung for p in proofs() if p.arch == value.name]
        matrix, fp8 = value.matrix_unit, value.fp8
        rows.append(
            (
                f"`{value.name}`",
                value.family,
                _figure(value, "wave_size"),
                _figure(value, "matrix_unit", matrix and matrix.value),
                _figure(value, "matrix_dtypes", _short(value.matrix_dtypes)),
                _figure(value, "fp8", fp8 and fp8.value),
                _in(value, "lds_per_workgroup", 1024),
                _figure(value, "vgprs_per_wave"),
                _in(value, "vgpr_file_bytes", 1024),
                _figure(value, "max_waves_per_simd"),
                "yes" if value.triton_supported else "no",
                max(rungs, key=RUNGS.index) if rungs else "nothing yet",
            )
        )
    headings = (
        "name", "family", "wave", "matrix unit", "matrix types", "fp8", "LDS KiB a workgroup", "VGPRs a wave",
        "VGPR file KiB a SIMD", "waves a SIMD", "Triton", "proven",
    )  # fmt: skip
    return _table(headings, rows)


def _arch_products() -> str:
    rows = [
        (
            f"`{value.name}`",
            value.product,
            _figure(value, "compute_units"),
            _in(value, "l2_bytes", 2**20),
            _in(value, "llc_bytes", 2**20),
            _figure(value, "peak_tflops.float16", value.peak("float16")),
            _figure(value, "bandwidth_gbps"),
        )
        for value in _gpus()
    ]
    figures = ("CUs or SMs", "L2 MiB", "last-level cache MiB", "fp16 TFLOP/s", "GB/s")
    return _table(("name", "the product the figures are of", *figures), rows, right=figures)


def _arch_sources() -> str:
    cited: dict[tuple[str, str], list[str]] = defaultdict(list)
    for value in _gpus():
        for field, source in value.sources:
            cited[source, field].append(value.name)
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (source, field), names in cited.items():
        everywhere = len(names) == len(_gpus())
        grouped[source, "all" if everywhere else ", ".join(names)].append(f"`{field}`")
    rows = [
        (f"{source.removeprefix(f'{UNCONFIRMED}: ')}†" if source.startswith(UNCONFIRMED) else source, ", ".join(f), a)
        for (source, a), f in sorted(grouped.items(), key=lambda entry: (entry[0][0].startswith(UNCONFIRMED), entry[0]))
    ]
    return _table(("source", "figures", "architectures"), rows)


def _transformer_block() -> str:
    rows = []
    for tokens, width, heads in ((8192, 320, 8), (2048, 640, 8), (512, 1280, 8), (8192, 640, 10), (2048, 1280, 20)):
        for name in ("gfx1030", "gfx90a", "gfx942", "gfx1100", "gfx1201"):
            value = arch.get(name)
            found = transformer_plan.plan(tokens, width, heads, value)
            all_four = (found.naive, found.epilogues, found.folded, found.template)
            folded = ", ".join(str(place + 1) for place in range(3) if found.config.fold[place]) or "none"
            sizes = (f"{each.bytes / 1e6:.0f}" for each in all_four)
            times = (f"{each.seconds(value) * 1e6:.0f}" for each in all_four)
            rows.append((f"{tokens} x {width}", name, *sizes, *times, folded))
    kinds = ("single", "epilogues", "folded", "chosen")
    units = [f"{kind}, {unit}" for unit in ("MB", "µs") for kind in kinds]
    return _table(("tokens x width", "architecture", *units, "norms folded"), rows, right=units)


def _transformer_block_steps() -> str:
    found = transformer_plan.plan(8192, 320, 8, arch.get("gfx1201"))
    kinds = (("single", found.naive), ("epilogues", found.epilogues), ("folded", found.folded))
    rows = [
        (kind if not place else "", step.name, f"{step.reads / 1e6:.1f}", f"{step.writes / 1e6:.1f}")
        for kind, composition in kinds
        for place, step in enumerate(composition.steps)
    ]
    return _table(("composition", "kernel", "read, MB", "written, MB"), rows, right=("read, MB", "written, MB"))


def _transformer_block_reasons() -> str:
    shapes = ((8192, 320, 8), (2048, 640, 8), (512, 1280, 8))
    found = {width: transformer_plan.plan(tokens, width, heads, arch.get("gfx1100")) for tokens, width, heads in shapes}
    return _table(("width", "why not further"), [(width, reason) for width in found for reason in found[width].reasons])


TABLES: dict[str, Callable[[], str]] = {
    "proofs": _proofs,
    "proofs-short": _proofs_in_short,
    "readme-badges": readme_figures.badge_links,
    "readme-measured": readme_figures.measured_where,
    "host-and-card": readme_figures.host_and_card,
    "readme-modelled": readme_figures.modelled,
    "readme-status": readme_figures.status,
    "readme-gpus": readme_figures.gpus,
    "ops": _ops,
    "ops-api": docs_ops.api,
    "ops-how": docs_ops.how_each_works,
    "speeds": _speeds,
    "engine": _engine,
    "glance": _glance,
    "status": _status,
    "ablation-rows": _ablation_rows,
    "hip-compiled": _hip_compiled,
    "hip-lines": _hip_lines,
    "settings": _settings,
    "exit-codes": _exit_codes,
    **{f"options-{verb}": partial(_options, verb) for verb in _verbs()},
    "arch-shape": _arch_shape,
    "arch-products": _arch_products,
    "arch-sources": _arch_sources,
    "transformer-block": _transformer_block,
    "transformer-block-steps": _transformer_block_steps,
    "transformer-block-reasons": _transformer_block_reasons,
}


def fill(text: str) -> str:
    """The text with every marked table made anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block['name']]()}\n{block[3]}", text)


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Documents whose tables are not what the data says, and the stub of the ops, each with its right text."""
    texts = {root / name: (root / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    filled = {path: fill(text) for path, text in texts.items()}
    written = root / docs_ops.STUB
    texts[written] = written.read_text(encoding="utf-8") if written.is_file() else ""
    filled[written] = docs_ops.stub()
    return {path: text for path, text in filled.items() if text != texts[path]}


def main(arguments: list[str]) -> int:
    documents = stale()
    for path, text in documents.items():
        name = path.relative_to(ROOT)
        if "--check" in arguments:
            print(f"{name} is out of date. Type: python tools/docs_tables.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"rewrote {name}")
    return 1 if documents and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
