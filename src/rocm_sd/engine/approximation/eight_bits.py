"""Put a denoiser's linears and the convolutions of a UNet or a VAE into 8 bits, and take them out again.

A short picture is drawn first (observing.py): of what came into each layer follow the scale of its x where one is
enough, what is smoothed, and which layers are too delicate and keep their dtype. The layers of 16 bits wait in the
host's memory, so that the device's peak falls; `restore` brings them back.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.arch import Fp8
from rocm_sd.engine.approximation.eight_bit_plans import Group, Planned, planned, weights
from rocm_sd.engine.approximation.measured import weight_bytes
from rocm_sd.engine.approximation.observing import NotObserved, observe, too_far
from rocm_sd.engine.installed import Approximated, Installed
from rocm_sd.rewrite.convolutions import unusual
from rocm_sd.rewrite.eight_bit_convolutions import EightBitConv2d, is_eight_bit_convolution
from rocm_sd.rewrite.eight_bits import (
    EightBitLayer,
    EightBitLinear,
    Origin,
    is_eight_bit,
    lay_together,
    rounds_x,
)
from rocm_sd.rewrite.layers import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "KEPT",
    "Group",
    "Kept",
    "Tried",
    "Waiting",
    "digest_of",
    "eight_bit_layers",
    "format_of",
    "groups",
    "in_eight_bits",
    "install",
    "is_copied_in_eight_bits",
    "ready",
]

_SMALLEST = 64  # of a layer's sides: below, there is nothing to gain
_BLOCKS = ("transformer_blocks", "single_transformer_blocks")
_ROWS = 4  # of a weight, from all over it, that tell it from another one


@dataclass(frozen=True)
class Kept:
    """Why a layer keeps its dtype, and what its error in 8 bits would be, where it is a number."""

    why: str
    error: float | None


# By model, and by the layer's name: those that keep their dtype in a model in 8 bits.
KEPT: WeakKeyDictionary[nn.Module, dict[str, Kept]] = WeakKeyDictionary()


# For which weights of 16 bits wait. A copy is not among them.
_STANDING: WeakSet[EightBitLayer] = WeakSet()


class Tried:
    """What short pictures have told of models. A model that is optimised anew in the middle of a picture is not tried
    on others meanwhile.
    """

    def __init__(self) -> None:
        self._planned: WeakKeyDictionary[nn.Module, tuple[Any, list[Planned]]] = WeakKeyDictionary()

    def planned(
        self, target: Any, model: nn.Module, every: Sequence[Group], to: torch.dtype, device: torch.device
    ) -> list[Planned]:
        """Of each group. Raises NotObserved where nothing could be drawn."""
        layers = {name: layer for group in every for name, layer in group.named()}
        asked = to, arch.detect(device), tuple(layers)
        known = self._planned.get(model)
        if known is None or known[0] != asked:
            encoded = any(name.startswith("encoder.") for name in layers)
            seen = observe(target, layers, decoded=hasattr(model, "decoder"), encoded=encoded)
            known = asked, planned(every, seen, to, device)
            self._planned[model] = known
        return known[1]


def format_of(eight_bits: str, device: torch.device) -> torch.dtype:
    """Of fp8, the one that the device multiplies; elsewhere the common one, whose weights alone are 8 bits wide."""
    if eight_bits == "int8":
        return torch.int8
    return torch.float8_e4m3fnuz if arch.detect(device).fp8 is Fp8.FNUZ else torch.float8_e4m3fn


def eight_bit_layers(model: nn.Module) -> dict[str, EightBitLayer]:
    """By their names in the model, as they are where no LoRA stands around them."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, EightBitLayer)}
    return {name.removesuffix(".base_layer"): layer for name, layer in found.items()}


def groups(model: nn.Module, fits: Callable[[Any], TypeGuard[nn.Linear | nn.Conv2d]] | None = None) -> list[Group]:
    """The linears of a denoiser's transformer blocks, and the convolutions of a UNet's ResNet blocks, that are nothing
    but a product, now; or those that fit.
    """
    fits = _fits if fits is None else fits
    found: list[Group] = []
    names = {module: name for name, module in model.named_modules()}
    for attention in (module for module in model.modules() if type(module).__name__ == "Attention"):
        qkv = [getattr(attention, name, None) for name in ("to_q", "to_k", "to_v")]
        # An attention to a text has another input for keys and values.
        own = getattr(attention, "is_cross_attention", None) is False
        for several in [qkv] if own else [qkv[:1], qkv[1:]]:
            layers = [layer for layer in several if fits(layer)]
            if layers and len(layers) == len(several):
                found.append(Group(tuple(names[layer] for layer in layers), tuple(layers)))
    taken = {name for group in found for name in group.names}
    for name, module in model.named_modules():
        inside = any(f"{blocks}." in name for blocks in _BLOCKS)
        # After a norm, which can round for it.
        convolves = type(module).__name__ == "ResnetBlock2D"
        for known, layer in ((name, module),) if inside else _convolutions(name, module) if convolves else ():
            if known not in taken and fits(layer):
                found.append(Group((known,), (layer,)))
    return found


