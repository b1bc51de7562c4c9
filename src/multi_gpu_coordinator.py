"""The founding documents' module of this name: `from multi_gpu_coordinator import MultiGPUCoordinator`."""

from rocm_sd.parallel.one_process import ModelParallelAttention, MultiGPUCoordinator

__all__ = ["ModelParallelAttention", "MultiGPUCoordinator"]
