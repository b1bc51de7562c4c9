from rocm_sd.ops.conv2d_8bit.op import conv2d_8bit

__all__ = ["conv2d_8bit"]
