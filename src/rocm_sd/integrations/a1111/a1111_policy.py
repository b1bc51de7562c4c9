"""Automatic1111's policy for the rules of ldm, and these as rules for its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.integrations.a1111.class_forwards import is_usual, why_not_layers
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.ldm import TRANSFORMER_RULES, UNET_RULES, VAE_RULES, HostPolicy
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.packing import unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from rocm_sd.integrations.ldm import BlockRule

__all__ = ["CAPTURED_RULES", "POLICY", "RULES", "A1111Policy"]


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
        return reason is None and is_usual(module)

    def captures(self) -> bool:
        return PERMISSION.whole

    def attention_is_plain(self, options: Mapping[str, Any] | None) -> bool:  # noqa: ARG002 -- another host's
        return PERMISSION.attention

    def fails(self, rule: BlockRule, error: Exception) -> bool:
        """Whatever it was, the host's own forward can say it, or do without."""
        PERMISSION.fail(f"The {rule.model}'s {rule.name}", error)
        return False

    def is_usual(self, module: nn.Module) -> bool:
        return is_usual(module)


POLICY = A1111Policy()


def _for_modules(rule: BlockRule) -> Rule:
    return Rule(
        rule.name,
        rule.summary,
        rule.channels_last,
        applies=lambda module: rule.applies(POLICY, module),
        why_not=lambda module: rule.why_not(POLICY, module),
        forward=rule.replacement(POLICY),
        undo=unpack if rule.packs else None,
        on_cpu=rule.worth_it_on_cpu is not None,
    )


RULES = tuple(map(_for_modules, (*UNET_RULES, *VAE_RULES)))
CAPTURED_RULES = tuple(map(_for_modules, TRANSFORMER_RULES))
