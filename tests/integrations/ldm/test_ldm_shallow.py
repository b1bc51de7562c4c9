"""Passes of both hosts' UNets that leave deep layers out, when they are taken, and what `quality` says."""

from __future__ import annotations

import pytest
import torch
from ldm_hosts import HOSTS, picture
from shallow_statement import hold

from rocm_sd.engine import Approximation, Skipping
from rocm_sd.engine.approximation import Setting, known, remember
from rocm_sd.errors import InvalidOption
from rocm_sd.integrations.ldm import HostPasses, HostSetting, ShallowSteps, Told, quality_of, run_pass, settings_for
from rocm_sd.integrations.ldm import quality as host_quality
from rocm_sd.integrations.ldm.shallow_pass import deepest, why_no_pass

# The stand-in for ComfyUI's UNet has no way up; test_comfyui_quality.py has the real one.
UNETS = [name for name in HOSTS if name.startswith("a1111")]


@pytest.fixture(autouse=True)
def own_measurements(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))


@pytest.fixture(params=UNETS)
def unet_and_call(request, as_new):
    host = HOSTS[request.param]()
    kind = type(host.unet())
    original = host.package.unet.timestep_embedding
    unet = host.unet()

    def embedding(*args, **kwargs):
        # As the host has it cast to its UNet's dtype.
        return original(*args, **kwargs).to(host.dtype)

    host.package.unet.timestep_embedding, host.dtype = embedding, torch.float32
    # The original's word for attention in the model's own dtype, whatever that is.
    host.package.attention._ATTN_PRECISION = "fp16"

    def forward(model, *args, **kwargs):
        host.dtype = next(model.parameters()).dtype
        return kind.forward(model, *args, **kwargs)

    return unet, kind.forward, forward, host.unet_inputs()


def steps_of(inputs, count, seed=30):
    """Calls of so many steps, each with a picture of its own."""
    moved = picture(*inputs["x"].shape, seed=seed)
    return [
        (step, (), {**inputs, "x": inputs["x"] + 0.3 * step * moved, "timesteps": inputs["timesteps"] - 5.0 * step})
        for step in range(count)
    ]


class Driver:
    """A host that says which step it is."""

    def __init__(self, unet, forward, *settings):
        self.unet, self.forward, self.run = unet, forward, torch.zeros(1)
        self.steps = ShallowSteps(settings or [setting("depth=1,every=3,order=1")], lambda _error: False)
        self.broken, self.why_not = None, None

    def __call__(self, step, kwargs, whose="one", count=20, why=None, run=None, text=None):
        form = tuple(kwargs["x"].shape)
        told = Told(self.run if run is None else run, step, count, whose, form, text) if step is not None else None

        def stock():
            return self.forward(self.unet, **kwargs)

        def branch(depth, features):
            if self.broken is not None:
                raise self.broken
            return run_pass(self.forward, self.unet, depth, features, **kwargs)

        passes = HostPasses(stock, stock, branch, branch, lambda: self.why_not)
        with torch.no_grad():
            return self.steps.answer(self.unet, told, why, passes)


def setting(text, from_steps=1):
    return HostSetting(from_steps, quality_of(text), "as given")


def test_a_whole_pass_has_the_hosts_bits_and_a_shallow_one_with_its_features_too(unet_and_call):
    unet, forward, _, inputs = unet_and_call
    with torch.no_grad():
        stock = forward(unet, **inputs)
        assert deepest(unet) == 3
        for depth in range(1, 4):
            whole, features = run_pass(forward, unet, depth, None, **inputs)
            assert torch.equal(whole, stock)
            shallow, same = run_pass(forward, unet, depth, features, **inputs)
            assert torch.equal(shallow, stock)
            assert same is features
            other, _ = run_pass(forward, unet, depth, features * 1.5, **inputs)
            assert not torch.allclose(other, stock, rtol=1e-3)


def test_a_shallow_pass_computes_no_deep_layer(unet_and_call):
    unet, forward, _, inputs = unet_and_call
    called = []
    for name in ("input_blocks", "output_blocks"):
        for number, block in enumerate(getattr(unet, name)):
            block.register_forward_hook(lambda *_, at=(name, number): called.append(at))
    unet.middle_block.register_forward_hook(lambda *_: called.append("middle"))
    with torch.no_grad():
        _, features = run_pass(forward, unet, 1, None, **inputs)
        called.clear()
        run_pass(forward, unet, 1, features, **inputs)
    assert called == [("input_blocks", 0), ("output_blocks", 3)]


