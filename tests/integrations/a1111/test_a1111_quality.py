"""Jobs with `quality`: the host's denoiser and samplers, with steps that leave deep layers out."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch

from integrations.ldm.shallow_statement import hold
from rocm_sd.integrations.a1111 import approximated_steps
from rocm_sd.integrations.a1111 import script as script_module
from rocm_sd.integrations.a1111.switch import SWITCH

SETTING = "depth=1,every=3,order=1"
OFF = (False, "auto", "exact")
EXACT = (True, "auto", "exact")
ON = (True, "auto", "exact", SETTING)
# Of eight steps with every=3: two first, then one of three.
WHOLE = {0, 1, 4, 7}


@pytest.fixture(autouse=True)
def own_measurements(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))


@pytest.fixture(params=["eager", "captured"])
def way(request, monkeypatch):
    if request.param == "captured":
        monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
        ops = ("conv2d", "group_norm_silu", "upsample_conv2d", "upsample")
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in ops))
    return request.param


def euler(model, x, sigmas, extra_args, callback):
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * x.new_ones(len(x)), **extra_args)
        callback({"i": i, "denoised": denoised})
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def heun(model, x, sigmas, extra_args, callback):
    ones = x.new_ones(len(x))
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * ones, **extra_args)
        callback({"i": i, "denoised": denoised})
        d, dt = (x - denoised) / sigmas[i], sigmas[i + 1] - sigmas[i]
        if float(sigmas[i + 1]):
            ahead = x + d * dt
            d = (d + (ahead - model(ahead, sigmas[i + 1] * ones, **extra_args)) / sigmas[i + 1]) / 2
        x = x + d * dt
    return x


def announced_heun(*args, **kwargs):
    return heun(*args, **kwargs)


announced_heun.second_order = True


def job(host, script, args, sampler=euler, steps=8, **more):
    p = host.processing.StableDiffusionProcessing()
    made = host.processing.process_images(p, script, args, sampler=sampler, steps=steps, **more)
    return p, made.images


def picture(host, script, args, **more):
    return job(host, script, args, **more)[1][0]


@pytest.fixture
def spied(host, script, monkeypatch):
    """What the UNet is called with in each step, in the order of the step's calls, and what it answers."""
    seen = []
    call = SWITCH.call

    def spy(original, unet, args, kwargs):
        answer = call(original, unet, args, kwargs)
        if seen_from is not None:
            number = seen_from().step
            ordinal = sum(1 for one in seen if one[0] == number)
            seen.append((number, ordinal, tuple(t.clone() for t in args), answer.clone()))
        return answer

    def begins(params):
        nonlocal seen_from
        seen_from = lambda: params.denoiser  # noqa: E731 -- one name, one line

    seen_from = None
    host.script_callbacks.on_cfg_denoiser(begins)
    monkeypatch.setattr(SWITCH, "call", spy)
    return seen


def of(seen, ordinal=0):
    mine = [(number, args, {}) for number, which, args, _ in seen if which == ordinal]
    return mine, [answer for _, which, _, answer in seen if which == ordinal]


def unet_of(host):
    """As it was before anything of ours was in it."""
    return copy.deepcopy(host.shared.sd_model.model.diffusion_model)


def counts():
    return SWITCH._on.approximated.steps.counts


def report():
    return "\n".join(SWITCH.report())


@pytest.mark.parametrize(("depth", "order"), [(1, 1), (2, 0), (3, 1)])
def test_a_schedule_is_as_exact_as_its_statement(host, script, spied, way, depth, order):
    unet, forward = unet_of(host), host.sd_hijack.ldm_original_forward
    for _ in range(3 if way == "captured" else 1):
        spied.clear()
        picture(host, script, (True, "performance", "exact", f"depth={depth},every=3,order={order}"))
        calls, answers = of(spied)
        hold(answers, unet, forward, calls, depth, order, WHOLE)
    assert counts()["shallow"] == counts()["whole"] == (12 if way == "captured" else 4)
    assert "the UNet is approximated: deep features" in report()
    assert ("replayed" in report()) == (way == "captured")
    assert "calls are exact" not in report()
    assert not SWITCH._on.approximated.steps._kept


