"""rocm-sd bench --pareto: speed against quality of every setting, as a table, a plot and a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from rocm_sd.cli.terminal import bar, name_report, say, status
from rocm_sd.errors import InvalidOption, Unsupported, optional_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.bench.pareto import Survey
    from rocm_sd.bench.records import Record

__all__ = ["SETTINGS_ON_CPU", "bench_pareto", "require_fitting"]

SETTINGS_ON_CPU, _SETTINGS_ON_GPU = 4, 14
_STEPS = 20
_OWN = {"--prompts", "--settings"}


def require_fitting(given: Mapping[str, object], *, pareto: bool) -> None:
    """`given`: options with their values, None where they are not. Some are for --pareto alone, others not for it."""
    for name in (name for name, value in given.items() if value is not None and (name in _OWN) != pareto):
        if pareto:
            hint = "It draws one picture at a time, of settings of its own: leave it out."
            raise Unsupported("bench --pareto", name, hint=hint)
        raise Unsupported("bench", f"{name} without --pareto", hint="Type: rocm-sd bench MODEL --pareto")


def bench_pareto(
    model: str | None,
    prompts: Path | None,
    steps: int | None,
    settings: int | None,
    out: Path,
    device: torch.device,
    *,
    as_json: bool,
) -> None:
    from rocm_sd import models
    from rocm_sd.bench import pareto, pareto_tables, subjects
    from rocm_sd.bench.workloads import WORKLOADS
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.integrations.diffusers.loading import hush

    # Said before anything is drawn.
    optional_module("skimage.metrics", "scikit-image", "quality")
    if model is not None and model != "emoji" and (model in WORKLOADS or model.startswith("op:")):
        hint = "With --pareto give a model: a Diffusers folder, a .safetensors file, a hub id, or emoji-sd."
        raise InvalidOption("MODEL", model, [], hint=hint)
    source = models.resolve(None if model == "emoji" else model)
    count = subjects.default_count(device)
    subject = subjects.of_model(source.name, count) if prompts is None else subjects.from_file(prompts)
    writable_folder(out)
    hush()
    errors = Console(stderr=True)
    wanted = settings or (SETTINGS_ON_CPU if device.type == "cpu" else _SETTINGS_ON_GPU)
    with status(errors, f"Loading {source.name} ..."):
        workload = pareto.workload_of(source, device, steps or _STEPS)
        chosen = pareto.choices(workload.pipeline(), workload.facts.steps, wanted)
    command = _command(model, prompts, steps, settings)
    with bar("starting", console=errors, share=True, speed_estimate_period=600) as update:
        survey = pareto.Survey(
            workload, subject, chosen, out=out, command=command,
            progress=lambda done, total, what: update(completed=done, total=total, description=what),
        )  # fmt: skip
        interrupted = _interrupted(survey)
    record = survey.record
    written = _write(record, survey.file)
    if as_json:
        typer.echo(json.dumps(record.to_dict(), indent=2))
    else:
        console = Console()
        if pareto_tables.rows(record):
            console.print(pareto_tables.rich_tables(record))
        for note in pareto_tables.notes(record):
            say(console, note)
        say(console, f"wrote {', '.join(map(str, written))}")
        name_report(console, survey.file.parent)
    if interrupted:
        kept = f"{survey.turns} of {len(subject.texts)} prompts are kept in {survey.file}"
        what = kept if survey.turns else "No prompt was drawn by all settings yet"
        say(errors, f"Interrupted. {what}; the same command starts anew and keeps that record aside.")
        raise typer.Exit(130)


def _interrupted(survey: Survey) -> bool:
    try:
        survey.go()
    except KeyboardInterrupt:
        return True
    return False


def _write(record: Record, file: Path) -> list[Path]:
    """The plot and the page, from what the record has: an interrupted run's too."""
    from rocm_sd.bench import pareto_tables
    from rocm_sd.bench.pareto_points import points
    from rocm_sd.bench.report import pareto_plot
    from rocm_sd.cli.pictures import save_png, save_text

    written = [file]
    found = points(record)
    plot = file.with_suffix(".png") if len(found) > 1 else None
    if plot is not None:
        facts: dict[str, Any] = {"command": record.command, "machine": record.machine.device, "when": record.when}
        save_png(pareto_plot.draw(found, *pareto_tables.title(record)), plot, facts)
        written.append(plot)
    page = file.with_suffix(".md")
    save_text(pareto_tables.markdown(record, plot.name if plot else None), page)
    return [*written, page]


def _command(model: str | None, prompts: Path | None, steps: int | None, settings: int | None) -> str:
    """What to type to repeat it. Folders are a person's own: only the last part is kept."""
    if model is not None and Path(model).exists():
        model = Path(model).resolve().name
    options = {"--prompts": prompts.name if prompts else None, "--steps": steps, "--settings": settings}
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return " ".join(["rocm-sd", "bench", *([model] if model else []), "--pareto", *words])
