"""A model's calls as graphs: captured once for each kind of call, looked at before each replay."""

from rocm_sd.engine.capture.captured import CapturedForward, bound, graphs_wanted
from rocm_sd.engine.capture.warmup import compile_kernels, start_compiling

__all__ = ["CapturedForward", "bound", "compile_kernels", "graphs_wanted", "start_compiling"]
