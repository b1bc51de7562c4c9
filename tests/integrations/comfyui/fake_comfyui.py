"""Small stand-ins with the interfaces of ComfyUI that the nodes touch: its layers, blocks, patcher and wrappers.

They compute what a Stable Diffusion UNet computes, in as few lines as that takes. test_comfyui_fakes.py holds their
names and signatures against a real ComfyUI wherever there is one.
"""

# ruff: noqa: ARG002 -- the signatures are the host's
from __future__ import annotations

import copy
import sys
import types
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

ATTENTION = "comfy.ldm.modules.attention"
UNET = "comfy.ldm.modules.diffusionmodules.openaimodel"


def _of(module, qualname=None):
    def named(cls):
        cls.__module__, cls.__qualname__ = module, qualname or cls.__name__
        return cls

    return named


class _Casts:
    comfy_cast_weights = False
    weight_function: ClassVar[list] = []
    bias_function: ClassVar[list] = []

    def weights(self, x):
        weight, bias = self.weight.to(x), None if self.bias is None else self.bias.to(x)
        for function in self.weight_function:
            weight = function(weight)
        return weight, bias

    def casts(self):
        return self.comfy_cast_weights or self.weight_function or self.bias_function


@_of("comfy.ops", "disable_weight_init.Linear")
class Linear(nn.Linear, _Casts):
    def forward(self, x):
        return F.linear(x, *self.weights(x)) if self.casts() else super().forward(x)


@_of("comfy.ops", "disable_weight_init.Conv2d")
class Conv2d(nn.Conv2d, _Casts):
    def forward(self, x):
        return self._conv_forward(x, *self.weights(x)) if self.casts() else super().forward(x)


@_of("comfy.ops", "disable_weight_init.GroupNorm")
class GroupNorm(nn.GroupNorm, _Casts):
    pass


@_of("comfy.ops", "disable_weight_init.LayerNorm")
class LayerNorm(nn.LayerNorm, _Casts):
    pass


@_of(UNET)
class ResBlock(nn.Module):
    def __init__(self, channels, emb_channels, out_channels):
        super().__init__()
        self.use_scale_shift_norm = self.updown = self.skip_t_emb = self.exchange_temb_dims = False
        self.in_layers = nn.Sequential(GroupNorm(32, channels), nn.SiLU(), Conv2d(channels, out_channels, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), Linear(emb_channels, out_channels))
        self.out_layers = nn.Sequential(
            GroupNorm(32, out_channels), nn.SiLU(), nn.Dropout(0.0), Conv2d(out_channels, out_channels, 3, padding=1)
        )
        same = channels == out_channels
        self.skip_connection = nn.Identity() if same else Conv2d(channels, out_channels, 1)

    def forward(self, x, emb):
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


@_of(UNET)
class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, True, 2
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, output_shape=None):
        size = [2 * x.shape[2], 2 * x.shape[3]] if output_shape is None else list(output_shape[2:])
        return self.conv(F.interpolate(x, size=size, mode="nearest"))


@_of(UNET)
class Downsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.channels, self.use_conv, self.dims = channels, True, 2
        self.op = Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x):
        return self.op(x)


def plain_attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def wrap_attn(func):
    def wrapper(*args, **kwargs):
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        kwargs["_inside_attn_wrapper"] = True
        return func(*args, **kwargs) if override is None else override(func, *args, **kwargs)

    return wrapper


optimized_attention = wrap_attn(plain_attention)


@_of(ATTENTION)
class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim, heads):
        super().__init__()
        self.heads, self.dim_head, self.attn_precision = heads, query_dim // heads, None
        self.to_q = Linear(query_dim, query_dim, bias=False)
        self.to_k, self.to_v = (Linear(context_dim, query_dim, bias=False) for _ in range(2))
        self.to_out = nn.Sequential(Linear(query_dim, query_dim), nn.Dropout(0.0))

    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        source = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(source), self.to_v(source if value is None else value)
        return self.to_out(optimized_attention(q, k, v, self.heads, mask=mask, transformer_options=transformer_options))


@_of(ATTENTION)
class GEGLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = Linear(width, 8 * width)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


@_of(ATTENTION)
class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(GEGLU(width), nn.Dropout(0.0), Linear(4 * width, width))

    def forward(self, x):
        return self.net(x)


