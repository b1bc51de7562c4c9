"""rocm-sd improve: kernels and configs that are proposed, and proven before anything of them runs here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 -- typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import bar, budget_seconds, literal, parts, say
from rocm_sd.errors import InvalidOption, RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.agents.cards import Card
    from rocm_sd.agents.judging import Judge, Judged, OnCard
    from rocm_sd.agents.keeping import Improvement, Kept, Round
    from rocm_sd.agents.proposers import Proposer, Reviewer
    from rocm_sd.agents.roster import Agent
    from rocm_sd.ops.registry import Op

__all__ = ["improve"]

_WORDS = {"offered": "[green]offered[/]", "no better": "no better", "refused": "[red]refused[/]"}
_LONGEST = 300


def improve(
    op: Annotated[str | None, typer.Argument(help="The op, e.g. geglu; see rocm-sd info.")] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Architectures to prove it on, e.g. gfx1100,gfx942. (default: all three emulated)"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where what is proven is timed: cuda, or cpu for nowhere. (default: a GPU of --arch)"),
    ] = None,
    strategy: Annotated[str, typer.Option(help="How configs are searched: halving, or one of a plug-in.")] = "halving",
    budget: Annotated[str, typer.Option(help="Time for all rounds: 90s, 30m, 2h.")] = "30m",
    rounds: Annotated[int | None, typer.Option(min=1, help="So many rounds at most.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Of agents.yaml, who proposes. (default: search, and small changes)")
    ] = None,
    reviewer: Annotated[str | None, typer.Option(help="Of agents.yaml, who comments on what is offered.")] = None,
    agents: Annotated[
        Path | None, typer.Option(help="Where agents.yaml is. (default: ./ or config/ or the cache)")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the changes at random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder of the record. (default: in the cache)")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the rounds of an earlier run.")] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Climb again with the answers of this record; asks nobody.")
    ] = None,
    show: Annotated[Path | None, typer.Option(help="Write this record as a page beside it.")] = None,
    analyse: Annotated[
        Path | None, typer.Option(help="A profile or a bench record: where most time can be won.")
    ] = None,
    accept: Annotated[str | None, typer.Option(help="Make what is offered by this name a candidate here.")] = None,
    remove: Annotated[str | None, typer.Option(help="Take an accepted one away.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="What was accepted here.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Go on without asking where this system lacks walls.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let kernels and configs be proposed, and see how high each climbs the proof ladder. Needs no GPU.

    rocm-sd improve geglu --arch gfx1100 --budget 10m

    rocm-sd improve attention --agent local --reviewer careful

    rocm-sd improve --analyse out/profile.json

    rocm-sd improve --accept geglu-3f9a1c2d

    A proposal is read as data, then interpreted, compiled, and executed on the emulator, each in a process with no
    network, no files of yours and limits; the first rung that fails gives back what it found. What survives is timed
    beside the shipped kernel on a GPU of its architecture; where there is none, its counted work is modelled. What is
    better is offered. Nothing of it runs in your pictures before you accept it by name and `rocm-sd tune` has measured
    it to be faster. Ctrl-C keeps all finished rounds, and the same command goes on. Without agents.yaml the tuner's
    search and small changes of the shipped kernels are tried, and no language model is needed (docs/improve.md).
    """
    console = Console()
    done = [each is not None for each in (analyse, accept, remove, show, replay)]
    if sum((op is not None, listed, *done)) != 1:
        raise InvalidOption(
            "improve",
            op or "",
            [],
            hint="Name one op, or one of --analyse, --replay, --show, --accept, --remove, --list.",
        )
    if analyse is not None:
        _analyse(console, analyse, agent, agents, as_json=as_json)
    elif accept is not None:
        _accept(console, accept, out, device, agreed=yes)
    elif remove is not None:
        from rocm_sd.ops import accepted

        accepted.remove(remove)
        say(console, f"{remove} is no candidate any more.")
    elif listed:
        _list(console)
    elif show is not None:
        _show(console, show)
    elif replay is not None:
        _replay(console, replay, out, as_json=as_json, agreed=yes)
    else:
        assert op is not None
        asked = _Asked(op, arch, device, strategy, budget_seconds(budget), rounds, seed, out, fresh, yes, as_json)
        _improve(console, asked, agent, reviewer, agents)


