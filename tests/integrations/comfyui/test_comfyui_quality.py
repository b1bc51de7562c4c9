"""`quality` of the node with a real ComfyUI: its own UNets and samplers, with steps that leave deep layers out."""

from __future__ import annotations

import gc

import comfyui_in_process
import pytest
import torch
from test_comfyui_sampling import NAMED, control_of, notes, prompt

from integrations.ldm.shallow_statement import hold
from rocm_sd.engine import Approximation, Skipping
from rocm_sd.engine.approximation import remember
from rocm_sd.integrations.comfyui import host, patching
from rocm_sd.integrations.comfyui.nodes import ROCmOptimizationReport, ROCmOptimizedModel
from rocm_sd.integrations.ldm.quality import UNet2DConditionModel

SETTING = "depth=1,every=3,order=1"
# Of eight steps with every=3: two first, then one of three.
WHOLE = {0, 1, 4, 7}


@pytest.fixture(autouse=True)
def real_host(monkeypatch, tmp_path):
    comfyui_in_process.need()
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    with torch.inference_mode():
        yield
    import comfy.model_management

    comfy.model_management.unload_all_models()
    host._SAID.clear()


@pytest.fixture(params=["eager", "captured"])
def way(request, monkeypatch):
    """As on a CPU, and as on a GPU: the ops do the work, and each kind of pass is captured."""
    if request.param == "captured":
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
        monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    return request.param


class Spy:
    """Around all else of a model: what its UNet is called with, and what it answers."""

    def __init__(self, patcher):
        import comfy.patcher_extension

        self.patcher, self.calls = patcher.clone(), []
        kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        self.patcher.add_wrapper_with_key(kind, "a spy", self.wrapper)

    def wrapper(self, executor, x, timesteps=None, context=None, y=None, control=None, transformer_options=None):
        options = transformer_options
        sigmas = options["sample_sigmas"].tolist()
        answer = executor(x, timesteps, context, y, control, options)
        sigma = float(options["sigmas"][0])
        number = sigmas.index(sigma) if sigma in sigmas else None
        given = {"timesteps": timesteps.clone(), "context": context.clone(), "y": None if y is None else y.clone()}
        self.calls.append((tuple(options["cond_or_uncond"]), number, {"x": x.clone(), **given}, answer.clone()))
        return answer

    def of(self, whose):
        """The calls of one kind, and their answers."""
        mine = [(number, (), kwargs) for kind, number, kwargs, _ in self.calls if kind == whose]
        return mine, [answer for kind, _, _, answer in self.calls if kind == whose]


def forward(unet, **kwargs):
    return unet(**kwargs, transformer_options={})


def sample(patcher, steps=8, cfg=3.0, sampler="euler", batch=1, size=(8, 8), positive=None, negative=None, seed=0):
    import comfy.sample

    noise = torch.randn(batch, 4, *size, generator=torch.Generator().manual_seed(seed))
    positive = prompt(patcher, 1) if positive is None else positive
    negative = prompt(patcher, 2) if negative is None else negative
    return comfy.sample.sample(
        patcher, noise, steps, cfg, sampler, "normal", positive, negative, torch.zeros_like(noise), disable_pbar=True,
        seed=0,
    )  # fmt: skip


def optimized(patcher, quality=SETTING, level="auto"):
    return patching.optimize_model(patcher, level, quality)


def steps_of(patcher):
    wrapper = patcher.get_wrappers("diffusion_model", host.KEY)[0].__self__
    return wrapper.steps


@pytest.mark.parametrize("kind", comfyui_in_process.KINDS)
@pytest.mark.parametrize(("depth", "order"), [(1, 1), (2, 0), (3, 1)])
def test_a_schedule_is_as_exact_as_its_statement(way, kind, depth, order):
    stock = comfyui_in_process.patcher(kind)
    spy = Spy(stock)
    ours = optimized(spy.patcher, f"depth={depth},every=3,order={order}")
    for _ in range(3 if way == "captured" else 1):
        spy.calls.clear()
        sample(ours)
        calls, answers = spy.of((1, 0))
        hold(answers, stock.model.diffusion_model, forward, calls, depth, order, WHOLE)
    counts = steps_of(ours).counts
    assert counts["shallow"] == counts["whole"] == (12 if way == "captured" else 4)
    text = notes(ours)
    assert "the UNet is approximated: deep features" in text
    assert ("replayed" in text) == (way == "captured")
    assert "calls are exact" not in text