@_of(ATTENTION)
class BasicTransformerBlock(nn.Module):
    def __init__(self, width, heads, context_dim):
        super().__init__()
        self.ff_in, self.is_res, self.disable_self_attn, self.switch_temporal_ca_to_sa = False, True, False, False
        self.attn1, self.attn2 = CrossAttention(width, width, heads), CrossAttention(width, context_dim, heads)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(width) for _ in range(3))
        self.ff = FeedForward(width)

    def forward(self, x, context=None, transformer_options=None):
        x = x + self.attn1(self.norm1(x), transformer_options=transformer_options)
        x = x + self.attn2(self.norm2(x), context=context, transformer_options=transformer_options)
        return x + self.ff(self.norm3(x))


@_of(ATTENTION)
class SpatialTransformer(nn.Module):
    def __init__(self, channels, heads, context_dim, depth=1, use_linear=False):
        super().__init__()
        self.in_channels, self.use_linear = channels, use_linear
        self.norm = GroupNorm(32, channels, eps=1e-6)
        made = (Linear(channels, channels) if use_linear else Conv2d(channels, channels, 1) for _ in range(2))
        self.proj_in, self.proj_out = made
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(channels, heads, context_dim) for _ in range(depth)
        )

    def forward(self, x, context=None, transformer_options=None):
        blocks = self.transformer_blocks
        context = context if isinstance(context, list) else [context] * len(blocks)
        tokens = self.norm(x) if self.use_linear else self.proj_in(self.norm(x))
        tokens = tokens.flatten(2).transpose(1, 2)
        tokens = self.proj_in(tokens) if self.use_linear else tokens
        for number, block in enumerate(blocks):
            tokens = block(tokens, context=context[number], transformer_options=transformer_options)
        tokens = self.proj_out(tokens) if self.use_linear else tokens
        tokens = tokens.transpose(1, 2).reshape(x.shape)
        return x + (tokens if self.use_linear else self.proj_out(tokens))


@_of(UNET)
class UNetModel(nn.Module):
    """Down, middle, up and out, with the places where a ControlNet adds and a patch is called."""

    def __init__(self, width=32, context_dim=16, use_linear_in_transformer=False):
        super().__init__()
        self.dtype = torch.float32
        self.time_embed = Linear(1, 24)
        self.input_blocks = nn.ModuleList([
            Conv2d(4, width, 3, padding=1), ResBlock(width, 24, 2 * width),
            SpatialTransformer(2 * width, 4, context_dim, use_linear=use_linear_in_transformer),
            Downsample(2 * width), Upsample(2 * width),
        ])  # fmt: skip
        self.out = nn.Sequential(GroupNorm(32, 2 * width), nn.SiLU(), Conv2d(2 * width, 4, 3, padding=1))

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        options = {} if transformer_options is None else transformer_options
        wrappers = [one for found in options.get("wrappers", {}).get("diffusion_model", {}).values() for one in found]
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timesteps, context, y, control, options, **kwargs)

    def _forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        first, block, spatial, down, up = self.input_blocks
        emb = self.time_embed(timesteps[:, None] / 1000)
        h = block(first(x), emb)
        added = (control or {}).get("input", [])
        if added:
            h = h + added.pop()
        h = spatial(h, context, transformer_options)
        for patch in transformer_options.get("patches", {}).get("output_block_patch", []):
            h, _ = patch(h, h, transformer_options)
        return self.out(h + up(down(h), output_shape=h.shape))


class WrapperExecutor:
    def __init__(self, original, class_obj, wrappers, idx):
        self.original, self.class_obj, self.wrappers, self.idx = original, class_obj, wrappers, idx
        self.is_last = idx == len(wrappers)

    @classmethod
    def new_class_executor(cls, original, class_obj, wrappers, idx=0):
        return cls(original, class_obj, wrappers, idx)

    def __call__(self, *args, **kwargs):
        return WrapperExecutor(self.original, self.class_obj, self.wrappers, self.idx + 1).execute(*args, **kwargs)

    def execute(self, *args, **kwargs):
        run = self.original if self.is_last else self.wrappers[self.idx]
        return run(*args, **kwargs) if self.is_last else run(self, *args, **kwargs)


class WrappersMP:
    DIFFUSION_MODEL = "diffusion_model"
    SAMPLER_SAMPLE = "sampler_sample"


class CallbacksMP:
    ON_DETACH = "on_detach_after"


class PatcherInjection:
    def __init__(self, inject, eject):
        self.inject, self.eject = inject, eject


