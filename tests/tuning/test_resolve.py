from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rocm_sd.errors import Unsupported
from rocm_sd.kernels.config import OpenConfig
from rocm_sd.ops import OPS
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import resolve
from rocm_sd.tuning.database import Database, Entry, default_path
from rocm_sd.tuning.environment import current

CPU = torch.device("cpu")
PROBLEM = {"n": 2, "c": 320, "hw": 4096, "groups": 32, "dtype": "float16"}
OP = OPS["group_norm_silu"]
CONFIG = replace(OP.implementation("triton").default, whole_elements=77)


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    forget_choices()
    yield Database()
    forget_choices()


def entry(candidate: str = "triton", median: float = 10.0, **named) -> Entry:
    given = {
        "op": OP.name, "problem": PROBLEM, "environment": current("cpu"), "kernel_hash": OP.kernel_hash(candidate),
        "config": CONFIG.to_dict() if candidate == "triton" else {}, "low_us": median, "high_us": median,
        "stock_us": 20.0, "numerics": "ok", "when": "2026-05-04T03:02:01+00:00",
    }  # fmt: skip
    return Entry(candidate=candidate, median_us=median, **{**given, **named})


def choose(problem=PROBLEM, arch="gfx1100", **named):
    given = {"environment": current("cpu"), "kernel_hash": OP.kernel_hash(), "defaults": OP.defaults, **named}
    return resolve.choose(OP.name, arch, problem, **given)


def test_a_measurement_comes_before_the_data_and_tells_its_figures(database):
    shipped = OP.lookup("gfx1100", PROBLEM)
    database.put([entry()])
    forget_choices()
    found = choose()
    assert (found.implementation, found.config, found.source) == ("triton", CONFIG, "measured here")
    assert found.why == "10.0 us, stock torch 20.0 us, measured here on 2026-05-04"
    assert shipped.source == "bucket"


@pytest.mark.parametrize(
    "other",
    [{"problem": {**PROBLEM, "n": 4}}, {"kernel_hash": "changed"}, {"environment": replace(current("cpu"), torch="3")}],
    ids=lambda other: next(iter(other)),
)
def test_anything_but_the_very_problem_goes_by_the_data(database, other):
    database.put([entry()])
    forget_choices()
    assert choose().source == "measured here"
    assert choose(**other) == OP.lookup("gfx1100", other.get("problem", PROBLEM))


def test_stock_that_was_faster_is_chosen_and_the_kernel_keeps_its_config(database):
    shipped = OP.lookup("gfx1100", PROBLEM)
    database.put([entry("torch", 8.0), entry()])
    forget_choices()
    found = choose()
    assert (found.implementation, found.source) == ("torch", "measured here")
    assert found.config_for("triton") == shipped.config


@pytest.mark.parametrize(
    ("best", "stays"),
    [
        ({"median": 9.5, "low_us": 9.0, "high_us": 10.2}, True),  # within its interval as fast
        ({"median": 9.5, "low_us": 9.0, "high_us": 9.9}, False),
        ({"median": 9.5, "low_us": 9.0, "high_us": 9.9, "stock_us": 18.0}, True),  # at a moment when all was faster
    ],
)
def test_what_the_data_name_stays_unless_another_is_faster_beyond_doubt(database, best, stays):
    shipped = OP.lookup("gfx1100", PROBLEM)
    database.put([entry(**best), entry(median=10.2, low_us=10.0, high_us=10.4, config=shipped.config.to_dict())])
    forget_choices()
    found = choose()
    assert found.source == "measured here"
    assert found.config == (shipped.config if stays else CONFIG)


def test_what_the_data_name_does_not_stay_where_it_is_wrong_or_not_faster_than_stock(database):
    shipped = OP.lookup("gfx1100", PROBLEM)
    for wrong in ({"numerics": "wrong: 3 of 10"}, {"high_us": 20.1}):
        database.put(
            [entry(median=9.9), entry(**{"median": 10.0, "low_us": 9.0, "config": shipped.config.to_dict(), **wrong})]
        )
        forget_choices()
        assert choose().config == CONFIG


