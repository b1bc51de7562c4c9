"""What cannot be approximated in a transformer has the exact bits, and the report says why."""

from __future__ import annotations

import copy

import pytest
import torch
from approximated_transformers import built
from diffusers import FirstBlockCacheConfig, FlowMatchEulerDiscreteScheduler
from diffusers.hooks import apply_first_block_cache
from diffusers.models.attention import JointTransformerBlock

import rocm_sd
from pipelines import CASES, call, small_blocks_too
from rocm_sd.engine.approximation import Skipping
from rocm_sd.engine.approximation.steps import number_of
from rocm_sd.engine.schedule import ScheduleRun
from tiny_models import copied, lora_of

STEPS = 6
NAMES = ["sd3", "flux-dev"]
SETTINGS = [Skipping(depth=1, every=3, guided_every=3), Skipping(first_block=0.5)]
each = pytest.mark.parametrize("name", NAMES)
each_setting = pytest.mark.parametrize("skipping", SETTINGS, ids=str)


@pytest.fixture(autouse=True)
def step_graph(monkeypatch):
    small_blocks_too(monkeypatch, "1")


def drawn(pipe, name, seed=0, **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": STEPS, **options})


def said(pipe):
    return " ".join(rocm_sd.report(pipe).approximations)


def check_exact(folder, name, skipping, why, prepare=None, **options):
    """Two pictures have the bits that they have without approximation."""
    plain, ours = (built(folder, name) for _ in range(2))
    for pipe in (plain, ours) if prepare is not None else ():
        prepare(pipe)
    rocm_sd.optimize(plain)
    rocm_sd.optimize(ours, quality=skipping)
    for seed in range(2):
        assert torch.equal(drawn(ours, name, seed, **options), drawn(plain, name, seed, **options))
    assert f"{2 * STEPS} calls are exact, because" in said(ours)
    assert why in said(ours)
    assert "calls so far" not in said(ours)


@each
@each_setting
def test_gradients(tmp_path, name, skipping):
    plain, ours = (built(tmp_path, name) for _ in range(2))
    rocm_sd.optimize(plain)
    rocm_sd.optimize(ours, quality=skipping)
    # A pipeline switches them off by itself; somebody's loop may not.
    for pipe in (plain, ours):
        own = pipe.transformer.forward
        pipe.transformer.forward = lambda *args, own=own, **kwargs: _with_gradients(own, args, kwargs)
    assert torch.equal(drawn(ours, name), drawn(plain, name))
    assert f"{STEPS} calls are exact, because gradients may be wanted" in said(ours)


def _with_gradients(own, args, kwargs):
    with torch.enable_grad():
        return tuple(tensor.detach() for tensor in own(*args, **kwargs))


@each_setting
def test_skipped_layers(tmp_path, skipping):
    """SD3's skip-layer guidance: its own calls are exact, and the others as they would be without it."""
    pipe = rocm_sd.optimize(built(tmp_path, "sd3"), quality=skipping)
    options = {"skip_guidance_layers": [2], "skip_layer_guidance_start": 0.1, "skip_layer_guidance_stop": 0.7}
    first = drawn(pipe, "sd3", **options)
    assert "4 calls are exact, because it is given skip_layers" in said(pipe)
    assert " shallow" in said(pipe)
    assert torch.equal(drawn(pipe, "sd3", **options), first)


@each
def test_a_scale_of_lora_layers(tmp_path, name):
    def load(pipe):
        layers = lora_of(pipe.transformer, "transformer", ("to_q", "to_k", "to_v"), seed=1)
        pipe.load_lora_weights(copied(layers), adapter_name="one")

    kwargs = {"joint_attention_kwargs": {"scale": 0.3}}
    check_exact(tmp_path, name, SETTINGS[1], "it is given scale among", load, **kwargs)


def test_somebody_elses_cache_on_flux(tmp_path):
    def enable(pipe):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))

    check_exact(tmp_path, "flux-dev", SETTINGS[1], "another cache is enabled", enable)


def test_somebody_elses_cache_on_flux_afterwards(tmp_path):
    pipe = rocm_sd.optimize(built(tmp_path, "flux-dev"), quality=SETTINGS[1])
    drawn(pipe, "flux-dev")
    assert "exact" not in said(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    drawn(pipe, "flux-dev")
    assert f"{STEPS} calls are exact, because another cache is enabled" in said(pipe)


def test_somebody_elses_cache_on_sd3(tmp_path):
    """Its class has no word for one: it is found by its hooks."""
    pipe = built(tmp_path, "sd3")
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.2))
    rocm_sd.optimize(pipe, quality=SETTINGS[1])
    with pytest.raises(ValueError, match="context"):
        drawn(pipe, "sd3")
    assert "has the hook fbc" in said(pipe)


@each
@each_setting
def test_gradient_checkpointing(tmp_path, name, skipping):
    def enable(pipe):
        pipe.transformer.enable_gradient_checkpointing()

    check_exact(tmp_path, name, skipping, "gradient checkpointing", enable)


