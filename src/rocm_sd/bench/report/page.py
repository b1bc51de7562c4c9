"""The page: sections put into the template, with the style and the script inside and nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING

from rocm_sd import __version__
from rocm_sd.bench import sending
from rocm_sd.bench.report import (
    contributed,
    memory,
    other_cards,
    pareto,
    pictures,
    rooflines,
    scaling,
    serving,
    several_gpus,
    speed,
)
from rocm_sd.bench.report.parts import Page, Picture, Svg
from rocm_sd.errors import optional_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.report.reading import Inputs, Outcome

__all__ = ["page", "render"]


def page(
    inputs: Inputs,
    outcomes: Sequence[Outcome] = (),
    given: Sequence[Picture] = (),
    drawn: Sequence[tuple[Picture, ...]] = (),
) -> Page:
    records = inputs.timed
    notes = []
    drawn_with = [record.workload.weights for record in records] + [record.workload.weights for record in inputs.split]
    if "random" in drawn_with:
        notes.append("Weights are random, of the real architecture: speed and memory do not depend on them.")
    if not inputs.records:
        notes.append("No whole pictures were timed.")
    projected = other_cards.projection(records)
    scaled = scaling.scaling(records)
    surveyed = pareto.pareto(records)
    served = serving.serving(inputs.served)
    split = several_gpus.several_gpus(inputs.split)
    cards = contributed.contributed(inputs.contributed)
    sent = (cards,) if cards else ()
    is_first = _is_all_sent(inputs)
    sections = (
        *(sent if is_first else ()),
        speed.speed(records),
        *((surveyed,) if surveyed else ()),
        *((served,) if served else ()),
        speed.ablation(records),
        rooflines.rooflines(inputs.op_runs),
        memory.memory(records),
        *((projected,) if projected else ()),
        *((split,) if split else ()),
        *((scaled,) if scaled else ()),
        *(() if is_first else sent),
        other_cards.ladder(outcomes),
        pictures.pictures(given, drawn),
    )
    return Page(
        "Measured, and how to repeat it",
        _subtitle(inputs),
        # A processor's figures say the least of a project for GPUs.
        speed.headlines(sorted(records, key=lambda record: record.machine.arch == "cpu")),
        speed.cards(inputs.records),
        tuple(notes),
        sections,
        __version__,
        sending.PLACE,
    )


def _is_all_sent(inputs: Inputs) -> bool:
    """Whether the page is of what was contributed, and of nothing besides."""
    inside = sum(len(part.records) for report in inputs.contributed for part in report.parts)
    return not inputs.op_runs and len(inputs.records) == inside


def _subtitle(inputs: Inputs) -> str:
    """When and on what; files of single ops have no date."""
    dates = sorted({record.when[:10] for record in inputs.records})
    span = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    pictures_on = " and ".join(dict.fromkeys(record.machine.device for record in inputs.records))
    ops_on = " and ".join(dict.fromkeys(run.device for run in inputs.op_runs))
    sent = " and ".join(dict.fromkeys(f"{one.machine.device}, {one.when[:10]}" for one in inputs.contributed))
    sentences = [
        f"Pictures on {pictures_on}, {span}." if dates else "",
        f"Single ops on {ops_on}." if ops_on else "",
    ]
    sentences.insert(0 if _is_all_sent(inputs) else len(sentences), f"Contributed from {sent}." if sent else "")
    return " ".join(filter(None, sentences)) or "Proofs and pictures."


def render(content: Page) -> str:
    """HTML, every value escaped. Its policy allows this one script and this one style, by their hashes."""
    jinja2 = optional_module("jinja2", "jinja2", "report")
    folder = files(__package__) / "templates"
    style, script, source = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    html: str = environment.from_string(source).render(
        page=content, style=Svg(style), script=Svg(script), style_hash=_hash(style), script_hash=_hash(script)
    )
    return html


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
