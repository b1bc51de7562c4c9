"""Who proposes: the tuner's search, small changes at random, a language model, or a record that is replayed.

A proposer gives one proposal a round, from what the rounds before have found. It keeps nothing to itself: the same
rounds and the same seed give the same proposal, so that a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rocm_sd import arch as archs
from rocm_sd.agents.endpoint import Endpoint, EndpointFailed, LimitReached, Message, Spent
from rocm_sd.agents.judging import REFUSED
from rocm_sd.agents.mutations import config_mutations, kernel_mutations
from rocm_sd.agents.proposals import (
    FORMAT,
    MOST_CONFIGS,
    NoProposal,
    Proposal,
    from_answer,
    functions_text,
    reference_text,
)
from rocm_sd.errors import InvalidOption
from rocm_sd.tuning.choice import lookup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rocm_sd.agents.keeping import Round
    from rocm_sd.agents.roster import Agent
    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.registry import Op
    from rocm_sd.ops.samples import Sample

__all__ = [
    "BuiltIn", "LanguageModel", "Mutations", "Proposed", "Proposer", "Replayed", "Reviewer", "Searching", "commented",
]  # fmt: skip

# Of the rounds before, so many findings are told.
_TOLD = 6
# A proposal that costs a little may be one step from one that wins.
_WORTH_GOING_ON = 1.02
_MOST_FAILURES = 3
_TOLD_CHANCES, _LONGEST_WORD = 12, 4000


@dataclass(frozen=True)
class Proposed:
    """`proposal` is None where the answer had none, and `fault` says why: it goes back to who answered."""

    parent: int
    prompt: str
    answer: str
    proposal: Proposal | None
    fault: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    money: float = 0.0


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    def propose(self, rounds: Sequence[Round]) -> Proposed | None:
        """The next one, or None where there is nothing more to propose."""


def _parent(rounds: Sequence[Round]) -> tuple[int, Proposal | None]:
    """The kernel that is worth another change: the best that passed, else the shipped one."""
    going = [
        each
        for each in rounds
        if each.proposal and each.proposal[0].kind == "kernel" and each.judged.score <= _WORTH_GOING_ON
    ]
    if not going:
        return 0, None
    best = min(going, key=lambda each: (each.judged.score, each.number))
    return best.number, best.proposal[0]


class Mutations:
    """Of the shipped kernel and of what was best so far; configs and kernels in turns, or kernels alone."""

    name = "mutations"

    def __init__(self, op: Op, architectures: Sequence[str], seed: int = 0, *, kernels_alone: bool = False) -> None:
        self.op, self.architectures, self.seed, self._kernels_alone = op, tuple(architectures), seed, kernels_alone

    def propose(self, rounds: Sequence[Round]) -> Proposed | None:
        tried = {one.digest for each in rounds for one in each.proposal}
        kinds = (self._configs, self._kernels)
        first = len(rounds) % 2
        for kind in (self._kernels,) if self._kernels_alone else (kinds[first], kinds[1 - first]):
            new = [(parent, one) for parent, one in kind(rounds) if one.digest not in tried]
            if new:
                chosen = random.Random(f"{self.seed} {len(rounds)}").choice(new)  # noqa: S311 -- no secret
                return Proposed(chosen[0], "", chosen[1].why, chosen[1])
        return None

    def _configs(self, rounds: Sequence[Round]) -> Iterator[tuple[int, Proposal]]:
        """Neighbours of the best config of each bucket, or of the one that is shipped for it."""
        assert self.op.tuning is not None
        for bucket in self.op.tuning.buckets:
            number, config = _best_config(self.op, self.architectures[0], bucket.sample, rounds)
            for why, values in config_mutations(config):
                yield number, Proposal("config", why, config=values, bucket=bucket.sample.name)

    def _kernels(self, rounds: Sequence[Round]) -> Iterator[tuple[int, Proposal]]:
        number, parent = _parent(rounds)
        text = functions_text(self.op) if parent is None else parent.text
        for why, changed in kernel_mutations(text):
            yield number, Proposal("kernel", why, text=changed)


def _best_config(op: Op, arch: str, sample: Sample, rounds: Sequence[Round]) -> tuple[int, Config]:
    """(round, config) of the best for a bucket, or 0 and the shipped one."""
    assert op.verification is not None
    there = [
        each for each in rounds
        if each.proposal and each.proposal[0].bucket == sample.name and each.judged.score < 1.0
    ]  # fmt: skip
    best = min(there, key=lambda each: (each.judged.score, each.number), default=None)
    problem = op.verification.problem(*sample.make(filled=False))
    config = op.config_of(op.verification.implementation, lookup(op.name, arch, problem, op.defaults))
    if best is None:
        return 0, config
    return best.number, config.fitting(best.judged.config) or config


class Searching:
    """The tuner's search: of each bucket the op's whole space, and then what lies next to the best, while that wins.

    On a card a search strategy says what is timed how often; elsewhere every config is compiled, counted and ranked, as
    `rocm-sd tune --static` does it.
    """

    name = "search"

    def __init__(self, op: Op, architectures: Sequence[str], strategy: str) -> None:
        self.op, self.architectures, self.strategy = op, tuple(architectures), strategy

    def propose(self, rounds: Sequence[Round]) -> Proposed | None:
        assert self.op.tuning is not None
        tried = {one.digest for each in rounds for one in each.proposal}
        for bucket in self.op.tuning.buckets:
            for kind in (self._whole, self._beside):
                number, why, configs = kind(bucket.sample, rounds)
                given = f"search by {self.strategy}: {why}, {bucket.sample.name}"
                new = Proposal("space", given, bucket=bucket.sample.name, listed=configs, strategy=self.strategy)
                if configs and new.digest not in tried:
                    return Proposed(number, "", given, new)
        return None

    def _whole(self, sample: Sample, _rounds: Sequence[Round]) -> tuple[int, str, tuple[dict[str, int], ...]]:
        assert self.op.tuning is not None
        assert self.op.verification is not None
        problem = self.op.verification.problem(*sample.make(filled=False))
        spaces = (self.op.tuning.space(problem, archs.get(name)) for name in self.architectures)
        configs = _different(config.to_dict() for space in spaces for config in space)[:MOST_CONFIGS]
        return 0, f"{len(configs)} configs of the tuner", configs

    def _beside(self, sample: Sample, rounds: Sequence[Round]) -> tuple[int, str, tuple[dict[str, int], ...]]:
        number, config = _best_config(self.op, self.architectures[0], sample, rounds)
        tried = [
            values for each in rounds for one in each.proposal if one.bucket == sample.name for values in one.listed
        ]
        near = _different(values for _, values in config_mutations(config))
        configs = tuple(values for values in near if values not in tried)[:MOST_CONFIGS]
        return number, f"{len(configs)} configs next to {config}", configs


def _different(configs: Iterable[dict[str, int]]) -> tuple[dict[str, int], ...]:
    return tuple({tuple(each.items()): each for each in configs}.values())


class BuiltIn:
    """The tuner's search and mutations of the kernel, in turns: what is asked where no language model is."""

    prefix = "built-in"

    def __init__(self, op: Op, architectures: Sequence[str], seed: int = 0, strategy: str = "halving") -> None:
        self.name = f"{self.prefix}-{strategy}"
        self._both = (
            Searching(op, architectures, strategy),
            Mutations(op, architectures, seed, kernels_alone=True),
        )

    def propose(self, rounds: Sequence[Round]) -> Proposed | None:
        first = len(rounds) % 2
        return self._both[first].propose(rounds) or self._both[1 - first].propose(rounds)


