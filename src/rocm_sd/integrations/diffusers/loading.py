"""load_pipeline(source) -> a Diffusers pipeline on its device, or an error that says what is wrong with the model.

save_single_file(pipe, file): Stable Diffusion 1.x as one checkpoint in the layout of the original code, which every UI
reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoPipelineForText2Image,
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import logging as transformers_logging

from rocm_sd import arch
from rocm_sd.errors import (
    FULL,
    CorruptModel,
    DeviceUnavailable,
    InvalidOption,
    ModelNotFound,
    NoDiskSpace,
    Unsupported,
    first_line,
)
from rocm_sd.integrations.diffusers import hub
from rocm_sd.models import ModelKind, ModelSource
from rocm_sd.models.single_file import Component, checkpoint_weights

__all__ = [
    "default_device", "default_dtype", "hush", "is_no_address", "load_clip", "load_pipeline", "missing_model",
    "save_single_file", "single_file_class", "single_file_weights",
]  # fmt: skip


def default_device(name: str | None = None) -> torch.device:
    """The GPU that torch sees, else the CPU; a device asked for by name must be there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InvalidOption("--device", name, ["cuda", "cpu"]) from None
    hint = "Type: rocm-sd info, to see which torch is installed, or use --device cpu."
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("torch sees no GPU.", hint=hint)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceUnavailable(f"torch sees {torch.cuda.device_count()} GPU(s), counted from 0.", hint=hint)
    if device.type not in {"cuda", "cpu"}:
        _require_usable(device, hint)
    return device


def _require_usable(device: torch.device, hint: str) -> None:
    """By trying: torch knows the names of many devices. Not on a GPU, where it would take memory that is not used."""
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise DeviceUnavailable(f"torch cannot use {device} here ({first_line(error)}).", hint=hint) from None


def default_dtype(device: torch.device) -> torch.dtype:
    """fp16 on a GPU; fp32 on a CPU, where torch has no fast fp16 convolution."""
    return torch.float32 if arch.detect(device).name == "cpu" else torch.float16


