"""Spatial transformer of a UNet (GroupNorm, projection, transformer blocks, projection, residual) without permutes: a
channels-last map [B, C, H, W] is the tokens [B, HW, C] as it lies, and a 1x1 convolution is a linear on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rocm_sd.ops import group_norm_silu
from rocm_sd.rewrite import transformer
from rocm_sd.rewrite.apply import Rule
from rocm_sd.rewrite.convolutions import of_diffusers
from rocm_sd.rewrite.layers import is_plain, untouched
from rocm_sd.rewrite.tokens import map_of, plain_linear, tokens_of
from rocm_sd.rewrite.transformer import one_dtype

__all__ = ["RULE"]


def _why_not(module: Any) -> str | None:
    if not module.is_input_continuous:
        return "its input is not a map of features"
    for name, layer in (("proj_in", module.proj_in), ("proj_out", module.proj_out)):
        # A LoRA wrapper is asked for what it wraps.
        plain = getattr(layer, "base_layer", layer)
        if isinstance(plain, nn.Conv2d) and (
            plain.kernel_size != (1, 1) or plain.stride != (1, 1) or plain.padding != (0, 0) or plain.groups != 1
        ):
            return f"its {name} is a convolution of more than a point"
    return None


# Named as the method that it stands in for: pickle looks a bound method up by that name, and finds the class's own.
def forward(
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,  # noqa: ARG001 -- stock's signature
    class_labels: torch.Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    return_dict: bool = True,
) -> Any:
    x = hidden_states
    masked = attention_mask is not None or encoder_attention_mask is not None
    checkpointed = self.gradient_checkpointing and torch.is_grad_enabled()
    # Stock answers a caller who wants an instance of its output class; UNets do not.
    if return_dict or cross_attention_kwargs or masked or checkpointed or not one_dtype(x):
        return NotImplemented
    tokens = _project_in(self.proj_in, _norm(self.norm, x), takes_tokens=self.use_linear_projection)
    chained = transformer.chain(self.transformer_blocks, tokens, encoder_hidden_states)
    for block in self.transformer_blocks if chained is None else ():
        tokens = block(
            tokens,
            attention_mask=None,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=None,
            timestep=timestep,
            cross_attention_kwargs=cross_attention_kwargs,
            class_labels=class_labels,
        )
    tokens = tokens if chained is None else chained
    layer = self.proj_out
    if is_plain(layer):
        return (map_of(plain_linear(layer, tokens, tokens_of(x)), x),)
    if self.use_linear_projection:
        return (map_of(layer(tokens), x) + x,)
    return (layer(map_of(tokens, x)) + x,)


def _norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if type(norm) is nn.GroupNorm and untouched(norm):
        return group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, None, norm.eps, silu=False)
    y: torch.Tensor = norm(x)
    return y


def _project_in(layer: Any, x: torch.Tensor, *, takes_tokens: bool) -> torch.Tensor:
    if is_plain(layer):
        return plain_linear(layer, tokens_of(x))
    tokens: torch.Tensor = layer(tokens_of(x)) if takes_tokens else tokens_of(layer(x))
    return tokens


RULE = Rule(
    name="spatial_transformer",
    summary="GroupNorm, projections and residual on the channels-last map as it lies, without permutes",
    channels_last=True,
    of_kind=of_diffusers("Transformer2DModel"),
    why_not=_why_not,
    forward=forward,
    calls=("transformer_blocks",),
    for_graphs=True,
)
