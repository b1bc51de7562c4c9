"""What stock torch computes is counted: calls that launch something, their operations and bytes, and a model's time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rocm_sd import arch
from rocm_sd.tuning.ranking import LAUNCH_S
from rocm_sd.verify.stock_work import StockCall, StockWork

CARD = arch.get("gfx1100")


def test_products_passes_and_views():
    x, weight = torch.zeros(8, 16).half(), torch.zeros(32, 16).half()
    with torch.no_grad(), StockWork(CARD) as stock:
        y = F.linear(x, weight)
        y.view(4, 64).transpose(0, 1)[1:].unsqueeze(0)  # views
        torch.empty(4)
        F.silu(y)
        y.add_(1)
    assert stock.by_call == {
        StockCall("mm", 2 * 8 * 16 * 32, 2 * (8 * 16 + 16 * 32 + 8 * 32)): 1,
        StockCall("silu", 0, 2 * 2 * 8 * 32): 1,
        StockCall("add_", 0, 2 * 2 * 8 * 32): 1,
    }
    assert stock.calls == 3
    assert stock.modelled_us >= 3 * LAUNCH_S * 1e6


def test_a_roofline_is_that_of_the_card():
    x = torch.zeros(1 << 20, dtype=torch.float32)
    with StockWork(CARD) as stock:
        x.clone()
    assert stock.modelled_us == pytest.approx((LAUNCH_S + 8 * 2**20 / (CARD.bandwidth_gbps * 1e9)) * 1e6)


def test_what_is_only_counted_is_not_computed():
    x = torch.ones(2, 64, 64, 64)
    with torch.no_grad(), StockWork(CARD, compute=False) as counted:
        y = F.conv2d(x.contiguous(memory_format=torch.channels_last), torch.ones(32, 64, 3, 3), padding=1)
        kept = x.mul_(7)
        small = torch.ones(3) + 1
        memory = torch.empty(3)
    assert y.shape == (2, 32, 64, 64)
    assert not y.any()
    assert not memory.any()
    assert kept is x
    assert bool((x == 1).all()), "a large result is not written, in place neither"
    assert small.tolist() == [2, 2, 2]
    with torch.no_grad(), StockWork(CARD) as computed:
        F.conv2d(x.contiguous(memory_format=torch.channels_last), torch.ones(32, 64, 3, 3), padding=1)
        x.mul_(7)
        torch.ones(3) + 1
    assert counted.by_call == computed.by_call
