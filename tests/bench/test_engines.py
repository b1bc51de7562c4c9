from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
import types

import pytest
import torch

from pipelines import tiny_pipeline
from rocm_sd.bench import engines as subject
from rocm_sd.bench.engines import ENTRY_POINTS, Engine, chosen, default_names, engines, stock
from rocm_sd.bench.workloads import make
from rocm_sd.errors import InvalidOption, Unsupported

CPU = torch.device("cpu")
MINE = Engine("mine", "me", lambda pipe: pipe, lambda _device: None, lambda: "1")


@pytest.fixture
def installed(monkeypatch):
    """Entry points as a package would have them: `module:name` to what is there."""

    def install(**there):
        module = types.ModuleType("a_package_with_engines")
        for name, value in there.items():
            setattr(module, name, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        points = [
            importlib.metadata.EntryPoint(name, f"{module.__name__}:{name}", ENTRY_POINTS)
            for name in [*there, "not_there"]
        ]

        def entry_points(*, group):
            assert group == ENTRY_POINTS
            return points

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


@pytest.fixture(scope="module")
def work():
    return make("sd15-512", CPU, tiny=True)


def test_the_engines_of_the_documents_are_built_in():
    ours = ["rocm-sd", "rocm-sd-high", "rocm-sd-balanced"]
    expected = [
        "stock",
        "channels_last",
        "compile",
        "compile_max",
        *ours,
        "xformers",
        "onnxruntime",
        "onnxruntime_fused",
    ]
    assert [engine.name for engine in subject.BUILT_IN] == expected
    # What approximates says so, and claims the budget of its name; all others are held to exactness.
    lossy = {engine.name: engine.lossy.quality for engine in subject.BUILT_IN if engine.lossy}
    assert lossy == {"rocm-sd-high": "high", "rocm-sd-balanced": "balanced"}


def test_defaults_leave_out_what_compiles_for_minutes():
    assert default_names(CPU) == ("stock", "rocm-sd")
    assert default_names(torch.device("cuda")) == ("stock", "channels_last", "compile", "rocm-sd")


def test_entry_points_add_engines_and_broken_ones_are_named(installed, caplog):
    def broken():
        raise RuntimeError("no licence")

    installed(mine=MINE, made=lambda: Engine("made", "it", *([None] * 3)), broken=broken, text=lambda: "x", twice=stock)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        found = engines()
    assert set(found) - {engine.name for engine in subject.BUILT_IN} == {"mine", "made"}
    assert found["stock"] is stock
    for words in ("broken", "no licence", "not_there", "is a str and no", "there is one of that name"):
        assert words in caplog.text


def test_engines_are_chosen_by_name_in_order_once(installed):
    installed(mine=MINE)
    assert [engine.name for engine in chosen(["mine", "stock", "mine"], CPU)] == ["mine", "stock"]
    with pytest.raises(InvalidOption) as refused:
        chosen(["fast"], CPU)
    assert "Use one of: stock," in str(refused.value)


def test_an_engine_that_cannot_run_here_says_what_to_install(monkeypatch):
    monkeypatch.setattr(subject, "find_spec", lambda _name: None)
    with pytest.raises(Unsupported) as refused:
        chosen(["xformers"], CPU)
    assert "pip install xformers" in str(refused.value)
    with pytest.raises(Unsupported) as refused:
        chosen(["onnxruntime"], CPU)
    assert "onnx, onnxruntime, onnxscript not installed: pip install 'rocm-sd[onnx]'" in str(refused.value)


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime_fused"])
def test_onnxruntime_is_timed_on_a_gpu_only_where_it_computes_on_one(monkeypatch, name):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    gpu = torch.device("cuda")
    why_not = engines()[name].why_not
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert why_not(CPU) is None
    assert "onnxruntime-migraphx" in why_not(gpu)
    for provider in ("MIGraphX", "ROCM", "CUDA"):
        there = [f"{provider}ExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(runtime, "get_available_providers", lambda there=there: there)
        assert why_not(gpu) is None


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime_fused"])
def test_onnxruntime_draws_what_stock_draws(tmp_path, name):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    pipe, stock = tiny_pipeline(tmp_path), tiny_pipeline(tmp_path)
    # As the workloads with random weights are: the exporter takes what is there.
    pipe.register_modules(text_encoder=None, tokenizer=None)
    given = {name: torch.randn(1, 16, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
    prepared = engines()[name].prepare(pipe)
    assert prepared.provider.name == "cpu"
    drawn = [
        each(
            **given, num_inference_steps=2, height=16, width=16, output_type="pt",
            generator=torch.Generator().manual_seed(0),
        ).images
        for each in (prepared, stock)
    ]  # fmt: skip
    torch.testing.assert_close(*drawn, rtol=1e-4, atol=1e-4)


def test_an_engine_leaves_the_others_pipelines_alone(work):
    plain = work.pipeline()
    expected = work.picture(plain, 1, output="latent")
    forward = plain.unet.forward
    for name in ("channels_last", "compile", "rocm-sd"):
        prepared = engines()[name].prepare(work.pipeline())
        assert prepared.unet is not plain.unet
        assert engines()[name].version()
    assert plain.unet.forward == forward
    assert torch.equal(work.picture(plain, 1, output="latent"), expected)


def test_rocm_sd_is_the_optimised_pipeline(work):
    import rocm_sd

    assert rocm_sd.report(engines()["rocm-sd"].prepare(work.pipeline())).arch


def test_compiling_replaces_what_the_pipeline_calls(work, monkeypatch):
    asked = []

    def compiled(function, **options):
        asked.append(options)
        return functools.partial(function)

    monkeypatch.setattr(torch, "compile", compiled)
    pipe = engines()["compile_max"].prepare(work.pipeline())
    assert asked == [{"mode": None, "fullgraph": True}] * 2
    assert pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    work.picture(pipe, 1)
