"""The founding documents' module of this name: one call for Diffusers, ComfyUI, Automatic1111 and ONNX Runtime.

>>> from unified_sd_optimization import optimize
>>> pipe = optimize(pipe)            # or ComfyUI's model or VAE, Automatic1111's model, a folder, a file, a hub id
"""

from rocm_sd.integrations.unified import Integration, integration_of, optimize

__all__ = ["Integration", "integration_of", "optimize"]
