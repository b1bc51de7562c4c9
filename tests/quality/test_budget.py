"""Budgets of quality: what is within them, and how they are written."""

from __future__ import annotations

import pytest

from rocm_sd.errors import InvalidOption
from rocm_sd.quality.budget import BUDGETS, Budget, Scores, parse_budget
from rocm_sd.quality.prompt_match import Interval

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scores", "within"),
    [
        (Scores([31, 40, 29], [0.96, 0.97, 0.98]), True),
        (Scores([29.9], [0.99]), False),
        (Scores([40], [0.94]), False),
        (Scores([INF, INF], [1.0, 1.0]), True),
        (Scores([NAN], [0.99]), False),
        (Scores([40], [NAN]), False),
        (Scores([40], [0.99], Interval(-0.01, -0.02, 0.0)), True),
        (Scores([40], [0.99], Interval(-0.011, -0.02, 0.0)), False),
    ],
)
def test_what_is_within(scores, within):
    assert BUDGETS["high"].holds(scores) is within


def test_budgets_are_read():
    assert parse_budget("balanced") == ("balanced", BUDGETS["balanced"])
    assert parse_budget("psnr=32,match=0.5") == ("psnr=32,match=0.5", Budget(32, 0, 0.5))


@pytest.mark.parametrize("text", ["", "fast", "psnr", "psnr=", "psnr=x", "psnr=nan", "ssim=-1", "speed=3", "psnr=3,,"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(InvalidOption, match="Use one of: high, balanced"):
        parse_budget(text)


def test_scores_say_what_was_not_measured():
    assert "prompt match not measured" in str(Scores([INF], [1.0]))
    assert "-1.0 points (-2.0 to +0.0)" in str(Scores([30.0], [1.0], Interval(-0.01, -0.02, 0.0)))
