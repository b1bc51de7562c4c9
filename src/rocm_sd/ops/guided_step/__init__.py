from rocm_sd.ops.guided_step.op import guided_step

__all__ = ["guided_step"]
