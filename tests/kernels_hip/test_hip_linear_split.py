"""linear_residual in parts of K: compiled for six architectures, executed on three, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_hip_kernels import EMULATED, EmulatedLauncher

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import linear_residual, toolchain
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report

OP = OPS["linear_residual"]
KERNELS = OP.implementation("hip").kernels
DTYPES = (torch.float16, torch.bfloat16)


def configs(gfx):
    return linear_residual.TILES[archs.get(gfx).matrix_unit]


def arguments(M, N, K, dtype=torch.float16):
    random = torch.Generator().manual_seed(M * N + K)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    return draw(M, K), draw(N, K) * K**-0.5, draw(N), draw(M, N)


def run(launcher, config, x, weight, bias, residual):
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    linear_residual.launch(x, weight, bias, residual, y, config, launcher)
    return y


def executed(gfx, split_k, given, tile=-1):
    launcher = EmulatedLauncher(gfx)
    with launcher.run._allocations:
        y = run(launcher, replace(configs(gfx)[tile], split_k=split_k), *given)
    # The parts too are written before they are read: the emulator notices what was not.
    launcher.run.require_written(y)
    exact = OP.verification.reference(*in_float64(given))
    require(f"linear_residual in {split_k} parts on {gfx}", y, exact, OP.implementations[0](*given))
    return y, launcher.run.calls


@pytest.mark.parametrize("case", ["float16", "bfloat16", "float16, odd"])
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_both_kernels_of_every_tile_pass_the_gates(gfx, case):
    name, _, odd = case.partition(", ")
    K = 141 if odd else 192
    for config in configs(gfx):
        launcher = EmulatedLauncher(gfx, execute=False)
        run(launcher, replace(config, split_k=3), *arguments(8, 8, K, getattr(torch, name)))
        for call in launcher.run.calls:
            gates = [gate for gate in check(report(call.code), KERNELS.promises[call.kernel]) if gate.ok is False]
            # Value by value is what odd shapes cost; the launcher takes it for them alone.
            assert [gate.sentence for gate in gates if not (odd and gate.name == "wide_loads")] == [], call.kernel
            assert "flat_load" not in call.code.assembly
            assert "flat_store" not in call.code.assembly
        assert [call.kernel for call in launcher.run.calls] == ["linear_split", "conv2d_finish"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gfx", EMULATED)
def test_parts_of_several_tiles_and_a_last_part_that_is_shorter(gfx, dtype):
    # 456 values are 8 steps of 64, the last not whole: in 3 parts of 3, 3 and 2.
    given = arguments(70, 136, 456, dtype)
    for tile in range(len(configs(gfx))):
        _, (first, second) = executed(gfx, 3, given, tile)
        assert first.grid[1] == 3
        assert first.counters.lds_bank_conflicts == 0
        assert first.counters.bytes_stored == 3 * 70 * 136 * 4
        assert second.counters.bytes_stored == 70 * 136 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_parts_of_odd_sizes_and_of_one_row(gfx):
    executed(gfx, 2, arguments(5, 77, 141, torch.bfloat16))
    x, weight, _, residual = arguments(1, 72, 200)
    executed(gfx, 4, (x, weight, None, residual))
    executed(gfx, 4, (x, weight, None, None))


@pytest.mark.parametrize("gfx", EMULATED)
def test_global_memory_moves_in_whole_lines(gfx):
    # Whole tiles and no bias: every byte is asked for by one lane, and counts once.
    x, weight, _, residual = arguments(128, 128, 256)
    for tile, config in enumerate(configs(gfx)):
        _, (first, second) = executed(gfx, 2, (x, weight, None, residual), tile)
        counters = first.counters
        tiles = 128 // config.block_m * (128 // config.block_n)
        assert counters.bytes_loaded == tiles * (config.block_m + config.block_n) * 256 * 2
        assert counters.bytes_loaded == counters.lines_loaded * 128
        # Lanes take four sums each: eight of them would go in two stores, each of half of every line.
        assert counters.bytes_stored == counters.lines_stored * 128 == 2 * 128 * 128 * 4
        assert counters.lds_bank_conflicts == 0
        assert second.counters.bytes_loaded == second.counters.lines_loaded * 128 == 128 * 128 * (2 * 4 + 2)
        assert second.counters.bytes_stored == second.counters.lines_stored * 128


def test_the_same_input_gives_the_same_bits():
    gfx, given = "gfx1201", arguments(70, 72, 320)
    y, calls = executed(gfx, 4, given)
    again, _ = executed(gfx, 4, given)
    assert torch.equal(y, again)
    # No sum is left to whoever comes first.
    assert not any("atomic" in call.code.assembly for call in calls)


def test_no_part_is_left_without_work():
    # 5 steps in 4 parts of 2 are 3 parts; of one step there is one part, and no second pass.
    _, (first, _) = executed("gfx1201", 4, arguments(16, 16, 320))
    assert first.grid[1] == 3
    _, (only,) = executed("gfx1201", 4, arguments(16, 16, 64))
    assert only.kernel == "linear_residual"


@pytest.mark.parametrize("which", ["y", "residual"])
def test_where_rows_lie_apart_there_are_no_parts(which):
    """The kernel that adds up goes through values that follow one another."""
    gfx, (x, weight, bias, residual) = "gfx1100", arguments(16, 24, 256)
    apart = torch.empty(16, 32, dtype=x.dtype)[:, :24]
    y = apart if which == "y" else torch.empty(16, 24, dtype=x.dtype)
    residual = apart.copy_(residual) if which == "residual" else residual
    launcher = EmulatedLauncher(gfx)
    linear_residual.launch(x, weight, bias, residual, y, replace(configs(gfx)[-1], split_k=4), launcher)
    assert [call.kernel for call in launcher.run.calls] == ["linear_residual"]
    exact = OP.verification.reference(*in_float64((x, weight, bias, residual)))
    require("rows that lie apart", y, exact, OP.implementations[0](x, weight, bias, residual))


def test_only_few_tiles_of_a_long_depth_come_in_parts():
    def parts(gfx, m, n, k):
        problem = {"m": m, "n": n, "k": k, "bias": 1, "residual": 1, "dtype": "float16"}
        return {config.split_k for config in KERNELS.space(problem, archs.get(gfx))}

    assert parts("gfx942", 128, 1280, 5120) == {1, 2, 4, 8}
    assert parts("gfx1100", 128, 1280, 5120) == {1, 2, 4}
    assert parts("gfx942", 128, 1280, 640) == {1}
    assert parts("gfx1100", 8192, 640, 640) == {1}
