from __future__ import annotations

import copy

import peft
import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    SlicedAttnProcessor,
)
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from rocm_sd import numerics
from rocm_sd.rewrite import apply, undo
from transformer_blocks import DTYPES, HEADS, RULES, TEXT, C, block, draw, replaced, spatial, stock_calls, text, tokens


def named(options) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items()) or "plain"


BLOCKS = [
    {},
    {"attention_bias": True},
    {"cross_attention_dim": None},
    {"double_self_attention": True, "cross_attention_dim": None},
    {"only_cross_attention": True},
    {"norm_elementwise_affine": False},
    {"norm_eps": 1e-2},
    {"ff_bias": False, "attention_out_bias": False},
    {"dropout": 0.3, "final_dropout": True},
    {"upcast_attention": True},
    {"attention_type": "gated"},
]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", BLOCKS, ids=named)
def test_a_block_is_as_accurate_as_stock(options, dtype, monkeypatch):
    module = block(**options).to(dtype)
    x = tokens(dtype)
    given = {} if module.cross_attention_dim is None else {"encoder_hidden_states": text(dtype)}
    exact = copy.deepcopy(module).double()(x.double(), **{k: v.double() for k, v in given.items()})
    stock = module(x, **given)
    replaced(module)
    calls = stock_calls(monkeypatch, type(module.attn1))
    numerics.require("the block", module(x, **given), exact, stock)
    assert not calls


SPATIAL = [
    {},
    {"use_linear_projection": True},
    {"use_linear_projection": True, "num_layers": 2, "cross_attention_dim": None},
    {"attention_head_dim": 24},
]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("options", SPATIAL, ids=named)
def test_a_spatial_transformer_is_as_accurate_as_stock(options, layout, dtype):
    module = spatial(**options).to(dtype)
    x = draw(2, C, 5, 3, dtype=dtype).contiguous(memory_format=layout)
    given = {"return_dict": False}
    known = text(dtype) if module.config.cross_attention_dim else None
    exact = copy.deepcopy(module).double()(x.double(), None if known is None else known.double(), **given)[0]
    stock = module(x, known, **given)[0]
    replaced(module)
    module = module.to(memory_format=layout)
    ours = module(x, known, **given)
    assert isinstance(ours, tuple)
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    numerics.require("the spatial transformer", ours[0], exact, stock)
    numerics.require("its output class", module(x, known).sample, exact, stock)


