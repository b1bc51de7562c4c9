"""How long a pipeline takes to load: its files on the disk alone at first, and then in the system's page cache.

    pipe, times = timed_loads(source, lambda: load_pipeline(source, device))

The first load is also the first of the process, which imports what the pipeline is made of. Only Linux lets go of a
file's pages when it is asked to; where that is not seen to happen, `times.from_disk` is false.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.bench.gate import free_memory
from rocm_sd.bench.records import LoadTimes
from rocm_sd.models import ModelKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rocm_sd.models import ModelSource

__all__ = ["forget_files", "model_files", "timed_loads"]

# What is smaller is read in an instant, and a config may have been read before.
_LARGE = 1 << 16


def timed_loads(source: ModelSource, load: Callable[[], Any]) -> tuple[Any, LoadTimes]:
    """What `load` gives, loaded twice: the first one is given up, since a card may have room for no more."""
    from_disk = forget_files(model_files(source))
    cold_s = _seconds(load)[1]
    free_memory()
    pipe, warm_s = _seconds(load)
    return pipe, LoadTimes(cold_s, warm_s, from_disk)


def model_files(source: ModelSource) -> tuple[Path, ...]:
    """Files with the weights of a model on this machine; of a hub id those that were downloaded before."""
    place = Path(source.location)
    if source.kind is ModelKind.HUB:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 -- slow to import

        index = try_to_load_from_cache(source.location, "model_index.json")
        if not isinstance(index, str):
            return ()
        place = Path(index).parent
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    return tuple(file for file in files if file.is_file() and file.stat().st_size >= _LARGE)


def forget_files(files: Iterable[Path]) -> bool:
    """Ask the system to drop the files' pages from memory. Whether there are files, and none is there any more."""
    seen = [_is_forgotten(file) for file in files]
    return bool(seen) and all(seen)


def _is_forgotten(file: Path) -> bool:
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    opened = os.open(file, os.O_RDONLY)
    try:
        # What is still to be written stays in memory.
        os.fdatasync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        # A page in the middle: it can be read without waiting only where it is in memory.
        os.preadv(opened, [bytearray(1)], os.fstat(opened).st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(opened)
    return False


def _seconds(load: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    loaded = load()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return loaded, time.perf_counter() - started
