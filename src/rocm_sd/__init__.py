"""Stable Diffusion on AMD GPUs: fast, small and trouble-free.

>>> import rocm_sd
>>> pipe = rocm_sd.optimize(pipe)  # the same picture, sooner
>>> print(rocm_sd.report(pipe))    # is it fast, and if not, why; verbose=True has every module
>>> pipe = rocm_sd.restore(pipe)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Approximation",
    "ROCmFluxImg2ImgPipeline",
    "ROCmFluxInpaintPipeline",
    "ROCmFluxPipeline",
    "ROCmStableDiffusion3Img2ImgPipeline",
    "ROCmStableDiffusion3InpaintPipeline",
    "ROCmStableDiffusion3Pipeline",
    "ROCmStableDiffusionControlNetImg2ImgPipeline",
    "ROCmStableDiffusionControlNetInpaintPipeline",
    "ROCmStableDiffusionControlNetPipeline",
    "ROCmStableDiffusionImg2ImgPipeline",
    "ROCmStableDiffusionInpaintPipeline",
    "ROCmStableDiffusionPipeline",
    "ROCmStableDiffusionXLControlNetImg2ImgPipeline",
    "ROCmStableDiffusionXLControlNetInpaintPipeline",
    "ROCmStableDiffusionXLControlNetPipeline",
    "ROCmStableDiffusionXLImg2ImgPipeline",
    "ROCmStableDiffusionXLInpaintPipeline",
    "ROCmStableDiffusionXLPipeline",
    "Skipping",
    "__version__",
    "detect",
    "load_eight_bits",
    "ops",
    "optimize",
    "parallel_report",
    "parallelize",
    "preview",
    "report",
    "restore",
    "save_eight_bits",
    "tile",
    "unparallelize",
    "untile",
]

if TYPE_CHECKING:
    from rocm_sd import ops
    from rocm_sd.arch import detect
    from rocm_sd.engine import (
        Approximation,
        Skipping,
        load_eight_bits,
        optimize,
        preview,
        report,
        restore,
        save_eight_bits,
        tile,
        untile,
    )
    from rocm_sd.integrations.diffusers import (
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
    from rocm_sd.parallel import parallel_report, parallelize, unparallelize

# Resolved on first use: importing rocm_sd costs nothing, and set-up reads arch/ before torch is installed.
_LAZY = {
    **{name: "rocm_sd.integrations.diffusers" for name in __all__ if name.startswith("ROCm")},
    "Approximation": "rocm_sd.engine",
    "Skipping": "rocm_sd.engine",
    "detect": "rocm_sd.arch",
    "load_eight_bits": "rocm_sd.engine",
    "optimize": "rocm_sd.engine",
    "parallel_report": "rocm_sd.parallel",
    "parallelize": "rocm_sd.parallel",
    "preview": "rocm_sd.engine",
    "report": "rocm_sd.engine",
    "restore": "rocm_sd.engine",
    "save_eight_bits": "rocm_sd.engine",
    "tile": "rocm_sd.engine",
    "unparallelize": "rocm_sd.parallel",
    "untile": "rocm_sd.engine",
}


# Reached as rocm_sd.ops.conv2d(...) after `import rocm_sd` alone.
_PACKAGES = ("ops",)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
