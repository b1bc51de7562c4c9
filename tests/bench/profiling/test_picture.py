from __future__ import annotations

import os

import pytest
import torch

from pipelines import tiny_pipeline
from rocm_sd.bench.engines import chosen
from rocm_sd.bench.profiling import profile_picture
from rocm_sd.bench.profiling.families import CONVOLUTION, NORM

CPU = torch.device("cpu")
# Neither a CPU nor known: the way of a GPU is taken, while everything runs on the CPU.
ELSEWHERE = torch.device("meta")


@pytest.fixture
def pipeline(tmp_path):
    return lambda: tiny_pipeline(tmp_path)


def draw(pipe):
    pipe("frog", num_inference_steps=2, height=16, width=16, output_type="pt")


def profiled(pipeline, engine, device, drawing=draw):
    stages = []
    (which,) = chosen([engine], CPU)
    told = profile_picture(pipeline, drawing, which, device, subject={"workload": "tiny"}, on_stage=stages.append)
    return told, stages


def test_an_eager_engine_is_recorded_once_with_its_modules(pipeline):
    told, stages = profiled(pipeline, "stock", CPU)
    assert stages == ["loading", "first picture", "timed pictures", "profiled picture"]
    assert {"unet", "vae"} <= {part.name for part in told.analysis.modules}
    assert told.analysis.family(CONVOLUTION).flops > 0
    assert not any("eagerly" in note for note in told.analysis.notes)


def test_where_graphs_are_replayed_modules_come_from_a_second_picture_and_work_from_the_stock_model(pipeline):
    in_force = []

    def drawing(pipe):
        in_force.append(os.environ.get("ROCM_SD_STEP_GRAPH"))
        draw(pipe)

    told, stages = profiled(pipeline, "rocm-sd", ELSEWHERE, drawing)
    assert stages[-1] == "its modules"
    # Stock twice, ours once, three timed, one recorded; then without graphs, once to warm up and once recorded.
    assert in_force == [None] * 7 + ["0"] * 2
    assert "ROCM_SD_STEP_GRAPH" not in os.environ
    assert any("drawn eagerly" in note for note in told.analysis.notes)
    assert any("the stock model's" in note for note in told.analysis.notes)
    assert {"unet", "vae"} <= {part.name for part in told.analysis.modules}
    stock = profiled(pipeline, "stock", CPU)[0].analysis
    assert told.analysis.family(CONVOLUTION).flops == pytest.approx(stock.family(CONVOLUTION).flops)
    assert told.analysis.family(NORM).flops is None


def test_ctrl_c_keeps_what_was_recorded(pipeline):
    def drawing(pipe):
        if os.environ.get("ROCM_SD_STEP_GRAPH") == "0":
            raise KeyboardInterrupt
        draw(pipe)

    told, _ = profiled(pipeline, "rocm-sd", ELSEWHERE, drawing)
    assert told.analysis.family(CONVOLUTION).ms > 0
    assert "interrupted before its modules were known" in told.analysis.notes
    assert "ROCM_SD_STEP_GRAPH" not in os.environ
