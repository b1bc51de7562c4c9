"""Where torch has no fused attention, scores are bounded. A CPU stands for such a card: none of its kernels counts."""

from __future__ import annotations

import logging

import pytest
import torch

from live_memory import live_peak
from rocm_sd import numerics
from rocm_sd.ops import attention, registry, self_test
from rocm_sd.ops.attention import op
from rocm_sd.ops.attention.op import OP, keeps_more_than_bounded, stock_module_bytes
from rocm_sd.ops.self_test import SelfTestVerdict
from rocm_sd.tuning import Choice

CPU = torch.device("cpu")
SCORES = 2**14
TOKENS = 512
PROBLEM = {"b": 1, "s": TOKENS, "t": TOKENS, "h": 2, "d": 40, "dtype": "float16"}


@pytest.fixture
def unfused(monkeypatch):
    """Tells how often torch was asked for its fused kernels."""
    asked = []
    monkeypatch.setattr(op, "_MAY_BE_UNFUSED", frozenset({"cpu"}))
    monkeypatch.setattr(op, "_SCORES", SCORES)
    monkeypatch.setattr(op, "_is_fused", lambda *sizes, **named: bool(asked.append((sizes, named))))
    registry._say_once.cache_clear()
    registry.forget_choices()
    yield asked
    registry.forget_choices()


def inputs(dtype=torch.float16, tokens=TOKENS):
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, tokens, 2, 40, generator=draw).to(dtype) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("unfused")
def test_stock_keeps_no_more_scores_than_are_bounded(dtype):
    q, k, v = inputs(dtype)
    whole = 2 * TOKENS * TOKENS
    stock = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    found = []
    peak = live_peak(lambda: found.append(attention(q, k, v, implementation="torch")), q, k, v)
    exact = op.VERIFICATION.reference(q.double(), k.double(), v.double(), None)
    numerics.require("attention", found[0], exact, stock)
    # Float32 before and after the softmax and what it is made of; the copies of keys and values that math makes; the
    # result. Without a bound the scores alone are 2 MB in float32.
    assert peak < 16 * SCORES + 6 * q.numel() * 4 < 4 * whole


@pytest.mark.usefixtures("unfused")
def test_what_is_predicted_is_bounded_too():
    q, k, v = inputs()
    assert OP.own["torch"].scratch_bytes((q, k, v, None), None, CPU) == 8 * SCORES
    # A model that calls torch itself keeps all of them.
    assert stock_module_bytes(PROBLEM, CPU) == 8 * 2 * TOKENS**2
    assert keeps_more_than_bounded(PROBLEM, CPU)
    assert not keeps_more_than_bounded({**PROBLEM, "s": 64, "t": 64}, CPU)


def test_few_scores_are_left_to_torch(unfused):
    q, k, v = inputs(tokens=64)
    attention(q, k, v)
    assert not unfused


def test_switches_of_torch_are_looked_at(monkeypatch):
    asked = []
    monkeypatch.setattr(op, "_backend_takes", type("", (), {"__wrapped__": lambda *_sizes: asked.append(1) or True}))
    op._is_fused.cache_clear()
    sizes = (1, 2, 2, 1, 8, "float16", CPU)
    try:
        for switches in ((True, True, True), (True, True, True), (False, True, True)):
            assert op._is_fused(*sizes, switches)
    finally:
        op._is_fused.cache_clear()
    assert len(asked) == 2
    assert len(op._switches()) == 3


@pytest.fixture
def candidates(monkeypatch):
    """Which of them run here, and what their tests found; by name."""
    verdicts = {}

    def verdict(_op, name, _problem, _device, _config):
        return verdicts[name]

    monkeypatch.setattr(self_test, "verdict", verdict)
    for name in ("hip", "triton", "gemm_softmax"):
        runs = OP.own[name]
        monkeypatch.setitem(
            OP.own,
            name,
            type(runs)(name, runs.run, lambda *_, name=name: _why_not(verdicts, name), default=runs.default),
        )
    return verdicts


def _why_not(verdicts, name):
    return None if name in verdicts else "it does not run here"


PASSED = SelfTestVerdict("passed")


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({"hip": PASSED, "triton": PASSED}, "hip"),
        ({"triton": PASSED, "gemm_softmax": PASSED}, "triton"),
        ({"gemm_softmax": PASSED}, "gemm_softmax"),
        ({"hip": SelfTestVerdict("failed", "wrong"), "triton": PASSED}, "triton"),
        ({"hip": SelfTestVerdict("unseen"), "triton": PASSED}, "hip"),
        # It cannot be tested now: stock, and asked again.
        ({"hip": SelfTestVerdict("later", "a graph is being captured"), "triton": PASSED}, "torch"),
        ({"hip": SelfTestVerdict("failed", "wrong")}, "torch"),
        ({}, "torch"),
    ],
)
@pytest.mark.usefixtures("unfused")
def test_a_kernel_that_keeps_no_scores_takes_the_place_of_stock(candidates, found, chosen, caplog):
    candidates.update(found)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        choice = OP.choose(PROBLEM, CPU)
    assert choice.implementation == chosen
    if chosen != "torch":
        assert choice.why == "stock torch on cpu has no kernel for it that bounds its memory"
        assert isinstance(choice.config, type(OP.own[chosen].default))
    failed = [name for name, verdict in found.items() if verdict.state == "failed"]
    assert len(caplog.records) == len(failed)


@pytest.mark.usefixtures("unfused")
def test_a_card_of_which_nothing_is_known_is_served_as_well(candidates, monkeypatch):
    candidates["triton"] = PASSED
    monkeypatch.setattr(registry.arch, "detect", lambda _device: registry.arch.get("gfx1250"))
    assert OP.choose(PROBLEM, CPU).implementation == "triton"


@pytest.mark.usefixtures("unfused")
def test_what_was_measured_here_stays(candidates, monkeypatch):
    candidates["triton"] = PASSED
    measured = Choice("torch", source="measured here", why="the fastest")
    monkeypatch.setattr(type(OP), "_by_layers", lambda *_: measured)
    assert OP.choose(PROBLEM, CPU) is measured


def test_where_torch_has_a_fused_kernel_nothing_changes(unfused, candidates, monkeypatch):
    candidates["triton"] = PASSED
    monkeypatch.setattr(op, "_is_fused", lambda *_sizes, **_named: True)
    assert OP.choose(PROBLEM, CPU).is_stock
    assert not unfused
