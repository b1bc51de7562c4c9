"""Graphs between the exchanges of a split model: the same pictures, the same exchanges, and nobody waits for ever."""

from __future__ import annotations

import re

import graph_cases
import pytest
import torch
from jobs import Job
from torch import nn

from rocm_sd.parallel.graphs import install_graphs


@pytest.fixture(scope="module")
def two():
    job = Job(2, ROCM_SD_STEP_GRAPH="1")
    yield job
    job.close()


@pytest.mark.parametrize("plan", ["patch", "tensor"])
def test_emoji_sd(two, plan):
    answers, eager = two.call(graph_cases.emoji_case, plan), two.call(graph_cases.eager_case, plan)
    for answer, without in zip(answers, eager, strict=True):
        assert answer["found"].ok, str(answer["found"])
        assert answer["same"], "captured and replayed"
        assert torch.equal(answer["split"], answers[0]["split"])
        assert torch.equal(answer["split"], without["split"]), "the bits of an eager run"
        assert answer["restored"]
        # Two pictures of four steps: one call as it is, one written down, six replayed.
        found = re.search(r"graphs between its exchanges \((\d+) for a call\), replayed 6 times", answer["said"])
        assert found, answer["said"]
        assert int(found[1]) > 20
        # A capture and its trial send nothing.
        assert answer["sent"] == without["sent"]


def test_a_model_that_has_changed_is_captured_anew(two):
    for answer in two.call(graph_cases.emoji_case, "patch"):
        assert not torch.allclose(answer["changed"], answer["split"], atol=1e-2)
        assert torch.allclose(answer["changed"], answer["changed_alone"], atol=1e-3)


@pytest.mark.parametrize("name", ["sd15-controlnet", "sdxl"])
def test_pipelines(two, name):
    answers = two.call(graph_cases.pipeline_case, name, "patch", False, {"num_inference_steps": 4})
    for answer in answers:
        assert answer["found"].ok, str(answer["found"])
        assert torch.equal(answer["split"], answers[0]["split"])
        assert answer["restored"]
        assert "replayed 2 times" in answer["said"]


def test_a_mesh():
    job = Job(4, ROCM_SD_STEP_GRAPH="1")
    answers = job.call(graph_cases.pipeline_case, "sdxl", "cfg=2,patch=2", False, {"num_inference_steps": 4})
    job.close()
    for answer in answers:
        assert answer["found"].ok, str(answer["found"])
        assert torch.equal(answer["split"], answers[0]["split"])
        assert "replayed 2 times" in answer["said"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("is wrong", "its replay differs from the model's forward"),
        ("fails", "operation not permitted when stream is capturing"),
        ("sends", "ranks agree on something between its exchanges"),
    ],
)
def test_a_rank_whose_graph_is_not_used_goes_on_with_the_others(two, how, why):
    answers = two.call(graph_cases.spoiled_case, how)
    for answer in answers:
        for picture in answer["pictures"]:
            assert torch.allclose(picture, answer["alone"], atol=1e-3)
            assert torch.equal(picture, answers[0]["pictures"][0])
    assert f"6 calls without a graph, because {why}" in answers[0]["said"]
    assert "replayed 6 times" in answers[1]["said"]


class Dropping(nn.Module):
    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, x):
        return (self.dropout(x) * 2,)


@torch.no_grad()
def test_a_model_that_draws_random_numbers_runs_as_it_is():
    model, x = Dropping(), torch.ones(2, 64)

    def pictures():
        torch.manual_seed(0)
        return torch.stack([model(x)[0] for _ in range(12)])

    alone = pictures()
    installed = install_graphs(model)
    assert torch.equal(pictures(), alone)
    # The first call of a kind is counted by nobody.
    assert "11 calls without a graph, because it draws random numbers" in "".join(installed.notes())
