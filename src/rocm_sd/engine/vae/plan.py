"""How much memory a decode or encode needs, before it runs, and which way of running it fits.

`predicted_peak` goes through the steps of the model at hand and takes and gives back memory in the order in which the
modules do: what Python names keep alive is as much a part of it as what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import settings
from rocm_sd.engine.vae.steps import Kind, VaeStep, decoder_steps, encoder_steps, rewritten
from rocm_sd.ops import OPS
from rocm_sd.ops.attention.op import stock_module_bytes
from rocm_sd.ops.attention.workload import problem as attention_problem
from rocm_sd.ops.group_norm_silu.workload import problem as norm_problem
from rocm_sd.ops.upsample_conv2d.workload import problem as upsample_problem
from rocm_sd.rewrite import vae_attention, vae_decoder
from rocm_sd.rewrite.apply import is_applied
from rocm_sd.rewrite.resblock import WORTH_IT_ON_CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MIB", "VaePlan", "Way", "is_channels_last", "plan", "predicted_peak", "scores_bytes"]

MIB = 2**20
# What a prediction may be wrong by (15 percent is the promise), and what the allocator rounds up and cannot join.
_UNCERTAIN, _SLACK = 0.15, 64 * MIB
# At level memory a decode may take this much: a step of SDXL's UNet at 1024x1024 takes about as much beside its
# weights, so a decode that takes less would lower nobody's peak.
_MEMORY_LEVEL = 512 * MIB
# Where strips of this fail, smaller ones would save nothing: their least size is what counts then.
_LEAST_BUDGET = 16 * MIB


class Way(Enum):
    WHOLE = "whole"
    SLICED = "sliced"
    TILED = "tiled"


@dataclass(frozen=True)
class VaePlan:
    """`needed` is the predicted peak of the way; `budget` is what strips and maps of the tiled way may take."""

    way: Way
    needed: int
    budget: int | None

    def smaller(self, batch: int, *, tiles: bool) -> VaePlan | None:
        """What to try when this one has run out of memory."""
        if self.way is Way.WHOLE and batch > 1:
            return VaePlan(Way.SLICED, self.needed // batch, self.budget)
        if not tiles:
            return None
        # The prediction was wrong, or another program took the memory: what was free is no guide any more.
        tiled = self.way is Way.TILED
        budget = (self.budget if tiled and self.budget else self.needed) // 2
        return VaePlan(Way.TILED, budget, budget) if budget >= _LEAST_BUDGET or not tiled else None


def plan(
    whole: int, one: int, *, batch: int, free: int | None, level: str = "auto", tiles: bool = True, slices: bool = False
) -> VaePlan:
    """The fastest way that fits: `whole` and `one` are the peaks of the batch and of one picture of it.

    `free` is None where it is not known. `tiles`: whether the model can be run in strips. `slices`: one picture at a
    time is asked for.
    """
    limit = _usable(free, level)
    if limit is None or (whole <= limit and not (slices and batch > 1)):
        return VaePlan(Way.SLICED, one, None) if slices and batch > 1 else VaePlan(Way.WHOLE, whole, limit)
    if batch > 1 and (one <= limit or not tiles):
        return VaePlan(Way.SLICED, one, limit)
    return VaePlan(Way.TILED, limit, limit) if tiles else VaePlan(Way.WHOLE, whole, limit)


def _usable(free: int | None, level: str) -> int | None:
    usable = None if free is None else max(0, int(free / (1 + _UNCERTAIN)) - _SLACK)
    if level != "memory":
        return usable
    return _MEMORY_LEVEL if usable is None else min(usable, _MEMORY_LEVEL)


def predicted_peak(
    vae: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    encode: bool = False,
) -> int:
    """Bytes above the weights and the input at the highest point of decoding latents (encoding pictures) of `shape`."""
    place = next(vae.parameters()).device if device is None else device
    lets_go = not encode and is_applied(vae.decoder, vae_decoder.RULE) and vae_decoder.lets_go(vae.decoder)
    walk = _Walk(dtype, place, channels_last=is_channels_last(vae.decoder.conv_in), lets_go=lets_go)
    steps = encoder_steps(vae) if encode else decoder_steps(vae)
    N, C, H, W = shape
    walk.through(steps, _MapSize(N, C, H, W))
    return walk.peak


def is_channels_last(layer: Any) -> bool:
    """Whether a convolution, or the one inside a LoRA's wrapper, works on that layout."""
    weight = _base(layer).weight
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _base(layer: Any) -> Any:
    """The layer inside a LoRA's wrapper."""
    return getattr(layer, "base_layer", layer)


