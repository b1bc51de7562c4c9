from rocm_sd.ops.attention.op import attention

__all__ = ["attention"]
