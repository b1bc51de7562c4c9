"""The layers of a UNet and of a VAE's decoder, from their configs alone: sizes, weights and products of each.

What a strategy sends and what it leaves undivided follow from them: `volume` and `scaling` read them, nothing is run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd.errors import Unsupported
from rocm_sd.parallel.rows import Rows, deal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["TEXT_TOKENS", "UNETS", "Call", "Layer", "decoder_call", "unet_call"]

# Those that tables are made of, as Diffusers has them.
UNETS: Mapping[str, Mapping[str, Any]] = {
    "sd15": {
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10),
    },
}
TEXT_TOKENS = 77  # of a prompt, as CLIP pads it
_ATTENTIVE = frozenset({"CrossAttnDownBlock2D", "CrossAttnUpBlock2D"})
_PLAIN = frozenset({"DownBlock2D", "UpBlock2D"})


@dataclass(frozen=True)
class Layer:
    """One operation. `level`: how often the pictures that it gets were halved, or doubled, since they came.

    `time`: what a ResNet block reads of the step's number; it has no pixels. `context`: channels of the text that an
    attention looks at; None where it looks at its own pixels.
    """

    kind: Literal["conv", "norm", "linear", "attention", "feed_forward", "upsample", "time"]
    block: str
    level: int
    channels: int
    out: int = 0
    kernel: int = 1
    stride: int = 1
    groups: int = 0
    heads: int = 1
    context: int | None = None

    @property
    def parameters(self) -> int:
        """Numbers among its weights, with the layer norm before it where it has one."""
        C, out = self.channels, self.out
        if self.kind == "conv":
            return self.kernel**2 * C * out + out
        if self.kind in {"linear", "time"}:
            return C * out + out
        if self.kind == "attention":
            return 2 * C * C + 2 * C * (C if self.context is None else self.context) + C + 2 * C
        if self.kind == "feed_forward":
            return C * 8 * C + 8 * C + 4 * C * C + C + 2 * C
        return 2 * C if self.kind == "norm" else 0


@dataclass(frozen=True)
class Call:
    """One call of a model. `depth`: how often it halves pictures; below 0, how often it doubles them.

    `itemsize`: bytes of a value; `out`: channels of the answer.
    """

    layers: tuple[Layer, ...]
    batch: int
    height: int
    width: int
    depth: int
    out: int
    itemsize: int = 2

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """By level."""
        return self._sizes(self.height)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        return self._sizes(self.width)

    def _sizes(self, size: int) -> tuple[int, ...]:
        found = [size]
        for _ in range(abs(self.depth)):
            found.append((found[-1] + 1) // 2 if self.depth > 0 else 2 * found[-1])
        return tuple(found)

    def pixels(self, level: int) -> int:
        return self.heights[level] * self.widths[level]

    @property
    def last(self) -> int:
        """The level of the answer."""
        return 0 if self.depth > 0 else -self.depth

    def rows(self, ranks: int) -> tuple[Rows, ...]:
        """By level, among the ranks that have any."""
        dealt = deal(self.height, max(self.depth, 0), [1.0] * ranks)
        found = [dealt.among(sum(count > 0 for count in dealt.counts))]
        for _ in range(abs(self.depth)):
            found.append(found[-1].coarser if self.depth > 0 else found[-1].finer)
        return tuple(found)

    @cached_property
    def blocks(self) -> dict[str, tuple[Layer, ...]]:
        """In their order, without what stands before the first and after the last of them."""
        found: dict[str, list[Layer]] = {}
        for layer in self.layers:
            if not layer.block.startswith("conv_"):
                found.setdefault(layer.block, []).append(layer)
        return {name: tuple(layers) for name, layers in found.items()}

    def result(self, block: str) -> tuple[int, int]:
        """Level and channels of what a block hands on."""
        last = self.blocks[block][-1]
        return last.level + (last.stride > 1), last.out

    @cached_property
    def skips(self) -> tuple[tuple[str, str, int, int], ...]:
        """What up blocks read of down blocks: block, its reader, level and channels. Up blocks take the last first."""
        resnets = Counter(layer.block for layer in self.layers if layer.kind == "time")
        # The first is the sample before all blocks.
        kept = [("conv_in", 0, self.layers[0].out)]
        for block, layers in self.blocks.items():
            if block.startswith("down_blocks"):
                level, channels = self.result(block)
                kept += [(block, layers[0].level, channels)] * resnets[block]
                kept += [(block, level, channels)] * (level > layers[0].level)
        readers = [block for block in self.blocks if block.startswith("up_blocks") for _ in range(resnets[block])]
        found = [(block, reader, level, C) for (block, level, C), reader in zip(kept[::-1], readers, strict=False)]
        return tuple(found[::-1])

    def flops(self, layer: Layer) -> float:
        """Of its products; what only reads and writes counts as nothing."""
        C, pixels = layer.channels, self.pixels(layer.level)
        if layer.kind == "conv":
            made = self.pixels(layer.level + (layer.stride > 1))
            return 2.0 * self.batch * layer.kernel**2 * C * layer.out * made
        if layer.kind == "linear":
            return 2.0 * self.batch * C * layer.out * pixels
        if layer.kind == "feed_forward":
            # To four times the channels, twice because of the gate, and back.
            return 2.0 * self.batch * pixels * C * (8 * C + 4 * C)
        if layer.kind == "attention":
            seen, of = (pixels, C) if layer.context is None else (TEXT_TOKENS, layer.context)
            projected = 2.0 * self.batch * (2 * pixels * C * C + 2 * seen * of * C)
            return projected + 4.0 * self.batch * pixels * seen * C
        return 2.0 * self.batch * C * layer.out if layer.kind == "time" else 0.0


def unet_call(config: Mapping[str, Any], batch: int, height: int, width: int, itemsize: int = 2) -> Call:
    """Of a `UNet2DConditionModel` of Diffusers, on latents of that size; `batch` has both halves of guidance."""
    depth = len(config["block_out_channels"]) - 1
    return Call(tuple(_unet(config)), batch, height, width, depth, config.get("out_channels", 4), itemsize)


def decoder_call(config: Mapping[str, Any], batch: int, height: int, width: int, itemsize: int = 2) -> Call:
    """Of the decoder of an `AutoencoderKL` of Diffusers, for latents of that size."""
    depth = 1 - len(config["block_out_channels"])
    return Call(tuple(_decoder(config)), batch, height, width, depth, config.get("out_channels", 3), itemsize)


def _unet(config: Mapping[str, Any]) -> Iterator[Layer]:
    widths, groups = list(config["block_out_channels"]), config.get("norm_num_groups", 32)
    counts = _each(config.get("layers_per_block", 2), len(widths))
    depths = _each(config.get("transformer_layers_per_block", 1), len(widths))
    # Its name in Diffusers is a mistake that was kept: it is the number of heads.
    heads = _each(config.get("num_attention_heads") or config.get("attention_head_dim", 8), len(widths))
    text, time, last = config.get("cross_attention_dim", 1280), 4 * widths[0], len(widths) - 1

    def attention(block: str, level: int) -> Iterator[Layer]:
        C = widths[level]
        yield Layer("norm", block, level, C, groups=groups)
        yield Layer("linear", block, level, C, C)
        for _ in range(depths[level]):
            yield Layer("attention", block, level, C, heads=heads[level])
            yield Layer("attention", block, level, C, heads=heads[level], context=text)
            yield Layer("feed_forward", block, level, C)
        yield Layer("linear", block, level, C, C)

    def resnets(block: str, kind: str, level: int, inputs: Iterable[int]) -> Iterator[Layer]:
        for C in inputs:
            yield from _resnet(block, level, C, widths[level], groups, time)
            if _is_attentive(kind):
                yield from attention(block, level)

    before = widths[0]
    yield Layer("conv", "conv_in", 0, config.get("in_channels", 4), before, 3)
    for level, (kind, out) in enumerate(zip(config["down_block_types"], widths, strict=True)):
        block = f"down_blocks.{level}"
        yield from resnets(block, kind, level, [before, *[out] * (counts[level] - 1)])
        before = out
        if level < last:
            yield Layer("conv", block, level, out, out, 3, 2)
    yield from _resnet("mid_block", last, before, before, groups, time)
    yield from attention("mid_block", last)
    yield from _resnet("mid_block", last, before, before, groups, time)
    for number, kind in enumerate(config["up_block_types"]):
        level, block = last - number, f"up_blocks.{number}"
        out, finer = widths[level], widths[max(level - 1, 0)]
        # Beside the sample, each reads what a down block kept; the last of them comes from the next finer level.
        samples, kept = [before, *[out] * counts[level]], [*[out] * counts[level], finer]
        yield from resnets(block, kind, level, map(sum, zip(samples, kept, strict=True)))
        before = out
        if level:
            yield Layer("upsample", block, level, out)
            yield Layer("conv", block, level - 1, out, out, 3)
    yield Layer("norm", "conv_out", 0, before, groups=groups)
    yield Layer("conv", "conv_out", 0, before, config.get("out_channels", 4), 3)


def _decoder(config: Mapping[str, Any]) -> Iterator[Layer]:
    widths, groups = list(config["block_out_channels"])[::-1], config.get("norm_num_groups", 32)
    C, last = widths[0], len(widths) - 1
    yield Layer("conv", "conv_in", 0, config.get("latent_channels", 4), C, 3)
    yield from _resnet("mid_block", 0, C, C, groups)
    if config.get("mid_block_add_attention", True):
        yield Layer("norm", "mid_block", 0, C, groups=groups)
        yield Layer("attention", "mid_block", 0, C)
    yield from _resnet("mid_block", 0, C, C, groups)
    for level, out in enumerate(widths):
        block = f"up_blocks.{level}"
        for _ in range(config.get("layers_per_block", 1) + 1):
            yield from _resnet(block, level, C, out, groups)
            C = out
        if level < last:
            yield Layer("upsample", block, level, C)
            yield Layer("conv", block, level + 1, C, C, 3)
    yield Layer("norm", "conv_out", last, C, groups=groups)
    yield Layer("conv", "conv_out", last, C, config.get("out_channels", 3), 3)


def _resnet(block: str, level: int, C: int, out: int, groups: int, time: int = 0) -> Iterator[Layer]:
    yield Layer("norm", block, level, C, groups=groups)
    yield Layer("conv", block, level, C, out, 3)
    if time:
        yield Layer("time", block, level, time, out)
    yield Layer("norm", block, level, out, groups=groups)
    yield Layer("conv", block, level, out, out, 3)
    if out != C:
        yield Layer("conv", block, level, C, out)


def _each(value: int | list[int] | tuple[int, ...], blocks: int) -> tuple[int, ...]:
    return (value,) * blocks if isinstance(value, int) else tuple(value)


def _is_attentive(kind: str) -> bool:
    if kind not in _ATTENTIVE | _PLAIN:
        raise Unsupported("volume", f"a UNet with {kind}: what it sends is not known")
    return kind in _ATTENTIVE
