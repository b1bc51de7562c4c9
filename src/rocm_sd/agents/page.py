"""A record as a page: the tree of proposals, what each changed, and how far it climbed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.agents.judging import OFFERED, REFUSED
from rocm_sd.agents.keeping import named
from rocm_sd.errors import optional_module
from rocm_sd.files import write_text

if TYPE_CHECKING:
    from rocm_sd.agents.keeping import Improvement, Round

__all__ = ["made", "write"]

_RUNGS = ("allowed", "interpreted", "compiled", "emulated", "on the card")
_CLASSES = {OFFERED: "offered", REFUSED: "refused"}


def write(record: Improvement, path: Path) -> None:
    write_text(path, made(record))


def made(record: Improvement) -> str:
    """Self-contained HTML; what agents wrote is escaped, as all of it is a stranger's."""
    jinja2 = optional_module("jinja2", "jinja2", "report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    run, rounds = record.run, record.rounds
    offered = sorted((each for each in rounds if each.judged.verdict == OFFERED), key=lambda each: each.judged.score)
    text: str = template.render(
        run=run,
        devices=list(dict.fromkeys(timing.device for each in rounds for timing in each.judged.measured)),
        rungs=_RUNGS,
        tree=_below(0, record),
        offered=[{"name": named(run.op, each.proposal[0]), **_row(record, each)} for each in offered],
        counts={
            "proposals": len(rounds),
            "offered": len(offered),
            "refused": sum(each.judged.verdict == REFUSED for each in rounds),
        },
        tokens=sum(each.tokens_in + each.tokens_out for each in rounds),
    )
    return text


def _below(parent: int, record: Improvement) -> list[dict[str, Any]]:
    """A round's parent was made before it, whatever a damaged record says: else there is no end."""
    children = [each for each in record.rounds if each.parent == parent and each.number > parent]
    return [_row(record, each) | {"below": _below(each.number, record)} for each in children]


def _row(record: Improvement, done: Round) -> dict[str, Any]:
    proposal = done.proposal[0] if done.proposal else None
    return {
        "number": done.number,
        "by": done.proposer,
        "why": proposal.why if proposal else "no proposal",
        "kind": proposal.kind if proposal else "",
        "text": proposal.text if proposal else done.answer,
        "verdict": done.judged.verdict,
        "class": _CLASSES.get(done.judged.verdict, "even"),
        "marks": [_mark(done, rung) for rung in range(1, len(_RUNGS) + 1)],
        "finding": done.judged.finding,
        "ratio": ", ".join(f"{arch} {value:.3f}" for arch, value in done.judged.ratio.items()),
        "measured": [
            f"{each.call}: {each.us:g} us, shipped {each.shipped_us:g}, stock {each.stock_us:g}; "
            f"{each.ratio:.3f} ({each.low:.3f} to {each.high:.3f}) times as fast as shipped"
            for each in done.judged.measured
        ],
        "review": done.review,
        "op": record.run.op,
    }


def _mark(done: Round, rung: int) -> str:
    states = [each.state for each in done.judged.rungs if each.rung == rung]
    return "failed" if "failed" in states else "passed" if "passed" in states else "not reached"
