"""Every example runs as its docstring says, on the embedded model, and fails in one sentence."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
QUICK = ("--steps", "2", "--device", "cpu")


def run(name, *arguments):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        return runpy.run_path(str(path), run_name="__main__")


def colours(path):
    with Image.open(path) as picture:
        return picture.convert("RGB").getextrema()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_help_tells_how_to_run_it(path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(path.stem, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python examples/{path.name}" in shown
    assert "--model" in shown


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("wrong", [("--model", "./nowhere"), ("--steps", "0")], ids=" ".join)
def test_what_is_wrong_is_said_in_one_sentence(path, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        run(path.stem, *wrong)
    printed = f"{ended.value.code}\n{capsys.readouterr().err}"
    assert "There is no model at ./nowhere." in printed or "0: it takes 1 or more" in printed


def test_basic_inference_draws_and_reports(tmp_path, capsys):
    run("basic_inference", "a frog", *QUICK, "--out", tmp_path / "new" / "frog.png")
    assert any(high > low for low, high in colours(tmp_path / "new" / "frog.png"))
    assert "replaced by rule resblock" in capsys.readouterr().out


def test_the_optimized_pipeline_draws_every_prompt(tmp_path, capsys):
    options = ("--level", "memory", "--scheduler", "euler", "--out", tmp_path)
    run("optimized_pipeline", *QUICK, *options, "--prompts", "a frog", "a red apple!")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-frog.png", "a-red-apple.png"]
    printed = capsys.readouterr().out
    assert "level memory" in printed
    assert "restored: a StableDiffusionPipeline on cpu" in printed


def test_the_comparison_shows_both_with_their_quartiles(capsys):
    run("benchmark_comparison", *QUICK, "--runs", "2")
    printed = capsys.readouterr().out
    assert "error of the latents" in printed
    assert {"stock", "rocm-sd"} <= {line.split()[1] for line in printed.splitlines() if line.startswith("│")}


def test_the_comparison_shows_no_times_for_another_picture(monkeypatch, capsys):
    import rocm_sd

    def spoiled(pipe, **_options):
        forward = pipe.unet.forward
        pipe.unet.forward = lambda *args, **named: [x * 1.01 for x in forward(*args, **named)]
        return pipe

    monkeypatch.setattr(rocm_sd, "optimize", spoiled)
    with pytest.raises(SystemExit, match="The picture is not stock's"):
        run("benchmark_comparison", *QUICK, "--runs", "2")
    assert "median" not in capsys.readouterr().out


def test_one_run_has_no_quartiles():
    with pytest.raises(SystemExit, match="quartiles need 2"):
        run("benchmark_comparison", *QUICK, "--runs", "1")


def test_the_lora_shows_and_goes(tmp_path, capsys):
    run("img2img_lora", *QUICK, "--scales", "1.0", "--out", tmp_path / "lora.png")
    with Image.open(tmp_path / "lora.png") as picture:
        assert picture.size == (3 * 128, 128)
        without, with_it = (picture.crop((128 * n, 0, 128 * (n + 1), 128)).tobytes() for n in (1, 2))
    assert without != with_it
    assert "lora.png" in capsys.readouterr().out
