"""Rounds: what is offered and what is not, what is kept, and that the same answers come to the same tree."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_endpoint import Status, Truncated, scripted

from rocm_sd.agents import confinement, keeping, page, proposers
from rocm_sd.agents.endpoint import EndpointFailed, LimitReached, Reply
from rocm_sd.agents.improving import accept, improve, run_of
from rocm_sd.agents.judging import OFFERED, REFUSED, SLOWER, Judge, Judged, Rung
from rocm_sd.agents.keeping import Round
from rocm_sd.agents.proposals import NoProposal, Proposal, from_answer, functions_text
from rocm_sd.agents.proposers import LanguageModel, Mutations, Replayed
from rocm_sd.agents.roster import Agent
from rocm_sd.agents.walls import WALLS
from rocm_sd.cli import improve as command
from rocm_sd.cli import main
from rocm_sd.cli.terminal import literal
from rocm_sd.errors import RocmSdError
from rocm_sd.ops import OPS, accepted, plugins

GEGLU = OPS["geglu"]
BOTH = ("gfx1100", "gfx942")
OWN = functions_text(GEGLU)


def answer(text, why="a change"):
    return f"Here it is.\n\n```json\n{json.dumps({'kind': 'kernel', 'why': why})}\n```\n\n```python\n{text}\n```\n"


def with_line(line, before="    tl.store(y + row * F"):
    indented = textwrap.indent(textwrap.dedent(line).strip(), "    ")
    return answer(OWN.replace(before, f"{indented}\n{before}", 1))


# Of 2,621,440 values of the real call one is wrong; no small call has as many rows.
WRONG = with_line("value = tl.where((first + row == 300) & (f == 3)[None, :], 7.0, value)")
# A block of 512 columns is what waves of 64 get: every program writes the first value of all. It is added to, since a
# compiler drops the store of a value that was loaded from the same place.
RACES = answer(
    OWN.replace("    # 64-bit only in the scalar bases.\n", "    start = y\n    # 64-bit only in the scalar bases.\n")
    + "\n    if BLOCK_F == 512:\n        seen = tl.load(start, volatile=True).to(tl.float32) + 0.0 * tl.program_id(0)"
    + "\n        tl.store(start, seen.to(y.dtype.element_ty))\n"
)
SPILLS = with_line(
    """
    kept = ()
    for i in tl.static_range(24):
        kept = kept + (tl.load(x + at, mask=inside, other=0.0, volatile=True).to(tl.float32) + i,)
    for i in tl.static_range(24):
        value += kept[i] * tl.sum(kept[23 - i]) * 0.0
    """
)
BEYOND = answer(OWN.replace("tl.load(x + F + at, mask=inside, other=0.0)", "tl.load(x + F + at)"))
ANSWERS = {
    "right and better": answer(OWN, "the shipped kernel, where a slower one stands for it"),
    "wrong in one of a million": WRONG,
    "races on wave64": RACES,
    "spills": SPILLS,
    "reads out of bounds": BEYOND,
    "opens a file": with_line("value = open('/etc/passwd')"),
    "imports": with_line("import os"),
    "loops for ever": answer(OWN.replace("    y = x", "", 1) + "\n    while True:\n        value = value + 1\n"),
    "prints without end": with_line("while True:\n    tl.device_print('x', value)"),
    "truncated": Truncated(answer(OWN)[:200]),
    "an HTTP error": Status(500),
    "no proposal": "I would rather not.",
}


class BesideASlowerOne(Judge):
    """The shipped kernel with a config that nobody would ship, so that its own one is an improvement."""

    def __init__(self, *given):
        super().__init__(*given)
        slow = {"block_f": 256, "rows": 1, "warps": 8}
        self._shipped["False "] = self.shipped_as(Proposal("kernel", config=slow))
        # However slow the machine: none of these but the endless one comes near.
        self._usual = replace(self._limits, seconds=3600.0, cpu_seconds=3600)

    def __call__(self, proposal):
        # Only what never ends is ended sooner.
        endless = "while True" in proposal.text
        self._limits = replace(self._usual, cpu_seconds=60) if endless else self._usual
        return super().__call__(proposal)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """All answers, one a round; where tests are spread over processes, one of them judges for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "improve-told"
    folder.mkdir(exist_ok=True)
    asked = folder / "asked"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not asked.exists():
            asked.write_text(json.dumps(judged_answers(folder)))
    record = keeping.read(folder / run_of(GEGLU, BOTH, "scripted").file_name)
    return folder, dict(zip(ANSWERS, record.rounds, strict=True)), json.loads(asked.read_text())


