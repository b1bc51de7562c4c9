"""Which steps leave what out."""

from __future__ import annotations

import json

import pytest

from rocm_sd.engine.approximation import EXACT, Skipping
from rocm_sd.errors import InvalidOption


def table(skipping, count=12, first=0):
    steps = [skipping.step(number, first, count) for number in range(first, count)]
    return "".join("W" if step.whole else "s" for step in steps), "".join("g" if s.guided else "." for s in steps)


@pytest.mark.parametrize(
    ("skipping", "layers", "guidance"),
    [
        (EXACT, "WWWWWWWWWWWW", "gggggggggggg"),
        (Skipping(depth=1, every=3), "WssWssWssWss", "gggggggggggg"),
        (Skipping(depth=1, every=4, whole_first=3, whole_last=2), "WWWsssWsssWW", "gggggggggggg"),
        (Skipping(guided_every=2), "WWWWWWWWWWWW", "g.g.g.g.g.g."),
        (Skipping(guided_every=3, guided_first=2), "WWWWWWWWWWWW", "gg..g..g..g."),
        (Skipping(guidance_end=0.5), "WWWWWWWWWWWW", "gggggg......"),
        (Skipping(depth=2, every=2, guided_every=2), "WsWsWsWsWsWs", "g.g.g.g.g.g."),
        # These may be shallow: their first block tells.
        (Skipping(first_block=0.1), "Wsssssssssss", "gggggggggggg"),
        (Skipping(first_block=0.1, whole_first=2, whole_last=3), "WWsssssssWWW", "gggggggggggg"),
        (Skipping(first_block=0.1, every=4, guided_every=4), "WsssWsssWsss", "g...g...g..."),
        (Skipping(depth=1, whole=(0, 1 / 12, 0.25, 2 / 3)), "WWsWssssWsss", "gggggggggggg"),
        (Skipping(depth=1, whole=(0.5,), whole_last=1), "WsssssWssssW", "gggggggggggg"),
        (Skipping(depth=1, whole=(0.0833, 0.5833), guided_every=2), "WWsssssWssss", "gg.....g...."),
        (Skipping(depth=1, whole=(0.99,)), "Wsssssssssss", "gggggggggggg"),
    ],
)
def test_steps(skipping, layers, guidance):
    assert table(skipping) == (layers, guidance)


def test_a_picture_that_begins_later_begins_with_a_whole_step():
    assert table(Skipping(depth=1, every=3, guided_every=3), first=4) == ("WssWssWs", "g..g..g.")


@pytest.mark.parametrize("count", [1, 2, 5, 7, 20, 50, 999])
def test_a_schedule_of_its_own_fits_any_number_of_steps(count):
    uniform = Skipping(depth=1, every=2)
    own = Skipping(depth=1, whole=tuple(round(number / count, 4) for number in range(0, count, 2)))
    assert table(own, count) == table(uniform, count)
    fewer = Skipping(depth=1, whole=(0.0, 0.1, 0.5))
    assert sum(fewer.step(number, 0, count).whole for number in range(count)) == min(count, 3)
    # Of a picture that begins later: its first step, and those of the schedule that are left.
    assert table(Skipping(depth=1, whole=(0, 0.5, 0.75)), first=5) == ("WWssWss"[:7], "ggggggg")


def test_from_the_end_of_guidance_on_there_is_no_difference_either():
    skipping = Skipping(guided_every=2, guidance_end=0.5)
    assert [skipping.step(number, 0, 8).difference for number in range(8)] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": -1}, {"depth": 1.5}, {"every": 0}, {"every": True}, {"whole_first": 0}, {"order": 2},
        {"guided_every": 0}, {"guidance_end": 1.5}, {"guidance_end": float("nan")}, {"first_block": -0.1},
        {"depth": 1, "whole": (0.5, 0.2)}, {"depth": 1, "whole": (0.2, 0.2)}, {"depth": 1, "whole": (1.0,)},
        {"depth": 1, "whole": (-0.1,)}, {"depth": 1, "whole": (float("nan"),)}, {"depth": 1, "whole": (True,)},
        {"depth": 1, "whole": ("0.1",)}, {"depth": 1, "whole": 0.5}, {"whole": (0.5,)}, {"depth": 1, "whole": "0.5"},
        {"depth": 1, "every": 2, "whole": (0.5,)}, {"depth": 1, "first_block": 0.1, "whole": (0.5,)},
        {"first_block": float("nan")}, {"first_block": float("inf")}, {"first_block": True}, {"first_block": "0.1"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(InvalidOption):
        Skipping(**wrong)


def test_it_says_what_it_leaves_out():
    assert str(EXACT) == "nothing left out"
    assert EXACT.is_exact
    assert Skipping(depth=3).is_exact, "each step is whole"
    skipping = Skipping(depth=1, every=4, order=1, guided_every=2, guidance_end=0.8)
    assert not skipping.is_exact
    words = str(skipping)
    for part in ("extrapolated", "one step of 4", "one step of 2", "no guidance after 80%"):
        assert part in words
    assert Skipping(**skipping.to_dict()) == skipping


def test_it_says_which_steps_of_a_schedule_are_whole():
    skipping = Skipping(depth=2, whole=(0, 0.05, 0.4), guided_every=2, order=1)
    assert skipping.caches
    assert not skipping.is_exact
    assert str(skipping) == (
        "deep features extrapolated, steps at 0%, 5%, 40% of the schedule compute all layers (depth 2), "
        "guidance reused, the same steps compute it"
    )
    again = Skipping(**json.loads(json.dumps(skipping.to_dict())))
    assert again == skipping
    assert hash(again) == hash(skipping)
    assert "whole" not in Skipping(depth=1, every=2).to_dict()


def test_it_says_what_the_first_block_decides():
    assert Skipping(first_block=0).is_exact
    assert Skipping(first_block=0.0, depth=3).is_exact
    skipping = Skipping(first_block=0.12)
    assert skipping.caches
    assert not skipping.is_exact
    assert skipping.to_dict() == {"first_block": 0.12}
    assert str(skipping) == "later blocks reused where the first block changes by less than 0.12"
    words = str(Skipping(first_block=0.3, depth=2, order=1, every=5, guided_every=5))
    for part in (
        "extrapolated",
        "the first 2 blocks change by less than 0.3",
        "one step of 5 computes all",
        "guidance",
    ):
        assert part in words
    assert Skipping(**json.loads(json.dumps(skipping.to_dict()))) == skipping
    assert [Skipping(depth=depth).head for depth in (0, 1, 3)] == [1, 1, 3]
