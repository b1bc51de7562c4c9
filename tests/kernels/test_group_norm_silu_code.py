from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rocm_sd.tuning
from rocm_sd import arch

pytest.importorskip("triton", reason="AMD code is compiled by Triton")

DATA = Path(rocm_sd.tuning.__file__).parent / "data"
TARGETS = sorted(file.parent.name for file in DATA.glob("gfx*/group_norm_silu.json"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, dict[str, int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).with_name("compile_group_norm_silu.py")
    done = subprocess.run(
        [sys.executable, str(script), *TARGETS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("gfx", TARGETS)
@pytest.mark.parametrize("kernel", ["moments", "fold", "apply"])
def test_the_tuned_config_fits_the_registers(compiled, gfx, kernel):
    code = compiled[gfx][kernel]
    assert code["spills"] == 0
    assert code["scratch"] == 0
    assert code["lds"] <= arch.get(gfx).lds_per_workgroup


@pytest.mark.parametrize("gfx", TARGETS)
def test_passes_over_the_picture_use_16_byte_accesses(compiled, gfx):
    assert compiled[gfx]["moments"]["wide_loads"] > 0
    assert compiled[gfx]["apply"]["wide_loads"] > 0
    assert compiled[gfx]["apply"]["wide_stores"] > 0


@pytest.mark.parametrize("gfx", TARGETS)
def test_enough_waves_to_hide_the_memory(compiled, gfx):
    """Two passes bound by memory: at least half of the waves that a SIMD can hold."""
    value = arch.get(gfx)
    for kernel in ("moments", "apply"):
        code = compiled[gfx][kernel]
        waves = arch.occupancy(value, code["vgprs"], code["lds"], 4).waves_per_simd
        assert waves >= value.max_waves_per_simd // 2
