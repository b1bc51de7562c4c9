"""The static search over kernels in HIP: what is counted, what is ranked, and where it is written."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

pytest.importorskip("tinygrad", reason="the emulator decodes by tinygrad's tables")
pytest.importorskip("triton", reason="the search is over Triton's kernels too")

from rocm_sd import arch as archs
from rocm_sd.errors import InvalidOption
from rocm_sd.kernels.config import NO_CONFIG, OpenConfig
from rocm_sd.kernels.hip import toolchain
from rocm_sd.kernels.hip.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.ops import OPS
from rocm_sd.tuning import choice
from rocm_sd.tuning.ranking import RatedConfig
from rocm_sd.tuning.static import data_files, sweep
from rocm_sd.tuning.static.data_files import BucketResult
from rocm_sd.tuning.static.sweep import DATA, plan, tune
from rocm_sd.verify.programs import counted_hip, stand_in

try:
    toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

NORM, LINEAR = OPS["layer_norm_residual"], OPS["linear_residual"]
OWN = [
    op.name for op in OPS.values() for i in op.implementations if i.name == "hip" and op.tuning and op.tuning.buckets
]


@pytest.mark.parametrize(
    ("gfx", "executed"),
    [
        ("gfx1030", "gfx1100"),
        ("gfx1100", "gfx1100"),
        ("gfx1200", "gfx1201"),
        ("gfx90a", "gfx942"),
        ("gfx942", "gfx942"),
    ],
)
def test_what_is_not_executed_is_counted_on_its_nearest(gfx, executed):
    assert stand_in(archs.get(gfx)).name == executed


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1201", "gfx942"])
def test_the_first_workgroup_of_a_product_is_counted_to_the_byte(gfx):
    """Each row of both factors and the residual once. The bias is read for each row, or kept, as the compiler likes."""
    M, N, K = 128, 1280, 1280
    arguments = LINEAR.tuning.buckets[0].sample.make(filled=False)
    config = LINEAR.implementation("hip").default.to_dict()
    m, n = config["block_m"], config["block_n"]
    with counted_hip(gfx) as launches:
        LINEAR.implementation("hip")(*arguments)
    (launch,) = launches
    assert launch.grid == (M // m * (N // n), 1, 1)
    bias = launch.program.loaded - 2 * ((m + n) * K + m * n)
    assert 2 * n <= bias <= 2 * m * n
    assert launch.program.stored == 2 * m * n
    assert launch.program.flops == 2 * m * n * K
    assert launch.program.tensors == 2 * (M * K + N * K + N + 2 * M * N)
    assert (launch.coalescing, launch.conflicts) == (1.0, 0)


def test_kernels_that_follow_one_another_are_counted_on_memory_that_nothing_wrote():
    op = OPS["group_norm_silu"]
    arguments = op.tuning.buckets[2].sample.make(filled=False)
    known = {}
    with counted_hip("gfx1100", known) as launches:
        op.implementation("hip")(*arguments)
    assert [launch.kernel.rpartition("_")[2] for launch in launches] == ["moments", "fold", "apply"]
    x, _, y, z = arguments[0].numel() * 2, *launches[-1].grid[:2], launches[-1].grid[2]
    assert launches[-1].program.stored * launches[-1].grid[0] * y * z >= x
    with counted_hip("gfx1100", known) as again:
        op.implementation("hip")(*arguments)
    assert again == launches
    assert len(known) == 3


def one_bucket(monkeypatch, op, *configs):
    kernels = replace(op.implementation("hip").kernels, space=lambda _problem, _arch: configs, real=())
    implementations = tuple(replace(i, kernels=kernels) if i.name == "hip" else i for i in op.implementations)
    # The bucket's own call is the only one.
    verification = replace(op.verification, real=())
    tuning = replace(op.tuning, buckets=op.tuning.buckets[:1])
    changed = replace(op, implementations=implementations, verification=verification, tuning=tuning)
    monkeypatch.setitem(OPS, op.name, changed)


def test_a_search_writes_others_to_what_is_chosen_and_alone_where_there_is_nothing_else(monkeypatch, tmp_path):
    one_bucket(monkeypatch, NORM, LayerNormResidualConfig(64), LayerNormResidualConfig(256))
    (tmp_path / "gfx1100").mkdir()
    file = tmp_path / "gfx1100" / f"{NORM.name}.json"
    chosen = {"op": NORM.name, "arch": "gfx1100", "static": {"implementation": "triton", "config": {"a": 1}, "why": ""}}
    file.write_text(json.dumps(chosen))
    planned = plan([f"{NORM.name}:hip"], ["gfx1030", "gfx1100"])
    seen = []
    found = tune(planned, tmp_path, progress=seen.append)
    assert len(seen) == planned.tasks == 2 + 4
    assert [(each.name, each.arch, each.error) for each in found] == [
        (f"{NORM.name}:hip", "gfx1030", None),
        (f"{NORM.name}:hip", "gfx1100", None),
    ]
    best = found[1].ranked[0]
    table = json.loads(file.read_text())
    assert {name: table[name] for name in chosen} == chosen
    part = table["others"]["hip"]
    (entry,) = part["bucket"]
    assert "implementation" not in entry
    assert entry["config"] == part["static"]["config"] == best.config.to_dict()
    assert entry["figures"]["modelled_us"] == best.modelled_us > 3
    assert "compiled by clang" in entry["why"]
    assert "never timed" in entry["why"]
    (kernel,) = entry["figures"]["kernels"]
    assert kernel["threads"] == best.config.threads
    assert (kernel["coalescing"], kernel["conflicts"]) == (1.0, 0)
    assert part["searched"]["command"] == f"rocm-sd tune --static {NORM.name}:hip --arch gfx1100"
    assert (part["searched"]["compiled"], part["searched"]["dropped"]) == (2, {})

    alone = json.loads((tmp_path / "gfx1030" / f"{NORM.name}.json").read_text())
    assert "others" not in alone
    assert alone["static"]["implementation"] == alone["bucket"][0]["implementation"] == "hip"
    assert alone["searched"]["implementation"] == "hip"
    assert "left_out" not in alone["searched"], "the model must know every figure of gfx1030"


def test_a_config_that_does_not_compile_costs_itself_alone(monkeypatch, tmp_path):
    good = LINEAR.implementation("hip").default
    # Fragments of 16 do not make 24 rows.
    one_bucket(monkeypatch, LINEAR, replace(good, block_m=24), good)
    (found,) = tune(plan([f"{LINEAR.name}:hip"], ["gfx1030"]), tmp_path)
    assert [c.config for c in found.ranked] == [good]
    assert found.dropped == {"compiler": 1}
    table = json.loads((tmp_path / "gfx1030" / f"{LINEAR.name}.json").read_text())
    # It competes with a vendor's library: without a time it is not the choice, and its config is there.
    assert (table["static"]["implementation"], table["static"]["config"]) == ("torch", good.to_dict())


def test_a_search_of_the_own_kernels_keeps_the_others(tmp_path):
    good = RatedConfig(OpenConfig.fitting({"tile": 32}), 5.0, figures={"vgprs": 40, "waves_per_simd": 16})
    hip = BucketResult("foo", "gfx1100", {"m": [1, 9]}, "9x9", (good,), implementation="hip")
    path = data_files.write_others([hip], tmp_path, "19.1.7")
    first = json.loads(path.read_text())
    assert first["static"]["implementation"] == "torch"
    data_files.write([replace(hip, implementation=None)], tmp_path, "triton", "3.9.0")
    second = json.loads(path.read_text())
    assert second["static"]["implementation"] == "triton"
    assert second["others"] == first["others"]
    assert second["searched"]["triton"] == "3.9.0"
    nothing = replace(hip, candidates=(RatedConfig({"tile": 1}, dropped="spills: all"),))
    assert data_files.write_others([nothing], tmp_path, "19.1.7") is None
    assert json.loads(path.read_text()) == second


def test_nothing_named_means_both_languages_and_a_name_means_one(monkeypatch):
    buckets = plan(architectures=["gfx1030", "gfx1100"]).buckets
    assert {(s.op, s.arch) for s in buckets if s.implementation} == {
        (o, g) for o in OWN for g in ("gfx1030", "gfx1100")
    }
    assert {s.arch for s in buckets if s.implementation is None} == {"gfx1100"}
    assert {s.implementation for s in plan([NORM.name], ["gfx1100"]).buckets} == {None}
    with pytest.raises(InvalidOption, match="gfx1030"):
        plan([f"{NORM.name}:hip"], ["gfx906"])
    with pytest.raises(InvalidOption, match="layer_norm_residual:hip"):
        plan(["geglu:hip"])
    # What has nothing to configure is compiled all the same.
    assert {s.configs for s in plan(["upsample:hip"], ["gfx1100"]).buckets} == {(NO_CONFIG,)}

    def refuse():
        raise toolchain.NoHipCompiler("There is no clang.")

    monkeypatch.setattr(toolchain, "find_compiler", refuse)
    without = plan(architectures=["gfx1100"])
    assert {s.implementation for s in without.buckets} == {None}
    assert "There is no clang." in without.skipped
    with pytest.raises(toolchain.NoHipCompiler):
        plan([f"{NORM.name}:hip"])


SHIPPED = [(name, gfx) for name in OWN for gfx in toolchain.TARGETS if (DATA / gfx / f"{name}.json").is_file()]


@pytest.mark.parametrize(("name", "gfx"), SHIPPED)
def test_shipped_configs_are_of_todays_space(name, gfx):
    """In the table of every op that was searched; another kernel's config would be passed over without a word."""
    op, arch = OPS[name], archs.get(gfx)
    table = json.loads((DATA / gfx / f"{name}.json").read_text())
    part = table.get("others", {}).get("hip") if arch.triton_supported else table
    if part is None:
        pytest.skip(f"never searched: rocm-sd tune --static {name}:hip --arch {gfx}")
    kernels = op.implementation("hip").kernels
    assert part["searched"]["implementation"] == "hip"
    assert "left_out" not in part["searched"]
    for bucket in op.tuning.buckets:
        problem = op.verification.problem(*bucket.sample.make(filled=False))
        space = list(kernels.space(problem, arch)) if kernels.space else [NO_CONFIG]
        _, entry = choice.entry_for(part, problem)
        if "config" not in entry:
            assert "configs were dropped" in entry["why"] or not space
            continue
        config = op.config_of("hip", op.lookup(gfx, problem))
        assert config in space
        assert entry["config"] == config.to_dict()
        assert entry["figures"]["spills"] == 0


def test_the_data_choose_a_kernel_in_hip_only_where_triton_compiles_nothing():
    for file in DATA.rglob("*.json"):
        table = json.loads(file.read_text())
        chosen = {entry["implementation"] for entry in (table["static"], *table.get("bucket", ()))}
        if "hip" in chosen:
            assert not archs.get(file.parent.name).triton_supported


def test_figures_reach_the_model_as_plain_values():
    search = plan(["upsample:hip"], ["gfx1100"]).buckets[0]
    assert asdict(search)["implementation"] == "hip"
    assert search.file == ("upsample", "hip", "gfx1100")
    assert sweep.SweepPlan((search,)).tasks == 2
