"""Diffusers' own pipelines, optimised from the start and wherever they are moved to: ROCm before the name of each."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers as host
from torch import nn

from rocm_sd.engine import Report, restore
from rocm_sd.errors import Unsupported
from rocm_sd.integrations.diffusers.keeping import Keeper
from rocm_sd.integrations.diffusers.loading import is_no_address, missing_model, single_file_class
from rocm_sd.integrations.diffusers.wrapping import ROCmOptimizedPipeline
from rocm_sd.models import EMBEDDED
from rocm_sd.models.emoji import MODEL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "ROCmFluxImg2ImgPipeline", "ROCmFluxInpaintPipeline", "ROCmFluxPipeline", "ROCmStableDiffusion3Img2ImgPipeline",
    "ROCmStableDiffusion3InpaintPipeline", "ROCmStableDiffusion3Pipeline",
    "ROCmStableDiffusionControlNetImg2ImgPipeline", "ROCmStableDiffusionControlNetInpaintPipeline",
    "ROCmStableDiffusionControlNetPipeline", "ROCmStableDiffusionImg2ImgPipeline", "ROCmStableDiffusionInpaintPipeline",
    "ROCmStableDiffusionPipeline", "ROCmStableDiffusionXLControlNetImg2ImgPipeline",
    "ROCmStableDiffusionXLControlNetInpaintPipeline", "ROCmStableDiffusionXLControlNetPipeline",
    "ROCmStableDiffusionXLImg2ImgPipeline", "ROCmStableDiffusionXLInpaintPipeline", "ROCmStableDiffusionXLPipeline",
]  # fmt: skip

# Of from_pretrained's options those that say where model_index.json is.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_OF_UNETS = {"vae", "unet", "text_encoder", "tokenizer"}
# SDXL's refiner, which begins with a picture, has the second text encoder alone.
_OF_REFINERS = {"vae", "unet", "text_encoder_2", "tokenizer_2"}
# Of their text encoders any may be missing.
_OF_TRANSFORMERS = {"vae", "transformer"}
# What their names begin with. The first that fits; a model of one of the last two is loaded by the class for the other.
_FAMILIES = ("Flux", "StableDiffusion3", "StableDiffusionXL", "StableDiffusion")
_XL, _SD = _FAMILIES[2:]
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
        try:
            index = stock.load_config(source, **{name: options[name] for name in _WHERE if name in options})
        except OSError as error:
            raise missing_model(source, error) from error
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
            kind = _fitting(cls, _family(single_file_class(path).__name__))
        elif is_no_address(pretrained_model_link_or_path) and not path.exists():
            raise missing_model(path)
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

    def report(self, *, verbose: bool = False) -> Report:
        """What was replaced, what was skipped, and why; the same as `rocm_sd.report(pipe)`."""
        return self._keeper.report(self, verbose=verbose)

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


class ROCmStableDiffusionPipeline(_Optimized, host.StableDiffusionPipeline):  # type: ignore[misc]
    """Diffusers' StableDiffusionPipeline for SD 1.5 and 2.1, optimised.

    `from_pretrained`, `from_single_file` and `from_pipe` also take `level` and `quality`, as `rocm_sd.optimize` does.
    Of an SDXL checkpoint they make a ROCmStableDiffusionXLPipeline; what neither class can run is refused with the
    class to use. So do the other classes here, each with its counterpart. The pipeline is optimised once it lies where
    it will run: when it is moved to a GPU, at the latest by its first call, and again after a move, another offload or
    another part.
    """


class ROCmStableDiffusionXLPipeline(_Optimized, host.StableDiffusionXLPipeline):  # type: ignore[misc]
    """Diffusers' StableDiffusionXLPipeline, optimised; see ROCmStableDiffusionPipeline."""


