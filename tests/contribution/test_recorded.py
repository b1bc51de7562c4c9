"""The recorded run on a CPU is a file that anybody could send."""

from __future__ import annotations

from pathlib import Path

from rocm_sd.bench import card_report

FOLDER = Path(__file__).parents[2] / "benchmarks" / "contribute-cpu"


def test_the_recorded_file_is_valid_and_whole():
    (file,) = FOLDER.glob("*.json")
    assert card_report.validate(file) == ()
    states = {part.name: part.state for part in card_report.load(file).parts}
    assert set(states) == {"doctor", "self-tests", "verify", "calibration", "bench", "comfyui"}
    assert {name for name, state in states.items() if state != "passed"} == {"comfyui"}
