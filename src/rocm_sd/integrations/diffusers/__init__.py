"""Diffusers: loading pipelines, their schedulers, and pictures from them."""

from rocm_sd.integrations.diffusers.generation import Request, generate
from rocm_sd.integrations.diffusers.loading import load_pipeline
from rocm_sd.integrations.diffusers.schedulers import SCHEDULERS, set_scheduler

__all__ = ["SCHEDULERS", "Request", "generate", "load_pipeline", "set_scheduler"]
