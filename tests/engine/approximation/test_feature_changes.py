"""How much deep features change from step to step, by stock's own forward; whole steps where the same adds up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import rocm_sd
from pipelines import CASES, call, small_blocks_too
from rocm_sd.engine.approximation import Skipping, evenly_changed, feature_changes

STEPS = 5
# Of a UNet, inside of its last block: between blocks, features are taken before what makes them larger.
DEPTHS = {"sd15": 1, "sdxl": 1, "sd3": 2}


@pytest.fixture(params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


def drawn(pipe, name):
    return call(pipe, CASES[name], num_inference_steps=STEPS)


def changes_of(features):
    return [float((after - before).norm() / after.norm()) for before, after in pairwise(features)]


def unet_features(pipe, depth):
    """What comes from below into a layer of the way up: the skip connection that is joined to it is the last part."""
    seen = []
    skips = [pipe.unet.conv_in.out_channels]
    for block in pipe.unet.down_blocks:
        skips += [block.resnets[0].out_channels] * (len(block.resnets) + (block.downsamplers is not None))
    resnet = [resnet for block in pipe.unet.up_blocks for resnet in block.resnets][-depth]

    def look(_module, args):
        seen.append(args[0][:, : args[0].shape[1] - skips[depth - 1]].double())

    resnet.register_forward_pre_hook(look)
    return seen


def transformer_features(pipe, depth):
    """What all blocks but the first ones add to the picture's tokens."""
    seen, blocks = [], list(pipe.transformer.transformer_blocks)
    outcomes = {}
    for number in (depth - 1, len(blocks) - 1):
        blocks[number].register_forward_hook(
            lambda _module, _args, result, number=number: outcomes.update({number: result[1].double()})
        )
    pipe.transformer.norm_out.register_forward_pre_hook(
        lambda *_: seen.append(outcomes[len(blocks) - 1] - outcomes[depth - 1])
    )
    return seen


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3"])
def test_changes_are_those_of_stocks_forward(tmp_path, name, step_graph):
    ours, stock = (CASES[name].build(tmp_path) for _ in range(2))
    if name == "sd3":
        torch.manual_seed(0)
        deep = type(ours.transformer).from_config(dict(ours.transformer.config) | {"num_layers": 4}).eval()
        ours.transformer = deep
        stock.transformer = type(deep).from_config(deep.config).eval()
        stock.transformer.load_state_dict(deep.state_dict())
    model, depth = getattr(ours, "unet", None) or ours.transformer, DEPTHS[name]
    seen = (unet_features if hasattr(stock, "unet") else transformer_features)(stock, depth)
    picture = drawn(stock, name)
    exact = rocm_sd.optimize(ours, quality=Skipping(depth, 2))
    pictures = []
    for _ in range(2):
        found = feature_changes(model, depth, lambda: pictures.append(drawn(exact, name)))
        assert found == pytest.approx(changes_of(seen), rel=1e-2)
        assert len(found) == STEPS - 1
    for each in pictures:
        torch.testing.assert_close(each, picture, atol=1e-3, rtol=1e-3)
    # It is gone again: steps are shallow.
    drawn(exact, name)
    assert any(" shallow" in note for note in rocm_sd.report(exact).approximations)


def test_it_is_taken_off_where_a_picture_fails(tmp_path):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=Skipping(1, 2))

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feature_changes(pipe.unet, 1, fail)
    rocm_sd.restore(pipe)
    assert "forward" not in vars(pipe.unet)


@pytest.mark.parametrize(
    ("changes", "count", "whole"),
    [
        ([1.0] * 7, 4, (0, 2, 4, 6)),
        ([0.1] * 19, 5, (0, 4, 8, 12, 16)),
        ([0.1] * 19, 20, tuple(range(20))),
        ([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0], 3, (0, 1, 2)),
        ([1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0], 3, (0, 5, 7)),
        ([0.0] * 5, 3, ()),
        ([0.0, 0.0, 9.0], 3, (0, 2, 3)),
        ([3.0], 1, (0,)),
        ([], 1, ()),
        ([1.0, float("nan"), 1.0], 2, ()),
        ([1.0, float("inf")], 2, ()),
        ([1.0, 1.0], 4, ()),
        ([1.0, 1.0], 0, ()),
    ],
)
def test_whole_steps_are_where_the_same_change_adds_up(changes, count, whole):
    assert evenly_changed(changes, count) == whole
