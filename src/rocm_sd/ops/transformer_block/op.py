"""A block of Stable Diffusion's transformer: attention to itself, attention to the text, and the gated feed-forward.

It runs in stock as the steps of rewrite/transformer.py: other ops, each of which chooses for itself. The rule calls it
as one where another implementation than stock is chosen.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip
from rocm_sd.kernels.hip.transformer_plan import FoldConfig
from rocm_sd.ops.attention import attention
from rocm_sd.ops.attention.workload import HIP_HEADS
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import HALVES, Implementation, where
from rocm_sd.ops.layer_norm_residual import layer_norm_residual
from rocm_sd.ops.linear_geglu import linear_geglu
from rocm_sd.ops.linear_residual import linear_residual
from rocm_sd.ops.transformer_block import reference
from rocm_sd.ops.transformer_block.workload import HIP, TUNING, VERIFICATION
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rocm_sd.tuning import Problem

__all__ = ["OP", "transformer_block"]

# The tensors after x, in the order of the arguments.
_PARTS = (
    "keys", "values", "norm1_weight", "norm1_bias", "qkv_weight", "out1_weight", "out1_bias", "norm2_weight",
    "norm2_bias", "q_weight", "out2_weight", "out2_bias", "norm3_weight", "norm3_bias", "gate_weight", "gate_bias",
    "ff_weight", "ff_bias",
)  # fmt: skip


def transformer_block(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    qkv_weight: torch.Tensor,
    out1_weight: torch.Tensor,
    out1_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    q_weight: torch.Tensor,
    out2_weight: torch.Tensor,
    out2_bias: torch.Tensor,
    norm3_weight: torch.Tensor,
    norm3_bias: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    ff_weight: torch.Tensor,
    ff_bias: torch.Tensor,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> torch.Tensor:
    """A transformer block of tokens x, [B, S, C], and the keys and values of a text, each [B, T, H, D], C = H * D.

    x = x + out1(attention(q, k, v)), of norm1(x) by the packed `qkv_weight`, [3C, C]; x = x + out2(attention(q, keys,
    values)), q of norm2(x); y = x + ff(value * gelu(gate)), value and gate of norm3(x) by `gate_weight`, [2F, C]. All
    are of one dtype, fp16, bf16, fp32 or fp64; y: [B, S, C], dense. `implementation` names one and never falls back;
    without it the tuning data decides.
    """
    if x.dim() != 3 or keys.dim() != 4 or not x.shape[-1]:
        both = f"x of shape {tuple(x.shape)} with keys of {tuple(keys.shape)}"
        raise Unsupported(OP.name, f"{both}: it takes [B, S, C] with [B, T, H, D]")
    B, _, C = x.shape
    T, H, D = keys.shape[1:]
    if keys.shape[0] != B or H * D != C or not T:
        raise Unsupported(OP.name, f"keys of shape {tuple(keys.shape)}: it takes [{B}, T, H, D], H * D of them {C}")
    F = gate_weight.shape[0] // 2
    parts = (
        keys, values, norm1_weight, norm1_bias, qkv_weight, out1_weight, out1_bias, norm2_weight, norm2_bias,
        q_weight, out2_weight, out2_bias, norm3_weight, norm3_bias, gate_weight, gate_bias, ff_weight, ff_bias,
    )  # fmt: skip
    norm: tuple[tuple[int, ...], ...] = ((C,), (C,))
    attentions = (*norm, (3 * C, C), (C, C), (C,), *norm, (C, C), (C, C), (C,))
    shapes = ((B, T, H, D), (B, T, H, D), *attentions, *norm, (2 * F, C), (2 * F,), (C, F), (C,))
    for name, part, shape in zip(_PARTS, parts, shapes, strict=True):
        OP.require_shape(name, part, shape)
    return OP.call(x, *parts, eps, implementation=implementation)


def _allocate(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_OPS = reference.Steps(attention, layer_norm_residual, linear_geglu, linear_residual)


# By the names of the arguments a search knows which of them are weights.
@wraps(transformer_block)
def _stock(x: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return reference.composed(_OPS, x, keys, values, *rest)


def _hip(x: Tensor, keys: Tensor, values: Tensor, *rest: Any, config: FoldConfig) -> Tensor:
    from rocm_sd.kernels.hip import transformer_block as hip_block  # noqa: PLC0415 -- only where used

    y = _allocate(x)
    if not y.numel():
        return y
    *weights, eps = rest
    n1, b1, qkv, out1, out1_bias, n2, b2, q, out2, out2_bias, n3, b3, gate, gate_bias, ff, ff_bias = (
        weight.contiguous() for weight in weights
    )
    Norm, Linear = hip_block.Norm, hip_block.Linear
    block = hip_block.TransformerBlock(
        keys.shape[2],
        hip_block.Attended(Norm(n1, b1, eps), Linear(qkv), Linear(out1, out1_bias)),
        hip_block.Attended(Norm(n2, b2, eps), Linear(q), Linear(out2, out2_bias)),
        hip_block.FeedForward(Norm(n3, b3, eps), Linear(gate, gate_bias), Linear(ff, ff_bias)),
    )
    launcher = hip.launcher_for(x.device)
    B, S, C = x.shape
    tiles = config.over(hip_block.config_for(B * S, C, keys.shape[2], launcher.arch))
    hip_block.launch(x.contiguous(), (keys, values), block, y, tiles, launcher)
    return y


def _refused(problem: Problem) -> str | None:
    C, H, F = int(problem["c"]), int(problem["h"]), int(problem["f"])
    if C // H not in HIP_HEADS:
        return f"heads of {C // H}: there are kernels for {', '.join(map(str, HIP_HEADS))}"
    return f"{F} hidden values: rows begin at multiples of 16 bytes" if F % 8 else None


def _backward(saved: Saved, grad: Tensor) -> Mapping[str, Tensor]:
    """Recompute through the definition, in plain torch, of which torch knows the gradient."""
    names = (each.name for each in OP.signature.arguments)
    return saved.through(reference.transformer_block, names, grad)


OP = define(
    transformer_block,
    summary="a transformer block: both attentions and the feed-forward, norms and adds in their products",
    family="GEMM",
    implementations=(
        Implementation(STOCK, _stock),
        Implementation("hip", _hip, where(hip, HALVES, _refused), HIP, default=FoldConfig()),
    ),
    allocate=_allocate,
    backward=_backward,
    same_dtype=_PARTS,
    verification=VERIFICATION,
    tuning=TUNING,
    composed=True,
)
