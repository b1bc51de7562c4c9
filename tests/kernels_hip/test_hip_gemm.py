"""Fragments by themselves, then linear_residual: compiled for six architectures, executed on three, against float64."""

from __future__ import annotations

import functools
import shutil
import subprocess

import numpy as np
import pytest
import torch

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import linear_residual, toolchain
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.verify import gates, isa
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.emulator import Buffer, launch

if not any(shutil.which(name) for name in toolchain.CLANGS):
    pytest.skip("no clang to compile HIP with: apt-get install clang-19 lld-19", allow_module_level=True)

OP = OPS["linear_residual"]
EMULATED = ("gfx1100", "gfx1201", "gfx942")
DTYPES = {"half": torch.float16, "bfloat": torch.bfloat16}

# --- one fragment -----------------------------------------------------------------------------------------------------

# c = a @ b^T by one wave: a and b go to LDS as they are, K = 64, then the fragments read, multiply and store.
# `plain` is the same tile without the exchange of chunks.
PROBE = """
#include "rocm_sd/fragment.hpp"
namespace rocm_sd {
template <typename T, int Rows>
struct plain {
    chunk_of<T>* data;
    ROCM_SD_DEVICE void store(int row, int chunk, chunk_of<T> value) const { data[row * 8 + chunk] = value; }
    ROCM_SD_DEVICE chunk_of<T> load(int base, int row, int chunk) const { return data[(base + row) * 8 + chunk]; }
};
template <typename T, int Rows>
using exchanged = lds_tile<T, Rows, 64>;

constexpr int M = ROCM_SD_M, K = fragment_k<ROCM_SD_ARCH, M>(), wave_size = ROCM_SD_ARCH::wave_size;
using T = ROCM_SD_ELEMENT;

ROCM_SD_KERNEL(wave_size)
probe(const T* a, const T* b, float* c) {
    ROCM_SD_SHARED static chunk_of<T> lds[2 * M * 8];
    const ROCM_SD_TILE<T, M> left{lds}, right{lds + M * 8};
    const int lane = thread_index();
    for (int number = lane; number < M * 8; number += wave_size) {
        left.store(number / 8, number % 8, load<8>(a + number * 8));
        right.store(number / 8, number % 8, load<8>(b + number * 8));
    }
    barrier();
    fragment<ROCM_SD_ARCH, use::accumulator, M, M, K, T> sums;
    sums.clear();
    for (int k = 0; k < 64; k += K) {
        fragment<ROCM_SD_ARCH, use::a, M, M, K, T> rows;
        fragment<ROCM_SD_ARCH, use::b, M, M, K, T> columns;
        rows.load(left, 0, k, lane);
        columns.load(right, 0, k, lane);
        sums.mma(rows, columns);
    }
    sums.for_each(lane, [&](int row, int column, float value) { c[row * M + column] = value; });
}
}
"""
# The layouts of gfx1030, gfx906 and gfx90a use instructions that later architectures have too: their machine code runs
# on an emulated gfx1100 or gfx942, which has the same waves.
LAYOUTS = [
    ("rdna3", 16, "gfx1100"),
    ("rdna4", 16, "gfx1201"),
    ("cdna3", 16, "gfx942"),
    ("cdna3", 32, "gfx942"),
    ("cdna2", 16, "gfx942"),
    ("cdna2", 32, "gfx942"),
    ("rdna2", 16, "gfx1100"),
    ("gcn5", 16, "gfx942"),
]


def build(source, out, gfx, parameters):
    """As the toolchain does it, for a source that is not one of its own."""
    options = [f"-DROCM_SD_{name.upper()}={value}" for name, value in parameters.items()]
    command = [toolchain.find_compiler().path, *toolchain.OPTIONS, f"--offload-arch={gfx}", f"-I{toolchain.INCLUDE}"]
    subprocess.run([*command, *options, str(source), "-o", str(out)], check=True)


def probe(folder, tag, m, gfx, element, tile="exchanged"):
    source, out = folder / "probe.hip", folder / "probe.co"
    source.write_text(PROBE)
    build(source, out, gfx, {"arch": tag, "m": m, "element": element, "tile": tile})
    return CodeObject.from_elf(out.read_bytes())


def bits(tensor):
    """The tensor's own memory as the emulator takes it: numpy has no bfloat16."""
    return tensor.view(torch.int16).numpy()


