"""Ranks whose machines are unlike exchange the same all the same; and what fails half-way leaves nothing split."""

from __future__ import annotations

import alike_cases
import pytest
import torch
from torch import nn

from rocm_sd.parallel.answers import Kind, device_of
from rocm_sd.parallel.homes import send_home
from rocm_sd.parallel.inputs import _sums, why_unlike
from rocm_sd.parallel.leading import _method
from tiny_models import unet_of, vae_of


@pytest.mark.parametrize(
    ("plan", "level"),
    [("patch", "auto"), ("pipeline", "auto"), ("tensor", "memory")],
    ids=["patch", "pipeline", "memory"],
)
def test_a_rank_with_little_memory_keeps_nobody_waiting(two, plan, level):
    answers = two.call(alike_cases.memory_case, plan, level)
    for answer in answers:
        assert torch.allclose(answer["split"], answer["alone"], atol=1e-3)
        assert torch.equal(answer["split"], answers[0]["split"])
        assert torch.equal(answer["again"], answer["alone"])
        assert answer["left"] == 0
        # Under a pipeline the last rank chooses how it decodes, and the others have the picture from it.
        assert ("decode of AutoencoderKL is on rank 1 of 2" in answer["said"]) == (plan == "pipeline")


def test_what_fails_half_way_leaves_nothing_split(two):
    assert two.call(alike_cases.half_way_case) == [("it does not fit", True, True, False)] * 2


def test_a_pipeline_that_is_split_anew_makes_no_more_groups(two):
    for (once, again, other, *more), _ in two.call(alike_cases.groups_case):
        assert again == once
        assert more == [other, other]


@pytest.mark.parametrize("plan", ["cfg", "patch"])
def test_ranks_with_other_seeds_are_told_so(two, plan):
    (error, picture), (the_others, the_same) = two.call(alike_cases.seeds_case, plan)
    assert error == the_others
    assert error.startswith("Ranks 0 and 1 draw different pictures: the model is given another")
    assert "manual_seed" in error
    assert torch.equal(picture, the_same)


def test_rounding_is_no_other_picture():
    x = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 77, 64, generator=torch.Generator().manual_seed(1))
    given, rounded = ({"sample": each, "encoder_hidden_states": text} for each in (x, x.half()))
    assert why_unlike(_sums(((), given)), _sums(((), rounded))) is None
    other = given | {"encoder_hidden_states": text.flip(0)}
    assert why_unlike(_sums(((), given)), _sums(((), other))) == "the model is given another encoder_hidden_states"
    larger = given | {"sample": torch.cat([x, x])}
    assert why_unlike(_sums(((), given)), _sums(((), larger))) == "their inputs have other shapes"


def test_an_answer_lands_on_the_card_of_its_own_rank():
    own = torch.device("cuda:1")
    assert Kind((2,), torch.float16, "cuda")._place(own) == own
    assert Kind((2,), torch.float16, "cpu")._place(own) == torch.device("cpu")
    given = ((), {"sample": torch.empty(1, device="meta"), "timestep": 7})
    assert device_of(given) == torch.device("meta")


class Moved(nn.Module):
    """Says where it and its parts are moved to."""

    def __init__(self, name, moves, **parts):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, device="meta"))
        self._name, self._moves = name, moves
        for each, part in parts.items():
            self.add_module(each, part)

    def to(self, device):
        self._moves.append((self._name, str(device)))


def test_what_pipelines_call_of_a_text_encoder_stays_on_the_card():
    """With `clip_skip`, its last norm."""
    moves = []
    text_model = Moved("model", moves, final_layer_norm=Moved("norm", moves), embeddings=Moved("embeddings", moves))
    back = send_home(Moved("encoder", moves, text_model=text_model))
    assert moves == [("encoder", "cpu"), ("norm", "meta")]
    back()
    assert moves[2:] == [("encoder", "meta")]


def test_a_vae_is_led_by_its_decode():
    assert _method(vae_of()) == "decode"
    assert _method(unet_of("sd15")) == "forward"
