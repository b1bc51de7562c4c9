"""Which steps leave what out."""

from __future__ import annotations

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
    ],
)
def test_steps(skipping, layers, guidance):
    assert table(skipping) == (layers, guidance)


def test_a_picture_that_begins_later_begins_with_a_whole_step():
    assert table(Skipping(depth=1, every=3, guided_every=3), first=4) == ("WssWssWs", "g..g..g.")


def test_from_the_end_of_guidance_on_there_is_no_difference_either():
    skipping = Skipping(guided_every=2, guidance_end=0.5)
    assert [skipping.step(number, 0, 8).difference for number in range(8)] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": -1}, {"depth": 1.5}, {"every": 0}, {"every": True}, {"whole_first": 0}, {"order": 2},
        {"guided_every": 0}, {"guidance_end": 1.5}, {"guidance_end": float("nan")},
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
