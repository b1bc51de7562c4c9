from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import nn

from live_memory import live_peak
from pipelines import tiny_unet, tiny_vae
from rocm_sd import numerics
from rocm_sd.engine.vae.plan import predicted_peak
from rocm_sd.ops import registry
from rocm_sd.ops.attention import op
from rocm_sd.rewrite import RULES, apply, undo, vae_attention
from rocm_sd.rewrite.resblock import RULE as RESBLOCK
from rocm_sd.rewrite.sampling import DOWNSAMPLE, UPSAMPLE
from rocm_sd.rewrite.vae_attention import BOUNDED, RULE

EVERY = "conv2d=torch,upsample=torch,upsample_conv2d=torch,group_norm_silu=torch,attention=torch,linear_residual=torch"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(vae_attention, "_WORTH_IT_ON_CPU", 0)


def block(channels=64, heads=1, **options) -> Attention:
    """As UNetMidBlock2D makes it."""
    torch.manual_seed(0)
    config = {
        "heads": heads,
        "dim_head": channels // heads,
        "eps": 1e-6,
        "norm_num_groups": 8,
        "residual_connection": True,
        "bias": True,
        "upcast_softmax": True,
        "_from_deprecated_attn_block": True,
    }
    module = Attention(channels, **config | options).eval().requires_grad_(False)
    if module.group_norm is not None:
        module.group_norm.weight.normal_()
    return module


def picture(batch=2, channels=64, size=(5, 7)):
    x = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def check(module, x, **arguments):
    stock, exact = module(x, **arguments), copy.deepcopy(module).double()(x.double(), **arguments)
    changes = apply(module, [RULE])
    assert [c.replaced for c in changes] == [True]
    ours = module(x, **arguments)
    assert ours.dtype == stock.dtype
    numerics.require("vae_attention", ours, exact, stock)
    undo(changes)
    assert torch.equal(module(x, **arguments), stock)
    return ours


@pytest.mark.parametrize("named", [True, False], ids=["ops", "as on a CPU"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 4},
        {"bias": False, "out_bias": False},
        {"residual_connection": False},
        {"rescale_output_factor": 1.7},
        {"residual_connection": False, "rescale_output_factor": 0.5},
        {"channels": 512},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_as_near_to_float64_as_stock(options, dtype, named, monkeypatch):
    if named:
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", EVERY)
    x = picture(channels=options.get("channels", 64)).to(dtype)
    check(block(**options).to(dtype), x)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (8, 8)], ids=str)
def test_sizes_and_layouts(size):
    x = picture(size=size)
    ours = check(block(), x)
    assert ours.permute(0, 2, 3, 1).is_contiguous()
    check(block(), x.contiguous())
    check(block(), picture(batch=1, size=size))


