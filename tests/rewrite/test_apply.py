from __future__ import annotations

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from pipelines import tiny_unet, tiny_vae
from rocm_sd import numerics
from rocm_sd.rewrite import RULES, apply, resblock, undo


def block(**options) -> ResnetBlock2D:
    torch.manual_seed(0)
    config = {"in_channels": 32, "out_channels": 64, "temb_channels": 16, "groups": 8}
    return ResnetBlock2D(**config | options).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_channels": 32},
        {"temb_channels": None},
        {"temb_channels": None, "time_embedding_norm": "group"},
        {"up": True},
        {"down": True},
        {"output_scale_factor": 1.4},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
@torch.no_grad()
def test_a_replaced_resblock_is_as_accurate_as_stock(options):
    x = torch.randn(2, 32, 9, 7, generator=torch.Generator().manual_seed(1))
    temb = None if "temb_channels" in options else torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    module = block(**options)
    stock = module(x, temb)
    changes = apply(module, [resblock.RULE])
    ours = module(x, temb)
    exact = block(**options).double()(x.double(), None if temb is None else temb.double())
    assert [c.replaced for c in changes] == [True]
    numerics.require("resblock", ours, exact, stock)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"non_linearity": "mish"}, "its activation is Mish"), ({"time_embedding_norm": "scale_shift"}, "scale_shift")],
)
def test_what_a_rule_does_not_know_is_skipped_with_the_reason(options, reason):
    module = block(**options)
    (change,) = apply(module, RULES)
    assert not change.replaced
    assert reason in change.why_skipped
    assert "forward" not in module.__dict__


def test_undo_leaves_no_trace():
    unet = tiny_unet()
    before = {name: dict(module.__dict__) for name, module in unet.named_modules()}
    changes = apply(unet, RULES)
    assert sum(c.replaced for c in changes) == 11
    undo(changes)
    after = {name: dict(module.__dict__) for name, module in unet.named_modules()}
    assert [set(v) for v in before.values()] == [set(v) for v in after.values()]
    assert not any("forward" in attributes for attributes in after.values())


def test_instances_are_touched_and_never_classes():
    original = ResnetBlock2D.forward
    one, other = tiny_vae(), tiny_vae()
    changes = apply(one, RULES)
    assert ResnetBlock2D.forward is original
    assert not any("forward" in m.__dict__ for m in other.modules())
    undo(changes)


class CountingHook(ModelHook):
    calls = 0

    def pre_forward(self, _module: nn.Module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@torch.no_grad()
@pytest.mark.parametrize("order", ["hook first", "rule first"])
def test_offload_hooks_compose(order):
    x, temb = torch.randn(1, 32, 4, 4), torch.randn(1, 16)
    module, hook = block(), CountingHook()
    stock = module(x, temb)
    if order == "hook first":
        add_hook_to_module(module, hook)
        changes = apply(module, RULES)
    else:
        changes = apply(module, RULES)
        add_hook_to_module(module, hook)
    torch.testing.assert_close(module(x, temb), stock)
    assert hook.calls == 1
    undo(changes)
    assert torch.equal(module(x, temb), stock)
    assert hook.calls == 2
    remove_hook_from_module(module)
    assert torch.equal(module(x, temb), stock)
    assert hook.calls == 2
