"""`patch` with rows of other ranks that are a step old: lossy, as it is defined, and no more than it says."""

from __future__ import annotations

import pytest
import stale_cases
import torch

from pipelines import CASES
from rocm_sd.engine import Approximation, Skipping, optimize, report
from rocm_sd.errors import InvalidOption
from rocm_sd.numerics import compare


def psnr(ours, theirs):
    return float(-10 * torch.log10((ours - theirs).square().mean()))


@pytest.mark.parametrize(
    "late", [(False, True), (False, True, True, True), (False, False, True, False, True)], ids=["one", "more", "mixed"]
)
def test_each_operation_has_its_own_rows_of_now_and_the_others_of_before(two, late):
    for answer in two.call(stale_cases.exchanges_case, late):
        assert all(found.ok for found in answer["found"]), [str(found) for found in answer["found"]]


def test_a_late_call_differs_from_one_that_waits(two):
    late, waited = (two.call(stale_cases.exchanges_case, (False, second))[0]["answers"] for second in (True, False))
    assert torch.equal(late[0], waited[0])
    assert not torch.allclose(late[1], waited[1], atol=1e-3)


def test_the_last_call_sends_nothing(two):
    sent = two.call(stale_cases.exchanges_case, (False, True, True), (2,))[0]["sent"]
    assert sent[2] - sent[1] == 1, "its answer"
    assert sent[1] - sent[0] > 1


def test_a_call_that_computes_something_else_waits_again(two):
    # The second has two operations of three: the third call finds less than it looks for, and waits for the rest.
    answers = two.call(stale_cases.exchanges_case, (False, True, False, True), (), 1)
    for answer in answers:
        assert all(found is None or found.ok for found in answer["found"]), [str(each) for each in answer["found"]]


@pytest.mark.parametrize("plan", ["patch", "cfg=2,patch=2"])
def test_pictures_of_emoji_sd(request, plan):
    job = request.getfixturevalue("four" if "," in plan else "two")
    answers = job.call(stale_cases.emoji_case, plan, 8, 2)
    for answer in answers:
        first, second = answer["stale"]
        assert torch.equal(first, second), "nothing of one picture is left for the next"
        assert torch.equal(first, answers[0]["stale"][0]), "the same on every rank"
        # Its definition in float64 is as near as the exact picture is to its own.
        assert (first - answer["exact"]).abs().max() < 1e-3
        # Eight steps are far apart.
        assert 15 < psnr(first, answer["waited"]) < 60
        assert torch.equal(answer["again"], answer["alone"])
        assert (
            "UNet2DConditionModel is approximated: rows of other GPUs a step old after the first 2 steps"
            in (answer["said"])
        )
        # Two pictures, twice, of which the first two steps wait.
        assert "24 calls so far had rows of other ranks that are a step old" in answer["said"]


def test_a_picture_with_no_more_steps_than_wait_is_exact(two):
    for answer in two.call(stale_cases.emoji_case, "patch", 3, 3):
        found = compare(answer["stale"][0], answer["exact"], answer["alone"])
        assert found.ok, str(found)
        assert " 0 calls so far had rows" in answer["said"]


@pytest.mark.parametrize("name", ["sd15-img2img", "sd15-controlnet", "sdxl"])
def test_pipelines(two, name):
    options = {"num_inference_steps": 6, "strength": 0.9} if "img2img" in name else {"num_inference_steps": 5}
    answers = two.call(stale_cases.pipeline_case, name, "patch", 2, options)
    for answer in answers:
        first, second = answer["stale"]
        assert torch.equal(first, second)
        assert torch.equal(first, answers[0]["stale"][0])
        assert not torch.equal(first, answer["alone"])
        assert torch.isfinite(first).all()


def test_one_gpu_has_no_rows_of_others_and_says_so(tmp_path):
    pipe = optimize(CASES["sd15"].build(tmp_path), quality=Approximation(stale_after=2))
    assert any("no rows are a step old: that needs several GPUs" in note for note in report(pipe).approximations)


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_what_is_no_number_of_steps(wrong):
    with pytest.raises(InvalidOption, match="stale_after"):
        Approximation(stale_after=wrong)


def test_steps_that_leave_something_out_have_sent_nothing_of_it():
    with pytest.raises(InvalidOption, match="stale_after"):
        Approximation(Skipping(1, 2), stale_after=2)


@pytest.mark.parametrize("faster", [True, False])
def test_the_fewest_waiting_steps_within_a_budget_are_found_and_used(two, tmp_path, faster):
    speedup = (1.5, 1.2, 1.8) if faster else (1.0, 0.9, 1.1)
    answers = two.call(stale_cases.search_case, ("psnr=1", "psnr=90"), speedup, str(tmp_path))
    for found, said in answers:
        loose, tight = found["psnr=1"], found["psnr=90"]
        assert tight.approximation is None
        assert tight.tried == 3, "1, 2 and 4 of 8 steps"
        assert loose.tried == 1
        assert loose.approximation == (Approximation(stale_after=1) if faster else None)
        approximated = "is approximated: rows of other GPUs a step old after the first step (measured here: 8 steps"
        assert (approximated in said["psnr=1"]) == faster
        assert "is approximated" not in said["psnr=90"]


def test_fewer_rows_than_ranks_are_said(two):
    (first, said), (second, _) = two.call(stale_cases.small_case)
    assert torch.equal(first, second)
    assert "UNet2DConditionModel: 3 of them on 1: its smallest pictures have no more rows" in said
