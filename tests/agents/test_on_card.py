"""Rung 5 by processes within walls: on this machine the interpreter on the CPU stands where a card would be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from rocm_sd.agents import asking, cards, keeping, on_card, page
from rocm_sd.agents.cards import Card, Recorded
from rocm_sd.agents.confinement import confined
from rocm_sd.agents.improving import improve, run_of
from rocm_sd.agents.judging import OFFERED, REFUSED, SLOWER, Judge
from rocm_sd.agents.proposals import Proposal, functions_text
from rocm_sd.agents.proposers import Replayed
from rocm_sd.agents.verdicts import Judged, Rung, timing_of
from rocm_sd.errors import DeviceUnavailable, RocmSdError
from rocm_sd.ops import OPS

OP = OPS["guided_step"]
BUCKET = "1x4x64x64, 2 states, guidance number, float16"
TURNS = 8
CARD = Card("cpu", "sm_90", "this machine", turns=TURNS)
OWN = {"block": 1024, "warps": 8}
FASTER = {"block": 16384, "warps": 8}
SLOWEST = {"block": 256, "warps": 2}
PASSED = {"rung": 5, "arch": "sm_90", "state": "passed", "finding": "", "figures": {}}


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(cards, "confined", partial(confined, environment={"TRITON_INTERPRET": "1"}))
    return Judge(OP, ("sm_90",), card=CARD)


@pytest.mark.slow
def test_a_config_is_compared_and_timed_in_turns_with_the_shipped_one(interpreted):
    """One program in place of four: the interpreter runs them one by one."""
    judged = interpreted(Proposal("config", "one program", config=FASTER, bucket=BUCKET))
    assert [(each.rung, each.arch, each.state) for each in judged.rungs] == [
        (1, "any", "passed"), (2, "cpu", "passed"), (2, "a million values", "skipped"),
        (3, "sm_90", "skipped"), (5, "sm_90", "passed"),
    ]  # fmt: skip
    (timing,) = judged.measured
    assert (timing.device, timing.arch, timing.call, timing.turns) == ("this machine", "sm_90", BUCKET, TURNS)
    assert timing.low <= timing.ratio <= timing.high
    assert timing.us > 0
    assert timing.stock_us > 0
    assert (judged.verdict == OFFERED) == timing.is_faster
    assert judged.score == pytest.approx(1 / timing.ratio, abs=1e-3)
    assert f"{timing.ratio:.3f}" in judged.finding


@pytest.mark.slow
def test_a_kernel_that_is_wrong_on_the_card_alone_fails_there_and_is_not_timed(interpreted, monkeypatch):
    """What the interpreter passed is not believed: here the card gets another kernel than rung 2 did."""
    text = functions_text(OP)
    wrong = text.replace("value = value.to(model_input", "value = (1.01 * value).to(model_input", 1)
    assert wrong != text
    assert interpreted._card.climbed(*_asked(interpreted, text))[0].state == "passed"
    rung, timings = interpreted._card.climbed(*_asked(interpreted, wrong))
    assert (rung.rung, rung.state, timings) == (5, "failed", ())


def _asked(judge, text):
    proposal = Proposal("kernel", "a change", text=text, bucket=BUCKET)
    return proposal, judge._job(proposal, climb=True), judge._files(proposal)


@pytest.mark.slow
def test_the_best_of_a_space_on_the_card_is_what_climbs(interpreted):
    judged = interpreted(Proposal("space", bucket=BUCKET, listed=(SLOWEST, FASTER), strategy="halving"))
    assert judged.config == FASTER
    assert judged.measured or any(each.rung == 5 and each.state == "skipped" for each in judged.rungs)


def times(ours, shipped=100.0):
    # Milliseconds that vary from turn to turn, for both sides alike.
    drift = [1.0 + 0.001 * (turn % 3) for turn in range(TURNS)]
    return {
        "call": BUCKET, "ours": [ours * each for each in drift], "shipped": [shipped * each for each in drift],
        "stock": [2 * shipped] * TURNS,
    }  # fmt: skip


@pytest.fixture
def answering(monkeypatch):
    """Rung 2 passed, and the card's processes answer what they are told to, one after the other."""
    pytest.importorskip("triton")
    climbed = [{**PASSED, "rung": 2, "arch": arch} for arch in ("cpu", "a million values")]

    def set_to(*answers):
        left = list(answers)
        monkeypatch.setattr(asking, "confined", lambda *_given, **_named: {"rungs": climbed, "counted": {}})
        monkeypatch.setattr(cards, "confined", lambda *_given, **_named: json.loads(json.dumps(left.pop(0))))
        return Judge(OP, ("sm_90",), card=CARD), left

    return set_to


CONFIG = Proposal("config", config=FASTER, bucket=BUCKET)


def found(ours, **more):
    return {"rungs": [PASSED], "times": [times(ours)], **more}


def test_what_is_faster_twice_is_offered_with_the_second_times(answering):
    judge, left = answering(found(80.0), found(90.0))
    judged = judge(CONFIG)
    assert judged.verdict == OFFERED
    assert judged.measured[0].ratio == pytest.approx(100 / 90, abs=1e-3)
    assert judged.measured_shares == {"sm_90": pytest.approx(0.9, abs=1e-3)}
    assert not left


