"""What a level means for this pipeline on this device, decided from the memory that is free, and carried out.

`performance` keeps every weight on the device and captures graphs. `memory` runs the halves of a batch one after the
other, decodes in pieces and brings each part of the pipeline in only while it works. `auto` is one of the two.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.engine.denoisers import denoiser
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.levels import sequential_guidance
from rocm_sd.engine.memory import free_memory
from rocm_sd.errors import require_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "LEVELS", "Decision", "Placement", "decide", "estimate_activations", "install", "modules_of", "placement",
    "reckon_with",
]  # fmt: skip

LEVELS = ("auto", "performance", "memory")

# Kept free beyond what is counted: workspaces of the vendors' libraries, memory lost between blocks of the allocator,
# and the VAE, which plans its own decoding with what is left.
_MARGIN = 2**29

_OFFLOAD_STATE = ("_all_hooks", "_offload_gpu_id", "_offload_device")
_GROUP_OFFLOADING = "group_offloading"
# By target: free bytes to reckon with, whatever the device says, and whether weights that are elsewhere stay there.
_AGREED: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Placement:
    """Where a pipeline computes, and what of the user's own moves its weights: None where they simply lie there."""

    device: torch.device
    by: str | None = None


@dataclass(frozen=True)
class Decision:
    """`level`: performance or memory. `sizes`: bytes of each part's weights. `activations`: an estimate, None where the
    model is not known. `free`: bytes, None where the device does not say. `kept`: the offloading that was found.
    """

    level: str
    why: str
    device: torch.device
    offload: bool
    graphs: bool
    sequential_guidance: bool
    sizes: Mapping[str, int]
    activations: int | None
    free: int | None
    kept: str | None = None


def decide(target: Any, level: str, free: int | None = None) -> Decision:
    """What `level` is for this pipeline, or bare model. `free`: bytes to reckon with instead of asking the device."""
    require_one_of("level", level, LEVELS)
    parts = modules_of(target)
    place = placement(target)
    agreed, in_place = _AGREED.get(target, (None, False))
    need = _need(target, parts, place.device, in_place=in_place)
    free = agreed if free is None else free
    free = free_memory(place.device) if free is None else free
    short = free is not None and need.in_all > free
    found: Any = {"sizes": need.sizes, "activations": need.activations, "free": free, "kept": place.by}
    # Weights that the user moves about have no address that a graph could keep.
    graphs = place.device.type == "cuda" and place.by is None
    if level == "performance" or (level == "auto" and (place.by is not None or not short)):
        why = _why_performance(level, place, need, free)
        return Decision("performance", why, place.device, False, graphs, False, **found)
    # Chosen by auto, parts are moved only where halving the activations is not enough.
    tight = level == "memory" or (free is not None and need.in_halves > free)
    offload = tight and graphs and not in_place and hasattr(target, "enable_model_cpu_offload")
    why = _why_memory(level, place, need, free, offload=offload)
    return Decision("memory", why, place.device, offload, False, True, **found)


def reckon_with(target: Any, free: int | None, *, in_place: bool = False) -> Callable[[], None]:
    """Have every later decision for this target reckon with so many free bytes; how to end that. None: the device says.

    For processes that draw together: one that halves its batches has other exchanges than one that does not.
    `in_place`: what is not on the device by now does not come, and nothing is moved; the others compute with it.
    """
    if free is not None:
        _AGREED[target] = free, in_place
    held = weakref.ref(target)

    def end() -> None:
        if (alive := held()) is not None:
            _AGREED.pop(alive, None)

    return end


def install(target: Any, decision: Decision) -> Installed:
    """Carry out what is decided, but for the graphs and the VAE, which are parts of their own."""
    installed = []
    if decision.sequential_guidance:
        installed += [sequential_guidance.install(model) for model in _denoisers(modules_of(target))]
    if decision.offload:
        installed.append(_offload(target, decision.device))

    def restore() -> None:
        for one in reversed(installed):
            one.restore()

    return Installed(lambda: (decision.why, *(note for one in installed for note in one.notes())), restore)


