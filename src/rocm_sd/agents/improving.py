"""Rounds of propose, prove, model and reflect, until the time or the proposals are over.

with keeping(folder(), run_of(op, architectures, "mutations")) as kept:
    improve(op, kept, Mutations(op, architectures), Judge(op, architectures), seconds=1800)
    kept.offered                         # the best first; a user accepts one by its name
"""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from rocm_sd.agents import keeping
from rocm_sd.agents.judging import OFFERED, REFUSED, Judge, Judged, Rung
from rocm_sd.agents.keeping import Round, Run
from rocm_sd.arch import ARCHS
from rocm_sd.errors import RocmSdError, require_known
from rocm_sd.ops import OPS
from rocm_sd.ops.accepted import FORMAT, Accepted, keep
from rocm_sd.verify.proofs import EMULATED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rocm_sd.agents.keeping import Kept
    from rocm_sd.agents.proposals import Proposal
    from rocm_sd.agents.proposers import Proposer, Reviewer
    from rocm_sd.ops.registry import Op

__all__ = ["accept", "improve", "provable", "run_of"]


def provable() -> list[str]:
    """Architectures that a proposal can be proven for: the emulated ones, and those that a card alone judges."""
    return [*EMULATED, *(each.name for each in ARCHS.values() if each.triton_supported and not each.has_gates)]


def run_of(op: Op, architectures: Sequence[str], agent: str, seed: int = 0, card: str = "") -> Run:
    """`card`: the name of the one on which proposals are timed."""
    versions = {"kernel": op.kernel_hash(), "torch": torch.__version__, "triton": _version("triton")}
    if card:
        versions["card"] = card
    return Run(op.name, tuple(architectures), agent, seed, versions)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def improve(
    op: Op,
    kept: Kept,
    proposer: Proposer,
    judge: Judge,
    *,
    seconds: float,
    rounds: int | None = None,
    reviewer: Reviewer | None = None,
    told: Callable[[Round], object] = lambda _round: None,
) -> str:
    """Go on from what is kept, and say in a sentence why it ended. What is under way at Ctrl-C is not kept."""
    end = time.monotonic() + seconds
    while rounds is None or len(kept.rounds) < rounds:
        if time.monotonic() >= end:
            return "the time is over"
        begun = time.monotonic()
        proposed = proposer.propose(kept.rounds)
        if proposed is None:
            return "there is nothing more to propose"
        if proposed.proposal is None:
            judged = Judged(REFUSED, (Rung(1, "any", "failed", proposed.fault),))
        else:
            judged = _again(kept.rounds, proposed.proposal) or judge(proposed.proposal)
        done = Round(
            len(kept.rounds) + 1, proposed.parent, proposer.name, proposed.prompt, proposed.answer,
            () if proposed.proposal is None else (proposed.proposal,), judged,
            proposed.tokens_in, proposed.tokens_out, proposed.money, round(time.monotonic() - begun, 2),
        )  # fmt: skip
        # Before anybody is asked about it: what was proven is not lost with the question.
        kept.add(done)
        if reviewer is not None and judged.verdict == OFFERED:
            done = reviewer.review(op, done)
            kept.replace_last(done)
        told(done)
    return "all rounds were made"


def _again(rounds: Sequence[Round], proposal: Proposal) -> Judged | None:
    """What was proposed before fails in one sentence: to prove it again would find the same."""
    for each in rounds:
        if any(one.digest == proposal.digest for one in each.proposal):
            return Judged(REFUSED, (Rung(1, "any", "failed", f"it is the proposal of round {each.number} again"),))
    return None


def accept(
    name: str, places: Sequence[Path], judge: Callable[[Op, Sequence[str]], Callable[[Proposal], Judged]] = Judge
) -> Path:
    """Make the offered proposal of that name a candidate on this machine; where it lies from now on.

    A record may come from a stranger: what it says of a proposal is proven again, here, and that is kept.
    """
    names: list[str] = []
    for file in sorted(each for place in places for each in place.glob("*.json")):
        try:
            record = keeping.read(file)
        except RocmSdError:
            continue
        if record.run.op not in OPS:
            continue
        for each in record.rounds:
            if each.judged.verdict != OFFERED or not each.proposal:
                continue
            names.append(keeping.named(record.run.op, each.proposal[0]))
            if names[-1] == name:
                _require_same_kernel(name, record.run, each.proposal[0])
                return keep(_accepted(name, record.run, each, _proven(name, record.run, each, judge)))
    there = f"These are: {', '.join(names)}." if names else "None is yet. Type: rocm-sd improve geglu"
    raise RocmSdError(f"Nothing that is offered is named {name!r}.", hint=there)


def _proven(
    name: str, run: Run, done: Round, judge: Callable[[Op, Sequence[str]], Callable[[Proposal], Judged]]
) -> Judged:
    require_known("architecture", run.architectures, provable())
    judged = judge(OPS[run.op], run.architectures)(done.proposal[0])
    if judged.verdict != OFFERED:
        raise RocmSdError(
            f"{name} is offered by its record, and was {judged.verdict} when it was proven again. {judged.finding}",
            hint=f"Type: rocm-sd improve {run.op}",
        )
    return judged


def _require_same_kernel(name: str, run: Run, proposal: Proposal) -> None:
    if proposal.kind != "hip" and OPS[run.op].kernel_hash() != run.versions.get("kernel"):
        raise RocmSdError(
            f"{name} was proven beside another kernel of {run.op} than the one that is installed.",
            hint=f"Type: rocm-sd improve {run.op}",
        )


def _accepted(name: str, run: Run, done: Round, judged: Judged) -> Accepted:
    proposal, op = done.proposal[0], OPS[run.op]
    own = next((each.name for each in op.implementations if each.kernels is not None), None)
    kernel = op.kernel_hash(own) if proposal.kind == "hip" else op.kernel_hash()
    # Of a space, the config that was the best.
    kind = "config" if proposal.kind == "space" else proposal.kind
    return Accepted(
        FORMAT, name, run.op, kind, run.architectures, kernel, proposal.text, proposal.source, judged.config,
        proposal.bucket, done.proposer, proposal.why, asdict(judged),
    )  # fmt: skip
