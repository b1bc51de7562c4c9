"""ComfyUI's policy for the rules of ldm, and how a rule's forward is put in place of the host's for one module.

A layer of `comfy.ops` may cast or move its weight at each call, or pass it through functions (a LoRA on a model that is
loaded in part). It is looked at anew in every call: the host loads and unloads models between two of them.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import MethodType
from typing import TYPE_CHECKING, Any

from rocm_sd.engine import is_out_of_memory
from rocm_sd.engine.capture import compile_kernels
from rocm_sd.integrations.comfyui.attention import OPTION, is_our_override
from rocm_sd.integrations.comfyui.host import PatchReport, belongs_to_the_host
from rocm_sd.integrations.ldm import NORM_OUT, TRANSFORMER_RULES, UNET_RULES, VAE_RULES, HostPolicy
from rocm_sd.rewrite import Change
from rocm_sd.rewrite.forwards import is_ours, mark
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from rocm_sd.engine.convolutions import ConvolutionLibrary
    from rocm_sd.integrations.ldm import BlockRule

__all__ = ["MODEL_RULES", "VAE_RULES", "ComfyUIPolicy", "compiled_ahead", "find", "fused"]

MODEL_RULES = (*UNET_RULES, NORM_OUT, *TRANSFORMER_RULES)
_FUSED: ContextVar[bool] = ContextVar("rocm_sd_comfyui_fused", default=False)


@contextmanager
def fused() -> Iterator[None]:
    """Within, transformer blocks go their fused way: what runs is captured, and Python runs once."""
    token = _FUSED.set(True)
    try:
        yield
    finally:
        _FUSED.reset(token)


class ComfyUIPolicy(HostPolicy):
    """Of one model that was patched."""

    roots = ("comfy.ldm",)
    # The others of `comfy.ops` (fp8, scaled, mixed precision) have products of their own.
    layers = frozenset(
        ("comfy.ops", f"disable_weight_init.{n}") for n in ("Linear", "Conv2d", "GroupNorm", "LayerNorm")
    )
    in_captured_calls = frozenset({"transformer"})
    works_on_cpu = under_autocast = pads_by_job = False
    # The host's patcher changes them.
    packs_weights = False
    # The convolution adds it: a picture that was decoded before comes out the same, bit for bit.
    vae_bias_in_norm = False

    def __init__(self, report: PatchReport) -> None:
        self._report = report

    def permits(self, rule: BlockRule, module: nn.Module) -> bool:  # noqa: ARG002 -- one answer for all modules
        return rule.name not in self._report.failed

    def captures(self) -> bool:
        return _FUSED.get()

    def attention_is_plain(self, options: Mapping[str, Any] | None) -> bool:
        if options is None:
            return True
        patched = options.get("patches") or options.get("patches_replace")
        return not patched and is_our_override(options.get(OPTION))

    def fails(self, rule: BlockRule, error: Exception) -> bool:
        if is_out_of_memory(error):
            return not rule.slices
        if belongs_to_the_host(error):
            return True
        self._report.fail(rule.name, error)
        return False

    def is_plain(self, layer: Any, x: torch.Tensor) -> bool:
        if not super().is_plain(layer, x) or getattr(layer, "comfy_cast_weights", False):
            return False
        return not (getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None))


def compiled_ahead(model: nn.Module, name: str, report: PatchReport, library: ConvolutionLibrary) -> MethodType:
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
                report.fail(f"compiling ahead of {name}", error)
        return method(self, x, *args, **kwargs)

    return MethodType(mark(call, name=name), model)


def find(
    model: nn.Module,
    rules: Sequence[BlockRule],
    policy: HostPolicy,
    patched: dict[str, Any],
    backup: dict[str, Any],
    prefix: str = "",
) -> Iterator[tuple[BlockRule, nn.Module, Change]]:
    """Every module that a rule is for, and whether it is replaced. `patched`: the host's object patches by name, and
    `backup` what it puts back before it applies others: a model that is loaded has those of another node on it.
    """
    for path, module in model.named_modules(prefix=prefix):
        for rule in rules:
            if not rule.applies(policy, module, path.removeprefix(f"{prefix}.")):
                continue
            reason = rule.why_not(policy, module)
            other = patched.get(f"{path}.forward")
            if reason is None and other is not None and not is_ours(other):
                reason = "another node has replaced its forward"
            if reason is None and f"{path}.forward" not in backup and not untouched(module):
                reason = "it has a hook or a forward of its own"
            yield rule, module, Change(path, type(module).__name__, rule.name, why_skipped=reason)
            break
