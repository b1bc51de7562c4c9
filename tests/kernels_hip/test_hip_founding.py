"""ck_sd_templates.hpp: the founding names in C++, on the host by its own compiler, on the device by clang.

On the device each kernel of the template is held to the machine code of the source that the proof ladder runs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from code_objects import kernels_of

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import (
    attention,
    gemm,
    linear_geglu,
    linear_moments,
    linear_residual,
    norm_geglu,
    norm_linear,
    toolchain,
)

HERE = Path(__file__).parent
# What is not said here is what a block of Stable Diffusion has: no bias on queries, keys and values.
OF_KERNELS = {
    "norm_linear": ("norm_linear", norm_linear, {"has_bias": 0}),
    "attend": ("attention", attention, {"head": 40}),
    "linear_moments": ("linear_moments", linear_moments, {"has_bias": 1, "has_residual": 1}),
    "norm_geglu": ("norm_geglu", norm_geglu, {"has_bias": 1}),
}
PRODUCTS = {
    "linear_residual": linear_residual,
    "linear_geglu": linear_geglu,
    "linear_moments": linear_moments,
    "norm_linear": norm_linear,
    "norm_geglu": norm_geglu,
}


def host(tmp_path, body, fails=False):
    """What a C++ program of the host prints, by the compiler that builds everything else there."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no c++: apt-get install g++")
    source, program = tmp_path / "host.cpp", tmp_path / "host"
    source.write_text(f'#include "ck_sd_templates.hpp"\n#include <cstdio>\nint main() {{\n{body}\n}}\n')
    options = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{toolchain.INCLUDE}"]
    done = subprocess.run([compiler, *options, source, "-o", program], capture_output=True, text=True, check=False)
    if fails:
        assert done.returncode
        return done.stderr
    assert done.returncode == 0, done.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def tiles(module, arch):
    """The large and the small one, or those of attention by the size of a head."""
    return gemm.tiles_of(module.TILES, module.DOT_WAVE64, arch)


