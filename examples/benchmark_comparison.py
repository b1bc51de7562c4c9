#!/usr/bin/env python
"""Stock Diffusers and rocm-sd in turns on this machine: python examples/benchmark_comparison.py

`rocm-sd bench emoji` does it with more care: pictures are compared first, and all is kept in a record.
"""

from functools import partial
from statistics import median
from timeit import timeit

from rocm_sd_ops import ROCmOptimizedPipeline

pipes = {"stock": ROCmOptimizedPipeline("emoji-sd").restore(), "rocm-sd": ROCmOptimizedPipeline("emoji-sd")}
draw = {name: partial(pipe, "a frog", num_inference_steps=5, guidance_scale=3.0) for name, pipe in pipes.items()}
turns = [{name: timeit(draw[name], number=1) for name in pipes} for _ in range(6)]
for name in pipes:  # the first turn is left out: first pictures pay for what later ones do not
    print(f"{name}: {median(turn[name] for turn in turns[1:]):.3f} s a picture")
