"""The kept records of benchmarks/improve.py: whole, replayed to the same tree, and proposed again by the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocm_sd.agents import keeping
from rocm_sd.agents.improving import improve, run_of
from rocm_sd.agents.judging import Judge
from rocm_sd.agents.proposals import why_not_allowed
from rocm_sd.agents.proposers import BuiltIn, Replayed
from rocm_sd.ops import OPS

FOLDER = Path(__file__).parents[2] / "benchmarks" / "improve-cpu"
ARCHS = ("gfx1100", "gfx942")


def records(arch, folder):
    """As whoever replays one has it: a file."""
    for each in json.loads((FOLDER / f"{arch}.json").read_text(encoding="utf-8"))["ops"]:
        file = folder / f"{each['op']}.json"
        file.write_text(json.dumps(each["record"]), encoding="utf-8")
        yield each, keeping.read(file)


class Remembering:
    """The first rung for real, the others as they were: what is tested is the replay."""

    def __init__(self, record, *, same_kernel):
        self.op, self.same_kernel = OPS[record.run.op], same_kernel
        self.judged = {each.proposal[0].digest: each.judged for each in record.rounds}

    def __call__(self, proposal):
        judged = self.judged[proposal.digest]
        if self.same_kernel:
            allowed = next(each for each in judged.rungs if each.rung == 1).state == "passed"
            assert (why_not_allowed(self.op, proposal) is None) == allowed
        return judged


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kept_record_is_replayed_to_the_same_tree(arch, tmp_path):
    for each, record in records(arch, tmp_path):
        op = OPS[record.run.op]
        same_kernel = op.kernel_hash() == record.run.versions["kernel"]
        with keeping.keeping(tmp_path / "again", run_of(op, (arch,), "replayed")) as kept:
            judge = Remembering(record, same_kernel=same_kernel)
            improve(op, kept, Replayed(record.rounds), judge, seconds=86400.0)
            assert keeping.tree_of(kept.rounds) == keeping.tree_of(record.rounds)
        if same_kernel:
            proposer = BuiltIn(op, (arch,), record.run.seed)
            for number, done in enumerate(record.rounds):
                proposed = proposer.propose(record.rounds[:number])
                assert (proposed.parent, proposed.proposal.digest) == (done.parent, done.proposal[0].digest)
        assert each["rounds"] == len(record.rounds) == sum(each["verdicts"].values()) > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_readme_and_the_page_say_is_in_the_record(arch, tmp_path):
    page = (FOLDER.parents[1] / "docs" / "improve.md").read_text(encoding="utf-8")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for each, record in records(arch, tmp_path):
        # What was held to every rung: what the model finds no faster climbs none of them.
        green = [done.judged for done in record.rounds if done.judged.height == 4 and done.judged.ratio]
        ratios = [judged.ratio[arch] for judged in green]
        assert each["best_ratio_with_all_rungs_green"] == min(ratios, default=None)
        best = f"{min(ratios):.3f}" if ratios else "none"
        counts = [each["verdicts"].get(name, 0) for name in ("offered", "no better", "refused")]
        row = " | ".join(map(str, (f"`{each['op']}`", arch, len(record.rounds), *counts, best)))
        assert f"| {row} |" in page
        assert f"| {row} |" in readme


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_first_round_climbs_as_high_again(arch, tmp_path):
    pytest.importorskip("triton")
    _, record = next(records(arch, tmp_path))
    op = OPS[record.run.op]
    if run_of(op, (arch,), "").versions != record.run.versions:
        pytest.skip("the op's kernel, torch or Triton are others than they were")
    with keeping.keeping(tmp_path / "again", run_of(op, (arch,), "replayed")) as kept:
        improve(op, kept, Replayed(record.rounds[:1]), Judge(op, (arch,), gains_alone=True), seconds=86400.0)
        assert keeping.tree_of(kept.rounds) == keeping.tree_of(record.rounds[:1])
