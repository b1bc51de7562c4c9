"""Memory of a piece of work: the peak, and its course."""

from __future__ import annotations

import time

import pytest
import torch

from rocm_sd.bench.machine import PeakMemory

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def memory():
    made = PeakMemory(CPU)
    if made.mib() is None:
        pytest.skip("this system does not tell the peak of the resident set")
    return made


def test_the_peak_is_seen_after_the_memory_is_gone(memory):
    torch.ones(64 * MIB, dtype=torch.uint8)
    # That it is gone is not seen: the C library may keep it.
    assert memory.mib() == pytest.approx(64, abs=16)


def test_the_course_shows_when_memory_was_held(memory):
    with memory.over_time() as course:
        time.sleep(0.1)
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        time.sleep(0.1)
        del held
        time.sleep(0.1)
    seconds, mib = zip(*course, strict=True)
    assert list(seconds) == sorted(seconds)
    assert 0.2 < seconds[-1] < 5
    highest = mib.index(max(mib))
    assert max(mib) > 40
    assert seconds[highest] > 0.05
    assert mib[0] < 32


def test_a_long_course_keeps_its_peak_in_few_points(memory, monkeypatch):
    monkeypatch.setattr("rocm_sd.bench.machine._SAMPLED_EVERY_S", 0.0005)
    with memory.over_time() as course:
        time.sleep(0.5)
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        time.sleep(0.02)
        del held
        time.sleep(0.2)
    assert 20 < len(course) <= 200
    assert max(mib for _, mib in course) > 40


def test_an_error_inside_passes_through(memory):
    with pytest.raises(ValueError, match="inside"), memory.over_time():
        raise ValueError("inside")