def judged_answers(folder):
    """By an endpoint on this machine, each judged for real: what it was asked."""
    run = run_of(GEGLU, BOTH, "scripted")
    # A server's error is asked again twice.
    script = [each for one in ANSWERS.values() for each in [one] * (3 if isinstance(one, Status) else 1)]
    with scripted(script) as server, keeping.keeping(folder, run) as kept:
        agent = Agent("scripted", server.url, "m", "kernel_writer", timeout_s=20.0)
        proposer = LanguageModel(GEGLU, BOTH, agent)
        improve(GEGLU, kept, proposer, BesideASlowerOne(GEGLU, BOTH), seconds=7 * 86400.0, rounds=len(ANSWERS))
        return list(server.asked)


@pytest.mark.slow
def test_exactly_the_right_and_better_one_is_offered(told):
    _, rounds, _ = told
    assert [name for name, each in rounds.items() if each.judged.verdict == OFFERED] == ["right and better"]
    best = rounds["right and better"].judged
    assert {(each.rung, each.arch) for each in best.rungs if each.state == "passed"} >= {
        (2, "cpu"), (2, "a million values"), (3, "gfx1100"), (3, "gfx942"), (4, "gfx1100"), (4, "gfx942"),
    }  # fmt: skip
    assert set(best.ratio) == set(BOTH)
    assert all(value < 0.99 for value in best.ratio.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rung", "arch", "words"),
    [
        ("wrong in one of a million", 2, "a million values", "1 of 2621440 elements; (300, 3) is 7"),
        ("races on wave64", 4, "gfx942", "workgroup"),
        ("spills", 3, "gfx1100", "VGPRs"),
        ("reads out of bounds", 4, "gfx1100", "lies in no buffer"),
        ("opens a file", 1, "any", "the name open"),
        ("imports", 1, "any", "an import"),
        ("loops for ever", 2, "any", "was ended"),
        ("prints without end", 1, "any", "kernels print nothing"),
        ("truncated", 1, "any", "cut off"),
        ("an HTTP error", 1, "any", "500"),
        ("no proposal", 1, "any", "0 blocks of JSON"),
    ],
)
def test_each_of_the_others_ends_with_its_reason(told, name, rung, arch, words):
    judged = told[1][name].judged
    failed = [each for each in judged.rungs if each.state == "failed"]
    assert (judged.verdict, [each.rung for each in failed]) == (REFUSED, [rung])
    assert failed[0].arch == arch
    assert words in failed[0].finding


@pytest.mark.slow
def test_a_finding_goes_back_and_nothing_else_of_this_machine(told):
    folder, rounds, asked = told
    assert "(300, 3) is 7 and should be" in asked[2]["messages"][-1]["content"]
    assert "kernels print nothing" in asked[-1]["messages"][-1]["content"]
    assert str(folder) not in json.dumps(asked)
    assert sum(each.tokens_in for each in rounds.values()) > 0


@pytest.mark.slow
def test_what_is_offered_is_accepted_by_name_and_guarded(told, tmp_path, monkeypatch, capsys):
    folder, rounds, _ = told
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    name = keeping.named("geglu", rounds["right and better"].proposal[0])
    with pytest.raises(RocmSdError, match="named 'geglu-00000000'"):
        accept("geglu-00000000", [folder])
    best = rounds["right and better"].judged
    path = accept(name, [folder], lambda _op, _architectures: lambda _proposal: best)
    plugins.installed.cache_clear()
    try:
        found = plugins.find("geglu", name)
        assert found is not None
        import torch

        problem = {"m": 5, "f": 320, "dtype": "float16"}
        assert "proven on gfx1100, gfx942" in found.implementation.why_not(problem, torch.device("cpu"))
        x = torch.randn(5, 640, dtype=torch.float16)
        own = GEGLU.implementation("triton")(x, None)
        assert torch.equal(found.implementation(x, None), own)
    finally:
        plugins.installed.cache_clear()
    changed = json.loads(path.read_text())
    changed["text"] = changed["text"].replace("value *= _gelu(gate)", "value *= gate")
    path.write_text(json.dumps(changed))
    assert list(accepted.accepted()) == []
    main.app(["improve", "--remove", name], standalone_mode=False)
    assert "no candidate any more" in capsys.readouterr().out
    with pytest.raises(RocmSdError, match="No accepted kernel"):
        accepted.remove(name)


