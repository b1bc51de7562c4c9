"""How a table entry is written: groups of figures, each group under the document it was read in."""

from __future__ import annotations

from typing import Any

from rocm_sd.arch.types import UNCONFIRMED, Arch, Vendor

__all__ = ["Facts", "build", "cite", "peaks", "unconfirmed"]

Facts = dict[str, tuple[Any, str]]

_PEAK = "peak_tflops."


def cite(source: str, **figures: Any) -> Facts:
    return {field: (value, source) for field, value in figures.items()}


def peaks(source: str, **tflops: float) -> Facts:
    """Dense rates of the named product by dtype, in TFLOP/s (TOP/s for integers)."""
    return {f"{_PEAK}{dtype}": (rate, source) for dtype, rate in tflops.items()}


def unconfirmed(source: str) -> str:
    """Marks a figure that is generally known, but whose document was not read for this table."""
    return f"{UNCONFIRMED}: {source}"


def build(name: str, family: str, product: str, *groups: Facts) -> Arch:
    """Later groups overrule earlier ones, so that an entry is its family plus what differs."""
    facts: Facts = {}
    for group in groups:
        facts.update(group)
    figures = {field: value for field, (value, _) in facts.items() if not field.startswith(_PEAK)}
    rates = tuple((field[len(_PEAK) :], float(value)) for field, (value, _) in facts.items() if field.startswith(_PEAK))
    sources = tuple((field, source) for field, (_, source) in facts.items())
    return Arch(
        name=name,
        family=family,
        vendor=Vendor.of(name),
        known=True,
        product=product,
        peak_tflops=rates,
        sources=sources,
        **figures,
    )
