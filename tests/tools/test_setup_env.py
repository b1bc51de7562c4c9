"""The set-up from its command line on: what it says, what it runs, what it leaves behind. No environment is made."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import setup_env
import torch_build
import venv_state
from rocm_sd.errors import NoDiskSpace, RocmSdError

SCRIPT = Path(setup_env.__file__)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout with a sound but empty .venv, and no GPU."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((setup_env.ROOT / name).read_bytes())
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"version = {sys.version.split()[0]}\n")
    (venv / "bin/pip").write_text(f"#!{venv}/bin/python\n")
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / "bin/rocm-sd").touch()
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(torch_build, "find_gpus", lambda: ())
    monkeypatch.delenv("ROCM_SD_TORCH", raising=False)
    return tmp_path


class RecordingPip:
    """Notes what pip would be asked, and answers as a test asks; the network is no part of these tests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.said = []

    def run(self, what, *arguments):
        self.said.append(what)
        self.asked.append(" ".join(arguments))
        return self.answers.pop(0) if self.answers else True

    def failure(self, what, hint):
        return RocmSdError(f"pip could not install {what}.", hint=hint)


def put_torch(project, version, hip="None"):
    site = project / ".venv/lib/python3.11/site-packages"
    (site / f"torch-{version}.dist-info").mkdir(parents=True)
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text(f"hip: Optional[str] = {hip}\n")


@pytest.fixture
def unreachable(monkeypatch):
    hosts = set()
    monkeypatch.setattr(torch_build, "unreachable", lambda index: "no answer" if index in hosts else None)
    return hosts


def build_for(*gfx):
    return torch_build.choose(tuple(torch_build.Gpu("amd", name) for name in gfx), "auto", (3, 11))


def test_cpu_falls_back_to_pips_own_index_and_says_so(project, unreachable, capsys):
    unreachable.add(torch_build.CPU_INDEX)
    pip = RecordingPip()
    assert setup_env.install_torch(pip, project / ".venv", build_for()) == ""
    assert pip.asked == ["install --no-deps torch==2.13.0"]
    assert "cannot be used (no answer); trying the index pip is configured for" in capsys.readouterr().out


def test_rocm_takes_the_second_publisher_when_the_first_cannot_be_reached(project, unreachable, capsys):
    unreachable.add(torch_build.AMD_INDEX)
    pip = RecordingPip()
    assert setup_env.install_torch(pip, project / ".venv", build_for("gfx1100")) == ""
    assert pip.asked == [f"install --index-url {torch_build.PYTORCH_ROCM_INDEX} torch==2.13.0+rocm7.2"]
    assert pip.said == ["installing torch==2.13.0+rocm7.2"]


def test_rocm_without_any_index_installs_the_pinned_torch_and_keeps_a_warning(project, unreachable, capsys):
    unreachable.add(torch_build.AMD_INDEX)
    pip = RecordingPip()
    note = setup_env.install_torch(pip, project / ".venv", build_for("gfx1103"))
    assert pip.asked == ["install --no-deps torch==2.13.0"]
    assert "GPU will NOT be used" in note
    assert "make clean-venv demo" in note
    assert note in capsys.readouterr().out


def test_the_last_cpu_source_failing_is_an_error_with_the_line_to_type(project, unreachable):
    pip = RecordingPip(False, False)
    with pytest.raises(RocmSdError, match=r'\.venv/bin/pip install "torch==2\.13\.0"'):
        setup_env.install_torch(pip, project / ".venv", build_for())


def test_an_index_that_was_asked_for_is_never_replaced_silently(project, unreachable):
    unreachable.add("https://example.org/whl")
    build = torch_build.choose((), "https://example.org/whl/", (3, 11))
    with pytest.raises(RocmSdError, match="No index with this torch"):
        setup_env.install_torch(RecordingPip(), project / ".venv", build)


def test_another_kind_of_torch_is_removed_with_its_triton(project, unreachable):
    put_torch(project, "2.13.0+rocm10.0.0", hip="'7.15'")
    pip = RecordingPip()
    setup_env.install_torch(pip, project / ".venv", build_for())
    assert pip.asked[0] == "uninstall --yes torch triton triton-rocm pytorch-triton-rocm"


