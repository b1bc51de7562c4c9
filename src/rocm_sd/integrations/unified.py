"""optimize(target) for whatever program hands it over: the integration is picked by what is given.

a Diffusers pipeline, or a torch module     optimised in place (rocm_sd.optimize)
a folder, a file, a hub id; else emoji-sd   loaded, as ROCmOptimizedPipeline; of ONNX models, as ROCmOnnxPipeline
ComfyUI's model or VAE                      an optimised copy, as its nodes give it
Automatic1111's model                       optimised in place, as its extension does
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from rocm_sd import engine
from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.models import EMBEDDED

__all__ = ["Integration", "integration_of", "optimize"]


class Integration(Enum):
    AUTOMATIC1111 = "automatic1111"
    COMFYUI = "comfyui"
    DIFFUSERS = "diffusers"
    FILES = "files"
    ONNX = "onnx"


def integration_of(target: Any) -> Integration:
    """Whose this is, by its attributes: no host program is imported for it."""
    if isinstance(target, (str, Path)):
        return Integration.ONNX if _is_onnx(target) else Integration.FILES
    # ComfyUI's VAE holds the patcher of its model.
    if callable(getattr(getattr(target, "patcher", target), "add_object_patch", None)):
        return Integration.COMFYUI
    unet = getattr(getattr(target, "model", None), "diffusion_model", None)
    if unet is not None and type(unet).__module__.partition(".")[0] in ("ldm", "sgm"):
        return Integration.AUTOMATIC1111
    return Integration.DIFFUSERS


def optimize(target: Any = EMBEDDED, optimization_level: str = "auto", quality: Any = "exact") -> Any:
    """The target itself, optimised, or what stands for it. `optimization_level` in any case: auto, Performance, MEMORY.

    Levels and qualities are those of `rocm_sd.optimize`. ONNX models have one level and no approximations.
    """
    level, kind = optimization_level.lower(), integration_of(target)
    require_one_of("optimization_level", level, engine.LEVELS)
    if kind is Integration.DIFFUSERS:
        return engine.optimize(target, level, quality)
    if kind is Integration.COMFYUI:
        from rocm_sd.integrations.comfyui.patching import optimize_handed  # noqa: PLC0415 -- in its host only

        return optimize_handed(target, level, quality)
    if kind is Integration.AUTOMATIC1111:
        return _in_automatic1111(target, level, quality)
    if kind is Integration.ONNX:
        return _of_onnx(target, level, quality)
    from rocm_sd.integrations.diffusers import ROCmOptimizedPipeline  # noqa: PLC0415 -- Diffusers takes seconds

    return ROCmOptimizedPipeline(target, level, quality)


def _is_onnx(target: str | Path) -> bool:
    from rocm_sd.onnx.layout import found_parts  # noqa: PLC0415

    folder = Path(target).expanduser()
    return folder.is_dir() and bool(found_parts(folder))


def _of_onnx(target: str | Path, level: str, quality: Any) -> Any:
    if (level, quality) != ("auto", "exact"):
        given = f"level {level} and quality {quality} of ONNX models"
        raise Unsupported("optimize", given, hint="Leave them out: ONNX Runtime plans its memory itself.")
    from rocm_sd.onnx import ROCmOnnxPipeline  # noqa: PLC0415

    return ROCmOnnxPipeline.from_pretrained(target)


def _in_automatic1111(sd_model: Any, level: str, quality: str) -> Any:
    from rocm_sd.integrations.a1111.switch import SWITCH, Wish  # noqa: PLC0415 -- in its host only
    from rocm_sd.integrations.ldm import quality_of  # noqa: PLC0415

    quality_of(quality)
    reason = SWITCH.settle(sd_model, Wish(level, quality))
    if reason is not None:
        raise Unsupported("optimize", f"this model in Automatic1111: {reason}")
    return sd_model