class LanguageModel:
    """Asked by an endpoint, with the op's definition, the kernel, and what became of the last proposals."""

    def __init__(self, op: Op, architectures: Sequence[str], agent: Agent, rounds: Sequence[Round] = ()) -> None:
        if agent.duty.work != "kernel_writer":
            raise InvalidOption(
                "--agent", agent.name, [], hint=f"Its role {agent.role} writes no kernels. An analyst takes --analyse, "
                "a reviewer --reviewer; or give it the role kernel_writer in agents.yaml.",
            )  # fmt: skip
        if not agent.duty.takes(op.name):
            raise InvalidOption(
                "--agent", agent.name, [], hint=f"Its role {agent.role} is for: {', '.join(agent.duty.ops)}."
            )
        self.op, self.architectures, self.name, self._agent = op, tuple(architectures), agent.name, agent
        self._endpoint = Endpoint(agent, spent_in(rounds))
        self._failures: list[EndpointFailed] = []

    def propose(self, rounds: Sequence[Round]) -> Proposed | None:
        # After the round of the last one was kept, with the tokens that it took.
        if len(self._failures) >= _MOST_FAILURES:
            raise self._failures[-1]
        number, parent = _parent(rounds)
        prompt = self._prompt(rounds, parent)
        before = replace(self._endpoint.spent)
        try:
            reply = self._endpoint.ask((Message("system", self._agent.duty.system), Message("user", prompt)))
        except EndpointFailed as error:
            self._failures.append(error)
            spent = self._endpoint.spent
            return Proposed(
                number, prompt, "", None, error.message,
                spent.tokens_in - before.tokens_in, spent.tokens_out - before.tokens_out, spent.money - before.money,
            )  # fmt: skip
        self._failures.clear()
        read = _read(number, prompt, reply.text)
        if reply.truncated:
            read = replace(read, proposal=None, fault="The answer was cut off before its end.")
        return replace(read, tokens_in=reply.tokens_in, tokens_out=reply.tokens_out, money=reply.cost)

    def _prompt(self, rounds: Sequence[Round], parent: Proposal | None) -> str:
        told = [f"Round {each.number}: {_told(each)}" for each in rounds[-_TOLD:]]
        parts = (
            f"The op is {self.op.name}: {self.op.summary}. Architectures: {', '.join(self.architectures)}.",
            f"Its definition, in plain torch:\n```python\n{reference_text(self.op)}\n```",
            f"The kernel as it is:\n```python\n{functions_text(self.op) if parent is None else parent.text}\n```",
            _buckets(self.op, self.architectures[0]),
            "What became of the last proposals:\n" + "\n".join(told) if told else "Nothing was proposed yet.",
            FORMAT,
        )
        return "\n\n".join(parts)


