"""What a transformer block moves through memory: each op by itself, with epilogues, and by `transformer_block`.

    found = plan(8192, 320, 8, arch.get("gfx1100"))
    found.template.bytes / found.naive.bytes

A model, and not a measurement: every kernel reads each of its operands once and writes its result once, at the rate of
the product's memory, as if no cache kept anything from one kernel to the next. Small blocks do better than that in all
three compositions alike. Attention is one kernel in all three, since stock torch has it so.
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

__all__ = ["BlockPlan", "BlockStep", "Composition", "FoldConfig", "TransformerBlockConfig", "config_for", "plan"]

_BYTES = 2  # of a value
_PAIR = 8  # bytes of the two moments of one part of a row
_FRAGMENT = 16  # the fewest rows that a matrix instruction multiplies
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
class Composition:
    steps: tuple[BlockStep, ...]

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)

    def seconds(self, arch: Arch) -> float:
        return sum(step.seconds(arch) for step in self.steps)


@dataclass(frozen=True)
class BlockPlan:
    """Four compositions of the same block, and why the last two are not fused further on this architecture.

    `folded` has every norm in its product, which moves the fewest bytes; `template` has those of `config.fold`.
    """

    naive: Composition
    epilogues: Composition
    folded: Composition
    template: Composition
    config: TransformerBlockConfig
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Sizes:
    """Bytes: `x` of the tokens, `text` of as many columns of the text; weights by their columns times width."""

    rows: int
    width: int
    keys: int  # of the text, of all items of the batch
    tokens: int  # of one item

    @property
    def x(self) -> int:
        return self.rows * self.width * _BYTES

    @property
    def text(self) -> int:
        return self.keys * self.width * _BYTES

    def weight(self, columns: int) -> int:
        return columns * self.width * self.width * _BYTES

    def product(self, columns: int, rows: int | None = None) -> int:
        return 2 * (self.rows if rows is None else rows) * columns * self.width * self.width

    def scores(self, keys: int) -> int:
        """FLOP of both products of an attention of every token to `keys` keys."""
        return 4 * self.rows * keys * self.width


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
    sizes = _Sizes(rows, width, 0, 0)

    def gains(which: int) -> bool:
        seconds = [sum(step.seconds(arch) for step in _into(sizes, config, which, fold=fold)) for fold in (True, False)]
        return seconds[0] < seconds[1]

    return replace(config, fold=(gains(0), gains(1), gains(2)))


def plan(tokens: int, width: int, heads: int, arch: Arch, *, batch: int = 2, text: int = 77) -> BlockPlan:
    """For `tokens` tokens, of a whole batch of `batch`, and `text` tokens for each item of it."""
    sizes = _Sizes(tokens, width, batch * text, tokens // batch)
    config = config_for(tokens, width, heads, arch)
    return BlockPlan(
        Composition(_naive(sizes, text)),
        Composition(_epilogues(sizes, text)),
        Composition(_template(sizes, text, replace(config, fold=(True, True, True)))),
        Composition(_template(sizes, text, config)),
        config,
        _reasons(sizes, arch, config),
    )


def _attentions(s: _Sizes, text: int) -> tuple[BlockStep, BlockStep]:
    return (
        BlockStep("attention", 3 * s.x, s.x, s.scores(s.tokens)),
        BlockStep("attention to the text", s.x + 2 * s.text, s.x, s.scores(text)),
    )


def _naive(s: _Sizes, text: int) -> tuple[BlockStep, ...]:
    x = s.x
    itself, to_text = _attentions(s, text)

    def linear(name: str, *, text_rows: bool = False) -> BlockStep:
        rows = s.keys if text_rows else s.rows
        side = s.text if text_rows else x
        # The text's own width is taken to be the block's: it is between 768 and 2048.
        return BlockStep(name, side + s.weight(1), side, s.product(1, rows))

    add, norm = BlockStep("add", 2 * x, x), BlockStep("norm", x, x)
    return (
        norm, linear("q"), linear("k"), linear("v"), itself, linear("projection"), add,
        norm, linear("q"), linear("k of the text", text_rows=True), linear("v of the text", text_rows=True), to_text,
        linear("projection"), add,
        norm,
        BlockStep("values and gates", x + s.weight(8), 8 * x, s.product(8)),
        BlockStep("gelu", 4 * x, 4 * x),
        BlockStep("values times gates", 8 * x, 4 * x),
        BlockStep("feed-forward's last", 4 * x + s.weight(4), x, s.product(4)),
        add,
    )  # fmt: skip


def _epilogues(s: _Sizes, text: int) -> tuple[BlockStep, ...]:
    """As rewrite/transformer.py composes it: packed products, adds inside norms, the gate in its product."""
    x = s.x
    itself, to_text = _attentions(s, text)
    one = BlockStep("projection", x + s.weight(1), x, s.product(1))
    add_and_norm = BlockStep("add and norm", 2 * x, 2 * x)
    return (
        BlockStep("norm", x, x),
        BlockStep("q, k, v", x + s.weight(3), 3 * x, s.product(3)),
        itself, one, add_and_norm,
        BlockStep("q", x + s.weight(1), x, s.product(1)),
        to_text, one, add_and_norm,
        BlockStep("gated values", x + s.weight(8), 4 * x, s.product(8)),
        BlockStep("feed-forward's last, add", 5 * x + s.weight(4), x, s.product(4)),
    )  # fmt: skip


def _pairs(s: _Sizes, config: TransformerBlockConfig) -> int:
    """Bytes of the moments that a product writes beside its rows."""
    return _PAIR * s.rows * ceil_div(s.width, config.linear.block_n)


def _into(s: _Sizes, config: TransformerBlockConfig, which: int, *, fold: bool) -> tuple[BlockStep, ...]:
    """A norm and the product after it; the first norm's rows are measured by a pass of their own."""
    name, columns, results = (("q, k, v", 3, 3), ("q", 1, 1), ("gated values", 8, 4))[which]
    x, block_n = s.x, (config.geglu if which == 2 else config.linear).block_n
    if not fold:
        plain = BlockStep(name, x + s.weight(columns), results * x, s.product(columns))
        return BlockStep("norm", x, x), plain
    moments = _PAIR * s.rows if which == 0 else _pairs(s, config)
    normed = ceil_div(columns * s.width, block_n) * s.rows * s.width
    product = BlockStep(f"norm, {name}", x + moments + s.weight(columns), results * x, s.product(columns), normed)
    return (BlockStep("moments", x, moments), product) if which == 0 else (product,)


