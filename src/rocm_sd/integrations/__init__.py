"""Level 5: where people use it. The only places that import Diffusers, ComfyUI or Automatic1111."""
