"""rocm-sd export: a model as one checkpoint file, for hosts that read no folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rocm_sd.cli.terminal import say, status

__all__ = ["export"]


def export(
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="A Diffusers folder of Stable Diffusion 1.x. (default: emoji-sd, built in)")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a model as one .safetensors checkpoint, as ComfyUI and Automatic1111 read it.

    rocm-sd export --out ComfyUI/models/checkpoints/emoji-sd.safetensors

    rocm-sd export --model ./sd15 --out sd15.safetensors --force

    Models for ONNX Runtime are written by: rocm-sd onnx export
    """
    from rocm_sd import models
    from rocm_sd.errors import Unsupported
    from rocm_sd.models.single_file import write_checkpoint

    source = models.resolve(model)
    if source.kind in {models.ModelKind.FILE, models.ModelKind.HUB}:
        raise Unsupported(
            "rocm-sd export", f"a {source.kind.value}", hint="Give --model FOLDER, a Diffusers folder on this machine."
        )
    console = Console()
    embedded = source.kind is models.ModelKind.EMBEDDED
    name = source.name if embedded else Path(source.location).resolve().name
    with status(console, f"Writing {out} ..."):
        written = write_checkpoint(Path(source.location), out, name=name, force=force)
    say(console, f"wrote {written.path} ({written.tensors} tensors, {written.size / 1e6:.1f} MB)")
    if embedded:
        say(
            console,
            'In ComfyUI, load it with the node "emoji-sd Loader (ROCm)": '
            "the host's own loader does not know so small a VAE.",
        )