@pytest.mark.slow
def test_the_page_has_every_round_and_no_markup_of_a_stranger(told):
    folder, rounds, _ = told
    record = keeping.read(next(folder.glob("*.json")))
    evil = replace(record.rounds[0], review="<script>alert(1)</script>")
    shown = page.made(replace(record, rounds=(evil, *record.rounds[1:])))
    assert "<script>" not in shown
    assert shown.count('class="row"') == len(rounds)
    assert "1 of 12 proposals" in shown


class Guessing:
    """Heights by the digest alone: what is tested are the rounds."""

    def __call__(self, proposal):
        number = int(proposal.digest, 16)
        if number % 3 == 0:
            return Judged(REFUSED, (Rung(1, "any", "passed", ""), Rung(2, "cpu", "failed", "wrong")))
        ratio = {"gfx1100": 0.9 + number % 1000 / 5000}
        better = ratio["gfx1100"] < 0.99
        return Judged(
            OFFERED if better else SLOWER, (Rung(1, "any", "passed", ""),), ratio=ratio, config=proposal.config
        )


def tree(folder, rounds, seed=0):
    with keeping.keeping(folder, run_of(GEGLU, ("gfx1100",), "mutations", seed)) as kept:
        improve(GEGLU, kept, Mutations(GEGLU, ("gfx1100",), seed), Guessing(), seconds=600.0, rounds=rounds)
        return keeping.tree_of(kept.rounds)


def test_a_run_goes_on_as_if_it_had_not_been_ended(tmp_path):
    for rounds in (3, 4, 20, 30):
        pieces = tree(tmp_path / "pieces", rounds)
    assert pieces == tree(tmp_path / "whole", 30)
    assert len({digest for each in pieces for digest in each["proposals"]}) == 30
    assert any(each["parent"] for each in pieces)
    assert pieces != tree(tmp_path / "other", 30, seed=1)


def test_a_record_is_replayed_to_the_same_tree(tmp_path):
    first = tree(tmp_path, 12)
    before = keeping.read(next(tmp_path.glob("*.json")))
    with keeping.keeping(tmp_path / "again", run_of(GEGLU, ("gfx1100",), "replayed")) as kept:
        ended = improve(GEGLU, kept, Replayed(before.rounds), Guessing(), seconds=600.0)
        assert keeping.tree_of(kept.rounds) == first
    assert ended == "there is nothing more to propose"


KILLING = """
import os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_improving as t
class Slow(t.Guessing):
    def __call__(self, proposal):
        time.sleep(0.02)
        return super().__call__(proposal)
t.Guessing = Slow
folder, chance, seen = Path(sys.argv[1]), random.Random(0), 0
add = t.keeping.Kept.add
for _ in range(10):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        def tell(kept, done):
            add(kept, done)
            os.write(theirs, b"1")
        t.keeping.Kept.add = tell
        t.tree(folder, 400)
        os._exit(0)
    os.close(theirs)
    # However slow the machine, a life has a round before it ends.
    assert os.read(ours, 1) == b"1"
    time.sleep(0.1 * chance.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours)
    rounds = len(t.keeping.read(next(folder.glob("geglu*.json"))).rounds)
    assert rounds > seen, (rounds, seen)
    seen = rounds
print(seen)
"""


def test_killed_at_random_ten_times_nothing_is_lost(tmp_path):
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", KILLING, str(tmp_path / "killed"), *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    rounds = int(done.stdout)
    assert rounds >= 10
    assert tree(tmp_path / "killed", rounds + 5) == tree(tmp_path / "whole", rounds + 5)


def test_what_a_record_offers_is_proven_again_before_it_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    claimed = Judged(OFFERED, (Rung(1, "any", "passed", ""),), ratio={"gfx1100": 0.5})
    proposal = Proposal("kernel", "from a stranger", text=OWN)
    with keeping.keeping(tmp_path, run_of(GEGLU, ("gfx1100",), "stranger")) as kept:
        kept.add(Round(1, 0, "stranger", "", "", (), claimed))
        kept.add(Round(2, 0, "stranger", "", "", (proposal,), claimed))
    name, judged = keeping.named("geglu", proposal), []

    def judge_as(found):
        def judge(op, architectures):
            judged.append((op.name, architectures))
            return lambda _proposal: found

        return judge

    wrong = Judged(REFUSED, (Rung(2, "cpu", "failed", "1 of 2 elements"),))
    with pytest.raises(RocmSdError, match=r"refused when it was proven again.* 1 of 2 elements"):
        accept(name, [tmp_path], judge_as(wrong))
    assert list(accepted.accepted()) == []
    proven = Judged(OFFERED, (Rung(1, "any", "passed", "seen here"),), ratio={"gfx1100": 0.9})
    accept(name, [tmp_path], judge_as(proven))
    assert judged == [("geglu", ("gfx1100",))] * 2
    assert [each.evidence["rungs"][0]["finding"] for each in accepted.accepted()] == ["seen here"]


