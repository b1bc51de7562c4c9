"""Entries in the host's own lists, by its callbacks.

Cross attention optimizations (Settings > Optimizations): the attention op. UNets (Settings > Stable Diffusion > SD
Unet): the host's own UNet, called from graphs. "Automatic", which is the host's default, takes the UNet whose model
name is that of the checkpoint at work. Ours has that name while the optimisation is on, so that nobody has to choose
it, and no file of the host is touched.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from rocm_sd.integrations.a1111 import host
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.switch import SWITCH
from rocm_sd.ops import attention
from rocm_sd.rewrite.forwards import mark

__all__ = ["attention_forward", "attnblock_forward", "list_attention_into", "list_unet_into"]

_LABEL = "ROCm SD"


def attention_forward(self: Any, x: torch.Tensor, context: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """CrossAttention of ldm and sgm: hypernetworks and the setting for attention in float32 count as the host has
    them; masks and video are the host's own affair.
    """
    optimizations = host.module("sd_hijack_optimizations")
    if mask is not None or kwargs.get("additional_tokens") is not None or not _usable():
        return optimizations.scaled_dot_product_attention_forward(self, x, context=context, mask=mask, **kwargs)
    shared = host.module("shared")
    text = x if context is None else context
    keys, values = text, text
    if shared.loaded_hypernetworks:
        hypernetwork = host.module("hypernetworks.hypernetwork")
        keys, values = hypernetwork.apply_hypernetworks(shared.loaded_hypernetworks, text)
    q, k, v = self.to_q(x), self.to_k(keys), self.to_v(values)
    try:
        out = _attended(q, k, v, self.heads, self.scale)
    except Exception as error:  # noqa: BLE001 -- whatever it was, the host's own attention can say it, or do
        PERMISSION.fail("Attention", error)
        return optimizations.scaled_dot_product_attention_forward(self, x, context=context, mask=mask, **kwargs)
    return self.to_out(out.flatten(2))


def attnblock_forward(self: Any, x: torch.Tensor) -> Any:
    """AttnBlock of a VAE: one head over all pixels."""
    if not _usable() or x.dim() != 4:
        return host.module("sd_hijack_optimizations").sdp_attnblock_forward(self, x)
    normed = self.norm(x)
    q, k, v = (layer(normed).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
    try:
        out = _attended(q, k, v, 1, None)
    except Exception as error:  # noqa: BLE001 -- whatever it was, the host's own attention can say it, or do
        PERMISSION.fail("The VAE's attention", error)
        return host.module("sd_hijack_optimizations").sdp_attnblock_forward(self, x)
    picture = out.flatten(2).transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
    return x + self.proj_out(picture)


def _usable() -> bool:
    return PERMISSION.broken is None and not torch.is_grad_enabled()


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, scale: float | None) -> torch.Tensor:
    """[B, S, heads, D] in q's dtype; in float32 where the host's setting asks for it."""
    dtype = q.dtype
    if host.module("shared").opts.upcast_attn:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (t.reshape(*t.shape[:2], heads, t.shape[-1] // heads) for t in (q, k, v))
    return attention(q, k, v, scale).to(dtype)


def list_attention_into(found: list[Any]) -> None:
    """The host's callback: adds ours to its list of optimizations."""
    optimizations = host.module("sd_hijack_optimizations")
    base: Any = optimizations.SdOptimization

    class ROCmSdAttention(base):  # type: ignore[misc]  # the host's class has no types
        name = _LABEL
        label = "scaled dot product, by whichever implementation is fastest"
        cmd_opt = None
        # Below all others: it is taken where somebody chooses it, and not by "Automatic".
        priority = 0

        def apply(self) -> None:
            for packages in ("ldm", "sgm"):
                _set(f"{packages}.modules.attention", "CrossAttention", attention_forward)
                _set(f"{packages}.modules.diffusionmodules.model", "AttnBlock", attnblock_forward)

    found.append(ROCmSdAttention())


def _set(module: str, kind: str, forward: Any) -> None:
    """As the host's own optimizations do; its `undo` brings the classes' own forwards back."""
    getattr(import_module(module), kind).forward = mark(forward, rule=True)


def _original_forward(unet: Any) -> Any:
    """The forward that the host has put its own question for another UNet around."""
    package = type(unet).__module__.partition(".")[0]
    original = getattr(host.module("sd_hijack"), f"{package}_original_forward", None)
    return original or host.module("sd_unet").original_forward


def list_unet_into(found: list[Any]) -> None:
    """The host's callback: adds ours to its list of UNets."""
    found.append(_unet_option(host.module("sd_unet")))


@lru_cache(maxsize=1)
def _unet_option(sd_unet: Any) -> Any:
    """One and the same whenever the list is made anew: the host would take another one for another UNet."""
    unet_base: Any = sd_unet.SdUnet
    option_base: Any = sd_unet.SdUnetOption

    class ROCmSdUnet(unet_base):  # type: ignore[misc]  # the host's class has no types
        def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
            unet = host.module("shared").sd_model.model.diffusion_model
            return SWITCH.call(_original_forward(unet), unet, (x, timesteps, context, *args), kwargs)

        def activate(self) -> None:
            # The host makes room for another UNet; this one is its own.
            shared, devices = host.module("shared"), host.module("devices")
            if not getattr(shared.sd_model, "lowvram", False):
                shared.sd_model.model.diffusion_model.to(devices.device)

        def deactivate(self) -> None:
            SWITCH.forget_graphs()

    class ROCmSdUnetOption(option_base):  # type: ignore[misc]  # the host's class has no types
        label = _LABEL

        @property
        def model_name(self) -> str | None:
            sd_model = host.module("shared").sd_model
            if not SWITCH.is_on(sd_model) or _original_forward(sd_model.model.diffusion_model) is None:
                return None
            return str(sd_model.sd_checkpoint_info.model_name)

        def create_unet(self) -> Any:
            return ROCmSdUnet()

    return ROCmSdUnetOption()
