"""The transformer block in HIP: compiled for six architectures, executed on three against float64, bytes counted."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import (
    attention,
    layer_norm_residual,
    linear_geglu,
    linear_moments,
    linear_residual,
    norm_geglu,
    norm_linear,
    row_moments,
    toolchain,
    transformer_block,
)
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.kernels.hip.transformer_block import Attended, FeedForward, Linear, Norm, TransformerBlock
from rocm_sd.kernels.hip.transformer_plan import NORM_OPERATIONS, TransformerBlockConfig
from rocm_sd.numerics import require
from rocm_sd.ops.definition import KernelPromise
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.ladder import EMULATED
from rocm_sd.verify.runner import EmulatedLauncher, total

try:
    toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = (torch.float16, torch.bfloat16)


# --- the definition ---------------------------------------------------------------------------------------------------


def normed(x, norm):
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def linear(x, layer):
    return functional.linear(x, layer.weight, layer.bias)


def attended(x, part, heads, text=None):
    packed = linear(normed(x, part.norm), part.project)
    q, *own = packed.unflatten(-1, (-1, heads, x.shape[-1] // heads)).unbind(2)
    k, v = (each.transpose(1, 2) for each in (own if text is None else text))
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, scale=part.scale)
    return x + linear(out.transpose(1, 2).flatten(2), part.out)


def reference(x, text, block):
    """Plain torch, in the dtype of what it is given."""
    x = attended(x, block.itself, block.heads)
    if block.text is not None:
        x = attended(x, block.text, block.heads, text)
    last = block.feed_forward
    value, gate = linear(normed(x, last.norm), last.gate).chunk(2, -1)
    return x + linear(value * functional.gelu(gate), last.out)


def in_float64(value):
    """The same in float64: of a tensor, a tuple, or the weights of a block."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, Norm):
        return Norm(*(in_float64(each) for each in value))
    if isinstance(value, tuple):
        return tuple(in_float64(each) for each in value)
    fields = getattr(value, "__dataclass_fields__", ())
    return replace(value, **{name: in_float64(getattr(value, name)) for name in fields}) if fields else value


# --- what is given ----------------------------------------------------------------------------------------------------


def drawn(C, heads, dtype=torch.float16, *, text=True, seed=0):
    random = torch.Generator().manual_seed(seed + C)

    def draw(*shape, std=1.0):
        return (torch.randn(shape, generator=random) * std).to(dtype)

    def layer(n, k, *, bias=True):
        return Linear(draw(n, k, std=k**-0.5), draw(n, std=0.1) if bias else None)

    def norm():
        return Norm((1 + draw(C, std=0.2)).to(dtype), draw(C, std=0.2))

    block = TransformerBlock(
        heads,
        Attended(norm(), layer(3 * C, C, bias=False), layer(C, C)),
        Attended(norm(), layer(C, C, bias=False), layer(C, C)) if text else None,
        FeedForward(norm(), layer(8 * C, C), layer(C, 4 * C)),
    )
    return block, draw


def small(gfx, head):
    unit = archs.get(gfx).matrix_unit
    chosen = attention.configs(head, archs.get(gfx))[0]
    return TransformerBlockConfig(linear_residual.TILES[unit][-1], linear_geglu.TILES[unit][-1], chosen)


