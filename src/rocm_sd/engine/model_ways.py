"""How each model of a pipeline runs: by which rules, in which layout, captured or not, and why.

A plan that was measured here comes first. Where none was and one can be, the model stays stock until its first call is
measured. Everywhere else the shipped data say what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.engine import calibration, convolutions
from rocm_sd.engine.denoisers import denoiser
from rocm_sd.engine.installed import MEASURED, SHIPPED, WAITS, ModelPlan
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, Rule
from rocm_sd.tuning import Choice, lookup
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rocm_sd.engine.parts import Parts

__all__ = ["ModelWay", "is_vae", "standing", "subjects", "unmeasured", "way_of"]

# By the key of a model: why no plan could be measured for it in this process.
unmeasured: dict[str, str] = {}


@dataclass(frozen=True)
class ModelWay:
    """`why_layout_is_kept`: None where its convolutions are laid out channels-last. `plan`: None where the model is not
    one that is called for each picture.
    """

    rules: tuple[Rule, ...]
    layout: Choice
    why_layout_is_kept: str | None
    captured: bool = True
    notes: tuple[str, ...] = ()
    plan: ModelPlan | None = None


def way_of(name: str, module: nn.Module, device: torch.device, parts: Parts, *, graphs: bool) -> ModelWay:
    if parts.plan is not None:
        return _by_plan(calibration.named(parts.plan), f"by the plan {parts.plan}", device)
    subject = next((model for model in subjects(module) if denoiser(model) is not None), None)
    if subject is None:
        return _as_shipped(name, module, device, parts, graphs=graphs)
    kind, why_shipped = type(subject).__name__, ""
    if parts.rules is None and calibration.counts(device):
        key = calibration.model_key(subject)
        found = calibration.measured(key, device, graphs=graphs)
        if found is not None:
            times = None if found.plan.name == STOCK else found.stock_ms / found.ms
            way = _by_plan(found.plan, str(found), device, f"{kind}: {found}")
            return replace(way, plan=ModelPlan(kind, MEASURED, times=times, when=found.when))
        if parts.calibrated and standing(key, device, graphs=graphs) is None:
            waits = "its first picture is measured"
            way = _by_plan(calibration.named(STOCK), waits, device, f"{kind} runs as it came until {waits}")
            return replace(way, plan=ModelPlan(kind, WAITS))
        why_shipped = unmeasured.get(key, "")
    way = _as_shipped(name, module, device, parts, graphs=graphs)
    return replace(way, plan=ModelPlan(kind, SHIPPED, why=why_shipped))


def standing(key: str, device: torch.device, *, graphs: bool) -> str | None:
    """The name of the plan that a model has by now; `shipped` where none is to be measured, None while it waits."""
    found = calibration.measured(key, device, graphs=graphs)
    if found is not None:
        return found.plan.name
    return "shipped" if key in unmeasured or not calibration.wanted(device, graphs=graphs) else None


def _by_plan(plan: calibration.Plan, why: str, device: torch.device, *notes: str) -> ModelWay:
    rules = tuple(rule for rule in (*RULES, *RULES_FOR_GRAPHS) if rule.on_cpu or arch.computes_on_gpu(device))
    layout = Choice(convolutions.CHANNELS_LAST if plan.channels_last else STOCK, source="measured here", why=why)
    kept = None if plan.channels_last else f"its convolutions keep their layout ({why})"
    return ModelWay(rules if plan.rules else (), layout, kept, plan.captured, notes)


def _as_shipped(name: str, module: nn.Module, device: torch.device, parts: Parts, *, graphs: bool) -> ModelWay:
    available = _available(parts, graphs=graphs)
    rules = tuple(rule for rule in available if rule.on_cpu or arch.computes_on_gpu(device))
    layout = _layout(name, module, device, one_by_one=not graphs and parts.rules is None)
    kept = None
    if layout.implementation != convolutions.CHANNELS_LAST or not parts.channels_last:
        kept = f"its convolutions keep their layout ({layout.why})"
    notes = []
    if len(rules) < len(available):
        idle = ", ".join(rule.name for rule in available if rule not in rules)
        notes.append(f"the rules {idle} are not applied: on a CPU their ops are stock torch")
    return ModelWay(rules, layout, kept, True, tuple(notes))


def _available(parts: Parts, *, graphs: bool) -> tuple[Rule, ...]:
    if parts.rules is not None:
        return tuple(rule for rule in (*RULES, *RULES_FOR_GRAPHS) if rule.name in parts.rules)
    return (*RULES, *RULES_FOR_GRAPHS) if graphs else RULES


def _layout(name: str, module: nn.Module, device: torch.device, *, one_by_one: bool) -> Choice:
    """`one_by_one`: each kernel is launched from Python. For a card that waits for its host then, the data may have
    another layout of models that are called at every step.
    """
    layout = convolutions.choose_layout(device, convolutions.convolution_dtype(module))
    if not one_by_one or is_vae(name, module):
        return layout
    shipped = lookup("memory_format", arch.detect(device).name, {"graphs": "none"})
    return shipped if shipped.source == "bucket" else layout


def is_vae(name: str, module: nn.Module) -> bool:
    """Under any name that a pipeline gives it, as long as it is one that both encodes and decodes."""
    return name == "vae" or all(callable(getattr(module, part, None)) for part in ("encode", "decode"))


def subjects(module: Any) -> list[nn.Module]:
    """The models of a module that are called for a picture: of several ControlNets each, of a VAE its decoder."""
    return list(getattr(module, "nets", [getattr(module, "decoder", module)]))
