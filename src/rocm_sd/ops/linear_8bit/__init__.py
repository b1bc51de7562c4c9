from rocm_sd.ops.linear_8bit.op import linear_8bit

__all__ = ["linear_8bit"]
