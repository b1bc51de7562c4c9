"""Put a denoiser's linears into 8 bits, and take them out again.

A short picture is drawn first (observing.py): of what came into each layer follow the scale of its x where one is
enough, what is smoothed, and which layers are too delicate and keep their dtype. The layers of 16 bits wait in the
host's memory, so that the device's peak falls; `restore` brings them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.arch import Fp8
from rocm_sd.engine.approximation.observing import NotObserved, Observed, observe, too_far
from rocm_sd.engine.installed import Installed
from rocm_sd.ops.quantize_rows.reference import LIMITS, quantize_rows
from rocm_sd.rewrite.eight_bits import EightBitLinear, lay_together, quantized
from rocm_sd.rewrite.layers import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Group", "format_of", "groups", "install"]

# So large is what came into a layer at most, over what came in while it was observed.
_HEADROOM = 2.0
_SMALLEST = 64  # of a layer's sides: below, there is nothing to gain
_BLOCKS = ("transformer_blocks", "single_transformer_blocks")


@dataclass(frozen=True)
class Group:
    """Layers of one input, by their names in the model."""

    names: tuple[str, ...]
    layers: tuple[nn.Linear, ...]

    def named(self) -> Iterator[tuple[str, nn.Linear]]:
        return zip(self.names, self.layers, strict=True)


def format_of(eight_bits: str, device: torch.device) -> torch.dtype:
    """Of fp8, the one that the device multiplies; elsewhere the common one, whose weights alone are 8 bits wide."""
    if eight_bits == "int8":
        return torch.int8
    return torch.float8_e4m3fnuz if arch.detect(device).fp8 is Fp8.FNUZ else torch.float8_e4m3fn


def groups(model: nn.Module) -> list[Group]:
    """The linears of a denoiser's transformer blocks that are nothing but a product, now."""
    found: list[Group] = []
    names = {module: name for name, module in model.named_modules()}
    for attention in (module for module in model.modules() if type(module).__name__ == "Attention"):
        qkv = [getattr(attention, name, None) for name in ("to_q", "to_k", "to_v")]
        # An attention to a text has another input for keys and values.
        own = getattr(attention, "is_cross_attention", None) is False
        for several in [qkv] if own else [qkv[:1], qkv[1:]]:
            layers = [layer for layer in several if _fits(layer)]
            if layers and len(layers) == len(several):
                found.append(Group(tuple(names[layer] for layer in layers), tuple(layers)))
    taken = {name for group in found for name in group.names}
    for name, module in model.named_modules():
        if any(f"{blocks}." in name for blocks in _BLOCKS) and name not in taken and _fits(module):
            found.append(Group((name,), (module,)))
    return found


def _fits(layer: Any) -> TypeGuard[nn.Linear]:
    return isinstance(layer, nn.Linear) and is_plain(layer) and min(layer.in_features, layer.out_features) >= _SMALLEST


def install(target: Any, model: nn.Module, eight_bits: str) -> tuple[Installed, str | None]:
    """And why it is not in 8 bits, in words, where it is not."""
    kind = type(model).__name__
    device = next(model.parameters()).device
    to = format_of(eight_bits, device)
    every = groups(model)
    if not every:
        return Installed(tuple, lambda: None), f"{kind} has no layers that can be put into {eight_bits}"
    try:
        seen = observe(target, {name: layer for group in every for name, layer in group.named()})
    except NotObserved as reason:
        return Installed(tuple, lambda: None), f"{kind} is not put into {eight_bits}: {reason}"
    delicate = too_far({group.names[0]: _errors(group, seen, to) for group in every})
    converted = [group for group in every if group.names[0] not in delicate]
    waiting = [_Waiting(model, group) for group in converted]
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    for group, one in zip(converted, waiting, strict=True):
        one.replace(_in_eight_bits(group, seen, to))
    after = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    layers = sum(len(group.names) for group in converted)

    def notes() -> Iterator[str]:
        kept = sum(len(group.names) for group in every) - layers
        yield (
            f"{kind}: {layers} layers multiply in {_name(to)}, weights {before / 2**20:.0f} -> {after / 2**20:.0f} MiB"
        )
        if kept:
            some = ", ".join(sorted(delicate)[:4])
            yield f"{kind}: {kept} layers keep their dtype, too delicate for {eight_bits}: {some}"

    def restore() -> None:
        for one in waiting:
            one.bring_back()

    return Installed(lambda: tuple(notes()), restore), None


