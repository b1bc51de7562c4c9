from rocm_sd.ops.geglu.op import geglu

__all__ = ["geglu"]
