"""Text encoders and safety checkers: no rule is for their layers, and on a GPU their calls are replayed from graphs.

They run once or twice a picture: what they cost is launching some hundred small kernels. Of a safety checker it is the
vision model that is captured; what it does with the picture afterwards is for its own code, on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rocm_sd.engine.capture import moves_weights, why_foreign_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["captured_encoders", "encoder_notes", "encoders", "why_not_captured"]

_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")
_CHECKER = "safety_checker"
_PACKAGES = frozenset({"bitsandbytes", "diffusers", "peft", "rocm_sd", "torch", "transformers"})
# Hooks by which transformers itself collects hidden states: what they collect is part of the answer.
_COLLECTING = "transformers.utils.output_capturing"


def encoders(target: Any) -> dict[str, nn.Module]:
    """Of a pipeline, by name: "text_encoder (CLIPTextModel)". Models of other packages than transformers are not known.

    A bare module has none: whoever optimises a text encoder alone gets what rules there are for it.
    """
    parts: Mapping[str, Any] = {} if isinstance(target, nn.Module) else target.components
    found = {name: parts.get(name) for name in _TEXT}
    found[_CHECKER] = getattr(parts.get(_CHECKER), "vision_model", None)
    return {
        f"{name} ({type(parts[name]).__name__})": model
        for name, model in found.items()
        if isinstance(model, nn.Module) and type(model).__module__.startswith("transformers.")
    }


def captured_encoders(target: Any, device: torch.device) -> dict[nn.Module, str]:
    """Those whose calls can be captured on this device, with their names: others lie elsewhere between their calls."""
    return {model: name for name, model in encoders(target).items() if _lies_on(model, device)}


def _lies_on(model: nn.Module, device: torch.device) -> bool:
    weight = next(model.parameters(), None)
    return weight is not None and weight.device == device


def why_not_captured(model: nn.Module) -> str | None:
    """Asked before a capture; what comes later makes the graph stale."""
    if moves_weights(model):
        return "its weights are moved around its calls"
    return why_foreign_layer(model, _PACKAGES, known_hooks=_COLLECTING)


def encoder_notes(target: Any, captured: Mapping[nn.Module, str], why_not: str) -> Callable[[], list[str]]:
    """`why_not`: of all those that are not captured, in words. What their graphs did is noted with the graphs."""
    sentences = []
    for name, model in encoders(target).items():
        what = "its vision model's calls" if name.startswith(_CHECKER) else "its calls"
        done = f"{what} are captured" if model in captured else f"it runs as stock does ({why_not})"
        sentences.append(f"{name}: no rule is for its layers; {done}")
    return lambda: sentences