def test_blocks_of_another_kind(tmp_path):
    class Own(JointTransformerBlock):
        pass

    def exchange(pipe):
        pipe.transformer.transformer_blocks[3].__class__ = Own

    check_exact(tmp_path, "sd3", SETTINGS[1], "it has a Own", exchange)


@each
def test_a_forward_of_the_users_own(tmp_path, name):
    def exchange(pipe):
        own = pipe.transformer.forward
        pipe.transformer.forward = lambda *args, **kwargs: tuple(0.5 * tensor for tensor in own(*args, **kwargs))

    check_exact(tmp_path, name, SETTINGS[0], "its forward is not its class's own", exchange)


@each
def test_too_few_blocks(tmp_path, name):
    blocks = {"sd3": 6, "flux-dev": 7}[name]
    check_exact(tmp_path, name, Skipping(depth=blocks, every=2), f"it has {blocks} blocks")


@each
def test_out_of_a_schedule(tmp_path, name):
    """A step of nobody's schedule, twice, in the middle of a picture."""
    pipe = rocm_sd.optimize(built(tmp_path, name), quality=Skipping(first_block=1e6))
    answers = []
    own = pipe.transformer.forward

    def more(**kwargs):
        aside = kwargs | {"timestep": kwargs["timestep"] * 0.9}
        answers.append(own(**aside)[0])
        return own(**kwargs)

    pipe.transformer.forward = more
    drawn(pipe, name)
    assert f"{STEPS} calls are exact, because the step is not one of a schedule that is known" in said(pipe)
    assert len(answers) == STEPS


def test_a_unet_has_no_first_block(tmp_path):
    plain, ours = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(plain)
    rocm_sd.optimize(ours, quality=Skipping(first_block=0.1))
    assert torch.equal(call(ours, CASES["sd15"]), call(plain, CASES["sd15"]))
    assert "exact, because first_block is for transformers" in said(ours)


def test_a_scale_of_a_unets_lora_layers(tmp_path):
    plain, ours = (CASES["sd15"].build(tmp_path) for _ in range(2))
    for pipe in (plain, ours):
        layers = lora_of(pipe.unet, "unet", ("to_q", "to_k", "to_v"), seed=1)
        pipe.load_lora_weights(copied(layers), adapter_name="one")
    rocm_sd.optimize(plain)
    rocm_sd.optimize(ours, quality=Skipping(depth=1, every=2))
    options = {"cross_attention_kwargs": {"scale": 0.3}}
    assert torch.equal(call(ours, CASES["sd15"], **options), call(plain, CASES["sd15"], **options))
    assert "exact, because it is given a scale" in said(ours)


def test_flux_has_its_guidance_inside(tmp_path):
    pipe = rocm_sd.optimize(built(tmp_path, "flux-dev"), quality=Skipping(depth=1, every=2, guided_every=2))
    drawn(pipe, "flux-dev")
    assert "guidance is computed in every step: it is inside of the model" in said(pipe)
    assert "guidance reused, one" in said(pipe)
    assert f"{STEPS // 2} whole, {STEPS // 2} shallow" in said(pipe)


def test_a_bare_transformer_is_exact(tmp_path):
    transformer = built(tmp_path, "sd3").transformer
    rocm_sd.optimize(transformer, quality=SETTINGS[1])
    assert "all is exact" in said(transformer)


@each
def test_a_copy_is_exact(tmp_path, name):
    pipe = rocm_sd.optimize(built(tmp_path, name), quality=SETTINGS[1])
    copied = rocm_sd.restore(copy.deepcopy(pipe))
    assert torch.equal(drawn(copied, name), drawn(built(tmp_path, name), name))


class TestNumbers:
    """Which step a call is at."""

    @pytest.fixture
    def scheduler(self):
        made = FlowMatchEulerDiscreteScheduler()
        made.set_timesteps(5)
        return made

    def test_a_timestep_for_each_sample(self, scheduler):
        run = ScheduleRun(scheduler.timesteps)
        for number, timestep in enumerate(scheduler.timesteps):
            for batch in (1, 2, 6):
                assert number_of(run, scheduler, timestep.expand(batch)) == number
            assert number_of(run, scheduler, timestep) == number
        assert number_of(run, scheduler, scheduler.timesteps) is None
        assert number_of(run, scheduler, scheduler.timesteps[:0]) is None
        assert number_of(run, scheduler, 500) is None
        assert number_of(run, scheduler, torch.tensor([500.0, 400.0])) is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_one_that_was_computed_from_it(self, scheduler, dtype):
        run = ScheduleRun(scheduler.timesteps)
        first = scheduler.timesteps[0].expand(2).to(dtype) / 1000
        assert number_of(run, scheduler, first) is None, "nobody knows where it begins"
        scheduler.set_begin_index(1)
        assert number_of(run, scheduler, first) is None, "it is not the one that is expected"
        for number in range(1, 5):
            timestep = scheduler.timesteps[number].expand(2).to(dtype) / 1000
            assert number_of(run, scheduler, timestep) == number
            scheduler.step(torch.zeros(1), scheduler.timesteps[number], torch.zeros(1))
        assert number_of(run, scheduler, timestep) is None, "the run is over"
