"""Which cards were sold against each other: a figure of one says something of another of its generation alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocm_sd.arch.types import Arch

__all__ = ["generation"]

# By family, after the cards that their makers compare at their launch: MI50 with those before Ampere (2018), MI100 and
# MI250 with A100 (2020, 2021), MI300X with H100 and RX 7900 with RTX 40 (2022, 2023), MI355X with B200 and RX 9070 with
# RTX 50 (2025).
_GENERATIONS = {
    "gcn5": 1, "turing": 1,
    "cdna1": 2, "cdna2": 2, "rdna2": 2, "ampere": 2,
    "cdna3": 3, "rdna3": 3, "rdna3.5": 3, "ada": 3, "hopper": 3,
    "cdna4": 4, "rdna4": 4, "blackwell": 4,
}  # fmt: skip


def generation(arch: Arch) -> int | None:
    """None of an architecture that is not known, and of a CPU."""
    return _GENERATIONS.get(arch.family) if arch.known else None
