"""rocm-sd profile: where the time of a picture goes."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rocm_sd.cli.terminal import Device, bar, say
from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rocm_sd.bench.profiling import Analysis, Profiled, Trace

__all__ = ["profile"]

_PROMPT = "a frog on a pink background"


def profile(
    workload: Annotated[
        str | None, typer.Argument(help="As of rocm-sd bench: emoji, sd15-512, sdxl-1024, ...", show_default="emoji")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A Diffusers folder, a .safetensors checkpoint or a hub id, with its own size.")
    ] = None,
    engine: Annotated[str, typer.Option(help="What draws: stock, rocm-sd, channels_last, compile, ...")] = "rocm-sd",
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of the profiled picture.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at once.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="A folder for profile.json, trace.json and flame.html.", show_default="none")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the Chrome trace to this file (open it at ui.perfetto.dev).")
    ] = None,
    flame: Annotated[Path | None, typer.Option(help="Write the flame chart to this HTML file.")] = None,
    rocprof: Annotated[
        Path | None, typer.Option(help="Draw nothing: read this kernel trace of rocprofv3, CSV or JSON.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the tables of modules and kernels.")] = 15,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure, machine-readable.")] = False,
) -> None:
    """Show where the time of a picture goes: by family of work, by module and by kernel, and what is slow.

    rocm-sd profile

    rocm-sd profile sd15-512 --engine stock --out profiled

    rocm-sd profile --model ./sd15 --steps 4 --flame flame.html

    rocm-sd profile --rocprof results_kernel_trace.csv
    """
    from rocm_sd.cli.pictures import writable_file, writable_folder

    if out is not None:
        writable_folder(out)
    for path in (trace, flame):
        if path is not None:
            writable_file(path)
    if rocprof is not None:
        if workload or model or trace:
            raise InvalidOption("--rocprof", str(rocprof), [], hint="It draws nothing: leave out the others.")
        analysis, chart = _from_rocprof(rocprof)
        values = None
    else:
        # Read when torch is first imported; the profiler's library writes lines of its own otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        drawn = _drawn(workload, model, engine, steps, batch, device)
        analysis, chart, values = drawn.analysis, drawn.chart, drawn.trace
    written = _write(analysis, chart, values, out, trace, flame)
    if as_json:
        typer.echo(json.dumps(analysis.to_dict(), indent=2))
        return
    from rocm_sd.bench.profiling import tables

    console = Console()
    tables.show(analysis, console, rows=rows)
    for path in written:
        say(console, f"wrote {path}")


def _drawn(
    workload: str | None, model: str | None, engine: str, steps: int, batch: int, device: str | None
) -> Profiled:
    from rocm_sd.bench import engines
    from rocm_sd.bench.profiling import profile_picture
    from rocm_sd.bench.profiling.session import STAGES
    from rocm_sd.integrations.diffusers.loading import default_device, hush

    where = default_device(device)
    (chosen,) = engines.chosen([engine], where)
    hush()
    pipeline, draw, subject = (_workload if workload or not model else _own_model)(
        workload or "emoji", model, steps, batch, where
    )
    subject = {**subject, "engine": engine, "steps": f"{steps} steps", "batch": f"batch {batch}"}
    with bar("profiling", STAGES) as update:
        stages = count()
        return profile_picture(
            pipeline, draw, chosen, where, subject=subject,
            on_stage=lambda stage: update(completed=next(stages), description=stage),
        )  # fmt: skip


def _workload(
    name: str, model: str | None, steps: int, batch: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[Any], object], dict[str, str]]:
    from rocm_sd.bench import workloads

    work = workloads.make(name, device, model=model, steps=steps)
    facts = work.facts
    subject = {"workload": facts.name, "weights": f"{facts.weights} weights", "dtype": facts.dtype}
    return work.pipeline, lambda pipe: work.picture(pipe, batch, steps=steps), subject


def _own_model(
    _name: str, model: str | None, steps: int, batch: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[Any], object], dict[str, str]]:
    """Any text-to-image pipeline at its own size, where no workload was named."""
    from pathlib import Path

    from rocm_sd import models
    from rocm_sd.integrations import diffusers as host

    source = models.resolve(model)
    request = host.Request(_PROMPT, steps=steps, batch=batch, guidance=source.guidance)
    name = source.location if source.kind is models.ModelKind.HUB else Path(source.location).name
    return lambda: host.load_pipeline(source, device), lambda pipe: host.generate(pipe, request), {"model": name}


def _from_rocprof(path: Path) -> tuple[Analysis, Trace]:
    from dataclasses import replace

    from rocm_sd import arch
    from rocm_sd.bench.profiling import analyse, findings, read_rocprof, tables

    found = read_rocprof(path)
    analysis = analyse(found, arch.unknown("gfx"))
    notes = ["rocprofv3 records kernels only: no modules, and no shapes to count work from"]
    return replace(tables.annotated(analysis, findings(analysis), notes), subject={"file": path.name}), found


def _write(
    analysis: Analysis,
    chart: Trace,
    values: dict[str, Any] | None,
    out: Path | None,
    trace: Path | None,
    flame: Path | None,
) -> list[Path]:
    from rocm_sd.bench.profiling import flame as flame_chart
    from rocm_sd.bench.profiling.families import IDLE
    from rocm_sd.cli.pictures import save_text

    written = []
    if out is not None:
        save_text(json.dumps(analysis.to_dict(), indent=2) + "\n", out / "profile.json")
        written.append(out / "profile.json")
        trace, flame = trace or out / "trace.json", flame or out / "flame.html"
    if trace is not None and values is not None:
        save_text(json.dumps(values), trace)
        written.append(trace)
    if flame is not None:
        idle = analysis.family(IDLE)
        title = ", ".join(["rocm-sd profile", *(str(value) for value in analysis.subject.values())])
        flame_chart.write(chart, flame, title=title, idle_us=idle.ms * 1e3 if idle else 0.0, notes=analysis.notes)
        written.append(flame)
    return written
