"""rocm-sd tune --quality of SD3 and Flux: thresholds of the first block and schedules, kept by the transformer."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

import rocm_sd
from pipelines import CASES, call
from rocm_sd.bench import quality_search
from rocm_sd.bench.quality_search import approximated_model, candidates
from rocm_sd.cli import main
from rocm_sd.engine.approximation import known, small_decoder
from tiny_models import TEXT

# Of each pipeline: a transformer deep enough for every candidate, and the encoder that its tiny one goes without.
DEEP = {"sd3": ({"num_layers": 4}, 3, 2 * TEXT), "flux-dev": ({"num_layers": 2, "num_single_layers": 2}, 2, TEXT)}


@pytest.fixture(params=DEEP)
def name(request):
    return request.param


@pytest.fixture
def model(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    # No network.
    monkeypatch.setattr(small_decoder, "_NOT_ON_THE_HUB", set(small_decoder._FAMILIES.values()))
    # Thresholds that a model of random weights stays below.
    monkeypatch.setattr(quality_search, "_FIRST_BLOCK", (0.9, 2.0))
    # Flux's pipeline has a size of its own, whatever its model is like; tokens by the thousand take minutes here.
    small = property(lambda _: 8, lambda *_: None)
    monkeypatch.setattr(FluxPipeline, "default_sample_size", small, raising=False)
    pipe = CASES[name].build(tmp_path)
    deep, place, width = DEEP[name]
    pipe.transformer = type(pipe.transformer).from_config(dict(pipe.transformer.config) | deep)
    pieces = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz")]
    tokenizer = T5TokenizerFast(tokenizer_object=Tokenizer(Unigram(pieces, unk_id=2)), extra_ids=0)
    config = T5Config(vocab_size=len(pieces), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipe.register_modules(**{f"text_encoder_{place}": T5EncoderModel(config), f"tokenizer_{place}": tokenizer})
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a frog\na dog\n")
    return tmp_path / "model"


def tune(model, *arguments) -> int:
    given = ["tune", "--quality", model, "--steps", "6", "--out", model.parent / "out", *arguments]
    with pytest.raises(SystemExit) as ended:
        main.run([*map(str, given), "--prompts", str(model.parent / "prompts.txt")])
    return int(ended.value.code or 0)


def test_thresholds_are_among_the_candidates():
    found = candidates(20, {1: 0.2}, {0.1: 0.5, 0.3: 0.15})
    costs = [cost for cost, _ in found]
    assert costs == sorted(costs)
    assert {(0.5, 0.1), (0.15, 0.3)} <= {(cost, one.skipping.first_block) for cost, one in found}
    assert len(found) == len(candidates(20, {1: 0.2})) + 2
    alone = candidates(20, {1: 0.2}, halves=False)
    assert all(one.skipping.guided_every == 1 for _, one in alone)
    assert [one.skipping.first_block for _, one in candidates(20, {}, {0.1: 0.5}, halves=False)] == [0.1]


def test_which_model_is_approximated(tmp_path):
    for name, part in (("sd15", "unet"), ("sd3", "transformer"), ("flux-dev", "transformer")):
        pipe = CASES[name].build(tmp_path)
        assert approximated_model(pipe) is getattr(pipe, part)
    assert approximated_model(torch.nn.Linear(2, 2)) is None


def test_a_setting_is_found_kept_and_used(model, name, capsys, monkeypatch):
    # A model this small is hardly faster for leaving out most of it.
    monkeypatch.setattr(quality_search.Searcher, "_speedup", lambda *_: (1.5, 1.2, 1.8))
    timed = []
    own = quality_search.Searcher._approximated_seconds

    def seconds(searcher, skipping, what):
        timed.append((what, own(searcher, skipping, what)))
        return 1e-3 if skipping.first_block == 2.0 else None

    monkeypatch.setattr(quality_search.Searcher, "_approximated_seconds", seconds)
    assert tune(model, "--within", "psnr=1", "--json") == 0
    facts = json.loads(capsys.readouterr().out)["psnr=1"]
    assert facts["approximation"] == {"skipping": {"first_block": 2.0}}
    assert [what for what, _ in timed] == ["depth 1", "depth 3", "first block 0.9", "first block 2"]
    assert all(taken is not None and taken > 0 for _, taken in timed), "each has shallow steps"
    assert len(facts["psnr_db"]) == 2
    merged = [method["why_not"] for method in facts["methods"] if "merged" in method["method"]]
    assert len(merged) == 3
    assert all("merges no tokens, because" in why for why in merged)
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    rocm_sd.optimize(pipe, quality="psnr=1")
    call(pipe, CASES[name], num_inference_steps=6)
    notes = " ".join(rocm_sd.report(pipe).approximations)
    assert "measured here: 6 steps, 2 prompts: 1.50 times exact" in notes
    assert " shallow" in notes
    # With other weights it is another model.
    with torch.no_grad():
        pipe.transformer.proj_out.weight += 1
    assert known(pipe.transformer, "psnr=1") == []


def test_a_budget_that_nothing_meets_is_exact(model, capsys, monkeypatch):
    # On busy cores a model this small has no candidates: all of them are drawn, whatever they take here.
    monkeypatch.setattr(quality_search.Searcher, "_exact_seconds", lambda _: 60.0)
    monkeypatch.setattr(quality_search, "_EVERY", (2,))
    drawn, own = [], quality_search.Searcher._screened
    monkeypatch.setattr(
        quality_search.Searcher, "_screened", lambda searcher, one: drawn.append(one) or own(searcher, one)
    )
    timed = []
    monkeypatch.setattr(quality_search.Searcher, "_speedup", lambda _, one: timed.append(one) or (1.0, 1.0, 1.0))
    assert tune(model, "--within", "psnr=500") == 0
    assert "is within it and faster, so that it is exact" in " ".join(capsys.readouterr().out.split())
    assert json.loads((model.parent / "cache" / "quality.json").read_text())["settings"][0]["approximation"] == {}
    assert {one.skipping.first_block for one in drawn} >= {0.9, 2.0}
    assert any(one.skipping.depth for one in drawn if not one.skipping.first_block)
    assert timed == [], "what is outside is not timed against exact"