def test_with_and_without_the_prompt_in_calls_of_their_own(way):
    """Prompts of two lengths do not go into one batch."""
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    ours = optimized(spy.patcher)
    long = [[torch.cat([prompt(stock, 3)[0][0]] * 2, 1)[:, :11], {}]]
    sample(ours, positive=long)
    for whose in ((0,), (1,)):
        calls, answers = spy.of(whose)
        assert len(calls) == 8
        hold(answers, stock.model.diffusion_model, forward, calls, 1, 1, WHOLE)


def test_two_prompts_of_one_side_and_a_prompt_for_some_steps():
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    ours = optimized(spy.patcher)
    early = prompt(stock, 3, start_percent=0.0, end_percent=0.5)
    late = prompt(stock, 4, start_percent=0.5, end_percent=1.0)
    sample(ours, positive=[*early, *late])
    calls, answers = spy.of((1, 0))
    # The prompt changes in the middle of the picture, and so all starts afresh there.
    change = next(at for at in range(8) if not torch.equal(calls[at][2]["context"], calls[0][2]["context"]))
    assert 2 < change < 6
    unet = stock.model.diffusion_model
    hold(answers[:change], unet, forward, calls[:change], 1, 1, WHOLE)
    hold(answers[change:], unet, forward, calls[change:], 1, 1, {change, change + 1, change + 4})


def test_a_batch_of_two_pictures(way):
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    sample(optimized(spy.patcher), batch=2, size=(6, 10))
    calls, answers = spy.of((1, 0))
    hold(answers, stock.model.diffusion_model, forward, calls, 1, 1, WHOLE)


def test_pictures_one_after_the_other_know_nothing_of_each_other():
    stock = comfyui_in_process.patcher()
    ours = optimized(stock)
    first = sample(ours)
    assert not steps_of(ours)._kept
    other = sample(ours, seed=5)
    assert torch.equal(sample(ours), first)
    assert torch.equal(sample(optimized(stock), seed=5), other)
    assert torch.equal(sample(ours, size=(6, 10)), sample(optimized(stock), size=(6, 10)))


def test_calls_of_somebody_else_in_the_middle_of_a_picture_are_exact_and_leave_it_as_it_is():
    """Another picture, by the same model, from within a preview."""
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    ours = optimized(spy.patcher)
    import comfy.sample

    def callback(step, *_seen):
        sigmas = torch.tensor([9.0, 8.0, 7.0, 0.0])
        called = {"sample_sigmas": sigmas, "cond_or_uncond": [0], "uuids": ["another"], "wrappers": ours.wrappers}
        called |= ours.model_options["transformer_options"]
        for number in range(3):
            noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(number))
            ours.model.diffusion_model(
                noise, torch.tensor([900.0]), context=prompt(ours, 7)[0][0],
                transformer_options={**called, "sigmas": sigmas[number : number + 1]},
            )  # fmt: skip

    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    comfy.sample.sample(
        ours, noise, 8, 3.0, "euler", "normal", prompt(ours, 1), prompt(ours, 2), torch.zeros_like(noise),
        callback=callback, disable_pbar=True, seed=0,
    )  # fmt: skip
    unet = stock.model.diffusion_model
    calls, answers = spy.of((0,))
    assert len(calls) == 24
    for (_, _, kwargs), answer in zip(calls, answers, strict=True):
        assert torch.equal(forward(unet, **kwargs), answer)
    calls, answers = spy.of((1, 0))
    hold(answers, unet, forward, calls, 1, 1, WHOLE)
    assert "24 calls are exact, because the sampler does not say which step it is" in notes(ours)


