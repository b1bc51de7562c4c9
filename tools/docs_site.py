"""MkDocs hooks: pages that are a file of the repository's root, and the report of the recorded runs.

A page with the line `<!-- include: INSTALL.md -->` is that file, so that each text exists once, with links to documents
turned into links to their pages. A link to a file that the site does not have becomes its text. `recorded-runs.html` is
what `rocm-sd report --folder benchmarks` writes.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation

__all__ = ["RECORDED_RUNS", "included", "on_files", "on_nav", "on_page_markdown"]

RECORDED_RUNS = "recorded-runs.html"
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


def on_files(files: Files, config: MkDocsConfig, **_named: Any) -> Files:
    """The report is a file of the site like any other, so that links to it are checked."""
    from mkdocs.structure.files import File  # noqa: PLC0415 -- tests read this module where there is no MkDocs

    from rocm_sd.bench import report  # noqa: PLC0415 -- the same

    html = report.render(report.page(report.read([ROOT / "benchmarks"])))
    files.append(File.generated(config, RECORDED_RUNS, content=html))
    return files


def on_nav(nav: Navigation, **_named: Any) -> Navigation:
    """MkDocs takes pages alone into its navigation: the report's place is found here, before the tables of the same."""
    from mkdocs.structure.nav import Link, Section  # noqa: PLC0415 -- as above

    for item in nav.items:
        if isinstance(item, Section) and item.title == "Results":
            link = Link("Report of the recorded runs", RECORDED_RUNS)
            link.parent = item
            item.children.insert(0, link)
    return nav
