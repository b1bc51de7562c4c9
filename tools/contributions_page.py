"""Check every file of contributions/ and list them in docs/contribute.md, and write the schemas that they follow.

python tools/contributions_page.py          rewrites the list and the schemas under docs/assets/
python tools/contributions_page.py --check  changes nothing, and fails when one is stale or a contribution is not valid
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd.bench import card_report, contributions, submission

if TYPE_CHECKING:
    from rocm_sd.bench.card_report import CardReport
    from rocm_sd.bench.records import Measurement, Record

__all__ = ["listed", "main", "problems", "stale"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/contribute.md"
_LIST = re.compile(r"(<!-- contributions -->\n).*?(<!-- end of contributions -->)", re.DOTALL)
SCHEMAS = {
    "docs/assets/bench-record.schema.json": submission.SCHEMA,
    "docs/assets/card-report.schema.json": card_report.SCHEMA,
}
_HEADINGS = (
    "device", "engine", "batch", "picture ms", "times as fast as stock", "pictures", "versions", "when", "file",
)  # fmt: skip
_CARD_HEADINGS = ("device", "passed", "failed", "skipped", "versions", "when", "file")
_VERSIONS = ("torch", "rocm", "hip", "cuda", "diffusers", "triton", "rocm-sd")
# Neither HTML nor Markdown reads anything into these within a line.
_HARMLESS = frozenset(" .,:;+-/()@%_")
_HEAD = """\
What people measured on their own cards. Every file was checked for its form, its hash and figures that cannot be;
nobody here repeated the run. Made by `tools/contributions_page.py`.

"""
_NONE = """There is no contribution yet. Yours may be the first.
"""


def _files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "contributions").rglob("*") if path.is_file() and path.name != "README.md")


def problems(root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """What is wrong, by file; a file that is right is not there."""
    found = {}
    for path in _files(root):
        name = str(path.relative_to(root))
        wrong = contributions.validate(path) if path.suffix == ".json" else ("it is no JSON file",)
        if not wrong:
            folder = contributions.arch_of(path)
            if path.parent != root / "contributions" / folder:
                wrong = (f"it belongs into contributions/{folder}/",)
        if wrong:
            found[name] = wrong
    return found


def _as_fast(record: Record, measured: Measurement) -> str:
    for compared in record.comparisons:
        if (compared.engine, compared.against, compared.batch) == (measured.engine, "stock", measured.batch):
            if compared.verdict == "no difference":
                return f"no difference ({compared.low:.2f} to {compared.high:.2f})"
            return f"{compared.ratio:.2f} ({compared.low:.2f} to {compared.high:.2f})"
    return ""


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{key} {versions[key]}" for key in _VERSIONS if versions.get(key))


def _card_row(name: str, report: CardReport) -> tuple[str, ...]:
    """Which parts passed, failed and were skipped; of what failed, how much."""
    names: dict[str, list[str]] = {state: [] for state in ("passed", "failed", "skipped")}
    for part in report.parts:
        failed = len(part.of("failed"))
        names[part.state].append(f"{part.name} ({failed} of {len(part.items)})" if failed else part.name)
    return (
        _escaped(f"{report.machine.device} ({report.machine.arch})"),
        *(_escaped(", ".join(names[state])) for state in ("passed", "failed", "skipped")),
        _escaped(_versions(report.machine.versions)),
        _escaped(report.when[:10]),
        f"`{name}`",
    )


def _rows(name: str, record: Record) -> list[tuple[str, ...]]:
    shown_versions = _versions(record.machine.versions)
    return [
        (
            _escaped(f"{record.machine.device} ({record.machine.arch})") if first else "",
            _escaped(measured.engine),
            str(measured.batch),
            f"{measured.p50_ms / measured.batch:.0f}",
            _as_fast(record, measured),
            _escaped(str(measured.quality)),
            _escaped(shown_versions) if first else "",
            _escaped(record.when[:10]) if first else "",
            f"`{name}`" if first else "",
        )
        for first, measured in zip(
            (True, *(False,) * len(record.measurements)), (m for m in record.measurements if m.ms), strict=False
        )
    ]


def _escaped(text: str) -> str:
    """As it is read, whatever it has of HTML or Markdown: any character that could mean more is written by its number.

    `submission.validate` lets none of them through; a page that is published does not rest on one check alone.
    """
    return "".join(each if each.isalnum() or each in _HARMLESS else f"&#{ord(each)};" for each in text)


def _table(rows: list[tuple[str, ...]], headings: tuple[str, ...] = _HEADINGS) -> str:
    right = {"batch", "picture ms", "times as fast as stock"}
    lines = [headings, tuple("---:" if heading in right else "---" for heading in headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def listed(root: Path = ROOT) -> str:
    """A table of cards, and one for each workload; what is not valid is not listed."""
    wrong = problems(root)
    cards: list[tuple[str, ...]] = []
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path in _files(root):
        name = str(path.relative_to(root))
        if name in wrong:
            continue
        report, records = contributions.load(path)
        if report is not None:
            cards.append(_card_row(name, report))
        for record in records:
            found[record.workload.name] += _rows(name, record)
    if not found and not cards:
        return _HEAD + _NONE
    sections = [f"### Cards\n\n{_table(cards, _CARD_HEADINGS)}"] if cards else []
    sections += [f"### {_escaped(name)}\n\n{_table(rows)}" for name, rows in sorted(found.items())]
    return _HEAD + "\n".join(sections)


def stale(root: Path = ROOT) -> dict[str, str]:
    """Generated files that are not what the contributions say, each with its right text."""
    page = (root / PAGE).read_text(encoding="utf-8")
    made = listed(root)
    right = {PAGE: _LIST.sub(lambda block: f"{block[1]}\n{made}\n{block[2]}", page)}
    right |= {name: json.dumps(form, indent=2) + "\n" for name, form in SCHEMAS.items()}
    return {
        name: text
        for name, text in right.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text
    }


def main(arguments: list[str], root: Path = ROOT) -> int:
    wrong, changed = problems(root), stale(root)
    for name, reasons in wrong.items():
        print(f"{name}: {'; '.join(reasons)}")
    for name, text in changed.items():
        if "--check" in arguments:
            print(f"{name} is out of date. Type: python tools/contributions_page.py")
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
            print(f"rewrote {name}")
    return 1 if wrong or (changed and "--check" in arguments) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
