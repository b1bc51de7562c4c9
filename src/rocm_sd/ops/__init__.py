"""Level 3: the operators. Importing them needs no GPU and no Triton."""

from rocm_sd.ops.group_norm_silu import group_norm_silu
from rocm_sd.ops.registry import OPS

__all__ = ["OPS", "group_norm_silu"]
