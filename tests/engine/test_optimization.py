from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import rocm_sd
from pipelines import tiny_pipeline, tiny_unet, tiny_vae
from rocm_sd import numerics
from rocm_sd.arch import ARCHS
from rocm_sd.engine import levels
from rocm_sd.engine.optimization import optimize_with
from rocm_sd.engine.parts import Parts
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.tuning import Choice


@pytest.fixture
def pipe(tmp_path):
    return tiny_pipeline(tmp_path)


def latents(pipe, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    arguments = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "latent"}
    return pipe("a frog", generator=generator, **arguments | options).images


@pytest.mark.parametrize("level", ["auto", "performance", "memory"])
def test_the_picture_stays_the_same(pipe, level, tmp_path):
    stock = latents(pipe)
    ours = latents(rocm_sd.optimize(pipe, level=level))
    exact = latents(tiny_pipeline(tmp_path).to(torch.float64))
    numerics.require("latents", ours, exact, stock)
    decoded = latents(pipe, output_type="np", num_images_per_prompt=2)
    assert decoded.shape == (2, 16, 16, 3)
    assert np.isfinite(decoded).all()


def test_an_implementation_that_no_op_has_is_refused_though_the_op_is_not_called(pipe, monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "upsample_conv2d=nosuch")
    with pytest.raises(InvalidOption, match=r"upsample_conv2d implementation 'nosuch' is not known.*torch"):
        rocm_sd.optimize(pipe)


def test_restore_brings_back_the_same_bits(pipe):
    stock = latents(pipe)
    weights = {name: p.stride() for name, p in pipe.unet.named_parameters()}
    rocm_sd.optimize(pipe, level="memory")
    assert "decode" in pipe.vae.__dict__
    rocm_sd.restore(pipe)
    assert torch.equal(latents(pipe), stock)
    assert "decode" not in pipe.vae.__dict__
    assert not pipe.vae.use_slicing
    assert weights == {name: p.stride() for name, p in pipe.unet.named_parameters()}
    assert rocm_sd.restore(pipe) is pipe


def test_optimizing_twice_is_optimizing_once(pipe):
    first = latents(rocm_sd.optimize(pipe))
    replaced = len(rocm_sd.report(pipe).replaced)
    assert torch.equal(latents(rocm_sd.optimize(pipe)), first)
    # Halves of a batch round in another order.
    torch.testing.assert_close(latents(rocm_sd.optimize(pipe, level="memory")), first, rtol=1e-4, atol=1e-4)
    assert len(rocm_sd.report(pipe).replaced) == replaced
    assert rocm_sd.report(pipe).level == "memory"


@pytest.mark.parametrize("build", [tiny_unet, tiny_vae])
def test_a_bare_module_works_too(build):
    module = build()
    assert rocm_sd.optimize(module) is module
    assert rocm_sd.report(module).replaced
    rocm_sd.restore(module)


def test_the_report_says_what_was_done_and_why(pipe):
    rocm_sd.optimize(pipe, quality="high")
    report = rocm_sd.report(pipe)
    facts = report.to_dict()
    assert facts["arch"] == "cpu"
    assert {c["rule"] for c in facts["replaced"]} == {"resblock", "norm_out", "vae_attention", "vae_decoder"}
    assert any(
        "upsample, downsample, vae_attention_bounded are not applied: on a CPU" in note for note in facts["notes"]
    )
    assert {c["path"].split(".")[0] for c in facts["replaced"]} == {"unet", "vae"}
    assert any("quality high" in note for note in facts["notes"])
    text = str(rocm_sd.report(pipe, verbose=True))
    assert "ResnetBlock2D by rule resblock" in text
    assert "rocm-sd on cpu, level auto, quality high" in text


@pytest.mark.parametrize("option", ["level", "quality"])
def test_an_unknown_level_or_quality_is_named_with_the_choices(pipe, option):
    with pytest.raises(InvalidOption, match="Use one of: "):
        rocm_sd.optimize(pipe, **{option: "fast"})


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(Unsupported, match="a int: it takes a Diffusers pipeline"):
        rocm_sd.optimize(3)
    with pytest.raises(Unsupported, match="not optimised"):
        rocm_sd.report(tiny_vae())
    with pytest.raises(Unsupported, match="not optimised"):
        rocm_sd.report(3)