@pytest.mark.parametrize("sampler", ["heun", "heunpp2", "exp_heun_2_x0", "dpmpp_2s_ancestral"])
def test_samplers_whose_steps_cannot_be_told_are_exact(sampler):
    stock = comfyui_in_process.patcher()
    ours = optimized(stock)
    expected = sample(stock, steps=5, sampler=sampler)
    assert torch.equal(sample(ours, steps=5, sampler=sampler), expected)
    assert steps_of(ours).counts["shallow"] == 0
    assert "calls are exact, because" in notes(ours)


@pytest.mark.parametrize("sampler", ["dpm_2", "dpmpp_sde"])
def test_calls_between_two_steps_are_exact(sampler):
    if sampler == "dpmpp_sde":
        pytest.importorskip("torchsde")
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    sample(optimized(spy.patcher), sampler=sampler)
    unet = stock.model.diffusion_model
    calls, answers = spy.of((1, 0))
    between = [(call[2], answer) for call, answer in zip(calls, answers, strict=True) if call[0] is None]
    assert len(between) == 7
    for kwargs, answer in between:
        assert torch.equal(forward(unet, **kwargs), answer)
    told = [at for at, call in enumerate(calls) if call[0] is not None]
    assert len(told) == 8
    hold([answers[at] for at in told], unet, forward, [calls[at] for at in told], 1, 1, WHOLE)


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m", "lms", "ddim", "dpmpp_2m_sde", "uni_pc"])
def test_samplers_of_one_call_a_step_are_approximated(sampler):
    if sampler == "dpmpp_2m_sde":
        pytest.importorskip("torchsde")
    ours = optimized(comfyui_in_process.patcher())
    sample(ours, sampler=sampler)
    assert steps_of(ours).counts == {"whole": 4, "shallow": 4}


def patched(change):
    """A model with a patch of another node, in the usual places."""
    stock = comfyui_in_process.patcher()
    change(stock)
    return stock