def _convolutions(name: str, block: nn.Module) -> Iterator[tuple[str, Any]]:
    for own in ("conv1", "conv2"):
        yield f"{name}.{own}", getattr(block, own, None)


def _fits(layer: Any) -> TypeGuard[nn.Linear | nn.Conv2d]:
    if isinstance(layer, nn.Conv2d):
        usual = layer.kernel_size == (3, 3) and layer.stride == layer.padding == (1, 1) and unusual(layer) is None
        plain = usual and is_plain(layer) and "_conv_forward" not in layer.__dict__
        return plain and min(layer.in_channels, layer.out_channels) >= _SMALLEST
    return isinstance(layer, nn.Linear) and is_plain(layer) and min(layer.in_features, layer.out_features) >= _SMALLEST


def _is_in_eight_bits(layer: Any) -> TypeGuard[nn.Linear | nn.Conv2d]:
    return isinstance(layer, nn.Module) and (is_eight_bit(layer) or is_eight_bit_convolution(layer))


def install(
    target: Any, model: nn.Module, eight_bits: str, device: torch.device, tried: Tried, parts: tuple[str, ...] = ("",)
) -> tuple[Installed, str | None]:
    """And why it is not in 8 bits, in words, where it is not. `device`: where it will multiply, which its weights may
    not be on between its calls. `parts`: what the names of the layers begin with that are meant.
    """
    kind, to = type(model).__name__, format_of(eight_bits, device)
    every = [group for group in groups(model) if group.names[0].startswith(parts)]
    if not every:
        return Installed(tuple, lambda: None), f"{kind} has no layers that can be put into {eight_bits}"
    try:
        plans = tried.planned(target, model, every, to, device)
    except NotObserved as reason:
        return Installed(tuple, lambda: None), f"{kind} is not put into {eight_bits}: {reason}"
    errors = {group.names[0]: one.error for group, one in zip(every, plans, strict=True)}
    delicate = too_far(errors)
    converted = [(group, one) for group, one in zip(every, plans, strict=True) if group.names[0] not in delicate]
    waiting = [Waiting(model, group) for group, _ in converted]
    rounds = rounds_x(to, device)
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    _replace(waiting, (_in_eight_bits(group, one, to) for group, one in converted))
    after = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    layers = sum(len(group.names) for group, _ in converted)
    smoothed = sum(len(group.names) for group, one in converted if one.smoothing is not None)
    KEPT[model] = {
        name: Kept(f"too delicate for {eight_bits}", errors[first] if math.isfinite(errors[first]) else None)
        for first, *others in (group.names for group in every)
        if first in delicate
        for name in (first, *others)
    }

    def notes() -> Iterator[str]:
        kept = sum(len(group.names) for group in every) - layers
        size = f"{before / 2**20:.0f} -> {after / 2**20:.0f} MiB"
        yield f"{kind}: {_computed(layers, to, rounds=rounds)}, weights {size}"
        if not rounds:
            yield f"{kind}: {arch.detect(device).name} does not multiply {_name(to)}: weights alone are 8 bits wide"
        if smoothed:
            yield f"{kind}: {smoothed} of these layers are smoothed: columns that stand out are evened out with weights"
        if kept:
            some = ", ".join(sorted(delicate)[:4])
            yield f"{kind}: {kept} layers keep their dtype, too delicate for {eight_bits}: {some}"

    def restore() -> None:
        KEPT.pop(model, None)
        for one in waiting:
            one.bring_back()

    approximated = Approximated(f"{layers} layers in {_name(to)}")
    return Installed(lambda: tuple(notes()), restore, approximated=lambda: (approximated,)), None


def _computed(layers: int, to: torch.dtype, *, rounds: bool) -> str:
    return f"{layers} layers {'multiply in' if rounds else 'have weights of'} {_name(to)}"


