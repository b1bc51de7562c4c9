"""Approximated SD3 and Flux pipelines give what their definition gives, as exactly as stock would compute that."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from approximated_transformers import TransformerDefinition, built
from diffusers.models.attention import JointTransformerBlock

import rocm_sd
from pipelines import CASES, call, embeddings_of, exactly, require_as_exact_as_stock, small_blocks_too
from rocm_sd.engine.approximation import Skipping
from tiny_models import POOLED, TEXT, copied, lora_of

STEPS = 8
JOINT = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp", "norm1.linear", "ff.net.0.proj")
FIXED = {
    "cached": Skipping(depth=1, every=3),
    "deeper": Skipping(depth=4, every=2, whole_first=2, whole_last=1),
    "extrapolated": Skipping(depth=2, every=2, order=1),
}
# Thresholds lie between the changes that these models' steps have, so that there are steps of both kinds.
BY_FIRST_BLOCK = {
    "first block": Skipping(first_block=0.15),
    "first blocks": Skipping(depth=2, first_block=0.2, whole_first=2, whole_last=1),
    "first block, extrapolated": Skipping(first_block=0.1, order=1),
    "first block, bounded": Skipping(first_block=0.25, every=3),
}
HALVES = {
    "guidance reused": Skipping(guided_every=3),
    "guidance ended": Skipping(depth=1, every=2, guidance_end=0.5),
    "first block, guidance reused": Skipping(first_block=0.15, guided_every=2),
    "out of step": Skipping(depth=2, every=2, order=1, guided_every=3, guidance_end=0.8),
}
SETTINGS = FIXED | BY_FIRST_BLOCK | HALVES
NAMES = ["sd3", "flux-dev"]


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


def drawn(pipe, name, seed=0, **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": STEPS, **options})


def counted(pipe):
    """How many calls were whole, and how many shallow."""
    notes = " ".join(rocm_sd.report(pipe).approximations)
    return tuple(int((re.search(rf"(\d+) {kind}", notes) or [0, 0])[1]) for kind in ("whole", "shallow"))


def check(folder, name, skipping, seeds=(0, 1, 2), dtype=torch.float32, prepare=None, **options):
    """Ours, the definition in the same dtype, and the definition in float64, each of the same weights."""
    ours, stock, exact = (built(folder, name, kind) for kind in (dtype, dtype, torch.float64))
    for pipe in (ours, stock, exact) if prepare is not None else ():
        prepare(pipe)
        pipe.to(torch.float64 if pipe is exact else dtype)
    rocm_sd.optimize(ours, quality=skipping)
    defined, right = TransformerDefinition(stock, skipping), TransformerDefinition(exact, skipping)
    mine = [drawn(ours, name, seed, **options) for seed in seeds]
    theirs = [drawn(stock, name, seed, **options) for seed in seeds]
    with exactly(dtype):
        best = [drawn(exact, name, seed, **options) for seed in seeds]
    assert defined.said == right.said
    assert counted(ours) == (right.said.count("W"), right.said.count("s"))
    assert not any("exact" in note for note in rocm_sd.report(ours).approximations)
    require_as_exact_as_stock(mine, best, theirs, times=2)
    return ours, right


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_of_sd3(tmp_path, setting):
    _, right = check(tmp_path, "sd3", SETTINGS[setting])
    if SETTINGS[setting].caches:
        assert {*right.said} == {"W", "s"}


@pytest.mark.parametrize("setting", FIXED | BY_FIRST_BLOCK)
def test_each_setting_of_flux(tmp_path, setting):
    _, right = check(tmp_path, "flux-dev", SETTINGS[setting])
    assert {*right.said} == {"W", "s"}


@pytest.mark.parametrize("name", ["flux-schnell", "sd3-img2img", "flux-img2img"])
@pytest.mark.parametrize("setting", ["extrapolated", "first block"])
def test_other_pipelines(tmp_path, name, setting):
    check(tmp_path, name, SETTINGS[setting])


@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16(tmp_path, name):
    check(tmp_path, name, FIXED["extrapolated"], dtype=torch.bfloat16)


@pytest.mark.parametrize(("name", "end"), [("sd3", 0.0), ("sd3-img2img", 0.2)])
@pytest.mark.parametrize("setting", [Skipping(depth=1, every=3, order=1), Skipping(first_block=0.3)], ids=str)
def test_a_picture_that_begins_behind_the_end_of_guidance(tmp_path, name, end, setting):
    _, right = check(tmp_path, name, replace(setting, guidance_end=end))
    assert {*right.said} == {"W", "s"}


@pytest.mark.parametrize(
    "options",
    [{"num_images_per_prompt": 3}, {"height": 24, "width": 16}, {"num_inference_steps": 1}, {"guidance_scale": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_calls_of_other_kinds(tmp_path, name, options):
    setting = "first block, guidance reused" if name == "sd3" else "first block"
    check(tmp_path, name, SETTINGS[setting], seeds=(0, 1), **options)


def test_two_prompts_in_one_call(tmp_path):
    check(tmp_path, "sd3", SETTINGS["out of step"], seeds=(0, 1), prompt=["a frog", "a dog"])


@pytest.mark.parametrize("setting", ["cached", "first block"])
def test_two_prompts_in_turn_do_not_mix(tmp_path, setting):
    """Flux with a negative prompt is called twice a step, once for each."""
    negative = {
        "negative_prompt_embeds": embeddings_of(8, 1, 12, TEXT),
        "negative_pooled_prompt_embeds": embeddings_of(9, 1, POOLED),
        "true_cfg_scale": 2.0,
    }
    ours, right = check(tmp_path, "flux-dev", SETTINGS[setting], seeds=(0, 1), **negative)
    assert len(right.said) == 2 * 2 * STEPS
    assert sum(counted(ours)) == len(right.said)


@pytest.mark.parametrize("setting", ["cached", "first block"])
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_is_in_all_parts(tmp_path, name, setting):
    def load(pipe):
        pipe.load_lora_weights(copied(lora_of(pipe.transformer, "transformer", JOINT, seed=1)), adapter_name="one")

    check(tmp_path, name, SETTINGS[setting], prepare=load)


@pytest.mark.parametrize("name", NAMES)
def test_a_lora_after_optimize_and_off_again(tmp_path, name):
    pipe = rocm_sd.optimize(built(tmp_path, name), quality=SETTINGS["cached"])
    before = drawn(pipe, name)
    pipe.load_lora_weights(copied(lora_of(pipe.transformer, "transformer", JOINT, seed=1)), adapter_name="one")
    assert float((drawn(pipe, name) - before).norm() / before.norm()) > 1e-3
    pipe.unload_lora_weights()
    torch.testing.assert_close(drawn(pipe, name), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_each_part_is_a_graph(tmp_path, step_graph, name):
    """Head, rest and tail by the first block; whole and shallow by schedule."""
    for setting, graphs in (("first block", 3), ("cached", 2)):
        pipe = rocm_sd.optimize(built(tmp_path, name), quality=SETTINGS[setting])
        for seed in range(3):
            drawn(pipe, name, seed)
        notes = [note for note in rocm_sd.report(pipe).notes if re.search(r"Transformer2DModel: \d+ graphs", note)]
        assert len(notes) == int(step_graph)
        assert all(f": {graphs} graphs of its forward" in note for note in notes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", ["extrapolated", "first block"])
def test_pictures_do_not_remember_each_other(tmp_path, name, setting):
    """Other sizes and step counts in turn, and one picture that is given up in its middle."""
    pipe = rocm_sd.optimize(built(tmp_path, name), quality=SETTINGS[setting])
    first = drawn(pipe, name)
    for options in ({"height": 24}, {"num_inference_steps": 3}, {"num_images_per_prompt": 2}):
        drawn(pipe, name, **options)
        assert torch.equal(drawn(pipe, name), first), options

    def stop(pipe, number, _timestep, tensors):
        if number == 2:
            raise KeyboardInterrupt
        return tensors

    with pytest.raises(KeyboardInterrupt):
        drawn(pipe, name, seed=5, callback_on_step_end=stop)
    assert torch.equal(drawn(pipe, name), first)


@pytest.mark.parametrize("name", NAMES)
def test_another_prompt_in_the_middle_begins_with_a_whole_step(tmp_path, name):
    pipe = rocm_sd.optimize(built(tmp_path, name), quality=Skipping(depth=1, every=STEPS))

    def exchange(_pipe, number, _timestep, tensors):
        return tensors | ({"prompt_embeds": tensors["prompt_embeds"] * 0.5} if number == 3 else {})

    drawn(pipe, name, callback_on_step_end=exchange, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    assert counted(pipe) == (2, STEPS - 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_threshold_of_nothing_has_the_exact_bits(tmp_path, name):
    """No step changes by less: head and rest one after the other are the whole forward."""
    plain, ours = (built(tmp_path, name) for _ in range(2))
    rocm_sd.optimize(plain)
    rocm_sd.optimize(ours, quality=Skipping(first_block=1e-30))
    for seed in range(3):
        assert torch.equal(drawn(ours, name, seed), drawn(plain, name, seed))
    assert counted(ours) == (3 * STEPS, 0)
    assert Skipping(first_block=0).is_exact
    rocm_sd.optimize(ours, quality=Skipping(first_block=0))
    assert rocm_sd.report(ours).approximations == ()
    assert torch.equal(drawn(ours, name), drawn(plain, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_threshold_computes_one_whole_step(tmp_path, name):
    """The same as a schedule that has one."""
    ours, scheduled = (built(tmp_path, name) for _ in range(2))
    rocm_sd.optimize(ours, quality=Skipping(first_block=1e30))
    rocm_sd.optimize(scheduled, quality=Skipping(depth=1, every=STEPS))
    for seed in range(3):
        torch.testing.assert_close(drawn(ours, name, seed), drawn(scheduled, name, seed), rtol=1e-5, atol=1e-5)
    assert counted(ours) == counted(scheduled) == (3, 3 * (STEPS - 1))


@pytest.mark.parametrize("name", NAMES)
def test_restore_brings_stocks_bits_back(tmp_path, name):
    pipe, stock = (built(tmp_path, name) for _ in range(2))
    rocm_sd.optimize(pipe, quality=SETTINGS["first block"])
    assert not torch.equal(drawn(pipe, name), drawn(stock, name))
    rocm_sd.restore(pipe)
    assert torch.equal(drawn(pipe, name), drawn(stock, name))


def test_most_blocks_are_not_computed(tmp_path, monkeypatch, step_graph):
    """Of twelve, one in each step and the others in the whole ones, counted by their calls."""
    calls = []
    own = JointTransformerBlock.__call__

    def noted(block, *args, **kwargs):
        calls.append(block)
        return own(block, *args, **kwargs)

    monkeypatch.setattr(JointTransformerBlock, "__call__", noted)
    for skipping in (Skipping(depth=1, every=4), Skipping(first_block=0.15)):
        pipe = rocm_sd.optimize(built(tmp_path, "sd3", num_layers=12), quality=skipping)
        drawn(pipe, "sd3", seed=0)
        drawn(pipe, "sd3", seed=1)
        calls.clear()
        before = counted(pipe)
        drawn(pipe, "sd3", seed=2)
        whole, shallow = (now - then for now, then in zip(counted(pipe), before, strict=True))
        assert (whole + shallow, shallow > whole) == (STEPS, True)
        # A graph's blocks are not called any more.
        assert len(calls) == (0 if step_graph == "1" else 12 * whole + shallow)
