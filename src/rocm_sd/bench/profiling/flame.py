"""One self-contained HTML page: module, op, kernel, each as wide as the time that it took. Nothing is fetched."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.profiling.analysis import Piece, module_name, pieces
from rocm_sd.bench.profiling.families import FAMILIES, IDLE
from rocm_sd.files import write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.bench.profiling.trace import Trace

__all__ = ["Node", "page", "tree", "write"]

# Nodes below this share of the whole are narrower than a pixel; they are drawn as one, with how many they are.
_LEAST = 0.0002
_TEMPLATE = Path(__file__).with_name("flame.html")


@dataclass
class Node:
    """Merged over all calls that have the same path; `us` has its children's time in it."""

    name: str
    kind: str
    us: float = 0.0
    calls: int = 0
    families: dict[str, float] = field(default_factory=dict)
    children: dict[tuple[str, str], Node] = field(default_factory=dict)

    def child(self, name: str, kind: str) -> Node:
        return self.children.setdefault((name, kind), Node(name, kind))

    def add(self, us: float, family: str) -> None:
        self.us += us
        self.calls += 1
        self.families[family] = self.families.get(family, 0.0) + us

    def to_dict(self, least: float) -> dict[str, Any]:
        shown = [child for child in self.children.values() if child.us >= least]
        small = [child for child in self.children.values() if child.us < least]
        children = [child.to_dict(least) for child in shown]
        if small:
            rest = Node(f"{len(small)} smaller", "other")
            for child in small:
                for family, us in child.families.items():
                    rest.add(us, family)
            rest.calls = sum(child.calls for child in small)
            children.append(rest.to_dict(0.0))
        family = max(self.families, key=self.families.__getitem__) if self.families else IDLE
        return {
            "n": self.name, "k": self.kind, "t": round(self.us, 2), "x": self.calls,
            "f": FAMILIES.index(family), "c": children,
        }  # fmt: skip


def tree(trace: Trace, idle_us: float = 0.0, root: str = "all") -> Node:
    top = Node(root, "root")
    for piece in pieces(trace):
        node = top
        node.add(piece.us, piece.family)
        for name, kind in _path(piece):
            node = node.child(name, kind)
            node.add(piece.us, piece.family)
    if idle_us > 0:
        top.add(idle_us, IDLE)
        top.child(IDLE, "other").add(idle_us, IDLE)
    return top


def page(trace: Trace, *, title: str, idle_us: float = 0.0, notes: Sequence[str] = ()) -> str:
    top = tree(trace, idle_us)
    data = json.dumps({"families": FAMILIES, "root": top.to_dict(top.us * _LEAST)}, separators=(",", ":"))
    # A kernel's name may hold anything: "</script>" must not end the script.
    data = data.replace("<", "\\u003c")
    rows = "".join(
        f'<li><span class="key f{FAMILIES.index(name)}"></span>{html.escape(name)} '
        f"<b>{us / 1e3:.2f} ms</b> {us / top.us:.1%}</li>"
        for name, us in sorted(top.families.items(), key=lambda item: -item[1])
        if top.us
    )
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    text = _TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (("TITLE", html.escape(title)), ("FAMILIES", rows), ("NOTES", paragraphs), ("DATA", data)):
        text = text.replace(f"@@{mark}@@", value)
    return text


def write(trace: Trace, path: Path, *, title: str, idle_us: float = 0.0, notes: Sequence[str] = ()) -> None:
    write_text(path, page(trace, title=title, idle_us=idle_us, notes=notes))


def _path(piece: Piece) -> Iterator[tuple[str, str]]:
    """Modules from the outside in, the outermost op, and the kernel, or on a CPU the innermost op."""
    spans = piece.place.path if piece.place else ()
    above = ""
    for span in spans:
        if span.is_module:
            name = module_name(span)
            yield name.removeprefix(f"{above}.") if above else name, "module"
            above = name
    if piece.graph:
        yield "replayed graph", "other"
        yield piece.family, "other"
    ops = [span.name for span in spans if not span.is_module]
    if ops:
        yield ops[0], "op"
    if not ops or piece.name != ops[0]:
        yield piece.name, "kernel"
