"""Dot products by waves of 64, as gfx906 has them: every source compiled for it, every tile executed.

The emulator does not know gfx906. Its products are made of instructions that gfx942 has too, whose waves are as large.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from code_objects import kernels_of
from test_hip_batched import arguments as batched_arguments
from test_hip_conv2d import arguments as conv2d_arguments
from test_hip_kernels import EmulatedLauncher, run
from test_hip_transformer_block import drawn, keys_and_values
from test_hip_transformer_block import executed as executed_block

from rocm_sd import arch as archs
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import (
    attention,
    conv2d,
    linear_geglu,
    linear_residual,
    norm_geglu,
    norm_linear,
    toolchain,
    transformer_block,
    transformer_plan,
    upsample_conv2d,
)
from rocm_sd.kernels.hip.transformer_plan import TransformerBlockConfig
from rocm_sd.numerics import in_float64, outputs, require
from rocm_sd.ops import OPS
from rocm_sd.ops.definition import KernelPromise
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report

GFX906 = archs.get("gfx906")
MODULES = (attention, conv2d, linear_geglu, linear_residual, norm_geglu, norm_linear, upsample_conv2d)
_CONV = {"kernel_size": (3,), "padded": (1,), "wide": (0, 1), "wide_out": (0, 1)}
HEADS = tuple(attention.DOT_WAVE64)
SMALL = TransformerBlockConfig(norm_linear.DOT_WAVE64[-1], norm_geglu.DOT_WAVE64[-1], attention.DOT_WAVE64[40][0])


class WavesOf64(EmulatedLauncher):
    """The products of gfx906 by the instructions of gfx942."""

    def __init__(self, folder):
        super().__init__("gfx942")
        self.folder = folder

    def launch(self, kernel, grid, arguments):
        text = (toolchain.SOURCES / f"{kernel.source}.hip").read_text()
        source = self.folder / f"{kernel.source}.hip"
        source.write_text(re.sub(r"\b(gemm|\w+_step)<this_arch,", r"\1<gcn5,", text))
        super().launch(replace(kernel, source=source), grid, arguments)


def executed(folder, name, config, arguments):
    """The counters of an op that the emulator found right, without a matrix unit and without meeting a bank twice."""
    op, launcher = OPS[name], WavesOf64(folder)
    with hip_kernels.launched_by(launcher), launcher.run.watching():
        results = outputs(op.implementation("hip")(*arguments, config=config))
    launcher.run.require_written(*results)
    exact = outputs(op.verification.reference(*in_float64(arguments)))
    stock = outputs(op.implementations[0](*arguments))
    for actual, right, usual in zip(results, exact, stock, strict=True):
        require(f"{name} of gfx906", actual, right, usual)
    counted = [call.counters for call in launcher.run.calls]
    assert all(counters.matrix_flops == counters.lds_bank_conflicts == 0 for counters in counted), config
    return counted


def drawn_heads(S, T, H, D, dtype=torch.float16):
    random = torch.Generator().manual_seed(S * T + D)
    q, k, v = (torch.randn((1, rows, H, D), generator=random).to(dtype) for rows in (S, T, T))
    return q, k, v, None


def drawn_gates(M, F, K, dtype=torch.float16):
    random = torch.Generator().manual_seed(M * F + K)
    shapes = ((M, K), (2 * F, K), (2 * F,))
    x, weight, bias = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return x, weight * K**-0.5, bias


# --- which tiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_size_of_waves_decides_where_there_is_no_matrix_unit(module):
    assert module.tiles(GFX906) is module.DOT_WAVE64
    # By what the table says of an architecture, and not by its name.
    assert module.tiles(replace(GFX906, name="gfx1", wave_size=32)) is module.TILES[GFX906.matrix_unit]
    for gfx in toolchain.TARGETS:
        assert module.tiles(archs.get(gfx)) is module.TILES[archs.get(gfx).matrix_unit]
    assert not module.tiles(replace(GFX906, matrix_unit=None))


def whole(config):
    return replace(config, split_k=1) if hasattr(config, "split_k") else config


def test_the_spaces_of_gfx906_are_made_of_its_own_tiles():
    problem = {"m": 8192, "n": 320, "f": 1280, "k": 320, "d": 80, "pixels": 8192, "cin": 320, "cout": 320, "kernel": 3}
    for name, own in (
        ("linear_residual", linear_residual.DOT_WAVE64),
        ("linear_geglu", linear_geglu.DOT_WAVE64),
        ("attention", attention.DOT_WAVE64[80]),
        ("conv2d", conv2d.DOT_WAVE64),
        ("upsample_conv2d", upsample_conv2d.DOT_WAVE64),
    ):
        found = [whole(each) for each in OPS[name].implementation("hip").kernels.space(problem, GFX906)]
        assert all(whole(config) in found for config in own), name
        assert {each.block_m for each in found} == {config.block_m for config in own}


def test_a_block_of_gfx906_is_planned_with_its_own_tiles():
    config = transformer_plan.config_for(8192, 320, 8, GFX906)
    assert config.linear in norm_linear.DOT_WAVE64
    assert config.geglu in norm_geglu.DOT_WAVE64
    assert config.attention == attention.DOT_WAVE64[40][0]


# --- machine code -----------------------------------------------------------------------------------------------------


class Compiling(EmulatedLauncher):
    def __init__(self, gfx):
        super().__init__(gfx, execute=False)
        self.sources = set()

    def launch(self, kernel, grid, arguments):
        super().launch(kernel, grid, arguments)
        self.sources.add(kernel.source)


def test_every_source_passes_the_gates_for_gfx906():
    launcher, promises = Compiling("gfx906"), {}
    for op in OPS.values():
        if any(implementation.name == "hip" for implementation in op.implementations):
            run(op.name, launcher, op.verification.small[0].make(filled=False))
            promises |= op.implementation("hip").kernels.promises
    block, draw = drawn(80, 2)
    x = draw(1, 37, 80)
    transformer_block.launch(x, keys_and_values(draw, 1, 13, 80, 2), block, torch.empty_like(x), SMALL, launcher)
    given = batched_arguments(2, 8, 8, 64)
    linear_residual.launch_batched(*given, torch.empty_like(given[-1]), linear_residual.DOT_WAVE64[-1], launcher)
    x, weight, bias, *_ = conv2d_arguments((1, 128, 4, 4), 64, 3)
    out = torch.empty(1, 64, 4, 4, dtype=x.dtype).contiguous(memory_format=torch.channels_last)
    parts = replace(conv2d.DOT_WAVE64[-1], split_k=4)
    conv2d.launch(x, weight, out, bias, None, None, 1, 1, parts, launcher)
    flat, columns = torch.empty(8, 1024, dtype=x.dtype), torch.empty(64, 1024, dtype=x.dtype)
    parts = replace(linear_residual.DOT_WAVE64[-1], split_k=4)
    linear_residual.launch(flat, columns, None, None, torch.empty(8, 64, dtype=x.dtype), parts, launcher)
    assert launcher.sources == set(toolchain.source_names())
    for call in launcher.run.calls:
        found = check(report(call.code), promises.get(call.kernel, KernelPromise(uses_dot=True)))
        # Value by value is what small and odd shapes cost. A SIMD of gfx906 has half of the registers of others: what
        # leaves room for 8 of 8 waves on gfx942 may leave room for 3 of 10 there.
        broken = [gate.sentence for gate in found if gate.ok is False and gate.name not in {"wide_loads", "waves"}]
        assert broken == [], call.kernel
        assert "flat_load" not in call.code.assembly
        assert "flat_store" not in call.code.assembly


@pytest.mark.slow
@pytest.mark.parametrize("element", ["half", "bfloat"])
def test_no_tile_of_gfx906_spills_wide_or_value_by_value(element):
    products = (
        (linear_residual, "linear_residual", {"wide": (0, 1), "has_bias": (1,), "has_residual": (1,)}),
        (linear_residual, "linear_split", {"wide": (0, 1)}),
        (linear_residual, "batched_linear", {"wide": (0, 1), "has_bias": (1,), "has_residual": (1,)}),
        (linear_residual, "linear_moments", {"has_bias": (1,), "has_residual": (1,)}),
        (linear_geglu, "linear_geglu", {"wide": (0, 1), "has_bias": (1,)}),
        (norm_linear, "norm_linear", {"has_bias": (1,)}),
        (norm_geglu, "norm_geglu", {"has_bias": (1,)}),
        (conv2d, "conv2d", {**_CONV, "has_bias": (1,), "has_add": (1,), "has_residual": (1,)}),
        (conv2d, "conv2d_split", _CONV),
        (conv2d, "upsample_conv2d", {"wide": (0, 1), "wide_out": (0, 1), "has_bias": (1,)}),
    )
    for module, source, choices in products:
        narrow = conv2d.NARROW_TILES[GFX906.matrix_unit] if source == "conv2d" else ()
        for config, values in itertools.product((*module.DOT_WAVE64, *narrow), itertools.product(*choices.values())):
            parameters = {"element": element, **dict(config.parameters), **dict(zip(choices, values, strict=True))}
            for found in kernels_of(toolchain.compile_source(source, "gfx906", parameters)).values():
                assert (found.vgpr_spills, found.sgpr_spills, found.scratch) == (0, 0, 0), (source, parameters)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("D", "dtype"), [(40, torch.float16), (64, torch.bfloat16), (80, torch.bfloat16), (160, torch.float16)], ids=str
)
def test_attention_by_waves_of_64(D, dtype, tmp_path):
    for config in attention.DOT_WAVE64[D]:
        (counters,) = executed(tmp_path, "attention", config, drawn_heads(20, 70, 1, D, dtype))
        assert counters.bytes_stored == 20 * D * 2


@pytest.mark.parametrize("config", linear_geglu.DOT_WAVE64, ids=lambda config: f"{config.block_m}x{config.block_n}")
def test_gated_products_by_waves_of_64(config, tmp_path):
    (counters,) = executed(tmp_path, "linear_geglu", config, drawn_gates(70, 40, 136))
    assert counters.bytes_stored == 70 * 40 * 2


def test_gated_products_of_odd_sizes_by_waves_of_64(tmp_path):
    given = drawn_gates(3, 13, 45, torch.bfloat16)
    (counters,) = executed(tmp_path, "linear_geglu", linear_geglu.DOT_WAVE64[-1], given)
    assert counters.bytes_stored == 3 * 13 * 2


def test_a_block_by_waves_of_64(tmp_path):
    block, draw = drawn(80, 2)
    x, text = draw(1, 37, 80), keys_and_values(draw, 1, 13, 80, 2)
    _, _, calls, _ = executed_block("gfx942", x, text, block, SMALL, launcher=WavesOf64(tmp_path))
    assert {"norm_linear", "norm_geglu", "linear_moments", "attend"} <= {call.kernel for call in calls}
    assert all(call.counters.lds_bank_conflicts == call.counters.matrix_flops == 0 for call in calls)


@pytest.mark.parametrize("config", [*conv2d.DOT_WAVE64, conv2d.NARROW_TILES[GFX906.matrix_unit][-1]])
def test_convolutions_by_waves_of_64(config, tmp_path):
    executed(tmp_path, "conv2d", config, conv2d_arguments((1, 72, 5, 6), 40, 3))


@pytest.mark.parametrize("config", linear_residual.DOT_WAVE64[:-1])
def test_products_by_waves_of_64(config, tmp_path):
    random = torch.Generator().manual_seed(config.block_n)
    shapes = ((70, 136), (72, 136), (72,), (70, 72))
    x, weight, bias, residual = (torch.randn(shape, generator=random).half() for shape in shapes)
    executed(tmp_path, "linear_residual", config, (x, weight * 136**-0.5, bias, residual))


@pytest.mark.slow
@pytest.mark.parametrize("D", HEADS)
def test_every_head_over_several_blocks_by_waves_of_64(D, tmp_path):
    # A block of 128 queries and the begin of another; two whole blocks of 64 keys and the begin of a third.
    for dtype, heads in ((torch.float16, 2), (torch.bfloat16, 1)):
        for config in attention.DOT_WAVE64[D]:
            executed(tmp_path, "attention", config, drawn_heads(133, 141, heads, D, dtype))
