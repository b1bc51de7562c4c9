"""Calls in new shapes are measured once, and nothing is measured where it would be wrong or in the way."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from rocm_sd.engine.calibration import first_calls
from rocm_sd.tuning import choice

CPU = torch.device("cpu")


class Model(nn.Module):
    def forward(self, x, *, scale=1.0):
        return x * scale


@pytest.fixture
def watched():
    """The model, what was asked to be measured, and what takes it off."""
    model, asked = Model(), []

    def measure(_model, call, _args, _kwargs):
        asked.append(call)
        return False

    installed = first_calls.install([model], CPU, measure)
    yield model, asked, installed.restore
    installed.restore()


def test_each_shape_once(watched):
    model, asked, _ = watched
    with torch.no_grad():
        for side in (4, 4, 8, 4):
            assert torch.equal(model(torch.ones(1, side), scale=2.0), torch.full((1, side), 2.0))
    assert asked == ["1x4 float32", "1x8 float32"]


def test_gradients_and_autocast_run_as_they_are(watched):
    model, asked, _ = watched
    model(torch.ones(1, 4))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 4))
    assert asked == []


def test_taken_off_it_asks_no_more(watched):
    model, asked, restore = watched
    restore()
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert asked == []
    assert "forward" not in model.__dict__


def test_another_thread_is_answered_meanwhile():
    model, inside, go_on, asked = Model(), threading.Event(), threading.Event(), []

    def measure(_model, call, _args, _kwargs):
        asked.append(call)
        inside.set()
        assert go_on.wait(30)
        return False

    installed = first_calls.install([model], CPU, measure)

    def draw():
        with torch.no_grad():
            model(torch.ones(1, 4))

    first = threading.Thread(target=draw)
    first.start()
    assert inside.wait(30)
    with torch.no_grad():
        assert model(torch.ones(1, 8)).shape == (1, 8)
    go_on.set()
    first.join(30)
    # What was not measured then is measured when it comes again.
    go_on.set()
    with torch.no_grad():
        model(torch.ones(1, 8))
    installed.restore()
    assert asked == ["1x4 float32", "1x8 float32"]


def test_an_error_in_measuring_reaches_the_caller_and_frees_the_lock():
    model = Model()

    def measure(*_):
        raise KeyboardInterrupt

    installed = first_calls.install([model], CPU, measure)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    assert first_calls._busy.acquire(blocking=False)
    first_calls._busy.release()
    installed.restore()


def test_who_is_measured(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(
        first_calls.arch, "detect", lambda _device: choice.Choice("", why="") and type("A", (), {"name": name})
    )
    name = "gfx1100"
    assert first_calls.wanted(gpu, graphs=True)
    assert first_calls.searches_ops(gpu)
    name = "sm_90"  # its data were measured on a card
    assert not first_calls.wanted(gpu, graphs=True)
    # With what its host launches, plans are; and the ops are those of the data.
    assert first_calls.wanted(gpu, graphs=False)
    assert not first_calls.searches_ops(gpu)
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "1")
    assert first_calls.wanted(gpu, graphs=True)
    assert first_calls.wanted(CPU, graphs=True)
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "0")
    name = "gfx1100"
    assert not first_calls.wanted(gpu, graphs=True)
    monkeypatch.delenv("ROCM_SD_CALIBRATE")
    assert not first_calls.wanted(CPU, graphs=True)
    monkeypatch.setattr(first_calls.workers, "inside", lambda: True)
    assert not first_calls.wanted(gpu, graphs=True)
    assert not first_calls.wanted(gpu, graphs=False)
