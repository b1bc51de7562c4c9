"""The record of a run of `rocm-sd improve`: every round with its prompt, answer, rungs and figures.

    with keeping(folder, run) as kept:         # goes on where the same run was ended, alone on its file
        kept.rounds                            # so far
        kept.add(round)                        # on disk, whole, before the next one begins

A record is replayed by its answers alone: the same answers climb to the same heights. `tree_of` has what is compared.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from rocm_sd import typed_json
from rocm_sd.agents.judging import OFFERED, RULES, Judged
from rocm_sd.agents.proposals import RULES as OF_PROPOSALS
from rocm_sd.agents.proposals import Proposal
from rocm_sd.errors import RocmSdError
from rocm_sd.files import alone, write_text
from rocm_sd.plain_json import read_json
from rocm_sd.tuning.location import default_path
from rocm_sd.typed_json import Misfit, Rules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["FORMAT", "Improvement", "InUse", "Kept", "Round", "Run", "folder", "keeping", "named", "read", "tree_of"]

log = logging.getLogger("rocm_sd")
FORMAT = "rocm-sd-improve/1"
_RULES: Rules = {**RULES, **OF_PROPOSALS, "Improvement.format": {"enum": [FORMAT]}}


class InUse(RocmSdError):
    def __init__(self, file: Path) -> None:
        super().__init__(
            f"Another rocm-sd improve writes {file.name}: nothing was tried.", hint="Wait for it, or end it by Ctrl-C."
        )


class UnreadableRun(RocmSdError):
    """A file that is no record of this command."""


@dataclass(frozen=True)
class Run:
    """What makes two runs the same: one goes on where the other ended."""

    op: str
    architectures: tuple[str, ...]
    agent: str
    seed: int
    # Of the op's own kernel, of Triton and of torch: with others the same answers may climb otherwise.
    versions: dict[str, str]

    @property
    def file_name(self) -> str:
        return f"{self.op}-{'-'.join(self.architectures)}-{self.agent}-{self.seed}.json"


@dataclass(frozen=True)
class Round:
    """`parent`: the round whose kernel was changed, 0 for the shipped one. `proposal` is empty where there was none.

    `review`: what a reviewer said of one that is offered, and what that took of the reviewer's limits.
    """

    number: int
    parent: int
    proposer: str
    prompt: str
    answer: str
    proposal: tuple[Proposal, ...]
    judged: Judged
    tokens_in: int = 0
    tokens_out: int = 0
    money: float = 0.0
    seconds: float = 0.0
    review: str = ""
    review_tokens_in: int = 0
    review_tokens_out: int = 0
    review_money: float = 0.0


@dataclass(frozen=True)
class Improvement:
    format: str
    run: Run
    rounds: tuple[Round, ...] = ()


def named(op: str, proposal: Proposal) -> str:
    """What a user accepts it by."""
    return f"{op}-{proposal.digest[:8]}"


def tree_of(rounds: tuple[Round, ...]) -> list[dict[str, Any]]:
    """What is the same in each run of the same answers: no time, and no word of a compiler."""
    return [
        {
            "round": each.number,
            "parent": each.parent,
            "proposals": [one.digest for one in each.proposal],
            "verdict": each.judged.verdict,
            "rungs": [[rung.rung, rung.arch, rung.state] for rung in each.judged.rungs],
            "ratio": each.judged.ratio,
        }
        for each in rounds
    ]


def folder() -> Path:
    return default_path().parent / "improve"


def read(path: Path) -> Improvement:
    """Raises UnreadableRun: a record may come from a stranger."""

    def unreadable(reason: str) -> UnreadableRun:
        return UnreadableRun(
            f"{path} is no record of rocm-sd improve: {reason}.",
            hint=f"Records lie in {folder()}, or where --out says.",
        )

    try:
        return typed_json.read(Improvement, read_json(path, unreadable, of=dict), _RULES)
    except Misfit as error:
        raise unreadable(str(error)) from None


class Kept:
    def __init__(self, file: Path, run: Run) -> None:
        self.file, self.run = file, run
        self.rounds: tuple[Round, ...] = ()
        self.forgot = ""
        if file.exists():
            try:
                found = read(file)
            except UnreadableRun as error:
                self.forgot = error.message
            else:
                if found.run == run:
                    self.rounds = found.rounds
                else:
                    self.forgot = "the versions of Triton, torch or the op's kernel are others than they were"

    @property
    def offered(self) -> tuple[Round, ...]:
        """The best first."""
        there = [each for each in self.rounds if each.judged.verdict == OFFERED]
        return tuple(sorted(there, key=lambda each: (each.judged.score, each.number)))

    def add(self, done: Round) -> None:
        self.rounds = (*self.rounds, done)
        self.write()

    def replace_last(self, done: Round) -> None:
        self.rounds = (*self.rounds[:-1], done)
        self.write()

    def write(self) -> None:
        write_text(self.file, json.dumps(asdict(Improvement(FORMAT, self.run, self.rounds)), indent=1) + "\n")


@contextmanager
def keeping(place: Path, run: Run, *, fresh: bool = False) -> Iterator[Kept]:
    """`fresh` forgets what the same run has found before. Raises InUse."""
    file = place / run.file_name
    with alone(file, InUse):
        if fresh:
            file.unlink(missing_ok=True)
        kept = Kept(file, run)
        if kept.forgot:
            aside = _aside(file)
            log.warning("%s is begun anew: %s. What was there is %s now", file.name, kept.forgot, aside.name)
        yield kept


def _aside(file: Path) -> Path:
    """Another name for a record of hours, which the new one would overwrite."""
    for number in count(1):
        other = file.with_name(f"{file.stem}.{number}.old")
        if not other.exists():
            return file.rename(other)
    raise AssertionError