@dataclass(frozen=True)
class _MapSize:
    N: int
    C: int
    H: int
    W: int

    @property
    def values(self) -> int:
        return self.N * self.C * self.H * self.W

    def of(self, channels: int) -> _MapSize:
        return _MapSize(self.N, channels, self.H, self.W)

    def sized(self, H: int, W: int) -> _MapSize:
        return _MapSize(self.N, self.C, H, W)

    def on_meta(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((self.N, self.C, self.H, self.W), dtype=dtype, device="meta")


@dataclass
class _Walk:
    """Takes and gives back what each step does; a step's method leaves its result taken, and its input too."""

    dtype: torch.dtype
    device: torch.device
    channels_last: bool
    # Whether blocks of the decoder are gone through one by one (rewrite/vae_decoder.py).
    lets_go: bool = False
    alive: int = 0
    peak: int = 0
    # What a block was called with stays until it returns, as its caller still has a name for it.
    held: list[tuple[str, int]] = field(default_factory=list)

    def through(self, steps: tuple[VaeStep, ...], x: _MapSize) -> None:
        taken = 0  # The input is the caller's.
        for step in steps:
            if self.held and self.held[-1][0] != step.block:
                self.alive -= self.held.pop()[1]
            if step.block and not self.held and not self._passes(step):
                self.held.append((step.block, taken))
                taken = 0
            y = self._step(step, x)
            # The last step's input has no name left once its norm has returned.
            self.alive -= 0 if step.kind is Kind.OUT else taken
            x, taken = y, self._bytes(y)

    def _passes(self, step: VaeStep) -> bool:
        """Whether what its block was called with is let go of before the block has ended."""
        return self.lets_go and step.block.startswith("decoder.up_blocks.")

    def _step(self, step: VaeStep, x: _MapSize) -> _MapSize:
        if step.kind is Kind.RESNET:
            return self._resnet(step, x)
        taken: dict[Kind, Callable[[Any, _MapSize], _MapSize]] = {
            Kind.ATTENTION: self._attention,
            Kind.UPSAMPLE: self._upsample,
            Kind.DOWNSAMPLE: self._downsample,
            Kind.OUT: self._out,
            Kind.CONVOLUTION: self._convolution,
        }
        return taken[step.kind](step.module, x)

    def _bytes(self, x: _MapSize, dtype: torch.dtype | None = None) -> int:
        return x.values * (dtype or self.dtype).itemsize

    def _take(self, size: int) -> int:
        self.alive += size
        self.peak = max(self.peak, self.alive)
        return size

    def _map(self, x: _MapSize) -> int:
        return self._take(self._bytes(x))

    def _give(self, *sizes: int) -> None:
        self.alive -= sum(sizes)

    def _for_a_moment(self, *sizes: int) -> None:
        self._give(*[self._take(size) for size in sizes])

    # Layers.

    def _convolution(self, layer: Any, x: _MapSize, *, op: bool = False) -> _MapSize:
        """A convolution that keeps the size; `op` where a rule calls it."""
        weight = _base(layer).weight
        y = x.of(weight.shape[0])
        self._map(y)
        self._for_a_moment(self._workspace(weight, x, y, 1, weight.shape[-1] // 2, op=op))
        return y

    def _workspace(self, weight: torch.Tensor, x: _MapSize, y: _MapSize, stride: int, padding: int, *, op: bool) -> int:
        if self.device.type == "cpu":
            return 0
        if op and self._asks("conv2d"):
            call = x.on_meta(self.dtype), weight, None, None, None, stride, padding
            needed = OPS["conv2d"].scratch_bytes(call, self.device)
            if needed is not None:
                return needed
        # A library's tensor units read channels-last: of another layout they work on copies, on an H200 of half of x
        # and y (four pictures) to all of it (one).
        half = self.dtype in {torch.float16, torch.bfloat16} and weight.shape[-1] > 1
        return 0 if self.channels_last or not half else (self._bytes(x) + self._bytes(y)) * 3 // 4

    def _product(self, layer: Any, x: _MapSize) -> int:
        """The scratch of a linear over the pixels, by a rule."""
        if not self._asks("linear_residual"):
            return 0
        tokens = torch.empty((x.N, x.H * x.W, x.C), dtype=self.dtype, device="meta")
        return OPS["linear_residual"].scratch_bytes((tokens, _base(layer).weight, None, None), self.device) or 0

    def _asks(self, op: str) -> bool:
        """Whether a rule would call the op of that name: on a CPU only where the settings name an implementation."""
        return self.device.type != "cpu" or settings.implementation_for(op) is not None

    def _norm_overwrites(self, norm: Any, x: _MapSize) -> bool:
        if not self.channels_last or not self._asks("group_norm_silu"):
            return False
        return OPS["group_norm_silu"].overwrites(norm_problem(x.on_meta(self.dtype), norm.num_groups), self.device)

    def _norm_silu(self, norm: Any, x: _MapSize) -> int:
        """GroupNorm, with or without SiLU, by a rule."""
        if not self._asks("group_norm_silu"):
            return self._map(x)
        asked = norm_problem(x.on_meta(self.dtype), norm.num_groups)
        if not OPS["group_norm_silu"].choose(asked, self.device).is_stock:
            return self._map(x)
        # Torch's own answer and a map of the layout that the op promises.
        normed = self._stock_norm(x)
        self._for_a_moment(self._bytes(x))
        return normed

    def _stock_norm(self, x: _MapSize) -> int:
        """GroupNorm of torch, which on a GPU wants another layout and answers in it."""
        copy = self._take(self._bytes(x)) if self.channels_last and self.device.type != "cpu" else 0
        y = self._map(x)
        self._give(copy)
        return y

    # Steps.

    def _resnet(self, step: VaeStep, x: _MapSize) -> _MapSize:
        # On a CPU the rule leaves small maps to stock.
        small = not self._asks("conv2d") and x.values < WORTH_IT_ON_CPU
        if small or not rewritten(step.module):
            return self._stock_resnet(step.module, x)
        return self._consuming_resnet(step.module, x) if self._passes(step) else self._rewritten_resnet(step.module, x)

    def _stock_resnet(self, module: Any, x: _MapSize) -> _MapSize:
        normed = self._stock_norm(x)
        active = self._map(x)
        self._give(normed)
        y = self._convolution(module.conv1, x)
        self._give(active)
        normed = self._stock_norm(y)
        self._give(self._bytes(y))
        active = self._map(y)
        self._give(normed)
        self._convolution(module.conv2, y)
        self._give(active)
        if module.conv_shortcut is not None:
            self._convolution(module.conv_shortcut, x)
        # The sum, and the sum divided by the output's scale, which stock does for a scale of one as well.
        total = self._map(y)
        self._map(y)
        self._give(total, self._bytes(y), 0 if module.conv_shortcut is None else self._bytes(y))
        return y

    def _rewritten_resnet(self, module: Any, x: _MapSize) -> _MapSize:
        active = self._norm_silu(module.norm1, x)
        y = self._convolution(module.conv1, x, op=True)
        self._give(active)
        second = self._norm_silu(module.norm2, y)
        self._give(self._bytes(y))
        if module.conv_shortcut is not None:
            self._convolution(module.conv_shortcut, x, op=True)
        self._convolution(module.conv2, y, op=True)
        self._give(second, 0 if module.conv_shortcut is None else self._bytes(y))
        if module.output_scale_factor != 1.0:
            self._for_a_moment(self._bytes(y))
        return y

    def _consuming_resnet(self, module: Any, x: _MapSize) -> _MapSize:
        shortcut = module.conv_shortcut
        last_use = shortcut is not None and self._norm_overwrites(module.norm1, x)
        if last_use:
            self._convolution(shortcut, x, op=True)
        active = 0 if last_use else self._norm_silu(module.norm1, x)
        y = self._convolution(module.conv1, x, op=True)
        # Where the norm lies in x's memory, that is free once it is convolved.
        self._give(self._bytes(x) if last_use else active)
        if not self._norm_overwrites(module.norm2, y):
            self._norm_silu(module.norm2, y)
            self._give(self._bytes(y))
        if shortcut is not None and not last_use:
            self._convolution(shortcut, x, op=True)
            self._give(self._bytes(x))
        self._convolution(module.conv2, y, op=True)
        self._give(self._bytes(y))
        if shortcut is not None:
            # The shortcut goes; x, which is gone, is given back by who called.
            self._give(self._bytes(y), -self._bytes(x))
        if module.output_scale_factor != 1.0:
            self._for_a_moment(self._bytes(y))
        return y

    def _attention(self, module: Any, x: _MapSize) -> _MapSize:
        bounded = is_applied(module, vae_attention.BOUNDED)
        ours = rewritten(module) and not bounded
        normed = self._norm_silu(module.group_norm, x) if ours else self._stock_norm(x)
        q_k_v = [self._map(x) for _ in range(3)]
        mixed = self._map(x)
        head = x.C // module.heads
        by_op = ours or bounded
        self._for_a_moment(scores_bytes(x.N, x.H * x.W, module.heads, head, self.dtype, self.device, op=by_op))
        # Projected; with the residual; divided by the output's scale, which the rule leaves out. In stock's module each
        # takes the name of the one before it.
        for number in range(2 if ours else 3):
            before = self._map(x)
            if ours and number == 0:
                self._for_a_moment(self._product(module.to_out[0], x))
            self._give(0 if ours and number == 0 else before)
        self._give(normed, *q_k_v, mixed if ours else 0)
        return x

    def _upsample(self, module: Any, x: _MapSize) -> _MapSize:
        large = x.sized(2 * x.H, 2 * x.W)
        layer = module.conv if module.name == "conv" else module.Conv2d_0
        weight = _base(layer).weight
        ours = rewritten(module) and self._asks("upsample_conv2d")
        op, call = OPS["upsample_conv2d"], (x.on_meta(self.dtype), weight, None, None)
        if not ours or op.choose(upsample_problem(*call), self.device).is_stock:
            enlarged = self._map(large)
            y = self._convolution(layer, large, op=ours)
            self._give(enlarged)
            return y
        y = large.of(weight.shape[0])
        self._map(y)
        self._for_a_moment(op.scratch_bytes(call, self.device) or 0)
        return y

    def _downsample(self, module: Any, x: _MapSize) -> _MapSize:
        weight = _base(module.conv).weight
        padded = self._map(x.sized(x.H + 1, x.W + 1)) if module.padding == 0 else 0
        y = x.of(weight.shape[0]).sized(x.H // 2, x.W // 2)
        self._map(y)
        self._for_a_moment(self._workspace(weight, x, y, 2, 0, op=rewritten(module)))
        self._give(padded)
        return y

    def _out(self, module: Any, x: _MapSize) -> _MapSize:
        # Each result takes the name of the one before it, which is gone then.
        norm = module.conv_norm_out
        normed = self._norm_silu(norm, x) if rewritten(norm) else self._stock_norm(x)
        self._give(self._bytes(x))
        if not rewritten(module.conv_act):
            self._map(x)
            self._give(normed)
        y = self._convolution(module.conv_out, x)
        self._give(self._bytes(x))
        return y


def scores_bytes(
    batch: int, tokens: int, heads: int, head: int, dtype: torch.dtype, device: torch.device, *, op: bool
) -> int:
    """What the scores of attention of a picture to itself take, by stock's module or by the op."""
    q = torch.empty((batch, tokens, heads, head), dtype=dtype, device="meta")
    if op:
        return OPS["attention"].scratch_bytes((q, q, q, None), device) or 0
    return stock_module_bytes(attention_problem(q, q), device)
