from rocm_sd.ops.upsample.op import upsample

__all__ = ["upsample"]
