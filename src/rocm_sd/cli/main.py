"""rocm-sd: the command line. Errors are one sentence and what to type next; exit codes are listed in docs/cli.md."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from rocm_sd import __version__, settings
from rocm_sd.cli.bench import bench
from rocm_sd.cli.contribute import contribute
from rocm_sd.cli.demo import demo
from rocm_sd.cli.doctor import DoctorCommand, doctor
from rocm_sd.cli.export import export
from rocm_sd.cli.generate import generate
from rocm_sd.cli.improve import improve
from rocm_sd.cli.info import info
from rocm_sd.cli.install import install, uninstall
from rocm_sd.cli.onnx import app as onnx
from rocm_sd.cli.profile import profile
from rocm_sd.cli.quality import quality
from rocm_sd.cli.report import report
from rocm_sd.cli.serve import serve
from rocm_sd.cli.terminal import help_text, literal, say
from rocm_sd.cli.tune import tune
from rocm_sd.cli.verify import verify
from rocm_sd.errors import INTERRUPTED, explained

__all__ = ["app", "run"]

app = typer.Typer(
    name="rocm-sd",
    help="Stable Diffusion on AMD GPUs: fast, small and trouble-free.",
    epilog="Start with: rocm-sd info, then: rocm-sd generate 'a frog on a pink background'",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for _verb in (
    info, generate, demo, serve, quality, verify, tune, improve, bench, profile, report, doctor, contribute, export,
    install, uninstall,
):  # fmt: skip
    app.command(cls=DoctorCommand if _verb is doctor else None, help=help_text(_verb))(_verb)
app.add_typer(onnx)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rocm-sd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # read by run()
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Entry point: run a verb and turn what went wrong into a sentence and an exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    errors = Console(stderr=True)
    # Read when transformers is first imported; its advice about torchvision is of no use to someone drawing a picture.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    debug = "--debug" in arguments
    try:
        in_force = settings.current()
        debug = debug or in_force.debug
        handler = RichHandler(console=errors, show_time=False, show_path=False)
        logging.basicConfig(level=in_force.log_level, format="%(message)s", handlers=[handler])
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 -- nobody should have to read a traceback who did not ask for it
        if _was_interrupted(error):
            sys.exit(INTERRUPTED)
        if debug:
            errors.print_exception()
        known = explained(error)
        errors.print(f"[bold red]error:[/] {literal(known.message)}", highlight=False, soft_wrap=True)
        if known.hint:
            say(errors, known.hint)
        sys.exit(known.exit_code)


def _was_interrupted(error: BaseException) -> bool:
    """By Ctrl-C while a module was imported: some then raise an ImportError of their own."""
    before = error.__cause__ or error.__context__
    return before is not None and (isinstance(before, KeyboardInterrupt) or _was_interrupted(before))


if __name__ == "__main__":
    run()
