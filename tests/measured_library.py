"""A database in which a setting of the convolution library was measured, and what convolutions see of torch's flags."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rocm_sd.engine.convolutions.library import Flags
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning.database import Entry
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import user_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

AS_TORCH_COMES = Flags(enabled=True, benchmark=False)
SEARCHED = Flags(enabled=True, benchmark=True)
WITHOUT = Flags(enabled=False, benchmark=False)
FIGURES = "812.0 us, stock torch 1034.0 us, measured here on 2026-05-04"


def flags() -> Flags:
    return Flags(torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark)


def measure(candidate: str = "searched", high: float = 820.0) -> None:
    """As `rocm-sd tune` would on a GPU: a CPU has nothing to search, and its own environment stands for the card's."""
    times = {"median_us": 812.0, "low_us": 805.0, "high_us": high, "stock_us": 1034.0}
    common = {"numerics": "ok", "when": "2026-05-04T03:02:01+00:00", "config": {}}
    user_database().put(
        [Entry("convolution_library", {}, current("cpu"), "", candidate, **times, **common)],
    )
    forget_choices()


@contextmanager
def seen_by_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Flags]]:
    """One entry for each convolution: of torch's function, since a hook on a layer would keep a model from being
    recorded, and ops convolve without layers.
    """
    seen: list[Flags] = []
    convolve = F.conv2d

    def watched(*args, **kwargs):
        seen.append(flags())
        return convolve(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(F, "conv2d", watched)
        yield seen