@torch.no_grad()
def test_a_channels_last_map_is_not_copied(monkeypatch):
    """Its tokens lie in its own memory, going in as the residual and coming out as the result."""
    from rocm_sd.rewrite import tokens

    module = spatial(use_linear_projection=True)
    replaced(module)
    seen = []
    linear = tokens.linear_residual
    monkeypatch.setattr(tokens, "linear_residual", lambda *a: seen.append((a, linear(*a))) or seen[-1][1])
    x = draw(2, C, 5, 3).contiguous(memory_format=torch.channels_last)
    (out,) = module(x, text(), return_dict=False)
    (_, *inner, (last, result)) = seen
    assert len(inner) == 3, "QKV, the query of the text's attention, its keys and values"
    assert last[3].data_ptr() == x.data_ptr()
    assert out.data_ptr() == result.data_ptr()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm_type": "ada_norm", "num_embeds_ada_norm": 4}, "ada_norm"),
        ({"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 4}, "ada_norm_zero"),
        ({"norm_type": "layer_norm_i2vgen"}, "layer_norm_i2vgen"),
        ({"positional_embeddings": "sinusoidal", "num_positional_embeddings": 64}, "positional"),
        ({"activation_fn": "gelu"}, "not GEGLU"),
        ({"activation_fn": "geglu-approximate"}, "not GEGLU"),
    ],
    ids=lambda o: named(o) if isinstance(o, dict) else "",
)
def test_a_block_of_another_kind_is_skipped_with_the_reason(options, reason):
    torch.manual_seed(0)
    module = BasicTransformerBlock(C, HEADS, C // HEADS, cross_attention_dim=TEXT, **options)
    (change,) = apply(module, RULES)
    assert reason in change.why_skipped
    assert "forward" not in module.__dict__


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("group_norm", nn.GroupNorm(2, C), "attn2 has group_norm"),
        ("spatial_norm", nn.Identity(), "attn2 has spatial_norm"),
        ("norm_q", nn.LayerNorm(C // HEADS), "attn2 has norm_q"),
        ("norm_k", nn.LayerNorm(C // HEADS), "attn2 has norm_k"),
        ("norm_cross", nn.LayerNorm(TEXT), "attn2 has norm_cross"),
        ("residual_connection", True, "attn2 adds a residual"),
        ("rescale_output_factor", 2.0, "attn2 adds a residual or rescales"),
        ("inner_kv_dim", C // 2, "fewer key heads"),
        ("added_kv_proj_dim", 8, "attn2 has added_kv_proj_dim"),
        ("to_out", None, "another output projection"),
    ],
)
def test_an_attention_of_another_kind_is_skipped_with_the_reason(attribute, value, reason):
    module = block()
    setattr(module.attn2, attribute, value)
    (change,) = apply(module, RULES)
    assert reason in change.why_skipped


def test_a_spatial_transformer_of_patches_is_skipped():
    module = Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        sample_size=8,
        patch_size=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=4,
    )
    changes = apply(module, RULES)
    assert len(changes) == 2
    assert not any(c.replaced for c in changes)
    assert "not a map" in changes[0].why_skipped


class Doubling:
    """A processor of a user's own."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **_kwargs):
        return 2 * AttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask)


def _adapter():
    torch.manual_seed(3)
    return IPAdapterAttnProcessor2_0(C, TEXT, num_tokens=(4,))


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "make", [Doubling, lambda: SlicedAttnProcessor(1), _adapter], ids=["custom", "sliced", "ip-adapter"]
)
def test_another_processor_is_asked_itself(make, when):
    module, reference = block(), block()
    reference.attn2.set_processor(make())
    known = text() if make is not _adapter else (text(), [draw(2, 1, 4, TEXT, seed=4)])
    expected = reference(tokens(), encoder_hidden_states=known)
    if when == "before":
        module.attn2.set_processor(make())
    changes = apply(module, RULES)
    plain = None
    if when == "after":
        plain = module(tokens(), encoder_hidden_states=text())
        module.attn2.set_processor(make())
    torch.testing.assert_close(module(tokens(), encoder_hidden_states=known), expected)
    if plain is not None:
        module.attn2.set_processor(AttnProcessor2_0())
        assert torch.equal(module(tokens(), encoder_hidden_states=text()), plain)
    undo(changes)


@torch.no_grad()
@pytest.mark.parametrize("flags", [{}, {"scale": 0.5}, {"upcast_attention": True}, {"upcast_softmax": True}], ids=named)
def test_the_processor_without_sdpa_reads_scale_and_flags(flags, monkeypatch):
    module = block()
    for attn in (module.attn1, module.attn2):
        attn.set_processor(AttnProcessor())
        for name, value in flags.items():
            setattr(attn, name, value)
    expected = module(tokens(), encoder_hidden_states=text())
    replaced(module)
    calls = stock_calls(monkeypatch, type(module.attn1))
    torch.testing.assert_close(module(tokens(), encoder_hidden_states=text()), expected)
    assert len(calls) == (2 if any("upcast" in name for name in flags) else 0)


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": -1e4 * (draw(2, 1, 15, seed=5) > 0)},
        {"encoder_attention_mask": -1e4 * (draw(2, 1, 7, seed=5) > 0)},
        {"cross_attention_kwargs": {"scale": 0.5}},
        {"cross_attention_kwargs": {}},
        {"cross_attention_kwargs": {"gligen": {"objs": draw(2, 3, TEXT, seed=6)}}},
    ],
    ids=["mask", "text mask", "kwargs", "no kwargs", "gligen"],
)
def test_what_only_stock_knows_is_given_to_stock(given):
    module = block(attention_type="gated")
    module.fuser.alpha_attn.fill_(0.7)
    expected = module(tokens(), encoder_hidden_states=text(), **given)
    without = module(tokens(), encoder_hidden_states=text())
    replaced(module)
    ours = module(tokens(), encoder_hidden_states=text(), **given)
    torch.testing.assert_close(ours, expected)
    changes_it = "mask" in next(iter(given)) or "gligen" in next(iter(given.values()))
    assert torch.allclose(expected, without, atol=1e-3) is not changes_it


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": (draw(2, 15, seed=5) > 0).float()},
        {"encoder_attention_mask": (draw(2, 7, seed=5) > 0).float()},
        {"cross_attention_kwargs": {"scale": 0.5}},
    ],
    ids=["mask", "text mask", "kwargs"],
)
def test_masks_and_options_reach_the_blocks_of_a_spatial_transformer(given):
    module, x = spatial(), draw(2, C, 5, 3)
    expected = module(x, text(), **given, return_dict=False)[0]
    replaced(module)
    torch.testing.assert_close(module(x, text(), **given, return_dict=False)[0], expected)


@torch.no_grad()
def test_chunked_feed_forward_and_autocast_fall_back_to_stock():
    for prepare, context in (
        (lambda m: m.set_chunk_feed_forward(5, dim=1), torch.autocast("cpu", enabled=False)),
        (lambda _m: None, torch.autocast("cpu", dtype=torch.bfloat16)),
    ):
        module, map_ = spatial(), draw(2, C, 5, 3)
        prepare(module.transformer_blocks[0])
        with context:
            expected = module(map_, text(), return_dict=False)[0]
            replaced(module)
            ours = module(map_, text(), return_dict=False)[0]
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected)


class Merging(BasicTransformerBlock):
    def forward(self, hidden_states, *args, **kwargs):
        return 3 * super().forward(hidden_states, *args, **kwargs)


@torch.no_grad()
def test_a_block_that_is_given_another_class_does_as_that_class_says():
    """As tomesd switches token merging on and off."""
    module = block()
    stock = module(tokens(), encoder_hidden_states=text())
    replaced(module)
    module.__class__ = Merging
    torch.testing.assert_close(module(tokens(), encoder_hidden_states=text()), 3 * stock)
    module.__class__ = BasicTransformerBlock
    torch.testing.assert_close(module(tokens(), encoder_hidden_states=text()), stock)


def test_dropout_in_training_is_stocks_own():
    module = block(dropout=0.5, final_dropout=True).train()
    torch.manual_seed(7)
    expected = module(tokens(), encoder_hidden_states=text())
    replaced(module)
    torch.manual_seed(7)
    torch.testing.assert_close(module(tokens(), encoder_hidden_states=text()), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "path", ["attn1", "attn2", "ff", "ff.net.0", "ff.net.1", "norm2", "attn2.to_k", "attn1.to_out.1"]
)
def test_hooks_inside_a_block_are_called_and_obeyed(path):
    module = block()

    def hook(_module, _args, output):
        return output * 1.5

    replaced(module)
    handle = module.get_submodule(path).register_forward_hook(hook)
    reference = block()
    reference.get_submodule(path).register_forward_hook(hook)
    expected = reference(tokens(), encoder_hidden_states=text())
    torch.testing.assert_close(module(tokens(), encoder_hidden_states=text()), expected)
    handle.remove()
    torch.testing.assert_close(
        module(tokens(), encoder_hidden_states=text()), block()(tokens(), encoder_hidden_states=text())
    )


class Lora(nn.Module):
    """As PEFT does it: stands in the layer's place, keeps it as `base_layer`, and adds a product of low rank."""

    def __init__(self, base_layer: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        N, K = base_layer.weight.shape[:2]
        generator = torch.Generator().manual_seed(8)
        self.down = nn.Parameter(torch.randn(rank, K, generator=generator) / 4)
        self.up = nn.Parameter(torch.randn(N, rank, generator=generator) / 4)

    def delta(self) -> torch.Tensor:
        return (self.up @ self.down).view_as(self.base_layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.base_layer, nn.Conv2d):
            return self.base_layer(x) + nn.functional.conv2d(x, self.delta())
        return self.base_layer(x) + x @ self.down.T @ self.up.T


TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj", "net.2", "proj_in", "proj_out")


def wrap(module: nn.Module, targets=TARGETS) -> None:
    for path, layer in list(module.named_modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and path.endswith(targets):
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, Lora(layer))


def unwrap(module: nn.Module, *, fuse: bool = False) -> None:
    for path, layer in list(module.named_modules()):
        if isinstance(layer, Lora):
            if fuse:
                layer.base_layer.weight.data += layer.delta()
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, layer.base_layer)


@torch.no_grad()
@pytest.mark.parametrize("targets", [TARGETS, ("to_k",), ("to_q", "to_v"), ("proj", "proj_out")], ids=str)
@pytest.mark.parametrize("options", SPATIAL[:2], ids=named)
def test_lora_after_and_before_the_rules(options, targets):
    """Loaded, unloaded, fused and fused off again: at every step what stock computes."""
    x, given = draw(2, C, 5, 3), {"return_dict": False}
    stock, ours = spatial(**options), spatial(**options)
    changes = replaced(ours)

    def same() -> torch.Tensor:
        expected = stock(x, text(), **given)[0]
        torch.testing.assert_close(ours(x, text(), **given)[0], expected, rtol=1e-4, atol=1e-4)
        return expected

    plain = same()
    for step in (
        lambda m: wrap(m, targets),
        unwrap,
        lambda m: wrap(m, targets),
        lambda m: unwrap(m, fuse=True),
    ):
        step(stock)
        step(ours)
        last = same()
    assert not torch.allclose(last, plain, atol=1e-2)
    wrap(ours, targets)
    wrap(stock, targets)
    undo(changes)
    assert torch.equal(ours(x, text(), **given)[0], stock(x, text(), **given)[0])
    replaced(ours)
    same()


@torch.no_grad()
def test_peft_itself():
    x, given = draw(2, C, 5, 3), {"return_dict": False}
    stock, ours = spatial(), spatial()
    replaced(ours)
    ours(x, text(), **given)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    for module in (stock, ours):
        torch.manual_seed(9)
        peft.inject_adapter_in_model(config, module)
    for step in ("wrapped", "merged"):
        if step == "merged":
            for module in (*stock.modules(), *ours.modules()):
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.merge()
        torch.testing.assert_close(ours(x, text(), **given)[0], stock(x, text(), **given)[0])


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_reach_every_weight_and_input(frozen):
    """In float64, so that no rounding stands between the two."""
    module = spatial(use_linear_projection=True).double().train().requires_grad_(not frozen)
    if frozen:
        wrap(module, ("to_k",))
        module.double()
    wanted = [draw(2, C, 5, 3).double().requires_grad_(), text().double().requires_grad_()]
    wanted += [p for p in module.parameters() if p.requires_grad]
    expected = torch.autograd.grad(module(*wanted[:2], return_dict=False)[0].square().sum(), wanted)
    replaced(module)
    for _ in range(2):
        found = torch.autograd.grad(module(*wanted[:2], return_dict=False)[0].square().sum(), wanted)
        torch.testing.assert_close(found, expected)
        # Between the two, weights are laid together: learning must not notice.
        with torch.no_grad():
            module(*wanted[:2], return_dict=False)


def test_gradient_checkpointing():
    module = spatial().double().train()
    module.enable_gradient_checkpointing()
    wanted = [draw(2, C, 5, 3).double().requires_grad_(), *module.parameters()]
    expected = torch.autograd.grad(module(wanted[0], text().double(), return_dict=False)[0].sum(), wanted)
    replaced(module)
    found = torch.autograd.grad(module(wanted[0], text().double(), return_dict=False)[0].sum(), wanted)
    torch.testing.assert_close(found, expected)
