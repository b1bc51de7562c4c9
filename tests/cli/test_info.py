"""What `rocm-sd info` tells of the performance database."""

from __future__ import annotations

import json

import pytest
import torch

from rocm_sd.cli import main
from rocm_sd.ops import OPS
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning.database import Database, Entry
from rocm_sd.tuning.environment import Environment, current

HERE = current(torch.device("cuda") if torch.cuda.is_available() else "cpu")
THERE = Environment("gfx1100", 96, None, "rocm 7.1.0", "2.11.0", None, None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    forget_choices()
    yield tmp_path / "tuning.sqlite3"
    forget_choices()


def info(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main.run(["info", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def fill(path) -> None:
    op = OPS["attention"]
    typical = op.verification.problem(*op.tuning.buckets[0].sample.make(filled=False))
    common = {"low_us": 1.0, "high_us": 2.0, "numerics": "ok", "when": "2026-05-04", "config": {}}
    database = Database(path)
    for environment in (HERE, THERE):
        measured = Entry("attention", typical, environment, "", "sdpa_math", median_us=1.5, stock_us=3.0, **common)
        database.put([measured])
    database.quarantine("geglu", "triton", HERE, OPS["geglu"].kernel_hash("triton"), "at 5x320: [nan]")
    database.quarantine("geglu", "triton", THERE, "", "elsewhere")
    database.close()


def test_without_a_database_none_is_made(capsys, own_cache):
    facts = json.loads(info(capsys, "--json"))["tuning_database"]
    assert (facts["exists"], facts["measurements"], facts["quarantined"]) == (False, 0, [])
    assert facts["path"] == str(own_cache)
    assert "nothing yet" in info(capsys)
    assert not own_cache.exists()


def test_what_is_measured_and_set_aside_is_reported(capsys, own_cache):
    fill(own_cache)
    facts = json.loads(info(capsys, "--json"))
    database = facts["tuning_database"]
    assert (database["measurements"], database["measurements_here"], database["why_not_kept"]) == (2, 1, None)
    assert [(q["op"], q["reason"]) for q in database["quarantined"] if q["here"]] == [("geglu", "at 5x320: [nan]")]
    ops = {op["name"]: op for op in facts["ops"]}
    assert ops["attention"]["source"] == "measured here"
    assert [i["name"] for i in ops["attention"]["implementations"] if i["chosen_here"]] == ["sdpa_math"]
    triton = next(i for i in ops["geglu"]["implementations"] if i["name"] == "triton")
    assert triton["quarantined"] == "at 5x320: [nan]"
    assert not triton["chosen_here"]
    shown = info(capsys)
    assert "1 configs timed, 1 candidates set aside; 1 configs for other cards or versions" in shown
    assert "geglu never runs as triton here: at 5x320: [nan]" in shown
    assert "elsewhere" not in shown
