"""What --fix applies: safe fixes alone, to a command or in a file whose every change can be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rocm_sd.doctor.check import Check, Finding, Fix, Status
from rocm_sd.doctor.examination import Examined
from rocm_sd.doctor.treatment import Treatment, run_with, treatment_for, undo, write
from rocm_sd.errors import RocmSdError


def problem(name, fix, status=Status.PROBLEM):
    return Examined(Check(name, "?", "", (), lambda *_: None), Finding(status, "seen.", "means.", fix))


def sourced(file, names, **environment):
    """What a shell that reads the file has in these variables."""
    program = f". {file}; " + "; ".join(f'echo "${{{name}-unset}}"' for name in names)
    done = subprocess.run(["sh", "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_only_safe_fixes_of_problems_are_applied():
    treatment = treatment_for(
        [
            problem("a", Fix("set", env={"A": "1"}, unset=("B",), safe=True)),
            problem("b", Fix("danger", env={"C": "1"})),
            problem("c", Fix("type this", commands=("pip install x",), safe=True)),
            problem("d", None),
            problem("e", Fix("fine", env={"D": "1"}, safe=True), Status.OK),
            problem("f", Fix("fine", env={"E": "1"}, safe=True), Status.UNKNOWN),
        ]
    )
    assert (treatment.env, treatment.unset) == ({"A": "1"}, ("B",))
    assert treatment.left == (("b", "danger"), ("c", "type this"), ("d", "no fix is known"))
    assert treatment.reasons == {"A": "a", "B": "a"}


def test_two_checks_that_disagree_change_nothing():
    treatment = treatment_for(
        [
            problem("a", Fix("", env={"A": "1"}, safe=True)),
            problem("b", Fix("", unset=("A",), safe=True)),
            problem("c", Fix("", env={"B": "1"}, safe=True)),
            problem("d", Fix("", env={"B": "1"}, safe=True)),
        ]
    )
    assert (treatment.env, treatment.unset) == ({"B": "1"}, ())
    assert treatment.left == (("A", "a and b want different values of it: choose one"),)


def test_a_command_gets_the_variables(monkeypatch):
    monkeypatch.setenv("OLD", "1")
    program = "import os, sys; sys.exit(40 + (os.environ.get('NEW') == 'a b') + 2 * ('OLD' not in os.environ))"
    assert run_with(Treatment({"NEW": "a b"}, ("OLD",)), [sys.executable, "-c", program]) == 43
    with pytest.raises(RocmSdError, match="could not be started"):
        run_with(Treatment(), ["/nowhere/to/be/found"])


def test_the_file_does_in_a_shell_what_it_says(tmp_path):
    file = tmp_path / "folder" / "env.sh"
    assert write(Treatment({"A": "it's $HOME; rm"}, ("B",)), file)
    assert sourced(file, ["A", "B"], B="5") == ["it's $HOME; rm", "unset"]


def test_a_second_treatment_keeps_the_first_and_each_undo_takes_back_one(tmp_path):
    file = tmp_path / "env.sh"
    write(Treatment({"A": "1"}, ("C",)), file)
    first = file.read_text()
    write(Treatment({"B": "2"}), file)
    second = file.read_text()
    # The reverse of an earlier line replaces it.
    write(Treatment({"C": "3"}, ("A",)), file)
    assert sourced(file, ["A", "B", "C"], A="0") == ["unset", "2", "3"]
    assert "Brought back" in undo(file)
    assert file.read_text() == second
    undo(file)
    assert file.read_text() == first
    assert "there was none before" in undo(file)
    assert not list(tmp_path.iterdir())
    assert "nothing to undo" in undo(file)


def test_the_same_again_changes_nothing(tmp_path):
    file = tmp_path / "env.sh"
    write(Treatment({"A": "1"}), file)
    assert not write(Treatment({"A": "1"}), file)
    assert [path.name for path in tmp_path.iterdir()] == ["env.sh"]


def test_lines_that_a_user_added_stay(tmp_path):
    file = tmp_path / "env.sh"
    write(Treatment({"A": "1"}), file)
    with file.open("a") as opened:
        opened.write("export MINE=1\n")
    write(Treatment({"A": "2"}), file)
    assert sourced(file, ["A", "MINE"]) == ["2", "1"]


def test_a_file_of_somebody_else_is_not_touched(tmp_path):
    file = tmp_path / "env.sh"
    file.write_text("export PATH=/mine\n")
    for change in (lambda: write(Treatment({"A": "1"}), file), lambda: undo(file)):
        with pytest.raises(RocmSdError, match="was not written by rocm-sd"):
            change()
    assert file.read_text() == "export PATH=/mine\n"


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RocmSdError, match="cannot be"):
        write(Treatment({"A": "1"}), tmp_path / "file" / "env.sh")
