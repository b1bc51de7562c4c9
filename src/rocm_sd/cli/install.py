"""rocm-sd install and rocm-sd uninstall: into the programs where people draw, and out of them again."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console

from rocm_sd.cli.terminal import say, status

__all__ = ["install", "uninstall"]

_NEXT = {
    "comfyui": 'Restart ComfyUI. The nodes are under "ROCm Optimizations"; examples/comfyui/ has workflows to drop in.',
    "a1111": 'Restart Automatic1111. "ROCm SD Optimization" is below the prompt, in txt2img and img2img.',
}


def install(
    host: Annotated[str, typer.Argument(help="comfyui or a1111.", show_default=False)],
    path: Annotated[Path, typer.Argument(help="The folder of that program.", show_default=False)],
    copy: Annotated[bool, typer.Option("--copy", help="Copy the files instead of linking them.")] = False,
    python: Annotated[
        Path | None, typer.Option(help="The Python that runs that program. (default: its venv or python_embeded)")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Install although that Python lacks something; the program then starts without rocm-sd."
        ),
    ] = False,
) -> None:
    """Put rocm-sd into ComfyUI or Automatic1111.

    rocm-sd install comfyui ~/ComfyUI

    rocm-sd install comfyui D:/ComfyUI_windows_portable --copy

    rocm-sd install a1111 ~/stable-diffusion-webui --python ~/stable-diffusion-webui/venv/bin/python
    """
    from rocm_sd.integrations import installing

    console = Console()
    found = installing.recognise(host, path)
    say(console, f"found {found.described}")
    for note in found.notes:
        say(console, f"note: {note}")
    executable, its_own = installing.host_python(found, python)
    if not its_own:
        say(console, "note: it has no venv or python_embeded; asking the Python that runs this. Another: --python")
    with status(console, f"Asking {executable} ..."):
        facts = installing.examine(executable, found.root)
    say(console, facts.described)
    missing = installing.what_to_type(facts)
    if missing and not force:
        raise installing.HostNotReady(
            f"{found.title} cannot use rocm-sd yet. {' '.join(missing)}",
            hint="Then install again. Nothing was written; --force installs all the same.",
        )
    placed = installing.place(found, copy=copy)
    how = "linked" if placed.mode == "link" else f"copied {placed.files} files to"
    say(console, f"{how} {placed.destination}")
    for kept in placed.kept:
        say(console, f"kept {kept}: it was changed since it was installed")
    for note in (*placed.notes, *missing):
        say(console, f"note: {note}")
    say(console, _NEXT[found.kind])
    say(console, f"To undo this: rocm-sd uninstall {found.kind} {path}")


def uninstall(
    host: Annotated[str, typer.Argument(help="comfyui or a1111.", show_default=False)],
    path: Annotated[Path, typer.Argument(help="The folder of that program.", show_default=False)],
) -> None:
    """Take rocm-sd out of ComfyUI or Automatic1111: what install wrote, and nothing that you changed.

    rocm-sd uninstall comfyui ~/ComfyUI

    rocm-sd uninstall a1111 ~/stable-diffusion-webui
    """
    from rocm_sd.integrations import installing

    console = Console()
    found = installing.recognise(host, path)
    removed = installing.remove(found)
    for file in removed.files:
        say(console, f"removed {file}")
    for kept in removed.kept:
        say(console, f"kept {kept}: rocm-sd did not write it, or it was changed since")
    say(console, f"{found.title} runs without rocm-sd after its next start.")
