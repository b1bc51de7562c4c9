"""The verdict on approximations: no speed without scores, and no claim that the scores do not bear out."""

from __future__ import annotations

import math

import pytest

from rocm_sd.bench.verdict import EQUAL_DB, EXACT, GIVEN, OUTSIDE, Quality, measured, problems
from rocm_sd.quality.budget import Scores
from rocm_sd.quality.prompt_match import Interval

NEAR = Quality("high", "steps", (41.0, 43.0, 45.0), (0.99, 0.98, 0.97), (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("psnr", "ssim", "match", "verdict"),
    [
        ((41.0, 43.0), (0.99, 0.98), (), "within high"),
        ((30.0, 30.0), (0.95, 0.95), (-0.01, -0.02, 0.0), "within high"),
        ((29.9, 29.9), (0.99, 0.99), (), "within balanced"),
        ((41.0, 43.0), (0.90, 0.91), (), "within balanced"),
        ((41.0, 43.0), (0.99, 0.98), (-0.02, -0.03, 0.0), "within balanced"),
        ((41.0, 43.0), (0.99, 0.98), (-0.04, -0.1, 0.0), OUTSIDE),
        ((23.9, 23.9), (0.99, 0.99), (), OUTSIDE),
        ((41.0,), (0.99,), (), "not measured"),
        ((41.0, 43.0), (0.99,), (), "not measured"),
        ((), (), (), "not measured"),
    ],
)
def test_the_strictest_budget_that_holds(psnr, ssim, match, verdict):
    assert Quality("balanced", "steps", psnr, ssim, match).verdict == verdict


def test_exact_needs_no_scores_and_equal_pictures_are_finite():
    assert EXACT.verdict == "exact"
    assert not list(problems("rocm-sd", EXACT))
    scored = measured("high", "steps", Scores([math.inf, math.inf], [1.0, 1.0], Interval(0.0, -0.1, 0.1)))
    assert scored.psnr_db == (EQUAL_DB, EQUAL_DB)
    assert scored.match == (0.0, -0.1, 0.1)
    assert "PSNR equal, SSIM 1.000, prompt match +0.0 (-10.0 to +10.0) points, 2 prompts" in str(scored)


@pytest.mark.parametrize(
    ("engine", "quality", "sentence"),
    [
        ("rocm-sd-high", EXACT, "does not say how far"),
        ("rocm-sd-high", Quality("high", "steps"), "were not compared with the exact ones"),
        ("theirs", Quality(GIVEN, "steps"), "were not compared with the exact ones"),
        ("rocm-sd-high", Quality(GIVEN, "s", (41.0, 43.0), (0.99, 0.98)), "claims the quality given, and is high"),
        ("rocm-sd-high", Quality("high", "s", (25.0, 26.0), (0.99, 0.98)), "at least PSNR 30 dB"),
        ("theirs", Quality("psnr=44", "s", (41.0, 43.0), (0.99, 0.98)), "claims the quality psnr=44"),
        ("theirs", Quality("superb", "s", (41.0, 43.0), (0.99, 0.98)), "which is none"),
        ("theirs", Quality("high", "s", (41.0, 43.0), (0.99, 0.98), (0.1,)), "not a share and its interval"),
    ],
)
def test_what_may_not_be_published(engine, quality, sentence):
    assert sentence in "; ".join(problems(engine, quality))


def test_what_may():
    assert not list(problems("rocm-sd-high", NEAR))
    assert not list(problems("theirs", Quality("psnr=40", "s", (41.0, 43.0), (0.99, 0.98))))
    outside = Quality("high", "s", (12.0, 13.0), (0.3, 0.3))
    # It may be shown, as what it is, and not be published as what it claims.
    assert not list(problems("rocm-sd-high", outside, claims=False))
    assert list(problems("rocm-sd-high", outside))
