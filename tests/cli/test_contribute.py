"""rocm-sd contribute, as it is typed: it asks, it writes one file, and it goes on where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rocm_sd.bench import card_report, contributions
from rocm_sd.bench.card_report import FAILED, PASSED, Item
from rocm_sd.bench.records import Machine
from rocm_sd.cli import contribute, main
from rocm_sd.contribution import keeping
from rocm_sd.contribution.keeping import Found
from rocm_sd.contribution.running import PlannedPart, Unit, plain_summary

CARD = Machine("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24560, "amdgpu", "Linux 6.8", {"torch": "2.11.0+rocm7"})


def found(name: str, state: str = PASSED, reason: str = "") -> Found:
    return Found((Item(name, state, reason),))


def stopped() -> Found:
    raise KeyboardInterrupt


def part(name: str, *units: tuple) -> PlannedPart:
    made = tuple(Unit(each[0], each[1], each[2:], expected_s=0.1, place="here") for each in units)
    return PlannedPart(name, name, made, plain_summary)


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """planned(*parts): what the command will run; the machine is a card that is not there."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def plan(*parts: PlannedPart) -> None:
        monkeypatch.setattr(contribute, "_planned", lambda *_: (CARD, parts, "kernels"))

    plan(part("doctor", ("checks", found, "checks")), part("verify", ("geglu hip", found, "geglu hip", FAILED, "NaN")))
    return plan


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["contribute", *arguments])
    return int(ended.value.code or 0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rocm-sd-contribution-*.json"))


@pytest.fixture
def answers(monkeypatch):
    """A terminal on which somebody answers so."""

    def give(answer: bool) -> None:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(contribute.typer, "confirm", lambda *_, **__: answer)

    return give


def test_help_has_examples_and_options(capsys):
    assert rocm_sd("--help") == 0
    shown = capsys.readouterr().out
    for words in ("rocm-sd contribute --budget 20m", "--budget", "--out", "--comfyui", "--yes", "--fresh", "--device"):
        assert words in shown


def test_one_file_is_written_with_the_verdict_first_and_where_to_send_it_last(planned, tmp_path, capsys):
    assert rocm_sd("--yes", "--out", str(tmp_path)) == 0
    (file,) = files(tmp_path)
    assert contributions.validate(file) == ()
    report = card_report.load(file)
    assert (report.machine, report.command) == (CARD, "rocm-sd contribute --budget 10m")
    assert [part.state for part in report.parts] == [PASSED, FAILED]
    shown = capsys.readouterr().out
    places = [shown.index(words) for words in (
        "AMD Radeon RX 7900 XTX", "passed  doctor", "failed  verify", "geglu hip: NaN", "1 of 2 parts passed, 1 failed",
        "most valuable", "CC0", f"wrote {file}", "To send it", "Results from a card", "contributions/gfx1100/",
    )]  # fmt: skip
    assert places == sorted(places)
    # Nothing is left to be continued.
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_without_a_terminal_nothing_is_measured(planned, tmp_path, capsys):
    planned(part("doctor", ("never", stopped)))
    assert rocm_sd("--out", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "there is no terminal to ask on" in said
    assert "rocm-sd contribute --yes" in said
    assert files(tmp_path) == []


def test_an_emulated_card_is_refused(planned, monkeypatch, capsys):
    monkeypatch.setenv("ROCM_SD_EMULATE", "gfx1100")
    assert rocm_sd("--yes") == 2
    assert "unset ROCM_SD_EMULATE" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--budget", "soon"), ("--budget", "0"), ("--out", "/dev/null/x")])
def test_a_wrong_option_costs_no_time(planned, option, value, capsys):
    planned(part("doctor", ("never", stopped)))
    assert rocm_sd("--yes", option, value) == 2
    assert option in capsys.readouterr().err


def test_who_says_no_keeps_what_was_measured_and_is_asked_again(planned, answers, tmp_path, capsys):
    answers(False)
    assert rocm_sd("--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "Nothing was written" in shown
    assert "CC0" in shown
    assert files(tmp_path) == []
    planned(part("doctor", ("checks", stopped)), part("verify", ("geglu hip", stopped)))
    answers(True)
    assert rocm_sd("--out", str(tmp_path)) == 0
    assert "2 results are kept" in capsys.readouterr().out
    assert len(files(tmp_path)) == 1


def test_ctrl_c_keeps_what_is_done_and_fresh_forgets_it(planned, tmp_path, capsys):
    planned(part("doctor", ("one", found, "one"), ("two", stopped)))
    assert rocm_sd("--yes", "--out", str(tmp_path)) == 130
    assert "Interrupted. 1 result is kept; to go on, type the same command again" in capsys.readouterr().out
    planned(part("doctor", ("one", found, "one", FAILED, "now it fails"), ("two", found, "two")))
    assert rocm_sd("--yes", "--fresh", "--out", str(tmp_path)) == 0
    assert "now it fails" in files(tmp_path)[0].read_text()


def test_what_the_time_does_not_suffice_for_can_be_had_with_more(planned, tmp_path, capsys):
    long = Unit("long", found, ("long",), expected_s=100.0, place="here")
    planned(part("doctor", ("one", found, "one")), PlannedPart("bench", "bench", (long,), plain_summary))
    assert rocm_sd("--yes", "--budget", "10s", "--out", str(tmp_path)) == 0
    assert "type: rocm-sd contribute --budget 20s" in capsys.readouterr().out
    assert rocm_sd("--yes", "--budget", "10m", "--out", str(tmp_path)) == 0
    states = {tuple(part.state for part in card_report.load(file).parts) for file in files(tmp_path)}
    assert states == {(PASSED, "skipped"), (PASSED, PASSED)}


def test_a_second_one_says_so(planned, tmp_path, capsys):
    with keeping.keeping("another"):
        assert rocm_sd("--yes", "--out", str(tmp_path)) == 1
    assert "Another rocm-sd contribute is running" in capsys.readouterr().err


def test_a_text_of_a_driver_is_no_markup(planned, tmp_path, capsys):
    planned(part("doctor", ("one", found, "one", FAILED, "[bold]x[/] [/nothing] \x1b[31mred")))
    assert rocm_sd("--yes", "--out", str(tmp_path)) == 0
    assert "[bold]x[/] [/nothing]" in capsys.readouterr().out


SCRIPT = """
    import sys, time
    from pathlib import Path
    sys.path[:0] = {paths!r}
    import test_contribute as cases
    import units_to_try as units
    from rocm_sd.cli import contribute, main
    from rocm_sd.contribution.running import PlannedPart, Unit, plain_summary

    log, slow = sys.argv[1], sys.argv[2] == "slow"
    def units_of(part):
        names = [f"{{part}} {{number}}" for number in range(3)]
        made = [Unit(name, units.fine, (name, log), expected_s=1.0) for name in names]
        if part == "verify":
            name = "verify hang"
            made.insert(1, Unit(name, units.hang) if slow else Unit(name, units.fine, (name, log)))
        return tuple(made)
    parts = tuple(PlannedPart(name, name, units_of(name), plain_summary) for name in ("doctor", "verify", "bench"))
    contribute._planned = lambda *_: (cases.CARD, parts, "kernels")
    main.run(["contribute", "--yes", "--out", sys.argv[3]])
"""


def test_killed_half_way_it_continues_with_what_is_done(tmp_path):
    """SIGKILL: no handler runs, nothing is cleaned up."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "contribution")]
    script = tmp_path / "contributing.py"
    script.write_text(textwrap.dedent(SCRIPT.format(paths=paths)))
    log, out = tmp_path / "log", tmp_path / "out"
    environment = {**os.environ, "ROCM_SD_CACHE": str(tmp_path / "cache")}

    def command(how: str) -> list[str]:
        return [sys.executable, str(script), str(log), how, str(out)]

    running = subprocess.Popen(command("slow"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    end = time.monotonic() + 240
    hanging = '"verify hang", "tries": 1'
    while time.monotonic() < end and not any(
        hanging in file.read_text() for file in (tmp_path / "cache").rglob("state.json")
    ):
        assert running.poll() is None, running.stdout.read().decode()
        time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    before = log.read_text().splitlines()
    assert before == ["doctor 0", "doctor 1", "doctor 2", "verify 0"]
    assert files(out) == []
    ended = subprocess.run(command("quick"), env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 results are kept" in ended.stdout
    rest = log.read_text().splitlines()[len(before) :]
    assert rest == ["verify hang", "verify 1", "verify 2", "bench 0", "bench 1", "bench 2"]
    (file,) = files(out)
    assert contributions.validate(file) == ()
    assert [len(each.items) for each in card_report.load(file).parts] == [3, 4, 3]
