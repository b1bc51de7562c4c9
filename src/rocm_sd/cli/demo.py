"""rocm-sd demo: eight prompts, stock and optimised side by side, pictures and a timing table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import Device, bar, say, status

if TYPE_CHECKING:
    from rocm_sd.integrations.diffusers.generation import Generated

__all__ = ["demo"]


def demo(
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same pictures.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("out"),
    device: Device = None,
) -> None:
    """Draw eight prompts with the built-in model, stock and optimised side by side.

    rocm-sd demo

    rocm-sd demo --steps 10 --seed 7 --out pictures
    """
    from rocm_sd import models
    from rocm_sd.cli.generate import side_by_side
    from rocm_sd.cli.pictures import save_png, save_text, sheet, writable_folder
    from rocm_sd.engine import optimize, report, restore
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import default_device, hush
    from rocm_sd.models.emoji import DEMO_PROMPTS

    source = models.resolve()
    writable_folder(out)
    hush()
    console = Console()
    with status(console, f"Loading {source.name} ..."):
        pipe = host.load_pipeline(source, default_device(device))
    results: dict[str, list[Generated]] = {"stock": [], "rocm-sd": []}
    # One picture of each engine is drawn and thrown away: first runs pay for what later ones do not.
    pictures = (len(DEMO_PROMPTS) + 1) * len(results)
    with bar("drawing", pictures, console=console, transient=False) as update:
        for prompt in (DEMO_PROMPTS[0], *DEMO_PROMPTS):
            for engine, drawn in results.items():
                (optimize if engine == "rocm-sd" else restore)(pipe)
                drawn.append(
                    host.generate(pipe, host.Request(prompt, steps=steps, seed=seed, guidance=source.guidance))
                )
                update(advance=1, description=f"{engine}: {prompt}")
    stock, ours = (drawn[1:] for drawn in results.values())

    parameters = {"model": source.name, "steps": steps, "seed": seed}
    cells = [(drawn.images[0], prompt) for drawn, prompt in zip(ours, DEMO_PROMPTS, strict=True)]
    save_png(sheet([cells[:4], cells[4:]], cell=256), out / "demo.png", parameters)
    pairs = [row for first, second in zip(stock, ours, strict=True) for row in side_by_side(first, second)]
    save_png(sheet(pairs), out / "compare.png", parameters)
    times = {"stock": [g.seconds for g in stock], "rocm-sd": [g.seconds for g in ours]}
    save_text(_markdown(times, source.name, steps), out / "timing.md")
    save_text(json.dumps(parameters | {"seconds": times}, indent=2) + "\n", out / "timing.json")

    optimize(pipe)
    console.print(report(pipe))
    console.print(_table(times))
    for name in ("demo.png", "compare.png", "timing.md", "timing.json"):
        say(console, f"wrote {out / name}")


def _rows(times: dict[str, list[float]]) -> list[tuple[str, str, str, str]]:
    """Median, quartiles and the ratio of the medians; a ratio inside the spread is said to be none."""
    stock = statistics.median(times["stock"])
    rows = []
    for engine, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4)
        ratios = statistics.quantiles([s / o for s, o in zip(times["stock"], seconds, strict=True)], n=4)
        undecided = engine != "stock" and ratios[0] < 1 < ratios[2]
        ratio = f"{stock / median:.2f}x ({ratios[0]:.2f} to {ratios[2]:.2f})" + (
            ", no difference beyond the spread" if undecided else ""
        )
        rows.append((engine, f"{median:.3f}", f"{low:.3f} to {high:.3f}", ratio if engine != "stock" else "1.00x"))
    return rows


_HEADINGS = ("engine", "median s", "quartiles s", "against stock (quartiles of pairs)")


def _table(times: dict[str, list[float]]) -> Table:
    table = Table(*_HEADINGS, title="Seconds a picture, interleaved runs", title_justify="left")
    for row in _rows(times):
        table.add_row(*row)
    return table


def _markdown(times: dict[str, list[float]], model: str, steps: int) -> str:
    lines = [f"Seconds a picture, {model}, {steps} steps, interleaved runs", "", "| " + " | ".join(_HEADINGS) + " |"]
    lines.append("|" + "---|" * len(_HEADINGS))
    lines += ["| " + " | ".join(row) + " |" for row in _rows(times)]
    return "\n".join(lines) + "\n"
