"""The plan of a transformer block says what its launcher does, and the document what the plan says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import docs_tables
from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import toolchain, transformer_block
from rocm_sd.kernels.hip.transformer_block import Attended, FeedForward, Linear, Norm, TransformerBlock
from transformer_plan import plan

# Tokens of two pictures, width and heads: SD 1.5 from 64x64 latents down, then SDXL.
SHAPES = [(8192, 320, 8), (2048, 640, 8), (512, 1280, 8), (8192, 640, 10), (2048, 1280, 20)]


class LaunchList:
    """A `Launcher` that runs nothing: (kernel, bytes of all matrices that it was given) of each launch."""

    def __init__(self, gfx):
        self.arch, self.launched = archs.get(gfx), []

    def launch(self, kernel, grid, arguments):
        assert min(grid) > 0
        matrices = [each for each in arguments if isinstance(each, torch.Tensor) and each.dim() > 1]
        self.launched.append((kernel.name, sum(each.numel() * each.element_size() for each in matrices)))


def launched(gfx, tokens, C, heads, config):
    def empty(*shape):
        return torch.empty(shape, dtype=torch.float16)

    def layer(n, k):
        return Linear(empty(n, k), empty(n))

    norm, launches = Norm(empty(C), empty(C)), LaunchList(gfx)
    block = TransformerBlock(
        heads,
        Attended(norm, layer(3 * C, C), layer(C, C)),
        Attended(norm, layer(C, C), layer(C, C)),
        FeedForward(norm, layer(8 * C, C), layer(C, 4 * C)),
    )
    x, y, k, v = empty(2, tokens // 2, C), empty(2, tokens // 2, C), *(empty(2, 77, heads, C // heads) for _ in "kv")
    transformer_block.launch(x, (k, v), block, y, config, launches)
    return launches.launched


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_the_plan_counts_what_the_launcher_gives_to_each_kernel(gfx):
    found = plan(2048, 640, 8, archs.get(gfx))
    for composition, fold in ((found.template, found.config.fold), (found.folded, (True, True, True))):
        kernels = launched(gfx, 2048, 640, 8, replace(found.config, fold=fold))
        assert [size for _, size in kernels] == [step.bytes for step in composition.steps]


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_composition_moves_less_than_the_one_before_and_the_chosen_one_takes_the_least_time(shape, gfx):
    arch = archs.get(gfx)
    found = plan(*shape, arch)
    sizes = [each.bytes for each in (found.naive, found.epilogues, found.template, found.folded)]
    assert all(more > less for more, less in pairwise(sizes[:3]))
    assert found.template.bytes >= found.folded.bytes
    best = found.template.seconds(arch)
    assert best < found.epilogues.seconds(arch) < found.naive.seconds(arch)
    assert best <= found.folded.seconds(arch)
    # The products are the same; only stock computes the text's keys and values at every step.
    flops = {sum(step.flops for step in each.steps) for each in (found.epilogues, found.folded, found.template)}
    assert len(flops) == 1


def test_the_bytes_by_hand():
    """In units of the tokens' own bytes, without weights, text and moments."""
    found = plan(2**20, 320, 8, archs.get("gfx1100"))
    x = 2**20 * 320 * 2
    assert [round(each.bytes / x) for each in (found.naive, found.epilogues, found.folded)] == [67, 37, 30]


@pytest.mark.parametrize(("width", "rows"), [(320, "; 16 rows fit"), (640, "not even 16"), (1280, "not even 16")])
def test_the_hidden_values_of_a_feed_forward_do_not_fit(width, rows):
    for gfx in toolchain.TARGETS:
        feed_forward, *_ = plan(2048, width, 8, archs.get(gfx)).reasons
        assert f"takes {8 * width} bytes of 65536 of LDS" in feed_forward
        assert rows in feed_forward


def test_more_lds_is_noticed():
    larger = replace(archs.get("gfx942"), lds_per_workgroup=160 * 1024)
    assert "; 32 rows fit" in plan(2048, 640, 8, larger).reasons[0]


def test_small_blocks_get_small_tiles_and_large_ones_large():
    arch = archs.get("gfx1100")
    assert plan(8192, 640, 10, arch).config.linear.block_m == 128
    assert plan(512, 1280, 8, arch).config.linear.block_m == 64


def test_where_nothing_is_known_there_is_no_plan():
    for name in ("gfx9999", "sm_90"):
        with pytest.raises(Unsupported):
            plan(2048, 640, 8, archs.get(name))


def test_the_document_says_what_the_plan_says():
    text = (docs_tables.ROOT / "docs" / "hip-figures.md").read_text(encoding="utf-8")
    assert "<!-- table: transformer-block -->" in text
    assert docs_tables.fill(text) == text, "type: python tools/docs_tables.py"
