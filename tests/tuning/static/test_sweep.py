from __future__ import annotations

import json
import os
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from rocm_sd import arch
from rocm_sd.errors import InvalidOption, MissingDependency, RocmSdError, Unsupported
from rocm_sd.kernels.config import NO_CONFIG, Config, OpenConfig
from rocm_sd.ops import OPS
from rocm_sd.tuning import choice
from rocm_sd.tuning.ranking import Code, CodePart, Program, RatedConfig, _trips
from rocm_sd.tuning.static import data_files, sweep, tasks
from rocm_sd.tuning.static.data_files import BucketResult
from rocm_sd.tuning.static.sweep import plan, tune
from rocm_sd.tuning.static.tasks import Built, CompiledLaunch
from rocm_sd.verify.compiler import pool, targets
from rocm_sd.verify.isa import Instruction, report
from rocm_sd.verify.programs import CountedLaunch, counted
from rocm_sd.verify.runner import emulated
from rocm_sd.workers import WorkerFailed
from verify.kernels import matmul

pytest.importorskip("triton", reason="AMD code is compiled by Triton")

OP = OPS["group_norm_silu"]
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


def configs(gfx: str = "gfx1100") -> list[Config]:
    """Two of the op's own for its smallest bucket."""
    from rocm_sd import arch

    arguments = OP.tuning.buckets[0].sample.make(filled=False)
    return list(OP.tuning.space(OP.verification.problem(*arguments), arch.get(gfx)))[:2]


@pytest.fixture
def small_space(monkeypatch):
    """group_norm_silu with its smallest bucket alone and the configs that the test says."""

    def use(*wanted):
        tuning = replace(OP.tuning, space=lambda _problem, _arch: wanted, buckets=OP.tuning.buckets[:1])
        monkeypatch.setitem(OPS, OP.name, replace(OP, tuning=tuning))

    return use


def test_every_config_is_compiled_and_the_best_is_written(small_space, tmp_path):
    first, second = configs()
    small_space(first, second, first)
    seen = []
    planned = plan([OP.name], ["gfx1100", "gfx942"])
    assert planned.tasks == 2 + 2 * 2
    found = tune(planned, tmp_path, progress=seen.append)
    assert len(seen) == planned.tasks
    assert [each.arch for each in found] == ["gfx1100", "gfx942"]
    assert all(each.error is None and len(each.candidates) == 2 for each in found)

    table = json.loads((tmp_path / "gfx1100" / f"{OP.name}.json").read_text())
    (entry,) = table["bucket"]
    best, other = found[0].ranked
    assert entry["when"] == OP.tuning.buckets[0].when
    assert entry["implementation"] == OP.tuning.untimed
    assert entry["config"] == best.config.to_dict() == table["static"]["config"]
    figures = entry["figures"]
    assert figures["modelled_us"] == best.modelled_us <= other.modelled_us == figures["runner_up_modelled_us"]
    assert figures["modelled_us"] > 3
    assert (figures["spills"], figures["vgprs"] > 0, figures["waves_per_simd"] > 0) == (0, True, True)
    kernel = figures["kernels"][0]
    assert {"vgprs", "lds", "waves_per_simd", "wide_loads", "matrix_in_main", "modelled_us", "bound_by"} <= set(kernel)
    assert table["searched"]["compiled"] == 2
    assert table["searched"]["dropped"] == {}
    assert table["searched"]["triton"] in entry["why"]
    assert "never timed" in entry["why"]
    assert "modelled" in table["searched"]["timed"]

    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert len(before) == 2
    tune(planned, tmp_path / "again")
    after = {tmp_path / path.relative_to(tmp_path / "again"): path.read_bytes() for path in tmp_path.glob("again/*/*")}
    assert after == before, "the same search must give the same bytes"


def test_a_config_that_does_not_compile_costs_itself_alone(small_space, tmp_path):
    good = configs()[0]
    # Triton refuses a number of warps that is not a power of two.
    broken = replace(good, **{name: 3 for name in good.to_dict() if name.endswith("warps")})
    small_space(broken, good)
    (found,) = tune(plan([OP.name], ["gfx1100"]), tmp_path)
    assert [c.config for c in found.ranked] == [good]
    assert found.dropped == {"compiler": 1}
    assert "num_warps must be a power of 2" in found.candidates[0].dropped
    assert json.loads((tmp_path / "gfx1100" / f"{OP.name}.json").read_text())["searched"]["dropped"] == {"compiler": 1}


