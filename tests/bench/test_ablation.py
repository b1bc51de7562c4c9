"""Each row of the ablation has its optimisation in force, and those after it not; every row draws stock's picture."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipelines import CASES, call, exactly, require_as_exact_as_stock, tiny_pipeline
from rocm_sd.bench import ablation
from rocm_sd.bench.records import Record, record_file
from rocm_sd.engine import report
from rocm_sd.ops.registry import Op, forget_choices
from rocm_sd.rewrite import transformer

CASE = CASES["sd15"]
ROWS = {row.name: row for row in ablation.ROWS}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Exact, and by stock."""
    with exactly(torch.float32):
        exact = call(tiny_pipeline(tmp_path_factory.mktemp("exact")).to(torch.float64), CASE)
    return exact, call(tiny_pipeline(tmp_path_factory.mktemp("stock")), CASE)


@pytest.fixture
def asked(monkeypatch):
    """How often each op ran, and as which implementation."""
    counts = Counter()
    choose = Op.choose

    def counted(self, *arguments, **named):
        choice = choose(self, *arguments, **named)
        counts[self.name, choice.implementation] += 1
        return choice

    monkeypatch.setattr(Op, "choose", counted)
    # What was chosen for such a call before is not asked for again.
    forget_choices()
    return counts


@pytest.mark.parametrize("name", ROWS)
def test_every_row_draws_the_same_picture(name, tmp_path, pictures, monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    pipe = ablation.prepare(ROWS[name], tiny_pipeline(tmp_path))
    exact, stock = pictures
    for _ in range(2):
        require_as_exact_as_stock([call(pipe, CASE)], [exact], [stock], times=2)


def rules_of(pipe):
    return {change.rule for change in report(pipe).replaced}


def test_a_row_has_the_rules_of_those_before_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    before = set()
    for row in ablation.ROWS:
        if row.parts is None:
            continue
        now = rules_of(ablation.prepare(row, tiny_pipeline(tmp_path)))
        assert before <= now
        before = now
    assert {"resblock", "transformer", "spatial_transformer"} <= before


def test_what_a_row_leaves_to_stock_is_stock(tmp_path, asked):
    pipe = ablation.prepare(ROWS["GEGLU"], tiny_pipeline(tmp_path))
    call(pipe, CASE)
    assert asked["linear_geglu", "torch"]
    assert {op for op, implementation in asked if implementation != "torch"} == set()
    assert asked["layer_norm_residual", "torch"]


def test_text_is_projected_once_a_picture_from_that_row_on(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    projected, keys_values = [], transformer.keys_values
    monkeypatch.setattr(transformer, "keys_values", lambda *given: projected.append(1) or keys_values(*given))
    counts = {}
    for name in ("upsample conv", "text KV reuse"):
        pipe = ablation.prepare(ROWS[name], tiny_pipeline(tmp_path))
        call(pipe, CASE)
        projected.clear()
        call(pipe, CASE)
        counts[name] = len(projected)
    assert counts["text KV reuse"] < counts["upsample conv"]


def test_weights_are_laid_together_from_that_row_on(tmp_path):
    def shares(pipe):
        attn = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
        return attn.to_q.weight.untyped_storage().data_ptr() == attn.to_k.weight.untyped_storage().data_ptr()

    for name, packed in (("GEGLU", False), ("packed QKV", True)):
        pipe = ablation.prepare(ROWS[name], tiny_pipeline(tmp_path))
        call(pipe, CASE)
        assert shares(pipe) is packed


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        ("text KV reuse", []),
        ("step graph", ["UNet2DConditionModel"]),
        ("encoder graphs", ["UNet2DConditionModel", "text_encoder"]),
    ],
)
def test_graphs_come_last(name, captured, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    pipe = ablation.prepare(ROWS[name], tiny_pipeline(tmp_path))
    for _ in range(2):
        call(pipe, CASE)
    found = [note.split()[0].rstrip(":") for note in report(pipe).notes if "of its forward" in note]
    assert sorted(found) == captured


def test_a_cpu_has_the_rows_that_mean_something_there():
    names = [row.name for row in ablation.rows(torch.device("cpu"))]
    on_a_gpu = {"float16", "text KV reuse", "step graph", "encoder graphs"}
    assert names == [row.name for row in ablation.ROWS if row.name not in on_a_gpu]
    assert [row.name for row in ablation.rows(torch.device("cuda"))] == list(ROWS)
    assert ablation.STOCK_ROW in names


@pytest.mark.slow
def test_the_ablation_of_a_small_model_is_measured_row_by_row(work, tmp_path, quick):
    cpu = torch.device("cpu")
    record = ablation.run(work, [1], out=tmp_path, repeats=5)
    assert record.kind == "ablation"
    assert record.complete
    assert record.engines == tuple(row.name for row in ablation.rows(cpu))
    assert all(len(one.ms) == 5 for one in record.measurements)
    assert {one.against for one in record.comparisons} == {ablation.STOCK_ROW}
    assert Record.load(record_file(tmp_path, record.workload.name, "ablation")) == record
