from rocm_sd.ops.linear_residual.op import linear_residual
from rocm_sd.ops.linear_residual.packing import pack_linears, split_columns, split_heads

__all__ = ["linear_residual", "pack_linears", "split_columns", "split_heads"]
