"""Says whether a release can be made: version, changelog and tag must agree. Nothing is changed but the notes' file.

python tools/release.py 0.1.0                     what is wrong, if anything
python tools/release.py 0.1.0 --notes notes.md    the changelog's section, for the page of the release

The version stands in src/rocm_sd/__init__.py and nowhere else.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "src/rocm_sd/__init__.py"
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def written_version(root: Path) -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', (root / VERSION_FILE).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def section(changelog: str, name: str) -> tuple[str, str] | None:
    """(what follows the name in its heading, the text below it) of `## [name] - 2026-01-31`."""
    found = re.search(
        rf"^## \[{re.escape(name)}\](?P<rest>[^\n]*)\n(?P<text>.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    return (found["rest"].strip(" -"), found["text"].strip()) if found else None


def wrong_with_changelog(changelog: str, version: str) -> list[str]:
    unreleased = section(changelog, "Unreleased")
    wrong = []
    if unreleased is not None and unreleased[1]:
        wrong.append(f"CHANGELOG.md has entries under Unreleased: move them to ## [{version}] - YEAR-MONTH-DAY")
    found = section(changelog, version)
    if found is None:
        return [*wrong, f"CHANGELOG.md has no section [{version}]"]
    date, text = found
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        wrong.append(f"CHANGELOG.md: [{version}] has no date: ## [{version}] - YEAR-MONTH-DAY")
    return wrong if text else [*wrong, f"CHANGELOG.md: [{version}] says nothing"]


def commit_of(root: Path, name: str) -> str | None:
    """What a tag or HEAD points to; None where there is no such name."""
    asked = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    answer = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def wrong_with_release(root: Path, version: str) -> list[str]:
    if not VERSION.fullmatch(version):
        return [f"{version} is no version: it takes 1.2.3, or 1.2.3rc1"]
    wrong = []
    written = written_version(root)
    if written != version:
        wrong.append(f"{VERSION_FILE} says {written or 'nothing'}, not {version}")
    wrong += wrong_with_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    tagged = commit_of(root, f"refs/tags/v{version}")
    # The same commit: a release that broke off after its tag can be started again.
    if tagged is not None and tagged != commit_of(root, "HEAD"):
        wrong.append(f"the tag v{version} exists, at another commit ({tagged[:12]}): releases are not changed")
    return wrong


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.1.0, without v")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="write the changelog's section of this version")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    options = arguments(words)
    wrong = wrong_with_release(root, options.version)
    for each in wrong:
        print(f"error: {each}", file=sys.stderr)
    if wrong:
        return 1
    if options.notes is not None:
        found = section((root / "CHANGELOG.md").read_text(encoding="utf-8"), options.version)
        options.notes.write_text((found[1] if found else "") + "\n", encoding="utf-8")
    print(f"{options.version} can be released: version, changelog and tag agree")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
