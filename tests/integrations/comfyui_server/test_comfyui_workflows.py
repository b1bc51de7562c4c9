"""The workflows under examples/comfyui: the canvas is what the API format says, and the host has every node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples/comfyui"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.json") if not path.stem.endswith("_api"))
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}


def api(name):
    return json.loads((EXAMPLES / f"{name}_api.json").read_text())


def canvas(name):
    return json.loads((EXAMPLES / f"{name}.json").read_text())


def is_link(value):
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def as_api(workflow, info):
    """What the UI sends when this canvas is queued: links by name, and widgets in the order of the node's inputs."""
    links = {link[0]: link for link in workflow["links"]}
    graph = {}
    for node in workflow["nodes"]:
        inputs = {}
        for place in node["inputs"]:
            if place["link"] is not None:
                inputs[place["name"]] = [str(links[place["link"]][1]), links[place["link"]][2]]
        values = iter(node["widgets_values"])
        described = info[node["type"]]["input"]
        for name, (kind, *options) in {**described.get("required", {}), **described.get("optional", {})}.items():
            if name not in inputs and (isinstance(kind, list) or kind in WIDGETS):
                inputs[name] = next(values)
                if options and options[0].get("control_after_generate"):
                    assert next(values) == "fixed"
        assert not list(values), node["type"]
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": node["title"]}}
    return graph


def test_each_kind_has_both_formats():
    assert NAMES == ["emoji", "sd15", "sdxl"]
    assert {path.stem for path in EXAMPLES.glob("*_api.json")} == {f"{name}_api" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_is_named_alike_from_both_ends(name):
    workflow, graph = canvas(name), api(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert {str(number): node["type"] for number, node in nodes.items()} == {
        n: d["class_type"] for n, d in graph.items()
    }
    assert workflow["last_node_id"] == max(nodes)
    assert workflow["last_link_id"] == len(workflow["links"])
    for number, source, out, target, place, kind in workflow["links"]:
        assert number in nodes[source]["outputs"][out]["links"]
        assert nodes[source]["outputs"][out]["type"] == kind
        assert nodes[target]["inputs"][place]["link"] == number
        assert nodes[target]["inputs"][place]["type"] in {kind, "*"}
        assert graph[str(target)]["inputs"][nodes[target]["inputs"][place]["name"]] == [str(source), out]
    wired = sum(is_link(value) for node in graph.values() for value in node["inputs"].values())
    assert wired == len(workflow["links"])


@pytest.mark.parametrize("name", NAMES)
def test_our_nodes_take_what_the_examples_give_them(name, monkeypatch):
    folder_paths = ModuleType("folder_paths")
    folder_paths.get_filename_list = lambda _kind: ["v1-5.safetensors"]
    monkeypatch.setitem(sys.modules, "folder_paths", folder_paths)
    from rocm_sd.integrations import comfyui
    from rocm_sd.integrations.comfyui import emoji

    ours = comfyui.NODE_CLASS_MAPPINGS | emoji.NODE_CLASS_MAPPINGS
    graph = api(name)
    used = {node["class_type"] for node in graph.values()}
    assert used >= {"ROCmOptimizedModel", "ROCmOptimizedVAE", "ROCmOptimizationReport"}
    for node in graph.values():
        if node["class_type"].startswith("ROCm"):
            described = ours[node["class_type"]].INPUT_TYPES()
            required, optional = described.get("required", {}), described.get("optional", {})
            assert set(required) <= set(node["inputs"]) <= set(required) | set(optional)
            for key, value in node["inputs"].items():
                kind = {**required, **optional}[key][0]
                assert is_link(value) or not isinstance(kind, (list, tuple)) or value in kind, (key, value)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_knows_every_node_and_input(name, server):
    info, graph = server.get("/object_info"), api(name)
    for node in graph.values():
        described = info[node["class_type"]]["input"]
        required, optional = described.get("required", {}), described.get("optional", {})
        assert set(required) <= set(node["inputs"]) <= set(required) | set(optional), node["class_type"]
        for key, value in node["inputs"].items():
            kind = {**required, **optional}[key][0]
            if is_link(value):
                made = info[graph[value[0]]["class_type"]]["output"][value[1]]
                assert kind in {made, "*"}, (node["class_type"], key)
            elif isinstance(kind, list) and node["class_type"] != "CheckpointLoaderSimple":
                assert value in kind, (node["class_type"], key)
    assert as_api(canvas(name), info) == graph


def test_the_emoji_example_draws_and_reports(server):
    outputs = server.run(api("emoji"))
    (picture,) = server.pictures(outputs)
    assert picture.shape == (128, 128, 3)
    corner = picture[:12, :12].reshape(-1, 3).mean(0)
    assert np.abs(corner - (255, 150, 200)).max() < 40  # pink
    assert "attention op" in "\n".join(outputs["10"]["text"])
