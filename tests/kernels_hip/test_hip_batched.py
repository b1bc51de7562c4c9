"""Batched products and bilinear upsampling: what no test of one op covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.hip_compiled import NAIVE
from test_hip_kernels import EMULATED, EmulatedLauncher, executed, lines

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import linear_residual, toolchain
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report

PROMISE = OPS["linear_residual"].verification.promises["_product"]


def configs(gfx):
    return linear_residual.TILES[archs.get(gfx).matrix_unit]


def arguments(B, M, N, K, dtype=torch.float16):
    random = torch.Generator().manual_seed(B * M * N + K)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    return draw(B, M, K), draw(B, N, K) * K**-0.5, draw(B, N), draw(B, M, N)


def reference(x, weight, bias, residual):
    y = x @ weight.mT
    y = y if bias is None else y + bias[:, None]
    return y if residual is None else y + residual


def run(gfx, config, given, *, execute=True):
    launcher = EmulatedLauncher(gfx, execute=execute)
    x, weight, *_ = given
    with launcher.run._allocations:
        y = x.new_empty(x.shape[0], x.shape[1], weight.shape[1])
        linear_residual.launch_batched(*given, y, config, launcher)
    (call,) = launcher.run.calls
    if execute:
        launcher.run.require_written(y)
        require(f"batched_linear on {gfx}", y, reference(*in_float64(given)), reference(*given))
        assert call.counters.bytes_stored == y.numel() * y.element_size()
    return call


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_a_batched_product_passes_the_gates(gfx):
    # The largest takes the most registers; test_hip_gemm has the others.
    call = run(gfx, configs(gfx)[0], arguments(2, 8, 8, 64), execute=False)
    assert [gate.sentence for gate in check(report(call.code), PROMISE) if gate.ok is False] == []
    assert "flat_load" not in call.code.assembly


@pytest.mark.parametrize("gfx", EMULATED)
def test_each_matrix_of_a_batch_meets_its_own(gfx):
    counters = run(gfx, configs(gfx)[-1], arguments(3, 70, 72, 136)).counters
    assert counters.lds_bank_conflicts == 0
    run(gfx, configs(gfx)[-1], arguments(2, 5, 77, 45, torch.bfloat16))
    x, weight, bias, _ = arguments(2, 40, 64, 64)
    # One bias and one weight for all; rows of x that lie apart, as those of one head of many do.
    heads = torch.zeros(40, 2, 64, dtype=x.dtype).transpose(0, 1).copy_(x)
    run(gfx, configs(gfx)[-1], (heads, weight[:1].expand(2, -1, -1), bias[:1].expand(2, -1), None))


@pytest.mark.parametrize("gfx", EMULATED)
def test_the_op_reads_samples_that_lie_apart_in_place_and_copies_them_for_parts_of_k(gfx):
    op = OPS["linear_residual"]
    sample = next(sample for sample in op.verification.small if sample.make(filled=False)[0].dim() == 3)
    x, weight, bias, _ = sample.make()
    residual = arguments(2, 9, 40, 40)[-1]
    for config, kernels in ((configs(gfx)[-1], 1), (replace(configs(gfx)[-1], split_k=2), 1)):
        _, calls = executed("linear_residual", gfx, x, weight, bias, residual, config=config)
        assert len(calls) == kernels
        assert calls[0].kernel == ("batched_linear" if config.split_k == 1 else "linear_residual")
    # Of more steps than one, parts are parts.
    wide = torch.randn(2, 12, 200).half()[:, :9]
    matrix = (torch.randn(40, 200) * 200**-0.5).half()
    _, calls = executed("linear_residual", gfx, wide, matrix, None, None, config=replace(configs(gfx)[-1], split_k=2))
    assert [call.kernel for call in calls] == ["linear_split", "conv2d_finish"]


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_batched_product_moves_whole_lines(gfx):
    x, weight, _, residual = arguments(2, 128, 128, 128)
    config = configs(gfx)[0]
    counters = run(gfx, config, (x, weight, None, residual)).counters
    assert counters.bytes_loaded == counters.lines_loaded * 128
    tiles = 2 * config.tiles(128, 128)
    assert counters.bytes_loaded == tiles * (config.block_m + config.block_n) * 128 * 2 + 2 * 128 * 128 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_bilinear_upsampling_asks_for_fewer_bytes_and_lines_than_the_naive_way(gfx):
    image = torch.randn(1, 8, 8, 128, generator=torch.Generator().manual_seed(8)).half().permute(0, 3, 1, 2)
    (out,), calls = executed("upsample", gfx, image, 2, "bilinear")
    counters = calls[0].counters
    # A pixel's nine neighbours for its four children, where each child alone would read four.
    assert counters.bytes_loaded == 9 * image.numel() * 2
    assert counters.coalescing_efficiency >= 0.9

    launcher, y = EmulatedLauncher(gfx), torch.empty_like(out)
    launcher.launch(Kernel(NAIVE / "upsample.hip", "naive"), (128, 1, 1), (image, y, 128, 8, 8))
    assert torch.allclose(y.float(), out.float(), atol=2e-3)
    assert launcher.run.calls[0].counters.bytes_loaded == 16 * image.numel() * 2
    # Lanes of two bytes: half a line for a wave of 32.
    assert lines(launcher.run.calls) >= (3.0 if gfx != "gfx942" else 1.5) * lines(calls)
