"""setup_rocm_dev.sh: what it says, and that it runs the set-up. No environment is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "setup_rocm_dev.sh"
PYTHON = """#!/bin/sh
[ "$1" = --version ] && { echo "Python 3.12.9"; exit 0; }
echo "asked: $*"
exit ${ANSWER:-0}
"""

if shutil.which("make") is None or shutil.which("bash") is None:
    pytest.skip("there is no make or no bash", allow_module_level=True)


@pytest.fixture
def run(tmp_path):
    """Runs a copy of the script with a Python that only says what it was asked; from another folder."""
    for name in ("setup_rocm_dev.sh", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "a-python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def of(*words, **variables):
        here = {**os.environ, "PYTHON": str(python), "ROCM_PATH": str(tmp_path / "no-rocm"), **variables}
        command = [str(tmp_path / SCRIPT.name), *words]
        return subprocess.run(command, cwd="/", env=here, capture_output=True, text=True, check=False)

    return of


def test_it_says_what_it_finds_sets_up_and_says_what_to_type_next(run):
    done = run()
    assert done.returncode == 0, done.stderr
    assert "Python   Python 3.12.9" in done.stdout
    assert "ROCm     none: torch brings its own libraries" in done.stdout
    for what in ("GPU", "clang", "CMake"):
        assert f"  {what} " in done.stdout
    (asked,) = (line for line in done.stdout.splitlines() if line.startswith("asked: "))
    assert asked.split()[1:3] == ["tools/setup_env.py", "--extras"]
    assert {"dev", "verify"} <= set(asked.split()[3].split(","))
    assert "--dry-run" not in asked
    assert done.stdout.index(asked) < done.stdout.index("rocm-sd doctor")


def test_a_rocm_is_found_with_its_version(run, tmp_path):
    (tmp_path / "rocm" / ".info").mkdir(parents=True)
    (tmp_path / "rocm" / ".info" / "version").write_text("7.0.1-38\n")
    assert f"ROCm     7.0.1-38 in {tmp_path / 'rocm'}" in run("--dry-run", ROCM_PATH=str(tmp_path / "rocm")).stdout


def test_a_dry_run_is_one_and_suggests_nothing(run):
    done = run("--dry-run")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].endswith(" --dry-run")


def test_what_goes_wrong_is_said_and_is_its_exit_code(run):
    failed = run(ANSWER="3")
    assert failed.returncode != 0
    assert "Next, type:" not in failed.stdout
    missing = run(PYTHON="no-such-python")
    assert missing.returncode == 1
    assert "There is no no-such-python here" in missing.stderr
    unknown = run("--fast")
    assert unknown.returncode == 2
    assert 'What is "--fast"?' in unknown.stderr


def test_it_explains_itself(run):
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.count("./setup_rocm_dev.sh") == 4
    assert "asked" not in done.stdout


def test_shellcheck_has_nothing_to_say():
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck: apt-get install shellcheck")
    subprocess.run(["shellcheck", SCRIPT], check=True)
