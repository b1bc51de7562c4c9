"""rocm-sd quality: compare two folders of pictures, or two settings of the built-in model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rocm_sd.cli.terminal import Device, bar, literal, say
from rocm_sd.errors import InvalidOption, ModelNotFound, Unsupported, require_one_of

if TYPE_CHECKING:
    import PIL.Image
    from PIL.Image import Image

    from rocm_sd.models.emoji import Prompt

__all__ = ["quality"]

SETTINGS = ("engine", "level", "quality", "scheduler", "steps", "guidance")


@dataclass(frozen=True)
class _Side:
    """One of the two, with its pictures by name."""

    label: str
    images: dict[str, Image]


def quality(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A folder of pictures, or settings such as stock or steps=10.", show_default=False
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="What to compare it with: another one of these.", show_default=False)
    ],
    prompts: Annotated[int, typer.Option(help="With settings: how many prompts to draw.")] = 24,
    seed: Annotated[int, typer.Option(help="With settings: the seed of the pictures.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder for quality.png and quality.json.")] = Path("out"),
    clip: Annotated[str | None, typer.Option(help="Also the CLIP score, by the weights in this folder.")] = None,
    fid: Annotated[Path | None, typer.Option(help="Also the FID, by these Inception weights.")] = None,
    device: Device = None,
) -> None:
    """Compare two sets of pictures: how near they are, and whether they show their prompts.

    rocm-sd quality stock rocm-sd

    rocm-sd quality steps=20 steps=10,scheduler=dpm++2m --prompts 48

    rocm-sd quality pictures/before pictures/after
    """
    from rocm_sd.cli.pictures import save_png, save_text, sheet, writable_folder

    if prompts < 2:
        raise Unsupported("quality", f"{prompts} prompts: it takes 2 or more")
    writable_folder(out)
    console = Console()
    sides, wanted = _both(console, first, second, prompts, seed, device)
    if clip and not wanted:
        raise Unsupported("quality", "--clip with folders: nothing says what their pictures should show")
    names = [name for name in sides[0].images if name in sides[1].images]
    if len(names) < 2:
        raise ModelNotFound(
            f"{first} and {second} share {len(names)} pictures of the same name.",
            hint="A comparison needs two or more: give folders whose files are named alike.",
        )
    result = measure(sides, names, wanted, clip, fid)
    cells = [
        (side.images[name], f"{side.label}: {wanted[name].text if wanted else name}")
        for name in names[:16]
        for side in sides
    ]
    save_png(
        sheet([cells[start : start + 4] for start in range(0, len(cells), 4)]),
        out / "quality.png",
        {"first": first, "second": second},
    )
    save_text(json.dumps(result, indent=2) + "\n", out / "quality.json")
    console.print(_table(sides, result))
    say(console, f"wrote {out / 'quality.png'} and {out / 'quality.json'}")


def _both(
    console: Console, first: str, second: str, count: int, seed: int, device: str | None
) -> tuple[list[_Side], dict[str, Prompt]]:
    folders = [Path(text).is_dir() for text in (first, second)]
    if all(folders):
        return [_read(Path(text)) for text in (first, second)], {}
    if any(folders):
        raise Unsupported("quality", "a folder against settings", hint="Give two folders, or two settings.")
    from rocm_sd.models.emoji import trained_prompts

    parsed = [parse_settings(text) for text in (first, second)]
    wanted = {f"{number:03d}": prompt for number, prompt in enumerate(trained_prompts(count))}
    return _draw(console, (first, second), parsed, wanted, seed, device), wanted


def parse_settings(text: str) -> dict[str, Any]:
    """`stock`, `rocm-sd` or `level=memory,steps=10` as a dictionary."""
    values: dict[str, Any] = {"engine": "rocm-sd", "level": "auto", "quality": "exact", "steps": 20, "guidance": 3.0}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if part in {"stock", "rocm-sd"}:
            values["engine"] = part
        elif name in SETTINGS and value:
            try:
                values[name] = {"steps": int, "guidance": float}.get(name, str)(value)
            except ValueError:
                raise InvalidOption(name, value, [], hint="It takes a number.") from None
        else:
            raise InvalidOption("setting", part, ["a folder", "stock", "rocm-sd", *(f"{s}=..." for s in SETTINGS)])
    require_one_of("engine", values["engine"], ("stock", "rocm-sd"))
    return values


def _draw(
    console: Console,
    labels: tuple[str, str],
    settings: list[dict[str, Any]],
    wanted: dict[str, Prompt],
    seed: int,
    device: str | None,
) -> list[_Side]:
    from rocm_sd import models
    from rocm_sd.engine import optimize
    from rocm_sd.integrations import diffusers as host
    from rocm_sd.integrations.diffusers.loading import default_device, hush

    source = models.resolve()
    hush()
    sides = []
    with bar("drawing", 2 * len(wanted), console=console) as update:
        for label, values in zip(labels, settings, strict=True):
            pipe = host.load_pipeline(source, default_device(device))
            if "scheduler" in values:
                host.set_scheduler(pipe, values["scheduler"])
            if values["engine"] == "rocm-sd":
                optimize(pipe, level=values["level"], quality=values["quality"])
            images = {}
            for number, (name, prompt) in enumerate(wanted.items()):
                request = host.Request(
                    prompt.text, steps=values["steps"], guidance=values["guidance"], seed=seed + number
                )
                images[name] = host.generate(pipe, request).images[0]
                update(advance=1, description=f"{label}: {prompt.text}")
            sides.append(_Side(label, images))
    return sides


def _read(folder: Path) -> _Side:
    return _Side(str(folder), {file.name: _picture(file) for file in sorted(folder.glob("*.png"))})


def _picture(file: Path) -> PIL.Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            picture: Image.Image = opened.convert("RGB")
            return picture
    # Pillow has an error of its own for each way in which a file lies about itself.
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Unsupported("quality", f"{file}: it is not a readable picture ({error})") from error


def measure(
    sides: list[_Side], names: list[str], wanted: dict[str, Prompt], clip: str | None, fid: Path | None
) -> dict[str, Any]:
    from rocm_sd.quality import prompt_match, similarity
    from rocm_sd.quality.embedding import IMAGE_SIZE, load_embedding

    first, second = (similarity.as_tensor([side.images[name] for name in names]) for side in sides)
    embedding = load_embedding()
    near = similarity.similarity(first, second)
    result: dict[str, Any] = {
        "pictures": len(names),
        "equal": sum(psnr == float("inf") for psnr in near.psnr),
        "worst_psnr_db": near.worst_psnr if near.worst_psnr != float("inf") else None,
        "mean_ssim": near.mean_ssim,
        "frechet_distance": similarity.frechet_distance(first, second, embedding, IMAGE_SIZE),
    }
    if wanted:
        expected = [wanted[name] for name in names]
        for side, images in zip(sides, (first, second), strict=True):
            shares = prompt_match.match(images, expected, embedding).intervals()
            result.setdefault("prompt_match", []).append(
                {"setting": side.label, **{key: [i.value, i.low, i.high] for key, i in shares.items()}}
            )
        if clip:
            from rocm_sd.integrations.diffusers.loading import load_clip

            texts = [prompt.text for prompt in expected]
            result["clip_score"] = [
                similarity.clip_score(images, texts, lambda: load_clip(clip)) for images in (first, second)
            ]
    if fid:
        result["fid"] = similarity.fid(first, second, fid)
    return result


def _table(sides: list[_Side], result: dict[str, Any]) -> Table:
    table = Table("measure", *(literal(side.label) for side in sides), title="Quality", title_justify="left")
    for key in ("top-1", "top-5", "colour"):
        if "prompt_match" in result:
            shown = ["{:.1%} ({:.1%} to {:.1%})".format(*side[key]) for side in result["prompt_match"]]
            table.add_row(f"prompt match, {key}", *shown)
    if "clip_score" in result:
        table.add_row("CLIP score", *(f"{value:.2f}" for value in result["clip_score"]))
    worst = result["worst_psnr_db"]
    table.add_row("worst PSNR of a pair", "", "all pictures are equal" if worst is None else f"{worst:.1f} dB")
    table.add_row("mean SSIM", "", f"{result['mean_ssim']:.4f}")
    table.add_row("Frechet distance (embedding)", "", f"{result['frechet_distance']:.4f}")
    if "fid" in result:
        table.add_row("FID", "", f"{result['fid']:.2f}")
    return table
