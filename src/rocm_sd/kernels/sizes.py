"""Whole numbers for launchers. triton.cdiv and its like answer for compile-time values too, at 4 us a call: ten of them
took longer than the launches of a norm.
"""

from __future__ import annotations

__all__ = ["ceil_div", "power_of_2"]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(value - 1, 0).bit_length()
