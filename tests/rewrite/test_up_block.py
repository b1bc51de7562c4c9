from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D

from rocm_sd import numerics
from rocm_sd.ops import conv2d, group_norm_silu
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, apply, resblock, undo, up_block

ALL = (*RULES, *RULES_FOR_GRAPHS)
OTHERS = tuple(rule for rule in ALL if rule is not up_block.RULE)
KERNELS = "group_norm_silu=triton,conv2d=triton,upsample_conv2d=torch,attention=torch"


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", KERNELS)


@pytest.fixture
def cats(monkeypatch):
    """How many channels are joined each time; a transformer's weights are joined too."""
    made = []
    cat = torch.cat

    def counted(tensors, *arguments, **named):
        if tensors[0].dim() == 4:
            made.append(sum(tensor.shape[1] for tensor in tensors))
        return cat(tensors, *arguments, **named)

    monkeypatch.setattr(torch, "cat", counted)
    return made


def block(kind=UpBlock2D, **options):
    torch.manual_seed(0)
    config = {
        "in_channels": 24, "prev_output_channel": 40, "out_channels": 32, "temb_channels": 16, "num_layers": 2,
        "resnet_groups": 4, "add_upsample": False,
    }  # fmt: skip
    if kind is CrossAttnUpBlock2D:
        config |= {"num_attention_heads": 2, "cross_attention_dim": 12}
    module = kind(**config | options).eval().requires_grad_(False).half()
    return module.to(memory_format=torch.channels_last)


def called(kind=UpBlock2D, size=(13, 20), batch=1):
    """As a UNet calls it: 40 channels from below, skips of 32 and 24, the last one first."""
    draw = torch.Generator().manual_seed(1)

    def image(channels):
        return torch.randn(batch, *size, channels, generator=draw).permute(0, 3, 1, 2).half()

    given = {
        "hidden_states": image(40),
        "res_hidden_states_tuple": (image(24), image(32)),
        "temb": torch.randn(batch, 16, generator=draw).half(),
        "upsample_size": None,
    }
    if kind is CrossAttnUpBlock2D:
        given |= {"encoder_hidden_states": torch.randn(batch, 5, 12, generator=draw).half()}
        given |= {"cross_attention_kwargs": None, "attention_mask": None, "encoder_attention_mask": None}
    return given


def wide(value, dtype=torch.float64):
    if isinstance(value, tuple):
        return tuple(wide(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
@pytest.mark.parametrize("kind", [UpBlock2D, CrossAttnUpBlock2D])
def test_as_right_as_stock_and_nothing_is_joined(kind, cats):
    module, given = block(kind), called(kind, batch=2)
    stock = module(**given)
    exact = copy.deepcopy(module).double()(**{name: wide(value) for name, value in given.items()})
    apply(module, ALL)
    del cats[:]
    made = module(**given)
    assert not cats
    comparison = numerics.compare(made, exact, stock)
    assert comparison.ok, comparison
    assert torch.equal(made, module(**given))


@torch.no_grad()
def test_the_values_are_those_of_the_other_rules_to_a_rounding():
    plain, ours, given = block(), block(), called()
    apply(plain, OTHERS)
    apply(ours, ALL)
    torch.testing.assert_close(ours(**given), plain(**given), rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_a_small_map_is_joined(cats):
    module, given = block(), called(size=(4, 5))
    stock = module(**given)
    apply(module, ALL)
    del cats[:]
    made = module(**given)
    assert cats == [40 + 32, 32 + 24]
    torch.testing.assert_close(made, stock, rtol=1e-2, atol=1e-2)


def _freeu(module):
    module.resolution_idx, module.s1, module.s2, module.b1, module.b2 = 0, 0.9, 0.2, 1.2, 1.4


def _hook(module):
    module.resnets[0].register_forward_hook(lambda _module, _given, y: y * 2)


def _other_padding(module):
    module.resnets[0].conv1.padding_mode = "circular"


def _own_forward(module):
    forward = module.resnets[0].forward
    module.resnets[0].forward = lambda *given, **named: forward(*given, **named) * 3


def _hook_on_the_shortcut(module):
    module.resnets[0].conv_shortcut.register_forward_hook(lambda _module, _given, y: y * 2)


@torch.no_grad()
@pytest.mark.parametrize("change", [_freeu, _hook, _hook_on_the_shortcut, _other_padding, _own_forward])
def test_what_is_done_to_a_block_afterwards_counts(change):
    plain, ours = block(), block()
    apply(ours, ALL)
    before = ours(**called())
    for module in (plain, ours):
        change(module)
    # FreeU writes into what it is given.
    after = ours(**called())
    assert not torch.allclose(after, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(after, plain(**called()), rtol=1e-2, atol=1e-2)


def test_gradients_go_through_stock():
    module = block().float().requires_grad_(True)
    given = {name: wide(value, torch.float32) for name, value in called().items()}
    stock = module(**given)
    apply(module, ALL)
    made = module(**given)
    assert made.requires_grad
    assert torch.equal(made, stock)


@torch.no_grad()
def test_undone():
    module, given = block(), called()
    stock = module(**given)
    changes = apply(module, ALL)
    assert "up_block" in {change.rule for change in changes if change.replaced}
    undo(changes)
    assert torch.equal(module(**given), stock)
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("op", [group_norm_silu, conv2d])
def test_gradients_of_an_op_reach_both_tensors(op, monkeypatch):
    monkeypatch.delenv("ROCM_SD_IMPLEMENTATION")
    x, concat = (torch.randn(2, c, 3, 5, dtype=torch.float64, requires_grad=True) for c in (8, 4))
    weight = torch.randn(6, 12, 1, 1, dtype=torch.float64)
    given = (4,) if op is group_norm_silu else (weight,)
    joined = [t.detach().clone().requires_grad_(True) for t in (x, concat)]
    op(x, *given, concat=concat).square().sum().backward()
    op(torch.cat(joined, 1), *given).square().sum().backward()
    for one, other in zip((x, concat), joined, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("op", [group_norm_silu, conv2d])
@pytest.mark.parametrize("wrong", [torch.zeros(2, 4, 3, 6), torch.zeros(1, 4, 3, 5), torch.zeros(2, 4, 3, 5).half()])
def test_tensors_that_cannot_be_joined_are_refused(op, wrong):
    given = (4,) if op is group_norm_silu else (torch.zeros(6, 12, 1, 1),)
    with pytest.raises(Exception, match="x and concat that differ in more than their channels"):
        op(torch.zeros(2, 8, 3, 5), *given, concat=wrong)
