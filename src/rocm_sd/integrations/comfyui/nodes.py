"""The nodes. Whatever goes wrong in them, the model goes on unchanged, and the reason is in the console and the report.

Names and shapes here are ComfyUI's: INPUT_TYPES, RETURN_TYPES, FUNCTION, CATEGORY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.engine import LEVELS, QUALITIES
from rocm_sd.errors import InvalidOption
from rocm_sd.integrations.comfyui import benchmark, patching
from rocm_sd.integrations.comfyui.host import belongs_to_the_host, say
from rocm_sd.integrations.ldm import in_words, quality_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

Inputs = dict[str, dict[str, Any]]

_CATEGORY = "ROCm Optimizations"
_LEVEL = (
    list(LEVELS),
    {
        "default": "auto",
        "tooltip": "auto: by the memory that is free. performance: holds memory for captured steps. memory: holds none."
        " The picture is the same at every level.",
    },
)
_QUALITY = (
    list(QUALITIES),
    {
        "default": "exact",
        "tooltip": "How far approximations may go. exact: none. high, balanced: some steps leave out deep layers or"
        " guidance, where that was measured for this model (rocm-sd tune --quality); elsewhere all is exact, and the"
        " report says so.",
    },
)
_IN_NUMBERS = (
    "STRING",
    {
        "default": "",
        "tooltip": "In place of quality, where it is not empty: a budget that was measured (psnr=32,ssim=0.97), or a"
        " setting to try (depth=1,every=3,order=1: one step of 3 computes all layers, the others the last 1 of the way"
        " up, with deep features extrapolated).",
    },
)


class _Optimizer:
    """Hands on a copy of its input with everything of ours in it."""

    CATEGORY = _CATEGORY
    RETURN_TYPES: tuple[str, ...] = ("MODEL",)
    FUNCTION = "optimize_model"

    def _or_unchanged(self, target: Any, optimize: Callable[[], Any]) -> tuple[Any]:
        """What `optimize` gives, or the target itself with the reason in the console."""
        try:
            return (optimize(),)
        except Exception as error:
            if belongs_to_the_host(error):
                raise
            say(f"{type(self).__name__} hands its input on unchanged. {error}")
            return (target,)


class _TextNode:
    """Gives text, and shows it on the node."""

    CATEGORY = _CATEGORY
    RETURN_TYPES = ("STRING",)
    OUTPUT_NODE = True

    @classmethod
    def IS_CHANGED(cls, **_inputs: Any) -> float:  # noqa: N802 -- the host's name
        """Never the same as before: a report grows with use, and a measurement is made anew each time."""
        return float("nan")

    @staticmethod
    def _shown(text: str) -> dict[str, Any]:
        return {"ui": {"text": [text]}, "result": (text,)}


class ROCmOptimizedAttention(_Optimizer):
    DESCRIPTION = "Computes the attention of any model with the fastest implementation on this card."
    OUTPUT_TOOLTIPS = ("The same model with optimised attention; the input is unchanged.",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 -- the host's name
        return {"required": {"model": ("MODEL", {"tooltip": "The model to optimise."}), "optimization_level": _LEVEL}}

    def optimize_model(self, model: Any, optimization_level: str = "auto") -> tuple[Any]:
        return self._or_unchanged(model, lambda: patching.optimize_attention(model, optimization_level))


class ROCmOptimizedModel(_Optimizer):
    DESCRIPTION = (
        "Everything for the diffusion model: attention, fused blocks, and steps that are captured once and replayed."
    )
    OUTPUT_TOOLTIPS = ("The same model, optimised; the input is unchanged.",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 -- the host's name
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to optimise. LoRA loaders may come before or after."}),
                "optimization_level": _LEVEL,
                "quality": _QUALITY,
            },
            "optional": {"quality_in_numbers": _IN_NUMBERS},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, quality: Any = None, quality_in_numbers: Any = None) -> bool | str:  # noqa: N802
        """Before anything runs. None: it comes from another node, and is looked at when it is there."""
        try:
            for text in (quality, quality_in_numbers):
                if text:
                    quality_of(text)
        except InvalidOption as error:
            return str(error)
        return True

    def optimize_model(
        self, model: Any, optimization_level: str = "auto", quality: str = "exact", quality_in_numbers: str = ""
    ) -> tuple[Any]:
        chosen = in_words(quality, quality_in_numbers)
        return self._or_unchanged(model, lambda: patching.optimize_model(model, optimization_level, chosen))


class ROCmOptimizedVAE(_Optimizer):
    DESCRIPTION = "Decodes and encodes with fused blocks. Tiling stays ComfyUI's own."
    RETURN_TYPES = ("VAE",)
    OUTPUT_TOOLTIPS = ("The same VAE, optimised; the input is unchanged.",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 -- the host's name
        return {"required": {"vae": ("VAE", {"tooltip": "The VAE to optimise."}), "optimization_level": _LEVEL}}

    def optimize_model(self, vae: Any, optimization_level: str = "auto") -> tuple[Any]:
        return self._or_unchanged(vae, lambda: patching.optimize_vae(vae, optimization_level))


class ROCmOptimizationReport(_TextNode):
    DESCRIPTION = (
        "Shows what was replaced, what was skipped and why. Place it after the sampler (connect a latent or an"
        " image to `after`) to see what happened in the run, too."
    )
    OUTPUT_TOOLTIPS = ("The report as text.",)
    FUNCTION = "report"

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 -- the host's name
        return {
            "required": {},
            "optional": {
                "model": ("MODEL", {"tooltip": "A model that a node of this category has optimised."}),
                "vae": ("VAE", {"tooltip": "A VAE that a node of this category has optimised."}),
                "after": ("*", {"tooltip": "Anything that is to be ready before the report is written."}),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict[str, str]) -> bool:  # noqa: ARG003, N802 -- the host's names
        """`after` takes anything."""
        return True

    def report(self, model: Any = None, vae: Any = None, after: Any = None) -> dict[str, Any]:  # noqa: ARG002
        lines: list[str] = []
        for name, target in (("model", model), ("VAE", vae)):
            found = None if target is None else patching.report_of(target)
            if found is not None:
                lines += found.lines()
            elif target is not None:
                lines.append(f"{name}: not optimised. If a node of ROCm Optimizations comes before, see the console.")
        return self._shown("\n".join(lines) or "Connect a model or a VAE.")


class ROCmBenchmark(_TextNode):
    DESCRIPTION = (
        "Times sampling with the model as ComfyUI runs it and as ROCmOptimizedModel does, in turns, on this card."
        " Numbers are compared first: where they differ, no speed is reported."
    )
    OUTPUT_TOOLTIPS = ("What was measured, as text.",)
    FUNCTION = "measure"

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 -- the host's name
        size = {"default": 512, "min": 64, "max": 2048, "step": 64}
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to measure, optimised or not."}),
                "steps": ("INT", {"default": 10, "min": 2, "max": 50, "tooltip": "Steps of each run."}),
                "repeats": ("INT", {"default": 5, "min": 1, "max": 50, "tooltip": "Runs of each of the two."}),
                "width": ("INT", size),
                "height": ("INT", size),
                "optimization_level": _LEVEL,
            },
        }

    def measure(
        self, model: Any, steps: int, repeats: int, width: int, height: int, optimization_level: str = "auto"
    ) -> dict[str, Any]:
        try:
            measured = benchmark.measure(model, steps, repeats, width, height, optimization_level)
            text = "\n".join(measured.lines())
        except Exception as error:
            if belongs_to_the_host(error):
                raise
            text = f"Nothing was measured. {error}"
            say(f"{type(self).__name__}: {text}")
        return self._shown(text)


NODE_CLASS_MAPPINGS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ROCmOptimizedModel, ROCmOptimizedAttention, ROCmOptimizedVAE, ROCmOptimizationReport, ROCmBenchmark,
    )
}  # fmt: skip
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "ROCmOptimizedModel": "ROCm Optimized Model",
    "ROCmOptimizedAttention": "ROCm Optimized Attention",
    "ROCmOptimizedVAE": "ROCm Optimized VAE",
    "ROCmOptimizationReport": "ROCm Optimization Report",
    "ROCmBenchmark": "ROCm Benchmark",
}
