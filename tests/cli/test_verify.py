from __future__ import annotations

import json
import re

import pytest

from rocm_sd.cli import main
from rocm_sd.verify import ladder
from rocm_sd.verify.ladder import Outcome

pytest.importorskip("triton", reason="AMD code is compiled by Triton")


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    return int(ended.value.code or 0)


def test_help_has_examples(capsys):
    assert rocm_sd("verify", "--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd verify group_norm_silu --arch gfx1100,gfx942" in shown
    assert "--rung" in shown


def test_the_table_has_verdicts_and_figures(capsys):
    # The op with the fewest kernels.
    assert rocm_sd("verify", "geglu", "--arch", "gfx1100", "--rung", "1,3,5") == 0
    shown = capsys.readouterr().out
    assert "geglu" in shown
    assert "3 compiled" in shown
    assert "VGPRs" in shown
    assert re.search(r"\d+ waves", shown)
    assert "never ran there" in shown
    assert "Nothing here ran on AMD silicon" in shown


def test_json_has_every_figure_and_nothing_else(capsys):
    assert rocm_sd("verify", "group_norm_silu", "--arch", "gfx942", "--rung", "3", "--json") == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert (outcome["op"], outcome["arch"], outcome["rung"], outcome["state"]) == (
        "group_norm_silu",
        "gfx942",
        "compiled",
        "passed",
    )
    kernel = outcome["figures"]["kernels"]["_moments (2x320x64x64 in 32 groups, float16, no add)"]
    assert kernel["vgprs"] > 0
    assert {gate["name"] for gate in kernel["gates"]} >= {"spills", "scratch", "lds", "wide_loads"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_op"], "op 'no_such_op' is not known"),
        (["--arch", "gfx9999"], "architecture 'gfx9999' is not known"),
        (["--rung", "9"], "rung '9' is not known"),
        (["--rung", "three"], "rung 'three' is not known"),
    ],
)
def test_what_is_not_known_is_exit_code_2(capsys, arguments, sentence):
    assert rocm_sd("verify", *arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rung", "wrong_numbers", "code"), [("compiled", False, 1), ("emulated", True, 7)], ids=["gate", "numerics"]
)
def test_a_failure_is_an_exit_code_and_a_sentence(monkeypatch, capsys, rung, wrong_numbers, code):
    failed = Outcome("group_norm_silu", "gfx1100", rung, "failed", "_apply: spills: 3 VGPRs", wrong_numbers)
    monkeypatch.setattr(ladder, "verify", lambda _tasks, _progress: [failed])
    assert rocm_sd("verify", "--arch", "gfx1100", "--rung", "3") == code
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert "_apply: spills: 3 VGPRs" in shown.out
    assert f"1 of 1 checks failed: group_norm_silu on gfx1100 ({rung})" in shown.err
    assert "Type: rocm-sd verify group_norm_silu --arch gfx1100 --json" in shown.err