@pytest.mark.parametrize(("depth", "order"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)])
def test_a_schedule_is_as_exact_as_its_statement(unet_and_call, depth, order):
    unet, forward, in_any_dtype, inputs = unet_and_call
    calls = steps_of(inputs, 9)
    driver = Driver(unet, forward, setting(f"depth={depth},every=3,order={order}"))
    answers = [driver(step, kwargs) for step, _, kwargs in calls]
    # Two whole ones first, then one of three.
    hold(answers, unet, in_any_dtype, calls, depth, order, {0, 1, 4, 7})
    assert driver.steps.counts == {"whole": 4, "shallow": 5}
    assert not driver.steps.exact_because


def test_two_pictures_at_once_are_not_mixed_up(unet_and_call):
    unet, forward, in_any_dtype, inputs = unet_and_call
    first = steps_of(inputs, 7)
    second = steps_of({**inputs, "x": 2 * inputs["x"].flip(0), "context": inputs["context"].flip(1)}, 7, seed=31)
    driver = Driver(unet, forward)
    answers = {"one": [], "other": []}
    for (step, _, one), (_, _, other) in zip(first, second, strict=True):
        answers["one"].append(driver(step, one, "one"))
        answers["other"].append(driver(step, other, "other"))
    hold(answers["one"], unet, in_any_dtype, first, 1, 1, {0, 1, 4})
    hold(answers["other"], unet, in_any_dtype, second, 1, 1, {0, 1, 4})


def shallow_steps(driver, calls, **more):
    """Which of the steps were shallow."""
    found = []
    for step, kwargs in calls:
        before = driver.steps.counts["shallow"]
        answer = driver(step, kwargs, **more)
        if driver.steps.counts["shallow"] > before:
            found.append(step)
        else:
            with torch.no_grad():
                assert torch.equal(answer, driver.forward(driver.unet, **kwargs))
    return found


@pytest.fixture
def driver(as_new):
    host = HOSTS["a1111-fake-ldm"]()
    unet = host.unet()
    driver = Driver(unet, type(unet).forward)
    driver.calls = [(step, kwargs) for step, _, kwargs in steps_of(host.unet_inputs(), 12)]
    return driver


def test_another_picture_size_batch_or_schedule_starts_afresh(driver):
    assert shallow_steps(driver, driver.calls[:6]) == [2, 3, 5]
    # The next picture, of the same sampler object.
    assert shallow_steps(driver, driver.calls[:4]) == [2, 3]
    # Of another one, which goes on with the numbers.
    assert shallow_steps(driver, driver.calls[4:8], run=torch.ones(1)) == [6, 7]
    half = [(step, {name: value[:1] for name, value in kwargs.items()}) for step, kwargs in driver.calls[8:12]]
    assert shallow_steps(driver, half) == [10, 11]


def test_a_call_between_two_steps_is_exact_and_changes_nothing_else(driver):
    for step, kwargs in driver.calls[:6]:
        driver(step, kwargs)
        driver(None, kwargs, why="its sigma is none")
    assert driver.steps.counts == {"whole": 3, "shallow": 3}
    assert driver.steps.exact_because == {"its sigma is none": 6}


def test_a_step_that_comes_twice_makes_the_picture_exact(driver):
    """Heun's sampler: step 1 before its turn, and again in it."""
    numbers = [0, 1, 1, 2, 2, 3, 3, 4]
    calls = [(number, driver.calls[at][1]) for at, number in enumerate(numbers)]
    assert shallow_steps(driver, calls) == []
    assert driver.steps.exact_because == {"it is called more than once at one step": 6}
    # The next picture is another matter.
    assert shallow_steps(driver, driver.calls[:4], run=torch.ones(1)) == [2, 3]


def test_features_that_are_too_old_are_not_used(driver):
    assert shallow_steps(driver, [driver.calls[step] for step in (0, 1, 2, 6, 7, 11)]) == [2]


def test_a_prompt_that_changes_starts_afresh(driver):
    one, other = torch.ones(2, 3), torch.zeros(2, 3)
    assert shallow_steps(driver, driver.calls[:3], text=one) == [2]
    assert shallow_steps(driver, driver.calls[3:6], text=other) == [5]


def test_a_reason_makes_a_call_exact_and_forgets_its_features(driver):
    assert shallow_steps(driver, driver.calls[:3]) == [2]
    assert shallow_steps(driver, driver.calls[3:4], why="a ControlNet adds to its layers") == []
    assert shallow_steps(driver, driver.calls[4:7]) == [6]
    assert "1 calls are exact, because a ControlNet adds to its layers" in "\n".join(driver.steps.notes())


def test_a_foreign_layer_makes_it_exact_from_the_next_whole_step_on(driver):
    driver.why_not = "its Linear has a hook"
    assert shallow_steps(driver, driver.calls) == []
    assert driver.steps.exact_because == {"its Linear has a hook": 12}