@dataclass(frozen=True)
class _Asked:
    op: str
    arch: str | None
    device: str | None
    strategy: str
    seconds: float
    rounds: int | None
    seed: int
    out: Path | None
    fresh: bool
    agreed: bool
    as_json: bool


def _improve(console: Console, asked: _Asked, agent: str | None, reviewer: str | None, file: Path | None) -> None:
    from rocm_sd.agents import keeping
    from rocm_sd.agents.improving import run_of
    from rocm_sd.agents.proposers import BuiltIn, LanguageModel, Reviewer
    from rocm_sd.tuning.search.halving import strategy

    op, architectures = _op(asked.op), _architectures(asked.arch)
    strategy(asked.strategy)
    writer, careful = _agents(agent, reviewer, file)
    _require_walls(agreed=asked.agreed)
    card = _card(asked.device, architectures)
    built_in = BuiltIn(op, architectures, asked.seed, asked.strategy)
    name = writer.name if writer else built_in.name
    run = run_of(op, architectures, name, asked.seed, card.name if card else "")
    judge = _judge(op, architectures, card, gains_alone=writer is None)
    with keeping.keeping(asked.out or keeping.folder(), run, fresh=asked.fresh) as kept:
        proposer: Proposer = LanguageModel(op, architectures, writer, kept.rounds) if writer else built_in
        judges = Reviewer(careful, kept.rounds) if careful else None
        if kept.rounds:
            say(Console(stderr=True), f"Going on after round {len(kept.rounds)}. To begin anew: --fresh")
        why = _rounds(console, op, kept, proposer, judge, asked.seconds, asked.rounds, judges, quiet=asked.as_json)
        _tell(console, kept, why, as_json=asked.as_json)


def _card(device: str | None, architectures: Sequence[str]) -> Card | None:
    """The GPU where proposals are timed. One that is not of these architectures is told, and left alone."""
    import torch

    from rocm_sd.agents.cards import find

    if device is None and not torch.cuda.is_available():
        return None
    card = find(device or "cuda")
    if card is None or card.arch in architectures:
        return card
    say(
        Console(stderr=True),
        f"Nothing is timed: {card.name} is {card.arch}, and proposals are for {', '.join(architectures)}.",
    )
    return None


def _judge(
    op: Op, architectures: Sequence[str], card: OnCard | None, *, gains_alone: bool = False
) -> Callable[[Callable[[str], object]], Judge]:
    """Made at once: what it cannot prove here is said before anything is begun. It is given who hears of its rungs."""
    from rocm_sd.agents.judging import Judge

    Judge(op, architectures, card=card)
    return lambda note: Judge(op, architectures, note, card=card, gains_alone=gains_alone)


def _rounds(
    console: Console,
    op: Op,
    kept: Kept,
    proposer: Proposer,
    judged_by: Callable[[Callable[[str], object]], Judge],
    seconds: float,
    rounds: int | None,
    reviewer: Reviewer | None,
    *,
    quiet: bool,
) -> str:
    from rocm_sd.agents.improving import improve as run

    with bar(f"{op.name}: beginning", rounds, console=Console(stderr=True)) as update:
        judge = judged_by(lambda what: update(description=f"{op.name}: {what}"))

        def told(done: Round) -> None:
            update(completed=len(kept.rounds))
            if not quiet:
                console.print(_line(done), highlight=False, soft_wrap=True)

        try:
            return run(op, kept, proposer, judge, seconds=seconds, rounds=rounds, reviewer=reviewer, told=told)
        except KeyboardInterrupt:
            say(Console(stderr=True), f"{len(kept.rounds)} rounds are kept; the same command goes on.")
            raise


def _line(done: Round) -> str:
    why = done.proposal[0].why if done.proposal else "no proposal"
    finding = done.judged.finding
    finding = finding if len(finding) <= _LONGEST else f"{finding[:_LONGEST]}..."
    return f"{done.number:>3}  {_WORDS[done.judged.verdict]}  {literal(why[:80])}\n     [dim]{literal(finding)}[/]"


