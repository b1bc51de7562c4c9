"""What else than steps is left out: timed alone, kept or listed with the reason, and put together."""

from __future__ import annotations

import pytest

from rocm_sd import arch, measuring
from rocm_sd.bench import quality_methods
from rocm_sd.bench.quality_methods import METHODS, combinations, is_part, parts, timed_alone, why_not_at_work
from rocm_sd.engine import Approximation, Skipping

HALF, SMALL, INT8 = Approximation(merged=0.5), Approximation(small_decoder=True), Approximation(eight_bits="int8")
STEPS = Skipping(depth=1, every=3)


def timed(takes, why_not=None, facts=None):
    """`takes`: the times of each method in a round; exact takes 1.0 and 1.02 s, others the same."""
    calls = []

    def seconds(method):
        calls.append(method)
        found = takes.get(method, (1.0, 1.02))
        if isinstance(found, Exception):
            raise found
        return found

    reasons = why_not or {}
    return timed_alone(seconds, reasons.get, facts or arch.detect("cpu")), calls


def test_only_what_is_faster_beyond_doubt_is_kept():
    found, calls = timed({HALF: (0.9, 0.91), SMALL: (0.8, 1.01)})
    by_method = {method.approximation: method for method in found}
    assert list(by_method) == list(METHODS)
    assert [method.approximation for method in found if method.why_not is None] == [HALF]
    kept = by_method[HALF]
    assert kept.speedup == pytest.approx((1.01 / 0.905, 1.0 / 0.91, 1.02 / 0.9))
    assert kept.share == pytest.approx(0.905 / 1.01)
    assert by_method[SMALL].why_not == "it is not faster beyond doubt"
    assert "1.12 (0.99 to 1.27) times exact by itself, no part of the search" in str(by_method[SMALL])
    # In turns with exact, and what is no faster is not timed again.
    assert calls[0] == calls[-1] == Approximation()
    assert calls.count(HALF) == 2
    assert calls.count(SMALL) == 1
    assert 2 * quality_methods.TIMED == measuring.LEAST_TURNS


def test_one_that_is_faster_in_one_round_only_is_not_kept():
    rounds = iter([(0.8, 0.8), (1.1, 1.1)])

    def seconds(method):
        return next(rounds) if method == HALF else (1.0, 1.0)

    kept = {one.approximation: one for one in timed_alone(seconds, lambda _: None, arch.detect("cpu"))}[HALF]
    assert kept.why_not == "it is not faster beyond doubt"
    assert kept.speedup[1] < 1


def test_what_cannot_be_had_is_named_with_its_reason():
    failed = RuntimeError("no such layers in /somewhere/model\nand more")
    found, calls = timed({SMALL: (0.5, 0.5), INT8: failed}, {SMALL: "the VAE draws itself"})
    reasons = {method.approximation: method for method in found}
    assert reasons[SMALL].why_not == "the VAE draws itself"
    assert reasons[SMALL].speedup is None
    assert reasons[SMALL].to_dict() == {
        "method": {"small_decoder": True}, "speedup": None, "why_not": "the VAE draws itself",
    }  # fmt: skip
    assert reasons[INT8].why_not.startswith("RuntimeError: no such layers")
    assert "somewhere" not in reasons[INT8].why_not
    assert calls.count(SMALL) == calls.count(INT8) == 1
    fp8 = reasons[Approximation(eight_bits="fp8")]
    assert fp8.why_not == "cpu has no instructions that multiply fp8"
    assert Approximation(eight_bits="fp8") not in calls


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950", "gfx1201"])
def test_fp8_is_tried_where_it_is_multiplied(gfx):
    fp8 = Approximation(eight_bits="fp8")
    found, _ = timed({fp8: (0.5, 0.5)}, facts=arch.arch_from_properties(gcn_arch_name=gfx))
    assert fp8 in [method.approximation for method in found if method.why_not is None]


@pytest.mark.parametrize(
    ("method", "notes", "why"),
    [
        (HALF, ["UNet: self-attention of its outermost blocks ran on 640 of 1024 tokens"], None),
        (HALF, ["UNet: 4 calls merge no tokens, because so"], "UNet: 4 calls merge no tokens, because so"),
        (INT8, ["UNet: 30 layers multiply in int8, weights 2 -> 1 MiB"], None),
        (INT8, ["UNet: 0 layers multiply in int8, weights 2 -> 2 MiB"], "UNet: 0 layers multiply in int8"),
        (INT8, ["UNet has no layers that can be put into int8"], "UNet has no layers that can be put into int8"),
        (SMALL, ["pictures are drawn by a small decoder, x (as given)", "4 pictures drawn by the small decoder"], None),
        (SMALL, ["pictures are drawn by the VAE's own decoder: none"], "the VAE's own decoder: none"),
        (SMALL, ["1 pictures drawn by the small decoder", "2 decodes by the VAE's own decoder, because so"], "so"),
        (SMALL, [], "the report does not say that it was at work"),
    ],
)
def test_the_report_says_whether_it_was_at_work(method, notes, why):
    found = why_not_at_work(method, notes)
    assert found is None if why is None else why in found


def test_every_set_of_methods_with_what_it_takes():
    shares = {Approximation(merged=0.3): 0.95, HALF: 0.9, INT8: 0.8, SMALL: 0.97}
    found = {one: cost for cost, one in combinations(shares)}
    assert len(found) == 3 * 2 * 2
    assert found[Approximation()](0.4) == 0.4
    assert found[HALF](0.4) == pytest.approx(0.36)
    assert found[SMALL](0.4) == pytest.approx(0.37)
    everything = Approximation(merged=0.5, eight_bits="int8", small_decoder=True)
    assert found[everything](1.0) == pytest.approx(0.9 * 0.8 - 0.03)
    assert found[SMALL](0.01) > 0
    assert [one for _, one in combinations({})] == [Approximation()]


def test_parts():
    both = Approximation(STEPS, merged=0.5, small_decoder=True)
    assert parts(both) == [Approximation(STEPS), HALF, SMALL]
    assert parts(HALF) == parts(Approximation(STEPS)) == parts(Approximation()) == []
    assert all(is_part(part, both) for part in (*parts(both), Approximation(merged=0.3), both))
    others = (INT8, Approximation(merged=0.8), Approximation(Skipping(depth=1, every=2)))
    assert not any(is_part(other, both) for other in others)
