from __future__ import annotations

import dataclasses

import pytest

from rocm_sd import arch
from rocm_sd.errors import Unsupported
from rocm_sd.ops import OPS
from rocm_sd.tuning import AutotuningConfig, FindOptimalConfig, choice, lookup

TARGETS = ("gfx1030", "gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")
# What the templates of products in HIP are filled with, smallest and largest: threads, and sides of a tile.
BLOCKS, TILES_MN, TILES_K = (64, 512), (16, 128), (8, 64)
PROBLEM = {"m": 2048, "n": 1280, "k": 1280}


@pytest.mark.parametrize("gfx", TARGETS)
def test_the_templates_of_a_product_lie_within_the_promised_space(gfx):
    for bucket in OPS["linear_residual"].tuning.buckets:
        problem = OPS["linear_residual"].verification.problem(*bucket.sample.make(filled=False))
        found = FindOptimalConfig("linear_residual", problem, gfx, "hip")
        assert (found.op, found.arch, found.implementation) == ("linear_residual", gfx, "hip")
        for value, (least, most) in (
            (found.block, BLOCKS),
            (found.tile_m, TILES_MN),
            (found.tile_n, TILES_MN),
            (found.tile_k, TILES_K),
        ):
            assert least <= value <= most
        assert found.waves * arch.get(gfx).wave_size == found.block
        assert found.waves == found.config["waves_m"] * found.config["waves_n"]
        assert found.stages in {1, 2}
        assert 0 < found.occupancy <= 1
        assert 0.9 <= found.memory_efficiency <= 1
        assert found.modelled_us > 3
        assert "never timed" in found.why
        assert found.config == lookup("linear_residual", gfx, problem).config_for("hip").to_dict()


def test_without_a_name_the_least_modelled_time_wins(monkeypatch):
    def entry(us):
        kernel = {"modelled_us": us, "waves_per_simd": 8}
        return {"config": {"warps": 4}, "why": f"{us}", "figures": {"modelled_us": us, "kernels": [kernel]}}

    table = {
        "static": {"implementation": "torch", "config": {"warps": 4}, "why": "static"},
        "bucket": [{"when": {"m": [1, 9]}, "implementation": "torch", **entry(7.0)}],
        "others": {
            "hip": {
                "static": {"config": {"threads": 64}, "why": "static of hip"},
                "bucket": [{"when": {"m": [1, 5]}, **entry(5.0)}, {"when": {"m": [6, 9]}, **entry(9.0)}],
            }
        },
    }
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: table)
    assert FindOptimalConfig("op", {"m": 3}, "gfx1100").implementation == "hip"
    slower = FindOptimalConfig("op", {"m": 7}, "gfx1100")
    assert (slower.implementation, slower.why, slower.occupancy) == ("triton", "7.0", 8 / 16)
    assert (slower.waves, slower.block, slower.memory_efficiency) == (4, 128, None)
    # Outside of all buckets nothing was modelled: the op's own kernel, with what is known of its config elsewhere.
    outside = FindOptimalConfig("op", {"m": 70}, arch.get("gfx1100"))
    assert (outside.implementation, outside.modelled_us, outside.occupancy) == ("triton", None, 8 / 16)
    unknown = FindOptimalConfig("op", {"m": 70}, "gfx1100", "hip")
    assert (unknown.config, unknown.occupancy, unknown.block) == ({"threads": 64}, None, None)


def test_it_agrees_with_dispatch_where_the_choice_is_a_kernel():
    problem = {"n": 2, "c": 320, "hw": 4096, "groups": 32, "dtype": "float16"}
    found = FindOptimalConfig("group_norm_silu", problem, "gfx1030")
    chosen = lookup("group_norm_silu", "gfx1030", problem)
    assert found.implementation == chosen.implementation == "hip"
    assert found.config == chosen.config.to_dict()


@pytest.mark.parametrize(
    ("op", "gfx", "implementation"),
    [
        ("no_such_op", "gfx1100", None),
        ("linear_residual", "gfx1250", None),
        ("linear_residual", "gfx906", "hip"),
        ("linear_residual", "gfx1030", "triton"),
    ],
)
def test_what_was_never_searched_is_refused_with_what_to_type(op, gfx, implementation):
    with pytest.raises(Unsupported, match=rf"no config was searched there.*rocm-sd tune --static {op}.* --arch {gfx}"):
        FindOptimalConfig(op, PROBLEM, gfx, implementation)


def test_a_config_is_a_value():
    first, second = (FindOptimalConfig("linear_residual", PROBLEM, "gfx1100") for _ in range(2))
    assert first == second
    assert isinstance(first, AutotuningConfig)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.block = 1
