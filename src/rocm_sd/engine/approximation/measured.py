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


def _file() -> Path:
    return default_path().with_name("quality.json")


def fingerprint(unet: Any) -> str | None:
    """Of the weights at both ends of a UNet, whatever dtype and device they have now; None where they lie on none."""
    layers = [unet.conv_in, unet.conv_out]
    if any(layer.weight.device.type == "meta" for layer in layers):
        return None
    told = hashlib.sha256(type(unet).__name__.encode())
    for layer in layers:
        # As the shortest that models come in has them.
        told.update(layer.weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return told.hexdigest()[:24]


def measured(unet: Any, quality: str) -> list[Setting]:
    """Those of this model, the one with the most steps last."""
    mine = fingerprint(unet)
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
    unet: Any, quality: str, steps: int, approximation: Approximation, why: str, evidence: dict[str, Any]
) -> Path:
    """In place of what was known for such pictures; the file that has it now."""
    key = {"model": fingerprint(unet), "quality": quality, "steps": steps}
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


def known(unet: Any, quality: str) -> list[Setting]:
    """What was measured here and what is shipped, the one with the most steps last; of two for the same, ours."""
    return sorted([*shipped(unet, quality), *measured(unet, quality)], key=lambda setting: setting.from_steps)
