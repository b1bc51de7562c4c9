"""Diffusers' own text-to-image pipelines, optimised from the start and wherever they are moved to."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from torch import nn

from rocm_sd.engine import restore
from rocm_sd.errors import Unsupported
from rocm_sd.integrations.diffusers.keeping import Keeper
from rocm_sd.integrations.diffusers.loading import single_file_class
from rocm_sd.integrations.diffusers.wrapping import ROCmOptimizedPipeline
from rocm_sd.models import EMBEDDED
from rocm_sd.models.emoji import MODEL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rocm_sd.engine import Report

__all__ = ["ROCmStableDiffusionPipeline", "ROCmStableDiffusionXLPipeline"]

# Of from_pretrained's options those that say where model_index.json is.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_NEEDED = {"vae", "unet", "text_encoder", "tokenizer"}
_BY_HAND = "Load it with diffusers.{}.from_pretrained(...), then call rocm_sd.optimize(pipe)."
# Diffusers moves a pipeline before it hands it over: by then its keeper must be known.
_COMING: ContextVar[Keeper | None] = ContextVar("_COMING", default=None)


class _Optimized:
    """Stands before a pipeline of Diffusers among the bases of a class."""

    components: dict[str, Any]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *, level: str = "auto", quality: str = "exact", **options: Any
    ) -> Any:
        """As Diffusers' own, of a folder, a hub id, or emoji-sd, which is built in."""
        source = MODEL_FOLDER if str(pretrained_model_name_or_path) == EMBEDDED else pretrained_model_name_or_path
        stock: Any = super()
        if "custom_pipeline" in options:
            raise Unsupported(cls.__qualname__, "custom_pipeline", hint=_BY_HAND.format("DiffusionPipeline"))
        index = stock.load_config(source, **{name: options[name] for name in _WHERE if name in options})
        parts = (name for name, value in index.items() if isinstance(value, (list, tuple)) and value[0] is not None)
        kind = _class_for(cls, {*parts, *options}, index.get("_class_name", "DiffusionPipeline"))
        with _coming(level, quality) as keeper:
            return _kept(super(_Optimized, kind).from_pretrained(source, **options), keeper)  # type: ignore[misc]

    @classmethod
    def from_single_file(
        cls, pretrained_model_link_or_path: Any, *, level: str = "auto", quality: str = "exact", **options: Any
    ) -> Any:
        """As Diffusers' own, of a checkpoint in the layout of the original code."""
        kind, path = cls, Path(str(pretrained_model_link_or_path))
        if path.suffix == ".safetensors" and path.is_file():
            kind = _fitting(cls, single_file_class(path))
        load = super(_Optimized, kind).from_single_file  # type: ignore[misc]
        with _coming(level, quality) as keeper:
            return _kept(load(pretrained_model_link_or_path, **options), keeper)

    @classmethod
    def from_pipe(cls, pipeline: Any, *, level: str = "auto", quality: str = "exact", **options: Any) -> Any:
        """As Diffusers' own, but the parts keep their dtype where they all have one and no other is asked for.

        The parts are shared: the given pipeline runs on optimised parts too, until this one is restored. Where it was
        optimised before, this one takes its place.
        """
        parts = {name: part for name, part in pipeline.components.items() if part is not None}
        kind = _class_for(cls, {*parts, *options}, type(pipeline).__name__)
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        dtypes = {tensor.dtype for part in modules for tensor in part.parameters() if tensor.is_floating_point()}
        if len(dtypes) == 1 and not {"dtype", "torch_dtype"} & options.keys():
            # Diffusers would make float32 of a pipeline in float16, twice as large and slower.
            options["dtype"] = dtypes.pop()
        with _coming(level, quality) as keeper:
            # One that keeps itself optimised must know that it no longer should.
            keeps_itself = isinstance(pipeline, (_Optimized, ROCmOptimizedPipeline))
            pipeline = pipeline.restore() if keeps_itself else restore(pipeline)
            return _kept(super(_Optimized, kind).from_pipe(pipeline, **options), keeper)  # type: ignore[misc]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._keeper.settle(self)
        stock: Any = super()
        return stock.__call__(*arguments, **named)

    def to(self, *arguments: Any, **named: Any) -> Any:
        """As Diffusers' own; what was optimised for another place is optimised for this one."""
        stock: Any = super()
        return self._keeper.moved(self, lambda: stock.to(*arguments, **named))

    def enable_model_cpu_offload(self, *arguments: Any, **named: Any) -> None:
        stock: Any = super()
        # Also called after each picture and around the loading of a LoRA, to put the same offload there again.
        with self._keeper.undisturbed():
            stock.enable_model_cpu_offload(*arguments, **named)

    def enable_sequential_cpu_offload(self, *arguments: Any, **named: Any) -> None:
        stock: Any = super()
        with self._keeper.undisturbed():
            stock.enable_sequential_cpu_offload(*arguments, **named)

    def report(self) -> Report:
        """What was replaced, what was left alone, and why; the same as `rocm_sd.report(pipe)`."""
        return self._keeper.report(self)

    def restore(self) -> Any:
        """Bring back the stock pipeline, which it stays until `rocm_sd.optimize(pipe)`."""
        self._keeper.restore(self)
        return self

    @property
    def _keeper(self) -> Keeper:
        # Made on first use: Diffusers reads a pipeline's parts from the signature of __init__, which must stay stock's.
        kept = self.__dict__.get("_kept")
        if kept is None:
            kept = self._kept = _COMING.get() or Keeper()
        return kept


