"""A copy of the host's model or VAE with everything of ours in it, through the hooks that ComfyUI has for nodes.

Nothing is changed in the model itself: ComfyUI applies the patches of the copy when that is loaded, and takes them
back before it loads another one of the same weights, the original among them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

from rocm_sd import arch, settings
from rocm_sd.engine import LEVELS
from rocm_sd.engine.capture import graphs_wanted, start_compiling
from rocm_sd.engine.convolutions import CHANNELS_LAST, choose_layout, choose_library, convolution_dtype
from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.integrations.comfyui.approximated_steps import ApproximatedSteps
from rocm_sd.integrations.comfyui.attention import OPTION, is_our_override, override_for
from rocm_sd.integrations.comfyui.channels_last import ChannelsLast
from rocm_sd.integrations.comfyui.comfyui_policy import (
    MODEL_RULES,
    VAE_RULES,
    ComfyUIPolicy,
    StepGraph,
    compiled_ahead,
    find,
)
from rocm_sd.integrations.comfyui.host import KEY, PatchReport, is_comfy, require, the
from rocm_sd.integrations.ldm import in_words, quality_of, settings_for
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.rewrite.forwards import is_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from rocm_sd.integrations.ldm import BlockRule, HostSetting
    from rocm_sd.rewrite.guarding import Guard

__all__ = ["optimize_attention", "optimize_handed", "optimize_model", "optimize_vae", "report_of", "stock_clone"]

_UNET = "diffusion_model"
_UNET_KIND = ("UNetModel", "ldm.modules.diffusionmodules.openaimodel")
# What a setting may say and only the host can do: where it does.
_HOSTS_OWN_WAYS = {
    "merged": "the node TomePatchModel does",
    "eight_bits": "weight_dtype of the node Load Diffusion Model keeps weights in fp8",
    "small_decoder": "the node Load VAE has taesd",
}
_VAES = (("AutoencoderKL", "ldm.models.autoencoder"), ("AutoencodingEngine", "ldm.models.autoencoder"))


def report_of(target: Any) -> PatchReport | None:
    """What was done to a MODEL or a VAE of the host, if anything was."""
    patcher = getattr(target, "patcher", target)
    ask = getattr(patcher, "get_attachment", None)
    found = ask(KEY) if callable(ask) else None
    return found if isinstance(found, PatchReport) else None


def stock_clone(patcher: Any) -> Any:
    """A copy without anything of ours; what other nodes have done stays."""
    extension = the("comfy.patcher_extension")
    clone = patcher.clone()
    for name in [name for name, value in clone.object_patches.items() if is_ours(value)]:
        del clone.object_patches[name]
    options = clone.model_options.get("transformer_options", {})
    if is_our_override(options.get(OPTION)):
        del options[OPTION]
    kinds = ["DIFFUSION_MODEL", "SAMPLER_SAMPLE", *(["CALC_COND_BATCH"] if _guides() else [])]
    for kind in (getattr(extension.WrappersMP, name) for name in kinds):
        clone.remove_wrappers_with_key(kind, KEY)
    clone.remove_callbacks_with_key(extension.CallbacksMP.ON_DETACH, KEY)
    clone.remove_injections(KEY)
    clone.remove_attachments(KEY)
    return clone


def optimize_attention(patcher: Any, level: str) -> Any:
    """The host's attention, of whatever model, through the op."""
    clone, report = _begin(patcher, "attention", level, "exact")
    _override_attention(clone, report)
    return clone


