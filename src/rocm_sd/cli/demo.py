"""rocm-sd demo: eight prompts, stock and each quality side by side, pictures and a timing table."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import OUT, Device, bar, say, status

if TYPE_CHECKING:
    from rocm_sd.integrations.diffusers.generation import Generated

__all__ = ["demo"]


_ENGINES = ("stock", "exact", "high", "balanced")


def demo(
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same pictures.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = OUT,
    device: Device = None,
) -> None:
    """Draw eight prompts with the built-in model: stock, and rocm-sd in each quality, side by side.

    rocm-sd demo

    rocm-sd demo --steps 50 --seed 7 --out pictures
    """
    from rocm_sd import models
    from rocm_sd.bench.machine import machine
    from rocm_sd.cli.pictures import save_png, save_text, sheet, writable_folder
    from rocm_sd.engine import optimize, report
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import default_device, hush
    from rocm_sd.models.emoji import DEMO_PROMPTS

    source = models.resolve()
    writable_folder(out)
    hush()
    console = Console()
    # One pipeline for each: to optimise one again and again would make its graphs anew for every picture.
    pipes = {}
    for engine in _ENGINES:
        with status(console, f"Loading {source.name} ({engine}) ..."):
            pipes[engine] = host.load_pipeline(source, default_device(device))
            if engine != "stock":
                optimize(pipes[engine], quality=engine)
    results: dict[str, list[Generated]] = {engine: [] for engine in _ENGINES}
    # One picture of each engine is drawn and thrown away: first runs pay for what later ones do not.
    pictures = (len(DEMO_PROMPTS) + 1) * len(results)
    with bar("drawing", pictures) as update:
        for prompt in (DEMO_PROMPTS[0], *DEMO_PROMPTS):
            for engine, drawn in results.items():
                request = host.Request(prompt, steps=steps, seed=seed, guidance=source.guidance)
                drawn.append(host.generate(pipes[engine], request))
                update(advance=1, description=f"{engine}: {prompt}")
    drawn_by = {engine: drawn[1:] for engine, drawn in results.items()}

    parameters = {"model": source.name, "steps": steps, "seed": seed}
    cells = [(drawn.images[0], prompt) for drawn, prompt in zip(drawn_by["exact"], DEMO_PROMPTS, strict=True)]
    save_png(sheet([cells[:4], cells[4:]], cell=256), out / "demo.png", parameters)
    times = {engine: [drawn.seconds for drawn in several] for engine, several in drawn_by.items()}
    near = {engine: _nearness(drawn_by["stock"], several) for engine, several in drawn_by.items()}
    verdicts = {engine: _verdict(engine, drawn_by["stock"], drawn_by[engine]) for engine in ("high", "balanced")}
    rows = [
        [(drawn_by[e][n].images[0], f"{e}, {times[e][n]:.2f} s{_in_decibels(e, near[e][n])}") for e in _ENGINES]
        for n in range(len(DEMO_PROMPTS))
    ]
    save_png(sheet(rows), out / "compare.png", parameters)
    save_text(_markdown(times, near, verdicts, source.name, steps), out / "timing.md")
    facts = parameters | {"seconds": times, "psnr_db": {e: [_finite(p) for p in near[e]] for e in _ENGINES}}
    facts |= {"pictures": verdicts}
    save_text(json.dumps(facts, indent=2) + "\n", out / "timing.json")

    console.print(report(pipes["exact"]))
    console.print(_table(times, near, verdicts))
    for engine in ("high", "balanced"):
        why_exact = _why_exact(pipes[engine])
        if why_exact is not None:
            console.print(f"{engine}: {why_exact}", highlight=False, markup=False)
    say(console, f"wrote {out}: demo.png, compare.png, timing.md and timing.json")
    where = machine(pipes["exact"].device).device
    console.print(sentence(times, near, where), style="bold", highlight=False, markup=False)


def _why_exact(pipe: Any) -> str | None:
    """Why a quality left nothing out; None where it did."""
    from rocm_sd.engine import report

    said = report(pipe)
    if any(one.why_exact is None for one in said.facts.approximated):
        return None
    return next(
        (one.why_exact for one in said.facts.approximated if one.why_exact), next(iter(said.approximations), None)
    )


def sentence(times: dict[str, list[float]], near: dict[str, list[float]], where: str) -> str:
    """What was drawn where, how much faster each quality is, and whether exact draws the same pictures."""
    by_speed: dict[str, list[str]] = {}
    for engine in (engine for engine in times if engine != "stock"):
        by_speed.setdefault(_speed(times, engine), []).append(engine)
    speeds = ", ".join(f"{' and '.join(engines)}: {speed}" for speed, engines in by_speed.items())
    return f"{len(times['stock'])} prompts drawn on {where}; against stock, {speeds}; {_sameness(min(near['exact']))}."


def _speed(times: dict[str, list[float]], engine: str) -> str:
    low, high = _spread(times, engine)
    ratio = statistics.median(times["stock"]) / statistics.median(times[engine])
    return "no difference beyond the spread" if low < 1 < high else f"{ratio:.2f} times as fast"


def _sameness(worst: float) -> str:
    """`worst`: the PSNR of the picture of exact that is the furthest from stock's."""
    from rocm_sd.quality.budget import BUDGETS

    if math.isinf(worst):
        return "exact draws the same pictures as stock"
    if worst >= BUDGETS["high"].psnr:
        return f"exact draws stock's pictures, to {worst:.0f} dB or better"
    return f"exact is {worst:.0f} dB from stock, more than rounding should be: type rocm-sd bench emoji"


