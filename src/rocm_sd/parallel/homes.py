"""Weights on this rank's card, and those that are at home: in the host's memory, where nothing computes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import nn

__all__ = ["called_alone", "computes_on", "on_card", "send_home", "size_of", "weights_of"]


def on_card(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The one way by which weights get there."""
    return weight.to(device)


def weights_of(modules: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """What modules themselves have, without their parts: parameters and buffers by their id, since some are shared."""
    return {id(weight): weight for module in modules for weight in _own(module)}


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def size_of(weights: Iterable[torch.Tensor]) -> int:
    """In bytes."""
    return sum(weight.numel() * weight.element_size() for weight in weights)


def computes_on(part: nn.Module, model: nn.Module, without: Collection[int] = ()) -> torch.device:
    """Where a part of a model computes, by its weights but those with these ids; one that has no others, as the model
    does.
    """
    for weights in (part.parameters(), model.parameters()):
        devices = [weight.device for weight in weights if id(weight) not in without]
        if devices:
            return next((device for device in devices if device.type != "cpu"), devices[0])
    return torch.device("cpu")


def send_home(module: nn.Module) -> Callable[[], None]:
    """To the host's memory; how to bring it back."""
    first = next(module.parameters(), None)
    if first is None or first.device.type == "cpu":
        return lambda: None
    device = first.device
    module.to("cpu")
    for part in called_alone(module):
        part.to(device)

    def back() -> None:
        module.to(device)

    return back


def called_alone(module: nn.Module) -> list[nn.Module]:
    """What pipelines call by its name, besides the module: with `clip_skip` a text encoder's last norm."""
    return [part for name, part in module.named_modules() if name.rpartition(".")[2] == "final_layer_norm"]
