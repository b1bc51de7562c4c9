"""How an entry of the table is written: groups of figures, each group under the document it was read in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.arch.types import UNCONFIRMED, Arch, Vendor

if TYPE_CHECKING:
    from rocm_sd.arch.types import Fp8, MatrixUnit

__all__ = ["Chip", "Figures", "cite", "matrix", "peaks", "unconfirmed"]

Figures = dict[str, tuple[Any, str]]

_PEAK = "peak_tflops."


def cite(source: str, **figures: Any) -> Figures:
    return {field: (value, source) for field, value in figures.items()}


def matrix(source: str, unit: MatrixUnit, dtypes: str, fp8: Fp8) -> Figures:
    """The matrix instructions, with their dtypes as words: with them came bfloat16, on every chip that has it."""
    words = frozenset(dtypes.split())
    return cite(source, matrix_unit=unit, matrix_dtypes=words, fp8=fp8, has_bf16="bfloat16" in words)


def peaks(source: str, **tflops: float) -> Figures:
    """Dense rates of the named product by dtype, in TFLOP/s (TOP/s for integers)."""
    return {f"{_PEAK}{dtype}": (rate, source) for dtype, rate in tflops.items()}


def unconfirmed(source: str) -> str:
    """Marks a figure that is generally known, but whose document was not read for this table."""
    return f"{UNCONFIRMED}: {source}"


@dataclass(frozen=True)
class Chip:
    name: str
    family: str
    product: str

    def of(self, *groups: Figures) -> Arch:
        """Its entry. Later groups overrule earlier ones, so that an entry is its family plus what differs."""
        merged: Figures = {}
        for group in groups:
            merged.update(group)
        figures = {field: value for field, (value, _) in merged.items() if not field.startswith(_PEAK)}
        rates = {field: float(value) for field, (value, _) in merged.items() if field.startswith(_PEAK)}
        return Arch(
            **vars(self),
            vendor=Vendor.of(self.name),
            known=True,
            peak_tflops=tuple((field.removeprefix(_PEAK), rate) for field, rate in rates.items()),
            sources=tuple((field, source) for field, (_, source) in merged.items()),
            **figures,
        )
