"""unified_sd_optimization: each target goes to its own integration. Those of the hosts are tested with the hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from diffusers import DDIMScheduler

import rocm_sd
from pipelines import CASES
from rocm_sd.errors import InvalidOption, ModelNotFound, Unsupported
from unified_sd_optimization import Integration, integration_of, optimize


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_pipeline_and_its_modules_are_optimized_in_place(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    assert integration_of(pipe) is integration_of(pipe.unet) is Integration.DIFFUSERS
    assert optimize(pipe, "Memory", "high") is pipe
    assert (rocm_sd.report(pipe).level, rocm_sd.report(pipe).quality) == ("memory", "high")
    assert optimize(pipe.vae) is pipe.vae


def test_a_folder_is_loaded_and_without_one_the_built_in_model(tmp_path):
    CASES["sd15"].build(tmp_path).save_pretrained(tmp_path / "model")
    for place in (tmp_path / "model", str(tmp_path / "model")):
        assert integration_of(place) is Integration.FILES
    assert optimize(tmp_path / "model", "Performance").report().level == "performance"
    assert type(optimize().pipeline.scheduler) is DDIMScheduler


def test_what_nobody_knows_is_refused(tmp_path):
    for nothing in (None, 3, object()):
        with pytest.raises(Unsupported, match="it takes a Diffusers pipeline or a torch module"):
            optimize(nothing)
    with pytest.raises(ModelNotFound, match="no model at"):
        optimize(tmp_path / "nowhere.safetensors")
    with pytest.raises(InvalidOption, match="optimization_level 'fastest' is not known"):
        optimize(tmp_path, "Fastest")


def test_importing_it_imports_no_host_and_no_diffusers():
    code = (
        "import sys, unified_sd_optimization;"
        "print([n for n in ('comfy', 'diffusers', 'modules', 'onnxruntime', 'transformers') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_folder_of_onnx_models_is_run_by_onnx_runtime(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    import onnx_folders
    from rocm_sd.onnx import ROCmOnnxPipeline

    folder = onnx_folders.made_by_hand(tmp_path / "export", tmp_path)
    assert integration_of(folder) is Integration.ONNX
    assert isinstance(optimize(str(folder), "AUTO"), ROCmOnnxPipeline)
    for options in ({"optimization_level": "memory"}, {"quality": "high"}):
        with pytest.raises(Unsupported, match="of ONNX models"):
            optimize(folder, **options)