def test_an_optimized_pipeline_can_be_collected(tmp_path):
    pipe = rocm_sd.optimize(tiny_pipeline(tmp_path))
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None


def test_where_convolutions_keep_their_layout_nothing_is_replaced_and_the_reason_is_reported(pipe, monkeypatch):
    """Copies between layouts around every norm would be slower than stock."""
    stock = latents(pipe)
    monkeypatch.setattr(
        "rocm_sd.engine.convolutions.layout.resolve.choose", lambda *_: Choice("torch", why="slower on Radeon")
    )
    rocm_sd.optimize(pipe)
    report = rocm_sd.report(pipe)
    assert not report.replaced
    assert {c.why_skipped for c in report.skipped} == {"its convolutions keep their layout (slower on Radeon)"}
    assert torch.equal(latents(pipe), stock)


def optimized_as_on_an_h200(pipe, monkeypatch, step_graph):
    """The rules and the layout of sm_90, on tensors of a CPU."""
    monkeypatch.setattr("rocm_sd.engine.optimization.arch.detect", lambda _device: ARCHS["sm_90"])
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", step_graph)
    return rocm_sd.report(rocm_sd.optimize(pipe))


def laid_out_channels_last(module):
    first = next(each for each in module.modules() if isinstance(each, torch.nn.Conv2d) and each.kernel_size == (3, 3))
    return first.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_card_that_waits_for_its_host_keeps_stocks_unet_without_graphs(pipe, monkeypatch, tmp_path):
    stock = latents(pipe)
    report = optimized_as_on_an_h200(pipe, monkeypatch, "0")
    assert {change.path.split(".")[0] for change in report.replaced} == {"vae"}
    reasons = {change.why_skipped for change in report.skipped if change.path.startswith("unet")}
    assert len(reasons) == 1
    assert "without a graph an H200 waits for its host" in reasons.pop()
    assert not laid_out_channels_last(pipe.unet)
    assert laid_out_channels_last(pipe.vae)
    assert torch.equal(latents(pipe), stock)
    other = tiny_pipeline(tmp_path)
    report = optimized_as_on_an_h200(other, monkeypatch, "1")
    assert {change.path.split(".")[0] for change in report.replaced} == {"unet", "vae"}
    assert laid_out_channels_last(other.unet)


def test_an_architecture_that_was_not_timed_without_graphs_has_its_usual_rules(pipe, monkeypatch):
    monkeypatch.setattr("rocm_sd.engine.optimization.arch.detect", lambda _device: ARCHS["gfx942"])
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "0")
    report = rocm_sd.report(rocm_sd.optimize(pipe))
    assert {change.path.split(".")[0] for change in report.replaced} == {"unet", "vae"}


def test_a_row_of_an_ablation_has_the_rules_that_it_names_without_a_graph(pipe, monkeypatch):
    monkeypatch.setattr("rocm_sd.engine.optimization.arch.detect", lambda _device: ARCHS["sm_90"])
    optimize_with(pipe, "performance", "exact", Parts(rules=frozenset({"resblock"}), hoisted=False, captured=False))
    replaced = {(change.path.split(".")[0], change.rule) for change in rocm_sd.report(pipe).replaced}
    assert ("unet", "resblock") in replaced


def test_a_pipeline_that_has_moved_since_is_reported(pipe, monkeypatch):
    rocm_sd.optimize(pipe)
    assert not any("call optimize again" in note for note in rocm_sd.report(pipe).notes)
    # As after pipe.to("cuda"), which needs a GPU.
    monkeypatch.setattr(levels, "placement", lambda _target: levels.Placement(torch.device("cuda:0")))
    report = rocm_sd.report(pipe).notes
    assert "its weights are on cuda:0 now, and it was optimised for cpu: call optimize again" in report
