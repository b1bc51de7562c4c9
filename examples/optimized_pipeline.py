#!/usr/bin/env python
"""Any model by its name, at a level, with another scheduler, and stock again: python examples/optimized_pipeline.py

ROCmOptimizedPipeline stands for the pipeline of Diffusers: calls and attributes go where they always went.
"""

from diffusers import EulerDiscreteScheduler

from rocm_sd_ops import ROCmOptimizedPipeline

pipe = ROCmOptimizedPipeline("emoji-sd", optimization_level="memory")
pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
for name in ("frog", "red apple"):
    pipe(f"a {name}", num_inference_steps=20, guidance_scale=3.0).images[0].save(f"{name}.png")
print(pipe.report())
print(f"restored: {type(pipe.restore()).__name__}")  # as it was loaded, to go on with or to save
