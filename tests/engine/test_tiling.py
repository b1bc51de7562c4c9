"""Pictures in tiles: exactly the whole where one tile covers all, blended elsewhere, with seams that are measured."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import rocm_sd
from pipelines import CASES, call, exactly, picture_of, require_as_exact_as_stock, small_blocks_too
from rocm_sd.engine import tiles_of
from rocm_sd.engine.tiling import Tiles, is_tiled
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.quality.seams import seams

LARGE = {"height": 40, "width": 24}


@pytest.fixture
def pipe(tmp_path):
    """Its own size is 16 pixels: 8 points of latents, of which a UNet of two levels halves once."""
    return CASES["sd15"].build(tmp_path)


class TestTiles:
    @pytest.mark.parametrize(("total", "starts"), [(8, [0]), (5, [0]), (9, [0, 1]), (16, [0, 4, 8]), (20, [0, 6, 12])])
    def test_begin_evenly_and_end_with_the_picture(self, total, starts):
        assert Tiles(8, 2, 2, 2).starts(total) == starts

    @pytest.mark.parametrize("total", range(8, 60))
    @pytest.mark.parametrize("overlap", [0, 2, 4])
    def test_cover_every_point_and_share_what_they_should(self, total, overlap):
        tiles = Tiles(8, overlap, 2, 2)
        starts = tiles.starts(total)
        assert starts[0] == 0
        assert starts[-1] == max(0, total - 8)
        # An alignment of two points may take one of them from a shared part.
        assert all(second - first <= 8 - overlap + 1 for first, second in pairwise(starts))
        assert all(start % 2 == 0 for start in starts[:-1])

    @pytest.mark.parametrize("size", [(8, 8), (8, 20), (17, 9), (40, 40)])
    def test_weights_are_positive_everywhere_and_one_inside(self, size):
        tiles = Tiles(8, 2, 2, 2)
        summed = torch.zeros(size)
        for box in tiles.boxes(*size):
            weight = tiles.weight(box, *size, torch.device("cpu"))
            assert weight.min() > 0
            assert weight.max() <= 1
            summed[box] += weight
        assert summed.min() > 0.1
        whole = tiles.weight(tiles.boxes(8, 8)[0], 8, 8, torch.device("cpu"))
        assert torch.equal(whole, torch.ones(8, 8))

    def test_borders_are_where_tiles_begin_or_end(self):
        assert Tiles(8, 2, 2, 4).borders(16 * 4) == [16, 32, 48]
        assert Tiles(8, 2, 2, 4).borders(8 * 4) == []


def test_one_tile_that_covers_all_is_the_whole_picture(pipe):
    whole = call(pipe, CASES["sd15"])
    rocm_sd.tile(pipe)
    assert torch.equal(call(pipe, CASES["sd15"]), whole)
    small = call(pipe, CASES["sd15"], height=8, width=16)
    assert torch.equal(small, call(rocm_sd.untile(pipe), CASES["sd15"], height=8, width=16))


def test_tiles_of_a_model_that_sees_points_alone_are_the_whole_picture(tmp_path):
    """What each point gets depends on that point alone: then blending has to give it back, whatever the weights."""
    pipe = CASES["sd15"].build(tmp_path)

    class Points(torch.nn.Module):
        def forward(self, sample, *_, **__):
            return (torch.tanh(sample * 1.7 + 0.1),)

    pipe.unet.forward = Points().forward
    whole = call(pipe, CASES["sd15"], **LARGE)
    rocm_sd.tile(pipe)
    assert torch.allclose(call(pipe, CASES["sd15"], **LARGE), whole, atol=1e-5)


@pytest.mark.parametrize("graphs", ["0", "1"], ids=["stepwise", "captured"])
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd15-controlnet"])
def test_optimised_tiles_are_stocks_tiles(tmp_path, monkeypatch, name, graphs):
    small_blocks_too(monkeypatch, graphs)
    case = CASES[name]
    large = {"image": picture_of(2, 40, 24)} if "controlnet" in name else LARGE
    stock, ours = (rocm_sd.tile(case.build(tmp_path)) for _ in range(2))
    exact = rocm_sd.tile(case.build(tmp_path).to(torch.float64))
    # Tiles that were put on before are moved around the graphs.
    rocm_sd.optimize(ours)
    with exactly(torch.float32):
        truth = [call(exact, case, seed, **large) for seed in (0, 1)]
    mine, theirs = ([call(pipe, case, seed, **large) for seed in (0, 1)] for pipe in (ours, stock))
    require_as_exact_as_stock(mine, truth, theirs)
    notes = rocm_sd.report(ours).notes
    assert any("calls in tiles" in note for note in notes)
    graphs_held = [note for note in notes if note.startswith("UNet2DConditionModel: ") and "of its forward" in note]
    # One kind of call serves all tiles.
    assert [note.split(":")[1].split(" of ")[0] for note in graphs_held] == ([" 1 graph"] if graphs == "1" else [])


def test_tiles_differ_from_the_whole_and_come_off(pipe):
    whole = call(pipe, CASES["sd15"], **LARGE)
    rocm_sd.tile(pipe)
    tiled = call(pipe, CASES["sd15"], **LARGE)
    assert tiled.shape == whole.shape
    assert not torch.equal(tiled, whole)
    assert torch.equal(tiled, call(pipe, CASES["sd15"], **LARGE))
    rocm_sd.untile(pipe)
    assert not is_tiled(pipe)
    assert "forward" not in pipe.unet.__dict__
    assert torch.equal(call(pipe, CASES["sd15"], **LARGE), whole)


def test_restore_leaves_tiles_and_untile_leaves_the_rest(tmp_path):
    pipe, stock = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe)
    rocm_sd.tile(pipe)
    rocm_sd.restore(pipe)
    assert torch.equal(call(pipe, CASES["sd15"], **LARGE), call(rocm_sd.tile(stock), CASES["sd15"], **LARGE))
    rocm_sd.optimize(pipe)
    rocm_sd.untile(pipe)
    assert rocm_sd.report(pipe).replaced
    assert not any("tiles" in note for note in rocm_sd.report(pipe).notes)
    rocm_sd.restore(pipe)
    assert "forward" not in pipe.unet.__dict__


def test_the_report_says_that_it_approximates_and_nothing_tiles_unasked(pipe):
    rocm_sd.optimize(pipe)
    assert not is_tiled(pipe)
    assert rocm_sd.report(pipe).approximations == ()
    rocm_sd.tile(pipe, overlap=0.5)
    call(pipe, CASES["sd15"], **LARGE)
    report = rocm_sd.report(pipe)
    wanted = "UNet2DConditionModel approximates pictures above 16 pixels a side: in tiles that share 8 pixels, blended"
    assert wanted in report.approximations
    assert wanted in report.notes
    assert "UNet2DConditionModel: 4 calls in tiles, 8 of them at most; 0 calls whole" in report.notes


@pytest.mark.parametrize("options", [{"size": 15}, {"size": 0}, {"size": -16}, {"overlap": 0.6}, {"overlap": -1}])
def test_what_does_not_fit_is_said(pipe, options):
    with pytest.raises(InvalidOption):
        rocm_sd.tile(pipe, **options)
    assert not is_tiled(pipe)


def test_other_models_and_approximations_are_refused(pipe, tmp_path):
    with pytest.raises(Unsupported, match="FluxTransformer2DModel"):
        rocm_sd.tile(CASES["flux-dev"].build(tmp_path))
    rocm_sd.tile(pipe)
    with pytest.raises(Unsupported, match="in tiles"):
        rocm_sd.optimize(pipe, quality=rocm_sd.Skipping(depth=1, every=2))
    rocm_sd.untile(pipe)
    rocm_sd.optimize(pipe, quality=rocm_sd.Skipping(depth=1, every=2))
    with pytest.raises(Unsupported, match="quality"):
        rocm_sd.tile(pipe)


def test_maps_that_do_not_divide_are_refused(tmp_path):
    """Beside latents of 9 points a ControlNet's second level has 5: no tile would get its own part of them."""
    case = CASES["sd15-controlnet"]
    pipe = rocm_sd.tile(case.build(tmp_path))
    with pytest.raises(Unsupported, match="multiple of 64"):
        call(pipe, case, image=picture_of(2, 18, 24))


