from __future__ import annotations

import pytest
import torch

from rocm_sd import numerics
from rocm_sd.errors import NumericsFailure

EXACT = torch.linspace(-4, 4, 101, dtype=torch.float64)
STOCK = EXACT.half()


def test_stock_itself_passes():
    assert numerics.compare(STOCK, EXACT, STOCK).ok


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 3.0])
def test_one_wrong_element_fails(spoil):
    wrong = STOCK.clone()
    wrong[50] = spoil
    assert not numerics.compare(wrong, EXACT, STOCK).ok
    with pytest.raises(NumericsFailure, match="spoiled differs"):
        numerics.require("spoiled", wrong, EXACT, STOCK)


def test_a_small_bias_everywhere_fails_by_its_rms():
    spread = EXACT + 1e-3 * torch.sin(EXACT * 40)
    stock = spread.clone()
    comparison = numerics.compare(EXACT + 8e-3, EXACT, stock)
    assert not comparison.ok


def test_one_rounding_is_allowed_when_stock_is_exact():
    exact = torch.ones(8, dtype=torch.float64)
    off_by_one_rounding = (exact + torch.finfo(torch.float16).eps).half()
    assert numerics.compare(off_by_one_rounding, exact, exact.half()).ok


def test_shapes_must_agree():
    with pytest.raises(NumericsFailure, match="different shapes"):
        numerics.compare(STOCK[:5], EXACT, STOCK)


def test_empty_results_agree():
    empty = torch.empty(0, 3)
    assert numerics.compare(empty, empty.double(), empty).ok
