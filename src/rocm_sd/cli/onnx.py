"""rocm-sd onnx: a model for ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rocm_sd.cli.onnx_optimize import optimize
from rocm_sd.cli.terminal import bar, help_text, say, status

__all__ = ["app", "export"]

app = typer.Typer(
    name="onnx",
    help="A model for ONNX Runtime: export it, fuse it, then run it with rocm_sd.onnx.ROCmOnnxPipeline.",
    epilog="Start with: rocm-sd onnx export emoji-sd emoji-sd-onnx. For one .safetensors file: rocm-sd export",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def export(
    model: Annotated[
        str,
        typer.Argument(help="emoji-sd, a Diffusers folder, a .safetensors checkpoint or a hub id.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    float16: Annotated[bool, typer.Option("--float16", help="Weights in half precision: half the size.")] = False,
    single: Annotated[
        bool, typer.Option("--single", help="One model of a whole picture, text to image, with its scheduler.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over what another export left in OUT.")] = False,
) -> None:
    """Write a model as ONNX, in the layout of Diffusers' folders: Stable Diffusion 1.x and 2.x, SDXL, emoji-sd.

    rocm-sd onnx export emoji-sd emoji-sd-onnx

    rocm-sd onnx export ./sd15 sd15-onnx --float16

    rocm-sd onnx export ./sdxl sdxl-onnx --float16

    rocm-sd onnx export emoji-sd emoji-sd-single --single

    Batch, height and width are free. Each part is compared with torch before it is kept. Ctrl-C keeps the finished
    parts, and the same command goes on after them. One .safetensors checkpoint, for ComfyUI and Automatic1111, is
    written by: rocm-sd export
    """
    import torch

    from rocm_sd import models
    from rocm_sd.errors import RocmSdError
    from rocm_sd.integrations.diffusers.loading import hush, load_pipeline
    from rocm_sd.onnx import export_pipeline, export_single, layout

    if (Path(model) / layout.MANIFEST).is_file():
        raise RocmSdError(
            f"{model} is an export to ONNX already.", hint="Give the model itself. To fuse it: rocm-sd onnx optimize"
        )
    source = models.resolve(model)
    hush()
    errors = Console(stderr=True)
    with status(errors, f"Loading {source.name} ..."):
        pipe = load_pipeline(source, torch.device("cpu"), torch.float16 if float16 else torch.float32)
    name = (
        source.name if source.kind in {models.ModelKind.EMBEDDED, models.ModelKind.HUB} else Path(model).resolve().name
    )
    try:
        with bar("starting", console=errors) as update:
            manifest = (export_single if single else export_pipeline)(
                pipe, out, source=name, force=force,
                progress=lambda done, total, what: update(completed=done, total=total, description=what),
            )  # fmt: skip
    except KeyboardInterrupt:
        say(errors, f"Interrupted. Finished parts are kept in {out}; to go on, type the same command again.")
        raise typer.Exit(130) from None
    console = Console()
    for part in manifest.parts:
        size = sum(file.size for file in part.files)
        say(console, f"{part.name}: {part.dtype}, opset {part.opset}, {size / 1e6:.1f} MB")
    if manifest.extra.get("unchecked"):
        say(console, f"The whole was not compared with its parts: {manifest.extra['unchecked']}.")
    if single and getattr(pipe, "safety_checker", None) is not None:
        say(console, "The safety checker is not in it: it checks what an export without --single draws.")
    say(console, f"wrote {out}. Run it: ROCmOnnxPipeline.from_pretrained({str(out)!r}), from rocm_sd.onnx")


for _verb in (export, optimize):
    app.command(help=help_text(_verb))(_verb)