class Questioned:
    """In place of an endpoint: each answer is text, or an error; each question takes tokens."""

    def __init__(self, answers):
        self.answers = list(answers)

    def __call__(self, agent, spent):
        self.agent, self.spent = agent, spent
        return self

    def ask(self, _messages):
        answer = self.answers.pop(0)
        if isinstance(answer, LimitReached):
            raise answer
        self.spent.add(10, 5, 0.25)
        if isinstance(answer, BaseException):
            raise answer
        return Reply(answer, 10, 5, 0.25, False)


class Offering:
    def __call__(self, _proposal):
        return Judged(OFFERED, (Rung(1, "any", "passed", ""),), ratio={"gfx1100": 0.9})


def reviewed(folder, monkeypatch, answers, rounds):
    questioned = Questioned(answers)
    monkeypatch.setattr(proposers, "Endpoint", questioned)
    with keeping.keeping(folder, run_of(GEGLU, ("gfx1100",), "mutations")) as kept:
        reviewer = proposers.Reviewer(Agent("careful", "http://127.0.0.1:1/v1", "m", "reviewer"), kept.rounds)
        spent = questioned.spent.tokens
        named = {"seconds": 600.0, "rounds": rounds, "reviewer": reviewer}
        with suppress(KeyboardInterrupt):
            improve(GEGLU, kept, Mutations(GEGLU, ("gfx1100",)), Offering(), **named)
        return spent, kept.rounds


def test_what_is_offered_is_kept_whatever_becomes_of_its_review(tmp_path, monkeypatch):
    answers = ["fine", EndpointFailed("no answer"), LimitReached("Agent careful has used all.")]
    spent, rounds = reviewed(tmp_path, monkeypatch, answers, 3)
    assert spent == 0
    assert [each.review for each in rounds] == [
        "fine", "no review: no answer", "no review: Agent careful has used all.",
    ]  # fmt: skip
    assert [each.review_tokens_in for each in rounds] == [10, 10, 0]
    # Its limits are those of the whole run, also of a question that failed.
    spent, rounds = reviewed(tmp_path, monkeypatch, [KeyboardInterrupt()], 4)
    assert spent == 30
    assert len(rounds) == 4
    assert len(keeping.read(next(tmp_path.glob("*.json"))).rounds) == 4


def test_questions_that_failed_count_and_the_third_ends_the_run(tmp_path, monkeypatch):
    questioned = Questioned([EndpointFailed("no answer")] * 3)
    monkeypatch.setattr(proposers, "Endpoint", questioned)
    agent = Agent("local", "http://127.0.0.1:1/v1", "m", "kernel_writer")
    run = run_of(GEGLU, ("gfx1100",), "local")
    with keeping.keeping(tmp_path, run) as kept, pytest.raises(EndpointFailed, match="no answer"):
        improve(GEGLU, kept, LanguageModel(GEGLU, ("gfx1100",), agent), Offering(), seconds=600.0)
    with keeping.keeping(tmp_path, run) as kept:
        assert [each.tokens_in + each.tokens_out for each in kept.rounds] == [15, 15, 15]
        LanguageModel(GEGLU, ("gfx1100",), agent, kept.rounds)
        assert (questioned.spent.tokens, questioned.spent.money) == (45, 0.75)


def test_a_fence_before_a_line_of_a_mebibyte_is_read_at_once():
    with pytest.raises(NoProposal, match="0 blocks of JSON"):
        from_answer("```" + "a" * 2**20)


def test_what_a_stranger_wrote_is_nothing_that_a_terminal_obeys():
    evil = "\x1b]0;title\x07\x1b[2J\u202ereversed\x9b1m"
    judged = Judged(REFUSED, (Rung(2, "cpu", "failed", evil),))
    shown = command._line(Round(1, 0, "m", "", "", (Proposal("kernel", evil),), judged))
    assert "\\x1b" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert literal("[b] \u3042\u3000\U0001f469\u200d\U0001f680\n") == "\\[b] \u3042\u3000\U0001f469\u200d\U0001f680\n"


def test_walls_that_are_missing_are_told_and_open_ones_need_consent(monkeypatch, capsys):
    def ask(lacking, answer, **named):
        monkeypatch.setattr(confinement, "missing", lambda: tuple(WALLS[each] for each in lacking))
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        command._require_walls(**named)
        return capsys.readouterr().err

    assert ask((), "") == ""
    assert WALLS["signals"] in ask(("signals",), "")
    assert "Go on?" in ask(("network",), "y\n")
    for answer in ("n\n", ""):
        with pytest.raises(RocmSdError, match="Nothing was tried"):
            ask(("writes", "signals"), answer)
    capsys.readouterr()
    assert "Go on?" not in ask(("writes", "signals"), "", agreed=True)


