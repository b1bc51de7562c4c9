"""benchmarks/first_run.py runs whole with a tiny model: what it injects is seen, and what it counts is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(out, steps):
    command = [sys.executable, str(ROOT / "benchmarks" / "first_run.py"), "--tiny", "--turns", "2", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [*command, "--steps", steps], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "first-run.json").read_text()), done.stdout


def test_a_first_and_a_second_process(tmp_path):
    record, said = run(tmp_path, "plans")
    first, second = record["plans"]["results"].values()
    assert first["gate"] is None
    assert first["calibrations"] == 1
    assert {"tracing", "ops", "plan torch", "plan channels_last"} <= first["phases"].keys()
    assert second["calibrations"] == 0
    assert all("measured here on" in note for note in (*first["plans"], *second["plans"]))
    assert first["plans"]
    assert "-        a second process calibrates nothing: 0 times" in said
    assert first["machine"]["versions"]["torch"]
    assert record["plans"]["command"].endswith("--steps plans")


def test_faults_are_injected_found_and_not_adopted(tmp_path):
    record, _ = run(tmp_path, "faults")
    candidates, graph = record["faults"]["results"].values()
    said = candidates["said"]
    assert said["wrong_in_one_value"].startswith("wrong")
    assert said["aborts"].startswith("crashed by signal 6")
    assert said["hangs"].startswith("hung")
    assert said["slow"].endswith("of stock's time")
    assert candidates["adopted"].keys() == {"torch"}
    assert candidates["gate"] is graph["gate"] is None
    assert graph["rung"] == "blocks"
    assert any("replay 3, on changed inputs, differs" in note for note in graph["notes"])


def test_an_unknown_step_is_named(tmp_path):
    with pytest.raises(AssertionError, match="nonsense is no step"):
        run(tmp_path, "plans,nonsense")
