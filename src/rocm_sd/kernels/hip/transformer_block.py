"""A block of Stable Diffusion's transformer: attention to itself, attention to the text, and the gated feed-forward.

    x = x + out(attention(q, k, v))         q, k, v of norm1(x), by one packed product
    x = x + out(attention(q, K, V))         q of norm2(x); K and V of the text, computed once a prompt
    y = x + feed_out(value * gelu(gate))    value and gate of norm3(x), by one product

Nine kernels, or eight where the moments of x are known: no normalised tensor, no score, no sum before its residual and
no gate goes to memory. Each product that ends a part adds the residual and measures the rows that it writes
(`linear_moments`); the product that begins the next applies the norm to what it reads (`norm_linear`, `norm_geglu`).
A wide product applies it once for each of many columns of tiles: where the model says that this costs more than a pass
over memory, the norm is a kernel of its own (`TransformerBlockConfig.fold`).

It is the `hip` implementation of the op `transformer_block`. Nothing here has been timed on AMD: the op chooses it
where `rocm-sd tune` has measured it as the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# Each from its module: a measurement holds as long as the modules named here do (tuning/environment.py).
from rocm_sd.kernels.hip.attention import launch as attention
from rocm_sd.kernels.hip.launch import HipRefused
from rocm_sd.kernels.hip.layer_norm_residual import LayerNormResidualConfig
from rocm_sd.kernels.hip.layer_norm_residual import launch as layer_norm
from rocm_sd.kernels.hip.linear_geglu import launch as linear_geglu
from rocm_sd.kernels.hip.linear_moments import launch as linear_moments
from rocm_sd.kernels.hip.linear_residual import launch as linear_residual
from rocm_sd.kernels.hip.norm_geglu import launch as norm_geglu
from rocm_sd.kernels.hip.norm_linear import Norm
from rocm_sd.kernels.hip.norm_linear import launch as norm_linear
from rocm_sd.kernels.hip.row_moments import allocate
from rocm_sd.kernels.hip.row_moments import launch as measure
from rocm_sd.kernels.hip.transformer_plan import TransformerBlockConfig, config_for

if TYPE_CHECKING:
    import torch

    from rocm_sd.kernels.hip.launch import Launcher
    from rocm_sd.kernels.hip.linear_residual import LinearResidualConfig
    from rocm_sd.kernels.hip.row_moments import RowMoments

__all__ = [
    "Attended",
    "FeedForward",
    "Linear",
    "Norm",
    "TransformerBlock",
    "TransformerBlockConfig",
    "config_for",
    "keys_values",
    "launch",
]

_BYTES = 2  # of a value


@dataclass(frozen=True)
class Linear:
    """weight: [N, K]; bias: [N], or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """An attention: `project` is [3C, C], queries, keys and values, or [C, C], queries, where it attends to the text.

    `scale` is 1 / sqrt(head) unless given.
    """

    norm: Norm
    project: Linear
    out: Linear
    scale: float | None = None


@dataclass(frozen=True)
class FeedForward:
    """`gate` is [2F, C], values before gates; `out` is [C, F]."""

    norm: Norm
    gate: Linear
    out: Linear


@dataclass(frozen=True)
class TransformerBlock:
    """The weights of one block, all of one dtype, and into how many heads its C columns fall."""

    heads: int
    itself: Attended
    text: Attended | None
    feed_forward: FeedForward


