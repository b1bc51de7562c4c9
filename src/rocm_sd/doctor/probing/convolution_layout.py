"""Convolutions with the channels last (NHWC) against the channels first (NCHW)."""

from __future__ import annotations

from functools import partial
from typing import Any

from rocm_sd.doctor.probing.common import Cannot, Place, medians, place
from rocm_sd.doctor.probing.convolutions import SHAPES, Convolution, inputs
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

_LIMIT_S = 18.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    outcome = isolated(_rows, device, quick, limit_s=_LIMIT_S)
    if outcome.answer is None:
        raise Cannot(f"the convolutions could not be timed: {outcome.failed}")
    return outcome.answer


def _rows(device: str | None, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    with torch.no_grad():
        return {"device": where.told(), "rows": [_row(shape, where, quick=quick) for shape in SHAPES]}


def _row(shape: Convolution, where: Place, *, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- as above

    first = inputs(shape, where, quick=quick)
    last = tuple(tensor.contiguous(memory_format=torch.channels_last) for tensor in first)
    convolve = torch.nn.functional.conv2d
    taken = medians({"nchw": partial(convolve, *first, padding=1), "nhwc": partial(convolve, *last, padding=1)}, where)
    return {"name": shape.name, "nchw_ms": taken["nchw"], "nhwc_ms": taken["nhwc"]}
