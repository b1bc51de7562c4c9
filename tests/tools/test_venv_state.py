"""The stamp, the lock and what is read of an environment without starting it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import venv_state
from rocm_sd.errors import RocmSdError
from venv_state import InstalledTorch, Stamp

TOOLS = Path(venv_state.__file__).parent
SRC = TOOLS.parent / "src"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\n")
    return tmp_path


@pytest.fixture
def venv(tmp_path):
    """As much of an environment as the checks look at."""
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {sys.version.split()[0]}\n")
    for name in ("python", "rocm-sd"):
        (folder / "bin" / name).touch()
    (folder / "bin/pip").write_text(f"#!{folder}/bin/python\nimport pip\n")
    return folder


def put_torch(venv, version, *, hip="None", cuda="None"):
    site = venv / "lib/python3.11/site-packages"
    (site / f"torch-{version}.dist-info").mkdir(parents=True)
    (site / "torch").mkdir()
    lines = [f"__version__ = '{version}'", f"cuda: Optional[str] = {cuda}", f"hip: Optional[str] = {hip}"]
    (site / "torch/version.py").write_text("\n".join(lines) + "\n")


def test_a_stamp_is_read_back_and_leaves_no_part_behind(venv):
    stamp = Stamp("abc", ("dev", "verify"), "the GPU is unused")
    venv_state.write_stamp(venv, stamp)
    assert venv_state.read_stamp(venv) == stamp
    assert [path.name for path in venv.glob(".rocm-sd*")] == [venv_state.STAMP_NAME]
    venv_state.remove_stamp(venv)
    assert venv_state.read_stamp(venv) is None
    venv_state.remove_stamp(venv)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": "abc"}'])
def test_a_damaged_stamp_counts_as_none(venv, text):
    (venv / venv_state.STAMP_NAME).write_text(text)
    assert venv_state.read_stamp(venv) is None


@pytest.mark.parametrize("lost", ["python", "rocm-sd"])
def test_a_stamp_beside_a_missing_command_counts_as_none(venv, lost):
    venv_state.write_stamp(venv, Stamp("abc", ()))
    (venv / "bin" / lost).unlink()
    assert venv_state.read_stamp(venv) is None


def test_a_stamp_covers_fewer_extras_not_more_and_not_another_digest():
    stamp = Stamp("abc", ("dev", "verify"))
    assert stamp.covers("abc", ())
    assert stamp.covers("abc", ("dev",))
    assert not stamp.covers("abc", ("dev", "quality"))
    assert not stamp.covers("abd", ())


def test_the_digest_follows_all_that_decides_what_is_installed(project, tmp_path_factory, monkeypatch):
    first = venv_state.digest(project, "cpu")
    assert venv_state.digest(project, "cpu") == first
    assert venv_state.digest(project, "rocm") != first
    (project / "constraints.txt").write_text("numpy==2.4.7\n")
    second = venv_state.digest(project, "cpu")
    (project / "pyproject.toml").write_text("[project]\nname='x'\n")
    third = venv_state.digest(project, "cpu")
    elsewhere = tmp_path_factory.mktemp("moved")
    for name in ("pyproject.toml", "constraints.txt"):
        (elsewhere / name).write_bytes((project / name).read_bytes())
    moved = venv_state.digest(elsewhere, "cpu")
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    other_python = venv_state.digest(project, "cpu")
    assert len({first, second, third, moved, other_python}) == 5


def test_a_sound_environment_is_kept_and_a_missing_one_is_no_fault(venv, tmp_path):
    assert venv_state.why_unusable(venv) is None
    assert venv_state.why_unusable(tmp_path / "none") is None


def test_why_an_environment_must_be_made_anew(venv):
    (venv / "bin/pip").write_text("#!/elsewhere/.venv/bin/python\n")
    assert "moved" in venv_state.why_unusable(venv)
    (venv / "bin/pip").unlink()
    assert "cut short" in venv_state.why_unusable(venv)
    (venv / "pyvenv.cfg").write_text("version = 3.9.2\n")
    assert "Python 3.9" in venv_state.why_unusable(venv)
    (venv / "pyvenv.cfg").unlink()
    assert "no environment" in venv_state.why_unusable(venv)


@pytest.mark.parametrize(
    ("version", "values", "kind"),
    [
        ("2.13.0+cpu", {}, "cpu"),
        ("2.13.0", {"cuda": "'13.0'"}, "cuda"),
        ("2.13.0+rocm10.0.0", {"hip": "'7.15.26333'"}, "rocm"),
    ],
)
def test_the_kind_of_torch_is_read_from_its_files(venv, version, values, kind):
    assert venv_state.installed_torch(venv) is None
    put_torch(venv, version, **values)
    assert venv_state.installed_torch(venv) == InstalledTorch(version, kind)


def test_the_installed_torch_agrees_with_torch_itself():
    import torch

    site = Path(torch.__file__).parents[1]
    found = venv_state.installed_torch(site.parents[2])
    expected = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    assert found is not None
    assert found.kind == expected


def test_pins_keep_triton_on_the_cpu_and_drop_it_beside_a_gpu_build():
    text = "# why\ntorch==2.13.0\ntorchmetrics==1.9.0\ntriton==3.9.0 ; python_version >= '3.11'\n"
    on_cpu = venv_state.constraints_for(text, InstalledTorch("2.13.0+cpu", "cpu")).splitlines()
    assert on_cpu == ["# why", "torchmetrics==1.9.0", "triton==3.9.0 ; python_version >= '3.11'", "torch==2.13.0+cpu"]
    for kind, version in (("rocm", "2.13.0+rocm7.2"), ("cuda", "2.13.0")):
        beside = venv_state.constraints_for(text, InstalledTorch(version, kind)).splitlines()
        assert beside == ["# why", "torchmetrics==1.9.0", f"torch=={version}"]


def test_a_second_setup_waits_says_for_whom_and_then_goes_on(tmp_path):
    path = tmp_path / "cache/setup.lock"
    holder_code = f"""
        import sys, time
        sys.path[:0] = [{str(SRC)!r}, {str(TOOLS)!r}]
        import pathlib, venv_state
        with venv_state.lock(pathlib.Path({str(path)!r}), print):
            print("held", flush=True)
            sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(holder_code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        said = []

        def say(line):
            said.append(line)
            holder.stdin.write("done\n")
            holder.stdin.flush()

        with venv_state.lock(path, say):
            assert holder.wait(10) == 0
    assert len(said) == 1
    assert f"process {holder.pid}" in said[0]


def test_a_killed_holder_blocks_nobody(tmp_path):
    path = tmp_path / "setup.lock"
    code = f"import fcntl, time; h = open({str(path)!r}, 'w'); fcntl.flock(h, fcntl.LOCK_EX)"
    code += "; print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    said = []
    start = time.monotonic()
    with venv_state.lock(path, said.append):
        pass
    assert said == []
    assert time.monotonic() - start < 5


def test_a_lock_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RocmSdError, match="folder you own"), venv_state.lock(tmp_path / "file/setup.lock", print):
        pass
