"""What Diffusers itself has to speed a pipeline up, put on before `optimize` or after it: the same picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import PyramidAttentionBroadcastConfig
from diffusers.hooks import FirstBlockCacheConfig

import rocm_sd
from pipelines import CASES, Twins, small_blocks_too


def freeu(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def first_block_cache(pipe):
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))


def attention_broadcast(pipe):
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 900),
        current_timestep_callback=lambda: pipe._current_timestep,
    )
    pipe.transformer.enable_cache(config)


def notes_of(pipe):
    return "\n".join(rocm_sd.report(pipe).notes)


@pytest.mark.parametrize("step_graph", ["1", "0"], ids=["recorded", "one by one"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("name", "accelerate", "note"),
    [
        ("sd15", freeu, "UNet2DConditionModel: 1 graph of its forward"),
        ("flux-dev", first_block_cache, "calls without a graph"),
        ("flux-dev", attention_broadcast, "calls without a graph"),
    ],
)
def test_it_works_in_either_order(name, accelerate, note, before, step_graph, monkeypatch, tmp_path):
    small_blocks_too(monkeypatch, step_graph)
    twins = Twins(CASES[name], tmp_path)
    if before:
        rocm_sd.restore(twins.ours)
    for pipe in (twins.ours, twins.stock, twins.exact):
        accelerate(pipe)
    if before:
        rocm_sd.optimize(twins.ours)
    for seed in range(2):
        twins.check(seed)
    if step_graph == "1":
        assert note in notes_of(twins.ours)
    rocm_sd.restore(twins.ours)
    if before or accelerate is not first_block_cache:
        assert twins.are_equal(2)
    else:
        # Its hook came later, and still calls the forward that it found.
        twins.check(2)


@pytest.mark.parametrize("step_graph", ["1", "0"], ids=["recorded", "one by one"])
def test_perturbed_attention_guidance_works(step_graph, monkeypatch, tmp_path):
    small_blocks_too(monkeypatch, step_graph)
    sd15 = CASES["sd15"]
    case = replace(
        sd15,
        kind="StableDiffusionPAGPipeline",
        components=lambda tokenizer: {**sd15.components(tokenizer), "pag_applied_layers": "mid"},
        arguments={**sd15.arguments, "pag_scale": 3.0},
    )
    twins = Twins(case, tmp_path)
    for seed in range(2):
        twins.check(seed)
    if step_graph == "1":
        assert "computed by PAG" in notes_of(twins.ours)


def test_a_model_that_the_user_compiled_whole_runs_as_it_was_compiled(monkeypatch, tmp_path):
    small_blocks_too(monkeypatch, "1")
    twins = Twins(CASES["sd15"], tmp_path)
    torch._dynamo.reset()
    rocm_sd.restore(twins.ours)
    twins.ours.unet.compile(fullgraph=True, backend="eager")
    rocm_sd.optimize(twins.ours)
    for seed in range(2):
        twins.check(seed)
