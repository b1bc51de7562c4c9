from __future__ import annotations

import json
import re
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_sd.bench.records import Comparison, Machine, Measurement, Record, WorkloadFacts
from rocm_sd.bench.report import other_cards, pictures
from rocm_sd.cli import main
from rocm_sd.verify import ladder
from rocm_sd.verify.ladder import Outcome

ROOT = Path(__file__).parents[2]


def rocm_sd(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["report", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def record(tmp_path) -> Path:
    rows = [Measurement(name, "1", "torch", 1, (ms,) * 5, 4) for name, ms in (("stock", 20.0), ("rocm-sd", 10.0))]
    machine = Machine("Test Card", "gfx1100", None, None, None, "Linux", {"torch": "2.13"})
    facts = WorkloadFacts("emoji", "emoji-sd", "emoji-sd", 128, 128, 4, "DDIM", 3.0, "float32")
    comparison = Comparison("rocm-sd", "stock", 1, 2.0, 1.9, 2.1, "faster")
    made = Record("engines", facts, machine, "rocm-sd bench emoji", "2026-01-02", tuple(rows), (comparison,))
    made.save(tmp_path / "emoji.json")
    return tmp_path / "emoji.json"


def test_help_has_examples(capsys):
    assert rocm_sd("--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd report results/emoji.json --draw --open" in shown
    assert "--ladder" in shown


def test_a_page_is_written_and_named(record, tmp_path, capsys):
    assert rocm_sd(record, "--out", tmp_path / "new" / "r.html") == 0
    html = (tmp_path / "new" / "r.html").read_text()
    assert "rocm-sd is 2.00 times as fast as stock, one picture." in html
    assert "r.html" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.html"]


def test_a_folder_is_searched_and_what_was_skipped_is_named(record, tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert rocm_sd("--folder", tmp_path, "--out", tmp_path / "r.html") == 0
    assert "other.json" in capsys.readouterr().err
    assert "Test Card" in (tmp_path / "r.html").read_text()


def test_with_nothing_named_the_newest_records_of_bench_are_read(record, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    made = Record.load(record)
    # As bench leaves them: the older one is renamed after its time, and other verbs write there, too.
    made.save(tmp_path / "out" / "emoji.json")
    replace(made, when="2025-01-02", command="rocm-sd bench emoji --cold").save(tmp_path / "out" / "emoji-2025.json")
    replace(made, workload=replace(made.workload, name="sd15-512")).save(tmp_path / "out" / "sd15-512.json")
    (tmp_path / "out" / "timing.json").write_text("{}")
    (tmp_path / "out" / "broken.json").write_text("{")
    assert rocm_sd() == 0
    printed = capsys.readouterr()
    assert "from out/emoji.json, out/sd15-512.json\n" in printed.out
    assert "skipped" not in printed.err
    assert "--cold" not in (tmp_path / "report.html").read_text()


def test_with_nothing_named_and_nothing_measured_the_folder_benchmarks_is_read(record, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert rocm_sd() == 1
    printed = capsys.readouterr().err
    assert "There is nothing to report on: there is no record in out or benchmarks." in printed
    assert "Type: rocm-sd bench emoji, then: rocm-sd report" in printed
    (tmp_path / "benchmarks").mkdir()
    assert rocm_sd() == 1
    assert not (tmp_path / "report.html").exists()
    record.rename(tmp_path / "benchmarks" / "emoji.json")
    assert rocm_sd() == 0
    assert (tmp_path / "report.html").is_file()


def test_a_ladder_and_a_picture_are_taken_in(record, tmp_path):
    outcome = Outcome(
        "geglu", "gfx1100", "compiled", "passed", "", figures={"vgprs": 96, "lds": 0, "waves_per_simd": 8}
    )
    (tmp_path / "ladder.json").write_text(json.dumps([outcome.to_dict()]))
    given = ("--ladder", tmp_path / "ladder.json", "--picture", ROOT / "docs/assets/demo.png")
    assert rocm_sd(record, *given, "--out", tmp_path / "r.html") == 0
    html = (tmp_path / "r.html").read_text()
    assert "gfx1100, Radeon RX 7900 XTX" in html
    assert 'src="data:image/png;base64,' in html


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["{folder}/none.json"], 1, "none.json is not a benchmark record: there is no such file."),
        (["{folder}/broken.json"], 1, "broken.json is not a benchmark record"),
        (["{record}", "--ladder", "{folder}/broken.json"], 1, "broken.json is not a result of the proof ladder"),
        (["{record}", "--picture", "{folder}/broken.json"], 1, "broken.json is not a picture: it is not a PNG file."),
        (["{record}", "--folder", "{folder}/none"], 2, "There is no such folder."),
        (["{record}", "--out", "{folder}"], 2, "It is a folder."),
        (["{record}", "--out", "{folder}/broken.json/r.html"], 2, "It cannot be written to"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_the_old_page_stays(record, tmp_path, capsys, arguments, code, sentence):
    (tmp_path / "broken.json").write_text("{")
    page = tmp_path / "report.html"
    page.write_text("the old page")
    filled = [text.format(folder=tmp_path, record=record) for text in arguments]
    if "--out" not in filled:
        filled += ["--out", str(page)]
    before = sorted(tmp_path.rglob("*"))
    assert rocm_sd(*filled) == code
    assert sentence in capsys.readouterr().err.replace("\n", " ")
    assert page.read_text() == "the old page"
    assert sorted(tmp_path.rglob("*")) == before


def test_pictures_are_drawn_by_stock_and_by_rocm_sd(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "PROMPTS", 1)
    monkeypatch.setattr(pictures, "STEPS", 1)
    monkeypatch.chdir(tmp_path)
    assert rocm_sd("--draw") == 0
    html = (tmp_path / "report.html").read_text()
    first, second = re.findall(r"<figcaption>((?:stock|rocm-sd): [^<]*)</figcaption>", html)
    assert first.startswith("stock: ")
    largest = re.search(r"largest difference (\d+) of 255", second)
    assert largest
    assert int(largest[1]) <= 4


def test_the_ladder_is_climbed_when_asked(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="AMD code is compiled by Triton")
    pytest.importorskip("tinygrad", reason="instructions are decoded by its tables")
    monkeypatch.setattr(other_cards, "KERNELS", ("geglu",))
    monkeypatch.setattr(ladder, "EMULATED", ("gfx1201", "gfx942"))
    monkeypatch.chdir(tmp_path)
    assert rocm_sd("--ladder", "run") == 0
    html = (tmp_path / "report.html").read_text()
    assert html.count("<td>1 2 3 4 ·</td>") == 2 * 2, "in the overview and in the table of each architecture"
    assert "rocm-sd verify geglu --arch gfx1201,gfx942 --json &gt; ladder.json" in html


def test_the_page_is_opened_when_asked(record, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert rocm_sd(record, "--out", tmp_path / "r.html") == 0
    assert opened == []
    assert rocm_sd(record, "--out", tmp_path / "r.html", "--open") == 0
    assert opened == [(tmp_path / "r.html").as_uri()]


def test_a_failure_on_the_ladder_is_shown_in_the_terminal_too(record, tmp_path, capsys):
    outcome = Outcome("geglu", "gfx1100", "compiled", "failed", "3 spills")
    (tmp_path / "ladder.json").write_text(json.dumps([outcome.to_dict()]))
    assert rocm_sd(record, "--ladder", tmp_path / "ladder.json", "--out", tmp_path / "r.html") == 0
    assert "failed on the ladder: geglu on gfx1100 (compiled)" in capsys.readouterr().err
    assert "geglu on gfx1100, compiled: 3 spills" in (tmp_path / "r.html").read_text()
