from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rocm_sd.cli import main
from rocm_sd.ops import OPS
from rocm_sd.tuning.ranking import Candidate
from rocm_sd.verify import static_tuning
from rocm_sd.verify.tuning_files import Found

pytest.importorskip("triton", reason="AMD code is compiled by Triton")

WHEN = {"hw": [1, 256]}
BEST = Candidate({"tile": 32}, 5.25, figures={"vgprs": 40, "lds": 64, "waves_per_simd": 16})
NEXT = replace(BEST, config={"tile": 64}, modelled_us=7.5)
SPILLED = Candidate({"tile": 512}, dropped="spills: _apply: 3 VGPRs and 0 SGPRs spilled")


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def searched(monkeypatch):
    """What the search finds, and what it was asked for, without the hours that it may take."""
    asked = {}

    def use(*found):
        def tune(planned, out, *, jobs, progress):
            asked.update(archs={s.arch for s in planned.searches}, out=out, jobs=jobs)
            progress("group_norm_silu gfx1100")
            return list(found)

        monkeypatch.setattr(static_tuning, "tune", tune)
        return asked

    return use


def test_help_has_examples(capsys):
    assert rocm_sd("tune", "--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd tune --static group_norm_silu --arch gfx1100,gfx942" in shown
    for option in ("--static", "--arch", "--out", "--jobs", "--json"):
        assert option in shown


def test_without_static_it_says_what_to_type(capsys):
    assert rocm_sd("tune") == 3
    told = capsys.readouterr().err
    assert "does not support timing on a card" in told
    assert "Type: rocm-sd tune --static" in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_op"], "op 'no_such_op' is not known"),
        (["--arch", "gfx9999"], "architecture 'gfx9999' is not known"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_what_is_not_known_is_exit_code_2(capsys, arguments, sentence):
    assert rocm_sd("tune", "--static", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_has_the_winner_and_its_figures(searched, capsys, tmp_path):
    asked = searched(Found("group_norm_silu", "gfx1100", WHEN, "2x320x64x64", (BEST, NEXT, SPILLED)))
    arguments = ("group_norm_silu", "--arch", "gfx1100,gfx942", "--out", str(tmp_path), "--jobs", "2")
    assert rocm_sd("tune", "--static", *arguments) == 0
    assert asked == {"archs": {"gfx1100", "gfx942"}, "out": tmp_path, "jobs": 2}
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("gfx1100", "tile=32", "5.2", "7.5", "40", "VGPRs", "Modelled, never timed."):
        assert word in shown
    assert str(tmp_path) in shown


def test_a_size_without_a_config_is_exit_code_1_with_every_reason(searched, capsys):
    lost = Found("group_norm_silu", "gfx1101", WHEN, "2x320x64x64", (SPILLED,))
    searched(Found("group_norm_silu", "gfx1100", WHEN, "2x320x64x64", (BEST,)), lost)
    assert rocm_sd("tune", "--static", "group_norm_silu", "--json") == 1
    told = capsys.readouterr()
    first, second = json.loads(told.out)
    assert (first["ranked"][0]["config"], first["error"]) == ({"tile": 32}, None)
    assert second["unusable"] == [{"config": {"tile": 512}, "because": SPILLED.dropped}]
    assert "1 of 2 sizes have no usable config" in told.err
    assert 'group_norm_silu on gfx1101, {"hw": [1, 256]}: all 1 configs were dropped: spills: _apply' in told.err
    assert "smaller tile" in told.err


def test_a_real_search_from_the_command_line(monkeypatch, capsys, tmp_path):
    op = OPS["group_norm_silu"]
    (config, *_rest) = static_tuning.plan([op.name], ["gfx1100"]).searches[0].configs
    tuning = replace(op.tuning, space=lambda _problem, _arch: [dict(config)], buckets=op.tuning.buckets[:1])
    monkeypatch.setitem(OPS, op.name, replace(op, tuning=tuning))
    assert rocm_sd("tune", "--static", op.name, "--arch", "gfx1100", "--out", str(tmp_path), "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["op"], found["arch"], found["compiled"]) == (op.name, "gfx1100", 1)
    written = json.loads((tmp_path / "gfx1100" / f"{op.name}.json").read_text())
    assert written["bucket"][0]["config"] == found["ranked"][0]["config"] == dict(config)