def spent_in(rounds: Sequence[Round]) -> Spent:
    """Limits are those of a whole run, however often it was ended."""
    return Spent(
        sum(each.tokens_in for each in rounds),
        sum(each.tokens_out for each in rounds),
        sum(each.money for each in rounds),
    )


def _read(number: int, prompt: str, answer: str) -> Proposed:
    try:
        return Proposed(number, prompt, answer, from_answer(answer))
    except NoProposal as error:
        return Proposed(number, prompt, answer, None, error.message)


def _told(done: Round) -> str:
    why = done.proposal[0].why if done.proposal else "no proposal"
    return f"{why}. {done.judged.finding}"


def _buckets(op: Op, arch: str) -> str:
    assert op.tuning is not None
    assert op.verification is not None
    lines = []
    for bucket in op.tuning.buckets:
        problem = op.verification.problem(*bucket.sample.make(filled=False))
        config = op.config_of(op.verification.implementation, lookup(op.name, arch, problem, op.defaults))
        lines.append(f"- {bucket.sample.name}: {config}")
    return f"Buckets, with the config that is shipped for {arch}:\n" + "\n".join(lines)


class Reviewer:
    """Another agent's word on what is offered: people read it, nothing is decided by it."""

    def __init__(self, agent: Agent, rounds: Sequence[Round] = ()) -> None:
        if agent.duty.work != "reviewer":
            raise InvalidOption(
                "--reviewer", agent.name, [], hint=f"Its role {agent.role} reviews nothing. Give it the role reviewer "
                "or final_integration in agents.yaml.",
            )  # fmt: skip
        self.name, self._agent = agent.name, agent
        spent = Spent(
            sum(each.review_tokens_in for each in rounds),
            sum(each.review_tokens_out for each in rounds),
            sum(each.review_money for each in rounds),
        )
        self._endpoint = Endpoint(agent, spent)

    def review(self, op: Op, done: Round) -> Round:
        """The round with the review, or with why there is none: nothing of the round hangs on it."""
        before = replace(self._endpoint.spent)
        text = self._said(op, done)
        spent = self._endpoint.spent
        return replace(
            done,
            review=text,
            review_tokens_in=spent.tokens_in - before.tokens_in,
            review_tokens_out=spent.tokens_out - before.tokens_out,
            review_money=spent.money - before.money,
        )

    def _said(self, op: Op, done: Round) -> str:
        asked = (
            f"A proposal for the op {op.name} passed every rung of the proof ladder. Say in at most five sentences "
            f"what could still be wrong with it, at which sizes, strides or values.\n\n"
            f"{done.proposal[0].why}\n\n```python\n{done.proposal[0].text}\n```\n\n{done.judged.finding}"
        )
        try:
            reply = self._endpoint.ask((Message("system", self._agent.duty.system), Message("user", asked)))
        except (EndpointFailed, LimitReached) as error:
            return f"no review: {error.message}"
        return reply.text[:_LONGEST_WORD]


def commented(agent: Agent, analysis: Mapping[str, Any]) -> str:
    """An analyst's words on the table of `agents.analyst`, as plain values."""
    if agent.duty.work != "analyst":
        raise InvalidOption(
            "--agent", agent.name, [], hint=f"Its role {agent.role} comments on no record. Give it the role analyst or "
            "meaningful_work in agents.yaml.",
        )  # fmt: skip
    # Where the file lies is none of a server's business.
    told = {name: value for name, value in analysis.items() if name != "source"}
    told["chances"] = list(told["chances"])[:_TOLD_CHANCES]
    asked = (
        "Here is what was measured, and how far from its floor each part is. Say in at most eight sentences what to "
        f"try first, and why.\n\n```json\n{json.dumps(told, indent=1)}\n```"
    )
    system = Message("system", agent.duty.system)
    return Endpoint(agent, Spent()).ask((system, Message("user", asked))).text[:_LONGEST_WORD]


class Replayed:
    """The answers of a record, and nobody is asked."""

    name = "replayed"

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._rounds = tuple(rounds)

    def propose(self, rounds: Sequence[Round]) -> Proposed | None:
        if len(rounds) >= len(self._rounds):
            return None
        recorded = self._rounds[len(rounds)]
        proposal = recorded.proposal[0] if recorded.proposal else None
        fault = recorded.judged.rungs[0].finding if recorded.judged.verdict == REFUSED else ""
        return Proposed(
            recorded.parent, recorded.prompt, recorded.answer, proposal, "" if proposal else fault,
            recorded.tokens_in, recorded.tokens_out, recorded.money,
        )  # fmt: skip