def _template(s: _Sizes, text: int, config: TransformerBlockConfig) -> tuple[BlockStep, ...]:
    itself, to_text = _attentions(s, text)

    def added(name: str, columns: int) -> BlockStep:
        reads = (columns + 1) * s.x + s.weight(columns)
        return BlockStep(f"{name}, add, moments", reads, s.x + _pairs(s, config), s.product(columns))

    into = [_into(s, config, which, fold=config.fold[which]) for which in range(3)]
    projection = added("projection", 1)
    last = added("feed-forward's last", 4)
    return (*into[0], itself, projection, *into[1], to_text, projection, *into[2], last)


def _reasons(s: _Sizes, arch: Arch, config: TransformerBlockConfig) -> tuple[str, ...]:
    if arch.lds_per_workgroup is None or arch.vgprs_per_wave is None or arch.compute_units is None:
        raise HipRefused("transformer_block (hip)", f"the architecture {arch.name}: its LDS is not known")
    lds, width = arch.lds_per_workgroup, s.width
    hidden = 4 * width * _BYTES
    fits = lds // hidden // _FRAGMENT * _FRAGMENT
    weights = s.weight(12)
    stays = f"not even {_FRAGMENT} rows fit"
    if fits:
        stays = (
            f"{fits} rows fit, and {ceil_div(s.rows, fits)} workgroups would read {weights >> 10} KiB of weights each"
        )
    rows = config.linear.block_m
    sums = rows * width * 4
    threads = config.linear.waves_m * config.linear.waves_n * (arch.wave_size or 32)
    registers = sums // 4 // threads
    room = "too many" if registers > arch.vgprs_per_wave * 5 // 8 else "possible, and not built"
    feed_forward = (
        f"Feed-forward in one kernel: a row of hidden values takes {hidden} bytes of {lds} of LDS; {stays}. With sums "
        f"in registers and hidden values a tile at a time, {rows} rows take {registers} registers a lane: {room}."
    )
    heads = (
        "Attention and its projection in one: with every head of a row in one workgroup there are "
        f"{ceil_div(s.rows, config.attention.block_m)} workgroups for {arch.compute_units} compute units."
    )
    norms = (
        f"Norms: {sum(config.fold)} of 3 are folded into their products. A product of {8 * width} columns applies one "
        f"{ceil_div(8 * width, config.geglu.block_n)} times, one of {3 * width} columns "
        f"{ceil_div(3 * width, config.linear.block_n)} times, and a pass of its own once."
    )
    return feed_forward, heads, norms
