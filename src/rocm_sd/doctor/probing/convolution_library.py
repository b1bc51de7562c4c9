"""Convolutions with the vendor's library (MIOpen, cuDNN, oneDNN) on, against off, which is torch's own GEMM."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.probing.common import Cannot, Place, medians, place
from rocm_sd.doctor.probing.convolutions import SHAPES, Convolution, inputs
from rocm_sd.doctor.probing.isolated import isolated

if TYPE_CHECKING:
    import torch

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
        rows = [_row(shape, where, quick=quick) for shape in SHAPES]
    library = ("miopen" if where.on_rocm else "cudnn") if where.is_gpu else "onednn"
    return {"device": where.told(), "library": library, "rows": rows}


def _row(shape: Convolution, where: Place, *, quick: bool) -> dict[str, Any]:
    tensors = inputs(shape, where, quick=quick)
    taken = medians({name: partial(_convolve, where, tensors, on=name == "on") for name in ("on", "off")}, where)
    return {"name": shape.name, "on_ms": taken["on"], "off_ms": taken["off"]}


def _convolve(where: Place, tensors: tuple[torch.Tensor, torch.Tensor], *, on: bool) -> torch.Tensor:
    import torch  # noqa: PLC0415 -- as above

    # torch calls both vendors' library cudnn.
    backend: Any = torch.backends.cudnn if where.is_gpu else torch.backends.mkldnn
    # Not its flags(), which set all the others as well, and take as long as a small convolution. The process ends soon.
    backend.enabled = on
    return torch.nn.functional.conv2d(*tensors, padding=1)
