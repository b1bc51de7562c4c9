"""Channels-last by shipped data only where one convolution shows that torch does not copy around it."""

from __future__ import annotations

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.engine import convolutions
from rocm_sd.engine.convolutions import layout, strides
from rocm_sd.tuning import Choice

CPU = torch.device("cpu")
CONVOLVED = strides.F.conv2d


@pytest.fixture(autouse=True)
def _asked_anew():
    strides._answers.cache_clear()
    yield
    strides._answers.cache_clear()


def choose(monkeypatch, source="static"):
    monkeypatch.setattr(layout.resolve, "choose", lambda *_: Choice("channels_last", source=source, why="the data"))


@pytest.fixture
def answers_contiguous(monkeypatch):
    """As torch does with MIOpen where PYTORCH_MIOPEN_SUGGEST_NHWC is not set. Holds the dtypes that were asked for."""
    asked = []

    def contiguous(x, weight, *arguments, **named):
        asked.append(x.dtype)
        assert x.is_contiguous(memory_format=torch.channels_last)
        return CONVOLVED(x.contiguous(), weight.contiguous(), *arguments, **named)

    monkeypatch.setattr(strides.F, "conv2d", contiguous)
    return asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_library_that_computes_so_answers_so(dtype):
    assert convolutions.answers_channels_last(CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("answers_contiguous")
def test_the_data_are_not_followed_where_torch_copies_there_and_back(monkeypatch, dtype):
    choose(monkeypatch)
    found = convolutions.choose_layout(CPU, dtype)
    assert found.is_stock
    assert found.why == "torch answers a channels-last convolution contiguous here, and would copy at each call"


def test_the_data_of_an_mi300x_say_so_and_are_asked_about(monkeypatch, answers_contiguous):
    monkeypatch.setattr(layout.arch, "detect", lambda _device: layout.arch.get("gfx942"))
    assert convolutions.choose_layout(CPU, torch.float16).is_stock
    assert answers_contiguous == [torch.float16]


@pytest.mark.usefixtures("answers_contiguous")
def test_what_was_measured_here_had_the_copies_in_its_time(monkeypatch):
    choose(monkeypatch, "measured here")
    assert convolutions.choose_layout(CPU, torch.float16).implementation == "channels_last"


def test_it_is_asked_once_for_a_dtype_and_a_state_of_the_library(monkeypatch, answers_contiguous):
    for _ in range(3):
        assert not convolutions.answers_channels_last(CPU, torch.float16)
    assert answers_contiguous == [torch.float16]
    # A host that switches the library off, as some do on Radeon, has another convolution.
    monkeypatch.setattr(torch.backends.cudnn, "enabled", not torch.backends.cudnn.enabled)
    convolutions.answers_channels_last(CPU, torch.float16)
    assert answers_contiguous == [torch.float16, torch.float16]


def test_weights_that_are_cast_at_each_call_are_asked_for_in_what_they_are_cast_to(answers_contiguous):
    assert not convolutions.answers_channels_last(CPU, torch.float8_e4m3fn)
    assert answers_contiguous == [torch.float32]


def test_a_library_that_cannot_convolve_at_all_is_no_reason_for_the_layout(monkeypatch):
    def broken(*_arguments, **_named):
        raise RuntimeError("miopenStatusUnknownError")

    monkeypatch.setattr(strides.F, "conv2d", broken)
    choose(monkeypatch)
    assert convolutions.choose_layout(CPU, torch.float16).is_stock


def test_a_pipeline_keeps_its_layout_and_says_why(monkeypatch, tmp_path):
    choose(monkeypatch)
    monkeypatch.setattr(layout, "answers_channels_last", lambda *_: False)
    report = rocm_sd.report(rocm_sd.optimize(tiny_pipeline(tmp_path)))
    assert not report.replaced
    assert all("contiguous here, and would copy at each call" in change.why_skipped for change in report.skipped)
