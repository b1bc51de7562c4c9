"""rocm-sd bench WORKLOAD --gpus N: a process for each GPU, one run of all of them, and what they gain as a table."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.logging import RichHandler

from rocm_sd import settings
from rocm_sd.cli.terminal import bar, name_report, say, status
from rocm_sd.errors import NumericsFailure, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.bench.several_gpus_record import GpusRecord

__all__ = ["AskedOfGpus", "bench_gpus", "measure_on_rank"]

_OWN = {"--gpus", "--parallel", "--model", "--repeats", "--tiny"}


@dataclass(frozen=True)
class AskedOfGpus:
    """The options, the same for every rank; None where they were not given."""

    workload: str
    gpus: int
    parallel: str
    model: str | None
    steps: int | None
    repeats: int | None
    tiny: bool
    device: str | None
    out: Path

    @property
    def command(self) -> str:
        """What to type to repeat it. Folders are a person's own: only the last part of a model's is kept."""
        model = self.model
        if model is not None and Path(model).exists():
            model = Path(model).resolve().name
        options = {
            "--gpus": self.gpus, "--parallel": None if self.parallel == "auto" else self.parallel, "--model": model,
            "--steps": self.steps, "--repeats": self.repeats, "--device": self.device,
        }  # fmt: skip
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return " ".join(["rocm-sd", "bench", self.workload, *words, *(["--tiny"] if self.tiny else [])])


def bench_gpus(asked: AskedOfGpus, given: Mapping[str, object], device: torch.device, *, as_json: bool) -> None:
    """`given`: all options of bench with their values, None where they are not."""
    from rocm_sd.bench import several_gpus_tables as tables
    from rocm_sd.bench.several_gpus_record import GpusRecord, record_file
    from rocm_sd.bench.workloads import require_workload
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.models import resolve
    from rocm_sd.parallel.launching import launch

    # Everything that can be wrong with the options is said before a process is started.
    _require_fitting(asked, given, device)
    recipe = require_workload(asked.workload, device, model=asked.model, steps=asked.steps, tiny=asked.tiny)
    if asked.model is not None:
        resolve(asked.model)
    writable_folder(asked.out)
    file = record_file(asked.out, f"{recipe.name}-tiny" if asked.tiny else recipe.name, asked.gpus)
    launch(asked.gpus, measure_on_rank, asked, file, device=device)
    record = GpusRecord.load(file)
    if as_json:
        typer.echo(json.dumps(record.to_dict(), indent=2))
    else:
        console = Console()
        console.print(tables.rich_tables(record))
        say(console, f"wrote {file}")
        name_report(console, file.parent)
    _require_right(record)


def _require_fitting(asked: AskedOfGpus, given: Mapping[str, object], device: torch.device) -> None:
    import torch

    from rocm_sd.bench.ops import is_op
    from rocm_sd.parallel import parse
    from rocm_sd.parallel.launching import require_ranks

    if asked.gpus == 1:
        raise Unsupported("--parallel", "one GPU", hint="Add --gpus 2, or more.")
    if is_op(asked.workload):
        raise Unsupported(f"bench {asked.workload}", "--gpus", hint="An op is timed on one GPU: leave it out.")
    for name in (name for name, value in given.items() if value is not None and name not in _OWN):
        hint = "It times a picture by stock and by rocm-sd, or with --parallel data one for each GPU: leave it out."
        raise Unsupported("bench --gpus", name, hint=hint)
    # Where there are no GPUs, several ranks on the CPU are for who asks for it.
    require_ranks(asked.gpus, device if asked.device else torch.device("cuda"))
    if asked.parallel != "auto":
        parse(asked.parallel, asked.gpus)


def measure_on_rank(device: torch.device, asked: AskedOfGpus, file: Path) -> None:
    """Every rank takes part; rank 0 alone is heard, and writes the record."""
    from torch import distributed as dist

    from rocm_sd.bench.runner import default_repeats
    from rocm_sd.bench.several_gpus import PATIENCE, measure
    from rocm_sd.bench.workloads import make
    from rocm_sd.integrations.diffusers.loading import hush
    from rocm_sd.parallel import join

    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=settings.current().log_level, format="%(message)s", handlers=[handler])
    # Ranks that cannot find one another say so before they load a model.
    join(device, patience=PATIENCE)
    leads = dist.get_rank() == 0
    errors = Console(stderr=True, quiet=not leads)
    hush()
    with status(errors, f"Making {asked.workload} ..."):
        workload = make(asked.workload, device, model=asked.model, steps=asked.steps, tiny=asked.tiny)
    with bar("starting", console=errors, share=True, speed_estimate_period=600) as update:
        record = measure(
            workload, asked.parallel, repeats=asked.repeats or default_repeats(device), command=asked.command,
            progress=lambda done, total, what: update(completed=done, total=total, description=what),
        )  # fmt: skip
    if leads:
        record.save(file)


def _require_right(record: GpusRecord) -> None:
    """A wrong result was not timed; that it was wrong must not go unseen in a script."""
    wrong = [f"{way.name}: {way.left_out}" for way in record.ways if way.left_out]
    if wrong:
        raise NumericsFailure(
            f"{len(wrong)} result(s) were wrong, and were not timed: {'; '.join(wrong)}.",
            hint="Please report it with the record, which names the machine and the versions.",
        )