def placement(target: Any) -> Placement:
    """By the offload hooks of accelerate and Diffusers where there are any, otherwise by where the weights lie."""
    parts = modules_of(target)
    found: dict[str, torch.device | None] = {}
    for module in (module for part in parts.values() for module in part.modules()):
        for kind, device in _hooks(module.__dict__):
            found[kind] = found.get(kind) or (None if device is None else torch.device(device))
    # A sequential offload also places hooks that only align devices: the first of these names is what it is.
    for kind in ("group offload", "sequential offload", "model offload", "device map"):
        if kind in found:
            return Placement(found[kind] or _home(parts), kind)
    return Placement(_home(parts))


def _hooks(own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    registry = own.get("_diffusers_hook")
    group = None if registry is None else registry.hooks.get(_GROUP_OFFLOADING)
    if group is not None:
        yield "group offload", group.config.onload_device
    hook = own.get("_hf_hook")
    # Two hooks on one module are one that holds both.
    for one in () if hook is None else getattr(hook, "hooks", (hook,)):
        if type(one).__name__ == "CpuOffload":
            yield "model offload", one.execution_device
        elif type(one).__name__ == "AlignDevicesHook":
            yield "sequential offload" if one.offload else "device map", one.execution_device


def _home(parts: Mapping[str, nn.Module]) -> torch.device:
    devices = [parameter.device for part in parts.values() for parameter in part.parameters()]
    # With a text encoder left on the CPU, pictures are still made where the rest is.
    elsewhere = [device for device in devices if device.type not in ("cpu", "meta")]
    return next(iter(elsewhere), torch.device("cpu"))


def _is(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.index or 0) == (other.index or 0)


def modules_of(target: Any) -> dict[str, nn.Module]:
    if isinstance(target, nn.Module):
        return {type(target).__name__: target}
    return {name: part for name, part in target.components.items() if isinstance(part, nn.Module)}


def _denoisers(parts: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    for part in parts.values():
        # Several ControlNets are called one by one by the module that holds them.
        nets = part.modules() if type(part).__name__ == "MultiControlNetModel" else iter((part,))
        yield from (net for net in nets if getattr(denoiser(net), "each", ()))


@dataclass(frozen=True)
class _Need:
    sizes: Mapping[str, int]
    missing: int
    activations: int | None
    picture: str

    @property
    def in_all(self) -> int:
        return self.missing + (self.activations or 0) + _MARGIN

    @property
    def in_halves(self) -> int:
        return self.missing + (self.activations or 0) // 2 + _MARGIN

    def in_words(self, device: torch.device) -> str:
        weights = sum(self.sizes.values())
        activations = "activations that are not known"
        if self.activations is not None:
            activations = f"an estimated {_gb(self.activations)} of activations for {self.picture}"
        return (
            f"{_gb(self.in_all)} more on {device} ({_gb(self.missing)} of its {_gb(weights)} of weights that are not "
            f"there yet, {activations}, {_gb(_MARGIN)} to spare)"
        )


def _need(target: Any, parts: Mapping[str, nn.Module], device: torch.device, *, in_place: bool = False) -> _Need:
    sizes, missing, seen = {}, 0, set()
    for name, part in parts.items():
        sizes[name] = 0
        for tensor in (*part.parameters(), *part.buffers()):
            # Pipelines may share weights between parts.
            if id(tensor) not in seen:
                seen.add(id(tensor))
                count = tensor.numel() * tensor.element_size()
                sizes[name] += count
                missing += 0 if in_place or _is(tensor.device, device) else count
    found = ((part, known) for part in parts.values() if (known := denoiser(part)) is not None and known.maps)
    model, known = next(found, (None, None))
    if known is None:
        return _Need(sizes, missing, None, "")
    size, samples = _sample_size(target, model), known.samples
    pixels = [side * int(getattr(target, "vae_scale_factor", 8)) for side in size]
    picture = f"one picture of {pixels[1]}x{pixels[0]}" + (" with guidance" if samples == 2 else "")
    return _Need(sizes, missing, estimate_activations(model, size, samples), picture)


def _sample_size(target: Any, model: Any) -> tuple[int, int]:
    """Height and width of the latents that the pipeline makes where no size is given."""
    size = getattr(model.config, "sample_size", None) or getattr(target, "default_sample_size", None) or 128
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def estimate_activations(model: Any, size: tuple[int, int], samples: int) -> int:
    """Bytes of one call for latents of this height and width, by the shape of the model; within a tenth of stock's."""
    config, known = model.config, denoiser(model)
    assert known is not None
    itemsize = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    if known.is_unet:
        return int(samples * itemsize * _unet_values(config, size, known.maps))
    patch = known.patch or config.patch_size
    tokens = (size[0] // patch) * (size[1] // patch) + known.text
    return int(samples * itemsize * known.maps * tokens * config.num_attention_heads * config.attention_head_dim)


def _unet_values(config: Any, size: tuple[int, int], maps: int) -> int:
    """Every map that is kept for the way up, and the fullest block's own."""
    channels = config.block_out_channels
    layers = config.layers_per_block
    depths = [layers] * len(channels) if isinstance(layers, int) else list(layers)
    kept, fullest = channels[0] * size[0] * size[1], 0
    for number, (wide, depth) in enumerate(zip(channels, depths, strict=True)):
        area = -(-size[0] // 2**number) * -(-size[1] // 2**number)
        last = number == len(channels) - 1
        kept += wide * area * depth + (0 if last else wide * area // 4)
        # On the way up a block begins with its own map, one that was kept and the one from below; norm and SiLU double.
        block = 3 * (wide + channels[number if last else number + 1])
        if "CrossAttn" in config.down_block_types[number]:
            block = max(block, maps * wide)
        fullest = max(fullest, block * area)
    return int(kept + fullest)


def _offload(pipe: Any, device: torch.device) -> Installed:
    """Diffusers' own chain of hooks: each part comes in when it is called, and the one before it goes out."""
    # Taken off: Diffusers would prefer the index of an earlier offload to 0.
    before = {name: pipe.__dict__.pop(name) for name in _OFFLOAD_STATE if name in pipe.__dict__}
    homes = [(part, _home({"": part}), "forward" in part.__dict__) for part in modules_of(pipe).values()]
    # The report is kept for as long as the pipeline lives, and must not keep it alive.
    reference = weakref.ref(pipe)

    def put_back() -> None:
        pipe = reference()
        if pipe is None:
            return
        pipe.remove_all_hooks()
        for name in _OFFLOAD_STATE:
            pipe.__dict__.pop(name, None)
        pipe.__dict__.update(before)
        for part, home, had_forward in homes:
            if not _is(_home({"": part}), home):
                part.to(home)
            # What accelerate leaves on the instance when it takes its hook off.
            forward = part.__dict__.get("forward")
            if not had_forward and getattr(forward, "__func__", None) is type(part).forward:
                del part.__dict__["forward"]

    try:
        pipe.enable_model_cpu_offload(device=device)
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        put_back()
        reason = " ".join(str(error).split())
        return Installed(lambda: (f"all parts stay on {device}, because they cannot be moved: {reason}",), lambda: None)
    chosen = pipe._offload_device  # noqa: SLF001 -- what Diffusers made of the device

    def restore() -> None:
        pipe = reference()
        # Whoever has removed or changed the offloading since then has placed the parts himself.
        if pipe is not None and getattr(pipe, "_all_hooks", None) and pipe._offload_device == chosen:  # noqa: SLF001
            put_back()

    return Installed(lambda: (f"each part of the pipeline is on {device} only while it works",), restore)


def _why_performance(level: str, place: Placement, need: _Need, free: int | None) -> str:
    kept = (
        "" if place.by is None else f"the {place.by} that was found is kept, so weights move and no graph is captured"
    )
    needs = f"it needs {need.in_words(place.device)}"
    fits = free is None or need.in_all <= free
    if level == "performance":
        room = "" if fits or free is None else f"; {needs} and {_gb(free)} are free, so level memory may be wanted"
        return f"level performance was asked for{kept and ': '}{kept}{room}"
    if kept:
        return f"level auto is performance here: {kept}"
    if free is None:
        return f"level auto is performance here: {needs}, and how much is free is not known"
    return f"level auto is performance here: {needs}, and {_gb(free)} are free"


def _why_memory(level: str, place: Placement, need: _Need, free: int | None, *, offload: bool) -> str:
    measures = ["the halves of a batch run one after the other"]
    if offload:
        measures.append("parts of the pipeline are moved in and out")
    elif place.by is not None:
        measures.append(f"the {place.by} that was found is kept")
    elif place.device.type == "cpu":
        measures.append("nothing is moved, since the weights are in the CPU's own memory")
    does = " and ".join(measures)
    if level == "memory":
        return f"level memory was asked for: {does}"
    return (
        f"level auto is memory here: it needs {need.in_words(place.device)}, and {_gb(free or 0)} are free; so {does}"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
