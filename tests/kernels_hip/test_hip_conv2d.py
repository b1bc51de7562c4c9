"""conv2d: compiled for six architectures through the ladder's gates, executed on three, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.hip_compiled import NAIVE
from test_hip_kernels import EMULATED, EmulatedLauncher, lines

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import conv2d, toolchain
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.ops.conv2d import op as conv2d_op
from rocm_sd.ops.layouts import joined
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.runner import emulated

OP = OPS["conv2d"]
KERNELS = OP.implementation("hip").kernels


def configs(gfx):
    return conv2d.TILES[archs.get(gfx).matrix_unit]


def narrow(gfx):
    return conv2d.NARROW_TILES[archs.get(gfx).matrix_unit]


def run(launcher, config, x, weight, bias, add, residual, stride, padding, concat=None):
    x = joined(x, concat).contiguous(memory_format=torch.channels_last)
    out = conv2d_op._allocate(x, weight, stride, padding)
    conv2d.launch(x, weight, out, bias, add, residual, stride, padding, config, launcher)
    return out


def executed(gfx, config, *arguments):
    """The counters of one call that the emulator found right: as close to float64 as stock torch."""
    launcher = EmulatedLauncher(gfx)
    with launcher.run._allocations:
        out = run(launcher, config, *arguments)
    launcher.run.require_written(out)
    exact = OP.verification.reference(*in_float64(arguments))
    require(f"conv2d on {gfx}", out, exact, OP.implementations[0](*arguments))
    (call,) = launcher.run.calls
    assert call.counters.bytes_stored == out.numel() * out.element_size()
    return call.counters


def arguments(shape, cout, size, *, stride=1, padding=None, dtype=torch.float16, adds=True):
    random = torch.Generator().manual_seed(sum(shape) + cout)
    N, Cin, H, W = shape
    padding = size // 2 if padding is None else padding

    def draw(*shape, std=1.0):
        return (torch.randn(shape, generator=random) * std).to(dtype)

    def image(N, C, H, W, std=1.0):
        return draw(N, H, W, C, std=std).permute(0, 3, 1, 2)

    x, weight = image(*shape), image(cout, Cin, size, size, std=(Cin * size * size) ** -0.5)
    Ho, Wo = ((extent + 2 * padding - size) // stride + 1 for extent in (H, W))
    given = (draw(cout), draw(N, cout), image(N, cout, Ho, Wo)) if adds else (None, None, None)
    return x, weight, *given, stride, padding


# Channels, kernel, dtype. Four channels come 8 bytes at a time and go value by value; three do both value by value.
CASES = {
    "3x3": (64, 64, 3, torch.float16),
    "3x3, bfloat16": (64, 64, 3, torch.bfloat16),
    "1x1": (64, 64, 1, torch.float16),
    "first of a UNet": (4, 64, 3, torch.bfloat16),
    "last of a UNet": (64, 4, 3, torch.float16),
    "first of a VAE": (3, 64, 3, torch.float16),
}
WIDE_LOADS = {"first of a UNet": None, "first of a VAE": None}  # elsewhere they are held to


def promise_of(kernel, problem):
    return KERNELS.for_problem(KERNELS.promises[kernel], problem)


def gates_of(gfx, config, case):
    cin, cout, size, dtype = CASES[case]
    launcher = EmulatedLauncher(gfx, execute=False)
    given = arguments((1, cin, 8, 8), cout, size, dtype=dtype)
    run(launcher, config, *given)
    (call,) = launcher.run.calls
    assert "flat_load" not in call.code.assembly
    assert "flat_store" not in call.code.assembly
    return check(report(call.code), promise_of("conv2d", OP.verification.problem(*given)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_every_tile_of_a_convolution_passes_the_gates(gfx, case):
    # The others differ little: of them the largest tile, which takes the most registers.
    for config in configs(gfx) if case == "3x3" else configs(gfx)[:1]:
        gates = gates_of(gfx, config, case)
        assert [gate.sentence for gate in gates if gate.ok is False] == []
        # True and not None: the loads of a turned loop are found, which says of each that it is 16 bytes.
        assert {gate.name: gate.ok for gate in gates}["wide_loads"] is WIDE_LOADS.get(case, True)


def test_only_channels_that_no_wide_load_fits_are_excused():
    reasons = {cin: promise_of("conv2d", {"cin": cin}).narrow_loads_because for cin in (3, 4, 6, 8, 12, 320)}
    assert reasons[8] is reasons[320] is None
    assert "any multiple of 2 bytes" in reasons[3]
    assert "any multiple of 4 bytes" in reasons[6]
    assert "multiples of 8 bytes, and the next one may lie outside" in reasons[4]
    assert reasons[4] == reasons[12].replace("12", "4")
    # The last kernel of several parts has a reason of its own.
    assert promise_of("conv2d_finish", {"cin": 4}) == KERNELS.promises["conv2d_finish"]


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("sample", OP.verification.small, ids=lambda sample: sample.name)
def test_small_convolutions_are_as_close_to_float64_as_stock_torch(sample, gfx):
    executed(gfx, configs(gfx)[-1], *sample.make())


@pytest.mark.parametrize("gfx", EMULATED)
def test_tiles_that_cross_lines_pictures_and_edges(gfx):
    # 2 x 7 x 11 pixels end within the second or third tile, and 72 channels within the second; 80 are a step and a bit.
    for config in (*configs(gfx), conv2d.Conv2dConfig(64, 64, 64, 2, 2, 2, 16)):
        counters = executed(gfx, config, *arguments((2, 80, 7, 11), 72, 3))
        assert counters.lds_bank_conflicts == 0


# What stands where is worked out by the same code for all: each case on one of them.
@pytest.mark.parametrize(
    ("gfx", "shape", "size", "stride", "padding"),
    [
        ("gfx1100", (2, 24, 9, 7), 3, 2, 1),
        ("gfx1201", (2, 24, 9, 7), 3, 2, 0),
        ("gfx942", (3, 16, 5, 6), 1, 2, 0),
        # Whole lines of taps outside, and places that see nothing of the picture at all.
        ("gfx1100", (1, 8, 2, 3), 3, 1, 3),
        ("gfx1201", (2, 8, 3, 2), 1, 1, 2),
        ("gfx942", (5, 8, 1, 1), 3, 1, 1),
        ("gfx1201", (1, 3, 6, 5), 3, 2, 1),
        # Fours: of one pixel and of three, over two pictures, a step of 64 values and a bit, and far outside.
        ("gfx1100", (2, 4, 5, 6), 3, 1, 1),
        ("gfx1201", (2, 12, 5, 6), 3, 1, 3),
        ("gfx942", (2, 12, 9, 7), 3, 2, 1),
        ("gfx942", (2, 68, 3, 3), 1, 1, 1),
        ("gfx942", (2, 5, 4, 4), 1, 3, 1),
    ],
)
def test_strides_and_paddings(gfx, shape, size, stride, padding):
    executed(gfx, configs(gfx)[-1], *arguments(shape, 24, size, stride=stride, padding=padding))


@pytest.mark.parametrize("gfx", EMULATED)
def test_global_memory_moves_in_whole_lines_without_bank_conflicts(gfx):
    # No padding, whole tiles: every byte is asked for by one lane, and counts once. 8 x 16 places.
    x, weight, _, _, residual, stride, padding = arguments((1, 64, 10, 18), 128, 3, padding=0)
    config = configs(gfx)[1]
    counters = executed(gfx, config, x, weight, None, None, residual, stride, padding)
    assert counters.lds_bank_conflicts == 0
    assert counters.bytes_loaded == counters.lines_loaded * 128
    assert counters.bytes_stored == counters.lines_stored * 128
    tiles = config.tiles(128, 128)
    assert counters.bytes_loaded == tiles * (config.block_m + config.block_n) * 9 * 64 * 2 + 128 * 128 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_four_channels_ask_for_a_third_of_the_lines_that_single_values_do(gfx):
    given = arguments((1, 4, 8, 16), 64, 3, adds=False)
    fours = executed(gfx, configs(gfx)[-1], *given)
    # Two bytes on from the begin of a tensor no load of 8 bytes is possible.
    x = torch.empty(given[0].numel() + 1, dtype=torch.float16)[1:].view(1, 8, 16, 4).permute(0, 3, 1, 2)
    single = executed(gfx, configs(gfx)[-1], x.copy_(given[0]), *given[1:])
    assert fours.lines_loaded < 0.4 * single.lines_loaded
    assert fours.wave_instructions < 0.75 * single.wave_instructions
    assert fours.lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_every_narrow_tile_passes_the_gates(gfx):
    # What a narrow tile is for, and what takes the most registers.
    for config in narrow(gfx):
        for case in ("last of a UNet", "3x3, bfloat16", "first of a VAE"):
            assert [gate.sentence for gate in gates_of(gfx, config, case) if gate.ok is False] == []


@pytest.mark.parametrize("gfx", EMULATED)
def test_narrow_tiles_of_few_channels_and_of_more_than_they_have(gfx):
    for config in narrow(gfx):
        for cout, dtype in ((3, torch.float16), (4, torch.bfloat16), (40, torch.float16)):
            counters = executed(gfx, config, *arguments((2, 80, 7, 11), cout, 3, dtype=dtype))
            assert counters.lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_narrow_tile_multiplies_a_fraction_and_moves_whole_lines(gfx):
    # No padding, whole tiles, and as many filters as columns: every byte is asked for by one lane.
    config = narrow(gfx)[0]
    few = arguments((1, 64, 10, 18), config.block_n, 3, padding=0, adds=False)
    counters = executed(gfx, config, *few)
    assert counters.bytes_loaded == counters.lines_loaded * 128 == (128 + config.block_n) * 9 * 64 * 2
    assert counters.lds_bank_conflicts == 0
    wide = executed(gfx, configs(gfx)[-1], *few)
    assert counters.matrix_flops * 64 == wide.matrix_flops * config.block_n


def test_narrow_tiles_are_tried_where_all_channels_fit_in_one():
    def widths(gfx, cout):
        problem = {"pixels": 8192, "cin": 320, "cout": cout, "kernel": 3}
        return {config.block_n for config in KERNELS.space(problem, archs.get(gfx))}

    assert widths("gfx1100", 4) == widths("gfx1201", 16) == {16, 64, 128}
    assert widths("gfx942", 4) == widths("gfx1030", 32) == {32, 64, 128}
    assert widths("gfx1100", 17) == widths("gfx942", 33) == {64, 128}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_convolution_of_gfx1030(dtype, tmp_path):
    """The emulator does not know it; its products are made of instructions that gfx1100 has too."""
    text = (toolchain.SOURCES / "conv2d.hip").read_text()
    assert "gemm<this_arch," in text
    file = tmp_path / "conv2d.hip"
    file.write_text(text.replace("gemm<this_arch,", "gemm<rdna2,"))

    class Launcher(EmulatedLauncher):
        def launch(self, kernel, grid, arguments):
            super().launch(replace(kernel, source=file), grid, arguments)

    for config in (configs("gfx1030")[-1], narrow("gfx1030")[-1]):
        given = arguments((1, 72, 5, 6), 40, 3, dtype=dtype)
        launcher = Launcher("gfx1100")
        out = run(launcher, config, *given)
        stock = OP.implementations[0](*given)
        require("conv2d of gfx1030", out, OP.verification.reference(*in_float64(given)), stock)
        assert launcher.run.calls[0].counters.matrix_flops == 0
        assert launcher.run.calls[0].counters.lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
def test_the_naive_convolution_moves_many_times_the_lines(gfx):
    x, weight, *_ = given = arguments((1, 64, 8, 16), 128, 3, adds=False)
    counters = executed(gfx, configs(gfx)[0], *given)
    assert counters.coalescing_efficiency >= 0.9

    launcher, y = EmulatedLauncher(gfx), conv2d_op._allocate(x, weight, 1, 1)
    launcher.launch(Kernel(NAIVE / "conv2d.hip", "naive"), (64, 1, 1), (x, weight, y, 8, 16, 64, 128))
    assert torch.allclose(y.float(), OP.verification.reference(*given).float(), atol=2e-3)
    naive = launcher.run.calls[0].counters
    # Each lane reads a row of the weights of its own, two bytes a line.
    assert naive.coalescing_efficiency < 0.05
    # The founding claim is a factor of 4 for coalesced accesses; here tiles save reads besides.
    assert lines(launcher.run.calls) > 100 * (counters.lines_loaded + counters.lines_stored)


def test_beside_triton_no_wave_is_lost_on_gfx1100():
    given = OP.verification.real[0].make(filled=False)
    waves = []
    for config in configs("gfx1100"):
        launcher = EmulatedLauncher("gfx1100", execute=False)
        run(launcher, config, *given)
        waves.append(report(launcher.run.calls[0].code).waves_per_simd)
    config = OP.config_of("triton", OP.lookup("gfx1100", OP.verification.problem(*given)))
    with emulated(OP.verification.kernels, "gfx1100", execute=False) as recorded:
        OP.implementation("triton")(*given, config=config)
    assert max(waves) >= report(recorded.calls[0].code).waves_per_simd


def test_a_tile_that_reaches_too_far_is_refused():
    x = torch.empty(1, 8, 2, 2**26, dtype=torch.float16, device="meta")
    weight = torch.empty(8, 8, 1, 1, dtype=torch.float16, device="meta")
    with pytest.raises(Unsupported, match="lines of 67108864 pixels"):
        run(EmulatedLauncher("gfx1100"), configs("gfx1100")[0], x, weight, None, None, None, 2, 0)
