"""rocm-sd bench WORKLOAD --accuracy: CLIP score and FID over a file of prompts, engine by engine, as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import bar, batch_sizes, literal, parts, say, status
from rocm_sd.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.bench.accuracy import AccuracyRecord

__all__ = ["OWN", "AskedOfAccuracy", "bench_accuracy"]

# Of them --prompts is for others, too.
OWN = ("--clip", "--reference", "--inception")
_WITH = {"--accuracy", "--prompts", "--batch", "--engines", "--model", *OWN}


@dataclass(frozen=True)
class AskedOfAccuracy:
    workload: str
    prompts: Path | None
    clip: Path | None
    reference: Path | None
    inception: Path | None
    model: str | None
    steps: int | None
    engines: str | None
    batch: str
    out: Path
    resume: bool

    @property
    def command(self) -> str:
        """What to type to repeat it, with the last parts of paths: folders are a person's own."""
        model = Path(self.model).resolve().name if self.model and Path(self.model).exists() else self.model
        options = {
            "--prompts": self.prompts and self.prompts.name, "--clip": self.clip and self.clip.resolve().name,
            "--reference": self.reference and self.reference.name,
            "--inception": self.inception and self.inception.name, "--model": model, "--steps": self.steps,
            "--engines": self.engines, "--batch": None if self.batch == "1" else self.batch,
        }  # fmt: skip
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return " ".join(["rocm-sd", "bench", self.workload, "--accuracy", *words])


def bench_accuracy(asked: AskedOfAccuracy, given: Mapping[str, object], device: torch.device, *, as_json: bool) -> None:
    """`given`: all options of bench with their values, None where they are not."""
    from rocm_sd.bench import accuracy
    from rocm_sd.bench.engines import chosen
    from rocm_sd.bench.workloads import make
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.integrations.diffusers.loading import hush, load_clip
    from rocm_sd.quality.scoring import Scorer, read_statistics

    # Everything that can be wrong with the options is said before a model is loaded.
    prompts_file = _require_fitting(asked, given)
    prompts = accuracy.read_prompts(prompts_file)
    sizes = batch_sizes(asked.batch)
    if len(sizes) > 1:
        raise InvalidOption("--batch", asked.batch, [], hint="Scores do not depend on it: give one, e.g. --batch 8.")
    engines = chosen(parts(asked.engines) or ("stock", "rocm-sd"), device)
    statistics = None if asked.reference is None else read_statistics(asked.reference)
    clip = None if asked.clip is None else partial(load_clip, str(asked.clip))
    scorer = partial(Scorer, clip=clip, reference=statistics, inception=asked.inception, device=device)
    hush()
    scorer()
    writable_folder(asked.out)
    errors = Console(stderr=True)
    with status(errors, f"Making {asked.workload} ..."):
        workload = make(asked.workload, device, model=asked.model, steps=asked.steps)
    try:
        with bar("starting", console=errors) as update:
            record = accuracy.run(
                workload, engines, prompts, scorer, out=asked.out, batch=sizes[0], resume=asked.resume,
                clip=None if asked.clip is None else asked.clip.resolve().name,
                reference=None if asked.reference is None else asked.reference.name,
                command=asked.command,
                progress=lambda done, total, what: update(completed=done, total=total, description=what),
            )  # fmt: skip
    except KeyboardInterrupt:
        say(errors, f"Interrupted. What was scored is kept in {asked.out}; to go on, type the same command again.")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(record.to_dict(), indent=2))
        return
    console = Console()
    console.print(_table(record))
    say(console, f"wrote {accuracy.record_file(asked.out, workload.name)}")


def _require_fitting(asked: AskedOfAccuracy, given: Mapping[str, object]) -> Path:
    """Where the prompts are."""
    if given["--accuracy"] is None:
        lone = next(name for name in OWN if given[name] is not None)
        hint = "Type: rocm-sd bench WORKLOAD --accuracy --prompts FILE --clip FOLDER"
        raise Unsupported("bench", f"{lone} without --accuracy", hint=hint)
    for name in (name for name, value in given.items() if value is not None and name not in _WITH):
        raise Unsupported("bench --accuracy", name, hint="It scores pictures and times nothing: leave it out.")
    if asked.prompts is None:
        raise InvalidOption(
            "--prompts", None, [], hint="--accuracy needs a file: one prompt a line, or MLPerf's captions as .tsv."
        )
    if asked.clip is None and asked.reference is None:
        hint = "--accuracy needs --clip FOLDER (CLIP score), --reference FILE (FID), or both."
        raise InvalidOption("--clip", None, [], hint=hint)
    if asked.inception is not None and asked.reference is None:
        raise InvalidOption("--inception", asked.inception, [], hint="It is for the FID: give --reference, too.")
    if asked.reference is not None and asked.inception is None:
        hint = "The FID needs a network: give torch-fidelity's Inception weights with --inception FILE."
        raise InvalidOption("--inception", None, [], hint=hint)
    return asked.prompts


def _table(record: AccuracyRecord) -> Table:
    from rocm_sd.bench.accuracy import verdict

    facts = record.workload
    title = f"{facts.name}: {record.prompts} prompts, {facts.weights} weights, on {record.machine.device}"
    table = Table("engine", "pictures", "CLIP score", "FID", "verdict", title=literal(title), title_justify="left")
    for one in record.results:
        scores = ("not asked for" if value is None else f"{value:.4f}" for value in (one.clip_score, one.fid))
        table.add_row(literal(one.engine), str(one.pictures), *scores, verdict(record, one))
    return table
