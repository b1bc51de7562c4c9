"""What a transformer block moves through memory: each op by itself, with epilogues, and by `transformer_block`.

    found = plan(8192, 320, 8, arch.get("gfx1100"))
    found.template.bytes / found.naive.bytes

A model, and not a measurement: that of rocm_sd/kernels/hip/transformer_plan.py. Small blocks do better in all three
compositions alike. Attention is one kernel in all three, since stock torch has it so. The tables of
docs/transformer-block.md and docs/hip-figures.md are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip.launch import ceil_div
from rocm_sd.kernels.hip.transformer_plan import BlockSizes, BlockStep, config_for, moment_bytes, norm_and_product

if TYPE_CHECKING:
    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.transformer_plan import TransformerBlockConfig

__all__ = ["BlockPlan", "Composition", "plan"]

_BYTES = 2  # of a value
_FRAGMENT = 16  # the fewest rows that a matrix instruction multiplies


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
class _Sizes(BlockSizes):
    """With those of the text: `keys` of all items of the batch, and `tokens` of one item."""

    keys: int
    tokens: int

    @property
    def text(self) -> int:
        """Bytes of as many columns of the text."""
        return self.keys * self.width * _BYTES

    def scores(self, keys: int) -> int:
        """FLOP of both products of an attention of every token to `keys` keys."""
        return 4 * self.rows * keys * self.width


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


def _template(s: _Sizes, text: int, config: TransformerBlockConfig) -> tuple[BlockStep, ...]:
    itself, to_text = _attentions(s, text)

    def added(name: str, columns: int) -> BlockStep:
        reads = (columns + 1) * s.x + s.weight(columns)
        return BlockStep(f"{name}, add, moments", reads, s.x + moment_bytes(s, config), s.product(columns))

    into = [norm_and_product(s, config, which, fold=config.fold[which]) for which in range(3)]
    projection = added("projection", 1)
    last = added("feed-forward's last", 4)
    return (*into[0], itself, projection, *into[1], to_text, projection, *into[2], last)


def _reasons(s: _Sizes, arch: Arch, config: TransformerBlockConfig) -> tuple[str, ...]:
    if arch.lds_per_workgroup is None or arch.vgprs_per_wave is None or arch.compute_units is None:
        raise Unsupported("transformer_block (hip)", f"the architecture {arch.name}: its LDS is not known")
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
