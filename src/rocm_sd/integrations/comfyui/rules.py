"""What a rule for one of the host's classes is, and how its forward is put in place of the host's for one module.

A rule's forward answers None where the host's own is to run: nothing has been changed by then.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine import is_out_of_memory
from rocm_sd.engine.capture import compile_kernels
from rocm_sd.integrations.comfyui.host import belongs_to_the_host
from rocm_sd.rewrite import Change
from rocm_sd.rewrite.forwards import is_ours, mark
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from rocm_sd.engine.convolutions import Library
    from rocm_sd.integrations.comfyui.record import Record

__all__ = ["BlockRule", "compiled_ahead", "find", "replacement"]


@dataclass(frozen=True)
class BlockRule:
    """`applies` says whether a module, by its path in the model, is of the kind; `why_not` why it is left alone.

    `slices`: the host's own forward goes on in smaller pieces where memory runs out.
    """

    name: str
    summary: str
    applies: Callable[[str, nn.Module], bool]
    why_not: Callable[[Any], str | None]
    forward: Callable[..., Any]
    slices: bool = False


def replacement(rule: BlockRule, module: nn.Module, record: Record) -> MethodType:
    """For `add_object_patch`: the rule's forward, and the class's own wherever that has no answer or fails."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rule.name not in record.failed and not torch.compiler.is_compiling():
            try:
                answer = rule.forward(self, *args, **kwargs)
            except Exception as error:
                # A host that slices does so below, without the error at hand: its frames hold memory.
                if belongs_to_the_host(error) and not (rule.slices and is_out_of_memory(error)):
                    raise
                answer = None
                if not is_out_of_memory(error):
                    record.fail(rule.name, error)
            if answer is not None:
                return answer
        return type(self).forward(self, *args, **kwargs)

    return MethodType(mark(forward, rule=True), module)


def compiled_ahead(model: nn.Module, name: str, record: Record, library: Library) -> MethodType:
    """For `add_object_patch`: the model's own method, whose kernels are compiled side by side before its first use.

    It runs with the library's measured setting, if that serves a VAE.
    """
    ready: set[torch.dtype] = set()

    def call(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with library.in_force(self, x) if library.serves_a_vae else nullcontext():
            return called(self, x, *args, **kwargs)

    def called(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self), name)
        if x.dtype not in ready:
            ready.add(x.dtype)
            try:
                compile_kernels(lambda: method(self, x, *args, **kwargs), x.device, x.dtype)
            except Exception as error:
                if belongs_to_the_host(error):
                    raise
                record.fail(f"compiling ahead of {name}", error)
        return method(self, x, *args, **kwargs)

    return MethodType(mark(call, name=name), model)


def find(
    model: nn.Module, rules: Sequence[BlockRule], patched: dict[str, Any], backup: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[BlockRule, nn.Module, Change]]:
    """Every module that a rule is for, and whether it is replaced. `patched`: the host's object patches by name, and
    `backup` what it puts back before it applies others: a model that is loaded has those of another node on it.
    """
    for path, module in model.named_modules(prefix=prefix):
        for rule in rules:
            if not rule.applies(path.removeprefix(f"{prefix}."), module):
                continue
            reason = rule.why_not(module)
            other = patched.get(f"{path}.forward")
            if reason is None and other is not None and not is_ours(other):
                reason = "another node has replaced its forward"
            if reason is None and f"{path}.forward" not in backup and not untouched(module):
                reason = "it has a hook or a forward of its own"
            yield rule, module, Change(path, type(module).__name__, rule.name, left_because=reason)
            break
