"""The tiles of a transformer block, and which of its norms ride along with the product after them: by a model.

Every kernel reads each of its operands once and writes its result once, at the rate of the product's memory, as if no
cache kept anything from one kernel to the next. `tools/transformer_plan.py` counts whole blocks by it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd.arch import MatrixUnit, roofline
from rocm_sd.kernels.config import Config
from rocm_sd.kernels.hip.attention import configs as attention_configs
from rocm_sd.kernels.hip.launch import HipRefused, ceil_div
from rocm_sd.kernels.hip.norm_geglu import tiles as geglu_tiles
from rocm_sd.kernels.hip.norm_linear import tiles as linear_tiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.attention import AttentionConfig
    from rocm_sd.kernels.hip.linear_geglu import LinearGegluConfig
    from rocm_sd.kernels.hip.linear_residual import LinearResidualConfig

__all__ = [
    "BlockSizes",
    "BlockStep",
    "FoldConfig",
    "TransformerBlockConfig",
    "config_for",
    "moment_bytes",
    "norm_and_product",
]

_BYTES = 2  # of a value
_PAIR = 8  # bytes of the two moments of one part of a row
# Vector instructions that apply a norm to one value of float16 between global memory and LDS, as the emulator counts
# them: gfx9 has no instruction that multiplies, adds and rounds. gfx1030 is taken to be as gfx11.
NORM_OPERATIONS: Mapping[MatrixUnit, float] = {
    MatrixUnit.DOT: 4.9,
    MatrixUnit.WMMA_GFX11: 4.9,
    MatrixUnit.WMMA_GFX12: 4.9,
    MatrixUnit.MFMA: 8.3,
}
# FLOP that a float32 peak has for one instruction of one lane: an FMA, and two of them where the peak is that of
# instructions issued in pairs or packed.
_FLOP_PER_INSTRUCTION = {MatrixUnit.DOT: 2}


@dataclass(frozen=True)
class TransformerBlockConfig:
    """Tiles of the ungated products, of the gated one, and of both attentions.

    `fold` says of each of the three norms whether it is applied on the way into its product, as often as that product
    has columns of tiles, or once, by a pass of its own.
    """

    linear: LinearResidualConfig
    geglu: LinearGegluConfig
    attention: AttentionConfig
    fold: tuple[bool, bool, bool] = (True, True, True)


@dataclass(frozen=True)
class FoldConfig(Config):
    """Whether each of the three norms is applied on the way into its product: 1, 0, or -1 for what the model says."""

    first: int = -1
    second: int = -1
    third: int = -1

    def over(self, config: TransformerBlockConfig) -> TransformerBlockConfig:
        folds = zip(astuple(self), config.fold, strict=True)
        first, second, third = (by_model if asked < 0 else bool(asked) for asked, by_model in folds)
        return replace(config, fold=(first, second, third))


@dataclass(frozen=True)
class BlockStep:
    """One kernel: bytes read and written, FLOP of its products, values that it applies a norm to on their way."""

    name: str
    reads: int
    writes: int
    flops: int = 0
    normed: int = 0

    @property
    def bytes(self) -> int:
        return self.reads + self.writes

    def seconds(self, arch: Arch) -> float:
        """The least time by the roofline; WMMA and dot products share their unit with the norm's arithmetic."""
        bound = roofline(arch, self.flops, self.bytes, "float16")
        unit, peak = arch.matrix_unit, arch.peak("float32")
        if not self.normed:
            return bound.seconds
        if unit is None or unit not in NORM_OPERATIONS or peak is None:
            raise HipRefused("transformer_block (hip)", f"the architecture {arch.name}")
        rate = peak * 1e12 / _FLOP_PER_INSTRUCTION.get(unit, 4)
        vector = self.normed * NORM_OPERATIONS[unit] / rate
        if unit is MatrixUnit.MFMA:
            return max(bound.seconds, vector)
        return max(bound.memory_seconds, bound.compute_seconds + vector)


@dataclass(frozen=True)
class BlockSizes:
    """Bytes: `x` of the tokens; weights by their columns times width. `rows` are the tokens of the whole batch."""

    rows: int
    width: int

    @property
    def x(self) -> int:
        return self.rows * self.width * _BYTES

    def weight(self, columns: int) -> int:
        return columns * self.width * self.width * _BYTES

    def product(self, columns: int, rows: int | None = None) -> int:
        return 2 * (self.rows if rows is None else rows) * columns * self.width * self.width


@lru_cache(maxsize=256)
def config_for(rows: int, width: int, heads: int, arch: Arch) -> TransformerBlockConfig:
    """The largest tiles that give every compute unit one, or the smallest; norms folded where the model gains by it.

    `rows` counts the tokens of the whole batch. By the architecture's table, and not timed.
    """
    choices = attention_configs(width // heads, arch)
    linear, geglu = linear_tiles(arch), geglu_tiles(arch)
    if not linear or arch.compute_units is None:
        raise HipRefused("transformer_block (hip)", f"the architecture {arch.name}")
    config = TransformerBlockConfig(
        # The products with the fewest tiles, C columns wide, decide for all.
        next((tile for tile in linear if tile.tiles(rows, width) >= arch.compute_units), linear[-1]),
        next((tile for tile in geglu if tile.tiles(rows, 8 * width) >= arch.compute_units), geglu[-1]),
        choices[0],
    )
    sizes = BlockSizes(rows, width)

    def gains(which: int) -> bool:
        seconds = [
            sum(step.seconds(arch) for step in norm_and_product(sizes, config, which, fold=fold))
            for fold in (True, False)
        ]
        return seconds[0] < seconds[1]

    return replace(config, fold=(gains(0), gains(1), gains(2)))


def moment_bytes(s: BlockSizes, config: TransformerBlockConfig) -> int:
    """Bytes of the moments that a product writes beside its rows."""
    return _PAIR * s.rows * ceil_div(s.width, config.linear.block_n)


def norm_and_product(s: BlockSizes, config: TransformerBlockConfig, which: int, *, fold: bool) -> tuple[BlockStep, ...]:
    """A norm and the product after it; the first norm's rows are measured by a pass of their own."""
    name, columns, results = (("q, k, v", 3, 3), ("q", 1, 1), ("gated values", 8, 4))[which]
    x, block_n = s.x, (config.geglu if which == 2 else config.linear).block_n
    if not fold:
        plain = BlockStep(name, x + s.weight(columns), results * x, s.product(columns))
        return BlockStep("norm", x, x), plain
    moments = _PAIR * s.rows if which == 0 else moment_bytes(s, config)
    normed = ceil_div(columns * s.width, block_n) * s.rows * s.width
    product = BlockStep(f"norm, {name}", x + moments + s.weight(columns), results * x, s.product(columns), normed)
    return (BlockStep("moments", x, moments), product) if which == 0 else (product,)
