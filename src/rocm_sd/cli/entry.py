"""The program `rocm-sd`: Ctrl-C ends it with 130 from the start, while the command line itself is imported, too."""

from __future__ import annotations

import sys

from rocm_sd.errors import INTERRUPTED

__all__ = ["run"]


def run() -> None:
    try:
        # Half a second, in which Ctrl-C may come.
        from rocm_sd.cli.main import run as run_verb
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run_verb()
