"""A server for one run of a load test: a process of its own on a free port, which ends with the run."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd.bench.serving_http import Client, wait_until_ready
from rocm_sd.errors import RocmSdError
from rocm_sd.files import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["own_server"]

# It would outlive a run that is killed, and hold the card: PR_SET_PDEATHSIG.
_BEGIN = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from rocm_sd.cli.main import run
run(sys.argv[1:])
"""
# What it says as soon as it listens.
_ADDRESS = re.compile(r"(http://\S+:\d+) is a page")
# Imports alone take some seconds; on a busy machine, many.
_LISTENS_S, _LOOK_S = 180.0, 0.1
# Nobody else's pictures are drawn there: it need not end politely.
_ENDS_S = 10.0


@contextmanager
def own_server(options: Sequence[str] = ()) -> Iterator[Client]:
    """`rocm-sd serve` with these options, ready; raises RocmSdError with its last words where it ends before that."""
    command = [sys.executable, "-c", _BEGIN, "serve", *options, "--port", "0", "--log", "none"]
    with tempfile.TemporaryDirectory() as folder:
        # A file, and not a pipe, which would be full at some time and stop the server.
        words = Path(folder) / "stderr"
        with words.open("wb") as opened:
            # In a session of its own: Ctrl-C ends the run, which then ends the server.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=opened, start_new_session=True
            )

        def ended() -> str | None:
            return None if process.poll() is None else _last_words(words) or f"exit code {process.returncode}."

        try:
            client = Client(_address(words, ended))
            wait_until_ready(client, ended)
            yield client
        finally:
            _end(process)


def _address(words: Path, ended: Callable[[], str | None]) -> str:
    until = time.monotonic() + _LISTENS_S
    while time.monotonic() < until:
        found = _ADDRESS.search(read_text(words))
        if found:
            return found[1]
        why = ended()
        if why is not None:
            raise RocmSdError(f"The server ended before it was ready: {why}", hint="To see it, type: rocm-sd serve")
        time.sleep(_LOOK_S)
    raise RocmSdError(f"The server did not listen in {_LISTENS_S:.0f} s.", hint="To see it, type: rocm-sd serve")


def _last_words(words: Path) -> str:
    """Its error and the hint, which are its last two lines."""
    return " ".join(line.strip() for line in read_text(words).splitlines()[-2:]).removeprefix("error: ")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Also where Ctrl-C comes a second time.
        process.kill()
        process.wait()
