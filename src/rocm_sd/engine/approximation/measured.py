"""Settings that were found on the user's own model, kept beside the measurements of kernels with their evidence."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import files
from rocm_sd.engine.approximation.combined import Approximation
from rocm_sd.engine.approximation.shipped import Setting, shipped
from rocm_sd.errors import RocmSdError
from rocm_sd.plain_json import NotPlain, parsed
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fingerprint", "known", "measured", "remember"]

log = logging.getLogger(__name__)

# Of UNets, SD3's transformers and Flux's: the layer that the latents come into, and the one that they leave by.
_ENDS = (("conv_in", "pos_embed.proj", "x_embedder"), ("conv_out", "proj_out"))


def _file() -> Path:
    return default_path().with_name("quality.json")


def fingerprint(model: Any) -> str | None:
    """Of the weights at both ends of a UNet or a transformer, whatever dtype and device they have now; None where they
    lie on none, or are not known by name.
    """
    weights = [_weight(model, *paths) for paths in _ENDS]
    known = [weight for weight in weights if isinstance(weight, torch.Tensor) and weight.device.type != "meta"]
    if len(known) < len(weights):
        return None
    told = hashlib.sha256(type(model).__name__.encode())
    for weight in known:
        # As the shortest that models come in has them.
        told.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return told.hexdigest()[:24]


def _weight(model: Any, *paths: str) -> Any:
    """That of the first layer that the model has; a LoRA's layer has the model's own inside."""
    for path in paths:
        layer = model
        for name in path.split("."):
            layer = getattr(layer, name, None)
        if layer is not None:
            return getattr(getattr(layer, "base_layer", layer), "weight", None)
    return None


def measured(model: Any, quality: str) -> list[Setting]:
    """Those of this model, the one with the most steps last."""
    mine = fingerprint(model)
    entries = [entry for entry in _entries() if mine is not None and entry.get("model") == mine]
    found = [_setting(entry) for entry in entries if entry.get("quality") == quality]
    return sorted((setting for setting in found if setting is not None), key=lambda setting: setting.from_steps)


def _setting(entry: dict[str, Any]) -> Setting | None:
    try:
        return Setting(
            int(entry["steps"]), Approximation.from_dict(entry["approximation"]), f"measured here: {entry['why']}"
        )
    except (KeyError, TypeError, ValueError, AttributeError, RocmSdError) as error:
        log.warning("an entry of %s is left out: %s", _file(), error)
        return None


def remember(
    model: Any, quality: str, steps: int, approximation: Approximation, why: str, evidence: dict[str, Any]
) -> Path:
    """In place of what was known for such pictures; the file that has it now."""
    key = {"model": fingerprint(model), "quality": quality, "steps": steps}
    others = [entry for entry in _entries() if {name: entry.get(name) for name in key} != key]
    entry = {**key, "approximation": approximation.to_dict(), "why": why, "evidence": evidence}
    text = json.dumps({"settings": [*others, entry]}, indent=1, allow_nan=False)
    files.write_text(_file(), text + "\n")
    return _file()


def _entries() -> list[dict[str, Any]]:
    text = files.read_text(_file())
    if not text:
        return []
    try:
        settings = parsed(text)["settings"]
        return [entry for entry in settings if isinstance(entry, dict)]
    except (NotPlain, KeyError, TypeError) as error:
        log.warning("%s is left out: %s", _file(), error)
        return []


def known(model: Any, quality: str) -> list[Setting]:
    """What was measured here and what is shipped, the one with the most steps last; of two for the same, ours."""
    return sorted([*shipped(model, quality), *measured(model, quality)], key=lambda setting: setting.from_steps)
