"""Bytes of a memory moved in units as wide as an access allows: a gather costs by the element, not by the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["UNITS", "numbers", "packed", "unit_of", "unit_views", "unpacked"]

UNITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""By bytes. 16 are moved as one complex number, the widest element that numpy has, and never computed with."""


def unit_views(base: NDArray[np.uint8]) -> dict[int, NDArray[Any]]:
    """The same bytes as units of every width."""
    return {width: base.view(kind) for width, kind in UNITS.items()}


def unit_of(addresses: NDArray[Any], element: int, count: int) -> int:
    """As many bytes as size and alignment of all lanes allow, at least an element."""
    together = int(np.bitwise_or.reduce(addresses, axis=None, initial=16)) | element * count
    return max(together & -together, element)


def numbers(units: NDArray[Any]) -> NDArray[Any]:
    """Units as integers, which compare bit by bit."""
    return units.view(np.uint64) if units.dtype == np.complex128 else units


def packed(values: NDArray[Any], unit: int, element: int) -> NDArray[Any]:
    """Elements [count, lanes] as units [units, lanes]."""
    per_unit = unit // element
    if per_unit == 1:
        return values
    grouped = values.reshape(-1, per_unit, values.shape[1]).swapaxes(1, 2)
    units: NDArray[Any] = np.ascontiguousarray(grouped).view(UNITS[unit])[..., 0]
    return units


def unpacked(units: NDArray[Any], unit: int, element: int) -> NDArray[Any]:
    """Units [units, lanes] as elements [count, lanes]."""
    per_unit = unit // element
    if per_unit == 1:
        return units
    elements = units.view(UNITS[element]).reshape(*units.shape, per_unit)
    several: NDArray[Any] = elements.swapaxes(1, 2).reshape(-1, units.shape[1])
    return several