def _name(to: torch.dtype) -> str:
    return str(to).removeprefix("torch.")


def _by_row(to: torch.dtype) -> bool:
    """int8 has a scale for each row. In fp8 a value has its own exponent: one scale for all loses nothing, and the
    libraries' products with one are the faster.
    """
    return to is torch.int8


def _x_scale(group: Group, seen: dict[str, Observed], to: torch.dtype) -> torch.Tensor | None:
    if _by_row(to):
        return None
    largest = seen[group.names[0]].largest
    return largest.new_tensor(max(float(largest) * _HEADROOM / LIMITS[_name(to)], 1e-12))


def _weights(group: Group, to: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of layers with one scale for all, the same one: so they can be read as one."""
    if _by_row(to):
        return [quantized(layer.weight, to, by_row=True) for layer in group.layers]
    q, scale = quantized(torch.cat([layer.weight for layer in group.layers]), to, by_row=False)
    parts = torch.split(q.view(torch.int8), [layer.out_features for layer in group.layers])
    return [(part.view(to), scale) for part in parts]


def _in_eight_bits(group: Group, seen: dict[str, Observed], to: torch.dtype) -> list[EightBitLinear]:
    x_scale = _x_scale(group, seen, to)
    made = [
        EightBitLinear(layer, weight, scale, x_scale)
        for layer, (weight, scale) in zip(group.layers, _weights(group, to), strict=True)
    ]
    if len(made) > 1 and _by_row(to):
        lay_together(made)
    return made


@torch.no_grad()
def _errors(group: Group, seen: dict[str, Observed], to: torch.dtype) -> float:
    """Of the group's results on the rows that were seen: the root mean square error over that of the results."""
    rows = seen[group.names[0]].rows
    exact = torch.cat([rows.double() @ layer.weight.detach().double().T for layer in group.layers], -1)
    made = [layer.dequantized(torch.float64) for layer in _in_eight_bits(group, seen, to)]
    x_scale = _x_scale(group, seen, to)
    q, own = quantize_rows(rows, _name(to), None if x_scale is None else x_scale.view(1))
    scale = own.double().unsqueeze(-1) if x_scale is None else x_scale.double()
    ours = torch.cat([(q.double() * scale) @ weight.T for weight in made], -1)
    return float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30))


class _Waiting:
    """The layers of one group, whose weights are in the host's memory while others stand in their places."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model, self._group = model, group
        self._standing: list[EightBitLinear] = []

    def replace(self, layers: Sequence[EightBitLinear]) -> None:
        self._standing = list(layers)
        for name, old, new in zip(self._group.names, self._group.layers, layers, strict=True):
            _put(self._model, name, new)
            old.weight.data = old.weight.data.to("cpu")

    def bring_back(self) -> None:
        for name, old, standing in zip(self._group.names, self._group.layers, self._standing, strict=True):
            old.weight.data = old.weight.data.to(standing.weight.device)
            # A LoRA or somebody else's layer may stand around ours by now.
            holder = _holder_of(self._model, name, standing)
            if holder is not None:
                holder[0]._modules[holder[1]] = old  # noqa: SLF001


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = layer  # noqa: SLF001 -- of a list its name is a number


def _holder_of(model: nn.Module, name: str, layer: nn.Module) -> tuple[nn.Module, str] | None:
    parent, _, last = name.rpartition(".")
    top = model.get_submodule(parent)
    if top._modules.get(last) is layer:  # noqa: SLF001
        return top, last
    for module in top.modules():
        for own, child in module._modules.items():  # noqa: SLF001
            if child is layer:
                return module, own
    return None
