"""Text encoders and safety checkers: captured, as exact as stock's, named in the report, and put back by `restore`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import CLIPConfig, CLIPImageProcessor, T5Config, T5EncoderModel

import rocm_sd
from pipelines import CASES, DEVICE, call, small_blocks_too
from rocm_sd.engine.capture import captured as captured_calls
from rocm_sd.engine.capture import randomness
from rocm_sd.engine.encoders import captured_encoders, encoders


@pytest.fixture(autouse=True)
def without_gradients():
    """As a pipeline's own call does."""
    with torch.no_grad():
        yield


@pytest.fixture
def captured(monkeypatch):
    small_blocks_too(monkeypatch, "1")


def checker():
    """Of a picture of 32 pixels a side; random weights find all pictures harmless, or none."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(vision_config=vision | {"image_size": 32, "patch_size": 8}, projection_dim=16)
    torch.manual_seed(7)
    return StableDiffusionSafetyChecker(config).eval()


def with_checker(folder):
    parts = CASES["sd15"].components
    extractor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})

    def components(tokenizer):
        return parts(tokenizer) | {"safety_checker": checker(), "feature_extractor": extractor}

    return replace(CASES["sd15"], components=components).build(folder)


def notes_of(pipe, name):
    return [note for note in rocm_sd.report(pipe).notes if note.startswith(name)]


def test_a_cpu_captures_nothing_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("ROCM_SD_STEP_GRAPH", raising=False)
    pipe = rocm_sd.optimize(with_checker(tmp_path).to("cpu"))
    text = "no rule is for its layers; it runs as stock does (nothing is captured here)"
    assert notes_of(pipe, "text_encoder") == [f"text_encoder (CLIPTextModel): {text}"]
    assert notes_of(pipe, "safety_checker") == [f"safety_checker (StableDiffusionSafetyChecker): {text}"]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3"])
def test_prompts_are_encoded_by_graphs_with_stocks_bits(tmp_path, name):
    stock, ours = CASES[name].build(tmp_path), rocm_sd.optimize(CASES[name].build(tmp_path))
    # Of each kind the first lays out, the second captures, and all others are replayed.
    for prompt in ("a frog", "a dog", "an old red bus", "a frog"):
        theirs, mine = (pipe.encode_prompt(prompt, **_encoded(name, pipe)) for pipe in (stock, ours))
        for one, other in zip(mine, theirs, strict=True):
            assert torch.allclose(one, other, atol=1e-5), prompt
    parts = [part for part in ("text_encoder", "text_encoder_2") if getattr(ours, part, None) is not None]
    for part in parts:
        replayed = [note for note in notes_of(ours, f"{part} (") if "of its forward" in note]
        assert len(replayed) == 1, rocm_sd.report(ours).notes
        assert int(replayed[0].split("replayed ")[1].split()[0]) >= 2
    rocm_sd.restore(ours)
    assert all("forward" not in getattr(ours, part).__dict__ for part in parts)


def _encoded(name, pipe):
    if name == "sd3":
        return {"prompt_2": None, "prompt_3": None, "max_sequence_length": 12}
    return {"device": pipe.device, "num_images_per_prompt": 1, "do_classifier_free_guidance": True}


@pytest.mark.usefixtures("captured")
def test_hidden_states_of_every_layer(tmp_path):
    """transformers puts hooks on its layers when they are asked for: the graph of before is made anew, and is right."""
    stock, ours = CASES["sd15"].build(tmp_path), rocm_sd.optimize(CASES["sd15"].build(tmp_path))
    for number in range(8):
        ids = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(number)).to(DEVICE)
        wanted = bool(number % 2)
        theirs, mine = (pipe.text_encoder(ids, output_hidden_states=wanted) for pipe in (stock, ours))
        assert type(mine) is type(theirs)
        assert mine.keys() == theirs.keys()
        assert len(mine.hidden_states or ()) == (3 if wanted else 0)
        for one, other in zip(mine.hidden_states or (), theirs.hidden_states or (), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        assert torch.allclose(mine.pooler_output, theirs.pooler_output, atol=1e-5)
    assert "2 graphs of its forward" in str(notes_of(ours, "text_encoder"))


@pytest.mark.usefixtures("captured")
def test_weights_that_change_are_seen(tmp_path):
    ours = rocm_sd.optimize(CASES["sd15"].build(tmp_path))
    named = _encoded("sd15", ours)
    before = [ours.encode_prompt("a frog", **named)[0] for _ in range(3)][-1]
    layer = dict(ours.text_encoder.named_modules())
    layer = next(module for path, module in layer.items() if path.endswith("layers.1.mlp.fc1"))
    layer.weight = torch.nn.Parameter(layer.weight * 2)
    after = ours.encode_prompt("a frog", **named)[0]
    assert not torch.allclose(before, after, atol=1e-4)
    stock = CASES["sd15"].build(tmp_path)
    stock.text_encoder.load_state_dict(ours.text_encoder.state_dict())
    assert torch.allclose(after, stock.encode_prompt("a frog", **named)[0], atol=1e-5)


@pytest.mark.usefixtures("captured")
def test_somebody_elses_hook_is_called_every_time(tmp_path):
    ours = rocm_sd.optimize(CASES["sd15"].build(tmp_path))
    seen = []
    layer = next(module for path, module in ours.text_encoder.named_modules() if path.endswith("layers.0"))
    layer.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        ours.encode_prompt("a frog", **_encoded("sd15", ours))
    assert len(seen) == 8, "a prompt and its negative, four times"
    assert "has a hook" in str(notes_of(ours, "text_encoder"))


@pytest.mark.usefixtures("captured")
def test_the_safety_checker_gives_stocks_verdict(tmp_path):
    stock, ours = with_checker(tmp_path), rocm_sd.optimize(with_checker(tmp_path))
    for seed in range(4):
        theirs, mine = (call(pipe, CASES["sd15"], seed, output_type="np") for pipe in (stock, ours))
        assert np.allclose(mine, theirs, atol=2e-3)
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    answers = [pipe.safety_checker(clip_input=pixels, images=np.zeros((3, 8, 8, 3)))[1] for pipe in (stock, ours)]
    assert answers[0] == answers[1]
    assert "its vision model's calls are captured" in str(notes_of(ours, "safety_checker"))
    assert any("of its forward" in note for note in notes_of(ours, "safety_checker"))
    rocm_sd.restore(ours)
    assert "forward" not in ours.safety_checker.vision_model.__dict__


def test_t5_is_one_of_them_and_other_packages_are_not(tmp_path):
    pipe = CASES["sd3"].build(tmp_path)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    pipe.register_modules(text_encoder_3=T5EncoderModel(config).eval())
    assert {name.split(" ")[0] for name in encoders(pipe)} == {"text_encoder", "text_encoder_2", "text_encoder_3"}
    pipe.register_modules(text_encoder_3=torch.nn.Linear(2, 2))
    assert len(encoders(pipe)) == 2
    assert encoders(pipe.text_encoder) == {}


def test_what_lies_elsewhere_is_not_captured(tmp_path):
    pipe = CASES["sd15"].build(tmp_path).to("cpu")
    assert captured_encoders(pipe, torch.device("cpu"))
    pipe.text_encoder.to("meta")
    assert captured_encoders(pipe, torch.device("cpu")) == {}


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_model_with_dropout_at_work_draws_what_stock_draws(tmp_path, name):
    def pictures(pipe):
        for model in (pipe.text_encoder, pipe.unet):
            model.train()
        for each in pipe.text_encoder.modules():
            if hasattr(each, "dropout") and isinstance(each.dropout, float):
                each.dropout = 0.3  # of CLIP's attention
        for _ in range(4):
            torch.manual_seed(0)
            yield call(pipe, CASES[name])

    # One random number more in any call of a picture would change all that comes after.
    for ours, theirs in zip(
        pictures(rocm_sd.optimize(CASES[name].build(tmp_path))), pictures(CASES[name].build(tmp_path)), strict=True
    ):
        assert np.allclose(ours, theirs, atol=1e-4)


@pytest.mark.usefixtures("captured")
def test_the_report_says_that_random_numbers_are_drawn(tmp_path):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path))
    pipe.text_encoder.train()
    for each in pipe.text_encoder.modules():
        if hasattr(each, "dropout") and isinstance(each.dropout, float):
            each.dropout = 0.3
    call(pipe, CASES["sd15"])
    assert any("it draws random numbers" in note for note in notes_of(pipe, "text_encoder"))


def tokens(pipe):
    return torch.arange(pipe.tokenizer.model_max_length)[None] % pipe.text_encoder.config.vocab_size


@pytest.mark.usefixtures("captured")
def test_numbers_that_another_thread_draws_meanwhile_are_drawn_once(tmp_path, monkeypatch):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path))
    drawn = []

    class Meanwhile(randomness.Drawn):
        def __init__(self, device):
            super().__init__(device)
            if len(drawn) < 2:  # while kernels are compiled, and in the first run
                drawn.append(torch.rand(3))

    monkeypatch.setattr(captured_calls, "Drawn", Meanwhile)
    torch.manual_seed(0)
    for _ in range(3):
        pipe.text_encoder(tokens(pipe))
    drawn.append(torch.rand(3))
    torch.manual_seed(0)
    assert all(torch.equal(one, torch.rand(3)) for one in drawn)
    assert not any("random numbers" in note for note in notes_of(pipe, "text_encoder"))


@pytest.mark.usefixtures("captured")
def test_what_drew_in_training_has_a_graph_after_it(tmp_path):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path))
    for each in pipe.text_encoder.modules():
        if hasattr(each, "dropout") and isinstance(each.dropout, float):
            each.dropout = 0.3
    pipe.text_encoder.train()
    pipe.text_encoder(tokens(pipe))
    assert any("it draws random numbers" in note for note in notes_of(pipe, "text_encoder"))
    pipe.text_encoder.eval()
    for _ in range(3):
        pipe.text_encoder(tokens(pipe))
    assert not any("it draws random numbers" in note for note in notes_of(pipe, "text_encoder"))
