"""What `rocm-sd contribute` writes: nothing personal goes in, nothing changed or impossible is listed."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace

import pytest

import contributions_page
from rocm_sd.bench import card_report, contributions, publishing, report, submission
from rocm_sd.bench.card_report import FAILED, PASSED, SKIPPED, CardReport, Item, Part
from rocm_sd.bench.records import Comparison, Machine, Measurement, Record, UnreadableRecord, WorkloadFacts
from rocm_sd.cli import main

CARD = Machine("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24560, "amdgpu", "Linux 6.8", {"torch": "2.11.0+rocm7"})


def measured(engine: str, ms: float) -> Measurement:
    turns = tuple(ms * (1 + wobble) for wobble in (0.0, 0.01, -0.01, 0.02))
    return Measurement(engine, "1.0", "torch", 1, turns, 50, error=1.4e-3, stock_error=2.2e-3, floor_ms=90.0)


RECORD = Record(
    "engines",
    WorkloadFacts("sd15-512", "sd15", "random", 512, 512, 50, "DDIMScheduler", 7.5, "float16", flops=8.3e13),
    CARD, "rocm-sd bench sd15-512", "2026-11-15T12:00:00+00:00",
    (measured("stock", 4000.0), measured("rocm-sd", 1600.0)),
    (Comparison("rocm-sd", "stock", 1, 2.5, 2.4, 2.6, "faster"),),
)  # fmt: skip


VALUES = json.loads(json.dumps(RECORD.to_dict()))


def a_part(name: str, *items: Item, **more) -> Part:
    return Part(name, card_report.state_of(items), "in one sentence", items, 3.5, **more)


REPORT = CardReport(
    CARD, "rocm-sd contribute --budget 10m", "2026-11-15T12:00:00+00:00", 480.0,
    (
        a_part("doctor", Item("torch_build", PASSED, "ok", 0.1, {"status": "ok"}), data={"facts": {"python": "3.11"}}),
        a_part("self-tests", Item("attention hip", FAILED, "crashed by signal 11"), Item("geglu triton", PASSED)),
        a_part("bench", Item("sd15-512", PASSED, "2.50 times", 9.0, {"ratio": 2.5}), records=(VALUES,)),
        a_part("comfyui", Item("comfyui", SKIPPED, "none was found")),
    ),
)  # fmt: skip


def written(folder, made: CardReport = REPORT):
    return card_report.write(card_report.publishable(made), folder)


def with_item(item: Item, **more) -> CardReport:
    return replace(REPORT, parts=(a_part("verify", item, **more),))


def test_it_comes_back_as_it_was(tmp_path):
    file = written(tmp_path)
    assert re.fullmatch(r"rocm-sd-contribution-gfx1100-2026-11-15-[0-9a-f]{8}\.json", file.name)
    assert contributions.validate(file) == card_report.validate(file) == ()
    assert card_report.load(file) == REPORT
    assert contributions.load(file) == (REPORT, (RECORD,))
    assert contributions.arch_of(file) == "gfx1100"
    values = json.loads(file.read_text())
    assert values["statement"] == submission.STATEMENT
    assert file.name[-13:-5] == values["sha256"][:8]
    assert [part["state"] for part in values["report"]["parts"]] == [PASSED, FAILED, PASSED, SKIPPED]


def test_nothing_private_is_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing.getpass, "getuser", lambda: "annabel")
    monkeypatch.setattr(publishing.socket, "gethostname", lambda: "bench-box.example.org")
    texts = (
        "OSError: /home/annabel/.cache/x: no space", "in C:\\Users\\Annabel\\torch\\a.py", "by annabel on bench-box",
        "bench-box.example.org:22", "write to ann@example.org", "GPU-1a2b3c4d-0000-1111-2222-333344445555",
        "~/models/dream", "file:/home/annabel", "/root/.triton", 'File "/data/annabel/rocm_sd/ops.py", line 3',
        "a\x1b[31mred\u202e", "Annabel's", "/mnt/c/Users/Ann Other/ComfyUI/nodes.py", "in /home/another",
        "GPU-4b2c1a9f5d0e3a77",
        "'/mnt/disk/Private Pictures/more of them/dream'", "/mnt/disk/Private Pictures/cat.py", "//home//another/b",
        "proxy http://proxy.corp.test:3128 refused", "http://ann:word@proxy.corp.test/x", "from 192.168.7.21:22",
        "HTTPSConnectionPool(host='proxy.corp.test', port=443)", "C:\\\\Users\\\\Ann Other\\\\b.py",
    )  # fmt: skip
    lossy = replace(RECORD, notes=texts, measurements=(
        replace(RECORD.measurements[0], notes=texts), Measurement("rocm-sd", "1", "x", 1, (), 50, left_out=texts[0]),
    ), comparisons=())  # fmt: skip
    monkeypatch.setenv("SUDO_USER", "bertram")
    texts += ("made by bertram",)
    made = replace(REPORT, parts=(
        a_part("verify", *(Item(f"item {n}", FAILED, text, figures={"seen": text}) for n, text in enumerate(texts)),
               data={"tracebacks": {"x": list(texts)}, "probes": {"one": {"error": "; ".join(texts)}}}),
        replace(a_part("bench", Item("x", FAILED, "; ".join(texts)), records=(lossy.to_dict(),)), summary=texts[0]),
    ))  # fmt: skip
    file = written(tmp_path, made)
    assert card_report.validate(file) == ()
    text = file.read_text().lower()
    for private in ("annabel", "ann@", "bench-box", "example.org", "/home", "/data", "users", "~/", "/root", "1a2b3c4d",
                    "\x1b", "\\u202e", "another", "other/", "other\\", "4b2c1a9f", "private", "more of", "corp",
                    "192.168", "bertram"):  # fmt: skip
        assert private not in text, private
    # What tells something to who mends it stays.
    for useful in ("ops.py", "no space", "oserror", "dream", ".triton", "nodes.py", "cat.py", "refused", "port=443"):
        assert useful in text


def test_a_user_whose_name_is_a_word_of_the_file_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing.getpass, "getuser", lambda: "stock")
    file = written(tmp_path)
    assert card_report.validate(file) == ()
    assert contributions.load(file)[1] == (RECORD,)


def test_a_card_that_nobody_knows_may_be_sent(tmp_path):
    new = replace(CARD, arch="gfx1399", device="AMD Radeon of next year")
    values = replace(RECORD, machine=new).to_dict()
    bench = a_part("bench", Item("sd15-512", PASSED, "x"), records=(values,))
    assert card_report.validate(written(tmp_path, replace(REPORT, machine=new, parts=(bench,)))) == ()


def signed(values, folder):
    """Hashed again and under its right name, as somebody would who means it."""
    body = {key: value for key, value in values.items() if key != "sha256"}
    file = folder / card_report.file_name(body)
    file.write_text(json.dumps({**body, "sha256": publishing.digest(body)}))
    return file


def changed(values, *path, to):
    for name in path[:-1]:
        values = values[name]
    values[path[-1]] = to


@pytest.mark.parametrize(
    ("path", "to", "sentence"),
    [
        (("parts", 0, "state"), FAILED, "doctor is called failed, and its items are not"),
        (("parts", 1, "items", 0, "state"), "wonderful", "should be one of"),
        (("parts", 1, "items", 0, "reason"), " ", "attention hip is failed, and does not say why"),
        (("parts", 1, "items", 0, "reason"), "x" * 3000, "longer than 2000"),
        (("parts", 1, "items", 0, "reason"), "\x1b[31m", "cannot be printed"),
        (("parts", 1, "items", 0, "reason"), "in /home/ann/x", "names a home folder"),
        (("parts", 1, "items", 0, "name"), "<script>alert(1)</script>", "not of the form"),
        (("parts", 1, "items", 0, "figures"), {"A B": 1}, "not of the form"),
        (("parts", 1, "items", 0, "figures"), {"x": [1]}, "should be number or string"),
        (("parts", 1, "items", 0, "seconds"), -1, "is below 0"),
        (("parts", 0, "name"), "comfyui", "the part comfyui is there 2 times"),
        (("parts", 0, "data"), {"mail": "ann@example.org"}, "has an e-mail address"),
        (("parts", 2, "records", 0, "machine", "arch"), "gfx942", "it was measured on gfx942, and not on gfx1100"),
        (("parts", 2, "records", 0, "measurements", 1, "ms"), [1.0] * 4, "the arithmetic alone takes"),
        (("parts", 2, "records", 0, "complete"), False, "the run was not finished"),
        (("parts", 2, "records", 0), {"format": "x"}, "should be one of"),
        (("parts",), [], "nothing was run"),
        (("when",), "2099-01-01T00:00:00+00:00", "in the future"),
        (("when",), "2026-13-45", "there is no day"),
        (("machine", "device"), "a|b", "not of the form"),
        (("extra",), 1, "is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, path, to, sentence):
    values = json.loads(written(tmp_path).read_text())
    changed(values["report"], *path, to=to)
    assert sentence in "; ".join(card_report.validate(signed(values, tmp_path)))


def test_what_was_changed_renamed_or_is_no_such_file_is_refused(tmp_path):
    file = written(tmp_path)
    values = json.loads(file.read_text())
    changed(values["report"], "seconds", to=1.0)
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(values))
    assert "changed after it was written" in card_report.validate(edited)[0]
    renamed = tmp_path / "mine.json"
    renamed.write_bytes(file.read_bytes())
    assert card_report.validate(renamed) == (f"its name should be {file.name}",)
    edited.write_text(file.read_text().replace("480.0", "NaN"))
    assert "NaN" in card_report.validate(edited)[0]
    edited.write_text("{}")
    assert "format" in card_report.validate(edited)[0]
    assert card_report.validate(tmp_path / "none.json") == ("there is no such file",)
    edited.write_text(json.dumps({"format": card_report.FORMAT, "report": {"machine": 1}}))
    with pytest.raises(UnreadableRecord):
        card_report.load(edited)


def test_what_would_be_refused_is_not_written():
    with pytest.raises(submission.Unpublishable, match="does not say why"):
        card_report.publishable(with_item(Item("x", FAILED)))


def test_the_page_lists_the_card_and_its_records(tmp_path, capsys):
    file = written(tmp_path / "contributions/gfx1100")
    listed = tmp_path / contributions_page.PAGE
    listed.parent.mkdir()
    shutil.copy(contributions_page.ROOT / contributions_page.PAGE, listed)
    assert contributions_page.main([], tmp_path) == 0
    page = html.unescape(listed.read_text())
    assert "## Cards" in page
    row = next(line for line in page.splitlines() if "self-tests (" in line)
    for words in ("AMD Radeon RX 7900 XTX (gfx1100)", "doctor, bench", "self-tests (1 of 2)", "comfyui", file.name):
        assert words in row
    assert "## sd15-512" in page
    assert "2.50 (2.40 to 2.60)" in page
    moved = tmp_path / "contributions/gfx942" / file.name
    moved.parent.mkdir()
    file.rename(moved)
    assert contributions_page.main([], tmp_path) == 1
    assert "belongs into contributions/gfx1100/" in capsys.readouterr().out


def test_a_report_shows_its_parts_and_its_records(tmp_path, capsys):
    file = written(tmp_path)
    inputs = report.read([file])
    assert (inputs.contributed, inputs.records) == ((REPORT,), (RECORD,))
    with pytest.raises(SystemExit) as ended:
        main.run(["report", str(file), "--out", str(tmp_path / "r.html")])
    assert not ended.value.code
    shown = html.unescape((tmp_path / "r.html").read_text())
    for words in ("A card's own report", "crashed by signal 11", "2 of 4 parts passed, 1 failed, 1 skipped",
                  "rocm-sd contribute --budget 10m", "none was found", "2.50"):  # fmt: skip
        assert words in shown


def test_what_was_sent_stands_first_alone_and_last_beside_runs_of_the_project(tmp_path):
    file = written(tmp_path)
    alone = report.page(report.read([file]))
    assert alone.sections[0].id == "contributed"
    assert alone.subtitle.startswith("Contributed from")
    (tmp_path / "own.json").write_text(json.dumps(RECORD.to_dict()))
    beside = report.page(report.read([file, tmp_path / "own.json"]))
    names = [section.id for section in beside.sections]
    assert names[0] == "speed"
    assert names.index("contributed") > names.index("memory")
    assert not beside.subtitle.startswith("Contributed from")


def test_a_part_that_passed_is_not_called_failed_for_what_it_skipped(tmp_path):
    titles = [figure.title for figure in report.page(report.read([written(tmp_path)])).sections[0].figures]
    failed = [part.name for part in REPORT.parts if part.state == "failed"]
    assert [title for title in titles if title.endswith("what failed or was skipped")] == [
        f"{name}: what failed or was skipped" for name in failed
    ]
    skipped = [part.name for part in REPORT.parts if part.state == "skipped"]
    assert {f"{name}: what was skipped" for name in skipped} <= set(titles)


def test_the_first_figures_are_a_card_s_and_a_processor_s_come_last(tmp_path):
    processor = replace(RECORD, machine=replace(RECORD.machine, device="AMD EPYC", arch="cpu"))
    for name, record in (("a.json", processor), ("b.json", RECORD)):
        (tmp_path / name).write_text(json.dumps(record.to_dict()))
    found = report.page(report.read([tmp_path / "a.json", tmp_path / "b.json"])).headlines
    on = ["AMD EPYC" in each.detail for each in found]
    assert on == sorted(on)
    assert set(on) == {True, False}