class ModelPatcher:
    """Patches are kept here, put on the model when it is used, and taken back when another copy is."""

    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.object_patches, self.object_patches_backup = {}, {}
        self.model_options = {"transformer_options": {}}
        self.wrappers, self.callbacks, self.injections, self.attachments = {}, {}, {}, {}
        self.is_injected = False

    def clone(self):
        made = type(self)(self.model, self.load_device, self.offload_device)
        made.object_patches, made.object_patches_backup = dict(self.object_patches), self.object_patches_backup
        made.model_options = copy.deepcopy(self.model_options)
        for name in ("wrappers", "callbacks"):
            kept = {kind: {key: list(value) for key, value in by.items()} for kind, by in getattr(self, name).items()}
            setattr(made, name, kept)
        made.injections = {key: list(value) for key, value in self.injections.items()}
        made.attachments, made.is_injected = dict(self.attachments), self.is_injected
        return made

    def add_object_patch(self, name, obj):
        self.object_patches[name] = obj

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        self.wrappers.setdefault(wrapper_type, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, wrapper_type, key):
        self.wrappers.get(wrapper_type, {}).pop(key, None)

    def get_wrappers(self, wrapper_type, key):
        return self.wrappers.get(wrapper_type, {}).get(key, [])

    def add_callback_with_key(self, call_type, key, callback):
        self.callbacks.setdefault(call_type, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, call_type, key):
        self.callbacks.get(call_type, {}).pop(key, None)

    def set_injections(self, key, injections):
        self.injections[key] = injections

    def remove_injections(self, key):
        self.injections.pop(key, None)

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def remove_attachments(self, key):
        self.attachments.pop(key, None)

    def get_attachment(self, key):
        return self.attachments.get(key)

    def patch_model(self, device_to=None, lowvram_model_memory=0, load_weights=True, force_patch_weights=False):
        for name, value in self.object_patches.items():
            *path, last = name.split(".")
            module = self.model.get_submodule(".".join(path))
            self.object_patches_backup.setdefault(name, getattr(module, last))
            setattr(module, last, value)
        for injection in (one for found in self.injections.values() for one in found):
            injection.inject(self)
            self.is_injected = True
        return self.model

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for name, value in self.object_patches_backup.items():
            *path, last = name.split(".")
            setattr(self.model.get_submodule(".".join(path)), last, value)
        self.object_patches_backup.clear()

    def detach(self, unpatch_all=True):
        if self.is_injected:
            for injection in (one for found in self.injections.values() for one in found):
                injection.eject(self)
            self.is_injected = False
        if unpatch_all:
            self.unpatch_model()
        for found in self.callbacks.get("on_detach_after", {}).values():
            for callback in found:
                callback(self, unpatch_all)
        return self.model


class Model(nn.Module):
    """What the host has around a UNet."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.diffusion_model = UNetModel().eval().requires_grad_(False)


def patcher() -> ModelPatcher:
    cpu = torch.device("cpu")
    return ModelPatcher(Model(), cpu, cpu)


def run(patched: ModelPatcher, steps=4, control=None, batch=2):
    """As the host does for one sampling: load, call once a step, let go of it."""
    patched.unpatch_model()
    patched.patch_model()
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(batch, 4, 8, 8, generator=generator), torch.randn(batch, 5, 16, generator=generator)
    for step in range(steps):
        options = copy.deepcopy(patched.model_options["transformer_options"])
        options |= {"wrappers": patched.wrappers, "sigmas": torch.tensor([1.0 + step]), "cond_or_uncond": [0, 1]}
        given = None if control is None else {"input": [control * (step + 1)], "middle": [], "output": []}
        time = torch.full((batch,), 900.0 - 100 * step)
        x = x - 0.1 * patched.model.diffusion_model(
            x, time, context=text, control=given, transformer_options=options
        )  # fmt: skip
    patched.detach(unpatch_all=False)
    return x


def install(monkeypatch) -> None:
    """Have these found where the host's modules would be."""
    extension = types.ModuleType("comfy.patcher_extension")
    for kind in (WrappersMP, CallbacksMP, PatcherInjection, WrapperExecutor):
        setattr(extension, kind.__name__, kind)
    attention = types.ModuleType(ATTENTION)
    attention.wrap_attn = wrap_attn
    for module in (extension, attention):
        monkeypatch.setitem(sys.modules, module.__name__, module)
