"""The built-in proposers: the tuner's search and the split of a loop, and what they find climbed by the true judge."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_sd import arch as archs
from rocm_sd.agents import keeping
from rocm_sd.agents.improving import improve, run_of
from rocm_sd.agents.judging import OFFERED, SLOWER, Judge, Judged, Rung
from rocm_sd.agents.keeping import Round
from rocm_sd.agents.mutations import kernel_mutations
from rocm_sd.agents.proposals import MOST_CONFIGS, Proposal, functions_text, why_not_allowed
from rocm_sd.agents.proposers import BuiltIn, Replayed, Searching
from rocm_sd.ops import OPS
from rocm_sd.tuning.search.halving import strategies

OP, ARCH = OPS["guided_step"], "gfx1100"
FIRST = OP.tuning.buckets[0].sample
LOOP = """
@triton.jit
def _sum(x, y, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range({bounds}):
        here = {here} < N
        total += tl.load(x + {here}, mask=here, other=0.0)
    tl.store(y + at, total)
""".strip()


def judged(verdict, config, ratio):
    return Judged(verdict, (Rung(1, "any", "passed", ""),), ratio={ARCH: ratio}, config=config)


def next_of(proposer, rounds, found):
    proposed = proposer.propose(rounds)
    done = Round(len(rounds) + 1, proposed.parent, "", "", "", (proposed.proposal,), found)
    return proposed.proposal, (*rounds, done)


def test_the_search_begins_with_the_tuners_whole_space_of_a_bucket():
    proposal, _ = next_of(Searching(OP, (ARCH,), "halving"), (), judged(SLOWER, {}, 1.0))
    space = list(OP.tuning.space(OP.verification.problem(*FIRST.make(filled=False)), archs.get(ARCH)))
    assert [*proposal.configs()] == [config.to_dict() for config in dict.fromkeys(space)]
    assert (proposal.kind, proposal.bucket, proposal.strategy) == ("space", FIRST.name, "halving")
    assert why_not_allowed(OP, proposal) is None


def test_it_goes_on_next_to_the_best_while_that_wins_and_comes_to_an_end():
    searching = Searching(OP, (ARCH,), "halving")
    whole, rounds = next_of(searching, (), judged(SLOWER, {}, 1.0))
    near, rounds = next_of(searching, rounds, judged(OFFERED, {"block": 8192, "warps": 8}, 0.9))
    assert near.bucket == whole.bucket
    assert not {tuple(each.values()) for each in near.listed} & {tuple(each.values()) for each in whole.listed}
    further, rounds = next_of(searching, rounds, judged(SLOWER, {}, 1.0))
    assert "block=8192" in further.why
    assert {"block": 16384, "warps": 8} in further.listed
    for _ in range(50):
        if searching.propose(rounds) is None:
            break
        _, rounds = next_of(searching, rounds, judged(SLOWER, {}, 1.0))
    assert searching.propose(rounds) is None
    assert {each.proposal[0].bucket for each in rounds} == {bucket.sample.name for bucket in OP.tuning.buckets}
    assert all(len(each.proposal[0].listed) <= MOST_CONFIGS for each in rounds)


def test_a_strategy_that_nobody_has_installed_is_no_proposal():
    proposal = Proposal("space", bucket=FIRST.name, listed=({"block": 256, "warps": 2},), strategy="annealing")
    assert "annealing" not in strategies()
    assert "no search strategy 'annealing'" in why_not_allowed(OP, proposal)


def test_names_of_what_was_offered_before_there_were_lists_stay_as_they_were():
    assert Proposal("config", config={"block": 256}, bucket="b").digest == "bbdf8358796a"


def split(bounds, here):
    text = LOOP.format(bounds=bounds, here=here)
    return [changed for why, changed in kernel_mutations(text) if why.startswith("split: _sum")]


@pytest.mark.parametrize(
    ("bounds", "here"),
    [("0, N, BLOCK", "i + at"), ("tl.cdiv(N, BLOCK)", "i * BLOCK + at"), ("0, tl.cdiv(N, BLOCK)", "i * BLOCK + at")],
)
def test_a_split_loop_makes_the_same_turns_and_masks_the_last_alone(bounds, here):
    (changed,) = split(bounds, here)
    first, last = [node for node in ast.walk(ast.parse(changed)) if isinstance(node, ast.For)]
    assert "mask" not in ast.unparse(first)
    assert "mask=here" in ast.unparse(last)
    for size in (0, 1, 7, 8, 9, 24):
        whole, *parts = (
            turns(each, size) for each in (ast.parse(f"for i in range({bounds}): pass").body[0], first, last)
        )
        assert parts[0] + parts[1] == whole
        # Only full blocks lie in what is not masked.
        assert len(parts[0]) * 8 <= size


def turns(loop, size):
    class tl:  # noqa: N801 -- its name in a kernel
        maximum = staticmethod(max)

        @staticmethod
        def cdiv(one, other):
            return -(-one // other)

    return list(eval(ast.unparse(loop.iter), {"tl": tl, "N": size, "BLOCK": 8}))


def test_a_loop_without_masks_is_not_split():
    assert split("0, N, BLOCK", "i + at")
    text = LOOP.format(bounds="0, N, BLOCK", here="i + at").replace(", mask=here, other=0.0", "")
    assert not [why for why, _ in kernel_mutations(text) if why.startswith("split")]


def test_every_split_of_a_shipped_kernel_is_allowed():
    found = []
    for op in OPS.values():
        if op.tuning is not None and op.verification is not None and op.verification.kernels:
            for why, text in kernel_mutations(functions_text(op)):
                if why.startswith("split"):
                    found.append(op.name)
                    assert why_not_allowed(op, Proposal("kernel", why, text=text)) is None
    assert {"conv2d", "linear_geglu"} <= set(found)


LIVES = """
import sys
from pathlib import Path
from rocm_sd.agents import keeping
from rocm_sd.agents.improving import improve, run_of
from rocm_sd.agents.judging import Judge
from rocm_sd.agents.proposers import BuiltIn
from rocm_sd.ops import OPS

def run(folder, rounds):
    op, arch = OPS["guided_step"], "gfx1100"
    proposer = BuiltIn(op, (arch,))
    with keeping.keeping(Path(folder), run_of(op, (arch,), proposer.name)) as kept:
        told = lambda done: print(done.number, flush=True)
        improve(op, kept, proposer, Judge(op, (arch,), gains_alone=True), seconds=86400.0, rounds=rounds, told=told)
        return kept

if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the walls are those of Linux")
def test_the_true_judge_killed_within_a_round_resumed_and_replayed_gives_one_tree(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "lives.py"
    script.write_text(LIVES, encoding="utf-8")
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])}

    def life(folder, rounds, end_after=None):
        with subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / folder), str(rounds)], stdout=subprocess.PIPE, env=places
        ) as process:
            for line in process.stdout:
                if end_after is not None and int(line) >= end_after:
                    os.kill(process.pid, signal.SIGKILL)
            return process.wait()

    assert life("killed", 2, end_after=1) == -signal.SIGKILL
    file = next((tmp_path / "killed").glob("*.json"))
    seen = keeping.read(file).rounds
    assert len(seen) == 1
    assert life("killed", 2) == 0
    record = keeping.read(file)
    assert record.rounds[: len(seen)] == seen
    assert {each.proposal[0].kind for each in record.rounds} == {"space", "kernel"}
    with keeping.keeping(tmp_path / "again", run_of(OP, (ARCH,), "replayed")) as kept:
        improve(OP, kept, Replayed(record.rounds), Judge(OP, (ARCH,), gains_alone=True), seconds=86400.0)
        assert keeping.tree_of(kept.rounds) == keeping.tree_of(record.rounds)


def test_both_take_turns_and_the_same_rounds_give_the_same_proposal():
    rounds: tuple[Round, ...] = ()
    kinds = []
    for _ in range(6):
        proposal, rounds = next_of(BuiltIn(OP, (ARCH,)), rounds, judged(SLOWER, {}, 1.0))
        kinds.append(proposal.kind)
    assert kinds == ["space", "kernel"] * 3