def load_pipeline(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype | None = None,
    config: str | None = None,
    *,
    kind: Any = AutoPipelineForText2Image,
) -> Any:
    """`config` is a Diffusers folder whose configs and tokenizer fit a single-file checkpoint, which has none.

    `kind` loads a folder or a hub id: as text to image, or with DiffusionPipeline as what the model itself names.
    """
    dtype = dtype or default_dtype(device)
    asks_the_hub = source.kind is ModelKind.HUB or (source.kind is ModelKind.FILE and config is None)
    unreachable = hub.why_unreachable() if asks_the_hub else None
    try:
        pipe = _load(source, dtype, config, kind, local=unreachable is not None)
    except OSError as error:
        if error.errno in FULL:
            raise NoDiskSpace(source.location) from error
        raise _explained(source, error, unreachable) from error
    # What Diffusers raises of a config that is not as it expects is as good as any.
    except (
        SafetensorError,
        ValueError,
        LookupError,
        RuntimeError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise _explained(source, error, unreachable) from error
    return pipe.to(device)


def hush() -> None:
    """No bars and no advice from the host libraries: for the command line, which has bars and words of its own."""
    for host in (diffusers_logging, transformers_logging):
        host.set_verbosity_error()
        host.disable_progress_bar()
    hub.hush_hub()


def load_clip(model: str) -> tuple[Any, Any]:
    """CLIP and its processor from a folder with weights, or by a hub id."""
    from transformers import CLIPModel, CLIPProcessor  # noqa: PLC0415 -- slow to import, and seldom asked for

    unreachable = None if Path(model).exists() else hub.why_unreachable()
    local = {"local_files_only": True} if unreachable is not None else {}
    try:
        clip = CLIPModel.from_pretrained(model, use_safetensors=True, **local)
        return _ClipFeatures(clip), CLIPProcessor.from_pretrained(model, **local)
    except (OSError, ValueError) as error:
        if unreachable is not None:
            raise _not_here(model, unreachable) from error
        raise ModelNotFound(
            f"{model} is no CLIP model ({first_line(error)}).",
            hint="Give the folder that holds its config and weights.",
        ) from error


class _ClipFeatures(nn.Module):
    """CLIP with features as plain tensors, which is what torchmetrics reads; transformers 5 wraps them."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        self.config = clip.config

    def get_image_features(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self._plain(self.clip.get_image_features(*arguments, **named))

    def get_text_features(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return self._plain(self.clip.get_text_features(*arguments, **named))

    @staticmethod
    def _plain(features: Any) -> torch.Tensor:
        tensor: torch.Tensor = features if isinstance(features, torch.Tensor) else features.pooler_output
        return tensor


def _load(source: ModelSource, dtype: torch.dtype, config: str | None, kind: Any, *, local: bool) -> Any:
    """`local`: nothing is asked of the hub, and its cache alone is looked at."""
    options: dict[str, Any] = {"local_files_only": True} if local or config is not None else {}
    if source.kind is ModelKind.FILE:
        # Without a folder Diffusers takes the configs of the nearest known model from the hub or its cache.
        options |= {} if config is None else {"config": config}
        return single_file_class(source.location).from_single_file(source.location, dtype=dtype, **options)
    options = options if source.kind is ModelKind.HUB else {}
    return kind.from_pretrained(source.location, dtype=dtype, use_safetensors=True, **options)


# The first that is found: a transformer lies where a UNet would. SDXL carries a second text encoder, which SD 1.5 and
# 2.1 have not.
_TELLING = (
    ("model.diffusion_model.joint_blocks.", StableDiffusion3Pipeline),
    ("model.diffusion_model.double_blocks.", FluxPipeline),
    ("double_blocks.", FluxPipeline),
    ("conditioner.embedders.1.", StableDiffusionXLPipeline),
    ("model.diffusion_model.", StableDiffusionPipeline),
)


def single_file_class(path: str | Path) -> Any:
    """The text-to-image pipeline of Diffusers that a checkpoint is for, by the names of its weights."""
    with safe_open(path, framework="pt") as opened:
        names = list(opened.keys())
    for beginning, kind in _TELLING:
        if any(name.startswith(beginning) for name in names):
            return kind
    raise CorruptModel(
        f"{path} is not a Stable Diffusion checkpoint: it has no model.diffusion_model weights.",
        hint="Give a full checkpoint; a LoRA or a VAE alone is not one.",
    )


def save_single_file(pipe: Any, file: Path) -> None:
    save_file(single_file_weights(pipe), file)


def single_file_weights(pipe: Any) -> dict[str, torch.Tensor]:
    if getattr(pipe, "text_encoder_2", None) is not None or not hasattr(pipe, "unet"):
        raise Unsupported("A checkpoint of one file", f"a {type(pipe).__name__}: it takes Stable Diffusion 1.x")
    return checkpoint_weights(*(Component(p.config, p.state_dict()) for p in (pipe.unet, pipe.vae, pipe.text_encoder)))


class _MissingModel(ModelNotFound, OSError, ValueError):
    """Also what Diffusers itself raises where a model or a file is missing: code that catches those goes on working."""


def missing_model(location: object, error: OSError | None = None) -> Exception:
    """The error of a pipeline's own class, in words that say which of the two it is: not there, or not to be reached.

    Diffusers says of a hub that cannot be reached that the model has no file of that name.
    """
    if Path(str(location)).exists() and error is not None:
        return error
    if is_no_address(location):
        return _MissingModel(f"There is no model at {location}.", hint="Check the path, or give a hub id: owner/name.")
    reason = "" if error is None else f" ({first_line(error)})"
    if isinstance(getattr(error, "__context__", None), LocalEntryNotFoundError):
        reason = ": the hub cannot be reached, and there is no copy of it on this machine"
    return _MissingModel(
        f"{location} could not be loaded{reason}.", hint="Check the name and the connection, or give a local folder."
    )


def is_no_address(location: object) -> bool:
    """A path on this machine, not a hub id or a link: by how it begins and ends."""
    text = str(location)
    if text.startswith(("http://", "https://", "hf.co/", "huggingface.co/")):
        return False
    return text.startswith((".", "/", "~")) or Path(text).is_absolute() or text.count("/") != 1


def _not_here(model: str, unreachable: str) -> Exception:
    return ModelNotFound(
        f"{model} is not on this machine, and {hub.endpoint()} cannot be reached ({unreachable}).",
        hint="Connect once, or give a local folder or a .safetensors file. emoji-sd is built in and needs no network.",
    )


def _explained(source: ModelSource, error: Exception, unreachable: str | None) -> Exception:
    if source.kind is ModelKind.HUB and unreachable is not None:
        return _not_here(source.location, unreachable)
    if source.kind is ModelKind.HUB:
        return ModelNotFound(
            f"{source.location} could not be loaded from the hub ({first_line(error)}).",
            hint="Check the name and the connection, or give a local folder.",
        )
    if isinstance(error, LocalEntryNotFoundError) or (unreachable is not None and isinstance(error, OSError)):
        return ModelNotFound(
            f"{source.location} has no configs inside, and the hub that has them cannot be reached.",
            hint="Connect once, or give --config FOLDER: the Diffusers folder of a model of the same architecture.",
        )
    return CorruptModel(
        f"{source.location} could not be loaded ({first_line(error)}).", hint="Copy or download the model again."
    )
