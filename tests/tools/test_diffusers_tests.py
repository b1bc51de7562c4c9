"""The comparison with Diffusers' own tests sees what fails optimised only, and runs real ones of its kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import diffusers_tests
from diffusers_tests import Outcomes, difference

TOOL = Path(diffusers_tests.__file__)
TESTS = """
import pytest, torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from transformers import AutoTokenizer, CLIPTokenizer, T5EncoderModel

def test_pipelines_pass():
    pipe = made()
    assert pipe.scheduler is not None

def test_fails_both_ways():
    raise AssertionError("so or so")

def test_is_skipped():
    pytest.skip("slow")

def test_fails_optimised_only():
    assert "step" not in vars(made().scheduler), "a stand-in"

def test_the_stand_ins_load():
    tokens = CLIPTokenizer.from_pretrained("hf-internal-testing/tiny-random-clip")("A frog, 1", return_tensors="pt")
    assert tokens.input_ids.max() < 1000
    name = "hf-internal-testing/tiny-random-t5"
    ids = AutoTokenizer.from_pretrained(name)("A frog", return_tensors="pt").input_ids
    assert T5EncoderModel.from_pretrained(name)(ids)[0].shape[-1] == 32

def made():
    from tiny_models import unet_of, vae_of
    return StableDiffusionPipeline(
        vae=vae_of(), unet=unet_of("sd15"), scheduler=DDIMScheduler(clip_sample=False), text_encoder=None,
        tokenizer=None, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "diffusers" / "tests" / "pipelines" / "some"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    return folder.parents[2]


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True, check=False, env=environment
    )


def test_what_differs_is_printed_and_the_exit_code_says_so(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TOOL.parents[1] / 'tests'}:{TOOL.parents[1] / 'src'}")
    done = run(checkout, "some", "--out", tmp_path / "record.json", **os.environ)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fails optimised only: tests/pipelines/some/test_some.py::test_fails_optimised_only" in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())["some"]
    assert record["stock"] == {"failed": 1, "passed": 3, "skipped": 1}
    assert record["created"] == {"failed": 2, "passed": 2, "skipped": 1}
    assert len(record["only_optimised"]) == 1
    assert record["only_stock"] == []


def test_a_file_that_cannot_be_imported_is_no_test_that_fails_both_ways(checkout, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TOOL.parents[1] / 'tests'}:{TOOL.parents[1] / 'src'}")
    (checkout / "tests/pipelines/some/test_other.py").write_text("import a_package_that_is_not_there\n")
    done = run(checkout, "some", **os.environ)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "no test ran, because tests/pipelines/some/test_other.py cannot be imported" in said
    assert "No module named 'a_package_that_is_not_there'" in said


def test_help_has_examples_and_a_folder_without_tests_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TOOL.parents[1] / "src"))
    assert "examples:" in run("--help", **os.environ).stdout
    done = run(tmp_path, **os.environ)
    assert done.returncode == 2
    assert "tests/pipelines" in done.stderr


def test_a_test_that_did_not_come_to_its_end_counts_as_lost():
    stock = Outcomes({"a": "passed", "b": "passed", "c": "failed"})
    ours = Outcomes({"a": "passed"})
    assert difference(stock, ours) == (["b"], [])


def test_what_breaks_after_a_test_makes_it_fail():
    done = Outcomes()
    for outcome in ("passed", "failed", "passed"):
        done.take({"test": "a", "outcome": outcome, "why": ""})
    assert done.failed == {"a"}
