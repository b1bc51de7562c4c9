"""What a rule for one of ldm's classes is, what of it each host decides, and the forward that is put on a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from rocm_sd.rewrite.convolutions import parameters_of_kind, takes, through_op
from rocm_sd.rewrite.guarding import Guard
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["BlockRule", "HostPolicy", "is_ready"]

_TORCH_LAYERS = frozenset({nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm})


def is_ready(x: Any) -> bool:
    """Whether x is what ops are for, now: a plain tensor with values, and nobody differentiates or traces the call."""
    # First of all: a compiled call is the host's own, and nothing else of this is traced.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return type(x) is torch.Tensor and x.device.type != "meta" and x.numel() > 0


class HostPolicy(ABC):
    """What the hosts differ in.

    `roots`: the packages that hold ldm's files. `layers`: (module, name) of classes that compute what torch's own do.
    `in_captured_calls`: rules that do their work while a whole call is captured only. Called one by one from Python, so
    many small questions cost more than they save.
    `works_on_cpu`: also with ops that are stock torch. `under_autocast`: the host runs models of half precision so, and
    a block leaves it for the time of the call. `pads_by_job`: the padding of convolutions changes from job to job.
    `packs_weights`: linears of one input may be laid together in memory.
    `vae_bias_in_norm`: the bias of a VAE block's first convolution is added by the norm after it, where that is free.
    """

    roots: ClassVar[tuple[str, ...]]
    layers: ClassVar[frozenset[tuple[str, str]]]
    in_captured_calls: ClassVar[frozenset[str]]
    works_on_cpu: ClassVar[bool]
    under_autocast: ClassVar[bool]
    pads_by_job: ClassVar[bool]
    packs_weights: ClassVar[bool]
    vae_bias_in_norm: ClassVar[bool]

    @abstractmethod
    def permits(self, rule: BlockRule, module: nn.Module) -> bool:
        """Whether the rule may do the work of this module at all, now."""

    @abstractmethod
    def captures(self) -> bool:
        """Whether what runs is captured as a whole."""

    @abstractmethod
    def attention_is_plain(self, options: Mapping[str, Any] | None) -> bool:
        """Whether attention is its weights and softmax, now; `options`: the host's for a transformer, None of a VAE."""

    @abstractmethod
    def fails(self, rule: BlockRule, error: Exception) -> bool:
        """Take note of an error; whether it is to reach the host, in place of a fallback."""

    def is_usual(self, module: nn.Module) -> bool:  # noqa: ARG002 -- for hosts that replace forwards of classes
        """Whether the methods of the module's class are the ones that the rules were written for, now."""
        return True

    def is_of(self, module: nn.Module, file: str, *names: str) -> bool:
        return self.is_class(type(module), file, *names)

    def is_class(self, kind: type, file: str, *names: str) -> bool:
        """By name: what is asked of a class must not import the host. `file`: e.g. "modules.attention"."""
        return kind.__name__ in names and kind.__module__ in {f"{root}.{file}" for root in self.roots}

    def is_plain(self, layer: Any, x: torch.Tensor) -> bool:
        """Whether layer(x) is its weights' product with x, or norm of x, and nothing else, now."""
        kind = type(layer)
        if kind not in _TORCH_LAYERS and (kind.__module__, kind.__qualname__) not in self.layers:
            return False
        return untouched(layer) and parameters_of_kind(layer, x)

    def all_plain(self, x: torch.Tensor, *layers: Any) -> bool:
        return all(self.is_plain(layer, x) for layer in layers)

    def all_taken(self, x: torch.Tensor, *layers: Any) -> bool:
        """Whether each layer's call is `conv2d` of its weights, now, and these lie as the op reads them."""
        return all(takes(layer, x, self.is_plain) for layer in layers)

    def allows(self, rule: BlockRule, module: nn.Module, x: Any) -> bool:
        """Whether the rule does the work of the module on x, now, if the layers inside are plain."""
        if not is_ready(x) or (rule.name in self.in_captured_calls and not self.captures()):
            return False
        device = x.device.type
        # Autocast takes norms and softmax to float32 and all else to one dtype, and so do the ops inside: where that is
        # x's dtype and the weights', which is asked layer by layer.
        agrees = self.under_autocast and torch.get_autocast_dtype(device) == x.dtype
        if torch.is_autocast_enabled(device) and not agrees:
            return False
        pays = self.works_on_cpu and rule.worth_it_on_cpu is not None and x.numel() >= rule.worth_it_on_cpu
        return (pays or through_op(rule.op, x)) and self.permits(rule, module)


@dataclass(frozen=True)
class BlockRule:
    """For the classes `kinds` of ldm's `file`; with `path` for the Sequential at that place of the model.

    `forward` gives None where the host's own is to run: nothing has been changed by then.
    `model`: whose block it is, "UNet" or "VAE". `op`: the one that the rule is for. `worth_it_on_cpu`: from how many
    values on it pays with ops that are stock torch; None if never. `channels_last`: with convolutions of another layout
    each use would cost copies. `slices`: the host's own forward goes on in smaller pieces where memory runs out.
    `packs`: linears are laid together where the host's policy allows it. `calls`: as a rule's (rewrite/apply.py).
    """

    name: str
    summary: str
    model: str
    file: str
    kinds: tuple[str, ...]
    op: str
    why_not: Callable[[HostPolicy, Any], str | None]
    forward: Callable[..., torch.Tensor | None]
    worth_it_on_cpu: int | None = None
    channels_last: bool = True
    slices: bool = False
    packs: bool = False
    path: str | None = None
    calls: tuple[str, ...] = ()

    def applies(self, policy: HostPolicy, module: nn.Module, path: str = "") -> bool:
        if self.path is not None:
            return path == self.path and type(module) is nn.Sequential
        return policy.is_of(module, self.file, *self.kinds)

    def replacement(self, policy: HostPolicy) -> Guard:
        """The rule's forward as a method, and the class's own wherever that has no answer or fails, or where the module
        is no longer what it was.
        """
        # A host's classes are looked at by its policy.
        return Guard(self.method(policy), partial(self.why_not, policy), looks_at_classes=False, calls=self.calls)

    def method(self, policy: HostPolicy) -> Callable[..., Any]:
        """The rule's forward; NotImplemented where it has no answer or fails."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            answer = None
            if args and policy.allows(self, module, args[0]):
                try:
                    answer = self._answer(policy, module, *args, **kwargs)
                except Exception as error:
                    if policy.fails(self, error):
                        raise
            # The host's own does not run while an error is at hand: its frames hold the memory that may have run out.
            return NotImplemented if answer is None else answer

        return forward

    def _answer(self, policy: HostPolicy, module: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return self.forward(policy, module, x, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return self.forward(policy, module, x, *args, **kwargs)