def optimize_model(patcher: Any, level: str, quality: str) -> Any:
    """Attention, fused blocks, captured steps, and shallow ones where `quality` allows them; of a model that is not a
    UNet of Stable Diffusion attention alone.
    """
    clone, report = _begin(patcher, "model", level, quality)
    _override_attention(clone, report)
    unet = getattr(clone.model, _UNET, None)
    kind: type = type(unet)
    if unet is None or not is_comfy(kind, *_UNET_KIND):
        report.notes.append(f"only its attention is replaced: {kind.__name__} is no UNet of SD 1.5, SD 2 or SDXL")
        if report.quality != "exact":
            report.notes.append(f"all is exact: quality {report.quality} leaves out layers of such a UNet")
        return clone
    kept = _lay_out(clone, report, lambda model: model.diffusion_model)
    _patch(clone, report, unet, MODEL_RULES, f"{_UNET}.", kept)
    device = clone.load_device
    # Before the graph's wrapper, and so around it: what wraps the model inside of that keeps steps from being captured.
    _use_library(clone, report)
    settings, why_exact = settings_for(unet, report.quality, _HOSTS_OWN_WAYS, guides=_guides())
    if why_exact is not None:
        report.notes.append(f"the UNet: {why_exact}")
    graph = None
    if level == "memory":
        report.notes.append("steps are not captured as graphs: level memory holds no memory for them")
    elif graphs_wanted(device):
        graph = StepGraph(unet, level)
        report.sources.append(graph.calls.notes)
        start_compiling(device)
    else:
        report.notes.append(f"steps are not captured as graphs: {_why_no_graphs(device)}")
    _wrap_steps(clone, report, unet, settings, graph)
    return clone


def optimize_vae(vae: Any, level: str) -> Any:
    """A copy of the host's VAE whose patcher has the fused blocks. Both have the same weights."""
    patcher = getattr(vae, "patcher", None)
    if patcher is None:
        raise Unsupported("ROCmOptimizedVAE", f"a {type(vae).__name__} without a model patcher")
    model = patcher.model
    if not any(is_comfy(type(model), *kind) for kind in _VAES):
        raise Unsupported("ROCmOptimizedVAE", f"a VAE that is a {type(model).__name__}")
    clone, report = _begin(patcher, "VAE", level, "exact")
    kept = _lay_out(clone, report, lambda first_stage: first_stage)
    _patch(clone, report, model, VAE_RULES, "", kept)
    library = choose_library(clone.load_device)
    report.sources.append(library.notes if library.serves_a_vae else library.notes_of_a_vae)
    for name in ("decode", "encode"):
        if name not in clone.object_patches and hasattr(model, name):
            clone.add_object_patch(name, compiled_ahead(model, name, report, library))
    if level != "auto":
        report.notes.append("how much is decoded at once, and tiling, are ComfyUI's own at every level")
    copied = copy.copy(vae)
    copied.patcher = clone
    return copied


def optimize_handed(target: Any, level: str, quality: str = "exact") -> Any:
    """Of what ComfyUI hands a node, a model or a VAE, the optimised copy; a VAE has no approximations."""
    if getattr(target, "patcher", None) is None:
        return optimize_model(target, level, quality)
    quality_of(quality)
    return optimize_vae(target, level)


def _begin(patcher: Any, what: str, level: str, quality: str) -> tuple[Any, PatchReport]:
    require_one_of("optimization_level", level, LEVELS)
    quality_of(quality)
    require(patcher)
    clone = stock_clone(patcher)
    device = clone.load_device
    report = PatchReport(what, arch.detect(device).name, level, in_words(quality))
    if device.type == "cpu":
        report.notes.append(
            "on a CPU each call is ComfyUI's own: the ops are stock torch there, unless a setting names others"
        )
    else:
        reason = triton_kernels.why_not(device)
        if reason is not None:
            report.notes.append(f"Triton kernels are not used: {reason}")
    clone.set_attachments(KEY, report)
    return clone, report


def _override_attention(clone: Any, report: PatchReport) -> None:
    options = clone.model_options.setdefault("transformer_options", {})
    if OPTION in options:
        report.notes.append("attention is skipped, because another node computes it")
        return
    if not hasattr(the("comfy.ldm.modules.attention"), "wrap_attn"):
        report.notes.append("attention is skipped, because this ComfyUI has no attention override")
        return
    options[OPTION] = override_for(report)
    report.notes.append("attention without a mask goes through the attention op; with one it is ComfyUI's own")


