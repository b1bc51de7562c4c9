"""rocm-sd bench: engines side by side, right first and then timed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table

from rocm_sd.cli.bench_accuracy import OWN, AskedOfAccuracy, bench_accuracy
from rocm_sd.cli.bench_gpus import AskedOfGpus, bench_gpus
from rocm_sd.cli.bench_pareto import bench_pareto, require_fitting
from rocm_sd.cli.bench_serve import SERVE, Asked, bench_serve, require_serve_fitting
from rocm_sd.cli.terminal import OUT, Device, bar, batch_sizes, literal, name_report, parts, say, status
from rocm_sd.errors import InvalidOption, RocmSdError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rocm_sd.bench.records import Record

__all__ = ["bench"]


def bench(
    workload: Annotated[
        str | None,
        typer.Argument(
            help="What is drawn: emoji, sd15-512, ... (see --list), op:NAME, ops, gemm, serve; with --pareto a model.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,8.")] = "1",
    engines: Annotated[
        str | None,
        typer.Option(help="Engines, e.g. stock,compile,rocm-sd. (default: stock, channels_last, compile and rocm-sd)"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A Diffusers folder, a .safetensors checkpoint or a hub id. (default: random weights)"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps. (default: the workload's)")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="How many turns each engine has. (default: 20; 8 on a CPU)")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Flush the caches before each picture.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for WORKLOAD.json, .csv and .md.")] = OUT,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every column, the versions and published figures, in tables.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole record.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue an interrupted run of the same command, or start anew.")
    ] = True,
    against: Annotated[
        Path | None, typer.Option(help="An earlier record: exit code 1 where this run is slower beyond the interval.")
    ] = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Add one optimisation a row, to see what each gives.")
    ] = False,
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="Compare speed and quality of many settings of a model. (default: emoji-sd)"),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="With --pareto, --accuracy or serve: a text file, one prompt a line. (default: built-in ones)"
        ),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Score pictures of --prompts by --clip, --reference or both; no timing.")
    ] = False,
    clip: Annotated[
        Path | None, typer.Option(help="With --accuracy: the folder of a CLIP model, for the CLIP score.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="With --accuracy: an .npz with mu and sigma of real pictures, for the FID.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(help="With --accuracy: torch-fidelity's Inception weights, for the FID.")
    ] = None,
    settings: Annotated[
        int | None, typer.Option(min=1, help="With --pareto: how many settings are tried. (default: 14; 4 on a CPU)")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="With serve: its address, http://127.0.0.1:7860. (default: a server is started for the run)"),
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="With serve: the file whose first line is the API key.")] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="With serve: requests a second (2.5), or a share of what it can do. (default: 0.8x)"),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="With serve: how long requests are sent. (default: 60)")] = None,
    size: Annotated[
        str | None, typer.Option(help="With serve: of pictures, such as 512x512. (default: the model's own)")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With serve: of the times between requests, and of pictures. (default: 0)")
    ] = None,
    submit: Annotated[
        Path | None, typer.Option(help="Also write a contribution for the performance database to this file.")
    ] = None,
    sign_off: Annotated[
        bool, typer.Option("--sign-off", help="With --submit: agree to its statement without being asked.")
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A small model with random weights, to try the command.")
    ] = False,
    device: Device = None,
    gpus: Annotated[
        int, typer.Option(help="Draw one picture on this many GPUs together, and compare with one GPU.")
    ] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            help="With --gpus, how work is split: auto, data, cfg, tensor, pipeline, patch, or cfg=2,patch=2."
        ),
    ] = "auto",
    listed: Annotated[bool, typer.Option("--list", help="List workloads and engines, and exit.")] = False,
) -> None:
    """Time engines side by side, in turns. An engine whose result is wrong is not timed.

    rocm-sd bench emoji

    rocm-sd bench sd15-512 --batch 1,8 --engines stock,compile,rocm-sd

    rocm-sd bench sdxl-mlperf --model ./sdxl --out results --markdown

    rocm-sd bench sd15-512 --ablation --batch 1,8

    rocm-sd bench --pareto

    rocm-sd bench ./my-model --pareto --prompts prompts.txt --steps 30

    rocm-sd bench emoji --engines stock,rocm-sd,rocm-sd-high --steps 20

    rocm-sd bench op:conv2d

    rocm-sd bench gemm

    rocm-sd bench serve --url http://127.0.0.1:7860 --rate 0.8x --seconds 60

    rocm-sd bench sdxl-mlperf --model ./sdxl --accuracy --prompts captions.tsv --clip ./clip --batch 8

    rocm-sd bench sdxl-1024 --gpus 2 --parallel cfg

    rocm-sd bench sd15-512 --against results/sd15-512.json

    Ctrl-C keeps what was measured, and the same command continues there. Columns are explained in
    docs/benchmarking.md. The exit code is 7 where an engine's result was wrong; of serve, 1 where a request was lost.
    """
    from rocm_sd.bench.records import Record
    from rocm_sd.cli.pictures import save_text, writable_folder
    from rocm_sd.integrations.diffusers.loading import default_device, hush

    on = default_device(device)
    if listed:
        _show_list(Console(), on)
        return
    given = {
        "--prompts": prompts, "--settings": settings, "--batch": None if batch == "1" else batch,
        "--engines": engines, "--model": model, "--repeats": repeats, "--against": against, "--submit": submit,
        "--url": url, "--key-file": key_file, "--rate": rate, "--seconds": seconds, "--size": size, "--seed": seed,
        "--clip": clip, "--reference": reference, "--inception": inception,
        "--gpus": None if gpus == 1 else gpus, "--parallel": None if parallel == "auto" else parallel,
        **{name: True if is_on else None for name, is_on in (
            ("--cold", cold), ("--csv", as_csv), ("--markdown", as_markdown), ("--ablation", ablation),
            ("--tiny", tiny), ("--sign-off", sign_off), ("--pareto", pareto), ("--verbose", verbose),
            ("--accuracy", accuracy),
        )},
    }  # fmt: skip
    require_serve_fitting(given, serve=workload == SERVE)
    if workload == SERVE:
        bench_serve(
            Asked(url, key_file, rate, seconds, steps, size, seed, model, prompts, device), out, on, as_json=as_json
        )
        return
    if accuracy or any(given[name] is not None for name in OWN):
        scored = AskedOfAccuracy(
            _named(workload), prompts, clip, reference, inception, model, steps, engines, batch, out, resume
        )
        bench_accuracy(scored, given, on, as_json=as_json)
        return
    require_fitting({name: value for name, value in given.items() if name != "--pareto"}, pareto=pareto)
    if pareto:
        bench_pareto(workload, prompts, steps, settings, out, on, as_json=as_json)
        return
    workload = _named(workload)
    if gpus != 1 or parallel != "auto":
        asked_of_gpus = AskedOfGpus(workload, gpus, parallel, model, steps, repeats, tiny, device, out)
        bench_gpus(asked_of_gpus, given, on, as_json=as_json)
        return
    formats = [name for name, asked in (("--csv", as_csv), ("--markdown", as_markdown), ("--json", as_json)) if asked]
    if len(formats) > 1:
        raise InvalidOption(formats[1], f"with {formats[0]}", [], hint=f"All are written to {out}; print one.")
    # Read before the run, which may write to the same place.
    before = Record.load(against) if against else None
    if submit is not None:
        _signed_off(agreed=sign_off)
    writable_folder(out)
    hush()
    asked = _Asked(workload, batch, engines, model, steps, repeats, cold, ablation, tiny, out, resume)
    run, file = _planned(asked, on)
    record = _with_progress(run, out)
    from rocm_sd.bench import tables

    save_text(tables.csv_text(record), file.with_suffix(".csv"))
    save_text(tables.markdown(record), file.with_suffix(".md"))
    _show(Console(), record, file, formats, verbose=verbose)
    if submit is not None:
        from rocm_sd.bench import submission

        written = submission.write(record, submit)
        say(Console(stderr=True), f"wrote {written}")
    if before is not None:
        _compare(before, record)
    _require_right(record)


def _named(workload: str | None) -> str:
    if workload is None:
        raise InvalidOption("workload", "", [], hint="Type: rocm-sd bench --list, or: rocm-sd bench emoji")
    return workload


@dataclass(frozen=True)
class _Asked:
    workload: str
    batch: str
    engines: str | None
    model: str | None
    steps: int | None
    repeats: int | None
    cold: bool
    ablation: bool
    tiny: bool
    out: Path
    resume: bool

    @property
    def command(self) -> str:
        """What to type to repeat it. Folders are a person's own: only the last part of a model's is kept."""
        model = self.model
        if model is not None and Path(model).exists():
            model = Path(model).resolve().name
        options = {
            "--batch": None if self.batch == "1" else self.batch,
            "--engines": self.engines,
            "--model": model,
            "--steps": self.steps,
            "--repeats": self.repeats,
        }
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        flags = {"--cold": self.cold, "--ablation": self.ablation, "--tiny": self.tiny}
        return " ".join(["rocm-sd", "bench", self.workload, *words, *(name for name, on in flags.items() if on)])


def _planned(asked: _Asked, device: torch.device) -> tuple[Callable[..., Record], Path]:
    """What runs, given `progress`, and where its record will lie.

    Everything that can be wrong with the options is said here, before anything is timed.
    """
    from rocm_sd.bench import gemm, ops
    from rocm_sd.bench.engines import chosen, default_names
    from rocm_sd.bench.records import record_file
    from rocm_sd.bench.runner import run as run_engines
    from rocm_sd.bench.workloads import make

    workload, out = asked.workload, asked.out
    common: dict[str, Any] = {
        "repeats": asked.repeats, "out": out, "resume": asked.resume, "command": asked.command,
    }  # fmt: skip
    if workload == gemm.NAME:
        _require_plain_op(asked)
        return partial(gemm.run, device, cold=asked.cold or None, **common), record_file(out, gemm.NAME)
    if ops.is_op(workload):
        _require_plain_op(asked)
        ops.selected(workload)
        return partial(ops.run, workload, device, cold=asked.cold or None, **common), record_file(out, workload)
    batches = batch_sizes(asked.batch)
    if asked.ablation and asked.engines is not None:
        raise InvalidOption("--engines", asked.engines, [], hint="An ablation has rows of its own: leave it out.")
    selected = chosen(parts(asked.engines) or default_names(device), device)
    with status(Console(stderr=True), f"Making {workload} ..."):
        made = make(workload, device, model=asked.model, steps=asked.steps, tiny=asked.tiny, time_loading=True)
    common["cold"] = asked.cold
    if asked.ablation:
        from rocm_sd.bench import ablation

        return partial(ablation.run, made, batches, **common), record_file(out, made.name, "ablation")
    return partial(run_engines, made, selected, batches, **common), record_file(out, made.name)


def _require_plain_op(asked: _Asked) -> None:
    given = {"--model": asked.model, "--steps": asked.steps, "--engines": asked.engines}
    given |= {"--ablation": asked.ablation or None}
    for name in (name for name, value in given.items() if value is not None):
        raise Unsupported(
            f"bench {asked.workload}", name, hint="An op is timed call by call against stock torch: leave it out."
        )


def _with_progress(run: Callable[..., Record], out: Path) -> Record:
    errors = Console(stderr=True)
    try:
        with bar("starting", console=errors, share=True, speed_estimate_period=600) as update:
            return run(progress=lambda done, total, what: update(completed=done, total=total, description=what))
    except KeyboardInterrupt:
        say(errors, f"Interrupted. What was measured is kept in {out}; to go on, type the same command again.")
        raise typer.Exit(130) from None


def _show(console: Console, record: Record, file: Path, formats: Sequence[str], *, verbose: bool) -> None:
    """The record in a format that was asked for. Else one table, what must be known of it, and one sentence."""
    from rocm_sd.bench import gemm, summary, tables

    if formats:
        texts: dict[str, Callable[[], str]] = {
            "--csv": lambda: tables.csv_text(record),
            "--markdown": lambda: tables.markdown(record),
            "--json": lambda: json.dumps(record.to_dict(), indent=2),
        }
        typer.echo(texts[formats[0]](), nl=formats[0] == "--json")
        return
    if record.workload.name == gemm.NAME:
        console.print(_gemm_table(record))
    elif verbose:
        console.print(tables.rich_tables(record))
        _show_published(console, record)
    else:
        console.print(tables.heading(record), highlight=False, markup=False)
        console.print(summary.SummaryTable(record))
        for note in summary.notes(record):
            console.print(note, highlight=False, markup=False)
    console.print(summary.verdict(record), style="bold", highlight=False, markup=False)
    say(console, f"wrote {file}, and the same as .csv and .md with every figure")
    name_report(console, file.parent)


def _show_published(console: Console, record: Record) -> None:
    from rocm_sd.bench.kpis import kpis, table

    found = kpis(record)
    if found:
        header, rows = table(found)
        shown = Table(*header, title="Compared with published figures", title_justify="left")
        for row in rows:
            shown.add_row(*map(literal, row))
        console.print(shown)


def _gemm_table(record: Record) -> Group:
    from rocm_sd.bench import gemm, tables

    headings, rows = gemm.table(record)
    shown = Table(title=tables.heading(record), title_justify="left")
    for number, name in enumerate(headings):
        shown.add_column(name.replace(" ", "\n"), justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*map(literal, row))
    means = "TFLOP/s, with the share of the card's peak where that is known; * is the fastest."
    return Group(shown, *map(literal, (means, *tables.notes(replace(record, comparisons=())))))


def _show_list(console: Console, device: torch.device) -> None:
    from rocm_sd.bench.engines import default_names, engines
    from rocm_sd.bench.workloads import OP_PREFIX, WORKLOADS
    from rocm_sd.ops import OPS

    table = Table("workload", "what", title="Workloads", title_justify="left")
    for recipe in WORKLOADS.values():
        table.add_row(recipe.name, recipe.summary)
    table.add_row(f"{OP_PREFIX}NAME", f"one op: {', '.join(OPS)}")
    table.add_row("ops", "all of them")
    table.add_row("gemm", "the matrix products of SD 1.5 and SDXL by shape, candidates side by side")
    table.add_row(SERVE, "a server under load")
    console.print(table)
    table = Table("engine", "computed by", "here", title="Engines", title_justify="left")
    for engine in engines().values():
        reason = engine.why_not(device)
        here = "yes, by default" if engine.name in default_names(device) else "when asked for"
        here += f"; approximates, scored against {engine.lossy.quality}" if engine.lossy else ""
        table.add_row(literal(engine.name), literal(engine.provider), literal(reason) if reason else here)
    console.print(table)


def _signed_off(*, agreed: bool) -> None:
    """Asked before the run: nobody waits at the end of one."""
    from rocm_sd.bench.submission import STATEMENT

    typer.echo(STATEMENT, err=True)
    if not agreed and not typer.confirm("Do you agree?", err=True):
        raise RocmSdError("Nothing was measured: a contribution needs your agreement.", hint="Leave out --submit.")


def _compare(before: Record, now: Record) -> None:
    from rocm_sd.bench.regressions import regressions

    found = regressions(before, now)
    errors = Console(stderr=True)
    if not found:
        errors.print("No regression beyond the interval.", highlight=False)
        return
    table = Table("engine", "batch", "what", "before", "now", "ratio", "interval", title="Regressions")
    for each in found:
        table.add_row(
            literal(each.engine), str(each.batch), each.what, f"{each.before:.4g}", f"{each.now:.4g}",
            f"{each.ratio:.3f}", f"{each.low:.3f} to {each.high:.3f}",
        )  # fmt: skip
    errors.print(table)
    worst = max(found, key=lambda each: each.ratio)
    raise RocmSdError(
        f"{len(found)} regression(s) beyond the interval; the worst is {worst}.",
        hint="To see where the time goes, type: rocm-sd profile",
    )


def _require_right(record: Record) -> None:
    """A wrong result was not timed; that it was wrong must not go unseen in a script."""
    from rocm_sd.bench.gate import WRONG
    from rocm_sd.errors import NumericsFailure

    wrong = [
        f"{one.engine}: {one.left_out}"
        for one in record.measurements
        if one.left_out and one.left_out.startswith(WRONG)
    ]
    if wrong:
        raise NumericsFailure(
            f"{len(wrong)} result(s) were wrong, and were not timed: {'; '.join(wrong)}.",
            hint="Please report it with the record, which names the machine and the versions.",
        )