def test_never_slower_than_stock_as_it_was_beside_it(database):
    database.put([entry(stock_us=9.0)])
    forget_choices()
    found = choose()
    assert found.implementation == "torch"
    assert "9.0 us" in found.why
    assert "10.0 us" in found.why


@pytest.mark.parametrize(("high", "chosen"), [(11.0, "triton"), (21.0, "torch")])
def test_faster_within_its_interval_only_is_not_chosen(database, high, chosen):
    database.put([entry(stock_us=20.0, high_us=high)])
    forget_choices()
    assert choose().implementation == chosen


def test_what_was_never_compared_with_stock_is_not_chosen(database):
    database.put([entry(stock_us=None)])
    forget_choices()
    assert choose() == OP.lookup("gfx1100", PROBLEM)


def test_a_candidate_that_is_not_known_is_passed_over(database):
    database.put([entry("somebody's", 1.0), entry()])
    forget_choices()
    assert choose().implementation == "somebody's"
    assert choose(among=("torch", "triton")).implementation == "triton"


def test_a_plug_in_competes_with_its_own_config_and_stays_behind_what_is_faster(database):
    database.put([entry()])
    forget_choices()
    found = choose(among=("torch", "triton"), plugged=[entry("somebody's", 6.0), entry("nobody's", 7.0)])
    # No config of the data is for it.
    assert (found.implementation, found.config, found.source) == ("somebody's", OpenConfig(), "measured here")
    assert found.why == "6.0 us, stock torch 20.0 us, measured here on 2026-05-04"
    assert choose(among=("torch", "triton"), plugged=[entry("somebody's", 11.0)]).implementation == "triton"


def test_a_plug_in_is_chosen_where_nothing_else_was_measured(database):
    database.put([entry("somebody's", 1.0)])
    forget_choices()
    assert choose(among=("torch", "triton")).source == "bucket"
    assert choose(among=("torch", "triton"), plugged=database.all()).implementation == "somebody's"


def test_an_op_asks_the_layers_once_for_each_problem(database):
    assert OP.choose(PROBLEM, CPU).source == "stock"
    database.put([entry()])
    # Chosen is chosen, until it is said that the database has changed.
    assert OP.choose(PROBLEM, CPU).source == "stock"
    forget_choices()
    found = OP.choose(PROBLEM, CPU)
    assert (found.implementation, found.config, found.source) == ("triton", CONFIG, "measured here")
    assert OP.choose({**PROBLEM, "n": 4}, CPU).source == "stock"


def test_a_config_that_the_kernel_does_not_know_is_not_used(database):
    database.put([entry(config={"rows": 3})])
    forget_choices()
    assert OP.choose(PROBLEM, CPU).source == "stock"


def test_a_forced_implementation_still_wins(database, monkeypatch):
    database.put([entry()])
    forget_choices()
    assert OP.choose(PROBLEM, CPU, "torch").implementation == "torch"
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "group_norm_silu=torch")
    found = OP.choose(PROBLEM, CPU)
    assert (found.implementation, found.source) == ("torch", "forced")
    with pytest.raises(Unsupported):
        OP.choose({**PROBLEM, "dtype": "float64"}, CPU, "triton")


def test_on_a_cpu_no_database_is_made_and_nothing_of_it_is_imported(tmp_path):
    program = """
import sys, torch
from rocm_sd.ops import OPS, group_norm_silu
assert 'sqlite3' not in sys.modules
group_norm_silu(torch.randn(1, 32, 4, 4), 8)
assert 'sqlite3' not in sys.modules
"""
    environment = {"ROCM_SD_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    assert not (tmp_path / "cache").exists()


def test_the_file_lies_in_the_cache_folder(database, tmp_path):
    assert default_path() == database.path == tmp_path / "tuning.sqlite3"