def _replace(waiting: Sequence[Waiting], made: Iterable[Sequence[EightBitLayer]]) -> None:
    try:
        for one, layers in zip(waiting, made, strict=True):
            one.replace(layers)
            for layer in layers:
                layer.is_for_a_time = True
                _STANDING.add(layer)
    except BaseException:
        # Whoever called has nothing yet to bring back the 16 bits with.
        for one in waiting:
            one.bring_back()
        raise


def _name(to: torch.dtype) -> str:
    return str(to).removeprefix("torch.")


def digest_of(weight: torch.Tensor) -> str:
    """Of its shape and of some of its rows, whatever dtype and device it has now."""
    told = hashlib.sha256(repr(tuple(weight.shape)).encode())
    told.update(weight_bytes(weight[:: max(1, len(weight) // _ROWS)][:_ROWS]))
    return told.hexdigest()[:24]


def _in_eight_bits(group: Group, plan: Planned, to: torch.dtype) -> list[EightBitLayer]:
    made = []
    rounded = weights(group, to, plan.smoothing, by_row=plan.by_row)
    for layer, (weight, scale) in zip(group.layers, rounded, strict=True):
        origin = Origin(group.names[0], digest_of(layer.weight), _name(layer.weight.dtype), plan.error)
        made.append(in_eight_bits(layer, weight, scale, plan.x_scale, plan.smoothing, origin))
    linears = [layer for layer in made if isinstance(layer, EightBitLinear)]
    if len(linears) > 1:
        lay_together(linears)
    return made


def in_eight_bits(
    layer: nn.Linear | nn.Conv2d,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    smoothed: torch.Tensor | None,
    origin: Origin,
) -> EightBitLayer:
    """What stands in the layer's place; the weight may be flat."""
    if isinstance(layer, nn.Linear):
        return EightBitLinear(layer, weight, scale, x_scale, smoothed, origin)
    assert x_scale is not None
    return EightBitConv2d(layer, weight.view(layer.weight.shape), scale, x_scale, smoothed, origin)


def ready(model: nn.Module) -> Installed | None:
    """Of a model that was in 8 bits before it is optimised, what to say of it; None where it was not.

    Weights that lay together do not after a move to another device: they are laid together anew.
    """
    layers = eight_bit_layers(model)
    if not layers:
        return None
    for group in groups(model, _is_in_eight_bits):
        if len(group.layers) > 1:
            lay_together([layer for layer in group.layers if isinstance(layer, EightBitLinear)])
    kind, first = type(model).__name__, next(iter(layers.values())).weight
    here, to = arch.detect(first.device), _name(first.dtype)
    of_other = any(layer in _STANDING for layer in layers.values())
    were = "copied" if is_copied_in_eight_bits(model) else "loaded"
    whence = "another pipeline has them" if of_other else f"they were {were}"

    def notes() -> Iterator[str]:
        rounds = all(layer.rounds_x for layer in layers.values())
        yield f"{kind}: {_computed(len(layers), first.dtype, rounds=rounds)}, as {whence}"
        smoothed = sum(layer.smoothing is not None for layer in layers.values())
        if smoothed:
            yield f"{kind}: {smoothed} of these layers are smoothed"
        if is_copied_in_eight_bits(model):
            yield f"{kind}: restore leaves them, since their 16 bits were not copied: restore a pipeline, then copy it"
        elif not rounds and here.fp8 in {Fp8.OCP, Fp8.FNUZ}:
            yield (
                f"{kind}: {here.name} multiplies another fp8, and these weights alone are 8 bits wide; load them anew "
                f"with rocm_sd.load_eight_bits(pipe, path, device={str(first.device)!r})"
            )
        elif not rounds:
            yield f"{kind}: {here.name} does not multiply {to}: weights alone are 8 bits wide"

    approximated = Approximated(f"{len(layers)} layers in {to}, as {whence}")
    return Installed(lambda: tuple(notes()), lambda: None, approximated=lambda: (approximated,))


def is_copied_in_eight_bits(model: nn.Module) -> bool:
    """Whether `optimize` put it into 8 bits, but for the model that it is a copy of."""
    return any(layer.is_for_a_time and layer not in _STANDING for layer in eight_bit_layers(model).values())


class Waiting:
    """The layers of one group, whose weights are in the host's memory while others stand in their places."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model, self._group = model, group
        self._standing: list[EightBitLayer] = []

    def replace(self, layers: Sequence[EightBitLayer]) -> None:
        self._standing = list(layers)
        for name, old, new in zip(self._group.names, self._group.layers, layers, strict=True):
            _put(self._model, name, new)
            old.weight.data = old.weight.data.to("cpu")

    def bring_back(self) -> None:
        if not self._standing:
            return
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
