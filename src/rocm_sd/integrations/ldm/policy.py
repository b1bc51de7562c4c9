"""What the hosts of ldm's classes differ in: one object for each host, which the shared rules ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from rocm_sd.rewrite.convolutions import parameters_of_kind, takes, through_op
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.integrations.ldm.rules import BlockRule

__all__ = ["TORCH_LAYERS", "HostPolicy", "is_ready"]

TORCH_LAYERS = frozenset({nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm})


def is_ready(x: Any) -> bool:
    """Whether x is what ops are for, now: a plain tensor with values, and nobody differentiates or traces the call."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return type(x) is torch.Tensor and x.device.type != "meta" and x.numel() > 0


class HostPolicy(ABC):
    """`roots`: the packages that the host has ldm's files in.

    `in_captured_calls`: rules that do their work while a whole call is captured only. Called one by one from Python, so
    many small questions cost more than they save.
    `works_on_cpu`: with ops that are stock torch, too. `under_autocast`: the host runs models of half precision so, and
    a block leaves it for the time of the call. `pads_by_job`: the padding of convolutions changes from job to job.
    `packs_weights`: linears of one input may be laid together in memory.
    `vae_bias_in_norm`: the bias of a VAE block's first convolution is added by the norm after it, where that is free.
    """

    roots: ClassVar[tuple[str, ...]]
    in_captured_calls: ClassVar[frozenset[str]]
    works_on_cpu: ClassVar[bool] = False
    under_autocast: ClassVar[bool] = False
    pads_by_job: ClassVar[bool] = False
    packs_weights: ClassVar[bool] = False
    vae_bias_in_norm: ClassVar[bool] = True

    @abstractmethod
    def permits(self, rule: BlockRule, module: nn.Module) -> bool:
        """Whether the rule may do the work of this module at all, now."""

    @abstractmethod
    def captures(self) -> bool:
        """Whether what runs is captured as a whole."""

    @abstractmethod
    def attention_is_plain(self, options: Mapping[str, Any] | None) -> bool:
        """Whether attention is nothing but its weights and softmax, now; `options` are the host's for a transformer,
        and None of a VAE.
        """

    @abstractmethod
    def fails(self, rule: BlockRule, error: Exception) -> bool:
        """Take note of an error; whether it is to reach the host, in place of a fallback."""

    @abstractmethod
    def knows(self, kind: Any) -> bool:
        """Whether this class of layers computes its weights' product, or norm, as torch's own does."""

    def is_usual(self, module: nn.Module) -> bool:  # noqa: ARG002 -- a host that replaces forwards of classes asks
        """Whether the methods of the module's class are the ones that the rules were written for."""
        return True

    def is_of(self, module: nn.Module, file: str, *names: str) -> bool:
        """By name: what is asked of a class must not import the host. `file`: e.g. "modules.attention"."""
        kind: type = type(module)
        return kind.__name__ in names and kind.__module__ in {f"{root}.{file}" for root in self.roots}

    def is_plain(self, layer: Any, x: torch.Tensor) -> bool:
        """Whether layer(x) is its weights' product with x, or norm of x, and nothing else, now."""
        return self.knows(type(layer)) and untouched(layer) and parameters_of_kind(layer, x)

    def all_plain(self, x: torch.Tensor, *layers: Any) -> bool:
        return all(self.is_plain(layer, x) for layer in layers)

    def all_taken(self, x: torch.Tensor, *layers: Any) -> bool:
        """Whether each layer's call is `conv2d` of its weights, now, and these lie as the op reads them."""
        return all(takes(layer, x, self.is_plain) for layer in layers)

    def allows(self, rule: BlockRule, module: nn.Module, x: Any) -> bool:
        """Whether the rule does the work of the module on x, now, as far as the layers inside are plain."""
        if not is_ready(x) or (rule.name in self.in_captured_calls and not self.captures()):
            return False
        device = x.device.type
        if torch.is_autocast_enabled(device) and not self._agrees(x):
            return False
        if not through_op(rule.op, x) and not self._pays_on_cpu(rule, x):
            return False
        return self.permits(rule, module)

    def _agrees(self, x: torch.Tensor) -> bool:
        """Autocast takes norms and softmax to float32 and all else to one dtype. The ops do the same inside where x,
        weights and autocast have one dtype; that the weights have it is asked layer by layer.
        """
        return self.under_autocast and torch.get_autocast_dtype(x.device.type) == x.dtype

    def _pays_on_cpu(self, rule: BlockRule, x: torch.Tensor) -> bool:
        return self.works_on_cpu and rule.worth_it_on_cpu is not None and x.numel() >= rule.worth_it_on_cpu
