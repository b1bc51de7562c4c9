from __future__ import annotations

import errno
import inspect
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from PIL import Image

from pipelines import tiny_pipeline
from rocm_sd import errors
from rocm_sd.cli import main, pictures
from rocm_sd.ops import OPS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return str(folder)


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    return int(ended.value.code or 0)


def draw(model: str, out: Path, *more: str) -> int:
    common = ("--model", model, "--size", "16x16", "--steps", "2", "--out", str(out), "--device", "cpu")
    return rocm_sd("generate", "A Frog, on pink!", *common, *more)


@pytest.mark.parametrize("verb", [command.callback for command in main.app.registered_commands])
def test_help_has_examples_and_whole_paragraphs(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert rocm_sd(verb.__name__, "--help") == 0
    shown = capsys.readouterr().out
    assert f"\n rocm-sd {verb.__name__}" in shown
    text = shown.partition("╭")[0]
    for paragraph in inspect.cleandoc(verb.__doc__).split("\n\n"):
        # Lines that end with the terminal, not where the source broke them.
        lines = textwrap.wrap(" ".join(paragraph.split()), 78, break_on_hyphens=False)
        assert "".join(f"{f' {line}':80}\n" for line in lines) in text


def test_info_as_json_tells_the_whole_machine(capsys):
    assert rocm_sd("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {op["name"] for op in facts["ops"]} == set(OPS)
    assert facts["versions"]["torch"]
    assert facts["device"]["arch"]
    assert sum(i["chosen_here"] for i in facts["ops"][0]["implementations"]) == 1


def test_info_for_people(capsys):
    assert rocm_sd("info") == 0
    shown = capsys.readouterr().out
    assert "Ops\n" in shown.replace(" ", "")
    assert "group_norm_silu" in shown


def test_generate_writes_a_picture_with_its_parameters(model, tmp_path, capsys):
    assert draw(model, tmp_path, "--seed", "7", "--batch", "2") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-frog-on-pink-7.png", "a-frog-on-pink-8.png"]
    with Image.open(tmp_path / "a-frog-on-pink-7.png") as image:
        assert image.size == (16, 16)
        assert image.info["prompt"] == "A Frog, on pink!"
        assert image.info["seed"] == "7"
        assert image.info["level"] == "auto"
    assert "2 picture(s) in" in capsys.readouterr().out


def test_an_earlier_picture_is_never_overwritten(model, tmp_path):
    assert draw(model, tmp_path) == 0
    assert draw(model, tmp_path) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-frog-on-pink-0-2.png", "a-frog-on-pink-0.png"]


def test_compare_draws_both_and_their_difference(model, tmp_path):
    assert draw(model, tmp_path, "--compare", "--scheduler", "euler") == 0
    with Image.open(tmp_path / "compare-a-frog-on-pink-0.png") as image:
        assert image.width > 3 * 16
        assert image.info["scheduler"] == "EulerDiscreteScheduler"


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--level", "fast"), 2, "Use one of: auto, performance, memory."),
        (("--quality", "good"), 2, "Use one of: exact, high, balanced."),
        (("--scheduler", "magic"), 2, "Use one of: ddim"),
        (("--size", "100x100"), 3, "it takes a multiple of 8"),
        (("--size", "big"), 3, "it takes WIDTHxHEIGHT"),
        (("--steps", "0"), 3, "steps 0"),
        (("--steps", "1000"), 3, "1000 steps: this model takes fewer than 1000"),
        (("--model", "/nowhere"), 4, "There is no model at /nowhere."),
        (("--device", "cuda"), 6, "torch sees no GPU."),
    ],
)
def test_a_wrong_option_is_one_sentence_and_an_exit_code(model, tmp_path, capsys, monkeypatch, options, code, sentence):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert draw(model, tmp_path, *options) == code
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(capsys):
    assert rocm_sd("--debug", "generate", "x", "--level", "fast") == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unwritable_folder_is_said_before_the_work(model, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert draw(model, tmp_path / "file" / "out") == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_half_written(model, tmp_path, capsys, monkeypatch):
    def full(self, target, **options):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert draw(model, tmp_path) == 5
    assert "There is no space left to write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_usage_error_ends_with_two(capsys):
    assert rocm_sd("generate") == 2
    assert "Missing argument" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_nothing_half_written(model, tmp_path):
    # A shell's background jobs ignore Ctrl-C, and their children inherit that; a person's terminal does not.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import rocm_sd.cli.main as m; m.run()"
    )
    out = tmp_path / "out"
    options = ["--model", model, "--size", "64x64", "--steps", "900", "--out", str(out)]
    running = subprocess.Popen([sys.executable, "-c", program, "generate", "a frog", *options])
    # The folder is made after the options are checked and before the model is loaded.
    while running.poll() is None and not out.exists():
        time.sleep(0.1)
    time.sleep(2)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 130
    assert not list(out.iterdir())


def test_exit_codes_differ_by_kind_of_error():
    assert errors.InvalidOption("a", "b", ["c"]).exit_code == 2
    assert errors.Unsupported("a", "b").exit_code == 3
    assert errors.NoDiskSpace("x", needed=5_000_000, free=1_000_000).exit_code == 5
    assert "5.0 MB needed, 1.0 MB free" in str(errors.NoDiskSpace("x", needed=5_000_000, free=1_000_000))
    assert "pip install 'rocm-sd[quality]'" in str(errors.MissingDependency("scikit-image", "quality"))


def test_a_sheet_holds_every_picture_and_wraps_captions():
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    sheet = pictures.sheet([[(red, "one " * 30), (blue, "two")]], cell=64)
    colours = {colour for _, colour in sheet.getcolors(maxcolors=100_000)}
    assert {(255, 0, 0), (0, 0, 255)} <= colours


def test_the_difference_is_amplified_and_measured():
    first, second = Image.new("RGB", (4, 4), (10, 10, 10)), Image.new("RGB", (4, 4), (10, 13, 10))
    picture, largest = pictures.difference(first, second, gain=20)
    assert largest == 3
    assert picture.getpixel((0, 0)) == (0, 60, 0)