def test_settings_by_the_number_of_steps(driver):
    driver.steps = ShallowSteps([setting("depth=1,every=2", 8), setting("depth=1,every=4", 16)], lambda _e: False)
    assert shallow_steps(driver, driver.calls[:8], count=8) == [2, 4, 6]
    assert shallow_steps(driver, driver.calls[:8], count=16, run=torch.ones(1)) == [2, 3, 4, 6, 7]
    assert shallow_steps(driver, driver.calls[:4], count=4, run=torch.ones(1)) == []
    assert driver.steps.exact_because == {"nothing was measured for 4 steps": 4}


def test_whole_steps_at_the_end(driver):
    driver.steps = ShallowSteps([setting("depth=1,every=6,whole_last=2")], lambda _error: False)
    assert shallow_steps(driver, driver.calls[:6], count=6) == [2, 3]


def test_gradients_are_exact(driver):
    _, kwargs = driver.calls[0]

    def stock():
        return driver.forward(driver.unet, **kwargs)

    told = Told(driver.run, 0, 20, "one", ())
    driver.steps.answer(driver.unet, told, None, HostPasses(stock, stock, None, None, lambda: None))
    assert driver.steps.exact_because == {"gradients are wanted": 1}


def test_a_forward_that_is_built_in_another_way_is_noticed_before_anything_is_left_out(driver):
    """One that does not go by the blocks that it is shown."""
    unet, forward = driver.unet, driver.forward
    driver.forward = lambda _seen, **kwargs: forward(unet, **kwargs)
    assert shallow_steps(driver, driver.calls[:4]) == []
    assert "does not call each block once" in "\n".join(driver.steps.notes())

    def skewed(seen, **kwargs):
        answer = forward(seen, **kwargs)
        return answer if seen is unet else answer * 1.01

    driver.forward, driver.steps = skewed, Driver(unet, skewed).steps
    assert shallow_steps(driver, driver.calls[:4]) == []
    assert "its whole pass differs from the host's own" in "\n".join(driver.steps.notes())


def test_an_error_is_answered_by_the_host_and_not_tried_again(driver):
    assert shallow_steps(driver, driver.calls[:2]) == []
    driver.broken = RuntimeError("no kernel for it\nat all")
    assert shallow_steps(driver, driver.calls[2:6]) == []
    assert driver.steps.exact_because == {"it failed (RuntimeError: no kernel for it)": 4}


def test_memory_that_ran_out_is_tried_again(driver):
    shallow_steps(driver, driver.calls[:2])
    driver.broken = torch.OutOfMemoryError("out of memory")
    assert shallow_steps(driver, driver.calls[2:4]) == []
    driver.broken = None
    assert shallow_steps(driver, driver.calls[4:8]) == [6, 7]


def test_an_error_of_the_hosts_own_reaches_it(driver):
    driver.steps = ShallowSteps([setting("depth=1,every=3")], lambda error: isinstance(error, KeyError))
    driver.broken = KeyError("the user's")
    with pytest.raises(KeyError):
        driver(0, driver.calls[0][1])


def test_unets_without_a_shallow_pass(driver):
    unet = driver.unet
    assert why_no_pass(unet, 3) is None
    assert why_no_pass(unet, 4) == "it has 3 layers to leave out"
    unet.output_blocks[1][0].__class__ = type("VideoResBlock", (type(unet.output_blocks[1][0]),), {})
    assert why_no_pass(unet, 1) == "it has a VideoResBlock"
    assert "another way" in why_no_pass(torch.nn.Linear(1, 1), 1)
    assert shallow_steps(driver, driver.calls[:4]) == []


@pytest.mark.parametrize("text", ["exact", "high", "balanced", "psnr=32,ssim=0.97", "match=1"])
def test_names_and_budgets_stay_as_they_are(text):
    assert quality_of(text) == text


def test_a_setting_is_spelt():
    assert quality_of(" depth=1, every=3 ,order=1") == Skipping(depth=1, every=3, order=1)
    whole = "depth=2,every=4,whole_first=3,whole_last=2,guided_every=4,guidance_end=0.8"
    assert quality_of(whole) == Skipping(2, 4, 3, 2, guided_every=4, guidance_end=0.8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "'best' is not known"),
        ("", "Use one of: exact, high, balanced"),
        ("psnr=much", "psnr=32,ssim=0.97"),
        ("depth=1,evry=3", "'evry' is no part of it"),
        ("depth=1,psnr=3", "'psnr' is no part of it"),
        ("depth=1,every=2,first_block=0.1", "'first_block' is no part of it"),
        ("depth=1,depth=2", "a name comes twice"),
        ("depth=one,every=2", "'one'"),
        ("depth=1.5,every=2", "'1.5'"),
        ("depth=1,every=3,order=2", "order 2"),
        ("depth=-1,every=3", "depth -1"),
        ("depth=1", "It leaves nothing out here"),
        ("guided_every=4", "It leaves nothing out here"),
        ("depth=1,every=2,merged=0.5", "Leave out merged: tokens are not merged"),
        ("eight_bits=int8", "Leave out eight_bits: products keep the model's dtype"),
    ],
)
def test_what_is_spelt_wrong_is_said_with_what_to_type(text, words):
    with pytest.raises(InvalidOption) as error:
        quality_of(text)
    assert words in str(error.value)


