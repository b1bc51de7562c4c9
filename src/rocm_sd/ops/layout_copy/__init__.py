from rocm_sd.ops.layout_copy.op import layout_copy

__all__ = ["layout_copy"]
