"""Contributions: nothing personal goes in, nothing changed or impossible is listed."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path

import pytest

import contributions_page
from rocm_sd.bench import gate, lossy, publishing, submission
from rocm_sd.bench.records import RULES, Comparison, Machine, Measurement, Record, UnreadableRecord, WorkloadFacts
from rocm_sd.bench.verdict import EXACT, Quality

ROOT = Path(__file__).parents[2]


def measured(engine: str, ms: float, **more) -> Measurement:
    turns = tuple(ms * (1 + wobble) for wobble in (0.0, 0.01, -0.01, 0.02, 0.0))
    return Measurement(
        engine, "1.0", "torch", 1, turns, 50, **{"error": 1.4e-3, "stock_error": 2.2e-3, "floor_ms": 90.0, **more}
    )


def record(**changes) -> Record:
    made = Record(
        kind="engines",
        workload=WorkloadFacts(
            "sd15-512", "sd15", "random", 512, 512, 50, "DDIMScheduler", 7.5, "float16", flops=8.3e13
        ),
        machine=Machine("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24560, "6.12", "Linux 6.8", {"torch": "2.11.0+rocm7"}),
        command="rocm-sd bench sd15-512 --out results",
        when="2026-11-15T12:00:00+00:00",
        measurements=(measured("stock", 4000.0), measured("rocm-sd", 1600.0)),
        comparisons=(Comparison("rocm-sd", "stock", 1, 2.5, 2.4, 2.6, "faster"),),
    )
    return replace(made, **changes)


def test_a_record_comes_back_as_it_was(tmp_path):
    file = submission.write(record(), tmp_path)
    assert file.name == submission.file_name(record())
    assert file.name.startswith("gfx1100-sd15-512-")
    assert submission.validate(file) == ()
    assert submission.load(file) == record()
    values = json.loads(file.read_text())
    assert values["statement"] == submission.STATEMENT
    assert file.name[-13:-5] == values["sha256"][:8]


def test_the_same_record_has_the_same_hash_and_another_one_another():
    assert submission.file_name(record()) == submission.file_name(record())
    assert submission.file_name(record()) != submission.file_name(record(notes=("at night",)))


def test_paths_are_cut_down_to_their_last_part(tmp_path):
    command = "rocm-sd bench sd15-512 --model /home/ann/models/dream --out=/data/ann/results C:\\Users\\ann\\x ~/y/z"
    weights = replace(record().workload, weights="/mnt/disk/ann/my-model")
    file = submission.write(
        record(command=command, workload=weights, notes=("3 images/s, see https://a.b/c",)), tmp_path
    )
    back = submission.load(file)
    assert back.command == "rocm-sd bench sd15-512 --model dream --out=results x z"
    assert back.workload.weights == "my-model"
    assert back.notes == ("3 images/s, see https://a.b/c",)
    assert "ann" not in file.read_text().replace("channels", "")


def test_names_of_people_and_hosts_keep_a_record_back(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing.getpass, "getuser", lambda: "annabel")
    monkeypatch.setattr(publishing.socket, "gethostname", lambda: "bench-box.example.org")
    for note, where in (
        ("write to ann@example.org", "notes[0] has an e-mail address"),
        ("ran by annabel", "notes[0] has the user's name"),
        ("on bench-box, at night", "notes[0] has the host's short name"),
        ("file:/home/ann", "notes[0] names a home folder"),
    ):
        with pytest.raises(submission.PersonalData) as error:
            submission.write(record(notes=(note,)), tmp_path)
        assert where in str(error.value)
    with pytest.raises(submission.PersonalData, match="extra"):
        submission.write(record(extra={"cache": {"annabel": 1}}), tmp_path)
    assert list(tmp_path.iterdir()) == []
    # A name that is part of another word, or nobody's, is no name.
    submission.write(record(notes=("annabelle's law",)), tmp_path)
    monkeypatch.setattr(publishing.getpass, "getuser", lambda: "amd")
    submission.write(record(notes=("an amd card",)), tmp_path)


def test_a_changed_file_is_found_out(tmp_path):
    file = submission.write(record(), tmp_path)
    values = json.loads(file.read_text())
    values["record"]["measurements"][1]["ms"][0] = 800.0
    file.write_text(json.dumps(values))
    assert "changed after it was written" in submission.validate(file)[0]


SCRIPT = "<script>alert(1)</script>"


def signed(path: Path, change) -> Path:
    """A file that somebody changed and hashed again."""
    file = submission.write(record(), path)
    values = json.loads(file.read_text())
    change(values)
    values["sha256"] = publishing.digest(values)
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v["record"].pop("machine"), "record has no machine"),
        (lambda v: v["record"].update(owner="ann"), "record.owner is not known"),
        (lambda v: v["record"]["workload"].update(steps="50"), "record.workload.steps should be integer"),
        (lambda v: v["record"]["workload"].update(steps=True), "record.workload.steps should be integer"),
        (lambda v: v["record"]["measurements"][0]["ms"].append(-1), "ms[5] is not above 0"),
        (lambda v: v["record"]["machine"].update(arch="RX 7900"), "record.machine.arch is 'RX 7900'"),
        (lambda v: v["record"].update(measurements=[]), "fewer than 1"),
        (lambda v: v.update(statement="mine"), "statement should be one of"),
        (lambda v: v["record"].update(notes=["/home/ann/x"]), "names a home folder"),
        (lambda v: v["record"]["comparisons"][0].update(verdict="great"), "verdict should be one of"),
        (lambda v: v["record"]["machine"].update(device=SCRIPT), "record.machine.device is '<script>"),
        (lambda v: v["record"]["workload"].update(name=f"x {SCRIPT}"), "record.workload.name is 'x <script>"),
        (lambda v: v["record"]["machine"]["versions"].update({SCRIPT: "1"}), "which is not of the form"),
        (lambda v: v["record"]["machine"]["versions"].update(torch=SCRIPT), "machine.versions.torch is '<script>"),
        (lambda v: v["record"]["measurements"][0].update(engine="[x](javascript:y)"), "measurements[0].engine is '[x]"),
        (lambda v: v["record"]["machine"].update(arch="gfx1100\n"), "record.machine.arch is 'gfx1100"),
        (lambda v: v["record"].update(notes=["\x1b[2J"]), "record.notes[0] has characters that cannot be printed"),
        (lambda v: v["record"].update(extra={"a": ["\u202e"]}), "record.extra.a[0] has characters that cannot"),
        (lambda v: v["record"].update(command="x" * 20_000), "record.command is longer than 10000 characters"),
        (lambda v: v["record"].update(when="2099-01-01T00:00:00+00:00"), "measured in the future"),
        (lambda v: v["record"].update(when="2026-02-30"), "there is no day 2026-02-30"),
        (lambda v: v["record"]["workload"].update(flops=-1.0), "workload.flops is not above 0"),
        (lambda v: v["record"]["workload"].update(flops=float("nan")), "workload.flops should be number"),
        (lambda v: v["record"]["workload"].update(flops=float("inf")), "workload.flops should be number"),
        *(
            (
                lambda v, name=name, bad=bad: v["record"]["measurements"][1].update({name: bad}),
                f"measurements[1].{name}",
            )
            for name in ("error", "stock_error", "floor_ms")
            for bad in (float("nan"), float("inf"), float("-inf"), -1e-3, 1e300)
        ),
    ],
)
def test_a_form_that_is_not_the_schema_s_is_explained_in_words(tmp_path, change, words):
    problems = submission.validate(signed(tmp_path, change))
    assert any(words in problem for problem in problems), problems


def test_more_is_asked_of_what_is_published_than_of_what_is_read(tmp_path):
    """What the first check lets through and the second does not is a traceback, in `rocm-sd bench --submit` too."""
    for name, asked in submission.PUBLIC_RULES.items():
        least = RULES.get(name, {})
        assert all(word in asked or (word == "minimum" and "exclusiveMinimum" in asked) for word in least), name
    beyond = replace(record(), workload=replace(record().workload, height=10**13))
    with pytest.raises(submission.Unpublishable, match=r"workload\.height is above"):
        submission.write(beyond, tmp_path)


def test_what_is_no_contribution_is_no_contribution(tmp_path):
    file = tmp_path / "x.json"
    assert submission.validate(file) == ("there is no such file",)
    file.write_text("{")
    assert "cannot be read" in submission.validate(file)[0]
    record().save(file)
    assert submission.validate(file) == (f"its format is not {submission.FORMAT}",)
    with pytest.raises(UnreadableRecord):
        submission.load(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complete": False}, "not finished"),
        ({"machine": replace(record().machine, arch="gfx9999")}, "gfx9999 is not known"),
        ({"workload": replace(record().workload, name="sd15-512-tiny")}, "a trial"),
        ({"measurements": (measured("stock", 4000.0), measured("rocm-sd", 80.0))}, "own floor"),
        ({"measurements": (measured("stock", 4000.0), measured("rocm-sd", 91.0))}, "the arithmetic alone takes"),
        ({"measurements": (measured("stock", 4000.0), measured("rocm-sd", 1600.0, error=9e-3))}, "more than 1.5 times"),
        (
            {"measurements": (measured("stock", 4000.0), measured("rocm-sd", 1600.0, error=None))},
            "compared with nothing",
        ),
        ({"measurements": (measured("stock", 4000.0), replace(measured("rocm-sd", 1600.0), ms=(1600.0,)))}, "1 times"),
        (
            {"measurements": (measured("stock", 4000.0), replace(measured("rocm-sd", 1600.0), ms=()))},
            "does not say why",
        ),
        ({"measurements": (measured("stock", 4000.0),) * 2}, "there twice"),
        ({"comparisons": ()}, "not compared"),
        ({"comparisons": (Comparison("rocm-sd", "stock", 1, 2.5, 2.6, 2.4, "faster"),)}, "does not hold the ratio"),
        ({"comparisons": (Comparison("rocm-sd", "stock", 1, 2.5, 0.9, 2.6, "faster"),)}, "the interval contains 1"),
        ({"comparisons": (Comparison("rocm-sd", "stock", 1, 2.5, 2.4, 2.6, "slower"),)}, "called slower"),
        ({"comparisons": (Comparison("rocm-sd", "stock", 1, 9.0, 8.9, 9.1, "faster"),)}, "the timings say 2.5"),
        ({"comparisons": (Comparison("rocm-sd", "compile", 1, 2.5, 2.4, 2.6, "faster"),)}, "was not timed"),
    ],
)
def test_figures_that_cannot_be_are_neither_written_nor_listed(tmp_path, changes, words):
    with pytest.raises(submission.Unpublishable) as error:
        submission.write(record(**changes), tmp_path)
    assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_was_skipped_with_a_reason_may_be():
    left = replace(measured("compile", 1.0), ms=(), error=None, left_out="it does not compile here")
    assert submission.implausible(record(measurements=(*record().measurements, left))) == ()


def test_the_gate_is_that_of_the_benchmark():
    assert submission.GATE == gate.LATENTS_TIMES
    assert submission.LOSSY_GATE == lossy.TIMES


EMPTY_PAGE = "# Before\n<!-- contributions -->\n<!-- end of contributions -->\nafter\n"


def test_the_page_lists_valid_contributions_and_names_the_others(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / contributions_page.PAGE).write_text(EMPTY_PAGE)
    assert contributions_page.main([], tmp_path) == 0
    page = (tmp_path / contributions_page.PAGE).read_text()
    assert "There is no contribution yet" in page
    assert page.startswith("# Before\n")
    assert page.endswith("after\n")
    file = submission.write(record(), tmp_path / "contributions/gfx1100")
    assert contributions_page.main(["--check"], tmp_path) == 1
    assert "out of date" in capsys.readouterr().out
    assert contributions_page.main([], tmp_path) == 0
    assert contributions_page.main(["--check"], tmp_path) == 0
    page = (tmp_path / contributions_page.PAGE).read_text()
    assert "### sd15-512" in page
    assert (
        "| AMD Radeon RX 7900 XTX (gfx1100) | stock | 1 | 4000 |  | exact | torch 2.11.0+rocm7 | 2026-11-15 |" in page
    )
    assert "|  | rocm-sd | 1 | 1600 | 2.50 (2.40 to 2.60) |" in page
    assert f"`contributions/gfx1100/{file.name}`" in page
    moved = tmp_path / "contributions/gfx942" / file.name
    moved.parent.mkdir()
    file.rename(moved)
    assert contributions_page.main([], tmp_path) == 1
    assert "belongs into contributions/gfx1100/" in capsys.readouterr().out
    assert "There is no contribution yet" in (tmp_path / contributions_page.PAGE).read_text()


def test_the_page_escapes_even_what_no_check_lets_through(tmp_path, monkeypatch):
    made = record(
        machine=replace(record().machine, device=f"a|b {SCRIPT}", versions={"torch": "[x](javascript:y)"}),
        workload=replace(record().workload, name="`x` {: onclick=y }"),
    )
    file = tmp_path / "contributions/gfx1100/x.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    monkeypatch.setattr(submission, "validate", lambda _path: ())
    monkeypatch.setattr(submission, "load", lambda _path: made)
    page = contributions_page.listed(tmp_path).removeprefix(contributions_page._HEAD)
    assert not set("<>[]{}`'\"*") & set(page.replace("`contributions/gfx1100/x.json`", ""))
    # A reader sees what was written.
    shown = html.unescape(page)
    for text in (f"a|b {SCRIPT}", "[x](javascript:y)", "## `x` {: onclick=y }"):
        assert text in shown
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize("name", ["AMD Radeon(TM) 780M", "Intel(R) Xeon(R) CPU @ 2.40GHz", "AMD Radeon™ Pro W7900"])
def test_names_that_cards_have_are_taken(tmp_path, name):
    file = submission.write(record(machine=replace(record().machine, device=name)), tmp_path)
    assert submission.validate(file) == ()


def test_the_repository_s_own_page_and_schema_are_up_to_date():
    assert contributions_page.problems() == {}
    assert list(contributions_page.stale()) == [], "type: python tools/contributions_page.py"


NEAR = Quality("high", "one step of 2", (41.0, 43.0, 45.0), (0.99, 0.98, 0.97), (0.0, -0.01, 0.01))


def approximated(quality: Quality, engine: str = "rocm-sd-high", **more) -> Record:
    """A record in which one engine leaves out three quarters of the work: faster than its counted arithmetic allows."""
    ours = measured(engine, 60.0, floor_ms=None, quality=quality, **more)
    return record(
        measurements=(measured("stock", 240.0, floor_ms=None), ours),
        comparisons=(Comparison(engine, "stock", 1, 4.0, 3.9, 4.1, "faster"),),
        workload=replace(record().workload, flops=None),
    )


def test_an_approximation_is_published_with_its_scores(tmp_path):
    file = submission.write(approximated(NEAR), tmp_path / "contributions/gfx1100")
    assert submission.validate(file) == ()
    assert submission.load(file).measurements[1].quality == NEAR
    (tmp_path / "docs/assets").mkdir(parents=True)
    (tmp_path / contributions_page.PAGE).write_text(EMPTY_PAGE)
    assert contributions_page.main([], tmp_path) == 0
    page = html.unescape((tmp_path / contributions_page.PAGE).read_text())
    assert "within high: PSNR 43.0 dB, SSIM 0.980, prompt match +0.0 (-1.0 to +1.0) points, 3 prompts" in page


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (approximated(EXACT), "is an approximation, and does not say how far its pictures are"),
        (approximated(replace(NEAR, psnr_db=(), ssim=())), "its pictures were not compared with the exact ones"),
        (approximated(replace(NEAR, psnr_db=(20.0,) * 3)), "claims the quality high"),
        (approximated(replace(NEAR, name="balanced")), "claims the quality balanced, and is high"),
        (approximated(replace(NEAR, match=(-0.5, -0.6, -0.4))), "claims the quality high"),
        (approximated(NEAR, error=5e-3), "more than 2.0 times stock's"),
        (replace(approximated(NEAR), kind="pareto"), "survey of settings"),
    ],
)
def test_an_approximation_without_scores_or_outside_its_claim_is_refused(changed, sentence, tmp_path):
    with pytest.raises(submission.Unpublishable) as refused:
        submission.write(changed, tmp_path)
    assert sentence in str(refused.value)


def test_an_approximation_that_has_no_definition_is_judged_by_its_pictures(tmp_path):
    without = approximated(NEAR, error=None, stock_error=None)
    assert submission.validate(submission.write(without, tmp_path)) == ()
    exact = approximated(EXACT, engine="theirs", error=None, stock_error=None)
    assert "was compared with nothing" in "; ".join(submission.implausible(exact))