class ROCmStableDiffusionPipeline(_Optimized, StableDiffusionPipeline):  # type: ignore[misc]
    """Diffusers' StableDiffusionPipeline for SD 1.5 and 2.1, optimised.

    `from_pretrained`, `from_single_file` and `from_pipe` also take `level` and `quality`, as `rocm_sd.optimize` does.
    Of an SDXL checkpoint they make a ROCmStableDiffusionXLPipeline; what neither class can run is refused with the
    class to use. The pipeline is optimised once it lies where it will run: when it is moved to a GPU, at the latest by
    its first call, and again after a move, another offload or another part.
    """


class ROCmStableDiffusionXLPipeline(_Optimized, StableDiffusionXLPipeline):  # type: ignore[misc]
    """Diffusers' StableDiffusionXLPipeline, optimised; see ROCmStableDiffusionPipeline."""


# Diffusers goes by the name: it stands in a saved model_index.json, which must load without this package, and
# AutoPipelineForInpainting.from_pipe finds its own by it.
ROCmStableDiffusionPipeline.__name__ = StableDiffusionPipeline.__name__
ROCmStableDiffusionXLPipeline.__name__ = StableDiffusionXLPipeline.__name__


def _class_for(cls: type, parts: Iterable[str], named: str) -> Any:
    """`named`: the class that the model itself names."""
    missing = _NEEDED.difference(parts)
    if missing:
        reason = f"this model, a {named} without {', '.join(sorted(missing))}"
        raise Unsupported(cls.__qualname__, reason, hint=_BY_HAND.format(named))
    return _fitting(cls, StableDiffusionXLPipeline if "text_encoder_2" in parts else StableDiffusionPipeline)


def _fitting(cls: type, stock: Any) -> Any:
    """The class itself, or a subclass of a user's, where it runs what is found."""
    if issubclass(cls, stock):
        return cls
    return ROCmStableDiffusionXLPipeline if stock is StableDiffusionXLPipeline else ROCmStableDiffusionPipeline


@contextmanager
def _coming(level: str, quality: str) -> Iterator[Keeper]:
    keeper = Keeper(level, quality)
    before = _COMING.set(keeper)
    try:
        yield keeper
    finally:
        _COMING.reset(before)


def _kept(pipe: Any, keeper: Keeper) -> Any:
    pipe._kept = keeper  # noqa: SLF001 -- one of this module's own classes
    keeper.settle(pipe, now=False)
    return pipe
