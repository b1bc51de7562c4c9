"""Stable Diffusion by ONNX Runtime: exported, checked against torch, and run with Diffusers' own call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocm_sd.onnx.exporting import export_pipeline
    from rocm_sd.onnx.pipeline import ROCmOnnxPipeline
    from rocm_sd.onnx.single import export_single

__all__ = ["ROCmOnnxPipeline", "export_pipeline", "export_single"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: Diffusers takes seconds, and a manifest is read without it."""
    if name == "ROCmOnnxPipeline":
        from rocm_sd.onnx.pipeline import ROCmOnnxPipeline  # noqa: PLC0415

        return ROCmOnnxPipeline
    if name == "export_pipeline":
        from rocm_sd.onnx.exporting import export_pipeline  # noqa: PLC0415

        return export_pipeline
    if name == "export_single":
        from rocm_sd.onnx.single import export_single  # noqa: PLC0415

        return export_single
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