def test_with_and_without_the_prompt_in_calls_of_their_own(host, script, spied, way):
    unet, forward = unet_of(host), host.sd_hijack.ldm_original_forward
    host.shared.opts.batch_cond_uncond = False
    picture(host, script, ON)
    for ordinal in (0, 1):
        calls, answers = of(spied, ordinal)
        assert len(calls) == 8
        hold(answers, unet, forward, calls, 1, 1, WHOLE)


def test_a_prompt_that_changes_at_a_step_starts_afresh(host, script, spied):
    unet, forward = unet_of(host), host.sd_hijack.ldm_original_forward
    one, other = (torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    picture(host, script, ON, texts=lambda step: (one if step < 3 else other, one.flip(0)))
    calls, answers = of(spied)
    hold(answers[:3], unet, forward, calls[:3], 1, 1, WHOLE)
    hold(answers[3:], unet, forward, calls[3:], 1, 1, {3, 4, 7})


def test_each_pass_of_a_job_starts_afresh(host, script, spied):
    unet, forward = unet_of(host), host.sd_hijack.ldm_original_forward
    job(host, script, ON, sizes=((8, 8), (12, 16)))
    for half in (spied[:8], spied[8:]):
        calls, answers = of([(number, 0, args, answer) for number, _, args, answer in half])
        hold(answers, unet, forward, calls, 1, 1, WHOLE)


@pytest.mark.parametrize("args", [(True, "auto", "exact", ""), (True, "auto", "high"), (True, "auto", "psnr=32")])
def test_what_was_not_measured_has_the_bits_of_exact(host, script, args):
    exact = picture(host, script, EXACT)
    assert torch.equal(picture(host, script, args), exact)
    assert SWITCH._on.approximated is None
    assert ("type: rocm-sd tune --quality MODEL" in report()) == (args[2] != "exact")


@pytest.mark.parametrize("sampler", [heun, announced_heun])
def test_samplers_of_second_order_are_exact(host, script, sampler):
    exact = picture(host, script, EXACT, sampler=sampler)
    assert torch.equal(picture(host, script, ON, sampler=sampler), exact)
    assert counts()["shallow"] == 0
    assert "because the sampler does not call it once a step" in report()


def test_a_host_that_does_not_tell_is_exact(host, script):
    exact = picture(host, script, EXACT, sampler=None)
    assert torch.equal(picture(host, script, ON, sampler=None), exact)
    assert "8 calls are exact, because the host does not say which step it is" in report()


def test_an_older_host_without_the_denoiser_in_its_callback_is_exact(host, script, monkeypatch):
    params = host.script_callbacks.CFGDenoiserParams
    module = sys.modules["modules.sd_samplers_cfg_denoiser"]
    monkeypatch.setattr(module, "CFGDenoiserParams", lambda *args: params(*args[:-1]))
    exact = picture(host, script, EXACT)
    assert torch.equal(picture(host, script, ON), exact)
    assert "because the host does not say which step it is" in report()


def test_parts_of_a_picture_by_an_extension_are_exact(host, script, monkeypatch):
    kind = sys.modules["modules.sd_samplers_kdiffusion"].CFGDenoiserKDiffusion
    inner = kind.inner_model.fget

    def in_tiles(self):
        model = inner(self)
        return lambda x, sigma, cond: torch.cat([model(x[..., a : a + 4], sigma, cond) for a in (0, 4)], -1)

    def twice(self):
        model = inner(self)
        return lambda x, sigma, cond: (model(x, sigma, cond) + model(x.flip(-1), sigma, cond)) / 2

    for parts in (in_tiles, twice):
        monkeypatch.setattr(kind, "inner_model", property(parts))
        exact = picture(host, script, EXACT)
        assert torch.equal(picture(host, script, ON), exact)
        assert counts()["shallow"] == 0
        assert "because an extension calls it for parts of the picture" in report()


def test_joins_that_an_extension_has_changed_are_exact(host, script, monkeypatch):
    """FreeU's extension puts a `cat` of its own on the object that the host has in torch's place."""
    joins = type("TorchHijackForUnet", (), {"cat": lambda _self, *args, **kwargs: torch.cat(*args, **kwargs)})
    joins.__module__ = joins.cat.__module__ = "modules.sd_hijack_unet"
    th = joins()
    monkeypatch.setattr(host.ldm.unet, "th", th)
    picture(host, script, ON)
    assert counts() == {"whole": 4, "shallow": 4}
    th.cat = lambda tensors, dim: torch.cat([tensors[0] * 1.1, tensors[1]], dim)
    exact = picture(host, script, EXACT)
    assert torch.equal(picture(host, script, ON), exact)
    assert "because an extension changes what its blocks join, as FreeU does" in report()


def test_layers_that_an_extension_has_changed_are_exact(host, script):
    """Hypertile gives attentions another forward, token merging blocks another class."""
    unet = host.shared.sd_model.model.diffusion_model
    attention = unet.middle_block[1].transformer_blocks[0].attn1
    original = attention.forward
    attention.forward = lambda *args, **kwargs: original(*args, **kwargs) * 1.1
    exact = picture(host, script, EXACT)
    assert torch.equal(picture(host, script, ON), exact)
    assert "8 calls are exact, because its CrossAttention has a forward that is not its class's own" in report()


def test_calls_that_do_not_come_this_way_are_counted(host, script):
    host.shared.opts.sd_unet = "None"
    exact = picture(host, script, EXACT)
    assert torch.equal(picture(host, script, ON), exact)
    assert "8 calls are exact, because they do not come this way" in report()


def test_more_than_the_samplers_give_is_exact(as_new):
    given = SimpleNamespace(unet=torch.nn.Linear(1, 1))
    reason = approximated_steps._why_exact(torch.nn.Linear.forward, given.unet, (1, 2, 3, 4, 5), {})
    assert "more than the samplers give" in reason
    assert "control" in approximated_steps._why_exact(torch.nn.Linear.forward, given.unet, (1,), {"control": 1})


def test_the_wish_is_in_the_pictures_text_and_comes_back_from_it(host, script):
    p, _ = job(host, script, (True, "auto", "high", " depth=1, every=3,order=1"))
    text = p.extra_generation_params["ROCm SD"]
    assert f"level auto, quality {SETTING}, " in text
    pasted = {
        part: script_module.pasted({"ROCm SD": text}, part) for part in ("level", "quality", "quality in numbers")
    }
    assert pasted == {"level": "auto", "quality": None, "quality in numbers": SETTING}
    named = "0.1.0, level memory, quality balanced, 59 blocks"
    assert script_module.pasted({"ROCm SD": named}, "quality") == "balanced"
    assert script_module.pasted({"ROCm SD": named}, "quality in numbers") == ""
    assert script_module.pasted({"ROCm SD": "level auto, quality depth=9x"}, "quality in numbers") is None
    assert script_module.pasted({}, "quality in numbers") is None


def test_what_is_spelt_wrong_is_said_under_the_picture(host, script):
    stock = picture(host, script, OFF)
    p, (made,) = job(host, script, (True, "auto", "exact", "depth=1,evry=3"))
    assert torch.equal(made, stock)
    (comment,) = p.comments
    assert "'evry' is no part of it" in comment
    assert "depth=1,every=3,order=1" in comment
    p, _ = job(host, script, (True, "sideways", "exact"))
    assert "level 'sideways' is not known: auto, performance, memory" in next(iter(p.comments))
