from rocm_sd.ops.layer_norm_8bit.op import layer_norm_8bit

__all__ = ["layer_norm_8bit"]