def executed(gfx, x, text, block, config=None, moments=None, launcher=None):
    """The block by the emulator, proven whole and as close to float64 as stock torch."""
    launcher = launcher or EmulatedLauncher(gfx)
    config = config or small(gfx, x.shape[-1] // block.heads)
    with launcher.run.watching():
        y = torch.empty(x.shape, dtype=x.dtype)
        after = transformer_block.launch(x, text, block, y, config, launcher, moments=moments)
    launcher.run.require_written(y, after.data)
    exact = reference(in_float64(x), in_float64(text), in_float64(block))
    comparison = require(f"transformer_block on {gfx}", y, exact, reference(x, text, block))
    return y, after, launcher.run.calls, comparison


def keys_and_values(draw, B, T, C, heads):
    return tuple(draw(B, T, heads, C // heads) for _ in range(2))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_block_is_as_close_to_float64_as_stock_torch(gfx, record_property):
    for dtype in DTYPES if gfx == "gfx1201" else DTYPES[:1]:
        block, draw = drawn(80, 2, dtype)
        x, text = draw(2, 37, 80), keys_and_values(draw, 2, 13, 80, 2)
        _, _, calls, comparison = executed(gfx, x, text, block)
        record_property(f"{gfx} {dtype}", str(comparison))
        assert [call.kernel for call in calls] == [
            "row_moments", "norm_linear", "attend", "linear_moments", "norm_linear", "attend", "linear_moments",
            "norm_geglu", "linear_moments",
        ]  # fmt: skip
        assert all(call.counters.lds_bank_conflicts == 0 for call in calls)


@pytest.mark.parametrize("gfx", EMULATED)
def test_norms_by_themselves_and_no_text(gfx):
    block, draw = drawn(64, 1, text=False)
    config = replace(small(gfx, 64), fold=(False, False, False))
    _, _, calls, _ = executed(gfx, draw(1, 21, 64), None, block, config)
    assert [call.kernel for call in calls] == [
        "layer_norm_residual", "linear_residual", "attend", "linear_moments",
        "layer_norm_residual", "linear_geglu", "linear_moments",
    ]  # fmt: skip


def test_the_moments_of_one_block_serve_the_next():
    gfx = "gfx1201"
    first, draw = drawn(80, 2, text=False)
    second, _ = drawn(80, 2, text=False, seed=1)
    y, moments, _, _ = executed(gfx, draw(1, 37, 80), None, first)
    # Two parts of 64 columns and of 16.
    assert moments.data.shape == (37, 2, 2)
    _, _, calls, _ = executed(gfx, y, None, second, moments=moments)
    assert [call.kernel for call in calls][:2] == ["norm_linear", "attend"]


def test_a_block_in_the_place_of_its_input_gives_the_same_bits():
    block, draw = drawn(80, 2, text=False)
    x = draw(1, 70, 80)
    y, _, _, _ = executed("gfx1201", x, None, block)
    transformer_block.launch(x, None, block, x, small("gfx1201", 40), EmulatedLauncher("gfx1201"))
    assert torch.equal(x, y)


def test_keys_and_values_of_the_text_by_one_product():
    block, draw = drawn(80, 2)
    text, weights = draw(2, 13, 96), Linear(draw(160, 96, std=0.1), None)
    launcher = EmulatedLauncher("gfx1100")
    k, v = transformer_block.keys_values(text, weights, 2, small("gfx1100", 40).linear, launcher)
    exact = linear(in_float64(text), in_float64(weights)).unflatten(-1, (2, 2, 40)).unbind(2)
    stock = linear(text, weights).unflatten(-1, (2, 2, 40)).unbind(2)
    for found, right, usual in zip((k, v), exact, stock, strict=True):
        require("keys and values", found, right, usual)
    executed("gfx1100", draw(2, 5, 80), (k, v), block)


class DotProducts(EmulatedLauncher):
    """The emulator does not know gfx1030; its products are made of instructions that gfx1100 has too."""

    def __init__(self, folder):
        super().__init__("gfx1100")
        self.folder = folder

    def launch(self, kernel, grid, arguments):
        text = (toolchain.SOURCES / f"{kernel.source}.hip").read_text()
        source = self.folder / f"{kernel.source}.hip"
        source.write_text(re.sub(r"\b(gemm|\w+_step)<this_arch,", r"\1<rdna2,", text))
        super().launch(replace(kernel, source=source), grid, arguments)


def test_a_block_by_the_dot_products_of_gfx1030(tmp_path):
    block, draw = drawn(80, 2)
    x, text = draw(1, 37, 80), keys_and_values(draw, 1, 13, 80, 2)
    _, _, calls, _ = executed("gfx1100", x, text, block, small("gfx1030", 40), launcher=DotProducts(tmp_path))
    assert all(call.counters.lds_bank_conflicts == call.counters.matrix_flops == 0 for call in calls)


@functools.cache
def moments_of(gfx, dtype, M=70, N=200, offset=0.0):
    """y and its moments by linear_moments: three whole parts and one of 8 columns, where tiles have 64."""
    random = torch.Generator().manual_seed(N)
    x, weight = (torch.randn(shape, generator=random).to(dtype) for shape in ((M, 72), (N, 72)))
    residual = (offset + torch.randn(M, N, generator=random)).to(dtype)
    config = norm_linear.TILES[archs.get(gfx).matrix_unit][-1]
    launcher = EmulatedLauncher(gfx)
    with launcher.run.watching():
        y = torch.empty(M, N, dtype=dtype)
        moments = row_moments.allocate(y, config.block_n)
        linear_moments.launch(x, weight, None, residual, y, moments, config, launcher)
    launcher.run.require_written(y, moments.data)
    return y, moments, launcher.run.calls[0].counters


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("gfx", EMULATED)
def test_moments_are_those_of_the_rounded_rows_whatever_their_mean(gfx, offset):
    y, moments, counters = moments_of(gfx, torch.float16, offset=offset)
    assert counters.lds_bank_conflicts == 0
    for part, columns in enumerate(y.double().split(moments.span, dim=1)):
        mean, squares = moments.data[:, part].double().unbind(1)
        right = columns.mean(1)
        assert (mean - right).abs().max() <= 4e-7 * right.abs().max()
        wanted = (columns - right[:, None]).square().sum(1)
        assert ((squares - wanted).abs() <= 1e-5 * wanted).all()


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_norm_on_the_way_in_loses_nothing_where_the_mean_is_a_thousand_times_the_spread(gfx):
    """Rows in four parts of several lanes, a step that is not whole, and a lone row."""
    y, moments, _ = moments_of(gfx, torch.float16, offset=1000.0)
    random = torch.Generator().manual_seed(1)
    norm = Norm(torch.randn(200, generator=random).half(), torch.randn(200, generator=random).half())
    weight = (torch.randn(144, 200, generator=random) * 0.1).half()
    config = norm_linear.TILES[archs.get(gfx).matrix_unit][-1]

    def both(x, layer):
        return linear(normed(x, norm if x.dtype == torch.half else in_float64(norm)), layer)

    for rows in (70, 1):
        x, known = y[:rows], replace(moments, data=moments.data[:rows])
        launcher = EmulatedLauncher(gfx)
        with launcher.run.watching():
            out = torch.empty(rows, 144, dtype=x.dtype)
            norm_linear.launch(x, known, norm, weight, None, out, config, launcher)
        launcher.run.require_written(out)
        layer = Linear(weight)
        require(f"norm_linear on {gfx}", out, both(x.double(), in_float64(layer)), both(x, layer))
        assert launcher.run.calls[0].counters.bytes_stored == rows * 144 * 2


# --- machine code -----------------------------------------------------------------------------------------------------

PROMISE = KernelPromise(uses_dot=True)


def compiled(gfx, tile, gated, dtype):
    """(kernel, report) of the products that know of norms, in one tile each."""
    launcher = EmulatedLauncher(gfx, execute=False)

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    x, norm = empty(64, 64), Norm(empty(64), empty(64))
    moments = row_moments.allocate(x, 64)
    row_moments.launch(x, moments, launcher)
    norm_linear.launch(x, moments, norm, empty(64, 64), empty(64), empty(64, 64), tile, launcher)
    known = row_moments.allocate(x, tile.block_n)
    linear_moments.launch(x, empty(64, 64), empty(64), x, x, known, tile, launcher)
    norm_geglu.launch(x, moments, norm, empty(128, 64), empty(128), empty(64, 64), gated, launcher)
    return [(call, report(call.code)) for call in launcher.run.calls]


def passes_the_gates(gfx, tile, gated, dtype):
    for call, facts in compiled(gfx, tile, gated, dtype):
        promise = KernelPromise() if call.kernel == "row_moments" else PROMISE
        broken = [gate.sentence for gate in check(facts, promise) if gate.ok is False]
        assert broken == [], (call.kernel, tile, gated, dtype)
        assert "flat_load" not in call.code.assembly
        assert "flat_store" not in call.code.assembly


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_the_largest_tiles_pass_the_gates(gfx):
    unit = archs.get(gfx).matrix_unit
    passes_the_gates(gfx, norm_linear.TILES[unit][0], norm_geglu.TILES[unit][0], torch.float16)


def test_moments_need_no_matrix_unit_and_compile_for_nvidia_too():
    parameters = {"element": "half", "width": 8, "lanes": 8, "chunks": 5, "threads": 128, "even": 1}
    assert "st.global" in toolchain.compile_source("row_moments", "sm_90", parameters).assembly


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_every_tile_passes_the_gates(gfx, dtype):
    unit = archs.get(gfx).matrix_unit
    linears, gated = norm_linear.TILES[unit], norm_geglu.TILES[unit]
    for place in range(max(len(linears), len(gated))):
        passes_the_gates(gfx, linears[place % len(linears)], gated[place % len(gated)], dtype)


# --- memory -----------------------------------------------------------------------------------------------------------


def moved(calls):
    counted = total([call.counters for call in calls])
    return counted.bytes_loaded + counted.bytes_stored


def lines(calls):
    counted = total([call.counters for call in calls])
    return counted.lines_loaded + counted.lines_stored


@functools.cache
def naive_calls(gfx):
    """The same block, each op by itself, in the kernels of this package and the naive ones beside this file."""
    block, x, text, config = whole_lines(gfx)
    launcher, rows, C = EmulatedLauncher(gfx), x.shape[1], x.shape[2]
    file = Path(__file__).parent / "naive_block.hip"

    def empty(columns):
        return torch.empty(rows, columns, dtype=x.dtype)

    def product(x, weight, bias=None):
        y = empty(weight.shape[0])
        linear_residual.launch(x, weight, bias, None, y, config.linear, launcher)
        return y

    def by_value(name, y, *given):
        launcher.launch(Kernel(file, name), (y.numel() // 256, 1, 1), given)
        return y

    def norm(x, by):
        y, chosen = empty(C), layer_norm_residual.LayerNormResidualConfig()
        layer_norm_residual.launch(x, None, y, None, by.weight, by.bias, by.eps, chosen, launcher)
        return y

    def add(a, b):
        y = empty(C)
        return by_value("add", y, a, b, y)

    stream = x[0]
    for part in (block.itself, block.text):
        h = norm(stream, part.norm)
        q, *own = (product(h, weight).view(1, rows, block.heads, -1) for weight in part.project.weight.split(C))
        out = empty(C)
        attention.launch(q, *(own or text), out.view(q.shape), q.shape[-1] ** -0.5, config.attention, launcher)
        stream = add(product(out, part.out.weight, part.out.bias), stream)
    last = block.feed_forward
    h = product(norm(stream, last.norm), last.gate.weight, last.gate.bias)
    gates, hidden = empty(4 * C), empty(4 * C)
    by_value("gelu_of", gates, h, gates, 4 * C)
    by_value("times", hidden, h, gates, hidden, 4 * C)
    y = add(product(hidden, last.out.weight, last.out.bias), stream)
    exact = reference(in_float64(x), in_float64(text), in_float64(block))
    require(f"the naive block on {gfx}", y[None], exact, reference(x, text, block))
    return launcher.run.calls


@functools.cache
def whole_lines(gfx):
    block, draw = drawn(128, 2)
    x, text = draw(1, 128, 128), keys_and_values(draw, 1, 32, 128, 2)
    unit = archs.get(gfx).matrix_unit
    tiles = norm_linear.TILES[unit][0], norm_geglu.TILES[unit][0]
    return block, x, text, TransformerBlockConfig(*tiles, attention.configs(64, archs.get(gfx))[0])


@pytest.mark.parametrize("gfx", EMULATED)
def test_memory_moves_in_whole_lines_and_less_of_it_than_by_single_ops(gfx, record_property):
    block, x, text, config = whole_lines(gfx)
    _, _, calls, _ = executed(gfx, x, text, block, config)
    for call in calls[1:]:
        assert call.counters.coalescing_efficiency >= 0.9, call.kernel
        assert call.counters.lds_bank_conflicts == 0, call.kernel
    # The two floats of a short row share their line with few others.
    assert calls[0].counters.bytes_loaded == calls[0].counters.lines_loaded * 128
    naive = naive_calls(gfx)
    for name, found in (("each op by itself", naive), ("transformer_block", calls)):
        record_property(f"{gfx} {name}: kernels, bytes, lines", (len(found), moved(found), lines(found)))
    assert len(naive) == 18
    assert len(calls) == 9
    assert moved(calls) < 0.75 * moved(naive)
    if gfx == "gfx1100":
        page = " ".join((Path(__file__).parents[2] / "docs" / "transformer-block.md").read_text("utf-8").split())
        assert f"18 kernels and {moved(naive) / 1e6:.2f} MB" in page
        assert f"9 kernels and {moved(calls) / 1e6:.2f} MB" in page
    assert lines(calls) < 0.75 * lines(naive)


@pytest.mark.parametrize("gfx", EMULATED)
def test_moments_of_real_rows_take_little_beside_the_rows(gfx):
    x, launcher = torch.randn(48, 320).half(), EmulatedLauncher(gfx)
    moments = row_moments.allocate(x, 320)
    row_moments.launch(x, moments, launcher)
    assert launcher.run.calls[0].counters.coalescing_efficiency >= 0.9
    assert torch.allclose(moments.data[:, 0, 0], x.float().mean(1), atol=1e-6)
    assert torch.allclose(moments.data[:, 0, 1], x.float().var(1, correction=0) * 320, rtol=1e-5)


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_norm_costs_the_instructions_that_the_plan_says(gfx):
    """By the difference of one step of 64 values between a product with a norm and one without."""
    counted = {}
    config, arch = norm_linear.TILES[archs.get(gfx).matrix_unit][-1], archs.get(gfx)
    for K in (128, 192):
        x, weight, y = torch.ones(64, K).half(), torch.ones(64, K).half(), torch.empty(64, 64).half()
        launcher = EmulatedLauncher(gfx)
        moments = replace(row_moments.allocate(x, K), data=torch.zeros(64, 1, 2))
        norm_linear.launch(x, moments, Norm(x[0], x[0]), weight, None, y, config, launcher)
        linear_residual.launch(x, weight, None, None, y, config, launcher)
        counted[K] = [call.counters.by_class["valu"] for call in launcher.run.calls]
    more = [after - before for before, after in zip(counted[128], counted[192], strict=True)]
    a_value = (more[0] - more[1]) * arch.wave_size / (64 * 64)
    assert a_value == pytest.approx(NORM_OPERATIONS[arch.matrix_unit], abs=0.1)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_the_kernels_could_not_notice_is_refused():
    block, draw = drawn(80, 2)
    x, text, launcher = draw(1, 5, 80), keys_and_values(draw, 1, 3, 80, 2), EmulatedLauncher("gfx1100", execute=False)
    y, config = torch.empty_like(x), small("gfx1100", 40)
    wrong = replace(block, itself=replace(block.itself, project=Linear(draw(80, 80))))
    for given, about in (
        ((x.float(), text, block, y), "dtype torch.float32"),
        ((x, None, block, y), "without its keys and values"),
        ((x, text, replace(block, text=None), y), "these without the attention"),
        ((x, text, replace(block, heads=4), y), "80 columns in 4 heads"),
        ((x, text, wrong, y), r"queries, keys and values of \(80, 80\), where \(240, 80\) is due"),
    ):
        with pytest.raises(Unsupported, match=about):
            transformer_block.launch(*given, config, launcher)
    assert launcher.run.calls == []
    odd = torch.empty(4, 84, dtype=torch.float16)
    norm, known = Norm(odd[0], odd[0]), row_moments.allocate(odd, 84)
    for launch in (norm_linear.launch, norm_geglu.launch):
        with pytest.raises(Unsupported, match="multiples of 16 bytes"):
            launch(odd, known, norm, odd, None, odd[:, :4], config.linear, launcher)
    with pytest.raises(ValueError, match="moments of 4 rows of 84"):
        norm_linear.launch(x[0], known, norm, odd, None, odd, config.linear, launcher)
    with pytest.raises(ValueError, match="moments of 84 columns"):
        linear_moments.launch(odd, odd, None, None, odd, known, config.linear, launcher)