def _tell(console: Console, kept: Kept, why: str, *, as_json: bool) -> None:
    from rocm_sd.agents import keeping

    offered = kept.offered
    if as_json:
        typer.echo(json.dumps({"ended": why, "file": str(kept.file), "tree": keeping.tree_of(kept.rounds)}, indent=2))
        return
    counts = f"{len(kept.rounds)} proposals, {len(offered)} offered: {why}."
    if not offered:
        say(console, f"{counts} Nothing proven is better than what is shipped.")
    else:
        say(console, counts)
        table = Table("name", "changes", "of the shipped time", title="Offered, the best first", title_justify="left")
        for each in offered:
            table.add_row(
                keeping.named(kept.run.op, each.proposal[0]), literal(each.proposal[0].why), _shares(each.judged)
            )
        console.print(table)
        if any(not each.judged.measured for each in offered):
            say(console, "Modelled is counted work, and no measurement: `rocm-sd tune` measures it on a card.")
        best = keeping.named(kept.run.op, offered[0].proposal[0])
        say(console, f"To make it a candidate here, type: rocm-sd improve --accept {best}")
    say(console, f"To see the rounds as a page, type: rocm-sd improve --show {kept.file}")


def _shares(judged: Judged) -> str:
    measured = [
        f"{each.arch} measured {1.0 / each.ratio:.3f} ({1.0 / each.high:.3f} to {1.0 / each.low:.3f}) at {each.call}"
        for each in judged.measured
    ]
    return ", ".join([*measured, *(f"{gfx} modelled {value:.3f}" for gfx, value in judged.ratio.items())])


def _require_walls(*, agreed: bool = False) -> None:
    """Tell which walls this system lacks, and ask where a proposal could reach the network or the user's files."""
    from rocm_sd.agents import confinement
    from rocm_sd.agents.walls import WALLS

    lacking, errors = confinement.missing(), Console(stderr=True)
    if not lacking:
        return
    say(errors, f"This system lacks walls around what is proposed, and cannot hold it to: {'; '.join(lacking)}.")
    if agreed or not {WALLS["network"], WALLS["writes"]} & set(lacking):
        return
    try:
        agreed = typer.confirm(
            "Only the reading of a proposal stands before your files or the network. Go on?", err=True
        )
    except typer.Abort:
        agreed = False
    if not agreed:
        raise RocmSdError(
            "Nothing was tried: a proposal could reach the network or your files.",
            hint="Use Linux 5.19 or later with Landlock and seccomp, or a machine that you can do without, and --yes.",
        )


def _op(name: str) -> Op:
    from rocm_sd.errors import require_one_of
    from rocm_sd.ops import OPS

    able = [
        each.name
        for each in OPS.values()
        if each.tuning is not None and each.verification and each.verification.kernels
    ]
    require_one_of("op", name, able)
    return OPS[name]


def _architectures(asked: str | None) -> tuple[str, ...]:
    from rocm_sd.agents.improving import provable
    from rocm_sd.errors import require_known
    from rocm_sd.verify.proofs import EMULATED

    chosen = parts(asked) or list(EMULATED)
    require_known("architecture", chosen, provable())
    return tuple(chosen)


def _agents(name: str | None, reviewer: str | None, file: Path | None) -> tuple[Agent | None, Agent | None]:
    if name is None and reviewer is None:
        return None, None
    from rocm_sd.agents.roster import find_roster, read_roster

    path = file or find_roster()
    if path is None:
        hint = "Copy config/agents.yaml of the repository here, and name your server in it (docs/improve.md)."
        raise RocmSdError("There is no agents.yaml that could name an agent.", hint=hint)
    roster = read_roster(path)
    return (roster.agent(name) if name else None), (roster.agent(reviewer) if reviewer else None)


