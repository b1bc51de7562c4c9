from __future__ import annotations

import pytest
import torch
from misbehaving import CANDIDATES

from rocm_sd.ops import OPS
from rocm_sd.tuning import choice
from rocm_sd.tuning.search import candidates as module
from rocm_sd.tuning.search.candidates import Candidate, candidates, hash_of, operation, operations, plug_ins
from rocm_sd.tuning.search.pipeline_settings import CONVOLUTION_LIBRARY, MEMORY_FORMAT

CPU = torch.device("cpu")
HALF = {"m": 64, "f": 256, "dtype": "float16"}


def test_stock_is_first_and_alone_where_nothing_else_can_run():
    assert candidates(OPS["geglu"], {**HALF, "dtype": "float32"}, CPU) == [Candidate("torch")]


def test_what_the_data_name_comes_next_and_nothing_comes_twice(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op = OPS["geglu"]
    space = list(op.tuning.space(HALF, module.arch.detect(CPU)))
    table = {"static": {"implementation": "triton", "config": space[-1].to_dict(), "why": "timed"}}
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: table)
    found = candidates(op, HALF, CPU)
    assert found[:2] == [Candidate("torch"), Candidate("triton", space[-1])]
    assert {c.config for c in found[1:]} == set(space)
    assert len(found) == 1 + len(set(space))


def test_one_without_configs_that_the_data_name_comes_next(monkeypatch):
    table = {"static": {"implementation": "sdpa_math", "why": "timed"}}
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: table)
    found = candidates(OPS["attention"], {"b": 1, "s": 4, "t": 4, "h": 1, "d": 8, "dtype": "float32"}, CPU)
    assert found == [Candidate("torch"), Candidate("sdpa_math")]


def test_settings_of_a_pipeline_are_candidates_too():
    assert [str(c) for c in candidates(MEMORY_FORMAT, {}, CPU)] == ["torch", "channels_last"]
    assert [str(c) for c in candidates(operation("convolution_library"), {}, CPU)] == ["torch", "none"]
    assert set(OPS) < set(operations())


def test_a_search_of_miopen_is_not_timed_beside_stock_which_it_would_be(monkeypatch):
    why_not = CONVOLUTION_LIBRARY.implementation("searched").why_not
    monkeypatch.setattr(torch.version, "hip", None)
    assert why_not({}, torch.device("cuda")) is None
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    assert "keeps what MIOpen found first" in why_not({}, torch.device("cuda"))


def test_a_package_adds_candidates(installed, caplog):
    installed(
        CANDIDATES
        + """
    def several():
        return [of("remembers", remembers), of("sleeps", sleeps, ({"ms": 1}, {"ms": 2})), of("torch", stock), 5]

    one = Extra("no_such_op", Implementation("a", stock, lambda problem, device: None))
    """,
        {"rocm_sd.candidates": {
            "several": "tuner_plugin:several", "one": "tuner_plugin:one", "gone": "tuner_plugin:missing",
        }},
    )  # fmt: skip
    assert [each.name for each in plug_ins()] == ["remembers", "sleeps"]
    for reason in ("an implementation named torch", "there is no op no_such_op", "int and no", "the plug-in gone"):
        assert reason in caplog.text
    op = operation("geglu")
    found = candidates(op, {**HALF, "dtype": "float32"}, CPU)
    assert [str(c) for c in found] == ["torch", "remembers", "sleeps ms=1", "sleeps ms=2"]
    assert hash_of(op, "sleeps") == "1"
    # The op itself is as it was.
    assert "remembers" not in [i.name for i in OPS["geglu"].implementations]


def test_a_kernels_hash_is_that_of_its_source():
    assert hash_of(OPS["geglu"], "triton")
    assert hash_of(OPS["geglu"], "torch") == ""
    assert hash_of(MEMORY_FORMAT, "channels_last") == ""