class TestSeams:
    def test_a_picture_without_seams_has_one(self):
        noise = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(0))
        assert seams(noise, [64, 128], [100]) == pytest.approx(1, abs=0.05)

    def test_a_hard_seam_is_seen(self):
        smooth = torch.linspace(0, 0.2, 64).expand(3, 64, 64).clone()
        assert seams(smooth, [], [32]) < 1.01 * 64 / 63 * 2
        smooth[..., 32:] += 0.3
        assert seams(smooth, [], [32]) > 10
        assert seams(smooth, [], [16]) < 1

    def test_flat_pictures(self):
        flat = torch.zeros(3, 32, 32)
        assert seams(flat, [8], [8]) == 1
        flat[:, 8:] = 1
        assert seams(flat, [8], []) == float("inf")

    @pytest.mark.parametrize(("rows", "columns"), [([], []), ([0], []), ([32], []), ([], [40])])
    def test_borders_that_are_none(self, rows, columns):
        with pytest.raises(Unsupported):
            seams(torch.zeros(3, 32, 32), rows, columns)


def test_blending_leaves_less_of_a_seam_than_hard_tiles(pipe):
    """Of a model whose answer depends on the tile's mean, as a norm makes it: hard tiles end in steps."""

    def forward(sample, *_arguments, **_named):
        return (0.1 * sample + sample.mean((2, 3), keepdim=True),)

    pipe.unet.forward = forward
    ramp = torch.linspace(0, 1, 64)
    smooth = (ramp[:, None] + ramp[None, :]).expand(1, 4, 64, 64)
    found = {}
    for overlap in (0.0, 0.25, 0.5):
        rocm_sd.tile(pipe, overlap=overlap)
        tiles = tiles_of(pipe)
        borders = [edge // tiles.scale for edge in tiles.borders(64 * tiles.scale)]
        found[overlap] = seams(pipe.unet(smooth, 1, None)[0], borders, borders)
    assert found[0.0] > 4
    assert found[0.5] < found[0.25] < found[0.0]
    assert found[0.5] < 2


def test_the_page_has_the_recorded_seams():
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/tiles-emoji-cpu/seams.json").read_text())["rows"]
    median = {row["overlap"]: f"{row['median']:.2f}" for row in rows}
    page = " ".join((root / "docs/quality-methods.md").read_text().split())
    assert f"{median[0.25]} with the overlap of a quarter, {median[0.5]} with a half" in page
    assert f"{median[0.0]} with no blending, and {median[None]} at the same lines of the whole" in page
