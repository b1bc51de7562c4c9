from rocm_sd.ops.upsample_conv2d.op import parity_weights, upsample_conv2d

__all__ = ["parity_weights", "upsample_conv2d"]