def test_where_nothing_is_left_the_error_says_what_and_why_and_no_file_is_made(small_space, tmp_path):
    small_space()
    (found,) = tune(plan([OP.name], ["gfx1100"]), tmp_path)
    assert found.error.startswith('group_norm_silu on gfx1100, {"hw": [1, ')
    assert "its space has no config" in found.error
    assert not list(tmp_path.rglob("*"))


def test_ctrl_c_keeps_the_files_already_written(small_space, tmp_path):
    small_space(configs()[0])

    def interrupt(_what):
        if list(tmp_path.rglob("*.json")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(plan([OP.name], ["gfx1100", "gfx942"]), tmp_path, progress=interrupt)
    (written,) = tmp_path.rglob("*.*")
    assert json.loads(written.read_text())["bucket"][0]["config"] == configs()[0].to_dict()


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_search(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RocmSdError, match=r"Nothing can be written to .*--out"):
        tune(plan([OP.name], ["gfx1100"]), tmp_path / "file" / "tuned")
    assert tune(sweep.SweepPlan(()), tmp_path / "not" / "yet") == []


def test_nothing_named_means_every_op_and_every_gfx_that_triton_compiles_for():
    own = [search for search in plan().buckets if search.implementation is None]
    assert {search.op for search in own} == {name for name, op in OPS.items() if op.tuning and op.tuning.buckets}
    assert {search.arch for search in own} == {a.name for a in targets()}


def test_a_bucket_is_held_to_the_real_calls_that_fall_into_it():
    buckets = plan([OP.name], ["gfx1100"]).buckets
    assert [each.samples[0] for each in buckets] == [bucket.sample.name for bucket in OP.tuning.buckets]
    real = {sample.name for _, sample in OP.verification.calls(real=True, arch=arch.get("gfx1100"))}
    assert {name for each in buckets for name in each.samples} >= real
    assert not any("float8" in name for each in buckets for name in each.samples), "gfx1100 multiplies none"


@pytest.mark.parametrize(
    ("named", "choice_"),
    [
        ({"ops": ["no_such_op"]}, "group_norm_silu"),
        ({"architectures": ["gfx1250"]}, "gfx1100"),
        ({"ops": ["group_norm_silu"], "architectures": ["gfx1030"]}, "gfx1100"),
    ],
)
def test_what_is_not_known_is_refused_with_the_choices(named, choice_):
    with pytest.raises(InvalidOption, match=choice_):
        plan(**named)


def test_an_op_without_configs_and_a_bucket_without_its_own_call_are_refused(monkeypatch):
    monkeypatch.setitem(OPS, OP.name, replace(OP, tuning=None))
    with pytest.raises(Unsupported, match="group_norm_silu, which declares no configs"):
        plan([OP.name])
    first = OP.tuning.buckets[0]
    # The one holds too little, the other comes too late.
    for buckets in ((replace(first, when={"hw": [1, 2]}),), (replace(OP.tuning.buckets[1], when=first.when), first)):
        monkeypatch.setitem(OPS, OP.name, replace(OP, tuning=replace(OP.tuning, buckets=buckets)))
        with pytest.raises(Unsupported, match="its own call"):
            plan([OP.name])


PART = CodePart(10, 0, 0, 0, 16, (16,))
LAUNCH = CompiledLaunch("_apply", (4, 1, 1), {}, Code(4, 32, 8, 2, PART, PART, has_loop=False), 40, 0, 16, 1.0, 0)
PROGRAM = Program(4096, 4096, ((16, 16, 16, 2),), 8192)
SEARCH = sweep._BucketSweep("group_norm_silu", "gfx1100", {"hw": [1, 9]}, ("a", "b"), ())


def candidate(failed: dict[str, str], *, call: str = "a", grid: tuple[int, ...] = (4, 1, 1)) -> RatedConfig:
    launches = {name: [replace(LAUNCH, failed=failed if name == call else {})] for name in ("a", "b")}
    future: Future[Built] = Future()
    future.set_result(Built("3.9.0", launches))
    counts = {"gfx1100": [CountedLaunch("_apply", grid, PROGRAM)]}
    return sweep._rated(SEARCH, OpenConfig.fitting({"tile": 1}), future, counts, set())


@pytest.mark.parametrize("gate", ["spills", "scratch", "lds", "matrix"])
@pytest.mark.parametrize("call", ["a", "b"])
def test_a_gate_that_no_config_may_fail_drops_it_at_any_of_the_calls(gate, call):
    dropped = candidate({gate: "3 of something"}, call=call)
    assert dropped.dropped == f"{gate}: _apply ({call}): 3 of something"
    assert dropped.modelled_us is None


def test_narrow_loads_and_few_waves_are_blemishes():
    blemished = candidate({"wide_loads": "2 of 2 bytes", "waves": "2 of 16"}, call="b")
    assert blemished.dropped is None
    assert blemished.modelled_us > 0
    assert blemished.blemishes == ("wide_loads: _apply (b): 2 of 2 bytes", "waves: _apply (b): 2 of 16")


def test_counting_and_compiling_must_see_the_same_launches():
    assert candidate({}).dropped is None
    assert "other kernels or grids" in candidate({}, grid=(5, 1, 1)).dropped


def test_a_kernel_that_cannot_be_interpreted_is_dropped_and_a_missing_package_is_not():
    future: Future[object] = Future()
    future.set_result(Built("3.9.0", {"a": [LAUNCH]}))
    dropped = sweep._rated(SEARCH, OpenConfig.fitting({"tile": 1}), future, "no inline assembly", set())
    assert dropped.dropped == "interpreter: no inline assembly"
    missing: Future[object] = Future()
    missing.set_exception(MissingDependency("triton", "verify"))
    with pytest.raises(MissingDependency, match="triton"):
        sweep._rated(SEARCH, OpenConfig.fitting({"tile": 1}), missing, {}, set())
    crashed: Future[object] = Future()
    crashed.set_exception(WorkerFailed("crashed with exit status -11"))
    dropped = sweep._rated(SEARCH, OpenConfig.fitting({"tile": 1}), crashed, {}, set())
    assert dropped.dropped == "compiler: crashed with exit status -11"


def searched(*candidates: RatedConfig, when: dict[str, list[int]] | None = None) -> BucketResult:
    return BucketResult("foo", "gfx1100", when or {"m": [1, 9]}, "9x9", candidates)


GOOD = RatedConfig(
    OpenConfig.fitting({"tile": 32}),
    5.0,
    figures={"vgprs": 40, "waves_per_simd": 16, "left_out": ["memory: not known"]},
)


def test_what_was_measured_is_kept(tmp_path):
    path = tmp_path / "gfx1100" / "foo.json"
    path.parent.mkdir()
    measured = {
        "when": {"m": [1, 9]},
        "implementation": "triton",
        "config": {"tile": 8},
        "why": "",
        "source": "measured",
    }
    stale = {"when": {"m": [90, 99]}, "implementation": "triton", "config": {"tile": 1}, "why": ""}
    exact = [{"when": {"m": 3}, "implementation": "torch", "why": "timed"}]
    path.write_text(json.dumps({"static": {**measured, "why": "static"}, "exact": exact, "bucket": [stale, measured]}))
    data_files.write([searched(GOOD), searched(GOOD, when={"m": [10, 20]})], tmp_path, "triton", "3.9.0")
    table = json.loads(path.read_text())
    assert table["static"]["why"] == "static"
    assert table["exact"] == exact
    assert [entry["when"] for entry in table["bucket"]] == [{"m": [1, 9]}, {"m": [10, 20]}]
    assert [entry["config"]["tile"] for entry in table["bucket"]] == [8, 32]
    assert table["searched"]["left_out"] == ["memory: not known"]
    assert [file.name for file in path.parent.iterdir()] == ["foo.json"]


def test_a_bucket_where_all_was_dropped_runs_as_stock_torch(tmp_path, monkeypatch):
    spilled = RatedConfig(OpenConfig.fitting({"tile": 512}), dropped="spills: _foo: 3 VGPRs")
    lost = searched(spilled, spilled, when={"m": [10, 20]})
    path = data_files.write([searched(GOOD, spilled), lost], tmp_path, "triton", "3.9.0")
    table = json.loads(path.read_text())
    assert table["searched"]["dropped"] == {"spills": 3}
    monkeypatch.setattr(choice, "_table", lambda _op, _arch: table)
    stock = choice.lookup("foo", "gfx1100", {"m": 15})
    assert (stock.implementation, stock.config) == ("torch", NO_CONFIG)
    assert "all 2 configs were dropped: spills: _foo: 3 VGPRs" in stock.why
    assert choice.lookup("foo", "gfx1100", {"m": 5}).config.to_dict() == {"tile": 32}
    assert choice.lookup("foo", "gfx1100", {"m": 99}).source == "static"


def test_workgroups_of_a_launch_write_the_whole_output_once():
    """Counted in a worker, for two architectures, by the bytes of the call's own tensors."""
    sample = OP.tuning.buckets[0].sample
    task = (OP.name, None, sample.name, configs()[0], ["gfx1100", "gfx942"])
    future = pool(interpret=True).submit(tasks.count, *task, timeout=120)
    launches = future.result()
    x = sample.make(filled=False)[0]
    assert set(launches) == {"gfx1100", "gfx942"}
    for found in launches.values():
        last = found[-1]
        grid = last.grid[0] * last.grid[1] * last.grid[2]
        assert grid * last.program.stored == x.numel() * x.element_size()
        assert last.program.loaded > 0


@interpreted
def test_products_and_bytes_of_one_workgroup_are_counted():
    M, N, K = 48, 80, 64
    a, b = torch.randn(M, K, dtype=torch.float16), torch.randn(K, N, dtype=torch.float16)
    c = torch.full((M, N), 7.0)
    with counted("verify.kernels.matmul", "gfx1100") as launches:
        for _ in range(2):
            matmul.launch(a, b, c, tile=(16, 32, 32))
    first, second = launches
    assert first == second
    assert (first.kernel, first.grid) == ("matmul", (3, 3, 1))
    assert first.program.dots == ((16, 32, 32, 2),)
    assert first.program.loaded == 2 * (16 * K + K * 32)
    assert first.program.stored == 4 * 16 * 32
    assert first.program.tensors == 2 * (M * K + K * N) + 4 * M * N
    assert torch.all(c == 7.0), "counting must not write"
    # Afterwards the kernel computes again.
    matmul.launch(a, b, c, tile=(16, 32, 32))
    assert torch.allclose(c, a.float() @ b.float(), atol=1e-2)


@pytest.mark.parametrize(
    ("mnemonic", "flops"),
    [
        ("v_wmma_f32_16x16x16_f16", 2 * 16**3),
        ("v_mfma_f32_32x32x8_f16", 2 * 32 * 32 * 8),
        ("v_mfma_f32_32x32x8f16", 2 * 32 * 32 * 8),
        ("v_mfma_f32_16x16x16_bf16_1k", 2 * 16**3),
        ("v_mfma_f32_4x4x4_16b_f16", 2 * 64 * 16),
        ("v_mfma_f32_4x4x4f16", 2 * 64 * 16),
        ("v_add_f32_e32", 0),
    ],
)
def test_a_matrix_instruction_says_its_operations(mnemonic, flops):
    instruction = Instruction(mnemonic, "")
    assert instruction.matrix_flops == flops
    assert instruction.is_vector == (flops == 0)


def test_the_main_loop_and_the_rest_of_a_kernel_add_up_to_it():
    """A product of 128x128x64 in tiles of 64x64x32 with 4 waves: two trips of 4 x 4 x 2 products of 16x16x16."""
    a, b, c = torch.empty(128, 64).half(), torch.empty(64, 128).half(), torch.empty(128, 128)
    with emulated("verify.kernels.matmul", "gfx1100", execute=False) as run:
        matmul.launch(a, b, c, tile=(64, 64, 32))
    facts = report(run.calls[0].code)
    code = tasks.machine_code(facts, 1)
    assert code.has_loop
    assert code.waves * code.main.matrix_flops == 2 * 64 * 64 * 32
    assert code.main.vector + code.rest.vector == facts.vector - facts.transcendental
    assert sorted(code.main.global_widths + code.rest.global_widths) == sorted(
        access.width for access in facts.accesses if access.space == "global"
    )
    program = Program(2 * 128 * 64, 4 * 64 * 64, ((64, 64, 32, 2),), 2**16)
    assert _trips(code, program) == 2
