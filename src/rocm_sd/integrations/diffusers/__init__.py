"""Diffusers: pipelines that are optimised from the start, an attention backend and processors; loading, schedulers."""

from rocm_sd.integrations.diffusers.attention_backend import register
from rocm_sd.integrations.diffusers.generation import SCHEDULERS, Request, generate, set_scheduler
from rocm_sd.integrations.diffusers.loading import load_pipeline
from rocm_sd.integrations.diffusers.pipelines import (
    ROCmFluxImg2ImgPipeline,
    ROCmFluxInpaintPipeline,
    ROCmFluxPipeline,
    ROCmStableDiffusion3Img2ImgPipeline,
    ROCmStableDiffusion3InpaintPipeline,
    ROCmStableDiffusion3Pipeline,
    ROCmStableDiffusionControlNetImg2ImgPipeline,
    ROCmStableDiffusionControlNetInpaintPipeline,
    ROCmStableDiffusionControlNetPipeline,
    ROCmStableDiffusionImg2ImgPipeline,
    ROCmStableDiffusionInpaintPipeline,
    ROCmStableDiffusionPipeline,
    ROCmStableDiffusionXLControlNetImg2ImgPipeline,
    ROCmStableDiffusionXLControlNetInpaintPipeline,
    ROCmStableDiffusionXLControlNetPipeline,
    ROCmStableDiffusionXLImg2ImgPipeline,
    ROCmStableDiffusionXLInpaintPipeline,
    ROCmStableDiffusionXLPipeline,
)
from rocm_sd.integrations.diffusers.processors import (
    ROCmAttnProcessor,
    ROCmFusedAttnProcessor,
    ROCmIPAdapterAttnProcessor,
    ROCmJointAttnProcessor,
    set_rocm_processors,
)
from rocm_sd.integrations.diffusers.shared import Drawing, SharedPipeline
from rocm_sd.integrations.diffusers.wrapping import ROCmOptimizedPipeline

__all__ = [
    "SCHEDULERS", "Drawing", "ROCmAttnProcessor", "ROCmFluxImg2ImgPipeline", "ROCmFluxInpaintPipeline",
    "ROCmFluxPipeline", "ROCmFusedAttnProcessor", "ROCmIPAdapterAttnProcessor", "ROCmJointAttnProcessor",
    "ROCmOptimizedPipeline", "ROCmStableDiffusion3Img2ImgPipeline", "ROCmStableDiffusion3InpaintPipeline",
    "ROCmStableDiffusion3Pipeline", "ROCmStableDiffusionControlNetImg2ImgPipeline",
    "ROCmStableDiffusionControlNetInpaintPipeline", "ROCmStableDiffusionControlNetPipeline",
    "ROCmStableDiffusionImg2ImgPipeline", "ROCmStableDiffusionInpaintPipeline", "ROCmStableDiffusionPipeline",
    "ROCmStableDiffusionXLControlNetImg2ImgPipeline", "ROCmStableDiffusionXLControlNetInpaintPipeline",
    "ROCmStableDiffusionXLControlNetPipeline", "ROCmStableDiffusionXLImg2ImgPipeline",
    "ROCmStableDiffusionXLInpaintPipeline", "ROCmStableDiffusionXLPipeline", "Request", "SharedPipeline", "generate",
    "load_pipeline", "register", "set_rocm_processors", "set_scheduler",
]  # fmt: skip
