"""linear_8bit and conv2d_8bit: no tile, and no second width of a tile, changes what they compute."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import op_checks
from rocm_sd import arch
from rocm_sd.ops import OPS

TILES = {
    "one_width": {"block_m": 32, "block_n": 32, "block_k": 32},
    "two_widths": {"block_m": 32, "block_n": 16, "block_n2": 16, "block_k": 32},
    "second_width_past_the_end": {"block_n": 64, "block_n2": 16, "block_k": 16},
    "one_group": {"group_m": 1, "block_m": 16, "block_n": 16, "block_n2": 32},
}
SAMPLES = [(op, sample) for op in ("linear_8bit", "conv2d_8bit") for sample in OPS[op].verification.small]


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=[f"{op} {sample.name}" for op, sample in SAMPLES])
@pytest.mark.usefixtures("poison_memory")
def test_no_tile_changes_the_result(op, sample, tile, device):
    check, configured = (partial(each, OPS[op]) for each in (op_checks.check, op_checks.configured))
    first, second = (check(sample.make(device), "triton", configured(**tile)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("op", ["linear_8bit", "conv2d_8bit"])
def test_two_widths_are_tried_only_where_they_are_whole(op):
    def widths(columns):
        problem = {"m": 2048, "k": 1280, "pixels": 2048, "cin": 1280, "n": columns, "cout": columns}
        return [config.block_n2 for config in OPS[op].tuning.space(problem, arch.get("sm_90"))]

    assert any(widths(1280))
    assert widths(1288)
    assert not any(widths(1288))
