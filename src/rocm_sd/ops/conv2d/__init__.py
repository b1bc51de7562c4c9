from rocm_sd.ops.conv2d.op import conv2d

__all__ = ["conv2d"]
