"""A pipeline that is larger than a card: each rank has its part there, at no moment the whole, and reads no other."""

from __future__ import annotations

import placing_cases
import pytest
import torch


def require_right(answers):
    """The picture of one process on every rank, and everything at home again after it."""
    for answer in answers:
        assert torch.allclose(answer["split"], answer["alone"], atol=1e-3)
        assert torch.equal(answer["split"], answers[0]["split"])
        assert torch.equal(answer["again"], answer["alone"])
        # What came is what is there: no piece was a detour.
        assert answer["carried"] == answer["on card"]


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd15-controlnet"])
def test_a_rank_has_its_heads_and_columns(two, name):
    answers = two.call(placing_cases.card_case, name, "tensor")
    require_right(answers)
    for answer in answers:
        assert answer["carried"] == answer["whole"] - answer["layers"] // 2
        # By which `auto` chooses.
        assert answer["carried"] == answer["expected"]["tensor"]
        assert "on cpu, the rest waits" in answer["said"]


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd15-controlnet"])
def test_a_rank_has_its_blocks(two, name):
    answers = two.call(placing_cases.card_case, name, "pipeline")
    require_right(answers)
    for answer in answers:
        assert answer["carried"] < 0.85 * answer["whole"]
        assert "on cpu, the rest waits" in answer["said"]
    # Together they have everything.
    assert sum(answer["carried"] for answer in answers) >= answers[0]["whole"]
    assert max(answer["carried"] for answer in answers) == answers[0]["expected"]["pipeline"]


@pytest.mark.parametrize("plan", ["cfg=2,tensor=2", "tensor", "cfg=2,pipeline=2", "pipeline=2,tensor=2"])
def test_four_ranks(four, plan):
    answers = four.call(placing_cases.card_case, "sdxl", plan)
    require_right(answers)
    for answer in answers:
        if "pipeline" in plan:
            assert answer["carried"] < 0.85 * answer["whole"]
        else:
            ranks = 4 if plan == "tensor" else 2
            assert answer["carried"] == answer["whole"] - answer["layers"] * (ranks - 1) // ranks


def test_layers_of_a_block_are_divided_too(four):
    """A mesh of both has less on its fullest rank than two ranks by blocks alone."""
    by_both, by_blocks = (
        max(answer["carried"] for answer in four.call(placing_cases.card_case, "sdxl", plan))
        for plan in ("pipeline=2,tensor=2", "cfg=2,pipeline=2")
    )
    assert by_both < by_blocks


def test_more_ranks_have_less_each(two, four):
    half, quarter = (job.call(placing_cases.card_case, "sdxl", "pipeline") for job in (two, four))
    assert max(answer["carried"] for answer in quarter) < max(answer["carried"] for answer in half)


@pytest.mark.parametrize("plan", ["cfg", "patch", "data"])
def test_what_every_rank_computes_is_whole_on_each(two, plan):
    answers = two.call(placing_cases.card_case, "sd15", plan)
    require_right(answers)
    for answer in answers:
        assert answer["carried"] == answer["whole"]
        assert answer["at home"] == 0
        assert "the rest waits" not in answer["said"]


def test_layers_with_a_lora_run_whole(two):
    answers = two.call(placing_cases.card_case, "sd15", "tensor", True)
    require_right(answers)


def test_a_card_that_is_full_leaves_the_pipeline_at_home(two):
    for error, as_before in two.call(placing_cases.full_case, "cfg", 0.9):
        assert "of weights do not fit on cpu (HIP out of memory. Tried to allocate 2 GiB)." in error
        assert error.endswith("--parallel pipeline, or --parallel tensor.")
        assert as_before
    for error, as_before in two.call(placing_cases.full_case, "pipeline", 0.2):
        assert error.endswith("Take more GPUs, or another model.")
        assert as_before
    # The same room suffices for a part.
    assert two.call(placing_cases.full_case, "pipeline", 0.9) == [(None, True)] * 2


def test_a_pipeline_that_something_else_moves_is_refused(two):
    for words in two.call(placing_cases.moved_case):
        assert "a pipeline with group offload" in words
        assert 'no .to("cuda")' in words


def test_a_machine_without_a_gpu_is_said_before_anything_is_moved(two):
    for words in two.call(placing_cases.no_gpu_case):
        assert words.startswith("torch sees no GPU.")
        assert 'device="cpu"' in words
