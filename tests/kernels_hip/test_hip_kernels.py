"""Every HIP kernel: compiled for six architectures through the ladder's gates, executed on three, against float64."""

from __future__ import annotations

import re

import pytest
import torch
from benchmarks.hip_compiled import NAIVE

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import layer_norm_residual, toolchain
from rocm_sd.kernels.hip.group_norm_silu import GroupNormSiluConfig
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64, outputs, require
from rocm_sd.ops import OPS
from rocm_sd.verify.emulator import LdsRace
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.ladder import EMULATED
from rocm_sd.verify.runner import EmulatedLauncher, emulated, total

try:
    toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)


RUN = ("layout_copy", "layer_norm_residual", "group_norm_silu", "upsample")


def run(name, launcher, arguments, config=None):
    """The op's own implementation, by this launcher."""
    implementation = OPS[name].implementation("hip")
    config = implementation.default if config is None else config
    with hip_kernels.launched_by(launcher), launcher.run.watching():
        return implementation(*arguments, config=config)


def own(name):
    return OPS[name].verification.of_its_own(OPS[name].implementation("hip"))


SMALL = [pytest.param(name, sample, id=f"{name}: {sample.name}") for name in RUN for sample in own(name).small]


def executed(name, gfx, *arguments, config=None):
    """The op's results by the emulator, proven whole and as close to float64 as stock torch, and what was counted."""
    op, launcher = OPS[name], EmulatedLauncher(gfx)
    exact = outputs(op.verification.reference(*in_float64(arguments)))
    stock = outputs(op.implementations[0](*arguments))
    results = outputs(run(name, launcher, arguments, config))
    launcher.run.require_written(*results)
    for actual, right, usual in zip(results, exact, stock, strict=True):
        require(f"{name} on {gfx}", actual, right, usual)
    return results, launcher.run.calls


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize(("name", "sample"), SMALL)
def test_small_samples_are_as_close_to_float64_as_stock_torch(name, sample, gfx):
    _, calls = executed(name, gfx, *sample.make())
    assert calls


def gated(name, gfx):
    """Every kernel of the op's real samples through the gates: (kernel, report), once for each code object."""
    seen = {}
    for sample in own(name).real:
        launcher = EmulatedLauncher(gfx, execute=False)
        run(name, launcher, sample.make(filled=False))
        for call in launcher.run.calls:
            if (call.code.elf, call.kernel) not in seen:
                seen[call.code.elf, call.kernel] = report(call.code)
    return [(kernel, facts) for (_, kernel), facts in seen.items()]


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
@pytest.mark.parametrize("name", RUN)
def test_real_samples_pass_every_gate(name, gfx):
    found = gated(name, gfx)
    assert found
    promises = OPS[name].implementation("hip").kernels.promises
    for kernel, facts in found:
        broken = [f"{gate.name}: {gate.sentence}" for gate in check(facts, promises[kernel]) if gate.ok is False]
        assert not broken, (kernel, broken)


def test_a_wave_of_64_turns_its_tile_without_lds_and_a_wave_of_32_needs_half_of_it():
    lds = {gfx: gated("layout_copy", gfx)[0][1].lds for gfx in toolchain.TARGETS}
    assert lds == {"gfx1030": 4096, "gfx90a": 0, "gfx942": 0, "gfx1100": 4096, "gfx1200": 4096, "gfx1201": 4096}


def lines(calls):
    counted = total([call.counters for call in calls])
    return counted.lines_loaded + counted.lines_stored


