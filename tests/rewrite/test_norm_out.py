from __future__ import annotations

import copy
import gc
import pickle
from threading import Thread

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import UNet2DModel
from diffusers.models.autoencoders.vae import Decoder, Encoder
from torch import nn

from pipelines import tiny_unet
from rocm_sd import numerics
from rocm_sd.rewrite import apply, norm_out, undo
from rocm_sd.rewrite.norm_out import RULE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["in place", "op"])
def way(request, monkeypatch):
    monkeypatch.setattr(norm_out, "_WORTH_IT_ON_CPU", 0)
    if request.param == "op":
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "group_norm_silu=torch")
    return request.param


def decoder(**options) -> Decoder:
    torch.manual_seed(0)
    config = {"in_channels": 4, "block_out_channels": (32,), "norm_num_groups": 8, "layers_per_block": 1}
    module = Decoder(**config | options).eval().requires_grad_(False)
    if isinstance(module.conv_norm_out, nn.GroupNorm):
        module.conv_norm_out.weight.data.uniform_(0.5, 2)
        module.conv_norm_out.bias.data.normal_()
    return module


def latents(dtype=torch.float32, batch=2):
    return torch.randn(batch, 4, 5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)


def activated(module) -> list[bool]:
    """Whether the norm's answer was activated already, of each call from now on."""
    seen = []
    inner = module.conv_out.forward

    def forward(x):
        seen.append(bool((x >= -0.2785).all()))
        return inner(x)

    module.conv_out.forward = forward
    return seen


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_near_to_float64_as_stock(dtype, way):
    module, z = decoder().to(dtype), latents(dtype)
    stock, exact = module(z), copy.deepcopy(module).double()(z.double())
    changes = apply(module, [RULE])
    assert [(c.kind, c.replaced) for c in changes] == [("Decoder", True)]
    numerics.require("decoder", module(z), exact, stock)
    undo(changes)
    assert torch.equal(module(z), stock)
    assert not any("forward" in m.__dict__ for m in module.modules())


@torch.no_grad()
def test_the_norm_activates_and_the_activation_hands_on(way):
    module, z = decoder(), latents()
    x = module.up_blocks[0](module.mid_block(module.conv_in(z)))
    wanted = nn.functional.silu(module.conv_norm_out(x))
    apply(module, [RULE])
    y = module.conv_norm_out(x)
    torch.testing.assert_close(y, wanted)
    assert module.conv_act(y) is y
    torch.testing.assert_close(module.conv_act(y), nn.functional.silu(y))
    del y
    gc.collect()
    assert not norm_out._ACTIVATED


@torch.no_grad()
@pytest.mark.parametrize(
    ("build", "call"),
    [
        (lambda: Encoder(block_out_channels=(32,), norm_num_groups=8), lambda m: m(torch.ones(1, 3, 8, 8))),
        (tiny_unet, lambda m: m(torch.ones(2, 4, 8, 8), 3, torch.ones(2, 5, 32)).sample),
        (
            lambda: UNet2DModel(
                block_out_channels=(32, 32),
                down_block_types=("DownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "UpBlock2D"),
                norm_num_groups=8,
            ),
            lambda m: m(torch.ones(1, 3, 8, 8), 3).sample,
        ),
    ],
    ids=["Encoder", "UNet2DConditionModel", "UNet2DModel"],
)
def test_other_models(build, call, way):
    torch.manual_seed(0)
    module = build().eval()
    stock = call(module)
    changes = apply(module, [RULE])
    assert [c.replaced for c in changes] == [True]
    seen = activated(module)
    ours = call(module)
    assert seen == [True]
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_what_it_does_not_know_is_skipped_with_the_reason():
    (change,) = apply(decoder(norm_type="spatial"), [RULE])
    assert change.why_skipped == "its last norm is SpatialNorm, not GroupNorm"
    module = decoder()
    module.conv_act = nn.GELU()
    (change,) = apply(module, [RULE])
    assert change.why_skipped == "its last activation is GELU, not SiLU"


class Cloning(ModelHook):
    def post_forward(self, _module, output):
        return output.clone()


def clone_output(module):
    module.conv_norm_out.register_forward_hook(lambda _m, _a, y: y.clone())


def clone_input(module):
    module.conv_act.register_forward_pre_hook(lambda _m, args: (args[0].clone(),))


def other_activation(module):
    module.conv_act = nn.SiLU()


def other_norm(module):
    module.conv_norm_out = copy.deepcopy(module.conv_norm_out)


@torch.no_grad()
@pytest.mark.parametrize(
    "touch",
    [
        clone_output,
        clone_input,
        other_activation,
        other_norm,
        lambda m: add_hook_to_module(m.conv_norm_out, Cloning()),
        lambda m: add_hook_to_module(m.conv_act, ModelHook()),
        lambda m: cpu_offload(m, execution_device=torch.device("cpu")),
    ],
    ids=["clone_output", "clone_input", "other_activation", "other_norm", "hook_norm", "hook_act", "offload"],
)
@pytest.mark.parametrize("order", ["rule first", "touched first"])
def test_nothing_is_activated_twice(touch, order, way):
    module, z = decoder(), latents()
    stock = module(z)
    steps = [touch, lambda m: apply(m, [RULE])]
    for step in steps if order == "touched first" else reversed(steps):
        step(module)
    torch.testing.assert_close(module(z), stock)


@torch.no_grad()
def test_copies_and_pickles(way):
    module, z = decoder(), latents()
    stock = module(z)
    apply(module, [RULE])
    torch.testing.assert_close(copy.deepcopy(module)(z), stock)
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(z), stock)


def test_gradients_are_stocks_own(way):
    module, z = decoder().requires_grad_(True), latents().requires_grad_()
    module(z).sum().backward()
    stock, z.grad = z.grad, None
    apply(module, [RULE])
    module(z).sum().backward()
    assert torch.equal(z.grad, stock)


@torch.no_grad()
def test_autocast_is_stocks_own(way):
    module, z = decoder(), latents()
    with torch.autocast("cpu", torch.bfloat16):
        stock = module(z)
        apply(module, [RULE])
        assert torch.equal(module(z), stock)


@torch.no_grad()
def test_threads_do_not_take_each_others_tensors(way):
    module = decoder()
    inputs = [latents(batch=n) for n in (1, 2, 3)]
    wanted = [module(z) for z in inputs]
    apply(module, [RULE])
    wrong = []

    @torch.no_grad()
    def many(z, y):
        wrong.extend(1 for _ in range(30) if not torch.allclose(module(z), y, atol=1e-5))

    threads = [Thread(target=many, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_compiled_models_keep_stocks_two_steps(way):
    module, z = decoder(), latents()
    stock = module(z)
    apply(module, [RULE])
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(z), stock)
