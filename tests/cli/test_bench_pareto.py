"""rocm-sd bench --pareto: the command, what it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from pipelines import tiny_pipeline
from rocm_sd.bench import pareto
from rocm_sd.bench.records import Record
from rocm_sd.cli import main


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    tiny_pipeline(tmp_path).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a frog\n\na dog\na cat\n")
    return tmp_path / "model"


def bench(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", *map(str, arguments), "--device", "cpu"])
    return int(ended.value.code or 0)


def of(model, *more):
    given = (model, "--pareto", "--steps", "6", "--settings", "2", "--prompts", model.parent / "prompts.txt")
    return (*given, "--out", model.parent / "out", *more)


def test_it_writes_the_record_the_plot_and_the_page(model, capsys):
    assert bench(*of(model)) == 0
    out = model.parent / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "model-pareto.json", "model-pareto.md", "model-pareto.png",
    ]  # fmt: skip
    record = Record.load(out / "model-pareto.json")
    assert record.complete
    assert record.command == "rocm-sd bench model --pareto --prompts prompts.txt --steps 6 --settings 2"
    assert str(model.parent) not in (out / "model-pareto.json").read_text()
    assert record.machine.versions["torch"]
    timed = [one for one in record.measurements if one.ms]
    assert {"stock", "exact"} < {one.engine for one in timed}
    assert all(one.quality.prompts == 3 for one in timed[2:])
    with Image.open(out / "model-pareto.png") as plot:
        assert plot.text["command"] == record.command
    shown = capsys.readouterr().out
    for words in ("times stock", "match points", "on the front", "scored against the exact ones", "wrote"):
        assert words in shown
    # One of them stands on the front at least: exact itself is as near as can be.
    assert "yes" in shown


def test_json_is_all_that_is_printed(model, capsys):
    assert bench(*of(model, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "pareto"


def test_ctrl_c_keeps_what_is_done(model, capsys, monkeypatch):
    real, turns = pareto.Survey._turn, []

    def interrupted(self, number, text):
        if turns == [0, 1]:
            raise KeyboardInterrupt
        turns.append(number)
        real(self, number, text)

    monkeypatch.setattr(pareto.Survey, "_turn", interrupted)
    assert bench(*of(model)) == 130
    printed = capsys.readouterr()
    assert "2 of 3 prompts are kept in" in printed.err
    assert "This run was interrupted" in printed.out
    record = Record.load(model.parent / "out" / "model-pareto.json")
    assert not record.complete
    with Image.open(model.parent / "out" / "model-pareto.png") as plot:
        assert plot.size == (1200, 760)


def test_ctrl_c_before_the_first_turn_draws_no_plot(model, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pareto.Survey, "_turn", interrupted)
    assert bench(*of(model)) == 130
    assert "No prompt was drawn by all settings yet" in capsys.readouterr().err
    assert sorted(path.suffix for path in (model.parent / "out").iterdir()) == [".json", ".md"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("sd15-512", "--pareto"), 2, "With --pareto give a model"),
        (("op:conv2d", "--pareto"), 2, "With --pareto give a model"),
        (("/nowhere/at/all", "--pareto"), 4, "There is no model"),
        (("--pareto", "--batch", "8"), 3, "does not support --batch"),
        (("--pareto", "--ablation"), 3, "does not support --ablation"),
        (("--pareto", "--submit", "x"), 3, "does not support --submit"),
        (("--pareto", "--engines", "stock"), 3, "does not support --engines"),
        (("emoji", "--prompts", "x.txt"), 3, "--prompts without --pareto"),
        (("emoji", "--settings", "3"), 3, "--settings without --pareto"),
        (("--pareto", "--prompts", "/nowhere.txt"), 2, "one prompt a line"),
        (("--pareto", "--settings", "0"), 2, "--settings"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_drawn(tmp_path, capsys, arguments, code, sentence):
    assert bench(*arguments, "--out", tmp_path) == code
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_the_list_says_which_engines_approximate(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert bench("--list") == 0
    shown = capsys.readouterr().out
    assert "approximates, scored against high" in shown
    assert "approximates, scored against balanced" in shown


def test_help_has_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert bench("--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd bench ./my-model --pareto --prompts prompts.txt --steps 30" in shown
    for option in ("--pareto", "--prompts", "--settings"):
        assert option in shown
