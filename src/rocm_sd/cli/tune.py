"""rocm-sd tune: which implementation and config each op runs with, timed on this card; or ranked with no GPU."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rocm_sd.cli import tune_tables
from rocm_sd.cli.terminal import Device, bar, batch_sizes, budget_seconds, parts, say
from rocm_sd.errors import InvalidOption, RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from rocm_sd.bench.tracing import Trace
    from rocm_sd.cli.tune_quality import AskedOfQuality
    from rocm_sd.engine.calibration import Outline
    from rocm_sd.tuning.database import Database, Entry
    from rocm_sd.tuning.search.tuner import TunerOptions

__all__ = ["tune"]

_WITHOUT_STATIC = "A search runs on this card, and compiles on all cores but two: leave it out."
INTERRUPTED = 130  # what a shell returns for a program that Ctrl-C ended
_FOR_A_MODEL_S, _FOR_PLANS = 6.0, 0.25  # of the budget, the lesser: for whole models, after their ops


def tune(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="emoji, a workload of `rocm-sd bench`, a folder, a checkpoint, a hub id; with --static: ops by name.",
            show_default="the models that you have drawn with; with --static all ops",
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Widths and heights, e.g. 512x512,1024x1024. (default: the model's)")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,4.")] = "1",
    budget: Annotated[str, typer.Option(help="Time for all of it: 90s, 2m, 1h.")] = "2m",
    ops: Annotated[str | None, typer.Option(help="Only these ops, e.g. attention,conv2d. (default: all)")] = None,
    strategy: Annotated[str, typer.Option(help="The search strategy: halving, or one of a plug-in.")] = "halving",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one candidate; one that takes longer is taken to hang.")
    ] = 60.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write all measurements to this file, and exit.")] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", help="Take in the measurements of a file of --export, and exit.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List what was measured on this card, and exit.")] = False,
    tunable_op: Annotated[
        bool,
        typer.Option("--tunable-op", help="On ROCm: have torch's TunableOp tune the products, then tune as usual."),
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Without a GPU: compile every config, and rank them by modelled times.")
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option(help="With --static: architectures, e.g. gfx1100,gfx942. (default: all that can be compiled for)"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder for GFX/OP.json (--static) or pictures (--quality). (default: the installed data; out)"
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="With --static: how many compilers run at once. (default: as many as fit)")
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Find the fastest approximation within a budget (docs/quality.md).")
    ] = False,
    within: Annotated[
        str, typer.Option(help="With --quality: high, balanced, all, or psnr=32,ssim=0.97,match=0.5.")
    ] = "all",
    prompts: Annotated[Path | None, typer.Option(help="With --quality: a text file with one prompt a line.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="With --quality: denoising steps of its pictures.")] = 20,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, help="With --quality: for this many GPUs, whose rows may be a step old (docs/multi-gpu.md)."
        ),
    ] = 1,
    parallel: Annotated[
        str, typer.Option(help="With --quality --gpus, how work is split: patch, or cfg=2,patch=2.")
    ] = "patch",
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure, machine-readable.")] = False,
) -> None:
    """Time every candidate for each op of a picture on this card, and keep the fastest that is right.

    rocm-sd tune

    rocm-sd tune sd15-512 --sizes 512x512,768x768 --batch 1,4 --budget 2m

    rocm-sd tune ./my-model --ops attention,conv2d

    rocm-sd tune --quality ./my-model --steps 30 --prompts prompts.txt

    rocm-sd tune --quality ./my-model --gpus 2 --parallel patch

    rocm-sd tune --tunable-op --budget 20m

    rocm-sd tune --list

    rocm-sd tune --export tuned.json

    rocm-sd tune --static group_norm_silu --arch gfx1100,gfx942

    rocm-sd tune --static group_norm_silu:hip --arch gfx1030

    Ctrl-C keeps what was measured, and the same command continues there. Nothing is chosen that is wrong, or that is
    not faster than stock torch beyond doubt. With --static no GPU is needed, times are modelled, and the exit code is 1
    when a size is left without a usable config (docs/tuning-for-developers.md).
    """
    begun = time.monotonic()
    if static:
        _tune_static(names or [], arch, out, jobs, as_json=as_json)
        return
    if quality:
        from rocm_sd.cli.tune_quality import AskedOfQuality

        folder = Path("out") if out is None else out
        of_quality = AskedOfQuality(_one_model(names), within, prompts, steps, folder, as_json)
        _tune_quality(of_quality, gpus, parallel, device)
        return
    if gpus > 1:
        raise InvalidOption("--gpus", "without --quality", [], hint="A search of kernels runs on one card.")
    given = [option for option, value in (("--arch", arch), ("--out", out), ("--jobs", jobs)) if value is not None]
    if given:
        raise InvalidOption(given[0], "without --static", [], hint=_WITHOUT_STATIC)
    if names and len(names) > 1:
        raise InvalidOption("model", " ".join(names), [], hint="Give one model; ops are named by --ops.")
    from rocm_sd.tuning.resolve import user_database

    database = user_database()
    if import_ is not None or export is not None:
        _moved(database, import_, export)
    elif listed:
        _list(database, device, as_json=as_json)
    else:
        from rocm_sd.integrations.diffusers.loading import default_device
        from rocm_sd.tuning.search import halving
        from rocm_sd.tuning.search.tuner import TunerOptions

        asked = (names[0] if names else None, _sizes(sizes), batch_sizes(batch), parts(ops))
        seconds, on, chosen = budget_seconds(budget), default_device(device), halving.strategy(strategy)
        if tunable_op:
            _tune_products(on, seconds / 2, begun, *asked)
        options = TunerOptions(seconds, timeout, chosen, fresh)
        _search(database, on, options, begun, *asked, as_json=as_json)


def _tune_products(
    device: torch.device,
    seconds: float,
    begun: float,
    model: str | None,
    sizes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    ops: Sequence[str],
) -> None:
    """Of what is traced, the products by TunableOp, within half of the time; the search after it times its results."""
    from rocm_sd.integrations.diffusers.loading import hush
    from rocm_sd.ops.linear_residual import tunable

    # Said before a model is loaded.
    tunable.require_here(device)
    if ops and "linear_residual" not in ops:
        raise InvalidOption("--tunable-op", f"with --ops {','.join(ops)}", [], hint="Products are linear_residual's.")
    hush()
    with bar("loading the model", share=True) as update:
        found = _traced(device, model, sizes, batches, lambda what: update(description=what)).of(["linear_residual"])
    problems = [dict(each.call.problem) for each in found.problems]
    products = list(dict.fromkeys((int(p["m"]), int(p["n"]), int(p["k"]), str(p["dtype"])) for p in problems))
    with bar("TunableOp", len(products)) as update:
        results = tunable.tune(
            products, device, go_on=lambda: time.monotonic() - begun < seconds,
            progress=lambda number, what: update(completed=number, description=f"TunableOp: {what}"),
        )  # fmt: skip
    say(Console(stderr=True), f"TunableOp has results for {len(results.products)} products")


def _one_model(names: list[str] | None) -> str | None:
    if names and len(names) > 1:
        raise InvalidOption("model", " ".join(names), [], hint="Give one model.")
    return None if not names or names[0] == "emoji" else names[0]


def _tune_quality(asked: AskedOfQuality, gpus: int, parallel: str, device: str | None) -> None:
    import torch

    from rocm_sd.cli.tune_quality import tune_quality, tune_quality_on_gpus
    from rocm_sd.integrations.diffusers.loading import default_device

    where = default_device(device)
    if gpus > 1:
        # Where there are no GPUs, several ranks on the CPU are for who asks for it.
        tune_quality_on_gpus(asked, gpus, parallel, where if device else torch.device("cuda"))
    else:
        tune_quality(asked, where)


def _search(
    database: Database,
    device: torch.device,
    options: TunerOptions,
    begun: float,
    model: str | None,
    sizes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    ops: Sequence[str],
    *,
    as_json: bool,
) -> None:
    from rocm_sd.integrations.diffusers.loading import hush
    from rocm_sd.tuning.search import candidates, workbench
    from rocm_sd.tuning.search.tuner import Tuner, TunerProgress
    from rocm_sd.workers import Worker, WorkerFailed

    hush()
    with Worker(imports=(workbench.__name__,)) as measuring:
        # It imports while the model is loaded. Whoever asks it for something meets what keeps it from starting.
        with suppress(WorkerFailed):
            measuring.start()
        with bar("loading the model", share=True) as update:
            for name in ops:
                candidates.operation(name)
            found = _traced(device, model, sizes, batches, lambda what: update(description=what)).of(ops)
        for_plans = min(_FOR_A_MODEL_S * len(found.models), _FOR_PLANS * options.budget_s)
        with bar("tuning", 1.0, share=True) as update:

            def show(step: TunerProgress) -> None:
                described = f"{step.what} ({step.best})" if step.best else step.what
                update(completed=step.share, description=described)

            tuner = Tuner(device, database, replace(options, budget_s=options.budget_s - for_plans), show)
            searching = time.monotonic()
            plans: list[str] = []
            with _timing(device, found.models) as time_plans:
                outcomes = tuner.run(found.problems, begun, measuring)
                interrupted = tuner.interrupted
                try:
                    if not interrupted:
                        # The card is theirs alone.
                        measuring.stop()
                        plans = time_plans(lambda what: update(description=what))
                except KeyboardInterrupt:
                    interrupted = True
            took = time.monotonic() - searching
    if as_json:
        typer.echo(json.dumps([outcome.to_dict() for outcome in outcomes], indent=2))
    else:
        tune_tables.show_outcomes(Console(), outcomes, took, on_cpu=device.type == "cpu")
        for plan in plans:
            say(Console(), plan)
    if interrupted:
        Console(stderr=True).print("Stopped. What was measured is kept; the same command continues.", soft_wrap=True)
        raise typer.Exit(INTERRUPTED)


def _traced(
    device: torch.device,
    model: str | None,
    sizes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    on_progress: Callable[[str], object],
) -> Trace:
    """Of the model that is named; else of all that were drawn with here, else of the built-in one."""
    from rocm_sd.bench import tracing
    from rocm_sd.integrations.diffusers.rebuilding import drawn_models

    if model is None and not sizes and list(batches) == [1]:
        found = tracing.trace_models(drawn_models(device), on_progress)
        if found.models:
            return found
    return tracing.trace(tracing.workload(model, device), sizes, batches, on_progress)


@contextmanager
def _timing(
    device: torch.device, models: Sequence[Outline]
) -> Iterator[Callable[[Callable[[str], object]], list[str]]]:
    """What times whole models, with the ops as they were found, and says what is the fastest for each, in a sentence.

    Its worker starts now.
    """
    from rocm_sd.engine import calibration, graphs_wanted, prepare_plan

    graphs = graphs_wanted(device, allowed=True)
    with ExitStack() as stack:
        why_not, time_them = None, None
        try:
            if models:
                timing = calibration.timing_plans(models, device, prepare_plan, graphs=graphs)
                time_them = stack.enter_context(timing)
        except calibration.NotMeasured as reason:
            why_not = reason

        def plans(say_what: Callable[[str], object]) -> list[str]:
            if time_them is None:
                return [] if why_not is None else [f"Whole models were not timed: {why_not}."]
            try:
                left_out = time_them(say_what)
            except calibration.NotMeasured as reason:
                return [f"Whole models were not timed: {reason}."]
            found = []
            for each in models:
                plan = calibration.measured(each.key, device, graphs=graphs, call=each.call)
                said = plan or f"not timed as a whole: {left_out.get(each.key, 'no plan could be compared with stock')}"
                found.append(f"{each.key.split()[0]} ({each.call}): {said}")
            return found

        yield plans


def _moved(database: Database, import_: Path | None, export: Path | None) -> None:
    console = Console()
    for file, option, move, verb, done in (
        (import_, "--import", database.import_json, "read", "taken from"),
        (export, "--export", database.export_json, "written", "written to"),
    ):
        if file is None:
            continue
        try:
            count = move(file)
        except OSError as error:
            hint = f"It cannot be {verb}: {error.strerror or error}."
            raise InvalidOption(option, str(file), [], hint=hint) from error
        say(console, f"{count} measurements {done} {file}")


def _list(database: Database, device: str | None, *, as_json: bool) -> None:
    from rocm_sd.engine import calibration
    from rocm_sd.integrations.diffusers.loading import default_device
    from rocm_sd.tuning import environment, lookup
    from rocm_sd.tuning.resolve import preferred
    from rocm_sd.tuning.search.candidates import hash_of, operations

    known_ops = operations()

    def holds(entry: Entry) -> bool:
        """Whether its candidate, the op's own or a plug-in's, is there as it was measured, and not set aside."""
        if entry.op == calibration.OP:
            return entry.kernel_hash == calibration.kernels_hash()
        op = known_ops.get(entry.op)
        if op is None or (entry.op, entry.candidate, entry.kernel_hash) in aside:
            return False
        return op.has(entry.candidate) and hash_of(op, entry.candidate) == entry.kernel_hash

    here = environment.current(default_device(device))
    aside = {(one.op, one.candidate, one.kernel_hash) for one in database.quarantined(here)}
    by_problem: dict[tuple[str, str], list[Entry]] = {}
    for entry in database.all(environment=here):
        by_problem.setdefault((entry.op, tune_tables.described(entry.problem)), []).append(entry)
    rows: list[dict[str, Any]] = []
    for (op, _), entries in by_problem.items():
        usable = [e for e in entries if e.clearly_faster and holds(e)]
        best = min(usable, key=lambda e: e.median_us) if usable else None
        if best is not None:
            shipped = lookup(op, here.arch, best.problem)
            configs: tuple[dict[str, int], ...] = (shipped.config.to_dict(), {})
            known = (e for e in usable if e.candidate == shipped.implementation and e.config in configs)
            best = preferred(best, next(known, None))
        stock_us = next((e.stock_us for e in (best, *entries) if e and e.stock_us), None)
        rows.append(
            {
                "op": op, "problem": dict(entries[0].problem),
                "chosen": best.candidate if best else "torch", "config": dict(best.config) if best else {},
                "us": best.median_us if best else stock_us, "stock_us": stock_us,
                "candidates": len(entries),
                "left_out": {e.candidate: e.numerics for e in entries if e.numerics != "ok"},
                "when": max(e.when for e in entries),
            }
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    if rows:
        tune_tables.show_known(console, rows)
    else:
        console.print("Nothing was measured on this card with these versions. Type: rocm-sd tune")
    tune_tables.show_tunable_op(console, here.arch)


def _sizes(text: str | None) -> list[tuple[int, int]]:
    """(height, width) of each, from widths and heights."""
    sizes = []
    for part in parts(text):
        found = re.fullmatch(r"(\d+)x(\d+)", part)
        if not found:
            raise InvalidOption("--sizes", part, [], hint="Give widths and heights: 512x512,1024x768.")
        sizes.append((int(found[2]), int(found[1])))
    return sizes


def _tune_static(ops: list[str], arch: str | None, out: Path | None, jobs: int | None, *, as_json: bool) -> None:
    from rocm_sd.tuning.static import sweep

    planned = sweep.plan(ops, parts(arch))
    if planned.skipped:
        Console(stderr=True).print(escape(planned.skipped), soft_wrap=True)
    with bar("tuning", planned.tasks) as update:
        folder = out or sweep.DATA
        found = sweep.tune(planned, folder, jobs=jobs, progress=lambda what: update(advance=1, description=what))
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        tune_tables.show_static(Console(), found, folder)
    failed = [each.error for each in found if each.error]
    if failed:
        raise RocmSdError(
            f"{len(failed)} of {len(found)} sizes have no usable config: {'; '.join(failed)}.",
            hint="Give the op's space a smaller tile, fewer stages or more warps: see docs/tuning-for-developers.md.",
        )
