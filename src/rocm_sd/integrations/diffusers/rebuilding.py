"""Models that were drawn with, made again from their configs with random weights: tuning needs shapes alone."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.engine.calibration import DrawnCall, Skeleton, Subject, noted, with_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["drawn_models"]

log = logging.getLogger("rocm_sd")


def drawn_models(device: torch.device) -> Iterator[Subject]:
    """One after the other, the newest first; what this Diffusers cannot make is passed over with a warning."""
    for call in noted():
        subject = _subject(call, device)
        if subject is not None:
            yield subject


def _subject(call: DrawnCall, device: torch.device) -> Subject | None:
    try:
        return _made(call, device)
    except Exception as error:  # noqa: BLE001 -- a config of another release fails in its own ways
        log.warning("%s, drawn with on %s, is not tuned: %s", call.model, call.when[:10], error)
        return None


def _made(call: DrawnCall, device: torch.device) -> Subject:
    import diffusers  # noqa: PLC0415 -- slow to import

    kind: Any = getattr(diffusers, call.model, None)
    if diffusers.ModelMixin not in inspect.getmro(kind):
        raise TypeError(f"Diffusers {diffusers.__version__} has no such model")
    meta = torch.device("meta")
    with meta:
        # Diffusers' own `to` warns of modules that are better in float32; the user's was made as it was drawn with.
        owner = nn.Module.to(kind.from_config(call.config), dtype=getattr(torch, call.dtype))
    model = (getattr(owner, call.part) if call.part else owner).requires_grad_(requires_grad=False)
    skeleton = Skeleton.of(model, tuple(with_tensors(call.args, meta)), with_tensors(call.kwargs, meta))
    made = skeleton.rebuilt(device, share=False)
    return Subject(made.model, made.args, made.kwargs, call.times)
