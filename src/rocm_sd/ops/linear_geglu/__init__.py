from rocm_sd.ops.linear_geglu.op import linear_geglu

__all__ = ["linear_geglu"]
