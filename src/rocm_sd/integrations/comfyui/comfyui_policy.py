"""ComfyUI's policies: for the rules of ldm, with how a rule's forward is put in place of the host's for one module, and
for the graphs of its UNet.

A layer of `comfy.ops` may cast or move its weight at each call, or pass it through functions (a LoRA on a model that is
loaded in part). It is looked at anew in every call: the host loads and unloads models between two of them.

The host's loop stays its own, so previews, interrupts and samplers see nothing of the graphs. What another node has put
into the model, and what is not known, is never captured: the call then runs as it would without graphs, and the reason
is noted.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch

from rocm_sd.engine import free_memory, is_out_of_memory
from rocm_sd.engine.capture import CapturedCalls, HostCall, Policy, compile_kernels, why_foreign_layer
from rocm_sd.integrations.comfyui.attention import OPTION, is_our_override
from rocm_sd.integrations.comfyui.host import PatchReport, belongs_to_the_host, say
from rocm_sd.integrations.ldm import NORM_OUT, TRANSFORMER_RULES, UNET_RULES, VAE_RULES, HostPolicy, run_pass
from rocm_sd.rewrite import Change
from rocm_sd.rewrite.forwards import is_ours, mark
from rocm_sd.rewrite.layers import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from rocm_sd.engine.convolutions import ChosenLibrary
    from rocm_sd.integrations.ldm import BlockRule

__all__ = [
    "MODEL_RULES", "PACKAGES", "VAE_RULES", "ComfyUIPolicy", "StepGraph", "compiled_ahead", "find", "fused",
    "plain_branch", "why_not_plain",
]  # fmt: skip

MODEL_RULES = (*UNET_RULES, NORM_OUT, *TRANSFORMER_RULES)
# Level auto captures while so much of the card's memory is free.
_FREE_FOR_AUTO = 0.25
PACKAGES = frozenset({"comfy", "torch"})
# What the host puts there for patches and for its own bookkeeping. A UNet without patches reads none of them.
_READ_BY_PATCHES_ONLY = frozenset({
    "activations_shape", "block", "block_index", "callbacks", "cond_or_uncond", "original_shape", "patches",
    "patches_replace", "sample_sigmas", "sigmas", "transformer_index", "uuids", "wrappers", OPTION,
})  # fmt: skip
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


class WeaklyBound:
    """A method that lies on a model and does not keep it alive. One that does is a leak to the host, which says so and
    collects all garbage.
    """

    def __init__(self, function: Callable[..., Any], owner: nn.Module) -> None:
        self.__func__, self._held = function, ref(owner)

    @property
    def __self__(self) -> nn.Module | None:
        return self._held()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._held(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeaklyBound:
        """As of any method: that of the model's copy, which is being made."""
        owner: Any = copy.deepcopy(self._held(), memo)
        return WeaklyBound(self.__func__, owner)

    def __reduce__(self) -> Any:
        """As of any method: looked up by its name."""
        return getattr, (self._held(), self.__func__.__name__)


def compiled_ahead(model: nn.Module, name: str, report: PatchReport, library: ChosenLibrary) -> WeaklyBound:
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

    return WeaklyBound(mark(call, name=name), model)


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


class _GraphPolicy(Policy):
    def __init__(self, level: str) -> None:
        super().__init__("the UNet")
        self._level = level

    def why_not(self, model: nn.Module, device: torch.device) -> str | None:
        reason = why_foreign_layer(model, PACKAGES, own_hooks=True)
        return reason or _why_weights(model, device) or self._why_no_room(device)

    def dtype(self, model: nn.Module, call: HostCall) -> torch.dtype:  # noqa: ARG002 -- weights may be cast in each call
        found: torch.dtype = call.args[0].dtype
        return found

    def propagates(self, error: Exception) -> bool:
        # An interrupt is reset by being raised: it must reach the host. Memory may do for the call itself.
        return belongs_to_the_host(error) and not isinstance(error, torch.OutOfMemoryError)

    def say(self, sentence: str) -> None:
        say(sentence)

    def _why_no_room(self, device: torch.device) -> str | None:
        if self._level == "performance" or device.type != "cuda":
            return None
        free, total = free_memory(device), torch.cuda.get_device_properties(device).total_memory
        if free is None or free >= _FREE_FOR_AUTO * total:
            return None
        return f"level auto captures while {_FREE_FOR_AUTO:.0%} of the memory is free, and {free / total:.0%} is"


