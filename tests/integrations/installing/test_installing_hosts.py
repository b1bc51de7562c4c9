"""rocm-sd install and uninstall: on folders that look like the hosts, and on a copy of a real one if there is one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import rocm_sd
from rocm_sd.cli.install import install, uninstall
from rocm_sd.errors import InvalidOption, NoDiskSpace, RocmSdError, Unsupported
from rocm_sd.integrations import installing
from rocm_sd.integrations.installing import HostNotReady, NotAHost, PythonFacts, placing
from rocm_sd.integrations.installing.placing import LIST_NAME

THIS = Path(sys.executable)


def make(root, *files, **contents):
    for name in files:
        if name.endswith("/"):
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(contents.get(Path(name).stem, ""))
    return root


def comfyui(root, version="0.7.0"):
    files = ("main.py", "nodes.py", "comfy/", "custom_nodes/", "models/", "comfyui_version.py")
    return make(root, *files, comfyui_version=f'__version__ = "{version}"\n')


def a1111(root):
    files = ("webui.py", "launch.py", "modules/", "extensions/", "CHANGELOG.md")
    return make(root, *files, CHANGELOG="## 1.10.1\n\n* fixes\n\n## 1.10.0\n")


@pytest.fixture
def host(tmp_path):
    return installing.recognise("comfyui", comfyui(tmp_path / "ComfyUI"))


@pytest.fixture
def webui(tmp_path, monkeypatch):
    """Automatic1111 with an extension of two files, one in a folder: what is copied has the shape of ours."""
    source = make(tmp_path / "extension", "install.py", "scripts/rocm_sd_optimization.py", install="x = 1\n")
    found = installing.recognise("a1111", a1111(tmp_path / "webui"))
    return found.__class__(**(vars(found) | {"source": source}))


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_comfyui_in_each_of_its_layouts(tmp_path):
    source = installing.recognise("comfyui", comfyui(tmp_path / "a"))
    assert (source.version, source.layout) == ("0.7.0", "source")
    assert source.destination == tmp_path / "a/custom_nodes/rocm_sd"
    comfyui(tmp_path / "b/ComfyUI")
    make(tmp_path / "b", "python_embeded/python.exe")
    for given in (tmp_path / "b", tmp_path / "b/ComfyUI"):
        portable = installing.recognise("comfyui", given)
        assert (portable.root, portable.layout) == (tmp_path / "b/ComfyUI", "portable")
        assert installing.host_python(portable) == (tmp_path / "b/python_embeded/python.exe", True)
    desktop = installing.recognise("comfyui", make(tmp_path / "c", "custom_nodes/", "models/", "user/"))
    assert (desktop.version, desktop.layout) == (None, "desktop")


def test_an_old_comfyui_is_reported(tmp_path):
    assert "older than 0.3.64" in installing.recognise("comfyui", comfyui(tmp_path / "a", "0.3.9")).notes[0]
    assert installing.recognise("comfyui", comfyui(tmp_path / "b", "0.3.64")).notes == ()


def test_automatic1111(tmp_path):
    found = installing.recognise("a1111", a1111(tmp_path / "webui"))
    assert found.version == "1.10.1"
    assert found.destination == tmp_path / "webui/extensions/rocm-sd"
    assert found.source.name == "extension"


def test_links_are_resolved(tmp_path):
    comfyui(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert installing.recognise("comfyui", tmp_path / "link").root == tmp_path / "real"


def test_what_is_no_host_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(NotAHost, match=r"no main\.py beside comfy/"):
        installing.recognise("comfyui", tmp_path)
    with pytest.raises(NotAHost, match=r"no webui\.py beside modules/"):
        installing.recognise("a1111", tmp_path)
    with pytest.raises(NotAHost, match="There is no folder"):
        installing.recognise("comfyui", tmp_path / "nowhere")
    with pytest.raises(NotAHost, match=r"is ComfyUI\. Type: rocm-sd install comfyui"):
        installing.recognise("a1111", comfyui(tmp_path / "a"))
    with pytest.raises(NotAHost, match=r"is Automatic1111\. Type: rocm-sd install a1111"):
        installing.recognise("comfyui", a1111(tmp_path / "b"))
    with pytest.raises(InvalidOption, match="comfyui, a1111"):
        installing.recognise("invoke", tmp_path)


@pytest.mark.parametrize(("mark", "name"), [("modules_forge/", "Forge"), ("installer.py", r"SD\.Next")])
@pytest.mark.parametrize("asked", ["a1111", "comfyui"])
def test_its_relatives_are_known_by_name(tmp_path, mark, name, asked):
    make(a1111(tmp_path), mark)
    with pytest.raises(Unsupported, match=name):
        installing.recognise(asked, tmp_path)


def test_linked_twice_and_removed(host):
    before = tree(host.root)
    for _ in range(2):
        placed = installing.place(host)
        assert placed.mode == "link"
        assert host.destination.resolve() == host.source.resolve()
        assert (host.destination / "__init__.py").is_file()
    assert installing.remove(host).files == (host.destination,)
    assert tree(host.root) == before
    assert (host.source / "__init__.py").is_file()  # what the link led to is not touched
    with pytest.raises(NotAHost, match="is not installed"):
        installing.remove(host)


def test_copied_twice_and_removed_with_what_python_compiled(webui):
    before = tree(webui.root)
    for _ in range(2):
        placed = installing.place(webui, copy=True)
        assert (placed.mode, placed.files, placed.kept) == ("copy", 2, ())
    assert (webui.destination / "install.py").read_text() == "x = 1\n"
    make(
        webui.destination,
        "__pycache__/install.cpython-311.pyc",
        "scripts/__pycache__/rocm_sd_optimization.cpython-310.pyc",
    )
    removed = installing.remove(webui)
    assert len(removed.files) == 2
    assert removed.kept == ()
    assert tree(webui.root) == before


def test_link_to_copy_and_the_host_never_sees_both(webui):
    installing.place(webui)
    assert installing.place(webui, copy=True).mode == "copy"
    assert not webui.destination.is_symlink()
    assert installing.place(webui).mode == "copy"  # a folder with files in it is not traded for a link
    assert len(installing.remove(webui).files) == 2
    assert not webui.destination.exists()


def test_what_the_user_changed_or_added_is_kept(webui):
    installing.place(webui, copy=True)
    (webui.destination / "install.py").write_text("mine\n")
    (webui.destination / "notes.txt").write_text("mine\n")
    again = installing.place(webui, copy=True)
    assert again.kept == (webui.destination / "install.py",)
    removed = installing.remove(webui)
    assert removed.files == (webui.destination / "scripts/rocm_sd_optimization.py",)
    assert set(removed.kept) == {webui.destination / "install.py", webui.destination / "notes.txt"}
    assert (webui.destination / "install.py").read_text() == "mine\n"
    assert not (webui.destination / "scripts").exists()
    assert not (webui.destination.parent / LIST_NAME).exists()


def test_an_update_brings_new_files_and_takes_old_ones(webui):
    installing.place(webui, copy=True)
    (webui.source / "install.py").write_text("x = 2\n")
    (webui.source / "scripts/rocm_sd_optimization.py").unlink()
    make(webui.source, "metadata.ini")
    installing.place(webui, copy=True)
    assert tree(webui.destination) == ["install.py", "metadata.ini", "scripts"]
    assert (webui.destination / "install.py").read_text() == "x = 2\n"
    installing.remove(webui)
    assert not webui.destination.exists()


def test_a_folder_of_that_name_that_is_not_ours_stays(host):
    make(host.destination, "__init__.py", __init__="theirs")
    for copy in (False, True):
        with pytest.raises(RocmSdError, match="did not write it"):
            installing.place(host, copy=copy)
    assert (host.destination / "__init__.py").read_text() == "theirs"
    shutil.rmtree(host.destination)
    installing.place(host)
    host.destination.unlink()
    make(host.destination, "__init__.py", __init__="theirs")  # since then replaced by the user's own
    with pytest.raises(RocmSdError, match="did not write it"):
        installing.place(host)
    assert installing.remove(host).kept == (host.destination,)


def test_where_links_are_forbidden_files_are_copied(webui, monkeypatch):
    def forbidden(*_arguments, **_options):
        raise OSError(errno.EPERM, "a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", forbidden)
    placed = installing.place(webui)
    assert placed.mode == "copy"
    assert "copied" in placed.notes[0]
    assert len(installing.remove(webui).files) == 2


def test_a_full_disk_leaves_nothing_half_written(webui, monkeypatch):
    def full(source, destination, **_options):
        (destination / "install.py").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = tree(webui.root)
    monkeypatch.setattr(placing.shutil, "copytree", full)
    with pytest.raises(NoDiskSpace):
        installing.place(webui, copy=True)
    assert not webui.destination.exists()
    installing.remove(webui)  # the list alone, from the try that broke off
    assert tree(webui.root) == before


def test_a_subfolder_that_became_a_link_is_not_followed(webui, tmp_path):
    installing.place(webui, copy=True)
    inside, outside = webui.destination / "scripts", tmp_path / "outside"
    inside.rename(outside)
    (outside / "__pycache__").mkdir()
    (outside / "__pycache__" / "rocm_sd_optimization.cpython-311.pyc").write_text("mine")
    inside.symlink_to(outside)
    before = tree(outside)
    assert installing.place(webui, copy=True).kept == (inside / "rocm_sd_optimization.py",)
    assert tree(outside) == before
    removed = installing.remove(webui)
    assert tree(outside) == before
    assert inside.is_symlink()
    assert not any(outside in file.resolve().parents for file in removed.files)


def test_a_file_or_the_folder_itself_that_became_a_link_is_kept(webui, tmp_path):
    installing.place(webui, copy=True)
    file, outside = webui.destination / "install.py", tmp_path / "mine.py"
    file.rename(outside)
    file.symlink_to(outside)
    text = outside.read_text()
    assert file in installing.place(webui, copy=True).kept
    outside.write_text(text)
    webui.destination.rename(tmp_path / "moved")
    webui.destination.symlink_to(tmp_path / "moved")
    before = tree(tmp_path / "moved")
    assert not installing.remove(webui).files
    assert tree(tmp_path / "moved") == before


@pytest.mark.parametrize(
    "text",
    [
        "[]", "null", "3", '"link"', "{}", "[" * 100_000, '{"a": "\\ud800"}',
        '{"folder": "rocm-sd", "mode": "copy", "version": "1", "files": []}',
        '{"folder": "rocm-sd", "mode": "copy", "version": "1", "files": {"a": 5}}',
        '{"folder": "rocm-sd", "mode": "copy", "version": "1", "files": {"": "x"}}',
        '{"folder": "rocm-sd", "mode": "copy", "version": "1", "files": {"a\\u0000b": "x"}}',
        '{"folder": "rocm-sd", "mode": "copy", "version": "1", "more": 1}',
        '{"folder": ["rocm-sd"], "mode": "copy", "version": "1"}',
    ],
)  # fmt: skip
def test_an_odd_list_is_one_sentence_and_nothing_is_touched(webui, text):
    installing.place(webui, copy=True)
    (webui.destination.parent / LIST_NAME).write_text(text)
    before = tree(webui.root)
    for action in (installing.place, installing.remove):
        with pytest.raises(RocmSdError, match=r"cannot be read|not a list that rocm-sd wrote"):
            action(webui)
    assert tree(webui.root) == before


def test_a_list_that_names_files_elsewhere_is_not_followed(webui, tmp_path):
    victim = make(tmp_path, "victim.txt") / "victim.txt"
    installing.place(webui, copy=True)
    file = webui.destination.parent / LIST_NAME
    listed = json.loads(file.read_text())
    for name in ("../../../victim.txt", str(victim)):
        file.write_text(json.dumps(listed | {"files": {name: placing._hash(victim)}}))
        with pytest.raises(RocmSdError, match="not a list that rocm-sd wrote"):
            installing.remove(webui)
    file.write_text("{")
    with pytest.raises(RocmSdError, match="cannot be read"):
        installing.remove(webui)
    assert victim.exists()


def facts(**changes):
    ready = {"python": (3, 12, 1), "torch": "2.13.0+rocm7.2", "build": "rocm", "rocm_sd": "0.1.0"}
    return PythonFacts(executable=Path("/host/venv/bin/python"), **(ready | changes))


def test_what_to_type_names_the_hosts_python():
    assert installing.what_to_type(facts()) == []
    (old,) = installing.what_to_type(facts(torch="2.1.2+cu121"))
    assert "torch 2.1.2+cu121 is older than 2.11" in old
    assert '"/host/venv/bin/python" -m pip install --upgrade torch' in old
    (gone,) = installing.what_to_type(facts(torch=None, torch_error="ModuleNotFoundError: No module named 'torch'"))
    assert "no working torch" in gone
    (ours,) = installing.what_to_type(
        facts(rocm_sd=None, rocm_sd_error="ModuleNotFoundError: No module named 'rocm_sd'")
    )
    assert '"/host/venv/bin/python" -m pip install' in ours
    (broken,) = installing.what_to_type(facts(rocm_sd=None, rocm_sd_error="OSError: libfoo"))
    assert "libfoo" in broken
    (python,) = installing.what_to_type(facts(python=(3, 9, 18)))
    assert "3.10 or newer" in python


def test_oldest_torch_is_that_of_the_package():
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    oldest = ".".join(map(str, installing.interpreters.OLDEST_TORCH))
    assert f'"torch>={oldest}"' in pyproject


def test_this_python_is_ready_and_others_are_distinguished(tmp_path):
    asked = installing.examine(THIS, tmp_path)
    assert asked.rocm_sd == rocm_sd.__version__
    assert asked.build in {"cpu", "cuda", "rocm"}
    assert installing.what_to_type(asked) == []
    assert f"rocm-sd {rocm_sd.__version__}" in asked.described
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no >&2; exit 3\n")
    with pytest.raises(HostNotReady, match="cannot be run"):
        installing.examine(script, tmp_path)
    script.chmod(0o755)
    with pytest.raises(HostNotReady, match=r"cannot be asked \(no\)"):
        installing.examine(script, tmp_path)


def test_which_python(host, tmp_path):
    assert installing.host_python(host) == (THIS, False)
    make(host.root, "venv/bin/python")
    assert installing.host_python(host) == (host.root / "venv/bin/python", True)
    assert installing.host_python(host, THIS) == (THIS, True)
    with pytest.raises(HostNotReady, match="There is no Python at"):
        installing.host_python(host, tmp_path / "nowhere")


@pytest.fixture
def cli():
    app = typer.Typer()
    app.command()(install)
    app.command()(uninstall)
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def test_the_commands_say_what_they_did(host, cli):
    done = cli("install", "comfyui", host.root, "--python", THIS)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "found ComfyUI 0.7.0" in done.output
    assert "ROCm Optimizations" in done.output
    assert "rocm-sd uninstall comfyui" in done.output
    undone = cli("uninstall", "comfyui", host.root)
    assert undone.exit_code == 0
    assert f"removed {host.destination}" in undone.output


def test_a_python_that_lacks_something_stops_it_before_anything_is_written(host, cli, tmp_path):
    lacking = tmp_path / "python"
    answer = json.dumps({"python": [3, 11, 0], "torch": None, "build": None, "rocm_sd": None, "torch_error": "none"})
    lacking.write_text(f"#!/bin/sh\necho '{answer}'\n")
    lacking.chmod(0o755)
    before = tree(host.root)
    refused = cli("install", "comfyui", host.root, "--python", lacking)
    assert isinstance(refused.exception, HostNotReady)
    assert f'"{lacking}" -m pip install' in str(refused.exception)
    assert tree(host.root) == before
    forced = cli("install", "comfyui", host.root, "--python", lacking, "--force")
    assert forced.exit_code == 0
    assert "-m pip install" in forced.output
    assert host.destination.exists()


def test_the_nodes_folder_without_the_package_exports_nothing_and_says_why(tmp_path):
    """As the host loads it: by its path, in a Python whose rocm_sd is missing or broken."""
    folder = installing.recognise("comfyui", comfyui(tmp_path / "c")).source
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/rocm_sd.py").write_text("raise RuntimeError('torch is too old')")
    program = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('nodes_of_ours', sys.argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m);"
        "assert m.NODE_CLASS_MAPPINGS == {} and m.NODE_DISPLAY_NAME_MAPPINGS == {} and m.WEB_DIRECTORY is None"
    )
    for flags, path, words in (
        (["-S"], "", 'no rocm_sd. Type: "'),  # -S: no installed packages
        ([], str(tmp_path / "broken"), "torch is too old"),
    ):
        answer = subprocess.run(
            [sys.executable, *flags, "-c", program, str(folder / "__init__.py")],
            capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert words in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("kind", "variable"), [("comfyui", "ROCM_SD_COMFYUI"), ("a1111", "ROCM_SD_A1111")])
@pytest.mark.parametrize("copy", [False, True], ids=["link", "copy"])
def test_a_real_host_is_as_before_after_uninstall(kind, variable, copy, tmp_path):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no folder")
    root = shutil.copytree(os.environ[variable], tmp_path / "host", symlinks=True)
    before = {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}
    found = installing.recognise(kind, root)
    assert found.version
    installing.place(found, copy=copy)
    assert any(found.destination.iterdir())
    removed = installing.remove(found)
    assert removed.files
    assert not removed.kept
    assert {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")} == before
