from __future__ import annotations

import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.bench.engines import chosen
from rocm_sd.bench.profiling import profile_picture, session
from rocm_sd.bench.profiling.families import CONVOLUTION, NORM
from rocm_sd.bench.profiling.recording import Recording, module_ranges
from rocm_sd.bench.profiling.trace import MODULE
from rocm_sd.errors import Unsupported
from rocm_sd.rewrite import resblock

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
    found = profile_picture(pipeline, drawing, which, device, subject={"workload": "tiny"}, on_stage=stages.append)
    return found, stages


def test_an_eager_engine_is_recorded_once_with_its_modules(pipeline):
    found, stages = profiled(pipeline, "stock", CPU)
    assert stages == ["loading", "first picture", "timed pictures", "profiled picture"]
    assert {"unet", "vae"} <= {part.name for part in found.analysis.modules}
    assert found.analysis.family(CONVOLUTION).flops > 0
    assert not any("eagerly" in note for note in found.analysis.notes)


def test_where_graphs_are_replayed_modules_come_from_a_second_picture_and_work_from_the_stock_model(
    pipeline, monkeypatch
):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    drawn = []

    def drawing(pipe):
        draw(pipe)
        text = str(rocm_sd.report(pipe).to_dict()) if is_optimized(pipe) else "stock"
        drawn.append("graphs" if "of its forward" in text else "stock" if text == "stock" else "rules")

    found, stages = profiled(pipeline, "rocm-sd", ELSEWHERE, drawing)
    assert stages[-1] == "its modules"
    # Stock twice, ours once, three timed, one recorded; then without graphs, once to warm up and once recorded.
    assert drawn == ["stock"] * 2 + ["graphs"] * 5 + ["rules"] * 2
    assert any("drawn eagerly" in note for note in found.analysis.notes)
    assert any("the stock model's" in note for note in found.analysis.notes)
    assert {"unet", "vae"} <= {part.name for part in found.analysis.modules}
    stock = profiled(pipeline, "stock", CPU)[0].analysis
    assert found.analysis.family(CONVOLUTION).flops == pytest.approx(stock.family(CONVOLUTION).flops)
    assert found.analysis.family(NORM).flops is None


def is_optimized(pipe):
    try:
        return bool(rocm_sd.report(pipe).replaced)
    except Unsupported:
        return False


def test_what_is_profiled_by_module_is_what_the_rules_run(pipeline, monkeypatch):
    """A hook in a module would send the rules around it back to stock: there are none, and layers that a rule computes
    itself are never called.
    """
    monkeypatch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    pipe = rocm_sd.optimize(pipeline())
    draw(pipe)
    with module_ranges(pipe):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in pipe.unet.modules())
    recording = Recording(pipe)
    with recording:
        draw(pipe)
    names = {event.get("name", "") for event in recording.trace["traceEvents"]}
    replaced = {change.path for change in rocm_sd.report(pipe).replaced if change.rule == "resblock"}
    # A picture from text has no use for the encoder.
    called = {path for path in replaced if not path.startswith("vae.encoder")}
    assert len(called) > 4
    assert {path for path in called if f"{MODULE}{path} (ResnetBlock2D)" in names} == called
    assert not any(f"{MODULE}{path}.conv1 (Conv2d)" in names for path in called)


def test_ctrl_c_keeps_what_was_recorded(pipeline, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "optimize_with", interrupted)
    found, _ = profiled(pipeline, "rocm-sd", ELSEWHERE)
    assert found.analysis.family(CONVOLUTION).ms > 0
    assert "interrupted before its modules were known" in found.analysis.notes
