from rocm_sd.ops.layer_norm_residual.op import layer_norm_residual

__all__ = ["layer_norm_residual"]