def workgroups(tile, m, n):
    return -(-m // tile.block_m) * -(-n // tile.block_n)


def rows(m, n, gfx, family, units=0):
    return (
        f'{{ const auto c = FindOptimalConfig("{family}", {{{m}, {n}, 320}}, "{gfx}", {units}); '
        'std::printf("[%d,%d,%d,%d,%d,%d,%d,%d]\\n", c.tile.block_m, c.tile.block_n, c.tile.block_k, c.tile.waves_m, '
        "c.tile.waves_n, c.tile.stages, c.tile.fragment, c.block_size()); }"
    )


def expected(m, n, gfx, module, units=0):
    arch = archs.get(gfx)
    large, *_, small = tiles(module, arch)
    tile = large if workgroups(large, m, n) >= (units or arch.compute_units) else small
    return [*(value for _, value in tile.parameters), tile.waves_m * tile.waves_n * arch.wave_size]


def test_the_optimal_config_is_that_of_the_launchers_and_of_the_library(tmp_path):
    asked = [
        (m, n, gfx, family, units)
        for gfx in (*toolchain.TARGETS, "gfx906")
        for family in PRODUCTS
        for m, n, units in ((8192, 2560, 0), (64, 320, 0), (512, 512, 0), (512, 512, 4))
    ]
    found = host(tmp_path, "\n".join(rows(*each) for each in asked)).splitlines()
    wanted = [expected(m, n, gfx, PRODUCTS[family], units) for m, n, gfx, family, units in asked]
    assert [json.loads(line) for line in found] == wanted
    # Both tiles are among them, and all lie within the founding documents' limits.
    assert {line[0] for line in wanted} == {64, 128}
    assert all(64 <= line[-1] <= 512 and 16 <= line[0] <= 128 and 8 <= line[2] <= 64 for line in wanted)


def test_the_founding_lines_compile_and_run_on_the_host(tmp_path):
    text = host(
        tmp_path,
        """
        rdna3::OptimizedFusedTransformer transformer;
        cdna3::OptimizedFusedTransformer<rocm_sd::bfloat, 40> other;
        FusedTransformerBlockTemplate<rocm_sd::rdna4, rocm_sd::half, 80> third;
        FusedTransformerBlockTemplate<rdna3, rocm_sd::half, 64, rocm_sd::BlockTiles<rdna3, 64, false>> small;
        constexpr auto config = FindOptimalConfig("linear_residual", {512, 512, 512}, "gfx1100");
        static_assert(config.known() && !FindOptimalConfig("linear_residual", {512, 512, 512}, "gfx900").known());
        static_assert(!FindOptimalConfig("no_such_family", {512, 512, 512}, "gfx1100").known());
        const auto grid = transformer.attention_grid(1, 64, 8);
        std::printf("%d %d %d %d\\n", grid.x, grid.y, grid.z, grid.threads);
        std::printf("%d %d\\n", other.projection_grid(8192, 960).x, other.projection_grid(8192, 960).threads);
        std::printf("%d %d\\n", third.feed_forward_grid(8192, 1280).x, third.output_grid(100, 640).x);
        std::printf("%d %d\\n", small.output_grid(100, 640).x, config.workgroups({512, 512, 512, 3}));
        """,
    )
    rdna3, cdna3, rdna4 = (archs.get(gfx) for gfx in ("gfx1100", "gfx942", "gfx1201"))
    head = tiles(attention, rdna3)[64][0]
    wanted = [
        [-(-64 // head.block_m), 8, 1, head.waves_m * head.waves_d * 32],
        [workgroups(tiles(norm_linear, cdna3)[0], 8192, 960), expected(8192, 960, "gfx942", norm_linear)[-1]],
        [
            workgroups(tiles(norm_geglu, rdna4)[0], 8192, 2560),
            workgroups(tiles(linear_moments, rdna4)[0], 100, 640),
        ],
        [
            workgroups(tiles(linear_moments, rdna3)[-1], 100, 640),
            3 * workgroups(tiles(linear_residual, rdna3)[-1], 512, 512),
        ],
    ]
    assert [list(map(int, line.split())) for line in text.splitlines()] == wanted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("rdna3::OptimizedFusedTransformer<rocm_sd::half, 48> x;", "no attention for heads of this size"),
        ("rdna3::OptimizedFusedTransformer<float> x;", "half or bfloat"),
        ("FusedTransformerBlockTemplate<rocm_sd::nvidia, rocm_sd::half, 64> x;", "nothing is known of the products"),
    ],
)
def test_what_there_is_no_code_for_is_refused_with_the_reason(tmp_path, line, reason):
    assert reason in host(tmp_path, line, fails=True)


def instructions(compiled, kernel):
    """All that the kernel is, but for comments."""
    body = re.search(rf"^{kernel}:.*?^\s+\.end_amdhsa_kernel", compiled.assembly, re.MULTILINE | re.DOTALL)[0]
    # Memory of a workgroup is named after where it is declared.
    return re.sub(r"\s*;.*", "", body)


@pytest.mark.parametrize("kernel", OF_KERNELS)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_each_kernel_of_the_template_is_the_one_that_is_proven(gfx, kernel):
    source, module, more = OF_KERNELS[kernel]
    known = tiles(module, archs.get(gfx))
    tile = vars(known[40][0]) if source == "attention" else dict(known[0].parameters)
    try:
        proven = toolchain.compile_source(source, gfx, {"element": "half", **tile, **more})
    except toolchain.NoHipCompiler as error:
        pytest.skip(str(error))
    found = toolchain.compile_source(HERE / "founding_names.hip", gfx, {"step": list(OF_KERNELS).index(kernel)})
    (code,) = kernels_of(found).values()
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch) == (0, 0, 0)
    assert any(word in found.assembly for word in ("v_wmma", "v_mfma"))
    assert instructions(found, kernel) == instructions(proven, kernel)
