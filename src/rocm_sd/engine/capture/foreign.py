"""What in a model is not known to be a function of its own sample's values alone.

Halving a batch, and replaying what was captured once, are right only for layers that treat each sample by itself and
remember nothing: a hook that collects features, a processor that counts its calls or a cache would see too little.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rocm_sd.rewrite import forwards
from rocm_sd.rewrite.guarding import global_hooks, whose
from rocm_sd.rewrite.transformer import stock_processor

if TYPE_CHECKING:
    from torch import nn

__all__ = ["has_foreign_forward", "moves_weights", "why_foreign", "why_foreign_layer"]

# Others cut the batch in parts of their own (perturbed attention), or let pictures look at each other (cross-frame).
_PROCESSORS = frozenset({
    "AttnAddedKVProcessor", "AttnAddedKVProcessor2_0", "AttnProcessor", "AttnProcessor2_0", "FluxAttnProcessor",
    "FusedAttnProcessor2_0", "FusedJointAttnProcessor2_0", "IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0",
    "IPAdapterXFormersAttnProcessor", "JointAttnProcessor2_0", "SlicedAttnAddedKVProcessor", "SlicedAttnProcessor",
    "XFormersAttnAddedKVProcessor", "XFormersAttnProcessor", "XFormersJointAttnProcessor",
})  # fmt: skip
# Others remember values for the next call, which here is the other half. While a group offload with prefetching notes
# the order of the layers, in its first call, each layer has to run once.
_HOOKS = frozenset({"group_offloading", "layerwise_casting", "peft_autocast_disable"})
# Layers of LoRA and of quantisation besides the models' own, and processors of this project with weights of their own.
# Token merging, for one, gives blocks a class of its own.
_PACKAGES = frozenset({"bitsandbytes", "diffusers", "optimum", "peft", "rocm_sd", "torch", "torchao"})
_TELLING = ("forward", "processor", "_diffusers_hook")


def why_foreign(model: nn.Module) -> str | None:
    """What in the model might see other samples, or remember something from one call to the next; None: nothing."""
    if global_hooks():
        return "all modules have a hook"
    # What is around the stand-in for its forward is called each time, and what is inside would be captured.
    inside = forwards.innermost(model)
    registry = model.__dict__.get("_diffusers_hook")
    if forwards.is_foreign(model, inside) and not (registry is not None and registry.hooks):
        return f"its forward is one of {whose(inside)}"
    pending: list[nn.Module | None] = [model]
    while pending:
        module: Any = pending.pop()
        if module is None:
            continue
        own = module.__dict__
        inside = own["_modules"]
        pending.extend(inside.values())
        # The hooks of the model itself are called around both halves.
        kind: Any = type(module)
        hooked = module is not model and (own["_forward_hooks"] or own["_forward_pre_hooks"])
        # Nearly every module is done with here: of the 1930 of SDXL, 140 are attentions.
        if not hooked and own.keys().isdisjoint(_TELLING) and "processor" not in inside:
            if _is_of(kind, _PACKAGES):
                continue
            return f"its {kind.__name__} is of {kind.__module__}"
        reason = "has a hook" if hooked else _why_foreign(module, any_forward=module is model)
        if reason is not None:
            return f"its {kind.__name__} {reason}"
    return None


def _why_foreign(module: Any, *, any_forward: bool) -> str | None:
    """`any_forward`: whether any forward is right for it."""
    own = module.__dict__
    kind: Any = type(module)
    if not _is_of(kind, _PACKAGES):
        return f"is of {kind.__module__}"
    processor = own.get("processor") or own["_modules"].get("processor")
    if processor is not None:
        kind = stock_processor(processor)
        if kind.__name__ not in _PROCESSORS or not kind.__module__.startswith("diffusers."):
            return f"is computed by {kind.__name__}"
    registry = own.get("_diffusers_hook")
    for name in () if registry is None else registry.hooks:
        if name not in _HOOKS:
            return f"has the hook {name}"
    return "has a forward that is not its class's own" if not any_forward and has_foreign_forward(module) else None


def why_foreign_layer(
    model: nn.Module,
    packages: frozenset[str],
    *,
    methods: tuple[str, ...] = ("forward",),
    own_hooks: bool = False,
    known_hooks: str | None = None,
) -> str | None:
    """As above, of a model without attention processors whose layers are of these packages.

    `own_hooks`: whether hooks of the model itself count, where they are not called around what is captured.
    `known_hooks`: the module whose hooks do not count.
    """
    if global_hooks():
        return "all modules have a hook"
    for module in model.modules():
        own: dict[str, Any] = module.__dict__
        kind: Any = type(module)
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        if (own_hooks or module is not model) and any(_is_unknown(hook, known_hooks) for hook in hooks):
            return f"its {kind.__name__} has a hook"
        if not _is_of(kind, packages):
            return f"its {kind.__name__} is of {kind.__module__}"
        for name in methods:
            if forwards.is_foreign(module, own.get(name), name):
                return f"its {kind.__name__} has a {name} that is not its class's own"
    return None


def _is_unknown(hook: Any, known: str | None) -> bool:
    return known is None or getattr(hook, "__module__", None) != known


def moves_weights(model: nn.Module) -> bool:
    """Whether hooks bring weights in and out, or cast them, around a layer's call or the model's."""
    for own in map(vars, model.modules()):
        # Diffusers gives some models a registry that stays empty.
        if "_hf_hook" in own or ("_diffusers_hook" in own and own["_diffusers_hook"].hooks):
            return True
    return False


@lru_cache(maxsize=512)
def _is_of(kind: Any, packages: frozenset[str]) -> bool:
    return str(kind.__module__).partition(".")[0] in packages


def has_foreign_forward(module: nn.Module) -> bool:
    own = module.__dict__
    registry = own.get("_diffusers_hook")
    if registry is not None and registry.hooks:
        # Its wrapper; the hooks are looked at by name.
        return False
    # Stand-ins of this project treat each sample by itself.
    return forwards.is_foreign(module, own.get("_old_forward" if "_hf_hook" in own else "forward"))
