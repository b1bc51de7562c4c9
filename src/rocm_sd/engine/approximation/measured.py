"""Settings that were found on the user's own model, kept beside the measurements of kernels with their evidence."""

from __future__ import annotations

import hashlib
import json
import logging
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from rocm_sd import files
from rocm_sd.engine.approximation.combined import Approximation
from rocm_sd.engine.approximation.shipped import Setting, as_given, cost_in_words, shipped
from rocm_sd.errors import RocmSdError
from rocm_sd.plain_json import NotPlain, parsed
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from pathlib import Path

    from rocm_sd.engine.approximation.skipping import Skipping

__all__ = ["fingerprint", "known", "known_with_plan", "measured", "remember", "weight_bytes"]

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
        told.update(weight_bytes(weight))
    return told.hexdigest()[:24]


def weight_bytes(weight: torch.Tensor) -> bytes:
    """As the shortest dtype that models come in has them."""
    raw: bytes = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
    return raw


def _weight(model: Any, *paths: str) -> Any:
    """That of the first layer that the model has; a LoRA's layer has the model's own inside."""
    for path in paths:
        layer = model
        for name in path.split("."):
            layer = getattr(layer, name, None)
        if layer is not None:
            return getattr(getattr(layer, "base_layer", layer), "weight", None)
    return None


def measured(model: Any, quality: str, plan: str | None = None) -> list[Setting]:
    """Those of this model, the one with the most steps last. `plan`: of several GPUs, None for one."""
    mine = fingerprint(model)
    entries = [entry for entry in _entries() if mine is not None and entry.get("model") == mine]
    entries = [entry for entry in entries if entry.get("plan") == plan]
    found = [_setting(entry) for entry in entries if entry.get("quality") == quality]
    return sorted((setting for setting in found if setting is not None), key=lambda setting: setting.from_steps)


def _setting(entry: dict[str, Any]) -> Setting | None:
    try:
        steps = entry["steps"]
        if type(steps) is not int or steps < 1:
            raise ValueError(f"{steps!r} is no number of steps")  # noqa: TRY301 -- left out as all that is wrong is
        why = f"measured here: {entry['why']}"
        return Setting(steps, Approximation.from_dict(entry["approximation"]), why, _cost(entry.get("evidence")))
    except (KeyError, TypeError, ValueError, AttributeError, RocmSdError) as error:
        log.warning("an entry of %s is left out: %s", _file(), error)
        return None


def _cost(evidence: Any) -> str:
    """Of a file that anyone may have changed: no scores, no cost."""
    if not isinstance(evidence, dict):
        return ""
    psnr, ssim = evidence.get("psnr_db"), evidence.get("ssim")
    if not _are_numbers(psnr) or not _are_numbers(ssim):
        return ""
    return cost_in_words(median(psnr), fmean(ssim))


def _are_numbers(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and bool(values) and all(type(value) in {int, float} for value in values)


def remember(
    model: Any, quality: str, steps: int, approximation: Approximation, why: str, evidence: dict[str, Any],
    plan: str | None = None,
) -> Path:  # fmt: skip
    """In place of what was known for such pictures; the file that has it now."""
    key = {"model": fingerprint(model), "quality": quality, "steps": steps, "plan": plan}
    others = [entry for entry in _entries() if {name: entry.get(name) for name in key} != key]
    told = {name: value for name, value in key.items() if value is not None}
    entry = {**told, "approximation": approximation.to_dict(), "why": why, "evidence": evidence}
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
    """On one GPU: what was measured here and what is shipped, the one with the most steps last; of two for the same,
    ours. Where ours are in eight bits, ours alone: weights are the same for every number of steps, and what is shipped
    was measured with others.
    """
    ours = measured(model, quality)
    methods = [one.approximation for one in ours]
    coarse = any(one.eight_bits or one.eight_bit_decoder or one.eight_bit_encoder for one in methods)
    theirs = [] if coarse else shipped(model, quality)
    return sorted([*theirs, *ours], key=lambda setting: setting.from_steps)


def known_with_plan(model: Any, quality: str | Skipping | Approximation, plan: str) -> list[Setting]:
    """Where several GPUs draw by this plan: as given, or as it was measured with them."""
    if not isinstance(quality, str):
        return [as_given(quality)]
    return [] if quality == "exact" else measured(model, quality, plan)
