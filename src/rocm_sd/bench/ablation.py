"""What each optimisation gives: a row for each, in which it is added to all those before it.

The rows are engines like any other: the runner prepares them, gates their numerics and times them in turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.bench import runner
from rocm_sd.bench.engines import BUILT_IN, Engine, stock
from rocm_sd.bench.records import COMPILE, OURS
from rocm_sd.engine import EVERYTHING, Parts, optimize_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.records import Record
    from rocm_sd.bench.workloads import Workload

__all__ = ["ROWS", "STOCK_ROW", "AblationRow", "prepare", "rows", "run"]


@dataclass(frozen=True)
class AblationRow:
    """`parts` of the engine are in use, or none of it. `on_cpu`: why the row is skipped on a CPU, or None."""

    name: str
    what: str
    parts: Parts | None = None
    float32: bool = False
    fused_attention: bool = True
    channels_last: bool = True
    on_cpu: str | None = None


_NORMS = frozenset({"resblock", "norm_out", "vae_decoder"})
_FEED_FORWARD = _NORMS | {"transformer"}
_ATTENTION = _FEED_FORWARD | {
    "spatial_transformer",
    "vae_attention",
    "vae_attention_bounded",
    "joint_transformer",
    "flux_transformer",
}
_EPILOGUES = _ATTENTION | {"up_block"}
_SAMPLERS = _EPILOGUES | {"upsample", "downsample", "flux_single_transformer"}

# What was measured of the library belongs to rocm-sd as it comes, the last row, and to no rule.
_EAGER = Parts(hoisted=False, captured=False, hook_questions=False, convolution_library=False)
_NO_HALVES = "a CPU computes in float32"
_NO_LAUNCHES = "a CPU waits for no launches: nothing is captured there"

# As Diffusers comes, in half precision with torch's fused attention: what every other figure calls stock.
STOCK_ROW = "fused attention"
ROWS: tuple[AblationRow, ...] = (
    AblationRow(
        "float32",
        "stock Diffusers in float32, attention as two products and a softmax",
        float32=True,
        fused_attention=False,
        channels_last=False,
    ),
    AblationRow("float16", "the same in float16", fused_attention=False, channels_last=False, on_cpu=_NO_HALVES),
    AblationRow(STOCK_ROW, "torch's scaled_dot_product_attention: stock Diffusers as it comes", channels_last=False),
    AblationRow("channels-last", "weights of convolutions laid out channels-last"),
    AblationRow(
        "GroupNorm",
        "GroupNorm and SiLU as one op that keeps the layout; a decoder that lets go of its maps",
        replace(_EAGER, rules=_NORMS, stock_ops=frozenset({"conv2d"})),
    ),
    AblationRow(
        "GEGLU",
        "the feed-forward's first linear, its bias and GEGLU as one op",
        replace(
            _EAGER,
            rules=_FEED_FORWARD,
            stock_ops=frozenset({"conv2d", "linear_residual", "layer_norm_residual", "attention"}),
            packed=False,
        ),
    ),
    AblationRow(
        "packed QKV",
        "Q, K and V by one product, attention chosen by shape and read in place, no permutes around it",
        replace(_EAGER, rules=_ATTENTION, stock_ops=frozenset({"conv2d", "linear_residual", "layer_norm_residual"})),
    ),
    AblationRow(
        "residual epilogues",
        "bias, time embedding and residual adds inside convolutions, linears and norms; skip connections not joined",
        replace(_EAGER, rules=_EPILOGUES),
    ),
    AblationRow(
        "upsample conv",
        "upsampling inside its convolution, as four smaller ones",
        replace(_EAGER, rules=_SAMPLERS),
    ),
    AblationRow(
        "text KV reuse",
        "keys and values of the text, time embeddings and summed weights made once a picture",
        Parts(captured=False, hook_questions=False, convolution_library=False),
        on_cpu=_NO_LAUNCHES,
    ),
    AblationRow(
        "step graph",
        "each forward of a denoiser and a decoder replayed as one graph",
        replace(EVERYTHING, encoders=False, hook_questions=False),
        on_cpu=_NO_LAUNCHES,
    ),
    AblationRow(
        "encoder graphs",
        "calls of text encoders and the safety checker replayed, too",
        replace(EVERYTHING, hook_questions=False),
        on_cpu=_NO_LAUNCHES,
    ),
    AblationRow(
        "hook questions",
        "what Diffusers asks all modules several times a picture answered without a walk: rocm-sd as it comes",
        EVERYTHING,
    ),
)


_COMPILED = tuple(engine for engine in BUILT_IN if engine.name == COMPILE)


def run(workload: Workload, batches: Sequence[int], **options: Any) -> Record:
    """All rows in turns, and torch.compile as well on a GPU; every one is compared with stock as it comes.

    `options` are those of `runner.run`.
    """
    on_gpu = workload.device.type != "cpu"
    engines = [*(_engine(row) for row in rows(workload.device)), *(_COMPILED if on_gpu else ())]
    # On a fast card the rows before the graph wait for the host: what they save the card is not in their latency.
    return runner.run(workload, engines, batches, kind="ablation", against=STOCK_ROW, card_times=on_gpu, **options)


def _engine(row: AblationRow) -> Engine:
    ours = next(engine for engine in BUILT_IN if engine.name == OURS)
    like = stock if row.parts is None else ours
    return Engine(row.name, like.provider, partial(prepare, row), like.why_not, like.version)


def rows(device: torch.device) -> tuple[AblationRow, ...]:
    """Those that mean something on the device."""
    return tuple(row for row in ROWS if device.type != "cpu" or row.on_cpu is None)


def prepare(row: AblationRow, pipe: Any) -> Any:
    """The pipeline with the row's optimisations, and no other, in force at every call of its models."""
    models = [part for name in ("unet", "transformer", "vae") if (part := getattr(pipe, name, None)) is not None]
    for model in models:
        if row.float32:
            model.to(torch.float32)
        if not row.fused_attention:
            _use_unfused_attention(model)
        if row.channels_last:
            model.to(memory_format=torch.channels_last)
    if row.parts is not None:
        optimize_with(pipe, "performance", "exact", row.parts)
        for model in models:
            _keep_in_force(model, row.parts)
    return pipe


def _use_unfused_attention(model: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor  # noqa: PLC0415 -- takes seconds

    if hasattr(model, "set_attn_processor"):
        model.set_attn_processor(AttnProcessor())


def _keep_in_force(model: Any, parts: Parts) -> None:
    """Around all that a pipeline calls: `forward` of most models, and of a VAE its two halves."""
    for name in ("encode", "decode") if hasattr(model, "decode") else ("forward",):
        setattr(model, name, parts.in_force()(getattr(model, name)))
