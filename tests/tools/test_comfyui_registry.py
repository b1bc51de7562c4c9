"""What ComfyUI's registry takes: every field in its form, and a folder that the host can load as it is."""

from __future__ import annotations

import importlib.util
import re

import pytest

import comfyui_registry
import rocm_sd

tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none

REPOSITORY = "https://example.org/people/rocm-sd"
# The registry's own lists.
SYSTEMS = ("Microsoft", "POSIX", "MacOS", "OS Independent")
ACCELERATORS = {
    "GPU :: NVIDIA CUDA", "GPU :: AMD ROCm", "GPU :: Intel Arc", "NPU :: Huawei Ascend", "GPU :: Apple Metal",
}  # fmt: skip


def wrong_with_entry(text):
    entry = tomllib.loads(text)
    project, comfy = entry["project"], entry["tool"]["comfy"]
    systems = [each.removeprefix("Operating System :: ") for each in project["classifiers"] if each[0] == "O"]
    accelerators = [each.removeprefix("Environment :: ") for each in project["classifiers"] if each[0] == "E"]
    holds = {
        "the name": re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9]){0,98}", project["name"]) and "comfy" not in project["name"],
        "the version": re.fullmatch(r"\d+\.\d+\.\d+", project["version"]),
        "the licence": project["license"] in ({"file": "LICENSE"}, {"text": "MIT"}),
        "the address": project["urls"]["Repository"].startswith("https://"),
        "the systems": systems and all(each.startswith(SYSTEMS) for each in systems),
        "the accelerators": accelerators and ACCELERATORS.issuperset(accelerators),
        "the publisher": isinstance(comfy["PublisherId"], str),
        "the display name": comfy["DisplayName"],
        "the oldest host": re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"]),
        "the dependency": project["dependencies"] == [f"rocm-sd=={project['version']}"],
    }
    return [name for name, is_so in holds.items() if not is_so]


@pytest.fixture
def folder(tmp_path):
    words = ["--repository", f"{REPOSITORY}.git", "--publisher", "people", "--out", str(tmp_path / "new/node")]
    assert comfyui_registry.main(words) == 0
    return tmp_path / "new/node"


def test_every_field_has_its_form(folder):
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert wrong_with_entry(text) == []
    entry = tomllib.loads(text)
    assert entry["project"]["version"] == rocm_sd.__version__
    assert entry["project"]["urls"] == {"Repository": REPOSITORY}
    assert entry["tool"]["comfy"]["PublisherId"] == "people"
    own = tomllib.loads((comfyui_registry.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert entry["project"]["requires-python"] == own["requires-python"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "rocm-sd"', 'name = "1rocm"', "the name"),
        ('name = "rocm-sd"', 'name = "rocm--sd"', "the name"),
        ('name = "rocm-sd"', 'name = "comfyui-rocm-sd"', "the name"),
        ('file = "LICENSE"', 'file = "COPYING"', "the licence"),
        ("AMD ROCm", "Radeon", "the accelerators"),
        (">=0", "~0", "the oldest host"),
    ],
)
def test_a_field_that_the_registry_refuses_is_seen(folder, old, new, why):
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert old in text
    assert why in wrong_with_entry(text.replace(old, new))


def test_the_host_can_load_the_folder(folder):
    assert sorted(file.name for file in folder.iterdir()) == [
        "LICENSE", "README.md", "__init__.py", "pyproject.toml", "requirements.txt",
    ]  # fmt: skip
    assert (folder / "requirements.txt").read_text() == f"rocm-sd=={rocm_sd.__version__}\n"
    spec = importlib.util.spec_from_file_location("registry_node", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    # Outside of ComfyUI there are no nodes, or those that need no host; it never raises.
    spec.loader.exec_module(module)
    assert isinstance(module.NODE_CLASS_MAPPINGS, dict)


def test_no_address_is_made_up(capsys):
    with pytest.raises(SystemExit):
        comfyui_registry.main([])
    with pytest.raises(SystemExit):
        comfyui_registry.main(["--repository", "somewhere"])
    assert "somewhere is no address" in capsys.readouterr().err


def test_an_empty_publisher_is_said(tmp_path, capsys):
    comfyui_registry.main(["--repository", REPOSITORY, "--out", str(tmp_path)])
    assert "PublisherId is empty" in capsys.readouterr().err
