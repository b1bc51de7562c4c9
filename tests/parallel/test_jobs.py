"""The jobs of these tests themselves: after a wrong answer the next one is right."""

from __future__ import annotations

import os
import time

import jobs
import pytest


@pytest.fixture
def job():
    job = jobs.Job(1)
    yield job
    job.close()


def test_an_answer_that_comes_late_is_not_that_of_the_next_call(job, monkeypatch):
    (first,) = job.call(os.getpid)
    monkeypatch.setattr(jobs, "_LONGEST_S", 0.2)
    with pytest.raises(AssertionError, match="no answer"):
        job.call(time.sleep, 1)
    monkeypatch.undo()
    (second,) = job.call(os.getpid)
    assert second != first


def test_ranks_that_refuse_alike_are_asked_again(job):
    (first,) = job.call(os.getpid)
    job.start(int, "one")
    assert [answer[0] for _, answer in job.answers()] == ["ValueError"]
    assert job.call(os.getpid) == [first]


def test_a_rank_waits_less_long_than_the_test():
    assert jobs._PATIENCE.total_seconds() < jobs._LONGEST_S
