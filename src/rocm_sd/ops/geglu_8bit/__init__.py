from rocm_sd.ops.geglu_8bit.op import geglu_8bit

__all__ = ["geglu_8bit"]