def multiply_on_emulator(code, m, dtype):
    # Whole numbers so small that every sum is exact: one value out of place changes the result.
    random = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-15, 16, (m, 64), generator=random) for _ in range(2))
    c = np.zeros((m, m), np.float32)
    given = [Buffer(bits(a.to(dtype))), Buffer(bits(b.to(dtype))), Buffer(c, initialised=False, must_write=True)]
    counters = launch(code, 1, given)
    return c, (a @ b.T).numpy(), counters


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize(("tag", "m", "gfx"), LAYOUTS)
def test_a_fragment_multiplies_every_row_by_every_column(tag, m, gfx, element, tmp_path):
    code = probe(tmp_path, tag, m, gfx, element)
    actual, exact, counters = multiply_on_emulator(code, m, DTYPES[element])
    np.testing.assert_array_equal(actual, exact)
    assert counters.lds_bank_conflicts == 0


@pytest.mark.parametrize(("tag", "m", "gfx"), LAYOUTS[:4])
def test_without_the_exchange_of_chunks_banks_conflict(tag, m, gfx, tmp_path):
    code = probe(tmp_path, tag, m, gfx, "half", "plain")
    actual, exact, counters = multiply_on_emulator(code, m, torch.float16)
    np.testing.assert_array_equal(actual, exact)
    # Eight lanes that read one chunk of eight rows meet one place of a line: seven cycles more for each eight lanes.
    reads = counters.lds_bank_conflicts // (7 * (code.wave_size // 8))
    assert reads == counters.by_class["lds_load"] > 0


# --- linear_residual --------------------------------------------------------------------------------------------------


def memory(tensor):
    """All of the storage that a tensor begins: rows may lie apart."""
    return bits(tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,)))


@functools.cache
def code_of(kernel, gfx):
    """Once for all tests of this file."""
    compiled = toolchain.compile_source(kernel.source, gfx, dict(kernel.parameters))
    return CodeObject.from_elf(compiled.elf, compiled.assembly, kernel.name)


