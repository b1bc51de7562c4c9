"""rocm-sd tune --quality: the fastest setting within a budget, on a model's own pictures."""

from __future__ import annotations

import json

import pytest

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd.bench import quality_search
from rocm_sd.bench.quality_methods import METHODS
from rocm_sd.bench.quality_search import candidates
from rocm_sd.cli import main
from rocm_sd.engine import Skipping
from rocm_sd.engine.approximation import small_decoder


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    # No network.
    monkeypatch.setattr(small_decoder, "_NOT_ON_THE_HUB", set(small_decoder._FAMILIES.values()))
    # So small a model's shallow steps are no faster on busy cores, and none would be a candidate.
    monkeypatch.setattr(quality_search.Searcher, "_exact_seconds", lambda _: 60.0)
    tiny_pipeline(tmp_path).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a frog\n\na dog\na cat\n")
    return tmp_path / "model"


def tune(model, *arguments) -> int:
    given = ["tune", "--quality", model, "--steps", "8", "--out", model.parent / "out", *arguments]
    with pytest.raises(SystemExit) as ended:
        main.run(
            [*map(str, given), "--prompts", str(model.parent / "prompts.txt")] if arguments else [*map(str, given)]
        )
    return int(ended.value.code or 0)


def test_cheaper_ones_come_first():
    found = candidates(20, {1: 0.2, 3: 0.6})
    costs = [cost for cost, _ in found]
    assert costs == sorted(costs)
    assert 0.1 < costs[0] < 0.3
    assert all(one.skipping.guided_every in {1, one.skipping.every} for _, one in found)
    # Too few steps to leave deep layers out, or no depth to do so at: guidance alone may end early.
    for few in (candidates(3, {1: 0.2}), candidates(20, {})):
        assert few
        assert all(one.skipping == Skipping(guidance_end=one.skipping.guidance_end) for _, one in few)
    assert not candidates(1, {1: 0.2})
    assert not candidates(20, {}, halves=False)


def test_a_setting_is_found_kept_and_used(model, capsys, monkeypatch):
    # A model this small is no faster for leaving out most of it.
    monkeypatch.setattr(quality_search.Searcher, "_speedup", lambda *_: (1.5, 1.2, 1.8))
    assert tune(model, "--within", "psnr=1", "--json") == 0
    facts = json.loads(capsys.readouterr().out)["psnr=1"]
    assert facts["approximation"]["skipping"]["every"] > 1
    reasons = {json.dumps(method["method"]): method.get("why_not", "") for method in facts["methods"]}
    assert len(reasons) == len(METHODS)
    assert "hf download madebyollin/taesd" in reasons['{"small_decoder": true}']
    assert len(facts["psnr_db"]) == len(facts["ssim"]) == 3
    assert facts["match"] is None
    assert (model.parent / "out" / "quality-psnr=1.png").is_file()
    from rocm_sd import models
    from rocm_sd.integrations import diffusers as host

    pipe = host.load_pipeline(models.resolve(str(model)), "cpu")
    rocm_sd.optimize(pipe, quality="psnr=1")
    assert any("measured here: 8 steps, 3 prompts: 1.50 times exact" in n for n in rocm_sd.report(pipe).approximations)


def test_a_budget_that_nothing_meets_is_exact_and_said_so(model, capsys):
    assert tune(model, "--within", "psnr=500") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "is within it and faster, so that it is exact" in text
    assert "small decoder: no part of the search: pictures are drawn by the VAE's own decoder" in text
    record = json.loads((model.parent / "cache" / "quality.json").read_text())
    assert record["settings"][0]["approximation"] == {}
    assert "nothing of" in record["settings"][0]["why"]
    assert len(record["settings"][0]["evidence"]["methods"]) == len(METHODS)


def test_one_that_is_not_faster_is_not_taken(model, capsys, monkeypatch):
    monkeypatch.setattr(quality_search.Searcher, "_speedup", lambda *_: (1.01, 0.97, 1.04))
    assert tune(model, "--within", "psnr=1") == 0
    assert "so that it is exact" in " ".join(capsys.readouterr().out.split())


def test_interrupted_what_was_found_before_is_kept(model, monkeypatch):
    monkeypatch.setattr(quality_search.Searcher, "_speedup", lambda *_: (1.5, 1.2, 1.8))
    own, calls = quality_search.Searcher.search, []

    def search(searcher, budget):
        calls.append(budget)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return own(searcher, budget)

    monkeypatch.setattr(quality_search.Searcher, "search", search)
    assert tune(model, "--within", "all") == 130
    record = json.loads((model.parent / "cache" / "quality.json").read_text())
    assert [entry["quality"] for entry in record["settings"]] == ["high"]


@pytest.mark.parametrize(
    ("text", "why"), [("", "It has 0 prompts"), ("a frog\n", "It has 1 prompts"), (b"\xff\xfe", "one prompt a line")]
)
def test_prompts_that_are_none(model, capsys, text, why):
    (model.parent / "prompts.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert tune(model, "--within", "high") == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_budget_that_is_none(model, capsys):
    assert tune(model, "--within", "fast") == 2
    assert "psnr=32" in capsys.readouterr().err
