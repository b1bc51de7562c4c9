"""Which scales layers get: one for a weight in fp8, or one for each of its rows, and what the error then is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rocm_sd import arch
from rocm_sd.engine.approximation.eight_bit_plans import Group, planned, weights
from rocm_sd.engine.approximation.observing import Observed, too_far

FP8 = {"sm_90": torch.float8_e4m3fn, "gfx1201": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
CPU = torch.device("cpu")


def groups_and_seen(layers):
    """Of each layer by itself; what comes into them has nothing in column 3."""
    torch.manual_seed(1)
    every, seen = [], {}
    for name, layer in layers.items():
        layer.requires_grad_(requires_grad=False)
        x = torch.randn(1, 16, 9, 9) if isinstance(layer, nn.Conv2d) else torch.randn(80, 32)
        x[:, 3] = 0
        every.append(Group((name,), (layer,)))
        seen[name] = Observed.of_maps(x, layer) if isinstance(layer, nn.Conv2d) else Observed.of(x)
    return every, seen


def layers():
    torch.manual_seed(0)
    made = {f"linear {n}": nn.Linear(32, 768) for n in range(3)}
    return made | {f"convolution {n}": nn.Conv2d(16, 768, 3, padding=1) for n in range(3)}


def with_a_value_that_stands_out(layer):
    """So large that all others are too small for fp8 with one scale, and multiplied with nothing."""
    with torch.no_grad():
        layer.weight[5, 3] = 3e6 * layer.weight.abs().max()
    return layer


def planned_for(name, every, seen, to, monkeypatch):
    monkeypatch.setattr(arch, "detect", lambda _device: arch.ARCHS[name])
    plans = planned(every, seen, to, CPU)
    return {group.names[0]: plan for group, plan in zip(every, plans, strict=True)}


@pytest.mark.parametrize("name", FP8)
def test_rows_of_weights_in_fp8_have_scales_where_products_are_as_quick_with_them(name, monkeypatch):
    plans = planned_for(name, *groups_and_seen(layers()), FP8[name], monkeypatch)
    assert {plan.by_row for plan in plans.values()} == {name != "sm_90"}
    # One scale of x in either case.
    assert all(plan.x_scale.dim() == 0 for plan in plans.values())
    assert max(plan.error for plan in plans.values()) < 0.05


@pytest.mark.parametrize("place", ["linear 1", "convolution 1"])
def test_rows_have_scales_elsewhere_too_where_a_layer_would_be_too_delicate(place, monkeypatch):
    made = layers()
    with_a_value_that_stands_out(made[place])
    every, seen = groups_and_seen(made)
    plans = planned_for("sm_90", every, seen, FP8["sm_90"], monkeypatch)
    assert [name for name, plan in plans.items() if plan.by_row] == [place]
    assert not too_far({name: plan.error for name, plan in plans.items()})
    group = next(group for group in every if group.names[0] == place)
    wide = group.layers[0].weight.flatten(1)
    for by_row, error in ((True, 0.05), (False, 0.9)):
        ((q, scale),) = weights(group, FP8["sm_90"], None, by_row=by_row)
        assert scale.shape == ((len(wide),) if by_row else ())
        others = [n for n in range(len(wide)) if n != 5]
        left = (q.double() * scale.double().view(-1, 1) - wide.double())[others]
        relative = left.square().mean().sqrt() / wide[others].double().square().mean().sqrt()
        assert relative < error if by_row else relative > error


def test_a_layer_that_rows_do_not_help_keeps_the_smaller_error(monkeypatch):
    made = layers()
    every, seen = groups_and_seen(made)
    # Columns of x that stand out are no matter of the weight's rows; smoothing has limits of its own.
    seen["convolution 0"].largest *= 1e6
    plans = planned_for("sm_90", every, seen, FP8["sm_90"], monkeypatch)
    assert too_far({name: plan.error for name, plan in plans.items()}) == {"convolution 0"}


@pytest.mark.parametrize("name", ["sm_90", "gfx1100"])
def test_int8_has_a_scale_for_each_row_everywhere(name, monkeypatch):
    plans = planned_for(name, *groups_and_seen(layers()), torch.int8, monkeypatch)
    assert all(plan.by_row for plan in plans.values())
    assert {key.split()[0]: plan.x_scale is None for key, plan in plans.items()} == {
        "linear": True,
        "convolution": False,
    }
