"""Diffusers: pipelines that are optimised from the start; loading, schedulers, and pictures from them."""

from rocm_sd.integrations.diffusers.generation import Request, generate
from rocm_sd.integrations.diffusers.loading import load_pipeline
from rocm_sd.integrations.diffusers.pipelines import ROCmStableDiffusionPipeline, ROCmStableDiffusionXLPipeline
from rocm_sd.integrations.diffusers.schedulers import SCHEDULERS, set_scheduler
from rocm_sd.integrations.diffusers.wrapping import ROCmOptimizedPipeline

__all__ = [
    "SCHEDULERS",
    "ROCmOptimizedPipeline",
    "ROCmStableDiffusionPipeline",
    "ROCmStableDiffusionXLPipeline",
    "Request",
    "generate",
    "load_pipeline",
    "set_scheduler",
]
