"""Every strategy, and meshes of them, on processes of the CPU: the picture is that of one process, within the rule."""

from __future__ import annotations

import time

import cases
import pytest
import torch
from jobs import Job


@pytest.fixture(scope="module", params=[2, 4])
def job(request):
    job = Job(request.param)
    yield job
    job.close()


def require_right(answers):
    """On every rank: within the rule, the same bits as on the others, and stock's after `restore`."""
    for answer in answers:
        assert answer["found"].ok, str(answer["found"])
        assert torch.equal(answer["split"], answers[0]["split"])
        assert answer["restored"]


@pytest.mark.parametrize("strategy", ["patch", "cfg", "tensor", "pipeline"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize(("height", "width", "batch"), [(16, 8, 2), (9, 7, 3), (5, 8, 1)])
def test_a_unet(job, family, strategy, height, width, batch):
    answers = job.call(cases.unet_case, family, {strategy: job.size}, height, width, batch)
    require_right(answers)
    assert all(answer["same"] for answer in answers)
    # With one entry there is nothing to be shared out.
    assert (sum(answer["sent"].get(strategy, 0) for answer in answers) > 0) == (strategy != "cfg" or batch > 1)


@pytest.mark.parametrize("weights", [[3.0, 1.0], [1.0, 10.0]])
@pytest.mark.parametrize("strategy", ["patch", "cfg", "tensor", "pipeline"])
def test_ranks_of_unequal_speed_get_unequal_parts(strategy, weights, two):
    answers = two.call(cases.unet_case, "sd15", {strategy: 2}, 16, 8, 4, weights)
    require_right(answers)
    slower, faster = sorted(range(2), key=weights.__getitem__)
    assert answers[slower]["multiplied"] < answers[faster]["multiplied"]


@pytest.mark.parametrize(
    "dims",
    [{"cfg": 2, "patch": 2}, {"pipeline": 2, "tensor": 2}, {"patch": 2, "tensor": 2}, {"cfg": 2, "pipeline": 2}],
    ids="x".join,
)
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_meshes(four, family, dims):
    require_right(four.call(cases.unet_case, family, dims, 9, 8, 2))


def test_more_ranks_than_rows_at_the_coarsest_level(four):
    """Three latent rows are two at the next level: two ranks work, and the others have the answer from them."""
    answers = four.call(cases.unet_case, "sd15", {"patch": 4}, 3, 8, 2)
    require_right(answers)
    assert not answers[3]["sent"]


@pytest.mark.parametrize("plan", ["cfg", "patch", "tensor", "pipeline", "auto", "data"])
def test_emoji_sd_to_its_pixels(two, plan):
    require_right(two.call(cases.emoji_case, plan, 72, 64))


@pytest.mark.parametrize("plan", ["cfg=2,patch=2", "data=2,cfg=2", "patch", "pipeline"])
def test_emoji_sd_on_four(four, plan):
    require_right(four.call(cases.emoji_case, plan))


@pytest.mark.parametrize("plan", ["cfg", "patch", "tensor", "pipeline"])
@pytest.mark.parametrize("name", ["sdxl", "sd15-img2img", "sd15-controlnet", "sd15-two-controlnets", "sdxl-controlnet"])
def test_pipelines(two, name, plan):
    answers = two.call(cases.pipeline_case, name, plan)
    require_right(answers)
    assert plan in answers[0]["said"]


@pytest.mark.parametrize("plan", ["cfg", "tensor"])
def test_a_transformer(two, plan):
    require_right(two.call(cases.pipeline_case, "sd3", plan))


@pytest.mark.parametrize("plan", ["patch", "pipeline"])
def test_a_transformer_is_refused(two, plan):
    two.start(cases.pipeline_case, "sd3", plan)
    for right, (name, text, _) in two.answers():
        assert (right, name) == (False, "Unsupported")
        assert text.startswith(f"{plan} does not support SD3Transformer2DModel")


@pytest.mark.parametrize("plan", ["cfg", "patch", "tensor", "pipeline"])
def test_with_a_lora(two, plan):
    require_right(two.call(cases.pipeline_case, "sd15", plan, True))


def test_a_slow_rank_gets_fewer_pictures(two):
    answers = two.call(cases.shared_case, 12, 1)
    assert all(answer == answers[0] for answer in answers)
    assert [square for square, _ in answers[0]] == [index * index for index in range(12)]
    by_rank = [sum(rank == mine for _, rank in answers[0]) for mine in (0, 1)]
    assert by_rank[0] >= 9


def test_a_killed_rank_is_said_by_the_others_within_seconds():
    job = Job(2)
    job.start(cases.killed_case, 1)
    # It is gone when its pipe has an end; what it took to start does not count.
    assert job.answer_of(1) == (False, ("Killed", "it is gone", ""))
    began = time.monotonic()
    right, (name, text, _) = job.answer_of(0)
    assert time.monotonic() - began < 60
    job.close()
    assert (right, name) == (False, "JobFailed")
    assert text.startswith("Another process of this job cannot be reached any more")


def test_unequal_versions_are_said():
    job = Job(2)
    job.start(cases.versions_case)
    answers = job.answers()
    job.close()
    for right, (name, text, _) in answers:
        assert (right, name) == (False, "JobFailed")
        assert "Rank 1 has rocm-sd 0.0.9, and rank 0 has" in text