@pytest.mark.parametrize("gfx", EMULATED)
def test_the_layout_copy_moves_whole_cache_lines_and_meets_no_bank_twice(gfx):
    x = torch.randn(1, 128, 16, 16).half()
    _, calls = executed("layout_copy", gfx, x, True)
    counted = calls[0].counters
    assert counted.coalescing_efficiency == 1.0
    assert counted.lds_bank_conflicts == 0
    assert lines(calls) * 128 == 2 * x.numel() * 2
    _, calls = executed("layout_copy", gfx, x.to(memory_format=torch.channels_last), False)
    assert calls[0].counters.coalescing_efficiency == 1.0

    launcher, y = EmulatedLauncher(gfx), torch.empty(1, 16, 16, 128, dtype=torch.float16)
    launcher.launch(Kernel(NAIVE / "layout_copy.hip", "naive"), (128, 1, 1), (x, y, 128, 256))
    assert torch.equal(y.permute(0, 3, 1, 2), x)
    # The founding claim is a factor of 4 for coalesced accesses; a transpose without tiles wastes more.
    assert lines(launcher.run.calls) > 16 * lines(calls)


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize(("C", "dtype"), [(3, torch.float16), (4, torch.bfloat16), (3, torch.float32), (8, torch.half)])
def test_latents_and_pictures_move_in_whole_lines_too(C, dtype, gfx):
    # More than one block of 512 pixels, the last of them not full.
    x = torch.randn(2, C, 32, 20).to(dtype)
    for given, last in ((x, True), (x.to(memory_format=torch.channels_last), False)):
        _, calls = executed("layout_copy", gfx, given, last)
        assert calls[0].kernel == "layout_copy_few"
        counted = calls[0].counters
        assert lines(calls) * 128 == 2 * x.numel() * x.element_size()
        # Values of 3 channels for 32 lanes lie over more banks than there are: two lanes meet in some.
        assert counted.lds_bank_conflicts <= (counted.lds_accesses * counted.wave_size // 32 if C == 3 else 0)


@pytest.mark.parametrize("gfx", EMULATED)
def test_norms_and_upsampling_use_nine_tenths_of_the_cache_lines_they_touch(gfx):
    x = torch.randn(48, 320).half()
    _, calls = executed("layer_norm_residual", gfx, x, x + 1, None, None, 1e-5)
    assert lines(calls) * 128 == 4 * x.numel() * 2

    image = torch.randn(1, 8, 8, 128).half().permute(0, 3, 1, 2)
    for mode in ("nearest", "bilinear"):
        _, calls = executed("upsample", gfx, image, 2, mode)
        assert calls[0].counters.coalescing_efficiency >= 0.9, mode

    config = GroupNormSiluConfig(whole_values=8)
    large = torch.randn(1, 33, 64, 128).half().permute(0, 3, 1, 2)
    _, calls = executed("group_norm_silu", gfx, large, 8, None, None, None, 1e-5, True, config=config)
    found = {call.kernel.removeprefix("group_norm_silu_"): call.counters for call in calls}
    assert list(found) == ["moments", "fold", "apply"]
    assert found["moments"].coalescing_efficiency >= 0.9
    assert found["apply"].coalescing_efficiency >= 0.9
    assert found["moments"].lds_bank_conflicts == 0


def test_a_long_slice_takes_the_loop_with_four_loads_in_flight():
    image = torch.randn(1, 31, 43, 72).half().permute(0, 3, 1, 2)
    config = GroupNormSiluConfig(whole_values=8, slices_per_cu=0)
    _, calls = executed("group_norm_silu", "gfx1100", image, 2, None, None, None, 1e-5, True, config=config)
    assert calls[0].grid == (1, 2, 1)


def test_tensors_that_begin_anywhere_and_rows_that_stand_apart():
    flat = torch.randn(8 + 64 * 64).half()
    for first, kernel in ((8, "layout_copy_wide"), (1, "layout_copy_plain")):
        _, calls = executed("layout_copy", "gfx1100", flat[first : first + 64 * 64].view(1, 64, 4, 16), True)
        assert calls[0].kernel == kernel
    apart = torch.randn(5, 700).half()[:, :320]
    executed("layer_norm_residual", "gfx942", apart, None, None, None, 1e-5)


def test_a_row_of_several_waves_and_an_uneven_one():
    x = torch.randn(3, 2048).half()
    executed("layer_norm_residual", "gfx1100", x, x * 2, x[0], x[1], 1e-5)
    executed("layer_norm_residual", "gfx942", x[:, :1999], None, None, None, 1e-5)
    with pytest.raises(Unsupported, match="do not stay in registers"):
        layer_norm_residual.row_split(8 * 1024 + 1, 32)


def test_a_row_is_split_with_no_idle_lane_where_that_can_be():
    splits = {C: layer_norm_residual.row_split(C // 8, 32) for C in (320, 640, 768, 1280, 2048)}
    assert splits == {320: (8, 5), 640: (16, 5), 768: (32, 3), 1280: (32, 5), 2048: (256, 1)}
    assert layer_norm_residual.row_split(1, 32) == (1, 1)
    assert layer_norm_residual.row_split(77, 32) == (16, 5)


def test_on_a_wave_of_64_a_few_idle_lanes_leave_room_for_every_wave():
    assert layer_norm_residual.row_split(40, 64) == (16, 3)
    assert {facts.waves_per_simd for _, facts in gated("layer_norm_residual", "gfx942")} == {8}


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201"])
def test_a_missing_barrier_is_noticed(gfx, tmp_path):
    text = (toolchain.SOURCES / "layout_copy.hip").read_text()
    broken, removed = re.subn(
        r"( +)barrier\(\);\n#pragma unroll\n( +)for \(int j", r"#pragma unroll\n\2for (int j", text
    )
    assert removed == 1
    file = tmp_path / "layout_copy.hip"
    file.write_text(broken)
    x, y = torch.randn(64, 64).half(), torch.empty(64, 64, dtype=torch.float16)
    kernel = Kernel(file, "layout_copy_wide", (("element", "bits16"), ("channels", 1), ("last", 1)))
    with pytest.raises(LdsRace):
        EmulatedLauncher(gfx).launch(kernel, (1, 1, 1), (x, y, 64, 64))


def beside_triton(name, gfx, sample):
    """{"hip": {kernel: figures}, "triton": {kernel: figures}} of one call: registers, LDS, waves a SIMD."""
    verification, arguments = OPS[name].verification, sample.make(filled=False)
    launcher = EmulatedLauncher(gfx, execute=False)
    run(name, launcher, arguments)
    calls = {"hip": launcher.run.calls}
    if launcher.arch.triton_supported:
        config = OPS[name].config_of("triton", OPS[name].lookup(gfx, verification.problem(*arguments)))
        with emulated(verification.kernels, gfx, execute=False) as recorded:
            OPS[name].implementation("triton")(*arguments, config=config)
        calls["triton"] = recorded.calls
    figures = ("vgprs", "lds", "waves_per_simd")
    return {
        implementation: {
            call.kernel: {figure: getattr(report(call.code), figure) for figure in figures} for call in found
        }
        for implementation, found in calls.items()
    }


@pytest.mark.parametrize("name", RUN)
def test_beside_triton_no_wave_is_lost_on_gfx1100(name):
    table = beside_triton(name, "gfx1100", OPS[name].verification.real[0])
    waves = {who: min(figures["waves_per_simd"] for figures in table[who].values()) for who in table}
    lds = {who: max(figures["lds"] for figures in table[who].values()) for who in table}
    assert waves["hip"] >= waves["triton"], table
    assert lds["hip"] <= max(lds["triton"], 8704), table


def test_where_triton_compiles_nothing_hip_does():
    sample = OPS["layout_copy"].verification.real[0]
    assert set(beside_triton("layout_copy", "gfx1030", sample)) == {"hip"}
