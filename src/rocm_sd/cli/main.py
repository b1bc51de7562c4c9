"""rocm-sd: the command line. Errors are one sentence and what to type next; exit codes are listed in docs/cli.md."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.logging import RichHandler

from rocm_sd import __version__, settings
from rocm_sd.cli.demo import demo
from rocm_sd.cli.generate import generate
from rocm_sd.cli.info import info
from rocm_sd.errors import RocmSdError

__all__ = ["app", "run"]

INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C

app = typer.Typer(
    name="rocm-sd",
    help="Stable Diffusion on AMD GPUs: fast, small and trouble-free.",
    epilog="Start with: rocm-sd info, then: rocm-sd generate 'a frog on a pink background'",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(info)
app.command()(generate)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rocm-sd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    context.obj = debug


def run(arguments: list[str] | None = None) -> None:
    """Entry point: run a verb and turn what went wrong into a sentence and an exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    errors = Console(stderr=True)
    try:
        in_force = settings.current()
        logging.basicConfig(
            level=in_force.log_level,
            format="%(message)s",
            handlers=[RichHandler(console=errors, show_time=False, show_path=False)],
        )
        sys.exit(_invoke(arguments))
    except RocmSdError as error:
        if "--debug" in arguments or settings.Settings.from_environment({}).debug:
            errors.print_exception()
        errors.print(f"[bold red]error:[/] {error.message}", highlight=False)
        if error.hint:
            errors.print(error.hint, highlight=False)
        sys.exit(error.exit_code)


def _invoke(arguments: list[str]) -> Any:
    try:
        return app(arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        Console(stderr=True).print("Interrupted; what was finished before is kept.")
        return INTERRUPTED


if __name__ == "__main__":
    run()