def test_what_is_faster_by_chance_alone_is_not_offered(answering):
    judge, left = answering(found(80.0), found(100.0))
    assert judge(CONFIG).verdict == SLOWER
    assert not left


def test_what_is_slower_is_timed_once(answering):
    judge, left = answering(found(120.0), found(80.0))
    judged = judge(CONFIG)
    assert (judged.verdict, judged.measured[0].verdict) == (SLOWER, "slower")
    assert len(left) == 1


FORGED = {
    "no times": {"times": []},
    "too few turns": {"times": [{**times(80.0), "ours": [80.0]}]},
    "times below zero": {"times": [{**times(80.0), "ours": [-1.0] * TURNS}]},
    "no rung": {"rungs": []},
    "another card": {"rungs": [{**PASSED, "arch": "gfx1100"}]},
    "a rung that was skipped": {"rungs": [{**PASSED, "state": "skipped"}]},
}


@pytest.mark.parametrize("name", FORGED)
def test_what_a_process_on_the_card_makes_up_is_refused(answering, name):
    judge, _ = answering(found(80.0, **FORGED[name]))
    judged = judge(CONFIG)
    assert (judged.verdict, judged.rungs[-1].rung, judged.measured) == (REFUSED, 5, ())


def test_a_config_that_was_not_asked_for_is_no_answer_of_a_search(answering):
    judge, _ = answering({"found": [{"config": {"block": 1, "warps": 1}, "share": 0.5}], "faults": []})
    # Both are of the op's own space, so that no interpreter is asked.
    judged = judge(Proposal("space", bucket=BUCKET, listed=(SLOWEST, OWN)))
    assert judged.verdict == REFUSED
    assert "other configs" in judged.finding


def test_a_record_of_a_card_is_replayed_to_the_same_tree_with_no_card(answering, tmp_path):
    judge, _ = answering(
        found(80.0), found(90.0),
        {"found": [{"config": SLOWEST, "share": 0.7}], "faults": []}, found(120.0),
        {"found": [{"config": OWN, "share": 1.25}], "faults": []},
    )  # fmt: skip
    space = Proposal("space", bucket=BUCKET, listed=(SLOWEST, OWN), strategy="halving")
    proposals = [CONFIG, space, replace(space, listed=(OWN,))]
    with keeping.keeping(tmp_path, run_of(OP, ("sm_90",), "told", card=CARD.name)) as kept:
        improve(OP, kept, Told(proposals), judge, seconds=600.0, rounds=3)
    record = keeping.read(kept.file)
    assert [each.judged.verdict for each in record.rounds] == [OFFERED, SLOWER, SLOWER]
    assert "1.250 of the shipped config's measured time" in record.rounds[2].judged.finding
    assert "this machine" in page.made(record)
    with keeping.keeping(tmp_path / "again", run_of(OP, ("sm_90",), "replayed")) as again:
        offline = Judge(OP, ("sm_90",), card=Recorded(record.rounds))
        improve(OP, again, Replayed(record.rounds), offline, seconds=600.0)
        assert keeping.tree_of(again.rounds) == keeping.tree_of(record.rounds)


class Told:
    """Proposes what it was given; a record keeps it as any other."""

    name = "told"

    def __init__(self, proposals):
        self._proposals = proposals

    def propose(self, rounds):
        from rocm_sd.agents.proposers import Proposed

        return Proposed(0, "", "", self._proposals[len(rounds)])


def test_a_card_is_asked_for_where_nothing_else_proves():
    with pytest.raises(RocmSdError, match="proven on such a card alone, and none is here"):
        Judge(OP, ("sm_90",))
    with pytest.raises(RocmSdError, match="gfx1100"):
        Judge(OP, ("gfx1100", "sm_90"), card=replace(CARD, arch="gfx1100"))
    Judge(OP, ("gfx1100",), card=CARD)


def test_a_device_that_cannot_be_used_says_so():
    with pytest.raises(DeviceUnavailable, match="within walls"):
        cards.find("cuda:99")
    assert cards.find("cpu") is None


def test_measured_time_decides_where_there_is_a_card_and_modelled_time_elsewhere():
    def timing(arch, ours):
        return timing_of("a card", arch, BUCKET, *(times(ours)[who] for who in ("ours", "shipped", "stock")))

    passed = (Rung(5, "gfx1100", "passed", ""),)
    assert Judged(SLOWER, passed, ratio={"gfx1100": 1.2}, measured=(timing("gfx1100", 80.0),)).is_better
    assert not Judged(SLOWER, passed, ratio={"gfx1100": 0.8}, measured=(timing("gfx1100", 120.0),)).is_better
    both = Judged(SLOWER, passed, ratio={"gfx1100": 0.8, "gfx942": 1.1}, measured=(timing("gfx1100", 80.0),))
    assert not both.is_better
    assert both.shares == {"gfx1100": pytest.approx(0.8, abs=1e-3), "gfx942": 1.1}
    assert both.score == pytest.approx(math.sqrt(0.8 * 1.1), abs=1e-3)


def test_what_a_graph_leaves_unwritten_is_seen_when_it_is_made_once_more():
    import torch

    beside = object.__new__(on_card._Beside)
    x, y = torch.ones(3), torch.ones(4)
    beside.bench = type("bench", (), {"arguments": (x,)})
    beside._poison((x.view(3), y))
    assert x.isfinite().all()
    assert y.isnan().all()