@pytest.mark.parametrize("asked", [["geglu", "--rounds", "1"], ["--accept", "geglu-00000000"]])
def test_a_script_agrees_beforehand_to_the_walls_that_are_missing(asked, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(confinement, "missing", lambda: (WALLS["network"],))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(command, "_rounds", lambda *_given, **_named: "all rounds were made")

    def said(*more):
        with pytest.raises(SystemExit):
            main.run(["improve", *asked, "--device", "cpu", "--out", str(tmp_path), *more])
        return capsys.readouterr()

    assert "Nothing was tried" in said().err
    agreed = said("--yes")
    assert "Nothing was tried" not in agreed.err
    assert WALLS["network"] in agreed.err


def test_two_at_once_and_a_damaged_record(tmp_path, caplog):
    run = run_of(GEGLU, ("gfx1100",), "mutations")
    with keeping.keeping(tmp_path, run), pytest.raises(keeping.InUse), keeping.keeping(tmp_path, run):
        pass
    (tmp_path / run.file_name).write_text("{")
    with keeping.keeping(tmp_path, run) as kept:
        assert kept.rounds == ()
    assert "begun anew" in caplog.text
    # Rounds that took hours are not written over, also where Triton is another since.
    with keeping.keeping(tmp_path, replace(run, versions={})) as kept:
        kept.add(Round(1, 0, "m", "", "", (), Judged(REFUSED, ())))
    with keeping.keeping(tmp_path, run) as kept:
        kept.write()
    old = [tmp_path / f"{Path(run.file_name).stem}.{number}.old" for number in (1, 2)]
    assert old[0].read_text() == "{"
    assert len(keeping.read(old[1]).rounds) == 1
    assert old[1].name in caplog.text
    with pytest.raises(keeping.UnreadableRun, match="no such file"):
        keeping.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 blocks of JSON"),
        ("```json\n{}\n```\n```json\n{}\n```\n", "2 blocks of JSON"),
        ("```json\n[]\n```\n", "not an object"),
        ("```json\n{\n```\n", "no JSON"),
        ('```json\n{"kind": "virus"}\n```\n', "kind should be one of"),
        ('```json\n{"kind": "config", "config": {"warps": 1.5}}\n```\n', "should be integer"),
        ('```json\n{"kind": "config", "more": 1}\n```\n', "more is not known"),
        ('```json\n{"kind": "kernel"}\n```\n```python\n1\n```\n```cpp\n2\n```\n', "2 blocks of code"),
    ],
)
def test_an_answer_that_holds_no_proposal_is_told_so(text, why):
    with pytest.raises(NoProposal, match=why):
        from_answer(text)


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (Proposal("config", bucket="none", config={"warps": 1}), "no bucket 'none'"),
        (
            Proposal("config", bucket="512x5120, float16", config={"warps": 1}),
            "whole numbers named block_f, rows, warps",
        ),
        (Proposal("config", bucket="512x5120, float16", config={"block_f": 2**40, "rows": 1, "warps": 1}), "between 0"),
        (Proposal("space", bucket="512x5120, float16", space={"warps": tuple(range(99))}), "1 to 64 configs"),
        (Proposal("hip", source="geglu", text="x"), "no kernels in HIP"),
        (Proposal("kernel", text="import os"), "an import"),
    ],
)
def test_a_proposal_that_means_nothing_for_the_op_is_refused_at_once(proposal, why):
    judged = Judge(GEGLU, BOTH)(proposal)
    assert (judged.verdict, judged.height) == (REFUSED, 0)
    assert why in judged.finding


def test_the_command_says_what_to_type(capsys, tmp_path):
    def ended(*given):
        with pytest.raises(SystemExit) as end:
            main.run(["improve", *given])
        return end.value.code, capsys.readouterr().err

    assert ended() == (2, ended()[1])
    assert "Name one op" in ended("geglu", "--list")[1]
    assert "layer_norm_residual" in ended("nosuch")[1]
    assert "gfx1100" in ended("geglu", "--arch", "gfx9999")[1]
    assert "agents.yaml" in ended("geglu", "--agent", "local", "--agents", str(tmp_path / "none.yaml"))[1]
    assert "no such file" in ended("--replay", str(tmp_path / "none.json"))[1]
