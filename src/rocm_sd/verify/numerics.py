"""The numerics gate of the proof ladder: the one that a self-test on the user's card holds a candidate to, too."""

from rocm_sd.ops.numerics import Comparison, compare, require

__all__ = ["Comparison", "compare", "require"]
