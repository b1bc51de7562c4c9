"""The attention op as one of the host's cross attention optimizations (Settings > Optimizations)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from rocm_sd.integrations.a1111 import host
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.ops import attention
from rocm_sd.rewrite.forwards import mark

__all__ = ["attention_forward", "attnblock_forward", "list_into"]

_NAME = "ROCm SD"


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


def list_into(found: list[Any]) -> None:
    """The host's callback: adds ours to its list of optimizations."""
    optimizations = host.module("sd_hijack_optimizations")
    base: Any = optimizations.SdOptimization

    class ROCmSdAttention(base):  # type: ignore[misc]  # the host's class has no types
        name = _NAME
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