def _patch(
    clone: Any, report: PatchReport, model: nn.Module, rules: Sequence[BlockRule], prefix: str, kept: str | None
) -> None:
    """`kept`: why the model is not laid out channels-last, or None where it is."""
    policy = ComfyUIPolicy(report)
    found = find(model, rules, policy, clone.object_patches, clone.object_patches_backup, prefix.rstrip("."))
    for rule, module, change in found:
        reason = change.why_skipped or (kept if rule.channels_last else None)
        if reason is not None:
            report.changes.append(replace(change, why_skipped=reason))
            continue
        guard = rule.replacement(policy)
        report.changes.append(replace(change, why_now=partial(_why_now, guard, rule, clone.load_device, ref(module))))
        clone.add_object_patch(f"{change.path}.forward", MethodType(guard.stand_in, module))


def _why_now(guard: Guard, rule: BlockRule, device: torch.device, held: ref[nn.Module]) -> str | None:
    module = held()
    if module is None:
        return None
    if device.type == "cpu" and settings.implementation_for(rule.op) is None:
        return "the ops are stock torch on a CPU"
    return guard.why(module)


def _lay_out(clone: Any, report: PatchReport, part: Any) -> str | None:
    """Why the convolutions keep their layout, or None where they are laid out channels-last."""
    # Weights that ComfyUI casts at each call are convolved in the other dtype.
    dtype = getattr(clone.model, "manual_cast_dtype", None) or convolution_dtype(part(clone.model))
    layout = choose_layout(clone.load_device, dtype)
    if layout.implementation != CHANNELS_LAST:
        report.notes.append(f"convolutions keep their layout ({layout.why}), and their blocks are ComfyUI's own")
        return "convolutions keep their layout"
    laid = ChannelsLast(part, layout.why)
    injection = the("comfy.patcher_extension").PatcherInjection(inject=laid.inject, eject=laid.eject)
    clone.set_injections(KEY, [injection])
    report.sources.append(laid.notes)
    return None


def _use_library(clone: Any, report: PatchReport) -> None:
    library = choose_library(clone.load_device)
    report.sources.append(library.notes)
    if not library.is_wanted:
        return

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with library.in_force(executor.class_obj, args, kwargs):
            return executor(*args, **kwargs)

    clone.add_wrapper_with_key(the("comfy.patcher_extension").WrappersMP.DIFFUSION_MODEL, KEY, wrapper)


def _wrap_steps(
    clone: Any, report: PatchReport, unet: nn.Module, settings: list[HostSetting], graph: StepGraph | None
) -> None:
    """By graphs, by shallow steps, or by both."""
    extension = the("comfy.patcher_extension")
    steps: StepGraph | ApproximatedSteps | None = graph
    if settings:
        steps = approximated = ApproximatedSteps(unet, settings, graph)
        report.sources.append(approximated.steps.notes)
        clone.add_wrapper_with_key(extension.WrappersMP.SAMPLER_SAMPLE, KEY, approximated.sampling)
        if _guides() and any(setting.skipping.skips_guidance for setting in settings):
            report.sources.append(approximated.guidance.notes)
            clone.add_wrapper_with_key(extension.WrappersMP.CALC_COND_BATCH, KEY, approximated.guidance.wrapper)
    if steps is not None:
        clone.add_wrapper_with_key(extension.WrappersMP.DIFFUSION_MODEL, KEY, steps.wrapper)
        clone.add_callback_with_key(extension.CallbacksMP.ON_DETACH, KEY, steps.detached)


def _guides() -> bool:
    """Whether the host lets the half without the prompt be left out."""
    return hasattr(the("comfy.patcher_extension").WrappersMP, "CALC_COND_BATCH")


def _why_no_graphs(device: torch.device) -> str:
    return "a CPU has no launches to save" if device.type == "cpu" else "ROCM_SD_STEP_GRAPH is 0"
