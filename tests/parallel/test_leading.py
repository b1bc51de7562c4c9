"""Rank 0 leads: whatever it calls, the others call with the same inputs, and what all of them fail at is no end."""

from __future__ import annotations

import leading_cases
import pytest
import torch
from jobs import Job


@pytest.fixture
def job():
    job = Job(2)
    yield job
    job.close()


def test_what_rank_0_calls_the_others_call(job, tmp_path):
    (found, seen, _, _), (_, followed, told, dtype) = job.call(leading_cases.calls_case, tmp_path)
    answers, failed, sent = found
    assert torch.equal(answers[0], torch.full((2, 3), 2.0))
    assert torch.equal(answers[1], torch.full((4,), 12.0))
    assert answers[2] == "it does not fit"
    assert answers[3] == 2.0
    assert answers[4].dtype == torch.float64
    assert failed is None
    assert seen == followed
    assert told == [("style", 0.5)]
    # A pipeline that changes the dtype of a model around a call changes it here alone.
    assert dtype == torch.float64
    assert sent == 4 * (6 + 4 + 5 + 2 + 1) + 8 * 2


def test_a_rank_that_fails_alone_ends_the_job(job, tmp_path):
    leader, follower = job.call(leading_cases.alone_case, tmp_path)
    assert follower == "rank 1: it does not fit"
    assert leader[1] is True


def test_what_all_ranks_fail_at_is_no_end_where_they_have_unequally_many_neighbours(tmp_path):
    job = Job(3)
    try:
        leader, *_ = job.call(leading_cases.rows_case, tmp_path)
    finally:
        job.close()
    assert leader == ("it does not fit", None)


def test_a_split_unet_is_called_by_one_rank(job, tmp_path):
    (alone, found), _ = job.call(leading_cases.unet_case, tmp_path)
    for right, led in zip(alone, found, strict=True):
        assert torch.allclose(right, led, rtol=1e-4, atol=1e-5)
