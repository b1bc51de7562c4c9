from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.autoencoders.vae import Decoder

from live_memory import live_peak
from rocm_sd import numerics
from rocm_sd.ops import group_norm_silu
from rocm_sd.ops.group_norm_silu.op import group_norm_silu_
from rocm_sd.rewrite import RULES, apply, resblock, undo, vae_decoder

OTHERS = tuple(rule for rule in RULES if rule is not vae_decoder.RULE)


@pytest.fixture(params=["torch", "triton"], autouse=True)
def norm(request, monkeypatch):
    """Norms as stock computes them, and by the kernel, which overwrites what it may."""
    monkeypatch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", f"group_norm_silu={request.param},conv2d=torch,upsample_conv2d=torch")
    return request.param


def decoder(**options) -> Decoder:
    torch.manual_seed(0)
    config = {
        "in_channels": 4,
        "block_out_channels": (16, 32),
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "mid_block_add_attention": False,
    }
    module = Decoder(**config | options).eval().requires_grad_(False)
    return module.to(memory_format=torch.channels_last)


def latents(dtype=torch.float32, batch=2):
    return torch.randn(batch, 4, 5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"layers_per_block": 2}, {"block_out_channels": (32, 16)}], ids=str)
def test_as_right_as_stock(dtype, options):
    z, module = latents(dtype), decoder(**options).to(dtype)
    stock, exact = module(z), copy.deepcopy(module).double()(z.double())
    before = z.clone()
    apply(module, RULES)
    made = module(z)
    comparison = numerics.compare(made, exact, stock)
    assert comparison.ok, comparison
    assert torch.equal(z, before)
    assert torch.equal(made, module(z))


@torch.no_grad()
def test_the_values_are_those_of_the_other_rules():
    plain, ours = decoder(), decoder()
    apply(plain, OTHERS)
    apply(ours, RULES)
    assert torch.equal(ours(latents()), plain(latents()))


@torch.no_grad()
def test_less_memory_at_its_peak(norm):
    z = latents(batch=1)
    plain, ours = decoder(), decoder()
    apply(plain, OTHERS)
    apply(ours, RULES)
    peaks = [live_peak(lambda module=module: module(z), z) for module in (plain, ours)]
    if norm == "triton":
        # The block that changes the channels was the peak, and so was the sampler before it, whose own input was kept:
        # of 2.5 large maps of 32 channels 2.25 are left, two for the sampler and its input.
        large = 32 * 10 * 14 * z.element_size()
        assert peaks == [2.5 * large, 2.25 * large]
    else:
        assert peaks[1] <= 1.01 * peaks[0]


@torch.no_grad()
@pytest.mark.parametrize(
    "path", ["up_blocks.0.upsamplers.0", "up_blocks.0.upsamplers.0.conv", "up_blocks.1", "mid_block"]
)
def test_what_a_hook_keeps_is_not_overwritten(path):
    z, module = latents(), decoder()
    kept = []
    module.get_submodule(path).register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    module(z)
    apply(module, RULES)
    module(z)
    torch.testing.assert_close(kept[1], kept[0])


@torch.no_grad()
def test_a_hook_on_all_modules_sees_every_block():
    seen, module = [], decoder()
    apply(module, RULES)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda each, _inputs, _output: seen.append(each))
    try:
        module(latents())
    finally:
        handle.remove()
    assert all(block in seen for block in module.up_blocks)


@torch.no_grad()
def test_what_is_not_of_the_kind_is_called_as_it_is():
    z, module = latents(), decoder()
    stock = module(z)
    changes = apply(module, RULES)
    # Another program's forward for one block, and for one layer in a block.
    module.up_blocks[0].forward = lambda x, temb=None: (
        type(module.up_blocks[0]).forward(module.up_blocks[0], x, temb) + 1
    )
    changed = module(z)
    assert not torch.allclose(changed, stock, atol=1e-3)
    del module.up_blocks[0].forward
    inner = module.up_blocks[1].resnets[0].conv1
    inner.forward = lambda x: type(inner).forward(inner, x)
    torch.testing.assert_close(module(z), stock)
    del inner.forward
    cpu_offload(module, torch.device("cpu"))
    torch.testing.assert_close(module(z), stock)
    undo(changes)
    torch.testing.assert_close(module(z), stock)


def test_gradients_fall_back_to_stock():
    z, module = latents().requires_grad_(), decoder()
    module(z).sum().backward()
    expected, z.grad = z.grad, None
    apply(module, RULES)
    module(z).sum().backward()
    torch.testing.assert_close(z.grad, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 5, 7), (2, 24, 33, 17), (1, 64, 40, 40)], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_in_place_the_bits_are_the_same(shape, dtype, added, norm, device):
    random = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=random).to(device, dtype).to(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], generator=random).to(device, dtype) for _ in range(2))
    add = torch.randn(shape[:2], generator=random).to(device, dtype) if added else None
    expected = group_norm_silu(x, 8, weight, bias, add)
    given = x.clone(memory_format=torch.preserve_format)
    actual = group_norm_silu_(given, 8, weight, bias, add)
    assert torch.equal(actual, expected)
    assert (actual.data_ptr() == given.data_ptr()) == (norm == "triton")
    # Of another layout there is no place for the result in it.
    contiguous = x.contiguous()
    expected = group_norm_silu(contiguous, 8, weight, bias, add)
    assert torch.equal(group_norm_silu_(contiguous, 8, weight, bias, add), expected)
    assert torch.equal(contiguous, x)
