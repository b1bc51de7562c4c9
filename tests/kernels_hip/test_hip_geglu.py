"""linear_geglu: compiled for six architectures through the ladder's gates, executed on three, against float64."""

from __future__ import annotations

import pytest
import torch
from benchmarks.hip_compiled import NAIVE
from test_hip_kernels import EMULATED, EmulatedLauncher, lines

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import linear_geglu, toolchain
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report

OP = OPS["linear_geglu"]


def configs(gfx):
    return linear_geglu.TILES[archs.get(gfx).matrix_unit]


def run(launcher, config, x, weight, bias):
    y = x.new_empty(x.shape[0], weight.shape[0] // 2)
    linear_geglu.launch(x, weight, bias, y, config, launcher)
    return y


def executed(gfx, config, *arguments):
    """The counters of one call that the emulator found right: as close to float64 as stock torch."""
    launcher = EmulatedLauncher(gfx)
    with launcher.run._allocations:
        y = run(launcher, config, *arguments)
    launcher.run.require_written(y)
    exact = OP.verification.reference(*in_float64(arguments))
    require(f"linear_geglu on {gfx}", y, exact, OP.implementations[0](*arguments))
    (call,) = launcher.run.calls
    assert call.counters.bytes_stored == y.numel() * y.element_size()
    return call.counters


def arguments(M, F, K, dtype=torch.float16):
    random = torch.Generator().manual_seed(M * F + K)

    def draw(*shape, std=1.0):
        return (torch.randn(shape, generator=random) * std).to(dtype)

    return draw(M, K), draw(2 * F, K, std=2 * K**-0.5), draw(2 * F)


@pytest.mark.parametrize("case", ["float16", "bfloat16", "bfloat16, odd"])
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_every_tile_of_a_gated_product_passes_the_gates(gfx, case):
    dtype, _, odd = case.partition(", ")
    # The others differ little: of them the largest tile, which takes the most registers.
    for config in configs(gfx) if case == "float16" else configs(gfx)[:1]:
        launcher = EmulatedLauncher(gfx, execute=False)
        run(launcher, config, *arguments(8, 8, 45 if odd else 64, getattr(torch, dtype)))
        (call,) = launcher.run.calls
        found = check(report(call.code), OP.verification.promises["_linear_geglu"])
        # Value by value is what odd shapes cost; the launcher takes it for them alone.
        broken = [gate.sentence for gate in found if gate.ok is False and not (odd and gate.name == "wide_loads")]
        assert broken == [], config
        assert "flat_load" not in call.code.assembly


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("sample", OP.verification.small, ids=lambda sample: sample.name)
def test_small_gated_products_are_as_close_to_float64_as_stock_torch(sample, gfx):
    executed(gfx, configs(gfx)[-1], *sample.make())


@pytest.mark.parametrize("gfx", EMULATED)
def test_gates_belong_to_their_values_over_several_tiles_and_steps(gfx):
    stages = linear_geglu.LinearGegluConfig(64, 128, 64, 2, 2, 2, configs(gfx)[-1].fragment)
    for config in (*configs(gfx), stages):
        assert executed(gfx, config, *arguments(144, 104, 136)).lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
def test_rows_that_lie_apart_and_gates_far_below_zero(gfx):
    x, weight, bias = arguments(3, 24, 40)
    apart, sparse = (torch.zeros(len(t), 48, dtype=t.dtype)[:, :40].copy_(t) for t in (x, weight))
    bias[24:] -= torch.linspace(0, 40, 24).half()
    executed(gfx, configs(gfx)[-1], apart, sparse, bias)


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_gated_product_moves_whole_lines(gfx):
    x, weight, _ = arguments(128, 128, 128)
    config = configs(gfx)[0]
    counters = executed(gfx, config, x, weight, None)
    assert counters.bytes_loaded == counters.lines_loaded * 128
    assert counters.bytes_stored == counters.lines_stored * 128
    assert counters.bytes_loaded == config.tiles(128, 256) * (config.block_m + config.block_n) * 128 * 2
    assert counters.lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
def test_the_naive_gated_product_moves_many_times_the_lines(gfx):
    x, weight, _ = arguments(128, 64, 128)
    counters = executed(gfx, configs(gfx)[0], x, weight, None)

    launcher = EmulatedLauncher(gfx)
    h, y = torch.empty(128, 128, dtype=torch.float16), torch.empty(128, 64, dtype=torch.float16)
    launcher.launch(Kernel(NAIVE / "linear_geglu.hip", "product"), (64, 1, 1), (x, weight, h, 128, 128))
    launcher.launch(Kernel(NAIVE / "linear_geglu.hip", "gate"), (32, 1, 1), (h, y, 64))
    assert torch.allclose(y.float(), OP.verification.reference(x, weight).float(), atol=2e-2)
    assert lines(launcher.run.calls) > 100 * (counters.lines_loaded + counters.lines_stored)


GELU = """
#include <rocm_sd/gelu.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(64) gelu_of(const float* x, float* y) { y[thread_index()] = gelu(x[thread_index()]); }
"""


@pytest.mark.parametrize("gfx", EMULATED)
def test_gelu_has_its_limits_and_a_float_of_precision(gfx, tmp_path):
    file = tmp_path / "gelu.hip"
    file.write_text(GELU)
    x = torch.linspace(-8.5, 8.5, 64)
    x[0], x[1], x[2], x[63] = float("-inf"), -1e30, 0.0, 1e30
    y = torch.empty(64)
    EmulatedLauncher(gfx).launch(Kernel(file, "gelu_of"), (1, 1, 1), (x, y))
    assert y[0].abs() < 1e-17
    exact = x[1:].double() * 0.5 * torch.erfc(-x[1:].double() / 2**0.5)
    # A rounding of the value itself, and what the fit says of itself.
    assert ((y[1:] - exact).abs() <= 1.2e-7 * exact.abs() + 4e-8).all()
    assert y[2] == 0


def test_a_weight_whose_gates_lie_beyond_32_bits_is_refused():
    x, weight, y = (torch.empty(s, dtype=torch.float16, device="meta") for s in ((8, 8), (2**29, 8), (8, 2**28)))
    with pytest.raises(Unsupported, match="gates 268435456 rows"):
        linear_geglu.launch(x, weight, None, y, configs("gfx1100")[0], EmulatedLauncher("gfx1100"))