class EmulatedLauncher:
    """A `Launcher` that compiles for an architecture that is not there; `counters` are those of the last launch."""

    def __init__(self, gfx, output=None):
        self.arch, self.output = archs.get(gfx), output
        self.code = self.counters = None

    def launch(self, kernel, grid, arguments):
        self.code = self.code_of(kernel)
        if self.output is None:
            return
        given = [self._buffer(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        self.counters = launch(self.code, grid, given)

    def code_of(self, kernel):
        return code_of(kernel, self.arch.name)

    def _buffer(self, tensor):
        written = tensor is self.output
        return Buffer(memory(tensor), initialised=not written, must_write=written)


def configs(gfx):
    return linear_residual.TILES[archs.get(gfx).matrix_unit]


def compiled(gfx, config, dtype, *, wide=True):
    K = 64 if wide else 45
    shapes = ((8, K), (8, K), (8,), (8, 8), (8, 8))
    x, weight, bias, residual, y = (torch.empty(shape, dtype=dtype) for shape in shapes)
    launcher = EmulatedLauncher(gfx)
    linear_residual.launch(x, weight, bias, residual, y, config, launcher)
    return launcher.code


def run(gfx, config, arguments):
    x, weight, bias, residual = arguments
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    launcher = EmulatedLauncher(gfx, y)
    linear_residual.launch(x, weight, bias, residual, y, config, launcher)
    exact = OP.verification.reference(*in_float64(arguments))
    stock = OP.implementations[0](*arguments)
    require(f"linear_residual on {gfx}", y, exact, stock)
    return launcher


@pytest.mark.parametrize("case", ["half", "bfloat", "half, odd"])
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_every_tile_passes_the_gates(gfx, case):
    element, _, odd = case.partition(", ")
    assert len(configs(gfx)) >= 2
    for config in configs(gfx):
        code = compiled(gfx, config, DTYPES[element], wide=not odd)
        report = isa.report(code)
        failed = [gate for gate in gates.check(report, OP.verification.promises["_product"]) if gate.ok is False]
        # Value by value is what odd shapes cost; the launcher takes it for them alone.
        assert [gate.sentence for gate in failed if not (odd and gate.name == "wide_loads")] == []
        assert "flat_load" not in code.assembly
        assert "flat_store" not in code.assembly


# Those that lie apart are for the batched kernel: test_hip_batched.py.
WHOLE = [sample for sample in OP.verification.small if sample.make(filled=False)[0].dim() == 2]


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("sample", WHOLE, ids=lambda sample: sample.name)
def test_small_samples_are_as_close_to_float64_as_stock_torch(sample, gfx):
    for config in {configs(gfx)[0], configs(gfx)[-1]}:
        given = sample.make()
        rows, columns = given[0].shape[0], given[1].shape[0]
        assert run(gfx, config, given).counters.bytes_stored == rows * columns * given[0].element_size()


def arguments(M, N, K, dtype):
    random = torch.Generator().manual_seed(M * N + K)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    return draw(M, K), draw(N, K) * K**-0.5, draw(N), draw(M, N)


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("gfx", EMULATED)
def test_no_bank_conflicts_in_several_tiles_and_steps(gfx, element):
    # The last tiles have no rows or columns for some of their waves. Shorter steps exchange chunks of several rows.
    for config in (*configs(gfx), linear_residual.LinearResidualConfig(64, 64, 32, 2, 2, 1, 16)):
        # Three steps: with two stages the last stands where the sums go.
        counters = run(gfx, config, arguments(144, 200, 192, DTYPES[element])).counters
        assert counters.lds_bank_conflicts == 0
        # What was computed beyond the edges is not stored.
        assert counters.bytes_stored == 144 * 200 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_global_memory_moves_in_whole_lines(gfx):
    # Whole tiles and no bias: every byte is asked for by one lane, and counts once.
    x, weight, _, residual = arguments(256, 128, 128, torch.float16)
    for config in configs(gfx):
        counters = run(gfx, config, (x, weight, None, residual)).counters
        assert counters.bytes_loaded == counters.lines_loaded * 128
        assert counters.bytes_stored == counters.lines_stored * 128
        assert counters.bytes_stored == 256 * 128 * 2
        tiles = 256 // config.block_m * (128 // config.block_n)
        assert counters.bytes_loaded == tiles * (config.block_m + config.block_n) * 128 * 2 + 256 * 128 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_odd_sizes_over_several_tiles_and_steps(gfx):
    counters = run(gfx, configs(gfx)[-1], arguments(70, 77, 141, torch.float16)).counters
    assert counters.bytes_stored == 70 * 77 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_one_row_a_last_step_that_is_not_whole_and_rows_that_lie_apart(gfx):
    x, weight, bias, residual = arguments(1, 72, 200, torch.float16)
    apart = torch.zeros(1, 208, dtype=x.dtype)[:, :200].copy_(x)
    sparse = torch.zeros(72, 208, dtype=x.dtype)[:, :200].copy_(weight)
    for config in configs(gfx):
        assert run(gfx, config, (apart, sparse, bias, residual)).counters.bytes_stored == 72 * 2
    assert run(gfx, configs(gfx)[-1], (apart, sparse, None, None)).counters.bytes_stored == 72 * 2


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize(("tag", "gfx"), [("rdna2", "gfx1100"), ("gcn5", "gfx942")])
def test_dot_products_of_gfx1030_and_gfx906(tag, gfx, element, tmp_path):
    """The emulator knows neither; their products are made of instructions that later architectures have too."""
    text = (toolchain.SOURCES / "linear_residual.hip").read_text()
    assert "gemm<this_arch," in text
    source, out = tmp_path / "linear_residual.hip", tmp_path / "linear_residual.co"
    source.write_text(text.replace("gemm<this_arch,", f"gemm<{tag},"))
    x, weight, bias, residual = arguments(70, 72, 136, DTYPES[element])
    y = torch.empty(70, 72, dtype=x.dtype)

    class Launcher(EmulatedLauncher):
        def code_of(self, kernel):
            build(source, out, gfx, dict(kernel.parameters))
            return CodeObject.from_elf(out.read_bytes())

    launcher = Launcher(gfx, y)
    config = linear_residual.TILES[archs.get("gfx1030").matrix_unit][-1]
    linear_residual.launch(x, weight, bias, residual, y, config, launcher)
    exact = OP.verification.reference(*in_float64((x, weight, bias, residual)))
    stock = OP.implementations[0](x, weight, bias, residual)
    require(f"linear_residual of {tag}", y, exact, stock)
    assert launcher.counters.matrix_flops == 0
    assert launcher.counters.lds_bank_conflicts == 0


def test_bands_cover_every_tile_of_a_product_that_no_band_divides():
    # 5 x 2 tiles of 64 in bands of 2: the last band is one tile high.
    gfx = "gfx1201"
    config = linear_residual.LinearResidualConfig(64, 64, 64, 2, 2, 2, 16, group_m=2)
    counters = run(gfx, config, arguments(300, 80, 64, torch.float16)).counters
    # Each tile once: what two had written would count twice.
    assert counters.bytes_stored == 300 * 80 * 2
