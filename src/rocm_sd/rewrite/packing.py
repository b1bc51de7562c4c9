"""Linears of one input read as one: their weights become neighbours in one storage, and the packed weight is a view.

Nothing is derived from a weight's values and kept: a LoRA fused in place (`weight.data += ...` bumps no version
counter) is in the view at once, and no memory is doubled. Weights that were moved or reassigned are laid together anew.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["packed_linear", "packing", "unpack"]

_ALLOWED: ContextVar[bool] = ContextVar("rocm_sd_packing", default=True)


@contextmanager
def packing(*, allowed: bool) -> Iterator[None]:
    """Whether linears are read as one within: an ablation shows what it brings."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def packed_linear(*linears: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight [N1 + N2 + ..., K], bias [N1 + N2 + ...] or None): views, to be used now and not kept.

    None where the linears cannot be read as one at this time; then each is to be used for itself.
    """
    # An address is no part of a traced graph.
    if torch.compiler.is_compiling() or not _ALLOWED.get():
        return None
    # Not through attributes: nn.Module looks those up in Python, six times for QKV.
    owned = [linear._parameters for linear in linears]  # noqa: SLF001
    biases = [parameters["bias"] for parameters in owned if parameters["bias"] is not None]
    if biases and len(biases) != len(linears):
        return None
    weight = _joined([parameters["weight"] for parameters in owned])
    if weight is None or not biases:
        return None if weight is None else (weight, None)
    bias = _joined(biases)
    return None if bias is None else (weight, bias)


def unpack(module: nn.Module) -> None:
    """Give each parameter of the module a storage of its own again, those inside LoRA wrappers too."""
    by_storage: dict[int, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    # Parameters must stay usable for training, also where this is called in inference mode.
    with torch.inference_mode(mode=False), torch.no_grad():
        for sharing in by_storage.values():
            for parameter in sharing if len(sharing) > 1 else ():
                _give(parameter, parameter.detach().clone())


def _joined(parameters: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given: list[torch.Tensor] = []
    grad = torch.is_grad_enabled()
    for parameter in parameters:
        # A subclass (quantised, sharded) is no plain memory. A view would lead all gradients to the first parameter.
        if type(parameter) is not nn.Parameter or (grad and parameter.requires_grad):
            return None
        given.append(parameter)
    rows = _rows_of_neighbours(given)
    if rows is not None:
        # Two allocations may touch by chance: torch refuses a view that leaves the storage of the first.
        with suppress(RuntimeError):
            return _view(given[0], rows)
    if not _lay_together(given):
        return None
    return _view(given[0], sum(parameter.shape[0] for parameter in given))


def _view(first: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.as_strided(first, (rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _rows_of_neighbours(parameters: Sequence[torch.Tensor]) -> int | None:
    """How many rows they have together, or None where they do not lie one after the other."""
    first = parameters[0]
    dtype, row, rows = first.dtype, first.shape[1:], 0
    end = first.data_ptr()
    for parameter in parameters:
        shape = parameter.shape
        if parameter.data_ptr() != end or parameter.dtype != dtype or shape[1:] != row or not parameter.is_contiguous():
            return None
        end += parameter.numel() * dtype.itemsize
        rows += shape[0]
    return rows


def _lay_together(parameters: Sequence[torch.Tensor]) -> bool:
    first = parameters[0]
    for parameter in parameters:
        if (parameter.dtype, parameter.device, parameter.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
            return False
        # Parameters made in inference mode cannot be given other memory outside of it.
        if parameter.is_inference():
            return False
    # One parameter in two places has no two places in memory.
    if len({id(parameter) for parameter in parameters}) != len(parameters):
        return False
    # A copy that is captured runs at replay only: until then the weights would be garbage.
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    with torch.inference_mode(mode=False), torch.no_grad():
        together = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(together, [p.shape[0] for p in parameters]), strict=True):
            _give(parameter, part)
    return True


def _give(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    if parameter.is_cuda:
        # Offloading brings weights in on a stream of its own, which must not reuse this memory while it is read here.
        parameter.detach().record_stream(torch.cuda.current_stream(parameter.device))
    parameter.data = memory