def test_what_is_shipped_for_a_family_is_found_by_its_widths(as_new):
    host = HOSTS["a1111-fake-ldm"]()
    unet = host.package.unet.UNetModel(
        image_size=8, in_channels=4, model_channels=64, out_channels=4, num_res_blocks=1, attention_resolutions=[1, 2],
        num_heads=2, context_dim=192,
    )  # fmt: skip
    settings, why = settings_for(unet, "high")
    assert why is None
    assert [one.from_steps for one in settings] == [16, 40]
    assert all(one.caches and len(one.notes) == 1 for one in settings)
    assert all(one.notes[0].startswith("guidance is computed in every step: the host") for one in settings)
    assert settings_for(unet, "exact") == ([], None)


def test_a_model_that_was_not_measured_is_exact_with_what_to_type(driver):
    assert settings_for(driver.unet, "high")[0] == []
    assert settings_for(driver.unet, "high")[1].endswith("type: rocm-sd tune --quality MODEL")
    assert settings_for(driver.unet, "psnr=32")[1].endswith("rocm-sd tune --quality MODEL --within psnr=32")
    assert settings_for(torch.nn.Linear(1, 1), "high")[0] == []


def test_why_a_model_is_exact_names_its_family(driver):
    assert "no setting for models like it comes with rocm-sd" in settings_for(driver.unet, "high")[1]
    assert "no setting for a budget in numbers comes with rocm-sd" in settings_for(driver.unet, "psnr=32")[1]


def test_all_that_a_setting_says_and_a_host_cannot_do_is_said_with_the_hosts_own_way(driver, monkeypatch):
    all_of_it = Approximation(
        Skipping(depth=1, every=2, guided_every=2), merged=0.5, eight_bits="int8", small_decoder=True
    )
    monkeypatch.setattr(host_quality, "known", lambda *_: [Setting(1, all_of_it, "for the test")])
    (found,), why = settings_for(driver.unet, "high", {"merged": "the node that does it", "eight_bits": "a setting"})
    assert why is None
    said = " ".join(found.notes)
    assert len(found.notes) == 4
    assert "guidance is computed in every step: " in said
    assert "(the node that does it)" in said
    assert "(a setting)" in said
    assert "the VAE draws the picture" in said
    coarse = Approximation(eight_bits="int8")
    monkeypatch.setattr(host_quality, "known", lambda *_: [Setting(1, coarse, "for the test")])
    assert (
        "leaves out no layers (for the test); products keep the model's dtype" in settings_for(driver.unet, "high")[1]
    )


def test_what_was_measured_with_diffusers_holds_for_the_same_weights(driver):
    diffusers = pytest.importorskip("diffusers")
    measured = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), cross_attention_dim=24, layers_per_block=1, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    unet = driver.unet
    with torch.no_grad():
        measured.conv_in.weight.copy_(unet.input_blocks[0][0].weight)
        measured.conv_out.weight.copy_(unet.out[-1].weight)
    approximation = Approximation(Skipping(depth=2, every=4), merged=0.5)
    remember(measured, "high", 12, approximation, "by hand", {})
    assert known(measured, "high")
    (found,), why = settings_for(unet, "high")
    assert why is None
    assert (found.from_steps, found.skipping) == (12, Skipping(depth=2, every=4))
    assert found.notes == ("tokens are not merged: the host patches its attention by itself for that",)
    assert "by hand" in found.why
    with torch.no_grad():
        unet.out[-1].weight.mul_(1.5)
    assert settings_for(unet, "high")[0] == []
    remember(measured, "balanced", 12, Approximation(merged=0.5), "by hand", {})
    with torch.no_grad():
        unet.out[-1].weight.div_(1.5)
    assert "leaves out no layers" in settings_for(unet, "balanced")[1]
    remember(measured, "balanced", 12, Approximation(Skipping(depth=1, whole=(0, 0.2, 0.5))), "by hand", {})
    assert "its own schedule of whole steps is not done here" in settings_for(unet, "balanced")[1]
