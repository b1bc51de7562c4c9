"""upsample_conv2d: compiled for six architectures through the ladder's gates, executed on three, against float64."""

from __future__ import annotations

import pytest
import torch
from benchmarks.hip_compiled import NAIVE
from test_hip_conv2d import arguments
from test_hip_kernels import EMULATED, EmulatedLauncher, lines

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import toolchain, upsample, upsample_conv2d
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.ops.upsample_conv2d import op as upsample_conv2d_op
from rocm_sd.ops.upsample_conv2d.parity import parity_weights
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report

OP = OPS["upsample_conv2d"]


def configs(gfx):
    return upsample_conv2d.TILES[archs.get(gfx).matrix_unit]


def run(launcher, config, x, weight, bias, sums):
    out = upsample_conv2d_op._allocate(x, weight)
    upsample_conv2d.launch(x, sums, out, bias, config, launcher)
    return out


def executed(gfx, config, x, weight, bias):
    """The counters of one call that the emulator found right: as close to float64 as stock torch."""
    launcher, sums = EmulatedLauncher(gfx), parity_weights(weight)
    with launcher.run._allocations:
        out = run(launcher, config, x, weight, bias, sums)
    launcher.run.require_written(out)
    given = (x, weight, bias, sums)
    exact = OP.verification.reference(*in_float64(given))
    require(f"upsample_conv2d on {gfx}", out, exact, OP.implementations[0](*given))
    (call,) = launcher.run.calls
    assert call.counters.bytes_stored == out.numel() * out.element_size()
    return call.counters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_an_enlarging_convolution_passes_the_gates(gfx, dtype):
    # The largest tile takes the most registers; test_hip_conv2d has the others.
    launcher = EmulatedLauncher(gfx, execute=False)
    x, weight, bias, *_ = arguments((1, 64, 4, 4), 64, 3, dtype=dtype)
    run(launcher, configs(gfx)[0], x, weight, bias, parity_weights(weight))
    (call,) = launcher.run.calls
    found = check(report(call.code), OP.verification.promises["_upsample_conv2d"])
    assert [gate.sentence for gate in found if gate.ok is False] == []
    assert "flat_load" not in call.code.assembly


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("sample", OP.verification.small, ids=lambda sample: sample.name)
def test_small_enlarging_convolutions_are_as_close_to_float64_as_stock_torch(sample, gfx):
    executed(gfx, configs(gfx)[-1], *sample.make()[:3])


@pytest.mark.parametrize("gfx", EMULATED)
def test_parities_of_tiles_that_cross_lines_and_pictures(gfx):
    x, weight, bias, *_ = arguments((2, 80, 6, 7), 72, 3)
    for config in configs(gfx)[::2]:
        assert executed(gfx, config, x, weight, bias).lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
def test_lines_against_the_naive_way_and_against_an_enlarged_picture(gfx):
    x, weight, *_ = arguments((1, 64, 8, 8), 64, 3, adds=False)
    counters = executed(gfx, configs(gfx)[-1], x, weight, None)
    assert counters.lds_bank_conflicts == 0
    assert counters.coalescing_efficiency >= 0.9
    assert counters.bytes_stored == counters.lines_stored * 128
    # 2x2 taps for each of four parities, where an enlarged picture has 3x3 for each of four times the pixels.
    assert counters.matrix_flops == 2 * 4 * (8 * 8) * 4 * 64 * 64

    launcher, y = EmulatedLauncher(gfx), upsample_conv2d_op._allocate(x, weight)
    enlarged = torch.empty_like(y)
    upsample.launch(x, enlarged, 2, "nearest", launcher)
    launcher.launch(Kernel(NAIVE / "conv2d.hip", "naive"), (64, 1, 1), (enlarged, weight, y, 16, 16, 64, 64))
    assert torch.allclose(y.float(), OP.verification.reference(x, weight).float(), atol=4e-3)
    assert lines(launcher.run.calls) > 100 * (counters.lines_loaded + counters.lines_stored)
