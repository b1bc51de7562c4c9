from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rocm_sd.cli.doctor import DoctorCommand, doctor
from rocm_sd.doctor import reading, treatment
from rocm_sd.doctor.recording import load
from rocm_sd.errors import InvalidOption

MACHINES = Path(__file__).parents[1] / "doctor" / "machines"
SICK = str(MACHINES / "rx9070xt-stale-override")

app = typer.Typer(rich_markup_mode="rich")
app.command(cls=DoctorCommand)(doctor)


def run(*arguments, **options):
    ended = CliRunner().invoke(app, list(arguments), **options)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setattr(treatment, "env_file", lambda: tmp_path / "env.sh")
    return tmp_path / "env.sh"


@pytest.fixture
def sick(monkeypatch, file):
    """The machine at hand, as if it were the recorded one; what is asked for needs no probe."""
    monkeypatch.setattr(reading, "gather", lambda: load(Path(SICK)))
    return file


def test_help_has_examples():
    shown = run("--help").output
    assert "rocm-sd doctor --fix -- python draw.py" in shown
    for option in ("--fix", "--undo", "--yes", "--json", "--machine", "--record", "--quick"):
        assert option in shown


def test_a_recorded_machine_is_reported_with_its_fix_and_ends_with_one():
    ended = run("--machine", SICK, "gfx_override", "torch_build")
    assert ended.exit_code == 1
    assert ended.stdout.startswith("1 problem: gfx_override.\n")
    assert ended.output.index("gfx_override: ") < ended.output.index("torch_build: ")
    ended = run("--machine", str(MACHINES / "rx6700xt-no-override"), "torch_build")
    # A command must be copied whole, so it is not wrapped.
    assert 'https://stable.repo.amd.com/rocm/whl-next "torch[device-gfx1031]==2.13.0+rocm10.0.0"\n' in ended.output


def test_no_problem_ends_with_zero_and_says_what_does_not_arise():
    ended = run("--machine", SICK, "two_tritons", "apu_memory")
    assert ended.exit_code == 0
    assert ended.stdout.startswith("No problem was found.\n")
    assert "not here  apu_memory: No GPU that shares" in ended.output
    alone = run("--machine", SICK, "apu_memory").stdout
    assert alone.startswith("No problem was found, and no check could be made.\n")
    assert "No GPU that shares" in alone


def test_without_names_only_problems_are_in_full_and_the_rest_is_a_line_each(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--machine", SICK).output
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert words.startswith("2 problems: gfx_override, kernels_present.")
    assert "12 checks are fine: allocator_settings, aotriton_settings, bf16, " in words
    assert "No setting of torch's allocator is given" not in words
    assert "unset HSA_OVERRIDE_GFX_VERSION" in shown
    # The reason is told once, though ten have it.
    assert "sdpa_numerics, triton_works (its process was ended by SIGABRT)." in words
    assert words.count("11 checks are unknown: ") == 1
    assert "2 checks do not arise here: apu_memory, c_compiler." in words
    assert words.endswith("To see every check in full, type: rocm-sd doctor --all")
    # A recorded machine cannot be changed.
    assert "--fix" not in words
    assert "https://github.com" not in words
    assert "\x1b" not in shown


def test_all_shows_every_check_in_full(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option in ("--all", "--verbose"):
        words = " ".join(run("--machine", SICK, option).output.split())
        assert "ok allocator_settings: No setting of torch's allocator is given." in words
        assert "unknown bf16_speed: It could not be run: neither dtype ran: its process was ended by SIGABRT." in words
        assert "not here apu_memory: No GPU that shares" in words
        assert "https://github.com/ROCm/rocBLAS/issues/1339" in words
        assert "--all" not in words


def test_what_is_safe_is_offered_where_it_can_be_applied(sick):
    assert "To apply what is safe, type: rocm-sd doctor --fix" in run("gfx_override").output
    assert "To apply what is safe" not in run("--fix", "gfx_override", input="n\n").output


def test_json_has_everything():
    ended = run("--machine", SICK, "--json", "gfx_override")
    assert ended.exit_code == 1
    content = json.loads(ended.stdout)
    assert content["facts"]["gpus"][0]["gfx"] == "gfx1201"
    (finding,) = content["findings"]
    assert (finding["check"], finding["status"]) == ("gfx_override", "problem")
    assert finding["fix"]["unset"] == ["HSA_OVERRIDE_GFX_VERSION"]
    assert finding["links"]
    assert finding["measures"]


def test_nothing_is_written_without_a_yes(sick):
    for options in ({"input": "n\n"}, {"input": ""}):
        ended = run("--fix", "gfx_override", **options)
        assert ended.exit_code == 1
        assert "unset HSA_OVERRIDE_GFX_VERSION" in ended.output
        assert "Nothing was written" in ended.output
        assert not sick.exists()


@pytest.mark.parametrize("answer", [("--yes",), ()])
def test_fix_writes_the_file_and_undo_takes_it_back(sick, answer):
    ended = run("--fix", "gfx_override", *answer, input="y\n")
    assert "unset HSA_OVERRIDE_GFX_VERSION" in sick.read_text()
    assert f". {sick}" in ended.output
    assert "rocm-sd doctor --undo" in ended.output
    assert "says so already" in run("--fix", "gfx_override", "--yes").output
    ended = run("--undo")
    assert (ended.exit_code, sick.exists()) == (0, False)
    assert "there was none before" in ended.output


def test_fix_as_json_keeps_standard_output_json(sick):
    ended = run("--fix", "--yes", "--json", "gfx_override")
    assert json.loads(ended.stdout)["fix"]["unset"] == ["HSA_OVERRIDE_GFX_VERSION"]
    assert sick.exists()


def test_fix_runs_a_command_with_the_variables_and_returns_its_code(sick, monkeypatch, capfd):
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    program = "import os; print('child', 'HSA_OVERRIDE_GFX_VERSION' in os.environ); raise SystemExit(5)"
    ended = run("gfx_override", "--fix", "--", sys.executable, "-c", program)
    assert ended.exit_code == 5
    assert capfd.readouterr().out == "child False\n"
    assert ended.stdout == ""
    assert not sick.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--machine", SICK, "--fix"), "not the one at hand"),
        (("--fix", "--undo"), "Type one of them"),
        (("--", "python"), "rocm-sd doctor --fix -- COMMAND"),
        (("--fix", "--"), "rocm-sd doctor --fix -- COMMAND"),
        (("--machine", "/nowhere"), "rocm-sd doctor --record FOLDER"),
        (("--machine", SICK, "three_tritons"), "two_tritons"),
    ],
)
def test_what_makes_no_sense_is_said(arguments, said):
    with pytest.raises(InvalidOption) as raised:
        run(*arguments)
    assert said in str(raised.value)


def test_this_machine_is_recorded_and_examined_again(tmp_path):
    folder = tmp_path / "mine"
    ended = run("--record", str(folder), "--quick", "kernels_present", "two_tritons")
    assert ended.exit_code in {0, 1}
    again = run("--machine", str(folder), "kernels_present", "two_tritons", "--json")
    statuses = {each["check"]: each["status"] for each in json.loads(again.stdout)["findings"]}
    assert statuses["kernels_present"] == "ok"
    written = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert str(Path.home()) not in written