def keys_values(
    text: torch.Tensor, project: Linear, heads: int, config: LinearResidualConfig, launcher: Launcher
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of [B, T, H, D], of text, [B, T, K], by one packed product [2C, K]: once a prompt, not once a step."""
    B, T, K = text.shape
    packed = text.new_empty(B, T, project.weight.shape[0])
    rows = packed.view(B * T, -1)
    linear_residual(text.reshape(B * T, K), project.weight, project.bias, None, rows, config, launcher)
    keys, values = _heads(packed, 2, heads)
    return keys, values


def launch(
    x: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor] | None,
    block: TransformerBlock,
    y: torch.Tensor,
    config: TransformerBlockConfig,
    launcher: Launcher,
    *,
    moments: RowMoments | None = None,
) -> RowMoments:
    """Fill `y`, dense [B, S, C], from x: [B, S, C] and the text's keys and values, each [B, T, H, D].

    `moments` are those of x's rows, where the block before gave them back as those of its `y`; else one pass over x
    finds them. y may be x.
    """
    B, S, C = x.shape
    _require(x, text, block)
    rows, stream = x.reshape(B * S, C), y.view(B * S, C)
    F = block.feed_forward.out.weight.shape[1]
    # What attention needs and what the feed-forward needs are never alive at once.
    space = x.new_empty(B * S, max(4 * C, F + C)).flatten()

    def part_of(first: int, columns: int) -> torch.Tensor:
        return space[B * S * first : B * S * (first + columns)].view(B * S, columns)

    if moments is None and config.fold[0]:
        moments = allocate(rows, C)
        measure(rows, moments, launcher)

    attentions = [(block.itself, None)] + ([(block.text, text)] if block.text is not None else [])
    before = rows
    for number, (part, other) in enumerate(attentions):
        N = part.project.weight.shape[0]
        packed, attended = part_of(0, N), part_of(N, C)
        weight, bias = part.project.weight, part.project.bias
        if moments is not None and config.fold[number]:
            norm_linear(before, moments, part.norm, weight, bias, packed, config.linear, launcher)
        else:
            # Attention overwrites it when the product has read it.
            _normed(before, part.norm, attended, launcher)
            linear_residual(attended, weight, bias, None, packed, config.linear, launcher)
        q, *own = _heads(packed.view(B, S, N), N // C, block.heads)
        k, v = own if other is None else other
        scale = (C // block.heads) ** -0.5 if part.scale is None else part.scale
        out = attended.view(B, S, block.heads, C // block.heads)
        attention(q, k, v, out, scale, config.attention, launcher)
        moments = _added(attended, part.out, before, stream, config.linear, launcher)
        before = stream

    last, hidden = block.feed_forward, part_of(0, F)
    weight, bias = last.gate.weight, last.gate.bias
    if moments is not None and config.fold[2]:
        norm_geglu(before, moments, last.norm, weight, bias, hidden, config.geglu, launcher)
    else:
        normed = part_of(F, C)
        _normed(before, last.norm, normed, launcher)
        linear_geglu(normed, weight, bias, hidden, config.geglu, launcher)
    return _added(hidden, last.out, before, stream, config.linear, launcher)


def _normed(x: torch.Tensor, norm: Norm, y: torch.Tensor, launcher: Launcher) -> None:
    config = LayerNormResidualConfig()
    layer_norm(x, None, y, None, norm.weight, norm.bias, norm.eps, config, launcher)


def _added(
    x: torch.Tensor,
    linear: Linear,
    residual: torch.Tensor,
    y: torch.Tensor,
    config: LinearResidualConfig,
    launcher: Launcher,
) -> RowMoments:
    """Fill y, which may be the residual: each value is read and written by one thread, in that order."""
    moments = allocate(y, config.block_n)
    linear_moments(x, linear.weight, linear.bias, residual, y, moments, config, launcher)
    return moments


def _heads(packed: torch.Tensor, parts: int, heads: int) -> tuple[torch.Tensor, ...]:
    """[B, S, parts * H * D] -> views [B, S, H, D]: attention reads them in place."""
    B, S, columns = packed.shape
    return packed.view(B, S, parts, heads, columns // (parts * heads)).unbind(2)


def _require(x: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor] | None, block: TransformerBlock) -> None:
    """What the kernels could not notice, or only after some of them had run."""
    C = x.shape[2]

    def refuse(what: str) -> None:
        raise HipRefused("transformer_block (hip)", what)

    if x.element_size() != _BYTES:
        refuse(f"dtype {x.dtype}")
    if (block.text is None) != (text is None):
        refuse("an attention to the text without its keys and values, or these without the attention")
    if C % (8 * block.heads):
        refuse(f"{C} columns in {block.heads} heads: a head begins at multiples of 16 bytes")
    wanted = {
        "queries, keys and values": (block.itself.project, (3 * C, C)),
        "the first projection": (block.itself.out, (C, C)),
        **(
            {"queries to the text": (block.text.project, (C, C)), "the second projection": (block.text.out, (C, C))}
            if block.text is not None
            else {}
        ),
        "values and gates": (block.feed_forward.gate, (2 * block.feed_forward.out.weight.shape[1], C)),
        "the feed-forward's last": (block.feed_forward.out, (C, block.feed_forward.out.weight.shape[1])),
    }
    for name, (linear, shape) in wanted.items():
        if tuple(linear.weight.shape) != shape:
            refuse(f"{name} of {tuple(linear.weight.shape)}, where {shape} is due")
