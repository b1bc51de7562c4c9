"""Speed against quality of SD3, whose transformer leaves out later blocks; Flux's packed latents are refused."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

from pipelines import CASES
from rocm_sd import models
from rocm_sd.bench import lossy
from rocm_sd.bench.pareto import Choice, Survey, choices, short, workload_of
from rocm_sd.bench.subjects import Subjects
from rocm_sd.engine import Approximation, Skipping
from rocm_sd.errors import Unsupported
from tiny_models import TEXT

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))

    def save(name, place, width, **deep):
        pipe = CASES[name].build(tmp_path)
        pipe.transformer = type(pipe.transformer).from_config(dict(pipe.transformer.config) | deep)
        pieces = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz")]
        tokenizer = T5TokenizerFast(tokenizer_object=Tokenizer(Unigram(pieces, unk_id=2)), extra_ids=0)
        config = T5Config(vocab_size=len(pieces), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        pipe.register_modules(**{f"text_encoder_{place}": T5EncoderModel(config), f"tokenizer_{place}": tokenizer})
        pipe.save_pretrained(tmp_path / "tiny")
        return models.resolve(str(tmp_path / "tiny"))

    return save


def test_blocks_of_sd3_are_surveyed(saved, tmp_path):
    work = workload_of(saved("sd3", 3, 2 * TEXT, num_layers=4), CPU, 6)
    named = [choice.name for choice in choices(work.pipeline(), 20, 100)]
    assert "first block 0.12" in named
    assert "1/2 g" in named
    by_steps, by_itself = Approximation(Skipping(depth=1, every=2)), Approximation(Skipping(first_block=2.0))
    settings = [Choice(short(one), one) for one in (by_steps, by_itself)]
    record = Survey(work, Subjects(("a frog", "a dog")), settings, out=tmp_path / "out").go()
    first, second = record.measurements[2:]
    assert first.left_out is None
    assert first.error <= 2 * first.stock_error + torch.finfo(torch.float32).eps
    assert second.left_out is None
    # What the first block's change decides, float64 may decide otherwise.
    assert second.notes == (lossy.NO_DEFINITION,)
    assert second.error is None
    assert all(one.quality.prompts == 2 for one in (first, second))


def test_packed_latents_are_refused_before_anything_is_drawn(saved):
    source = saved("flux-dev", 2, TEXT, num_layers=2, num_single_layers=2)
    with pytest.raises(Unsupported) as refused:
        workload_of(source, CPU, 4)
    assert "FluxPipeline" in str(refused.value)
    assert "SD3" in str(refused.value)
