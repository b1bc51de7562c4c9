"""Check every file of contributions/ and list them: docs/contributions.md, and the schema that they follow.

python tools/contributions_page.py          rewrites the page and docs/assets/bench-record.schema.json
python tools/contributions_page.py --check  changes nothing, and fails when one is stale or a contribution is not valid
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd.bench import submission

if TYPE_CHECKING:
    from rocm_sd.bench.records import Measurement, Record

__all__ = ["main", "page", "problems", "stale"]

ROOT = Path(__file__).resolve().parents[1]
PAGE, SCHEMA = "docs/contributions.md", "docs/assets/bench-record.schema.json"
_HEADINGS = (
    "device", "engine", "batch", "picture ms", "times as fast as stock", "pictures", "versions", "when", "file",
)  # fmt: skip
_VERSIONS = ("torch", "rocm", "hip", "cuda", "diffusers", "triton", "rocm-sd")
# Neither HTML nor Markdown reads anything into these within a line.
_HARMLESS = frozenset(" .,:;+-/()@%_")
_HEAD = """# Contributed measurements

What people measured on their own cards with [`rocm-sd bench --submit`](performance-database.md). Every file was checked
for its form, its hash and figures that cannot be; nobody here repeated the run. Made by `tools/contributions_page.py`.

"""
_NONE = """There is no contribution yet. Yours may be the first:

```sh
rocm-sd bench sd15-512 --out results --submit contribution
```

[The performance database](performance-database.md) says what is in the file, and where to send it.
"""


def _files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "contributions").rglob("*") if path.is_file() and path.name != "README.md")


def problems(root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """What is wrong, by file; a file that is right is not there."""
    found = {}
    for path in _files(root):
        name = str(path.relative_to(root))
        wrong = submission.validate(path) if path.suffix == ".json" else ("it is no JSON file",)
        if not wrong:
            folder = submission.load(path).machine.arch
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


def _rows(name: str, record: Record) -> list[tuple[str, ...]]:
    versions = record.machine.versions
    shown_versions = ", ".join(f"{key} {versions[key]}" for key in _VERSIONS if versions.get(key))
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


def _table(rows: list[tuple[str, ...]]) -> str:
    right = {"batch", "picture ms", "times as fast as stock"}
    lines = [_HEADINGS, tuple("---:" if heading in right else "---" for heading in _HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page(root: Path = ROOT) -> str:
    """One table for each workload; what is not valid is not listed."""
    wrong = problems(root)
    listed: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path in _files(root):
        name = str(path.relative_to(root))
        if name not in wrong:
            record = submission.load(path)
            listed[record.workload.name] += _rows(name, record)
    if not listed:
        return _HEAD + _NONE
    return _HEAD + "\n".join(f"## {_escaped(name)}\n\n{_table(rows)}" for name, rows in sorted(listed.items()))


def stale(root: Path = ROOT) -> dict[str, str]:
    """Generated files that are not what the contributions say, each with its right text."""
    right = {PAGE: page(root), SCHEMA: json.dumps(submission.SCHEMA, indent=2) + "\n"}
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
