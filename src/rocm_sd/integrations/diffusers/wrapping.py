"""ROCmOptimizedPipeline: any Diffusers pipeline, given or loaded, optimised and used as if it were that pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers import DiffusionPipeline

from rocm_sd.errors import Unsupported
from rocm_sd.integrations.diffusers.keeping import Keeper
from rocm_sd.integrations.diffusers.loading import default_device, load_pipeline
from rocm_sd.models import EMBEDDED, resolve

if TYPE_CHECKING:
    import torch

    from rocm_sd.engine import Report

__all__ = ["ROCmOptimizedPipeline"]

_OWN = ("_pipeline", "_keeper")


class ROCmOptimizedPipeline:
    """`ROCmOptimizedPipeline(pipe)` or `ROCmOptimizedPipeline("folder, file.safetensors or hub id")`; without either it
    is the built-in emoji-sd.

    optimization_level: auto, performance or memory, in any case; quality: exact, high or balanced; both are those of
    `rocm_sd.optimize`.
    device, dtype: of a model that is loaded the GPU that torch sees, else the CPU, and float16 on a GPU; a pipeline
    that is given stays as it is unless they are named.

    Calls and attributes, set ones too, are the pipeline's own, so that `pipe.scheduler = ...` and
    `pipe.load_lora_weights(...)` work as always. It stays optimised where it is moved to.
    """

    _keeper: Keeper
    _pipeline: Any

    def __init__(
        self,
        pipeline: Any = EMBEDDED,
        optimization_level: str = "auto",
        quality: str = "exact",
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        object.__setattr__(self, "_keeper", Keeper(optimization_level.lower(), quality))
        if isinstance(pipeline, (str, Path)):
            there = default_device(None if device is None else str(device))
            pipeline = load_pipeline(resolve(pipeline), there, dtype, kind=DiffusionPipeline)
        elif isinstance(pipeline, ROCmOptimizedPipeline):
            pipeline = pipeline.pipeline
        if not isinstance(getattr(pipeline, "components", None), dict):
            raise Unsupported(
                "ROCmOptimizedPipeline",
                f"a {type(pipeline).__name__}: it takes a Diffusers pipeline, a folder, a file or a hub id",
                hint="For a UNet or a VAE alone there is rocm_sd.optimize(module).",
            )
        object.__setattr__(self, "_pipeline", pipeline)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)
        else:
            self._keeper.settle(pipeline, now=False)

    @property
    def pipeline(self) -> Any:
        """The pipeline itself."""
        return self._pipeline

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._keeper.settle(self._pipeline)
        return self._pipeline(*arguments, **named)

    def to(self, *arguments: Any, **named: Any) -> ROCmOptimizedPipeline:
        """As the pipeline's own; what was optimised for another place is optimised for this one."""
        self._keeper.moved(self._pipeline, lambda: self._pipeline.to(*arguments, **named))
        return self

    def report(self, *, verbose: bool = False) -> Report:
        """What was replaced, what was skipped, and why; the same as `rocm_sd.report(pipe)`."""
        return self._keeper.report(self._pipeline, verbose=verbose)

    def restore(self) -> Any:
        """The stock pipeline, as it was found."""
        self._keeper.restore(self._pipeline)
        return self._pipeline

    def save_pretrained(self, *arguments: Any, **named: Any) -> Any:
        """As the pipeline's own: what is saved is the stock model, which loads without this package."""
        return self._pipeline.save_pretrained(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not found here; a copy that is just being made has no pipeline yet.
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._pipeline, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._pipeline, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._pipeline, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._pipeline)})

    def __repr__(self) -> str:
        return f"ROCmOptimizedPipeline of {self._pipeline!r}"

    # Equal to the pipeline: rocm_sd.report and rocm_sd.restore find by it what was done to that.
    def __eq__(self, other: object) -> bool:
        return self._pipeline is (other._pipeline if isinstance(other, ROCmOptimizedPipeline) else other)

    def __hash__(self) -> int:
        return hash(self._pipeline)
