"""rocm-sd tune --quality: the fastest approximation of a model within a budget, on its own pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import bar, literal, say, status
from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from rocm_sd.bench.quality_search import Found
    from rocm_sd.bench.subjects import Subjects
    from rocm_sd.integrations.diffusers import Request
    from rocm_sd.models import ModelSource
    from rocm_sd.quality.budget import Budget

__all__ = ["AskedOfQuality", "search_on_rank", "tune_quality", "tune_quality_on_gpus"]

# So many of the built-in model's own.
_PROMPTS = 24


@dataclass(frozen=True)
class AskedOfQuality:
    """The options, the same for every rank."""

    model: str | None
    within: str
    prompts: Path | None
    steps: int
    out: Path
    as_json: bool

    def budgets(self) -> list[tuple[str, Budget]]:
        from rocm_sd.quality.budget import BUDGETS, parse_budget

        return [(name, BUDGETS[name]) for name in BUDGETS] if self.within == "all" else [parse_budget(self.within)]

    def source(self) -> ModelSource:
        from rocm_sd import models

        return models.resolve(self.model)

    def subject(self) -> Subjects:
        from rocm_sd.bench import subjects

        if self.prompts is not None:
            return subjects.from_file(self.prompts)
        return subjects.of_model(self.source().name, _PROMPTS)

    def requests(self) -> list[Request]:
        from rocm_sd.integrations import diffusers as host

        guidance = self.source().guidance
        texts = enumerate(self.subject().texts)
        return [host.Request(text, steps=self.steps, seed=number, guidance=guidance) for number, text in texts]


def tune_quality(asked: AskedOfQuality, device: torch.device) -> None:
    from rocm_sd.bench.quality_search import Searcher
    from rocm_sd.cli.pictures import writable_folder

    _require_readable(asked)
    writable_folder(asked.out)
    console = Console(stderr=asked.as_json)
    _search(asked, console, device, Searcher)


def tune_quality_on_gpus(asked: AskedOfQuality, gpus: int, plan: str, device: torch.device) -> None:
    """Of rows that are a step old, which several GPUs alone have: a process for each."""
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.parallel import parse
    from rocm_sd.parallel.launching import launch, require_ranks

    # Everything that can be wrong with the options is said before a process is started.
    require_ranks(gpus, device)
    if "patch" not in parse(plan, gpus).dims:
        raise Unsupported("tune --quality --gpus", f"the plan {plan}", hint="Add --parallel patch.")
    _require_readable(asked)
    writable_folder(asked.out)
    launch(gpus, search_on_rank, asked, plan, device=device)


def search_on_rank(device: torch.device, asked: AskedOfQuality, plan: str) -> None:
    """Every rank takes part; rank 0 alone is heard, and keeps what was found."""
    from torch import distributed as dist

    from rocm_sd.bench.stale_search import StaleSearcher
    from rocm_sd.parallel import join

    # Ranks that cannot find one another say so before they load a model.
    join(device)
    leads = dist.get_rank() == 0
    console = Console(stderr=asked.as_json, quiet=not leads)

    def searcher(pipe: Any, requests: Any, match: Any, on_step: Any) -> StaleSearcher:
        return StaleSearcher(pipe, plan, requests, match, on_step)

    _search(asked, console, device, searcher, keeps=leads)


def _require_readable(asked: AskedOfQuality) -> None:
    asked.budgets()
    asked.requests()


def _search(
    asked: AskedOfQuality, console: Console, device: torch.device, searcher_of: Callable[..., Any], *,
    keeps: bool = True,
) -> None:  # fmt: skip
    """`keeps`: what is found is stored, drawn and told here."""
    from rocm_sd.bench.quality_search import approximated_model
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import hush

    budgets, requests, match = asked.budgets(), asked.requests(), asked.subject().match
    texts = [request.prompt for request in requests]
    hush()
    with status(console, f"Loading {asked.source().name} ..."):
        pipe = host.load_pipeline(asked.source(), device)
    approximated = approximated_model(pipe)
    if approximated is None:
        kinds = "a UNet of SD or SDXL, or the transformer of SD3 or Flux"
        raise Unsupported("tune --quality", f"a {type(pipe).__name__}: it takes a pipeline with {kinds}")
    found: dict[str, Found] = {}
    with bar("drawing", None, console=console) as update:
        searcher = searcher_of(pipe, requests, match, lambda what: update(advance=1, description=what))
        for name, budget in budgets:
            # Kept one by one: Ctrl-C leaves what was found before.
            found[name] = searcher.search(budget)
            if keeps:
                _keep(approximated, name, budget, asked.steps, len(texts), found[name], searcher)
                _pictures(searcher, found[name], texts, asked.out / f"quality-{name}.png")
    if keeps and asked.as_json:
        facts = {name: _facts(one, searcher) for name, one in found.items()}
        print(json.dumps(facts, indent=2))  # noqa: T201 -- for programs
    elif keeps:
        _tell(asked, console, found, dict(budgets), len(texts), searcher)


def _tell(
    asked: AskedOfQuality, console: Console, found: dict[str, Found], budgets: dict[str, Budget], prompts: int,
    searcher: Any,
) -> None:  # fmt: skip
    console.print(_table(found, budgets, asked.steps, prompts))
    for line in (*searcher.methods, *searcher.notes):
        say(console, str(line))
    plan = getattr(searcher, "plan", None)
    call = "rocm_sd.optimize(pipe, " if plan is None else f'rocm_sd.parallelize(pipe, "{plan}", '
    for name, one in found.items():
        if one.approximation is None:
            say(console, f"{name}: nothing of {_count(one)} is within it and faster, so that it is exact.")
        else:
            say(console, f'{name}: {one.approximation}. Used from {asked.steps} steps on: {call}quality="{name}")')
            say(console, f"wrote {asked.out / f'quality-{name}.png'}")


def _count(found: Found) -> str:
    further = f" ({found.ruled_out} more have a part that is outside)" if found.ruled_out else ""
    return f"{found.tried} setting{'' if found.tried == 1 else 's'}{further}"


def _keep(model: Any, name: str, budget: Budget, steps: int, prompts: int, found: Found, searcher: Any) -> None:
    from rocm_sd.engine.approximation import Approximation, remember

    evidence = {"budget": budget.to_dict(), **_facts(found, searcher)}
    plan = getattr(searcher, "plan", None)
    if found.approximation is None:
        why = f"{steps} steps, {prompts} prompts: nothing of {_count(found)} is within {budget}"
        remember(model, name, steps, Approximation(), why, evidence, plan)
        return
    speedup = "{:.2f} times exact ({:.2f} to {:.2f})".format(*found.speedup or ())
    why = f"{steps} steps, {prompts} prompts: {speedup}, {found.scores}"
    remember(model, name, steps, found.approximation, why, evidence, plan)


def _facts(found: Found, searcher: Any) -> dict[str, Any]:
    count = {"tried": found.tried, "ruled_out": found.ruled_out}
    methods = {"methods": [method.to_dict() for method in searcher.methods], "notes": searcher.notes}
    scores = found.scores
    if scores is None or found.approximation is None:
        return {"approximation": None, **count, **methods}
    match = None if scores.match is None else [scores.match.value, scores.match.low, scores.match.high]
    return {
        "approximation": found.approximation.to_dict(),
        **count,
        "speedup": list(found.speedup or ()),
        # Equal pictures have no finite one.
        "psnr_db": [min(value, 999.0) for value in scores.psnr],
        "ssim": list(scores.ssim),
        "match": match,
        **methods,
    }


def _pictures(searcher: Any, found: Found, texts: list[str], path: Path) -> None:
    from rocm_sd.cli.pictures import save_png, sheet

    if found.approximation is None or found.scores is None:
        return
    ours = searcher.pictures[found.approximation]
    rows = [
        [(searcher.exact[n], f"exact: {texts[n]}"), (ours[n], f"{found.scores.psnr[n]:.1f} dB")]
        for n in range(len(ours))
    ]
    save_png(sheet(rows), path, {"setting": str(found.approximation)})


def _table(found: dict[str, Found], budgets: dict[str, Budget], steps: int, prompts: int) -> Table:
    title = f"Within a budget of quality, {steps} steps, {prompts} prompts"
    table = Table("budget", "at least", "times exact", "pictures", title=title, title_justify="left")
    for name, one in found.items():
        speed = "exact" if one.speedup is None else "{:.2f} ({:.2f} to {:.2f})".format(*one.speedup)
        table.add_row(literal(name), str(budgets[name]), speed, "" if one.scores is None else str(one.scores))
    return table
