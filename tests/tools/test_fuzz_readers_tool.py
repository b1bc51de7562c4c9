"""The fuzz of readers that is guided by coverage: a good reader stands it, and a planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools/fuzz_readers.py"
pytest.importorskip("atheris")


def fuzz(folder, *options, before=""):
    """With some code run before it, in a folder of its own."""
    run = f"import runpy, sys; sys.argv[:] = {[str(TOOL), *options]!r}; runpy.run_path({str(TOOL)!r}, None, '__main__')"
    code = f"{before}\n{run}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_reader_stands_some_hundred_files(tmp_path):
    ran = fuzz(tmp_path, "eight_bit_headers", "--runs", "300")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "Done 300 runs" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_planted_fault_is_found_and_can_be_had_again(tmp_path):
    planted = """
import rocm_sd.plain_json as plain
read = plain.parsed
def parsed(raw, *rest):
    if len(raw) < 100:
        raise ValueError("planted")
    return read(raw, *rest)
plain.parsed = parsed
"""
    ran = fuzz(tmp_path, "plain_json", "--runs", "20000", before=planted)
    assert ran.returncode == 77, ran.stderr[-2000:]
    (crash,) = tmp_path.glob("crash-*")
    again = fuzz(tmp_path, "plain_json", "--again", str(crash), before=planted)
    assert "ValueError: planted" in again.stderr


def test_an_unknown_reader_is_said(tmp_path):
    ran = fuzz(tmp_path, "nosuch")
    assert ran.returncode == 2
    assert "plain_json" in ran.stderr
