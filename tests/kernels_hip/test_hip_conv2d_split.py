"""conv2d in parts of its depth: compiled for six architectures, executed on three, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_hip_conv2d import OP, arguments, configs, narrow, run
from test_hip_kernels import EMULATED, EmulatedLauncher

from rocm_sd.kernels.hip import toolchain
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops.definition import KernelPromise
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report

PROMISES = {
    "conv2d_split": KernelPromise(uses_dot=True),
    "conv2d_finish": KernelPromise(
        bound_by_memory=True, narrow_loads_because="what is added is half as wide as the sums beside it"
    ),
}


def executed(gfx, split_k, *given, tile=None):
    launcher = EmulatedLauncher(gfx)
    with launcher.run._allocations:
        out = run(launcher, replace(tile or configs(gfx)[-1], split_k=split_k), *given)
    # The parts too are written before they are read: the emulator notices what was not.
    launcher.run.require_written(out)
    exact = OP.verification.reference(*in_float64(given))
    require(f"conv2d in {split_k} parts on {gfx}", out, exact, OP.implementations[0](*given))
    return launcher.run.calls


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_both_kernels_of_a_split_convolution_pass_the_gates(gfx):
    launcher = EmulatedLauncher(gfx, execute=False)
    run(launcher, replace(configs(gfx)[0], split_k=4), *arguments((1, 64, 8, 8), 64, 3))
    for call in launcher.run.calls:
        broken = [gate.sentence for gate in check(report(call.code), PROMISES[call.kernel]) if gate.ok is False]
        assert broken == [], call.kernel
        assert "flat_load" not in call.code.assembly
    assert [call.kernel for call in launcher.run.calls] == ["conv2d_split", "conv2d_finish"]


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_parts_of_narrow_tiles_pass_the_gates(gfx):
    for config in narrow(gfx):
        launcher = EmulatedLauncher(gfx, execute=False)
        run(launcher, replace(config, split_k=4), *arguments((1, 64, 8, 8), 4, 3))
        first = launcher.run.calls[0]
        broken = [gate.sentence for gate in check(report(first.code), PROMISES[first.kernel]) if gate.ok is False]
        assert (first.kernel, broken) == ("conv2d_split", [])


@pytest.mark.parametrize("gfx", EMULATED)
def test_parts_begin_within_a_tap_and_the_last_is_shorter(gfx):
    # 9 taps of 80 channels: 18 steps, in parts of 5, 5, 5 and 3.
    first, second = executed(gfx, 4, *arguments((2, 80, 5, 7), 72, 3))
    assert first.grid[1] == 4
    assert first.counters.lds_bank_conflicts == 0
    assert second.counters.bytes_stored == 2 * 5 * 7 * 72 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_parts_of_odd_channels(gfx):
    # 27 values a tap, 243 in all: 4 steps of 64 in 2 parts. 5 channels out: one value a thread.
    executed(gfx, 2, *arguments((1, 27, 3, 4), 5, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("gfx", EMULATED)
def test_parts_of_narrow_tiles(gfx):
    for tile in narrow(gfx):
        first, _ = executed(gfx, 3, *arguments((2, 64, 5, 9), 4, 3), tile=tile)
        assert first.grid[1] == 3
        assert first.counters.lds_bank_conflicts == 0


def test_no_part_is_left_without_work():
    # 9 steps in 4 parts of 3 are 3 parts; of one step there is one part, and no second pass.
    first, _ = executed("gfx1201", 4, *arguments((1, 16, 4, 4), 16, 3, adds=False))
    assert first.grid[1] == 3
    (only,) = executed("gfx1201", 4, *arguments((1, 64, 4, 4), 16, 1))
    assert only.kernel == "conv2d"


@pytest.mark.parametrize("gfx", EMULATED)
def test_parts_and_the_second_pass_move_whole_lines(gfx):
    x, weight, _, _, residual, stride, padding = arguments((1, 64, 8, 8), 128, 3)
    first, second = executed(gfx, 3, x, weight, None, None, residual, stride, padding)
    assert first.counters.bytes_stored == first.counters.lines_stored * 128 == 3 * 64 * 128 * 4
    counters = second.counters
    assert counters.coalescing_efficiency >= 0.9
    assert counters.bytes_loaded == 64 * 128 * (3 * 4 + 2)
