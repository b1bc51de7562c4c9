"""The header library: tags against the table of architectures, reductions against sums of whole numbers."""

from __future__ import annotations

import pytest
import torch
from code_objects import kernels_of
from test_hip_kernels import EMULATED, EmulatedLauncher

from rocm_sd.arch import ARCHS
from rocm_sd.kernels.hip import toolchain
from rocm_sd.kernels.hip.launch import Kernel

TAGGED = ("gfx906", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", *toolchain.TARGETS)


@pytest.mark.parametrize("gfx", TAGGED)
def test_a_tag_says_what_the_table_says(gfx, tmp_path):
    arch = ARCHS[gfx]
    file = tmp_path / "tag.hip"
    file.write_text(
        f"""#include <rocm_sd/arch.hpp>
        using namespace rocm_sd;
        static_assert(this_arch::wave_size == {arch.wave_size});
        static_assert(this_arch::lds_bytes == {arch.lds_per_workgroup});
        static_assert(this_arch::matrix == matrix_kind::{arch.matrix_unit.value});
        ROCM_SD_KERNEL(64) nothing() {{}}"""
    )
    assert kernels_of(toolchain.compile_source(file, gfx, {}))["nothing"].vgpr_spills == 0


def test_names_of_other_headers_are_no_trouble(tmp_path):
    """On a ROCm machine its own headers may come first, with short names and macros for attributes."""
    others = """
        #define __global__ __attribute__((global))
        #define __device__ __attribute__((device))
        #define __shared__ __attribute__((shared))
        typedef _Float16 half; typedef short bits16; typedef double element; struct bfloat {}; struct plus {};
        __device__ void barrier(); __device__ float load(const float*); __device__ float silu(float);
        __device__ int ceil_div(int, int); __device__ int smaller(int, int); __device__ float sum(float);
    """
    for source in ("layout_copy", "upsample"):
        file = tmp_path / f"{source}.hip"
        file.write_text(others + (toolchain.SOURCES / f"{source}.hip").read_text())
        parameters = {"element": "bits16", "channels": 3, "last": 1, "width": 8, "scale": 2, "bilinear": 0}
        assert kernels_of(toolchain.compile_source(file, "gfx1100", parameters))


REDUCE = """
#include <rocm_sd/wave.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(ROCM_SD_THREADS) reduce(const float* x, float* sums, float* largest) {
    ROCM_SD_SHARED static reduction_space<ROCM_SD_THREADS> space;
    const float value = x[thread_index()];
    sums[thread_index()] = reduce_threads<plus, ROCM_SD_LANES, ROCM_SD_THREADS>(value, space);
    largest[thread_index()] = reduce_threads<maximum, ROCM_SD_LANES, ROCM_SD_THREADS>(value, space);
}
"""


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_thread_of_a_group_gets_its_sum_and_its_largest(lanes, gfx, tmp_path):
    file = tmp_path / "reduce.hip"
    file.write_text(REDUCE)
    # Whole numbers: sums are exact in any order, and each lane counts.
    x = torch.randperm(256, generator=torch.Generator().manual_seed(lanes)).float() - 100
    sums, largest = torch.full((2, 256), float("nan"))
    kernel = Kernel(file, "reduce", (("lanes", lanes), ("threads", 256)))
    EmulatedLauncher(gfx).launch(kernel, (1, 1, 1), (x, sums, largest))
    groups = x.view(-1, lanes)
    assert torch.equal(sums.view(-1, lanes), groups.sum(1, keepdim=True).expand_as(groups))
    assert torch.equal(largest.view(-1, lanes), groups.amax(1, keepdim=True).expand_as(groups))


FORGET = """
#include <rocm_sd/types.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(64) forget(const ROCM_SD_ELEMENT* x, ROCM_SD_ELEMENT* y) {
    auto value = load<ROCM_SD_WIDTH>(x + thread_index() * ROCM_SD_WIDTH);
    forget_origin(value);
    store<ROCM_SD_WIDTH>(y + thread_index() * ROCM_SD_WIDTH, value);
}
"""


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("element", ["half", "float"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_value_of_any_width_is_forgotten_and_stays_what_it_is(width, element, gfx, tmp_path):
    """One float32 at a time is what a row of an odd number of them takes."""
    file = tmp_path / "forget.hip"
    file.write_text(FORGET)
    x = torch.randn(64 * width).to({"half": torch.float16, "float": torch.float32}[element])
    y = torch.full_like(x, float("nan"))
    kernel = Kernel(file, "forget", (("element", element), ("width", width)))
    EmulatedLauncher(gfx).launch(kernel, (1, 1, 1), (x, y))
    assert torch.equal(x, y)


SILU = """
#include <rocm_sd/types.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(64) silu_of(const float* x, float* y, float* r) {
    const int i = thread_index();
    y[i] = silu(x[i]);
    r[i] = reciprocal_sqrt(x[i] * x[i] + 1.0f);
}
"""


@pytest.mark.parametrize("gfx", EMULATED)
def test_silu_has_its_limits_and_a_float_of_precision(gfx, tmp_path):
    file = tmp_path / "silu.hip"
    file.write_text(SILU)
    x = torch.linspace(-20, 20, 64)
    x[0], x[1], x[62], x[63] = -1e30, -200.0, 200.0, 1e30
    y, r = torch.empty(2, 64)
    EmulatedLauncher(gfx).launch(Kernel(file, "silu_of"), (1, 1, 1), (x, y, r))
    exact = x.double() * torch.sigmoid(x.double())
    assert torch.allclose(y.double(), exact, rtol=2e-6, atol=1e-30)
    finite = x.abs() < 1e10
    assert torch.allclose(r[finite].double(), (x[finite].double() ** 2 + 1).rsqrt(), rtol=1e-6)
