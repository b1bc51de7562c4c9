"""optimize(pipe) and restore(pipe): works on a Diffusers pipeline or on one of its modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.engine import convolutions, denoising, levels, vae
from rocm_sd.engine.capture import graphs_wanted, start_compiling
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.levels import LEVELS
from rocm_sd.engine.parts import EVERYTHING, Parts
from rocm_sd.engine.reporting import Report
from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, Rule, apply, undo
from rocm_sd.tuning import Choice, lookup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["QUALITIES", "optimize", "optimize_with", "report", "restore"]

QUALITIES = ("exact", "high", "balanced")

Target = TypeVar("Target")


@dataclass(frozen=True)
class _State:
    report: Report
    device: torch.device
    # In the order in which they were installed; taken back in the opposite one.
    installed: tuple[Installed, ...]


# Kept beside the user's objects, not on them: nothing to pickle, nothing that outlives them.
_OPTIMIZED: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()


def optimize(target: Target, level: str = "auto", quality: str = "exact") -> Target:
    """Make a pipeline, a UNet or a VAE faster in place, and return it. A second call with other options starts afresh.

    `level` trades memory for speed and never changes the picture. `quality` sets how far approximations may go;
    `exact` allows none.
    """
    return optimize_with(target, level, quality, EVERYTHING)


def optimize_with(target: Target, level: str, quality: str, parts: Parts) -> Target:
    """`optimize` with some of its parts. What they leave to stock inside an op or a block is so within
    `parts.in_force()` only.
    """
    require_one_of("level", level, LEVELS)
    require_one_of("quality", quality, QUALITIES)
    modules = _modules(target)
    restore(target)
    decision = levels.decide(target, level)
    device = decision.device
    architecture = arch.detect(device)
    graphs = (parts.captured or parts.hoisted) and graphs_wanted(device, allowed=decision.graphs)
    if graphs:
        start_compiling(device)
    available = _available(parts, graphs=graphs)
    rules = [rule for rule in available if rule.on_cpu or device.type != "cpu"]
    layouts = [
        (name, module, _layout(name, module, device, one_by_one=not graphs and parts.rules is None))
        for name, module in modules.items()
    ]
    changes = [
        change
        for name, module, layout in layouts
        for change in apply(module, rules, prefix=name, not_channels_last=_why_layout_is_kept(layout, parts))
    ]
    installed = [Installed(tuple, lambda: undo(changes))]
    installed += _relaid((module, layout) for _, module, layout in layouts if not _why_layout_is_kept(layout, parts))
    if parts.convolution_library:
        installed.append(_convolution_library(modules, device))
    if graphs:
        installed.append(denoising.install(target, denoising.captured_models(target), parts))
    notes = []
    if len(rules) < len(available):
        idle = ", ".join(rule.name for rule in available if rule not in rules)
        notes.append(f"the rules {idle} are not applied: on a CPU their ops are stock torch")
    installed.append(levels.install(target, decision))
    installed += [_planned_vae(module, decision.level) for name, module in modules.items() if _is_vae(name, module)]
    if quality != "exact":
        notes.append(f"quality {quality} allows approximations; none exists in this version, so the result is exact")
    _OPTIMIZED[target] = _State(
        Report(architecture.name, level, quality, tuple(changes), tuple(notes)), device, tuple(installed)
    )
    return target


def restore(target: Target) -> Target:
    """Bring back what `optimize` found; a target that was not optimised is left as it is."""
    state = _OPTIMIZED.pop(target, None) if _weakly_held(target) else None
    if state is None:
        return target
    for installed in reversed(state.installed):
        installed.restore()
    return target


def report(target: Any) -> Report:
    """What `optimize` did to this pipeline."""
    state = _OPTIMIZED.get(target) if _weakly_held(target) else None
    if state is None:
        raise Unsupported("report", "a pipeline that was not optimised", hint="Call rocm_sd.optimize(pipe) first.")
    notes = [note for installed in state.installed for note in installed.notes()]
    device = levels.placement(target).device
    if device != state.device:
        notes.append(f"its weights are on {device} now, and it was optimised for {state.device}: call optimize again")
    return replace(state.report, notes=(*notes, *state.report.notes))


def _available(parts: Parts, *, graphs: bool) -> tuple[Rule, ...]:
    if parts.rules is not None:
        return tuple(rule for rule in (*RULES, *RULES_FOR_GRAPHS) if rule.name in parts.rules)
    return (*RULES, *RULES_FOR_GRAPHS) if graphs else RULES


def _why_layout_is_kept(layout: Choice, parts: Parts) -> str | None:
    if layout.implementation == convolutions.CHANNELS_LAST and parts.channels_last:
        return None
    return f"its convolutions keep their layout ({layout.why})"


def _layout(name: str, module: nn.Module, device: torch.device, *, one_by_one: bool) -> Choice:
    """`one_by_one`: each kernel is launched from Python. For a card that waits for its host then, the data may have
    another layout of models that are called at every step. What a user has measured is the card's own time, and says
    nothing of it.
    """
    layout = convolutions.choose_layout(device, convolutions.convolution_dtype(module))
    if not one_by_one or _is_vae(name, module):
        return layout
    shipped = lookup("memory_format", arch.detect(device).name, {"graphs": "none"})
    return shipped if shipped.source == "bucket" else layout


def _weakly_held(target: Any) -> bool:
    return isinstance(target, nn.Module) or hasattr(target, "components")


def _modules(target: Any) -> dict[str, nn.Module]:
    if not isinstance(target, nn.Module) and not isinstance(getattr(target, "components", None), dict):
        raise Unsupported(
            "optimize",
            f"a {type(target).__name__}: it takes a Diffusers pipeline or a torch module",
            hint="Load one with diffusers.StableDiffusionPipeline.from_pretrained(...).",
        )
    return levels.modules_of(target)


def _relaid(models: Iterable[tuple[nn.Module, Choice]]) -> Iterator[Installed]:
    """One for each reason; most pipelines have one."""
    by_reason: dict[str, list[nn.Module]] = {}
    for model, layout in models:
        by_reason.setdefault(layout.why, []).append(model)
    for why, modules in by_reason.items():
        yield convolutions.lay_out(modules, why)


def _convolution_library(modules: dict[str, nn.Module], device: torch.device) -> Installed:
    library = convolutions.choose_library(device)
    vaes = {name: _is_vae(name, module) for name, module in modules.items()}
    models = [
        model for name in vaes for model in convolutions.convolving_models(modules[name], library, is_vae=vaes[name])
    ]
    return convolutions.install_library(models, library, has_vae=any(vaes.values()))


def _is_vae(name: str, module: nn.Module) -> bool:
    """Under any name that a pipeline gives it, as long as it is one that both encodes and decodes."""
    return name == "vae" or all(callable(getattr(module, part, None)) for part in ("encode", "decode"))


def _planned_vae(module: Any, level: str) -> Installed:
    held = ref(module)

    def ready(z: torch.Tensor) -> bool:
        decoder = getattr(held(), "decoder", None)
        return decoder is not None and denoising.holds(decoder, z)

    return vae.install(module, level, ready=ready)
