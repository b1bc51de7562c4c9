#!/usr/bin/env python
"""Draw a picture: python examples/basic_inference.py

emoji-sd is built in and needs no network and no GPU. A model of yours: its folder or hub id in place of emoji-sd, and
dtype=torch.float16 beside it on a GPU.
"""

import torch

import rocm_sd

pipe = rocm_sd.ROCmStableDiffusionPipeline.from_pretrained("emoji-sd")
pipe.to("cuda" if torch.cuda.is_available() else "cpu")  # "cuda" is torch's name for AMD and NVIDIA GPUs alike
seed = torch.Generator("cpu").manual_seed(0)
drawn = pipe("a frog on a pink background", num_inference_steps=20, guidance_scale=3.0, generator=seed)
drawn.images[0].save("frog.png")
print(rocm_sd.report(pipe))  # what was replaced, what was skipped, and why
