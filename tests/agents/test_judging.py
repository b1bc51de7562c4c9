"""A process that judges is a stranger: what it leaves out or makes up ends in a finding, never in an offer."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from rocm_sd.agents import asking, trying
from rocm_sd.agents.judging import OFFERED, REFUSED, SLOWER, Judge
from rocm_sd.agents.proposals import Proposal, functions_text
from rocm_sd.errors import RocmSdError
from rocm_sd.ops import OPS
from rocm_sd.tuning.ranking import Code, CodePart, Program
from rocm_sd.tuning.static.tasks import CompiledLaunch
from rocm_sd.verify.programs import CountedLaunch

GEGLU = OPS["geglu"]
BOTH = ("gfx1100", "gfx942")
CALLS = [bucket.sample.name for bucket in GEGLU.tuning.buckets]
KERNEL = Proposal("kernel", "a change", functions_text(GEGLU))


def config_of_a_space(function, job, figures):
    """What a process says of one config among several."""
    made = answers(climb=False, calls=[job["bucket"]], **figures)
    compiled, counted = made["compile_and_execute"]["compiled"], made["interpret"]["counted"]
    return {"fault": "", "figures": counted if "interpret" in function else compiled}


def rung(number, arch, state="passed"):
    return {"rung": number, "arch": arch, "state": state, "finding": "", "figures": {}}


def launches(arch, loaded=2**16, vector=100, vgprs=32):
    """(compiled, counted) of one launch of a thousand workgroups."""
    grid, wave = (1000, 1, 1), 32 if arch == "gfx1100" else 64
    part = CodePart(vector, 4, 0, 0, 64, (16,))
    code = Code(4, wave, 4, 1, part, part, has_loop=False)
    made = CompiledLaunch("_geglu", grid, {}, code, vgprs, 0, 8, 1.0, 0)
    return [asdict(made)], [asdict(CountedLaunch("_geglu", grid, Program(loaded, 2**15, (), 2**24)))]


def answers(climb, architectures=BOTH, calls=CALLS, **figures):
    made = {arch: {call: launches(arch, **figures) for call in calls} for arch in architectures}
    of_two = [{arch: {call: made[arch][call][at] for call in calls} for arch in architectures} for at in (0, 1)]
    climbed = [rung(number, arch) for number in (3, 4) for arch in architectures] if climb else []
    interpreted = [rung(2, "cpu"), rung(2, "a million values")] if climb else []
    return {
        "interpret": {"rungs": interpreted, "counted": of_two[1]},
        "compile_and_execute": {"rungs": climbed, "compiled": of_two[0], "counted": {}},
    }


@pytest.fixture
def answering(monkeypatch):
    """Sets what the processes answer, once with the shipped kernel and then with a proposal."""
    pytest.importorskip("triton")

    def set_to(change=lambda _answers: None, **figures):
        def confined(function, job, **_named):
            if "configs" in job:
                entries = [config_of_a_space(function, job, figures) for _ in job["configs"]]
                return json.loads(json.dumps({"found": entries}))
            proposed = job["climb"]
            found = answers(
                proposed, calls=[job["bucket"]] if job["bucket"] else CALLS, **(figures if proposed else {})
            )
            found = json.loads(json.dumps(found))
            if proposed:
                change(found)
            answer = found[function.partition(":")[2]]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(asking, "confined", confined)
        return Judge(GEGLU, BOTH)

    return set_to


def test_what_loads_less_is_offered_and_what_does_not_says_what_got_worse(answering):
    assert answering(loaded=2**14, vector=20)(KERNEL).verdict == OFFERED
    even = answering()(KERNEL)
    assert (even.verdict, even.worse, set(even.ratio.values())) == (SLOWER, (), {1.0})
    judged = answering(loaded=2**17, vector=150, vgprs=40)(KERNEL)
    assert judged.verdict == SLOWER
    assert "Worse than the shipped kernel: gfx1100: bytes loaded, 2.00 times" in judged.finding
    assert "gfx942: vector instructions, 1.50 times" in judged.finding
    assert "gfx942: VGPRs, 1.25 times" in judged.finding
    assert "bytes stored" not in judged.finding


FORGED = {
    "no rung at all": lambda found: found["interpret"]["rungs"].clear(),
    "one rung too few": lambda found: found["compile_and_execute"]["rungs"].pop(1),
    "the last is missing": lambda found: found["compile_and_execute"]["rungs"].pop(),
    "another order": lambda found: found["compile_and_execute"]["rungs"].reverse(),
    "another arch": lambda found: found["compile_and_execute"]["rungs"][0].update(arch="gfx1201"),
    "an unknown state": lambda found: found["compile_and_execute"]["rungs"][3].update(state="fine"),
    "a rung after one that failed": lambda found: found["interpret"]["rungs"][0].update(state="failed"),
    "no arch compiled": lambda found: found["compile_and_execute"]["compiled"].clear(),
    "no call counted": lambda found: found["interpret"]["counted"]["gfx942"].clear(),
    "one arch more": lambda found: found["interpret"]["counted"].update(gfx90a={}),
    "no launches": lambda found: found["compile_and_execute"]["compiled"]["gfx942"].update({CALLS[0]: []}),
    "a launch that is a text": lambda found: found["interpret"]["counted"]["gfx942"].update({CALLS[0]: "x"}),
    "a program without end": lambda found: programs(found).update(loaded=-(10**9)),
    "no waves": lambda found: codes(found).update(waves=0, resident=0),
    "one bad compilation": lambda found: found.update(compile_and_execute=RocmSdError("It does not compile.")),
}


def programs(found):
    return found["interpret"]["counted"]["gfx942"][CALLS[0]][0]["program"]


def codes(found):
    return found["compile_and_execute"]["compiled"]["gfx942"][CALLS[0]][0]["code"]


@pytest.mark.parametrize("name", FORGED)
def test_what_a_process_leaves_out_or_makes_up_is_refused(answering, name):
    judged = answering(FORGED[name], loaded=2**14, vector=20)(KERNEL)
    assert judged.verdict == REFUSED
    assert judged.finding
    assert judged.score == math.inf


def test_a_failed_rung_ends_the_climb(answering):
    def fail(found):
        del found["interpret"]["rungs"][1:]
        found["interpret"]["rungs"][0]["state"] = "failed"

    judged = answering(fail)(KERNEL)
    assert (judged.verdict, judged.height) == (REFUSED, 1)


def test_a_config_that_does_not_compile_leaves_the_others_of_its_space(answering, monkeypatch):
    judge = answering(loaded=2**14, vector=20)
    confined = asking.confined

    def one_fails(function, job, **named):
        found = confined(function, job, **named)
        for config, entry in zip(job.get("configs", ()), found.get("found", ()), strict=True):
            if config["warps"] == 2:
                entry["fault"] = "Compiling it ended with an error."
        return found

    monkeypatch.setattr(asking, "confined", one_fails)
    judged = judge(Proposal("space", bucket=CALLS[0], config={"block_f": 256, "rows": 1}, space={"warps": (1, 2)}))
    assert (judged.verdict, judged.config["warps"]) == (OFFERED, 1)
    judged = judge(Proposal("space", bucket=CALLS[0], config={"block_f": 256, "rows": 1}, space={"warps": (2,)}))
    assert judged.verdict == REFUSED
    assert "ended with an error" in judged.finding


def test_the_call_of_a_million_values_is_made_with_each_architectures_config(monkeypatch):
    made = []

    def numbers(_op, _verification, _calls, compute):
        compute("triton", ())
        return "passed", "", {"largest_error": 0.0}

    tried = trying.Tried({"op": "geglu", "source": "", "bucket": "", "config": {}, "architectures": BOTH})
    own = tried.implementation

    class Recording:
        name = own.name
        default = own.default

        def __call__(self, *_arguments, config):
            made.append(config)

    tried.implementation = Recording()
    monkeypatch.setattr(trying.ladder, "numbers", numbers)
    monkeypatch.setattr(tried, "config_at", lambda arch, _sample: own.default if arch == "gfx1100" else arch)
    assert trying._many_values(tried)[0] == "passed"
    assert made == [own.default, "gfx942"]
    monkeypatch.setattr(tried, "config_at", lambda _arch, _sample: own.default)
    trying._many_values(tried)
    assert made[2:] == [own.default]
