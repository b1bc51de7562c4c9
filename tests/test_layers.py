"""Imports and names go downwards and never round in circles; and what goes another way is seen."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("grimp", reason="import-linter brings it")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import import_graph

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rocm_sd"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
(LAYERS,) = [contract["layers"] for contract in CONTRACTS if contract["name"] == "Imports go downwards only"]


@pytest.fixture(scope="module")
def graph():
    return import_graph.build(SOURCE)


def test_imports_and_names_in_strings_go_downwards(graph):
    assert import_graph.upward(graph, LAYERS) == set()


def test_no_module_imports_itself_by_way_of_others():
    assert import_graph.cycles(import_graph.build(SOURCE, with_type_checking=False)) == set()


def test_every_module_has_a_layer(graph):
    assert import_graph.without_layer(graph, LAYERS) == set()


def test_the_page_on_how_it_is_built_shows_these_layers(graph):
    page = (ROOT / "docs" / "how-it-is-built.md").read_text(encoding="utf-8")
    shown = page.partition("## Imports go downwards only")[2].partition("```text\n")[2].partition("```")[0]
    lines = []
    for layer in import_graph.layers_of(LAYERS, graph):
        names = {module.removeprefix("rocm_sd.") for module in layer.module_tails}
        if all(name.startswith("tuning.") for name in names) and names != {"tuning.search", "tuning.static"}:
            names = {"tuning"}
        if all(name.startswith("onnx.") for name in names) and names != {"onnx.benchmark"}:
            names = {"onnx"}
        if names not in lines:
            lines.append(names)
    assert [set(line.split()) for line in shown.splitlines()] == lines


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """toy(**sources): what is wrong with a package `toy` of three layers, with more lines in some modules."""

    def make(**added: str) -> tuple[set[tuple[str, str]], set[frozenset[str]]]:
        sources = {
            "__init__": "",
            "top": "from toy import middle",
            "middle/__init__": "",
            "middle/a": "from toy import bottom\nfrom toy.middle import b",
            "middle/b": "import toy.bottom",
            "bottom": "",
        }
        folder = tmp_path / "toy"
        for name, source in sources.items():
            more = textwrap.dedent(added.get(name.replace("/", "_"), ""))
            (folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(f"{source}\n{more}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        above = import_graph.upward(import_graph.build(folder), ["toy.top | (toy.absent)", "toy.middle", "toy.bottom"])
        return above, import_graph.cycles(import_graph.build(folder, with_type_checking=False))

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


def test_what_goes_downwards_is_let_through(toy):
    assert toy() == (set(), set())
    # A sentence, a name of something else, and what only a type checker imports.
    harmless = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from toy.middle import a
        text = "see toy.top for more", "toy", "toy.", "toy.no_such_module", "toys.top"
    """
    assert toy(middle_b=harmless) == (set(), set())


@pytest.mark.parametrize(
    "line",
    [
        "from toy import top",
        "def function():\n    import toy.top",
        "NAME = 'toy.top'",
        "CALL = 'toy.top:function'",
        "ATTRIBUTE = 'toy.top.function'",
        "def module(name):\n    return f'toy.top.{name}'",
    ],
)
def test_an_import_or_a_name_that_goes_up_is_seen(toy, line):
    above, _ = toy(bottom=line)
    assert above == {("toy.bottom", "toy.top")}


@pytest.mark.parametrize(
    "line", ["from toy.middle import a", "def function():\n    from toy.middle import a", "NAME = 'toy.middle.a'"]
)
def test_a_circle_is_seen_where_an_import_waits_in_a_function_too(toy, line):
    above, circles = toy(middle_b=line)
    assert above == set()
    assert circles == {frozenset({"toy.middle.a", "toy.middle.b"})}


def test_a_module_without_a_layer_is_seen(toy, tmp_path):
    toy()
    graph = import_graph.build(tmp_path / "toy")
    assert import_graph.without_layer(graph, ["toy.middle.a", "toy.bottom"]) == {"toy.top", "toy.middle.b"}