# The same for each other pipeline of these families.
# fmt: off
class ROCmStableDiffusionImg2ImgPipeline(_Optimized, host.StableDiffusionImg2ImgPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionInpaintPipeline(_Optimized, host.StableDiffusionInpaintPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionControlNetPipeline(_Optimized, host.StableDiffusionControlNetPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionControlNetImg2ImgPipeline(_Optimized, host.StableDiffusionControlNetImg2ImgPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionControlNetInpaintPipeline(_Optimized, host.StableDiffusionControlNetInpaintPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionXLImg2ImgPipeline(_Optimized, host.StableDiffusionXLImg2ImgPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionXLInpaintPipeline(_Optimized, host.StableDiffusionXLInpaintPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionXLControlNetPipeline(_Optimized, host.StableDiffusionXLControlNetPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionXLControlNetImg2ImgPipeline(_Optimized, host.StableDiffusionXLControlNetImg2ImgPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusionXLControlNetInpaintPipeline(_Optimized, host.StableDiffusionXLControlNetInpaintPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusion3Pipeline(_Optimized, host.StableDiffusion3Pipeline): ...  # type: ignore[misc]
class ROCmStableDiffusion3Img2ImgPipeline(_Optimized, host.StableDiffusion3Img2ImgPipeline): ...  # type: ignore[misc]
class ROCmStableDiffusion3InpaintPipeline(_Optimized, host.StableDiffusion3InpaintPipeline): ...  # type: ignore[misc]
class ROCmFluxPipeline(_Optimized, host.FluxPipeline): ...  # type: ignore[misc]
class ROCmFluxImg2ImgPipeline(_Optimized, host.FluxImg2ImgPipeline): ...  # type: ignore[misc]
class ROCmFluxInpaintPipeline(_Optimized, host.FluxInpaintPipeline): ...  # type: ignore[misc]
# fmt: on


def _stock_of(cls: type) -> type:
    """The class of Diffusers that one of these, or a user's subclass of one, is derived from."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("diffusers."))


_BY_STOCK: dict[str, Any] = {_stock_of(kind).__name__: kind for kind in _Optimized.__subclasses__()}
# Diffusers goes by the name: it stands in a saved model_index.json, which must load without this package, and
# AutoPipelineForInpainting.from_pipe finds its own by it.
for _name, _kind in _BY_STOCK.items():
    _kind.__name__ = _name
    _kind.__doc__ = _kind.__doc__ or f"Diffusers' {_name}, optimised; see ROCmStableDiffusionPipeline."


def _family(name: str) -> str | None:
    return next((family for family in _FAMILIES if name.startswith(family)), None)


def _class_for(cls: type, parts: Iterable[str], named: str) -> Any:
    """`named`: the class that the model itself names."""
    parts = set(parts)
    stock = _stock_of(cls).__name__
    own, its = _family(stock), _family(named)
    if own not in {_XL, _SD}:
        missing = _OF_TRANSFORMERS - parts
    else:
        refines = "text_encoder_2" in parts and ("Img2Img" in stock or "Inpaint" in stock)
        missing = (_OF_REFINERS if refines else _OF_UNETS) - parts
        its = _XL if "text_encoder_2" in parts else _SD
    if missing:
        raise _refused(cls, f"this model, a {named} without {', '.join(sorted(missing))}", named)
    return _fitting(cls, its or own)


def _fitting(cls: type, family: str | None) -> Any:
    """The class itself, or a user's subclass of it, where it is of that family, or else its counterpart."""
    stock = _stock_of(cls).__name__
    own = _family(stock)
    if family == own:
        return cls
    if {family, own} != {_XL, _SD}:
        raise _refused(cls, f"a model of {family}", f"{family}Pipeline")
    return _BY_STOCK[stock.replace(str(own), str(family), 1)]


def _refused(cls: type, reason: str, named: str) -> Unsupported:
    ours = f" Or use ROCm{named}." if named in _BY_STOCK else ""
    return Unsupported(cls.__qualname__, reason, hint=_BY_HAND.format(named) + ours)


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
