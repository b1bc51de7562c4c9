"""Which of arithmetic and memory bounds a piece of work."""

from __future__ import annotations

import pytest
import torch

from rocm_sd.arch import ARCHS, CPU, roofline, unknown
from rocm_sd.errors import Unsupported

H200 = ARCHS["sm_90"]


def gemm(n, itemsize=2):
    return 2 * n**3, 3 * n * n * itemsize


def test_a_large_matmul_is_bound_by_arithmetic():
    flops, moved = gemm(8192)
    bound = roofline(H200, flops, moved, "float16")
    assert bound.bound == "compute"
    assert bound.seconds == bound.compute_seconds == pytest.approx(2 * 8192**3 / 989.4e12)
    assert bound.intensity == pytest.approx(8192 / 3)
    assert bound.ridge == pytest.approx(989.4e12 / 4800e9)


def test_an_elementwise_operation_is_bound_by_memory():
    count = 2 * 320 * 64 * 64
    bound = roofline(ARCHS["gfx1100"], 4 * count, 4 * count, torch.float16)
    assert bound.bound == "memory"
    assert bound.seconds == bound.memory_seconds == pytest.approx(4 * count / 960e9)
    assert bound.intensity < bound.ridge


def test_the_ridge_is_where_both_bounds_meet():
    ridge = roofline(H200, 1, 1, "float16").ridge
    below, above = (roofline(H200, ridge * scale * 1e9, 1e9, "float16") for scale in (0.99, 1.01))
    assert (below.bound, above.bound) == ("memory", "compute")


def test_measured_figures_replace_those_of_the_table():
    bound = roofline(H200, 1e12, 1e9, "float16", peak_tflops=500.0, bandwidth_gbps=4000.0)
    assert (bound.compute_seconds, bound.memory_seconds) == (pytest.approx(2e-3), pytest.approx(2.5e-4))
    laptop = roofline(ARCHS["gfx1103"], 1e9, 1e9, "float16", bandwidth_gbps=90.0)
    assert laptop.seconds == pytest.approx(1e9 / 90e9)


def test_every_eight_bit_float_has_one_rate():
    assert roofline(H200, 1e12, 0, torch.float8_e4m3fn) == roofline(H200, 1e12, 0, "float8")
    assert roofline(H200, 1e12, 0, "float8").intensity == float("inf")


@pytest.mark.parametrize(
    ("entry", "dtype", "what"),
    [
        (ARCHS["gfx1100"], "float8", "peak rate in float8"),
        (ARCHS["gfx1103"], "float16", "memory bandwidth"),
        (unknown("gfx1250"), "float16", "peak rate in float16"),
        (CPU, "float32", "peak rate in float32"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_unknown_figure_is_an_error_that_says_what_to_give(entry, dtype, what):
    with pytest.raises(Unsupported, match=f"{what} is not known.*peak_tflops="):
        roofline(entry, 1e9, 1e9, dtype)


def test_impossible_work_is_refused():
    with pytest.raises(ValueError, match="negative"):
        roofline(H200, -1, 1, "float16")
    with pytest.raises(ValueError, match="positive"):
        roofline(H200, 1, 1, "float16", peak_tflops=0)
