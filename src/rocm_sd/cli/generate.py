"""rocm-sd generate: text to image."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from rocm_sd import settings
from rocm_sd.cli.terminal import Device, bar, say, status
from rocm_sd.errors import Unsupported, require_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from PIL import Image

    from rocm_sd.integrations.diffusers.generation import Generated, Request
    from rocm_sd.models import ModelSource

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
    batch: Annotated[int, typer.Option(help="How many pictures of the prompt.")] = 1,
    level: Annotated[
        str, typer.Option(help="Speed against memory: auto, performance or memory. The picture stays the same.")
    ] = "auto",
    quality: Annotated[
        str, typer.Option(help="How far approximations may go: exact, high, balanced, or a budget such as psnr=32.")
    ] = "exact",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("out"),
    device: Device = None,
    tiled: Annotated[
        bool,
        typer.Option("--tiled", help="Draw above the model's own size, in tiles of that size. This approximates."),
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also draw with stock Diffusers, and write both side by side.")
    ] = False,
    gpus: Annotated[int, typer.Option(help="How many GPUs of this machine draw together.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            help="With --gpus, how work is split: auto, data, cfg, tensor, pipeline, patch, or cfg=2,patch=2."
        ),
    ] = "auto",
) -> None:
    """Draw a picture from text.

    rocm-sd generate "a frog on a pink background"

    rocm-sd generate "a red apple" --seed 7 --batch 4 --out pictures

    rocm-sd generate "a castle" --model ./sd15 --size 512x512 --steps 30 --scheduler dpm++2m --compare

    rocm-sd generate "a castle" --model ./sdxl --size 2048x2048 --tiled

    rocm-sd generate "a castle" --model ./sdxl --gpus 2
    """
    import torch

    from rocm_sd import models
    from rocm_sd.cli.pictures import writable_folder
    from rocm_sd.engine import LEVELS, require_quality
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import default_device

    # Everything that can be wrong with the options is said before a model is loaded.
    require_one_of("level", level, LEVELS)
    require_quality(quality)
    if scheduler is not None:
        require_one_of("scheduler", scheduler, host.SCHEDULERS)
    width, height = parse_size(size)
    request = host.Request(prompt, negative, steps, seed=seed, batch=batch, width=width, height=height)
    source = models.resolve(model)
    request = replace(request, guidance=source.guidance if guidance is None else guidance)
    where = default_device(device)
    # Where there are no GPUs, several ranks on the CPU are for who asks for it.
    _require_parallel(gpus, parallel, where if device else torch.device("cuda"), compare=compare)
    if tiled and (gpus > 1 or quality != "exact"):
        other = "--gpus" if gpus > 1 else "--quality"
        raise Unsupported("--tiled", other, hint="Leave out one of them.")
    drawing = _Drawing(source, config, scheduler, request, level, quality, writable_folder(out), tiled)
    if gpus == 1:
        _draw(drawing, where, compare=compare)
        return
    from rocm_sd.parallel.launching import launch

    launch(gpus, _draw_on_rank, drawing, parallel, device=where)


@dataclass(frozen=True)
class _Drawing:
    """What is to be drawn, the same for every rank."""

    source: ModelSource
    config: str | None
    scheduler: str | None
    request: Request
    level: str
    quality: str
    out: Path
    tiled: bool = False

    def load(self, console: Console, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        from rocm_sd.integrations import diffusers as host
        from rocm_sd.integrations.diffusers.loading import hush

        hush()
        with status(console, f"Loading {self.source.name} ..."):
            pipe = host.load_pipeline(self.source, device, dtype, self.config)
            if self.scheduler:
                host.set_scheduler(pipe, self.scheduler)
        return pipe

    def parameters(self, pipe: Any) -> dict[str, Any]:
        return self.request.to_dict() | {"model": self.source.name, "scheduler": type(pipe.scheduler).__name__}


def _draw(drawing: _Drawing, device: torch.device, *, compare: bool) -> None:
    from rocm_sd.cli.pictures import save_png, sheet
    from rocm_sd.engine import optimize, tile

    console, request = Console(), drawing.request
    pipe = drawing.load(console, device)
    parameters = drawing.parameters(pipe)
    stock = run_with_progress(console, pipe, request, "stock") if compare else None
    optimize(pipe, level=drawing.level, quality=drawing.quality)
    if drawing.tiled:
        tile(pipe)
    ours = run_with_progress(console, pipe, request, "rocm-sd")
    _write(console, pipe, drawing, parameters, ours)
    if stock:
        path = drawing.out / f"compare-{_slug(request.prompt)}-{request.seed}.png"
        save_png(sheet(side_by_side(stock, ours)), path, parameters)
        say(console, f"wrote {path} (first runs, not a benchmark)")


def _draw_on_rank(device: torch.device, drawing: _Drawing, plan: str) -> None:
    """Every rank draws, and rank 0 alone says so and writes the pictures."""
    import torch
    from torch import distributed as dist

    from rocm_sd.integrations.diffusers.loading import default_dtype
    from rocm_sd.parallel import join, parallel_report, parallelize

    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=settings.current().log_level, format="%(message)s", handlers=[handler])
    # Ranks that cannot find one another say so before they load a model.
    join(device)
    rank = dist.get_rank()
    console = Console(quiet=rank != 0)
    # A model may be larger than a card: each rank's has its own part alone.
    pipe = drawing.load(console, torch.device("cpu"), default_dtype(device))
    parameters = drawing.parameters(pipe)
    pictures, guided = drawing.request.batch, (drawing.request.guidance or 0.0) > 1
    pipe = parallelize(pipe, plan, drawing.level, drawing.quality, pictures, device=device, guided=guided)
    by_picture = pictures > 1 and "data" in parallel_report(pipe).plan.dims
    draw = _share_out if by_picture else run_with_progress
    ours = draw(console, pipe, drawing.request, "rocm-sd")
    # What was sent is known when all is drawn.
    say(console, str(parallel_report(pipe)))
    if rank == 0:
        _write(console, pipe, drawing, parameters, ours)


def _share_out(console: Console, pipe: Any, request: Request, label: str) -> Generated:
    """Whole pictures, each on the next rank that is free; their seeds are those of a batch."""
    from rocm_sd.integrations.diffusers.generation import Generated
    from rocm_sd.parallel import share_out

    def draw(index: int) -> Image.Image:
        one = replace(request, seed=request.seed + index, batch=1)
        return run_with_progress(console, pipe, one, f"{label}, picture {index + 1} of {request.batch}").images[0]

    started = time.perf_counter()
    images = share_out(request.batch, draw, pipe)
    return Generated(images, time.perf_counter() - started)


def _write(console: Console, pipe: Any, drawing: _Drawing, parameters: dict[str, Any], ours: Generated) -> None:
    from rocm_sd.cli.pictures import save_png
    from rocm_sd.engine import report

    for image, path in zip(ours.images, _free_names(drawing.out, drawing.request), strict=False):
        save_png(image, path, parameters | {"level": drawing.level, "quality": drawing.quality})
        say(console, f"wrote {path}")
    console.print(f"{len(ours.images)} picture(s) in {ours.seconds:.2f} s")
    if drawing.quality != "exact":
        for note in report(pipe).approximations:
            say(console, f"quality {drawing.quality}: {note}")
    if drawing.tiled:
        for line in (*report(pipe).approximations, *_seams(pipe, ours)):
            say(console, f"tiled: {line}")


def _seams(pipe: Any, ours: Generated) -> Iterator[str]:
    """How far the borders of tiles stand out, of each picture."""
    from rocm_sd.engine import tiles_of
    from rocm_sd.quality.seams import seams
    from rocm_sd.quality.similarity import as_tensor

    tiles = tiles_of(pipe)
    for image in ours.images:
        rows, columns = tiles.borders(image.height), tiles.borders(image.width)
        if rows or columns:
            found = seams(as_tensor([image]), rows, columns)
            yield f"gradients across the borders of tiles are {found:.2f} times those elsewhere"
        else:
            yield "one tile covers the picture: it is exact"


def _require_parallel(gpus: int, plan: str, device: torch.device, *, compare: bool) -> None:
    if gpus == 1 and plan != "auto":
        raise Unsupported("--parallel", "one GPU", hint="Add --gpus 2, or more.")
    if gpus == 1:
        return
    from rocm_sd.parallel import parse
    from rocm_sd.parallel.launching import require_ranks

    require_ranks(gpus, device)
    if plan != "auto":
        parse(plan, gpus)
    if compare:
        raise Unsupported("--compare", f"--gpus {gpus}", hint="Leave out one of them.")


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