class StepGraph:
    """`wrapper` is what the host calls around the UNet (WrappersMP.DIFFUSION_MODEL)."""

    def __init__(self, unet: nn.Module, level: str) -> None:
        self._unet = ref(unet)
        self.calls = CapturedCalls(unet, _GraphPolicy(level))

    def wrapper(
        self,
        executor: Any,
        x: torch.Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options

        def eager() -> Any:
            return executor(x, timesteps, context, y, _copied(control), options, **kwargs)

        if torch.compiler.is_compiling():
            return eager()
        reason = why_not_plain(self._unet(), executor, options, kwargs)
        if reason is not None:
            self.calls.count_eager(reason)
        if reason is not None or type(x) is not torch.Tensor:
            return eager()
        override = options.get(OPTION)
        body = _Forward(WeakMethod(executor.original), override)
        return self.calls(HostCall((x, timesteps, context, y, control), {}, x.device, eager, body, override))

    def branch(
        self, executor: Any, args: tuple[Any, ...], options: dict[str, Any], depth: int, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole or a shallow pass of a call that is plain, as a kind of call by itself: `features` is an input."""
        override = options.get(OPTION)
        body = _Branch(WeakMethod(executor.original), override, depth)

        def eager() -> tuple[torch.Tensor, torch.Tensor]:
            return plain_branch(executor, args, options, depth, features)

        also = (override, "branch", depth)
        given: tuple[torch.Tensor, torch.Tensor] = self.calls(
            HostCall((*args, features), {}, args[0].device, eager, body, also)
        )
        return given

    def detached(self, _patcher: Any, unpatch_all: bool) -> None:
        """The host's call once a model is given up; also between two uses of one that stays where it is."""
        if unpatch_all:
            self.calls.clear()
        else:
            self.calls.sleep()


def why_not_plain(unet: nn.Module | None, executor: Any, options: dict[str, Any], kwargs: dict[str, Any]) -> str | None:
    """What in a call is not the host's forward and its tensors alone, in words."""
    try:
        return _why_not_plain(unet, executor, options, kwargs)
    except (AttributeError, TypeError) as error:
        return f"this ComfyUI's wrappers are not as they are known here ({error})"


def _why_not_plain(
    unet: nn.Module | None, executor: Any, options: dict[str, Any], kwargs: dict[str, Any]
) -> str | None:
    # Raises where it is no method: what is captured must not keep the model alive.
    WeakMethod(executor.original)
    if unet is None or executor.class_obj is not unet:
        return "it is another model than the one that was optimised"
    # Those around this one run as always. One inside of it would run once, when captured.
    if executor.idx != len(executor.wrappers) - 1:
        return "another node wraps the model inside of this one"
    if any(value is not None for value in kwargs.values()):
        return f"it is called with {min(kwargs)}"
    for name in ("patches", "patches_replace"):
        for kind, found in options.get(name, {}).items():
            if found:
                return f"another node patches it ({kind})"
    unknown = sorted(options.keys() - _READ_BY_PATCHES_ONLY)
    if unknown:
        return f"its options have {unknown[0]}, which is not known here"
    override = options.get(OPTION)
    return None if override is None or is_our_override(override) else "another node computes its attention"


def plain_branch(
    executor: Any, args: tuple[Any, ...], options: dict[str, Any], depth: int, features: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole or a shallow pass with no graph; `args`: x, timesteps, context and y. There is no control."""
    original = executor.original
    return run_pass(original.__func__, original.__self__, depth, features, *args, None, options)


@dataclass(frozen=True)
class _Branch:
    """A pass of the host's forward that takes features or gives them, with all that is not a tensor decided."""

    original: WeakMethod[Callable[..., Any]]
    override: Any
    depth: int

    def __call__(
        self, x: Any, timesteps: Any, context: Any, y: Any, features: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = {} if self.override is None else {OPTION: self.override}
        original: Any = self.original()
        assert original is not None
        args = (x, timesteps, context, y, None, options)
        with fused():
            return run_pass(original.__func__, original.__self__, self.depth, features, *args)


@dataclass(frozen=True)
class _Forward:
    """The host's forward with all that is not a tensor decided: no patches, and our attention or the host's own."""

    original: WeakMethod[Callable[..., Any]]
    override: Any

    def __call__(self, x: Any, timesteps: Any, context: Any, y: Any, control: Any) -> Any:
        options = {} if self.override is None else {OPTION: self.override}
        original = self.original()
        assert original is not None
        with fused():
            return original(x, timesteps, context, y, control, options)


def _copied(control: Any) -> Any:
    """The host takes a ControlNet's tensors out of these lists as it goes: a call made twice needs them twice."""
    if not isinstance(control, dict):
        return control
    return {name: list(value) if isinstance(value, list) else value for name, value in control.items()}


def _why_weights(model: nn.Module, device: torch.device) -> str | None:
    for module in model.modules():
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
            return "its weights are computed around each call, as a LoRA's of a model that is loaded in part"
        parameters = module.__dict__["_parameters"].values()
        if any(parameter is not None and parameter.device != device for parameter in parameters):
            return "its weights are not all on the GPU: the host has loaded it in part"
    return None
