"""Memory that is short is called so by every allocator's error, and a record names no folder."""

from __future__ import annotations

import pytest
import torch

from rocm_sd.bench.turns import Failed


@pytest.mark.parametrize(
    ("error", "why", "is_short"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB\nin 3 lines"), "out of memory: tried to allocate 2 GiB", True),
        (RuntimeError("can't allocate memory: 64 GiB"), "out of memory: can't allocate memory: 64 GiB", True),
        (MemoryError(), "out of memory", True),
        (RuntimeError("no file /home/me/models/a.bin"), "RuntimeError: no file a.bin", False),
    ],
)
def test_what_ailed_an_engine(error, why, is_short):
    failed = Failed("stock", error)
    assert (failed.engine, failed.why, failed.is_short_of_memory) == ("stock", why, is_short)
