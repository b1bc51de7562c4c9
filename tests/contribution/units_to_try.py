"""What units of a contribution may do to their process; in a module, so that a worker can import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rocm_sd import workers
from rocm_sd.bench.card_report import FAILED, PASSED, Item
from rocm_sd.contribution import attempts
from rocm_sd.contribution.keeping import Found


def fine(name: str, log: str = "") -> Found:
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    return Found((Item(name, PASSED, "all right", figures={"pid": float(os.getpid())}),))


def wrong(name: str) -> Found:
    return Found((Item(name, FAILED, "3 is not 4", figures={"pid": float(os.getpid())}),))


def crash() -> Found:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def killed_for_memory() -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def out_of_memory() -> Found:
    raise MemoryError(f"no room for {Path.home() / 'secret'}")


def hang() -> Found:
    time.sleep(600)
    raise AssertionError


def slow() -> Found:
    """Goes on and on, and says so."""
    for step in range(3000):
        attempts.progress(step / 3000, f"step {step}")
        time.sleep(0.1)
    raise AssertionError


def what_it_is() -> Found:
    figures = {"inside": str(workers.inside()), "cache": os.environ["ROCM_SD_CACHE"], "left": attempts.seconds_left()}
    return Found((Item("what", PASSED, figures=figures),))


def warn() -> Found:
    import logging

    logging.getLogger("rocm_sd").warning("conv2d falls back to stock")
    return Found((Item("warn", PASSED),))
