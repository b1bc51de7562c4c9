"""What imports what in a package, and what names what: a module named in a string is imported all the same."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import grimp
import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["build", "cycles", "layers_of", "upward", "without_layer"]


def build(folder: Path, *, with_type_checking: bool = True) -> grimp.ImportGraph:
    """All imports of the package in `folder`, those within functions too, and all modules that it names in strings."""
    graph = grimp.build_graph(folder.name, exclude_type_checking_imports=not with_type_checking, cache_dir=None)
    for importer, imported, line in list(_named(graph, folder)):
        graph.add_import(importer=importer, imported=imported, line_number=line, line_contents="a string")
    return graph


def _named(graph: grimp.ImportGraph, folder: Path) -> Iterator[tuple[str, str, int]]:
    """Strings that are a dotted name of the package: "toy.a", "toy.a:function", and the "toy.a." of an f-string."""
    name = re.compile(rf"({re.escape(folder.name)}(?:\.\w+)+)\.?(?::\w*)?")
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        importer = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if importer not in graph.modules:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            imported = found[1] if (found := name.fullmatch(text)) else ""
            while imported and imported not in graph.modules:
                imported = imported.rpartition(".")[0]
            # The package's own name is that of its logger, its ops and its entry points.
            if "." in imported and imported != importer:
                yield importer, imported, node.lineno


def layers_of(contract: Sequence[str], graph: grimp.ImportGraph) -> list[grimp.Layer]:
    """As import-linter reads them: "a | b" are independent, "a : b" may import one another, "(a)" may be missing."""
    layers = []
    for line in contract:
        modules = {part.strip() for part in re.split(r"[|:]", line)}
        known = {
            module.strip("()") for module in modules if not module.startswith("(") or module[1:-1] in graph.modules
        }
        layers.append(grimp.Layer(*known, independent=":" not in line))
    return layers


def upward(graph: grimp.ImportGraph, contract: Sequence[str]) -> set[tuple[str, str]]:
    """(importer, imported) of every chain of imports that goes up."""
    found = graph.find_illegal_dependencies_for_layers(layers=layers_of(contract, graph))
    routes = [route for dependency in found for route in dependency.routes]
    return {(head, tail) for route in routes for head in route.heads for tail in route.tails}


def without_layer(graph: grimp.ImportGraph, contract: Sequence[str]) -> set[str]:
    """Modules that no layer holds, and that hold no layer themselves."""
    layers = {module for layer in layers_of(contract, graph) for module in layer.module_tails}
    return {
        module
        for module in graph.modules
        if not any(f"{module}.".startswith(f"{layer}.") or f"{layer}.".startswith(f"{module}.") for layer in layers)
    }


def cycles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """Modules that import themselves by way of one another."""
    imports = nx.DiGraph()
    for module in graph.modules:
        imports.add_edges_from((module, other) for other in graph.find_modules_directly_imported_by(module))
    return {frozenset(found) for found in nx.strongly_connected_components(imports) if len(found) > 1}
