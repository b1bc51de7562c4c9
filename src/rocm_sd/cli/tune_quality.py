"""rocm-sd tune --quality: the fastest approximation of a model within a budget, on its own pictures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import bar, literal, say, status
from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from rocm_sd.bench.quality_search import Found, Searcher
    from rocm_sd.quality.budget import Budget

__all__ = ["tune_quality"]

# So many of the built-in model's own.
_PROMPTS = 24


def tune_quality(
    model: str | None, within: str, prompts: Path | None, steps: int, out: Path, device: torch.device, *, as_json: bool
) -> None:
    from rocm_sd import models
    from rocm_sd.bench import subjects
    from rocm_sd.bench.quality_search import Searcher, approximated_model
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import hush
    from rocm_sd.quality.budget import BUDGETS, parse_budget

    budgets = [(name, BUDGETS[name]) for name in BUDGETS] if within == "all" else [parse_budget(within)]
    source = models.resolve(model)
    subject = subjects.of_model(source.name, _PROMPTS) if prompts is None else subjects.from_file(prompts)
    texts = list(subject.texts)
    requests = [
        host.Request(text, steps=steps, seed=number, guidance=source.guidance) for number, text in enumerate(texts)
    ]
    writable_folder(out)
    hush()
    console = Console(stderr=as_json)
    with status(console, f"Loading {source.name} ..."):
        pipe = host.load_pipeline(source, device)
    approximated = approximated_model(pipe)
    if approximated is None:
        kinds = "a UNet of SD or SDXL, or the transformer of SD3 or Flux"
        raise Unsupported("tune --quality", f"a {type(pipe).__name__}: it takes a pipeline with {kinds}")
    found: dict[str, Found] = {}
    with bar("drawing", None, console=console) as update:
        searcher = Searcher(pipe, requests, subject.match, lambda what: update(advance=1, description=what))
        for name, budget in budgets:
            # Kept one by one: Ctrl-C leaves what was found before.
            found[name] = searcher.search(budget)
            _keep(approximated, name, budget, steps, len(texts), found[name])
            _pictures(searcher, found[name], texts, out / f"quality-{name}.png")
    if as_json:
        print(json.dumps({name: _facts(one) for name, one in found.items()}, indent=2))  # noqa: T201 -- for programs
        return
    console.print(_table(found, dict(budgets), steps, len(texts)))
    for name, one in found.items():
        if one.approximation is None:
            say(console, f"{name}: nothing of {one.tried} settings is within it and faster, so that it is exact.")
        else:
            say(
                console,
                f'{name}: {one.approximation}. Used from {steps} steps on: rocm_sd.optimize(pipe, quality="{name}")',
            )
            say(console, f"wrote {out / f'quality-{name}.png'}")


def _keep(model: Any, name: str, budget: Budget, steps: int, prompts: int, found: Found) -> None:
    from rocm_sd.engine.approximation import Approximation, remember

    if found.approximation is None:
        why = f"{steps} steps, {prompts} prompts: nothing of {found.tried} settings is within {budget}"
        remember(model, name, steps, Approximation(), why, {"budget": budget.to_dict()})
        return
    speedup = "{:.2f} times exact ({:.2f} to {:.2f})".format(*found.speedup or ())
    why = f"{steps} steps, {prompts} prompts: {speedup}, {found.scores}"
    remember(model, name, steps, found.approximation, why, {"budget": budget.to_dict(), **_facts(found)})


def _facts(found: Found) -> dict[str, Any]:
    scores = found.scores
    if scores is None or found.approximation is None:
        return {"approximation": None, "tried": found.tried}
    match = None if scores.match is None else [scores.match.value, scores.match.low, scores.match.high]
    return {
        "approximation": found.approximation.to_dict(),
        "tried": found.tried,
        "speedup": list(found.speedup or ()),
        # Equal pictures have no finite one.
        "psnr_db": [min(value, 999.0) for value in scores.psnr],
        "ssim": list(scores.ssim),
        "match": match,
    }


def _pictures(searcher: Searcher, found: Found, texts: list[str], path: Path) -> None:
    from rocm_sd.cli.pictures import save_png, sheet

    if found.approximation is None or found.scores is None:
        return
    ours = searcher.pictures[found.approximation]
    rows = [
        [(searcher.exact[n], f"exact: {texts[n]}"), (ours[n], f"{found.scores.psnr[n]:.1f} dB")]
        for n in range(min(8, len(texts)))
    ]
    save_png(sheet(rows), path, {"setting": str(found.approximation)})


def _table(found: dict[str, Found], budgets: dict[str, Budget], steps: int, prompts: int) -> Table:
    title = f"Within a budget of quality, {steps} steps, {prompts} prompts"
    table = Table("budget", "at least", "times exact", "pictures", title=title, title_justify="left")
    for name, one in found.items():
        speed = "exact" if one.speedup is None else "{:.2f} ({:.2f} to {:.2f})".format(*one.speedup)
        table.add_row(literal(name), str(budgets[name]), speed, "" if one.scores is None else str(one.scores))
    return table
