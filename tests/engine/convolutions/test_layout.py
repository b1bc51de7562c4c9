"""Channels-last where the data say so, and only where stock is as exact with it."""

from __future__ import annotations

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.engine.convolutions import layout
from rocm_sd.tuning import Choice

CPU = torch.device("cpu")
WORSE = "channels-last, float32 convolutions are 3.7 times as far from exact here"


@pytest.fixture(autouse=True)
def _data(monkeypatch):
    monkeypatch.setattr(layout.resolve, "choose", lambda *_: Choice("channels_last", why="the data say so"))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float32, "torch"),
        (torch.float16, "torch"),
        (torch.bfloat16, "torch"),
        (torch.int8, "channels_last"),
        (None, "channels_last"),
    ],
)
def test_it_is_asked_in_every_dtype_that_is_computed_in(monkeypatch, dtype, wanted):
    monkeypatch.setattr(layout, "why_less_exact", lambda *_: WORSE)
    assert layout.choose_layout(CPU, dtype).implementation == wanted


def test_where_no_other_layout_is_wanted_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(layout.resolve, "choose", lambda *_: Choice("torch", why="slower on Radeon"))
    monkeypatch.setattr(layout, "why_less_exact", lambda *_: pytest.fail("it does not matter"))
    assert layout.choose_layout(CPU, torch.float32).why == "slower on Radeon"


def test_a_pipeline_on_such_a_machine_is_stocks_own_and_says_why(monkeypatch, tmp_path):
    pipe = tiny_pipeline(tmp_path)

    def drawn():
        generator = torch.Generator().manual_seed(0)
        return pipe("a frog", generator=generator, num_inference_steps=2, height=16, width=16, output_type="pt").images

    stock = drawn()
    monkeypatch.setattr(layout, "why_less_exact", lambda *_: WORSE)
    report = rocm_sd.report(rocm_sd.optimize(pipe))
    assert not report.replaced
    assert {change.why_skipped for change in report.skipped} == {f"its convolutions keep their layout ({WORSE})"}
    assert torch.equal(drawn(), stock)


def test_the_dtype_is_that_of_convolutions():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv2d(2, 2, 1).half())
    assert layout.convolution_dtype(model) is torch.float16
    assert layout.convolution_dtype(torch.nn.Linear(2, 2)) is None
