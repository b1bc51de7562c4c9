"""MkDocs hook: pages that are a file of the repository's root, so that each text exists once.

A page with the line `<!-- include: INSTALL.md -->` is that file, with links to documents turned into links to their
pages. A link to a file that the site does not have becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["included", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r"^<!-- include: (?P<name>[\w.]+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_PAGES = {
    "README.md": "index.md",
    "INSTALL.md": "install.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "BENCHMARKS.md": "benchmarks.md",
}


def _relinked(link: re.Match[str]) -> str:
    target, _, anchor = link["target"].partition("#")
    if not target or "://" in target:
        return link[0]
    if target in _PAGES:
        page = _PAGES[target]
    elif PurePosixPath(target).parts[0] == "docs":
        page = str(PurePosixPath(target).relative_to("docs"))
    else:
        return link["text"]
    return f"[{link['text']}]({page}{'#' + anchor if anchor else ''})"


def included(markdown: str, root: Path = ROOT) -> str:
    def text_of(found: re.Match[str]) -> str:
        return _LINK.sub(_relinked, (root / found["name"]).read_text(encoding="utf-8"))

    return _INCLUDE.sub(text_of, markdown)


def on_page_markdown(markdown: str, **_named: Any) -> str:
    return included(markdown)
