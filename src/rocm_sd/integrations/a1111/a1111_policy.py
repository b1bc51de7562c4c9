"""Automatic1111's policy for the rules of ldm, and these as rules for its modules.

The rules look at instances. Forwards that somebody has replaced on a class, as the host does for LoRA, for casting and
for attention, are looked at here, before each call of the UNet and in each block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.ldm import TRANSFORMER_RULES, UNET_RULES, VAE_RULES, HostPolicy
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.forwards import is_ours
from rocm_sd.rewrite.packing import unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rocm_sd.integrations.ldm import BlockRule

__all__ = [
    "CAPTURED_RULES", "PACKAGES", "POLICY", "RULES", "A1111Policy", "LoraNetworks", "identities", "why_not_layers",
]  # fmt: skip

_LAYERS: tuple[Any, ...] = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)
# The host's own replacements: they compute what the class computes, in another way or in another dtype, and where the
# dtype is another (--upcast-sampling) nothing is replaced at all.
_HOSTS_OWN = frozenset(
    {"modules.sd_hijack_utils", "modules.sd_hijack_optimizations", "modules.hypernetworks.hypernetwork"}
)
PACKAGES = frozenset({"torch", "ldm", "sgm"})
_METHODS = ("forward", "_forward")


def _is_known(function: Any) -> bool:
    name = str(getattr(function, "__module__", ""))
    return is_ours(function) or name.partition(".")[0] in PACKAGES or name in _HOSTS_OWN


def identities(kinds: Iterable[type]) -> tuple[Any, ...]:
    """The methods of these classes: a graph that was captured with others is not replayed."""
    return tuple(getattr(kind, method, None) for kind in (*_LAYERS, *kinds) for method in _METHODS)


def why_not_layers() -> str | None:
    """Why calling a linear, a convolution or a norm is more than its weights' product, in words."""
    for kind in _LAYERS:
        function = kind.forward
        if _is_torchs(function):
            continue
        original = _before_lora(kind, function)
        if original is None or not _is_torchs(original):
            return f"{kind.__name__}.forward was replaced by {function.__module__}.{function.__name__}"
    return None


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).startswith("torch.nn.")


def _before_lora(kind: type, function: Any) -> Any:
    """The forward that the host's LoRA extension keeps for its own, if it is that extension's."""
    names = getattr(function, "__globals__", {})
    if not {"loaded_networks", "network_apply_weights", "originals"} <= names.keys():
        return None
    return getattr(names["originals"], f"{kind.__name__}_forward", None)


class A1111Policy(HostPolicy):
    """The host makes one picture at a time: what it permits is kept in one place, PERMISSION."""

    roots = ("ldm", "sgm")
    # It computes in float32 and answers in x's dtype, as the op does.
    layers = frozenset((f"{root}.modules.diffusionmodules.util", "GroupNorm32") for root in ("ldm", "sgm"))
    in_captured_calls = frozenset(rule.name for rule in TRANSFORMER_RULES)
    works_on_cpu = under_autocast = pads_by_job = packs_weights = vae_bias_in_norm = True

    def permits(self, rule: BlockRule, module: nn.Module) -> bool:
        # The UNet's layers were looked at before it was called; a VAE's parts are called one by one.
        reason = PERMISSION.broken or (PERMISSION.unet if rule.model == "UNet" else why_not_layers())
        return reason is None and self.is_usual(module)

    def captures(self) -> bool:
        return PERMISSION.whole

    def attention_is_plain(self, options: Mapping[str, Any] | None) -> bool:  # noqa: ARG002 -- another host's
        return PERMISSION.attention

    def fails(self, rule: BlockRule, error: Exception) -> bool:
        """Whatever it was, the host's own forward can say it, or do without."""
        PERMISSION.fail(f"The {rule.model}'s {rule.name}", error)
        return False

    def is_usual(self, module: nn.Module) -> bool:
        """Whether the module's class and its methods are the ones that the rules were written for, now.

        Token merging gives blocks another class; ControlNet's reference gives them another `_forward`.
        """
        kind = type(module)
        if kind.__module__.partition(".")[0] not in PACKAGES or "_forward" in module.__dict__:
            return False
        # A class without `_forward` has nothing of it that could have been replaced.
        return all(_is_known(getattr(kind, method)) for method in _METHODS if hasattr(kind, method))


POLICY = A1111Policy()


def _for_modules(rule: BlockRule) -> Rule:
    return Rule(
        rule.name,
        rule.summary,
        rule.channels_last,
        of_kind=lambda kind: POLICY.is_class(kind, rule.file, *rule.kinds),
        why_not=lambda module: rule.why_not(POLICY, module),
        forward=rule.method(POLICY),
        undo=unpack if rule.packs else None,
        on_cpu=rule.worth_it_on_cpu is not None,
        looks_at_classes=False,
        calls=rule.calls,
    )


RULES = tuple(map(_for_modules, (*UNET_RULES, *VAE_RULES)))
CAPTURED_RULES = tuple(map(_for_modules, TRANSFORMER_RULES))


class LoraNetworks:
    """The host's LoRA extension changes a layer's weights when the layer is called. Ours are not called: it is done
    for all of them here, by the extension's own function, before the UNet is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            module for module in model.modules() if isinstance(module, (*_LAYERS, nn.MultiheadAttention))
        ]  # fmt: skip

    def bring_in(self) -> str | None:
        """Why it cannot be done, in words; None where every layer has the weights that it is to have."""
        names = getattr(nn.Linear.forward, "__globals__", {})
        networks, change = names.get("loaded_networks"), names.get("network_apply_weights")
        if networks is None or change is None:
            return None
        if networks and getattr(getattr(names.get("shared"), "opts", None), "lora_functional", False):
            return "the setting for LoRA as in older versions computes each layer in parts"
        wanted = tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in networks)
        for layer in self._layers:
            own = layer.__dict__
            if "network_layer_name" in own and own.get("network_current_names", ()) != wanted:
                change(layer)
        return None