def test_arguments_that_it_leaves_to_stock():
    module, x = block(), picture()
    tokens, text = torch.randn(2, 35, 64), torch.randn(2, 5, 64)
    mask = torch.zeros(2, 1, 35).index_fill_(2, torch.tensor([3, 4]), -1e4)
    calls = [
        ((tokens,), {}),
        ((x, text), {}),
        ((x,), {"attention_mask": mask}),
        ((x,), {"temb": text}),
        ((x,), {"scale": 2.0}),
    ]
    stock = [module(*positional, **named) for positional, named in calls]
    apply(module, [RULE])
    for (positional, named), expected in zip(calls, stock, strict=True):
        torch.testing.assert_close(module(*positional, **named), expected)
    with pytest.raises(RuntimeError, match="0 elements"):
        module(x[:0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qk_norm": "layer_norm"}, "more norms"),
        ({"spatial_norm_dim": 4}, "more norms"),
        ({"processor": AttnProcessor()}, "computed by AttnProcessor"),
        ({"heads": 4, "kv_heads": 2}, "another width"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_skipped_with_the_reason(options, reason):
    module = block(**options)
    (change,) = apply(module, [RULE])
    assert reason in change.why_skipped
    assert "forward" not in module.__dict__


def test_attention_of_transformer_blocks_is_not_its_business():
    assert apply(tiny_unet(), [RULE]) == []
    assert apply(block(norm_num_groups=None), [RULE]) == []


def test_processors_set_later_are_used():
    module, x = block(), picture()
    apply(module, [RULE])
    ours = module(x)

    class Doubling:
        def __call__(self, _attention, hidden_states, **_arguments):
            return 2 * hidden_states

    before = module.processor
    module.set_processor(Doubling())
    assert torch.equal(module(x), 2 * x)
    module.set_processor(before)
    assert torch.equal(module(x), ours)
    module.set_attention_slice(1)
    torch.testing.assert_close(module(x), ours)


class LoRA(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 5 * self.up(self.down(x))


@pytest.mark.parametrize("name", ["to_q", "to_k", "to_v", "to_out"])
def test_a_lora_loaded_after_apply_and_fused(name):
    module, x = block(), picture()
    apply(module, [RULE])
    before = module(x)
    holder, key = (module.to_out, "0") if name == "to_out" else (module, name)
    plain = getattr(holder, key)
    setattr(holder, key, LoRA(plain).requires_grad_(False))
    adapted = module(x)
    torch.testing.assert_close(adapted, Attention.forward(module, x))
    assert (adapted - before).abs().max() > 1e-3
    lora = getattr(holder, key)
    setattr(holder, key, plain)
    plain.weight.data += 5 * lora.up.weight @ lora.down.weight
    torch.testing.assert_close(module(x), adapted)


def test_offload_of_every_layer():
    module, x = block(), picture()
    stock = module(x)
    apply(module, [RULE])
    cpu_offload(module, execution_device="cpu")
    assert module.to_q.weight.is_meta
    torch.testing.assert_close(module(x), stock)


def test_dropout_in_training_mode():
    module, x = block(dropout=0.5).train(), picture()
    torch.manual_seed(3)
    stock = module(x)
    apply(module, [RULE])
    torch.manual_seed(3)
    torch.testing.assert_close(module(x), stock)
    assert not torch.allclose(module(x), stock)


def test_gradients_and_autocast_are_stocks():
    module, x = block().requires_grad_(True), picture().requires_grad_()
    wanted = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(x)
    apply(module, [RULE])
    found = torch.autograd.grad(module(x).square().sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), mixed)


def test_compiles_as_one_graph():
    module, x = block(), picture()
    changes = apply(module, [RULE])
    eager = module(x)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), eager)
    undo(changes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_vae_by_every_rule(dtype, monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", EVERY)
    torch.manual_seed(0)
    vae = tiny_vae().eval().requires_grad_(False).to(dtype)
    exact = copy.deepcopy(vae).double()
    image, latents = torch.randn(2, 3, 10, 14, dtype=dtype), torch.randn(2, 4, 5, 7, dtype=dtype)

    def run():
        return vae.encode(image).latent_dist.mean, vae.decode(latents).sample

    stock = run()
    changes = apply(vae, [RULE, RESBLOCK, UPSAMPLE, DOWNSAMPLE])
    assert sum(c.kind == "Attention" for c in changes) == 2
    assert all(c.replaced for c in changes)
    ours = run()
    numerics.require("encode", ours[0], exact.encode(image.double()).latent_dist.mean, stock[0])
    numerics.require("decode", ours[1], exact.decode(latents.double()).sample, stock[1])
    undo(changes)
    assert all(torch.equal(a, b) for a, b in zip(run(), stock, strict=True))
    assert not any("forward" in module.__dict__ for module in vae.modules())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_unet_by_every_rule(dtype, monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", EVERY)
    torch.manual_seed(0)
    unet = tiny_unet().eval().requires_grad_(False).to(dtype)
    exact = copy.deepcopy(unet).double()
    x, text = torch.randn(2, 4, 9, 14, dtype=dtype), torch.randn(2, 5, 32, dtype=dtype)
    stock = unet(x, 7, text).sample
    changes = apply(unet, [RULE, RESBLOCK, UPSAMPLE, DOWNSAMPLE])
    assert all(c.replaced for c in changes)
    numerics.require("unet", unet(x, 7, text).sample, exact(x.double(), 7, text.double()).sample, stock)
    undo(changes)
    assert torch.equal(unet(x, 7, text).sample, stock)


KEPT = "its convolutions keep their layout (slower on Radeon)"


@pytest.fixture
def _unfused(monkeypatch):
    """A CPU in place of a card for which torch has no fused attention, with few scores allowed."""
    monkeypatch.setattr(op, "_MAY_BE_UNFUSED", frozenset({"cpu"}))
    monkeypatch.setattr(op, "_SCORES", 2**10)
    monkeypatch.setattr(op, "_is_fused", lambda *_sizes, **_named: False)
    registry.forget_choices()
    yield
    registry.forget_choices()


def test_in_another_layout_the_second_rule_is_left():
    rules = [rule for rule in RULES if rule.is_for(block())]
    assert [rule.name for rule in rules] == ["vae_attention", "vae_attention_bounded"]
    assert [rule.on_cpu for rule in rules] == [True, False]
    kept = apply(block(), rules, not_channels_last=KEPT)
    assert [(change.rule, change.why_skipped) for change in kept] == [
        ("vae_attention", KEPT),
        ("vae_attention_bounded", None),
    ]
    assert [change.rule for change in apply(block(), rules)] == ["vae_attention"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 4}, {"bias": False, "out_bias": False}, {"residual_connection": False},
     {"rescale_output_factor": 1.7}],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)  # fmt: skip
@pytest.mark.usefixtures("_unfused")
def test_bounded_attention_is_as_near_to_float64_as_stock(options, dtype):
    module = block(**options).to(dtype)
    for x in (picture(size=(9, 7)), picture(size=(9, 7)).contiguous()):
        x = x.to(dtype)  # noqa: PLW2901
        stock, exact = module(x), copy.deepcopy(module).double()(x.double())
        changes = apply(module, [BOUNDED])
        ours = module(x)
        assert (ours.dtype, ours.shape) == (stock.dtype, stock.shape)
        numerics.require("vae_attention_bounded", ours, exact, stock)
        undo(changes)
        assert torch.equal(module(x), stock)


def test_where_torch_fuses_or_scores_are_few_the_forward_is_stocks(monkeypatch):
    module, x = block(), picture()
    stock = module(x)
    apply(module, [BOUNDED])
    monkeypatch.setattr(vae_attention, "attention", lambda *_: pytest.fail("the op was called"))
    assert torch.equal(module(x), stock)
    monkeypatch.setattr(op, "_MAY_BE_UNFUSED", frozenset({"cpu"}))
    monkeypatch.setattr(op, "_is_fused", lambda *_sizes, **_named: False)
    assert torch.equal(module(x), stock)


@pytest.mark.usefixtures("_unfused")
def test_bounded_attention_leaves_to_stock_what_the_other_rule_does():
    module, x = block(), picture()
    tokens, text = torch.randn(2, 35, 64), torch.randn(2, 5, 64)
    calls = [((tokens,), {}), ((x, text), {}), ((x,), {"scale": 2.0})]
    stock = [module(*positional, **named) for positional, named in calls]
    apply(module, [BOUNDED])
    for (positional, named), expected in zip(calls, stock, strict=True):
        assert torch.equal(module(*positional, **named), expected)


@pytest.mark.usefixtures("_unfused")
def test_the_scores_of_a_vae_in_another_layout_are_bounded_and_so_is_what_is_predicted():
    vae, z = tiny_vae().eval(), torch.randn(1, 4, 32, 32)
    tokens = z.shape[2] * z.shape[3]
    whole = predicted_peak(vae, tuple(z.shape), torch.float32, device=z.device)
    apply(vae, [BOUNDED])
    bounded = predicted_peak(vae, tuple(z.shape), torch.float32, device=z.device)
    assert bounded < whole
    module, x = block(32), torch.randn(1, 32, 32, 32)
    apply(module, [BOUNDED])
    with torch.no_grad():
        peak = live_peak(lambda: module(x), x)
    # All scores in float32, before the softmax and after it, would be 8 bytes each.
    assert peak < 4 * tokens**2
