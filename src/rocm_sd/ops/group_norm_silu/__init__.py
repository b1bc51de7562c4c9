from rocm_sd.ops.group_norm_silu.op import group_norm_silu

__all__ = ["group_norm_silu"]
