from __future__ import annotations

import time

import torch
from misbehaving import CANDIDATES

from rocm_sd.tuning.database import Database
from rocm_sd.tuning.search import ahead
from rocm_sd.tuning.search.candidates import Candidate
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions

CPU = torch.device("cpu")
POINTS = {"rocm_sd.candidates": {"misbehaving": "tuner_plugin:candidates"}}


def test_it_ends_in_time_and_blames_none_for_it(installed, geglu_call):
    installed(CANDIDATES + "\n    def candidates():\n        return [of('hangs', hangs)]", POINTS)
    failed: list[str] = []
    begun = time.monotonic()
    compiled = ahead.compile_all(
        [(geglu_call(8, 8).call, [Candidate("hangs")])], CPU,
        jobs=1, seconds=0.5, timeout_s=30, on_failed=lambda _call, _c, why: failed.append(why),
    )  # fmt: skip
    # Far below the 30 s that the candidate itself would be given.
    assert time.monotonic() - begun < 10
    assert (compiled, failed) == (set(), [])


def test_a_tuner_with_several_jobs_stores_what_failed_ahead(installed, geglu_call, tmp_path):
    installed(
        CANDIDATES
        + """
    def candidates():
        one = ({"ms": 1},)
        return [of("aborts", aborts, one), of("raises", raises, one), of("sleeps", sleeps, one)]
    """,
        POINTS,
    )
    database = Database(tmp_path / "tuning.sqlite3")
    (outcome,) = Tuner(CPU, database, TunerOptions(30, jobs=2)).run([geglu_call(8, 8)])
    assert outcome.complete
    reasons = {failure.candidate: failure.reason for failure in outcome.failures}
    assert set(reasons) == {"aborts ms=1", "raises ms=1"}
    assert "crashed by signal 6" in reasons["aborts ms=1"]
    assert outcome.measured == 4
    assert {entry.candidate for entry in database.all()} == {"aborts", "raises", "sleeps", "torch"}