CHANGES = {
    "FreeU": lambda model: model.set_model_output_block_patch(lambda h, skip, _options: (h * 1.1, skip * 0.9)),
    "HyperTile": lambda model: model.set_model_attn1_patch(lambda q, k, v, _options: (q * 1.1, k, v)),
    "PAG": lambda model: model.set_model_attn1_replace(lambda _q, _k, v, _options: v, "middle", 0),
    "input": lambda model: model.set_model_input_block_patch(lambda h, _options: h * 1.1),
    "override": lambda model: model.model_options["transformer_options"].update(
        optimized_attention_override=lambda func, *args, **kwargs: func(*args, **kwargs) * 0.5
    ),
    "unknown": lambda model: model.model_options["transformer_options"].update(a_switch=1),
    "hook": lambda model: model.model.diffusion_model.middle_block[0].register_forward_hook(
        lambda _module, _args, made: made * 1.1
    ),
    "forward": lambda model: model.add_object_patch(
        "diffusion_model.middle_block.0.forward", lambda x, _emb: x * 1.1
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_other_nodes_change_makes_it_exact_and_the_report_says_so(change):
    stock = patched(CHANGES[change])
    expected = sample(stock)
    ours = optimized(stock)
    assert torch.equal(sample(ours), expected)
    assert steps_of(ours).counts["shallow"] == 0
    assert "the UNet: 8 calls are exact, because" in notes(ours)


def test_a_node_that_wraps_the_model_inside_makes_it_exact():
    import comfy.patcher_extension

    stock = comfyui_in_process.patcher()
    ours = optimized(stock)

    def halved(executor, *args, **kwargs):
        return executor(*args, **kwargs) * 0.5

    for model in (stock, ours):
        model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "other", halved)
    assert torch.equal(sample(ours), sample(stock))
    assert "because another node wraps the model inside of this one" in notes(ours)


def test_a_controlnet_makes_it_exact():
    stock = comfyui_in_process.patcher()
    results = []
    ours = optimized(stock)
    for patcher in (stock, ours):
        positive = prompt(stock, 1, control=control_of(stock.model.diffusion_model), control_apply_to_uncond=True)
        results.append(sample(patcher, positive=positive))
    assert torch.equal(*results)
    assert "the UNet: 8 calls are exact, because a ControlNet adds to its layers" in notes(ours)


def test_parts_of_a_picture_one_after_the_other_are_exact():
    """As a node does that draws large pictures in tiles of one size."""
    stock = comfyui_in_process.patcher()

    def tiles(apply_model, given):
        halves = [
            apply_model(given["input"][..., at : at + 4], given["timestep"], **given["c"]) for at in (0, 4)
        ]  # fmt: skip
        return torch.cat(halves, -1)

    stock.set_model_unet_function_wrapper(tiles)
    ours = optimized(stock)
    assert torch.equal(sample(ours), sample(stock))
    assert "because it is called more than once at one step" in notes(ours)


def test_a_model_that_was_not_measured_is_exact_with_what_to_type():
    stock = comfyui_in_process.patcher()
    expected = sample(stock)
    for quality, typed in (("high", "MODEL"), ("psnr=32,ssim=0.97", "MODEL --within psnr=32,ssim=0.97")):
        (ours,) = ROCmOptimizedModel().optimize_model(stock, quality=quality)
        assert torch.equal(sample(ours), expected)
        assert f"type: rocm-sd tune --quality {typed}" in notes(ours)


def test_exact_has_the_bits_of_before_and_no_wrapper_of_its_own():
    stock = comfyui_in_process.patcher()
    expected = sample(stock)
    for ours in (
        ROCmOptimizedModel().optimize_model(stock)[0],
        ROCmOptimizedModel().optimize_model(stock, "auto", "exact")[0],
        ROCmOptimizedModel().optimize_model(stock, "auto", "exact", "")[0],
    ):
        assert torch.equal(sample(ours), expected)
        assert not ours.get_wrappers("diffusion_model", host.KEY)
        assert "quality exact" in notes(ours)
        assert "approximated" not in notes(ours)


def test_numbers_count_in_place_of_the_name():
    stock = comfyui_in_process.patcher()
    (ours,) = ROCmOptimizedModel().optimize_model(stock, quality="high", quality_in_numbers="depth=1, every=2")
    sample(ours)
    text = ROCmOptimizationReport().report(model=ours)["result"][0]
    assert "quality depth=1,every=2" in text
    assert "deep features reused, one step of 2 computes all layers (depth 1) (as given)" in text
    assert "the first two steps of a picture compute all layers" in text
    assert "calls so far: 5 whole, 3 shallow" in text
    assert torch.equal(sample(patching.stock_clone(ours)), sample(stock))


def test_the_node_says_what_is_wrong_before_anything_runs():
    inputs = ROCmOptimizedModel.INPUT_TYPES()
    assert inputs["required"]["quality"][0] == ["exact", "high", "balanced"]
    assert inputs["optional"]["quality_in_numbers"][1]["default"] == ""
    validate = ROCmOptimizedModel.VALIDATE_INPUTS
    assert validate(quality="high") is True
    assert validate(quality="exact", quality_in_numbers="") is True
    assert validate(quality="exact", quality_in_numbers=SETTING) is True
    assert validate(quality=None, quality_in_numbers=None) is True
    assert "'evry' is no part of it" in validate(quality="exact", quality_in_numbers="depth=1,evry=3")
    assert "Use one of: exact" in validate(quality="best")
    stock = comfyui_in_process.patcher()
    (same,) = ROCmOptimizedModel().optimize_model(stock, quality_in_numbers="depth=much,every=2")
    assert same is stock


def test_nothing_is_kept_alive_by_it():
    stock = comfyui_in_process.patcher()
    ours = optimized(stock)
    sample(ours)
    import weakref

    unet = weakref.ref(stock.model.diffusion_model)
    import comfy.model_management

    comfy.model_management.unload_all_models()
    del stock, ours
    gc.collect()
    assert unet() is None


def states_guidance(patcher, reused, ended):
    """The host computes both sides in every step. In steps `reused` the answer without the prompt is put aside for the
    other one less the last difference of the UNet's answers, (x - denoised) / sigma; from step `ended` on, for the
    other one itself.
    """
    import comfy.samplers

    clone, seen = patcher.clone(), {"step": 0}

    def both(args):
        conds, x, sigma = args["conds"], args["input"], args["sigma"].view(-1, 1, 1, 1)
        options = {k: v for k, v in args["model_options"].items() if k != "sampler_calc_cond_batch_function"}
        out = comfy.samplers.calc_cond_batch(args["model"], conds, x, args["sigma"], options)
        answers = [(x - each) / sigma for each in out]
        step = seen["step"]
        seen["step"] += 1
        if step >= ended:
            return [out[0], out[0]]
        if step in reused:
            return [out[0], x - sigma * (answers[0] - seen["difference"])]
        seen["difference"] = answers[0] - answers[1]
        return out

    clone.set_model_sampler_calc_cond_batch_function(both)
    return clone


def near(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def test_guidance_is_reused_and_ends_as_it_is_stated(way):
    stock = comfyui_in_process.patcher()
    setting = Approximation(Skipping(guided_every=3, guidance_end=0.75))
    remember(UNet2DConditionModel(stock.model.diffusion_model), "psnr=1", 4, setting, "for the test", {})
    spy = Spy(stock)
    ours = sample(patched := optimized(spy.patcher, "psnr=1"))
    kinds = [whose for whose, *_ in spy.calls]
    # Two first, then one of three, and none from step 6 of 8 on.
    assert kinds == [(1, 0), (1, 0), (0,), (0,), (1, 0), (0,), (0,), (0,)]
    stated = sample(states_guidance(stock, {2, 3, 5}, 6))
    exact = sample(stock)
    assert near(ours, stated) < 1e-4
    assert near(stated, exact) > 100 * max(near(ours, stated), 1e-6)
    text = notes(patched)
    assert "guidance reused, one step of 3 computes it, no guidance after 75% of the steps" in text
    assert "3 steps so far with guidance reused" in text
    assert "2 steps so far without guidance" in text
    assert torch.equal(sample(patched), ours), "the same again"


def test_layers_and_guidance_are_left_out_of_the_same_steps(way):
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    ours = optimized(spy.patcher, "depth=1,every=2,guided_every=2")
    sample(ours)
    spy.calls.clear()
    before = steps_of(ours).counts.copy()
    sample(ours)
    assert [(whose, number) for whose, number, *_ in spy.calls] == [
        ((1, 0), 0), ((1, 0), 1), ((0,), 2), ((1, 0), 3), ((0,), 4), ((1, 0), 5), ((0,), 6), ((1, 0), 7),
    ]  # fmt: skip
    assert steps_of(ours).counts - before == {"whole": 5, "shallow": 3}
    calls, answers = [], []
    for whose, number, given, answer in spy.calls:
        rows = slice(whose.index(0), whose.index(0) + 1)
        calls.append((number, (), {name: None if each is None else each[rows] for name, each in given.items()}))
        answers.append(answer[rows])
    hold(answers, stock.model.diffusion_model, forward, calls, 1, 0, {0, 1, 3, 5, 7})


def test_guidance_is_computed_where_a_node_has_its_own_or_a_prompt_changes():
    stock = comfyui_in_process.patcher()
    theirs = stock.clone()
    theirs.set_model_sampler_cfg_function(lambda args: args["uncond"] + (args["cond"] - args["uncond"]) * 2)
    ours = optimized(theirs, "depth=1,every=2,guided_every=2")
    sample(ours)
    assert "8 steps compute it, because another node computes guidance in its own way" in notes(ours)
    ours = optimized(stock, "depth=1,every=2,guided_every=2")
    early, late = prompt(stock, 3, start_percent=0.0, end_percent=0.5), prompt(stock, 4, start_percent=0.5)
    sample(ours, positive=[*early, *late])
    assert "because a prompt is not the same in all steps" in notes(ours)


def test_without_guidance_there_is_none_to_leave_out():
    stock = comfyui_in_process.patcher()
    spy = Spy(stock)
    sample(optimized(spy.patcher, "depth=1,every=2,guided_every=2"), cfg=1.0)
    assert {whose for whose, *_ in spy.calls} == {(0,)}


def test_samplers_whose_steps_cannot_be_told_compute_guidance():
    stock = comfyui_in_process.patcher()
    ours = optimized(stock, "depth=1,every=2,guided_every=2")
    assert torch.equal(sample(ours, steps=5, sampler="heun"), sample(stock, steps=5, sampler="heun"))
    assert "steps compute it, because" in notes(ours)