def _analyse(console: Console, path: Path, name: str | None, file: Path | None, *, as_json: bool) -> None:
    from rocm_sd.agents import analyst
    from rocm_sd.agents.proposers import commented

    agent, _ = _agents(name, None, file)
    found = analyst.analyse(path)
    comment = None if agent is None else commented(agent, analyst.to_dict(found))
    if as_json:
        told = analyst.to_dict(found) | ({} if comment is None else {"comment": comment})
        typer.echo(json.dumps(told, indent=2))
        return
    console.print(analyst.as_table(found))
    for note in found.notes:
        say(console, note)
    chance = analyst.improvable(found)
    if chance is not None:
        say(console, f"To let its kernel be improved, type: rocm-sd improve {chance.op}")
    if agent is not None and comment is not None:
        console.print(f"\n{literal(agent.name)} says, and nobody has checked it:\n{literal(comment)}", highlight=False)


def _accept(console: Console, name: str, out: Path | None, device: str | None, *, agreed: bool) -> None:
    from rocm_sd.agents import keeping
    from rocm_sd.agents.improving import accept

    _require_walls(agreed=agreed)
    with bar(f"{name}: proven again", console=Console(stderr=True)) as update:

        def judge(op: Op, architectures: Sequence[str]) -> Judge:
            made = _judge(op, architectures, _card(device, architectures))
            return made(lambda what: update(description=f"{name}: proven again, {what}"))

        path = accept(name, [out or keeping.folder()], judge)
    say(console, f"{name} is a candidate from now on ({path}). It is used where it is measured to be faster.")
    say(console, f"Type: rocm-sd tune, or take it away: rocm-sd improve --remove {name}")


def _list(console: Console) -> None:
    from rocm_sd.ops import accepted

    entries = list(accepted.accepted())
    if not entries:
        say(console, "Nothing was accepted yet. Type: rocm-sd improve geglu")
        return
    table = Table("name", "op", "proven on", "by", "changes")
    for each in entries:
        table.add_row(each.name, each.op, ", ".join(each.architectures), literal(each.proposer), literal(each.why))
    console.print(table)


def _show(console: Console, path: Path) -> None:
    from rocm_sd.agents import keeping
    from rocm_sd.agents.page import write

    page = path.with_suffix(".html")
    write(keeping.read(path), page)
    say(console, f"wrote {page}")


def _replay(console: Console, path: Path, out: Path | None, *, as_json: bool, agreed: bool) -> None:
    """The same answers, proven again; the tree must be the same. Times of a card are those of the record."""
    from rocm_sd.agents import keeping
    from rocm_sd.agents.cards import Recorded
    from rocm_sd.agents.improving import run_of
    from rocm_sd.agents.proposers import BuiltIn, Replayed
    from rocm_sd.errors import NumericsFailure

    before = keeping.read(path)
    op = _op(before.run.op)
    _require_walls(agreed=agreed)
    run = run_of(
        op, before.run.architectures, f"{Replayed.name}-{before.run.agent}", before.run.seed,
        before.run.versions.get("card", ""),
    )  # fmt: skip
    gains_alone = before.run.agent.startswith(BuiltIn.prefix)
    judge = _judge(op, before.run.architectures, Recorded(before.rounds), gains_alone=gains_alone)
    with keeping.keeping(out or keeping.folder(), run, fresh=True) as kept:
        why = _rounds(console, op, kept, Replayed(before.rounds), judge, 7 * 86400.0, None, None, quiet=as_json)
        _tell(console, kept, why, as_json=as_json)
        differs = _difference(before, kept)
    if differs is None:
        say(Console(stderr=True), "The tree is the same as that of the record.")
        return
    changed = [name for name, value in run.versions.items() if before.run.versions.get(name) != value]
    reason = f" ({', '.join(changed)} changed since)" if changed else ""
    raise NumericsFailure(f"Round {differs} of {path} came to another end than it had{reason}.")


def _difference(before: Improvement, kept: Kept) -> int | None:
    from rocm_sd.agents.keeping import tree_of

    ours, theirs = tree_of(kept.rounds), tree_of(before.rounds)
    unlike = (number for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1) if one != other)
    return next(unlike, None if len(ours) == len(theirs) else min(len(ours), len(theirs)) + 1)
