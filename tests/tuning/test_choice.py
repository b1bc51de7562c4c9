from __future__ import annotations

import json
from pathlib import Path

import pytest

import rocm_sd.tuning
from rocm_sd import arch
from rocm_sd.errors import RocmSdError
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.ops import OPS
from rocm_sd.tuning import choice, lookup

DATA = Path(rocm_sd.tuning.__file__).parent / "data"
FILES = sorted(DATA.rglob("*.json"))
TABLE = {
    "static": {"implementation": "triton", "config": {"rows": 1}, "why": "static"},
    "bucket": [{"when": {"c": [64, 320], "dtype": "float16"}, "implementation": "torch", "why": "bucket"}],
    "exact": [{"when": {"c": 320, "hw": 64, "dtype": "float16"}, "implementation": "triton", "why": "exact"}],
}


@pytest.mark.parametrize(
    ("problem", "source"),
    [
        ({"c": 320, "hw": 64, "dtype": "float16"}, "exact"),
        ({"c": 320, "hw": 65, "dtype": "float16"}, "bucket"),
        ({"c": 64, "hw": 64, "dtype": "float16"}, "bucket"),
        ({"c": 321, "hw": 64, "dtype": "float16"}, "static"),
        ({"c": 320, "hw": 64, "dtype": "bfloat16"}, "static"),
        ({}, "static"),
    ],
)
def test_exact_then_bucket_then_static(monkeypatch, problem, source):
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: TABLE)
    found = lookup("op", "gfx1100", problem)
    assert (found.source, found.why) == (source, source)


def test_an_architecture_without_data_inherits_nothing():
    found = lookup("group_norm_silu", "gfx1250", {})
    assert (found.implementation, found.source) == ("torch", "stock")
    assert found.why == "no data for group_norm_silu on gfx1250"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_shipped_data_is_whole(file):
    table = json.loads(file.read_text())
    assert table["op"] == file.stem
    assert table["arch"] == file.parent.name
    assert table["arch"] == "cpu" or table["arch"] in arch.ARCHS
    for entry in [table["static"], *table.get("bucket", []), *table.get("exact", [])]:
        assert entry["why"]
        if file.stem in OPS:
            own, chosen = OPS[file.stem].own, entry["implementation"]
            assert chosen in own
            # Of stock torch and of libraries it is the config of the kernel that was searched.
            owner = own[chosen if own[chosen].default else choice.searched_kernel(table)]
            assert "config" not in entry or owner.default.fitting(entry["config"]) is not None


BESIDE = {
    "static": {"implementation": "torch", "config": {"rows": 1}, "why": "static"},
    "others": {
        "hip": {
            "static": {"config": {"threads": 64}, "why": "static"},
            "bucket": [
                {"when": {"c": [1, 9]}, "config": {"threads": 128}, "why": "bucket"},
                {"when": {"c": [10, 19]}, "why": "all were dropped"},
            ],
        }
    },
}


@pytest.mark.parametrize(("c", "threads"), [(5, 128), (99, 64)])
def test_a_kernel_that_is_not_chosen_has_its_own_config(monkeypatch, c, threads):
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: BESIDE)
    found = lookup("op", "gfx1100", {"c": c})
    assert (found.implementation, found.config) == ("torch", NO_CONFIG)
    assert found.config_for("hip").to_dict() == {"threads": threads}
    assert found.config_for("triton").to_dict() == {"rows": 1}


def test_where_every_config_was_dropped_there_is_none_beside(monkeypatch):
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: BESIDE)
    assert lookup("op", "gfx1100", {"c": 15}).others.keys() == {"triton"}


def test_the_config_beside_is_what_a_forced_kernel_runs_with(monkeypatch):
    op = OPS["layer_norm_residual"]
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: BESIDE)
    found = op.lookup("gfx1100", {"c": 5})
    assert op.config_of("hip", found) == LayerNormResidualConfig(threads=128)
    # Triton's own kernel takes neither.
    assert op.config_of("triton", found) == op.implementation("triton").default


def test_other_data_may_stand_in_for_the_shipped_ones(monkeypatch, tmp_path):
    assert choice.was_timed("sm_90")
    assert not choice.lookup("group_norm_silu", "sm_90", {}).why.startswith("no data")
    monkeypatch.setenv("ROCM_SD_DATA", str(tmp_path))
    assert not choice.was_timed("sm_90")
    assert choice.lookup("group_norm_silu", "sm_90", {}).why == "no data for group_norm_silu on sm_90"
    monkeypatch.delenv("ROCM_SD_DATA")
    assert choice.was_timed("sm_90")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bucket": NaN}', "[" * 5000, "\udcff"], ids=range(6))
def test_other_data_that_cannot_be_read_are_an_error_in_words(monkeypatch, tmp_path, text):
    file = tmp_path / "sm_90" / "group_norm_silu.json"
    file.parent.mkdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setenv("ROCM_SD_DATA", str(tmp_path))
    with pytest.raises(RocmSdError, match="is no tuning data") as error:
        choice.lookup("group_norm_silu", "sm_90", {})
    assert "unset ROCM_SD_DATA" in error.value.hint
