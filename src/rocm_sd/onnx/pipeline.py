"""ROCmOnnxPipeline: a folder of ONNX models as a pipeline of Diffusers, whose models ONNX Runtime computes.

    from rocm_sd.onnx import ROCmOnnxPipeline

    pipe = ROCmOnnxPipeline.from_pretrained("emoji-sd-onnx")
    pipe("a frog on a pink background", generator=torch.Generator().manual_seed(0)).images[0]
    pipe("a frog on a blue background", image=picture, strength=0.6).images[0]

Schedulers, seeds, guidance and callbacks are Diffusers' own.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import transformers
from transformers import CLIPTextConfig

from rocm_sd.errors import CorruptModel, DeviceUnavailable, ModelNotFound, Unsupported
from rocm_sd.onnx import layout, providers
from rocm_sd.onnx.adapters import SafetyCheckerPart, TextEncoderPart, UNetPart, VaePart
from rocm_sd.onnx.exporting import FINAL_NORM
from rocm_sd.onnx.fusions import providers as fused_ops
from rocm_sd.onnx.providers import AUTO
from rocm_sd.onnx.sessions import Session
from rocm_sd.onnx.whole import WholePicture
from rocm_sd.plain_json import read_json

if TYPE_CHECKING:
    from rocm_sd.onnx.providers import Provider

__all__ = ["ROCmOnnxPipeline"]

log = logging.getLogger("rocm_sd")
_TEXT_TO_IMAGE = {"sd": diffusers.StableDiffusionPipeline, "sdxl": diffusers.StableDiffusionXLPipeline}
_IMAGE_TO_IMAGE = {"sd": diffusers.StableDiffusionImg2ImgPipeline, "sdxl": diffusers.StableDiffusionXLImg2ImgPipeline}
# Of model_index.json, what a pipeline is told beside its models.
_TOLD = ("requires_safety_checker", "force_zeros_for_empty_prompt", "requires_aesthetics_score")
_REST = ("scheduler", "tokenizer", "tokenizer_2", "feature_extractor")


class ROCmOnnxPipeline:
    """Calls as Diffusers' text-to-image pipeline, or with `image` as its image-to-image one.

    What else Diffusers' pipeline has is had by the same name, such as `scheduler` and `set_progress_bar_config`.
    """

    def __init__(self, text_to_image: Any, image_to_image: Any, provider: Provider) -> None:
        self.pipe, self._image_to_image, self.provider = text_to_image, image_to_image, provider

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        provider: str = AUTO,
        *,
        graphs: bool = False,
        tuning: bool = False,
        verify: bool = False,
        threads: int = 0,
    ) -> ROCmOnnxPipeline:
        """`provider`: auto, cpu, migraphx, rocm, cuda or tensorrt; one asked for by name never falls back.

        `graphs`: the UNet's calls are captured, where the provider can. `tuning`: its tunable ops are tuned. `verify`:
        every file's digest is compared with the manifest's, and not only its size. `threads`: of a CPU; 0 is all.
        """
        made = _Folder(Path(folder).expanduser(), verify=verify, threads=threads)
        if provider != AUTO:
            return cls._with(made, made.provider(provider, graphs=graphs, tuning=tuning))
        names = providers.automatic()
        fitting = [name for name in names if made.runs_on(name)]
        if names and not fitting:
            raise made.fused_for_another(names[0])
        for name in fitting:
            found = cls._tried(made, name, graphs=graphs, tuning=tuning)
            if found is not None:
                if name != names[0] and names[0] not in fitting:
                    log.warning("%s computes, and not %s: %s", name, names[0], made.fused_for_another(names[0]))
                return found
        raise DeviceUnavailable(
            f"None of the providers of the installed onnxruntime can be used: {', '.join(names) or 'it has none'}.",
            hint="Type: pip install 'rocm-sd[onnx]'",
        )

    @classmethod
    def _tried(cls, made: _Folder, name: str, *, graphs: bool, tuning: bool) -> ROCmOnnxPipeline | None:
        """None where the provider is installed and its card or driver is not. What it cannot do is left out."""
        able = {"graphs": graphs and name in providers.CAPTURING, "tuning": tuning and name in providers.TUNABLE}
        try:
            found = cls._with(made, made.provider(name, **able))
        except DeviceUnavailable as error:
            log.info("%s", error.message)
            return None
        for option, asked in {"graphs": graphs, "tuning": tuning}.items():
            if asked and not able[option]:
                log.warning("%s has no effect: the provider %s has none.", option, name)
        return found

    @classmethod
    def _with(cls, made: _Folder, provider: Provider) -> ROCmOnnxPipeline:
        if made.manifest is not None and made.manifest.whole is not None:
            return cls(made.whole_picture(provider), _no_image_to_image, provider)
        flavour, components, told = made.components(provider)
        first = _TEXT_TO_IMAGE[flavour](**components, **_known(_TEXT_TO_IMAGE[flavour], told))
        second = partial(_IMAGE_TO_IMAGE[flavour], **components, **_known(_IMAGE_TO_IMAGE[flavour], told))
        return cls(first, second, provider)

    @cached_property
    def image_to_image(self) -> Any:
        """Diffusers' image-to-image pipeline of the same models."""
        return self._image_to_image()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named.get("image") is None:
            return self.pipe(*arguments, **{name: value for name, value in named.items() if name != "image"})
        other = self.image_to_image
        # Either may have been given another since.
        other.scheduler = self.pipe.scheduler
        other.safety_checker = getattr(self.pipe, "safety_checker", None)
        other.set_progress_bar_config(**getattr(self.pipe, "_progress_bar_config", {}))
        return other(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name in {"pipe", "_image_to_image", "provider"}:
            # Not there yet: a copy that is being made asks.
            raise AttributeError(name)
        return getattr(self.pipe, name)

    @property
    def scheduler(self) -> Any:
        return self.pipe.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.pipe.scheduler = scheduler

    @property
    def safety_checker(self) -> Any:
        return self.pipe.safety_checker

    @safety_checker.setter
    def safety_checker(self, checker: Any) -> None:
        self.pipe.safety_checker = checker


def _no_image_to_image() -> Any:
    raise Unsupported("One model of a whole picture", "an image to start from", hint="Export it without --single.")


def _known(kind: Any, told: dict[str, Any]) -> dict[str, Any]:
    """Of what model_index.json tells, the options that this pipeline has."""
    optional = {name: value for name, value in told.items() if name in kind.__init__.__code__.co_varnames}
    # A mark in each picture, by a package of its own, where that is installed: pictures would differ by machine.
    return optional | ({"add_watermarker": False} if "add_watermarker" in kind.__init__.__code__.co_varnames else {})


class _Folder:
    """An export, checked: what it holds, and the parts of a pipeline made of it."""

    def __init__(self, folder: Path, *, verify: bool, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.manifest = layout.require_export(folder)
        if self.manifest is not None:
            layout.require_sizes(folder, self.manifest)
            if verify:
                layout.require_digests(folder, self.manifest)
        self.index = self._json(folder / "model_index.json")
        listed = self.index.get("_class_name", "")
        if "unet" not in self.index or "Stable" not in str(listed):
            raise Unsupported("ROCmOnnxPipeline", f"a {listed or 'model of another kind'}", hint="Give SD or SDXL.")
        is_whole = self.manifest is not None and self.manifest.whole is not None
        self.parts = {} if is_whole else layout.require_parts(folder, self.manifest, self.index)

    def provider(self, name: str, *, graphs: bool, tuning: bool) -> Provider:
        found = providers.named(name, graphs=graphs, tuning=tuning)
        if not self.runs_on(name):
            raise self.fused_for_another(name)
        return found

    def runs_on(self, provider: str) -> bool:
        """A plain export runs everywhere; a fused one where its ops have kernels."""
        if self._fused_for is None:
            return True
        return provider in fused_ops.PROVIDERS and fused_ops.PROVIDERS[provider].runs(self._fused_for)

    def fused_for_another(self, provider: str) -> Unsupported:
        assert self._fused_for is not None
        fuse = f"rocm-sd onnx optimize EXPORT {self.folder}-{provider} --provider {provider}"
        return Unsupported(
            f"The provider {provider}",
            f"all ops of {self.folder}, which was fused for {self._fused_for.name}",
            hint=f"Fuse the plain export for it: {fuse}"
            if provider in fused_ops.PROVIDERS
            else "Run the plain export.",
        )

    @cached_property
    def _fused_for(self) -> fused_ops.Ops | None:
        optimized = self.manifest.optimized if self.manifest is not None else None
        if optimized is None:
            return None
        name = optimized.get("provider") if isinstance(optimized, dict) else None
        if not isinstance(name, str) or name not in fused_ops.PROVIDERS:
            raise CorruptModel(f"{self.folder} was fused for {name}, which is not known.", hint="Optimize it again.")
        return fused_ops.PROVIDERS[name]

    def components(self, provider: Provider) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The family, the models and the rest by Diffusers' names, and what else the pipeline is told."""
        flavour = "sdxl" if "text_encoder_2" in self.index else "sd"
        # What runs once a picture is not worth a graph.
        plain = replace(provider, options=_without_graphs(provider), graphs=False)
        found: dict[str, Any] = {
            "unet": UNetPart(self._session("unet", provider), self._config("unet")),
            "vae": VaePart(
                self._session("vae_decoder", plain), partial(self._encoder, plain), self._config("vae_decoder")
            ),
            "text_encoder": self._text_encoder("text_encoder", plain),
        }
        if flavour == "sdxl":
            found["text_encoder_2"] = self._text_encoder("text_encoder_2", plain)
        else:
            found["safety_checker"] = None
            if "safety_checker" in self.parts:
                config = transformers.CLIPConfig(**self._config("safety_checker"))
                found["safety_checker"] = SafetyCheckerPart(self._session("safety_checker", plain), config)
        for name in _REST:
            if name != "tokenizer_2" or flavour == "sdxl":
                found[name] = self._loaded(name)
        told = {name: self.index[name] for name in _TOLD if name in self.index}
        return flavour, found, told

    def whole_picture(self, provider: Provider) -> WholePicture:
        assert self.manifest is not None
        if provider.graphs:
            raise Unsupported("graphs=True", "one model of a whole picture, which has a loop", hint="Leave it out.")
        facts = self.manifest.extra.get("picture")
        if not isinstance(facts, dict):
            raise CorruptModel(f"{self.folder / layout.MANIFEST} says nothing of its picture.", hint="Export it again.")
        tokenizers = [found for name in ("tokenizer", "tokenizer_2") if (found := self._loaded(name)) is not None]
        return WholePicture(Session(self.folder / layout.MODEL, provider, threads=self.threads), tokenizers, facts)

    def _session(self, name: str, provider: Provider) -> Session:
        return Session(self.parts[name], provider, threads=self.threads)

    def _encoder(self, provider: Provider) -> Session:
        if "vae_encoder" not in self.parts:
            raise ModelNotFound(
                f"{self.folder} has no vae_encoder, which a picture to start from needs.",
                hint="Export the model with: rocm-sd onnx export",
            )
        return self._session("vae_encoder", provider)

    def _text_encoder(self, name: str, provider: Provider) -> TextEncoderPart | None:
        if name not in self.parts:
            return None
        config = CLIPTextConfig(**self._config(name))
        return TextEncoderPart(self._session(name, provider), config, self.folder / name / FINAL_NORM)

    def _config(self, name: str) -> dict[str, Any]:
        return self._json(self.folder / name / "config.json")

    def _json(self, path: Path) -> dict[str, Any]:
        def unreadable(reason: str) -> CorruptModel:
            return CorruptModel(f"{path} cannot be read: {reason}.", hint="Export the model again.")

        read: dict[str, Any] = read_json(path, unreadable, of=dict, finite=False)
        return read

    def _loaded(self, name: str) -> Any:
        """By the class that model_index.json names, of Diffusers or transformers alone."""
        if not layout.is_listed(self.index, name) or not (self.folder / name).is_dir():
            return None
        library, kind = self.index[name][:2]
        known = {"diffusers": diffusers, "transformers": transformers}
        found = getattr(known.get(library), str(kind), None)
        if found is None:
            raise Unsupported("ROCmOnnxPipeline", f"the {name} {library}.{kind}", hint="Export the model again.")
        return found.from_pretrained(self.folder / name)


def _without_graphs(provider: Provider) -> dict[str, str]:
    return {name: value for name, value in provider.options.items() if name not in providers.CAPTURING.values()}
