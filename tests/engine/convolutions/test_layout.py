"""Channels-last where the data say so, and only where convolutions are as exact with it."""

from __future__ import annotations

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.engine.convolutions import layout
from rocm_sd.tuning import Choice

CPU = torch.device("cpu")
# As it is, whatever the tests make of it.
WHY_LESS_EXACT = layout._why_less_exact.__wrapped__
WORSE = "channels-last, float32 convolutions are 3.7 times as far from exact here"


@pytest.fixture(autouse=True)
def _data(monkeypatch):
    monkeypatch.setattr(layout.resolve, "choose", lambda *_: Choice("channels_last", why="the data say so"))


def summed_in_one_chain(convolved):
    """As oneDNN with AVX-512 has it, and more so: every result is off by parts of a rounding."""

    def worse(x, weight, wanted):
        y = convolved(x, weight, wanted)
        chaotic = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) * 5e-6
        return y + chaotic if wanted is torch.channels_last else y

    return worse


def test_layouts_that_are_alike_are_as_exact(monkeypatch):
    convolved = layout._convolved
    monkeypatch.setattr(layout, "_convolved", lambda x, weight, _wanted: convolved(x, weight, torch.contiguous_format))
    assert WHY_LESS_EXACT(CPU) is None


def test_a_library_that_sums_in_one_chain_is_noted_with_how_much_it_is_worse(monkeypatch):
    convolved = layout._convolved
    same = lambda x, weight, _wanted: convolved(x, weight, torch.contiguous_format)  # noqa: E731
    monkeypatch.setattr(layout, "_convolved", summed_in_one_chain(same))
    reason = WHY_LESS_EXACT(CPU)
    assert reason is not None
    times = float(reason.split("convolutions are ")[1].split(" times")[0])
    assert 3 < times < 30


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_result_that_is_no_result_is_worse(monkeypatch, value):
    convolved = layout._convolved

    def broken(x, weight, wanted):
        y = convolved(x, weight, torch.contiguous_format)
        return torch.full_like(y, value) if wanted is torch.channels_last else y

    monkeypatch.setattr(layout, "_convolved", broken)
    assert WHY_LESS_EXACT(CPU) is not None


def test_random_numbers_of_the_program_stay():
    state = torch.random.get_rng_state()
    WHY_LESS_EXACT(CPU)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float32, "torch"),
        (torch.float16, "channels_last"),
        (torch.bfloat16, "channels_last"),
        (None, "channels_last"),
    ],
)
def test_it_matters_in_float32_alone(monkeypatch, dtype, wanted):
    monkeypatch.setattr(layout, "_why_less_exact", lambda _device: WORSE)
    assert layout.choose_layout(CPU, dtype).implementation == wanted


def test_where_no_other_layout_is_wanted_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(layout.resolve, "choose", lambda *_: Choice("torch", why="slower on Radeon"))
    monkeypatch.setattr(layout, "_why_less_exact", lambda _device: pytest.fail("it does not matter"))
    assert layout.choose_layout(CPU, torch.float32).why == "slower on Radeon"


def test_a_pipeline_on_such_a_machine_is_stocks_own_and_says_why(monkeypatch, tmp_path):
    pipe = tiny_pipeline(tmp_path)

    def drawn():
        generator = torch.Generator().manual_seed(0)
        return pipe("a frog", generator=generator, num_inference_steps=2, height=16, width=16, output_type="pt").images

    stock = drawn()
    monkeypatch.setattr(layout, "_why_less_exact", lambda _device: WORSE)
    report = rocm_sd.report(rocm_sd.optimize(pipe))
    assert not report.replaced
    assert {change.why_skipped for change in report.skipped} == {f"its convolutions keep their layout ({WORSE})"}
    assert torch.equal(drawn(), stock)


def test_the_dtype_is_that_of_convolutions():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv2d(2, 2, 1).half())
    assert layout.convolution_dtype(model) is torch.float16
    assert layout.convolution_dtype(torch.nn.Linear(2, 2)) is None