def test_verify_comes_whole_on_the_cpu_and_without_triton_beside_a_gpu_build(project, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    assert setup_env.installable_extras(("dev", "verify"), "cpu") == (["dev", "verify"], [], [])
    whole, single, remarks = setup_env.installable_extras(("dev", "verify"), "rocm")
    assert whole == ["dev"]
    assert [re.split("[=>]", line)[0] for line in single] == ["tinygrad", "networkx"]
    assert "second one breaks it" in remarks[0]


def test_verify_is_left_out_on_python_310_with_a_word(project, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    whole, single, remarks = setup_env.installable_extras(("dev", "verify"), "cpu")
    assert (whole, single) == (["dev"], [])
    assert "3.11" in remarks[0]


def test_the_project_is_installed_under_the_pins_of_the_torch_that_is_there(project):
    put_torch(project, "2.13.0+cpu")
    pip = RecordingPip()
    setup_env.install_project(pip, project / ".venv", ("dev",))
    pins = project / ".venv/.rocm-sd-constraints.txt"
    assert pip.asked == [f"install --constraint {pins} --editable .[dev]"]
    assert "torch==2.13.0+cpu" in pins.read_text().splitlines()


def test_a_finished_setup_is_recognised_without_pip(project, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "install_torch", lambda *_: "")
    monkeypatch.setattr(setup_env, "install_project", lambda *_: None)
    assert setup_env.main(["--extras", "dev"]) == 0
    assert venv_state.read_stamp(project / ".venv").extras == ("dev",)
    monkeypatch.setattr(setup_env, "Pip", None)
    capsys.readouterr()
    assert setup_env.main([]) == 0
    assert capsys.readouterr().out.startswith("[set-up] up to date; torch: the cpu build, because no AMD or NVIDIA GPU")


def test_more_extras_leave_torch_alone_and_keep_the_earlier_ones(project, monkeypatch):
    torches = []
    monkeypatch.setattr(setup_env, "install_torch", lambda *_: torches.append(1) or "the GPU is unused")
    monkeypatch.setattr(setup_env, "install_project", lambda *_: None)
    assert setup_env.main(["--extras", "dev"]) == 0
    assert setup_env.main(["--extras", "verify"]) == 0
    assert torches == [1]
    stamp = venv_state.read_stamp(project / ".venv")
    assert stamp.extras == ("dev", "verify")
    assert stamp.note == "the GPU is unused"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RocmSdError("no network")])
def test_an_interrupted_setup_leaves_no_stamp(project, monkeypatch, capsys, interruption):
    venv_state.write_stamp(project / ".venv", venv_state.Stamp("of another torch", ()))

    def interrupted(*_):
        raise interruption

    monkeypatch.setattr(setup_env, "install_torch", lambda *_: "")
    monkeypatch.setattr(setup_env, "install_project", interrupted)
    assert setup_env.main([]) != 0
    assert venv_state.read_stamp(project / ".venv") is None
    assert "[set-up]" in capsys.readouterr().err


def test_a_bad_override_ends_with_the_choices_and_no_traceback(project, monkeypatch, capsys):
    monkeypatch.setenv("ROCM_SD_TORCH", "rcom")
    assert setup_env.main([]) == 2
    said = capsys.readouterr().err
    assert "'rcom' is not known" in said
    assert "auto, rocm, cuda, cpu" in said


def test_dry_run_says_what_it_would_do_and_does_nothing(project, capsys):
    assert setup_env.main(["--dry-run", "--torch", "gfx1100", "--extras", "dev"]) == 0
    said = capsys.readouterr().out
    assert "the rocm build, because gfx1100 was asked for" in said
    assert f'--index-url {torch_build.AMD_INDEX} "torch[device-gfx1100]==2.13.0+rocm10.0.0"' in said
    assert not (project / ".cache").exists()


def test_an_unsupported_python_gets_what_to_type(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: name if name == "python3.12" else None)
    with pytest.raises(RocmSdError, match=r"this is 3\.14\. Type: make PYTHON=python3\.12 demo"):
        setup_env.check_python()


def test_a_full_disk_is_noticed_before_the_download(project, monkeypatch):
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000_000}))
    with pytest.raises(NoDiskSpace, match=r"1000\.0 MB free"):
        setup_env.check_disk(project / ".venv", "cpu")
    put_torch(project, "2.13.0+cpu")
    setup_env.check_disk(project / ".venv", "cpu")


def test_pips_last_lines_are_shown_when_it_fails(project, capsys):
    (project / ".cache").mkdir()
    pip = setup_env.Pip(project / ".venv", project / ".cache/setup.log")
    pip.python = Path(sys.executable)
    assert pip.run("asking pip", "--version")
    assert not pip.run("installing nothing", "install", "--no-index", "--no-build-isolation", "no-such-package-rocm-sd")
    error = pip.failure("it", "Look at the network.")
    said = capsys.readouterr().out
    assert "installing nothing: failed after" in said
    assert "No matching distribution found for no-such-package-rocm-sd" in said
    assert "Look at the network." in str(error)


def test_the_script_runs_by_itself_and_explains_its_options():
    helped = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    for word in ("--torch", "--extras", "--dry-run", "ROCM_SD_TORCH"):
        assert word in helped.stdout