def _spread(times: dict[str, list[float]], engine: str) -> tuple[float, float]:
    """The quartiles of the ratios, pair by pair."""
    low, _, high = statistics.quantiles([s / o for s, o in zip(times["stock"], times[engine], strict=True)], n=4)
    return low, high


def _nearness(stock: list[Generated], ours: list[Generated]) -> list[float]:
    """PSNR of each pair of pictures, in dB; infinite where they are equal."""
    import numpy as np

    found = []
    for first, second in zip(stock, ours, strict=True):
        one, other = (np.asarray(drawn.images[0].convert("RGB"), dtype=np.float64) for drawn in (first, second))
        error = float(((one - other) ** 2).mean())
        found.append(math.inf if error == 0 else 10 * math.log10(255**2 / error))
    return found


def _verdict(engine: str, stock: list[Generated], ours: list[Generated]) -> str:
    """Within which budget the pictures of an approximation are; the demo's prompts have no prompt match."""
    from rocm_sd.bench import subjects, verdict
    from rocm_sd.errors import MissingDependency

    pictures, exact = ([drawn.images[0] for drawn in several] for several in (ours, stock))
    try:
        found = verdict.measured(engine, "", subjects.scores(pictures, exact, None))
    except MissingDependency as error:
        return f"not scored: {error.message} {error.hint or ''}".strip()
    return f"{found.verdict}: SSIM {found.mean_ssim:.3f}, {found.prompts} prompts"


def _finite(number: float) -> float | None:
    return round(number, 2) if math.isfinite(number) else None


def _in_decibels(engine: str, psnr: float) -> str:
    if engine == "stock":
        return ""
    return f", {psnr:.1f} dB" if math.isfinite(psnr) else ", equal"


def _rows(
    times: dict[str, list[float]], near: dict[str, list[float]], verdicts: dict[str, str]
) -> list[tuple[str, ...]]:
    """Median, quartiles and the ratio of the medians; a ratio inside the spread is said to be none."""
    stock = statistics.median(times["stock"])
    rows: list[tuple[str, ...]] = []
    for engine, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4)
        fewest, most = _spread(times, engine)
        undecided = engine != "stock" and fewest < 1 < most
        ratio = f"{stock / median:.2f}x ({fewest:.2f} to {most:.2f})"
        ratio += ", no difference beyond the spread" if undecided else ""
        psnr = statistics.median(near[engine])
        difference = "equal" if math.isinf(psnr) else f"{psnr:.1f} dB"
        rows.append(
            (
                engine,
                f"{median:.3f}",
                f"{low:.3f} to {high:.3f}",
                ratio if engine != "stock" else "1.00x",
                "" if engine == "stock" else difference,
                verdicts.get(engine, ""),
            )
        )
    return rows


_HEADINGS = ("engine", "median s", "quartiles s", "against stock (quartiles of pairs)", "PSNR to stock", "pictures")


def _table(times: dict[str, list[float]], near: dict[str, list[float]], verdicts: dict[str, str]) -> Table:
    """What has room in 80 columns; timing.md has the quartiles as well."""
    table = Table("engine", title="Seconds a picture, interleaved runs; in brackets quartiles", title_justify="left")
    for head in ("median s", "times stock", "PSNR"):
        table.add_column(head, justify="right")
    table.add_column("pictures")
    for engine, median, _, _, difference, pictures in _rows(times, near, verdicts):
        low, high = _spread(times, engine)
        ratio = statistics.median(times["stock"]) / statistics.median(times[engine])
        against = "" if engine == "stock" else f"{ratio:.2f} ({low:.2f}-{high:.2f})"
        table.add_row(engine, median, against, difference, pictures.partition(",")[0])
    return table


def _markdown(
    times: dict[str, list[float]], near: dict[str, list[float]], verdicts: dict[str, str], model: str, steps: int
) -> str:
    lines = [f"Seconds a picture, {model}, {steps} steps, interleaved runs", "", "| " + " | ".join(_HEADINGS) + " |"]
    lines.append("|" + "---|" * len(_HEADINGS))
    lines += ["| " + " | ".join(row) + " |" for row in _rows(times, near, verdicts)]
    return "\n".join(lines) + "\n"
