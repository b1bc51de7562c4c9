"""README.md as a package index shows it, and the project's addresses: hatchling asks for both when it builds.

python tools/long_description.py                                          prints it, by the checkout's remote
python tools/long_description.py --repository https://github.com/x/y      prints it for that one

An index has none of the repository's files: links lead to those of the version's tag where the repository's address is
known, and are their text where it is not. Pictures are left out there. No address is written down anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

__all__ = ["Hook", "described", "get_metadata_hook", "main", "urls"]

ROOT = Path(__file__).resolve().parents[1]
PAGES: Mapping[str, str] = MappingProxyType(
    {"Documentation": "docs/index.md", "Benchmarks": "BENCHMARKS.md", "Changelog": "CHANGELOG.md"}
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_SOURCE = re.compile(r"^ *<source [^>]*>\n", re.MULTILINE)
_HTML_IMAGE = re.compile(r'(?P<before><img [^>]*src=")(?P<target>[^"]+)(?=")')
_IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)[ \n]?")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_BY_NAME = re.compile(r"\[(?P<text>[^\]]+)\]\[(?P<name>[^\]]+)\]")
_NAMED = re.compile(r"^\[(?P<name>[^\]]+)\]: (?P<target>\S+)\n", re.MULTILINE)
_ASKED_FOR = "<the address of this repository>"


def _sending() -> ModuleType:
    """By its path: the package needs torch, which is not there when a wheel is built."""
    spec = importlib.util.spec_from_file_location("sending", ROOT / "src/rocm_sd/bench/sending.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(readme: str, address: str | None, version: str) -> str:
    """Of an address that is not GitHub's it is not known where a file of a tag is: that is as none."""
    place = address if address is not None and _sending().is_github(address) else None

    def page(target: str) -> str | None:
        if "://" in target:
            return target
        kind = "tree" if (ROOT / target.partition("#")[0]).is_dir() else "blob"
        return f"{place}/{kind}/v{version}/{target}" if place else None

    def picture(found: re.Match[str]) -> str:
        return found[0].replace(found["target"], f"{place}/raw/v{version}/{found['target']}")

    def link(found: re.Match[str]) -> str:
        target = page(found["target"])
        return f"[{found['text']}]({target})" if target else found["text"]

    def definition(found: re.Match[str]) -> str:
        target = page(found["target"])
        return f"[{found['name']}]: {target}\n" if target else ""

    text = _outside_of_code(readme, lambda prose: _COMMENT.sub("", prose))
    if place is None:
        unreachable = {found["name"] for found in _NAMED.finditer(text) if page(found["target"]) is None}
        by_name = lambda found: found["text"] if found["name"] in unreachable else found[0]  # noqa: E731
        changes = [(_PICTURE, ""), (_IMAGE, ""), (_BY_NAME, by_name)]
    else:
        # What it shows in the dark is no element that an index keeps.
        changes = [(_SOURCE, ""), (_HTML_IMAGE, picture), (_IMAGE, picture)]
    for pattern, change in [*changes, (_LINK, link), (_NAMED, definition)]:
        text = _outside_of_code(text, lambda prose, pattern=pattern, change=change: pattern.sub(change, prose))
    return text.replace(_ASKED_FOR, address or _ASKED_FOR)


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    codes = _FENCE.findall(text)
    parts = [change(part) for part in _FENCE.split(text)]
    return "".join(part + code for part, code in zip(parts, [*codes, ""], strict=True))


def urls(address: str | None, version: str) -> dict[str, str]:
    """Of `project.urls`; none where nobody knows the address."""
    if address is None:
        return {}
    found = {"Repository": address}
    if _sending().is_github(address):
        found |= {name: f"{address}/blob/v{version}/{path}" for name, path in PAGES.items()}
        found["Issues"] = f"{address}/issues"
    return found


def _version() -> str:
    text = (ROOT / "src/rocm_sd/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


class Hook(MetadataHookInterface):
    """A wheel that is built from an sdist has what the sdist was built with: then both are there already."""

    def update(self, metadata: dict[str, Any]) -> None:
        address, version = _sending().of_remote(Path(self.root)), _version()
        text = described((ROOT / "README.md").read_text(encoding="utf-8"), address, version)
        metadata.setdefault("readme", {"content-type": "text/markdown", "text": text})
        if address is not None:
            metadata.setdefault("urls", urls(address, version))


def get_metadata_hook() -> type[MetadataHookInterface]:
    return Hook


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repository", help="the address, in place of the checkout's remote")
    asked = parser.parse_args(arguments)
    address = asked.repository or _sending().of_remote(ROOT)
    sys.stdout.write(described((ROOT / "README.md").read_text(encoding="utf-8"), address, _version()))


if __name__ == "__main__":
    main()
