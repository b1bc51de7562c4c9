"""rocm-sd onnx optimize: an exported pipeline with its graphs fused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console

from rocm_sd.cli.terminal import bar, say

__all__ = ["optimize"]


def optimize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The folder that rocm-sd onnx export wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    float16: Annotated[
        bool, typer.Option("--float16", help="Half precision, but for what overflows or loses its meaning in it.")
    ] = False,
    provider: Annotated[
        str, typer.Option(help="Whose fused ops are used: cpu, migraphx, rocm, cuda, or auto, the best installed.")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was fused as JSON.")] = False,
) -> None:
    """Fuse the graphs of an exported pipeline: attention, norms, gated feed-forwards, upsampling, layouts.

    Ops that a provider has no kernel for become functions of standard ops, so that the result runs everywhere.

    rocm-sd onnx optimize ./emoji-onnx ./emoji-fused

    rocm-sd onnx optimize ./sd15-onnx ./sd15-fp16 --float16 --provider migraphx
    """
    from rocm_sd.onnx.fusions.results import table_of
    from rocm_sd.onnx.optimizing import optimize_folder

    console = Console()
    with bar("Optimizing") as update:
        result = optimize_folder(
            source,
            out,
            float16=float16,
            provider=provider,
            overwrite=overwrite,
            progress=lambda done, total, what: update(completed=done, total=total, description=f"Optimizing {what}"),
        )
    if as_json:
        say(console, json.dumps(asdict(result)))
        return
    console.print(table_of(result))
    say(console, f"wrote {out}")
