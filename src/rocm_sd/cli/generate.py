"""rocm-sd generate: text to image."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rocm_sd.cli.terminal import Device, bar, say, status
from rocm_sd.errors import Unsupported, require_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image

    from rocm_sd.integrations.diffusers.generation import Generated, Request

__all__ = ["generate"]


def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="A Diffusers folder, a .safetensors checkpoint or a hub id. (default: emoji-sd, built in)"),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="With a .safetensors checkpoint: a Diffusers folder with its configs.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same picture.")] = 0,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, e.g. 512x512. (default: the model's own)")] = None,
    scheduler: Annotated[str | None, typer.Option(help="ddim, pndm, euler, euler-a, dpm++2m, unipc, ...")] = None,
    negative: Annotated[str, typer.Option(help="What not to draw.")] = "",
    guidance: Annotated[
        float | None, typer.Option(help="How closely to follow the prompt. (default: 3 for emoji-sd, else 7.5)")
    ] = None,
    batch: Annotated[int, typer.Option(help="Pictures from one prompt.")] = 1,
    level: Annotated[str, typer.Option(help="auto, performance or memory: never changes the picture.")] = "auto",
    quality: Annotated[
        str, typer.Option(help="exact, high, balanced or a budget: how far approximations may go.")
    ] = "exact",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("out"),
    device: Device = None,
    compare: Annotated[bool, typer.Option("--compare", help="Draw stock and optimised side by side.")] = False,
) -> None:
    """Draw a picture from text.

    rocm-sd generate "a frog on a pink background"

    rocm-sd generate "a red apple" --seed 7 --batch 4 --out pictures

    rocm-sd generate "a castle" --model ./sd15 --size 512x512 --steps 30 --scheduler dpm++2m --compare
    """
    from rocm_sd import models
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.engine import LEVELS, require_quality
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import default_device, hush

    # Everything that can be wrong with the options is said before a model is loaded.
    require_one_of("level", level, LEVELS)
    require_quality(quality)
    if scheduler is not None:
        require_one_of("scheduler", scheduler, host.SCHEDULERS)
    width, height = parse_size(size)
    request = host.Request(prompt, negative, steps, seed=seed, batch=batch, width=width, height=height)
    source = models.resolve(model)
    request = replace(request, guidance=source.guidance if guidance is None else guidance)
    writable_folder(out)
    hush()
    console = Console()
    with status(console, f"Loading {source.name} ..."):
        pipe = host.load_pipeline(source, default_device(device), config=config)
        if scheduler:
            host.set_scheduler(pipe, scheduler)
    _draw(console, pipe, request, source.name, level, quality, out, compare=compare)


def _draw(
    console: Console, pipe: Any, request: Request, model: str, level: str, quality: str, out: Path, *, compare: bool
) -> None:
    from rocm_sd.cli.pictures import save_png, sheet
    from rocm_sd.engine import optimize, report

    parameters = request.to_dict() | {"model": model, "scheduler": type(pipe.scheduler).__name__}
    stock = run_with_progress(console, pipe, request, "stock") if compare else None
    optimize(pipe, level=level, quality=quality)
    ours = run_with_progress(console, pipe, request, "rocm-sd")
    for image, path in zip(ours.images, _free_names(out, request), strict=False):
        save_png(image, path, parameters | {"level": level, "quality": quality})
        say(console, f"wrote {path}")
    console.print(f"{len(ours.images)} picture(s) in {ours.seconds:.2f} s")
    if quality != "exact":
        for note in report(pipe).approximations:
            say(console, f"quality {quality}: {note}")
    if stock:
        path = out / f"compare-{_slug(request.prompt)}-{request.seed}.png"
        save_png(sheet(side_by_side(stock, ours)), path, parameters)
        say(console, f"wrote {path} (first runs, not a benchmark)")


def side_by_side(stock: Generated, ours: Generated) -> list[list[tuple[Image.Image, str]]]:
    from rocm_sd.cli.pictures import difference

    rows = []
    for first, second in zip(stock.images, ours.images, strict=True):
        picture, largest = difference(first, second)
        captions = f"stock, {stock.seconds:.2f} s", f"rocm-sd, {ours.seconds:.2f} s"
        rows.append(
            [(first, captions[0]), (second, captions[1]), (picture, f"difference x20, largest {largest} of 255")]
        )
    return rows


def run_with_progress(console: Console, pipe: Any, request: Request, label: str) -> Generated:
    from rocm_sd.integrations import diffusers as host

    with bar(f"{label}: {request.prompt}", request.steps, console=console) as update:
        return host.generate(pipe, request, on_step=lambda step: update(completed=step))


def parse_size(size: str | None) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", size)
    if not match:
        raise Unsupported("--size", f"{size!r}: it takes WIDTHxHEIGHT", hint="Try --size 512x512.")
    return int(match[1]), int(match[2])


def _slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"


def _free_names(folder: Path, request: Request) -> Iterator[Path]:
    """prompt-seed.png, and prompt-seed-2.png where that exists: an earlier picture is never overwritten."""
    for number in range(request.batch):
        stem = f"{_slug(request.prompt)}-{request.seed + number}"
        path, attempt = folder / f"{stem}.png", 1
        while path.exists():
            attempt += 1
            path = folder / f"{stem}-{attempt}.png"
        yield path
