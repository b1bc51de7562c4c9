from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxIPAdapterAttnProcessor
from torch import nn

from joint_models import HEADS, RULES, TOKENS, WORDS, C, block_given, given, model, near, replaced
from rocm_sd import numerics
from rocm_sd.rewrite import apply, flux_transformer
from transformer_blocks import DTYPES, draw, stock_calls

NAME = "Flux dev"


def single() -> nn.Module:
    return model(NAME).single_transformer_blocks[0]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(24,), (5, 24), (1, 1, 7)], ids=str)
def test_rotation_is_stocks_for_tables_of_any_values(lengths, dtype):
    """Flux's own tables hold every value twice; the rotation does not rely on it."""
    total, H, D = sum(lengths), 3, 16
    cos, sin = draw(total, D, seed=2), draw(total, D, seed=3)
    # Views into a packed projection, as attention has them.
    parts = [draw(2, s, 3, H, D, seed=s, dtype=dtype)[:, :, 1] for s in lengths]
    together = torch.cat(parts, dim=1)
    stock = apply_rotary_emb(together, (cos, sin), sequence_dim=1)
    a, b = together.double().unflatten(-1, (-1, 2)).unbind(-1)
    exact = together.double() * cos[:, None] + torch.stack([-b, a], dim=-1).flatten(3) * sin[:, None]
    signed = torch.stack([-sin[:, 0::2], sin[:, 1::2]], dim=-1).flatten(1)
    ours = flux_transformer._rotated(parts, cos, signed)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    numerics.require("rotation", ours, exact, stock)


@torch.no_grad()
@pytest.mark.parametrize("path", ["transformer_blocks.0", "single_transformer_blocks.0"])
@pytest.mark.parametrize("change", ["none", "double", "list"])
def test_unusual_rotary_tables(path, change, monkeypatch):
    block, arguments = model(NAME).get_submodule(path), block_given(NAME)
    cos, sin = arguments["image_rotary_emb"]
    tables = {"none": None, "double": (cos.double(), sin.double()), "list": [cos, sin]}[change]
    arguments["image_rotary_emb"] = tables
    expected = block(**arguments)
    replaced(block)
    calls = stock_calls(monkeypatch, FluxAttention)
    near(block(**arguments), expected)
    assert bool(calls) is (change == "double")


@torch.no_grad()
def test_tables_of_another_length_are_refused_as_stock_refuses_them():
    block, arguments = single(), block_given(NAME)
    arguments["image_rotary_emb"] = tuple(t[1:] for t in arguments["image_rotary_emb"])
    replaced(block)
    with pytest.raises(RuntimeError, match="must match the size"):
        block(**arguments)


@torch.no_grad()
@pytest.mark.parametrize("path", ["transformer_blocks.0", "single_transformer_blocks.0"])
def test_a_mask_is_given_to_stock(path):
    block, arguments = model(NAME).get_submodule(path), block_given(NAME)
    plain = block(**arguments)
    arguments["joint_attention_kwargs"] = {"attention_mask": draw(2, WORDS + TOKENS, seed=5) > 0}
    expected = block(**arguments)
    assert not torch.allclose(expected[1], plain[1], atol=1e-3)
    replaced(block)
    assert all(torch.equal(a, b) for a, b in zip(block(**arguments), expected, strict=True))
    near(block(**arguments | {"joint_attention_kwargs": {}}), plain)


@pytest.fixture
def backends(monkeypatch):
    """Selecting a backend is global in Diffusers: put back afterwards."""
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)


@torch.no_grad()
def test_a_backend_that_the_user_selects_is_used(backends, monkeypatch):
    module, arguments = model(NAME), given(NAME)
    expected = module(**arguments)[0]
    replaced(module)
    calls = stock_calls(monkeypatch, FluxAttention)
    with attention_backend("_native_math"):
        near(module(**arguments)[0], expected)
    assert len(calls) == 6
    calls.clear()
    near(module(**arguments)[0], expected)
    assert not calls
    before = _AttentionBackendRegistry._active_backend
    module.set_attention_backend("_native_math")
    _AttentionBackendRegistry.set_active_backend(before)
    near(module(**arguments)[0], expected)
    assert len(calls) == 6
    calls.clear()
    module.reset_attention_backend()
    near(module(**arguments)[0], expected)
    assert not calls


@torch.no_grad()
def test_a_parallel_split_is_the_processors_business(monkeypatch):
    block, arguments = single(), block_given(NAME)
    replaced(block)
    seen = []
    monkeypatch.setattr(
        "diffusers.models.transformers.transformer_flux.dispatch_attention_fn",
        lambda query, _key, _value, parallel_config=None, **_more: seen.append(parallel_config) or query,
    )
    block.attn.processor._parallel_config = split = object()
    block(**arguments)
    assert seen == [split]


@torch.no_grad()
def test_an_ip_adapter_adds_its_third_tensor():
    block, arguments = model(NAME).transformer_blocks[0], block_given(NAME)
    torch.manual_seed(3)
    adapter = FluxIPAdapterAttnProcessor(C, C, num_tokens=(4,), scale=0.7)

    class Fed(nn.Module):
        """With its pictures at hand, so that the block is called as without an adapter."""

        def __init__(self) -> None:
            super().__init__()
            self.adapter = adapter

        def forward(self, *args, **more):
            return self.adapter(*args, ip_hidden_states=[draw(2, 4, C, seed=6)], **more)

    plain = block(**arguments)[1]
    block.attn.set_processor(Fed())
    expected = block(**arguments)
    assert not torch.allclose(expected[1], plain, atol=1e-3)
    replaced(block)
    near(block(**arguments), expected)


@torch.no_grad()
def test_tokens_of_the_block_before_are_read_where_they_lie():
    whole = draw(2, WORDS + TOKENS, C)
    text, x = whole[:, :WORDS], whole[:, WORDS:]
    joined = flux_transformer._one_after_the_other(text, x)
    assert joined.data_ptr() == whole.data_ptr()
    assert torch.equal(joined, whole)


def _elsewhere(whole):
    return whole[:, :WORDS].clone(), whole[:, WORDS:]


def _other_memory(whole):
    return whole[:, :WORDS], whole.clone()[:, WORDS:]


def _reversed(whole):
    return whole[:, TOKENS:], whole[:, :TOKENS]


def _gap(whole):
    return whole[:, :WORDS], whole[:, WORDS + 1 :]


def _other_samples(whole):
    return whole[:1, :WORDS].expand(2, -1, -1), whole[:, WORDS:]


def _touching(_whole):
    """Two storages side by side in one piece of memory."""
    memory = bytearray(4 * 2 * (WORDS + TOKENS) * C)
    numbers = torch.frombuffer(memory, dtype=torch.float32)
    numbers.copy_(draw(numbers.numel(), seed=9))
    text = torch.frombuffer(memory, dtype=torch.float32, count=WORDS * C)
    x = torch.frombuffer(memory, dtype=torch.float32, count=TOKENS * C, offset=4 * WORDS * C)
    return text.view(1, WORDS, C), x.view(1, TOKENS, C)


@torch.no_grad()
@pytest.mark.parametrize(
    "cut", [_elsewhere, _other_memory, _reversed, _gap, _other_samples, _touching], ids=lambda f: f.__name__[1:]
)
def test_tokens_that_lie_otherwise_are_copied_together(cut):
    text, x = cut(draw(2, WORDS + TOKENS, C))
    joined = flux_transformer._one_after_the_other(text, x)
    assert joined.data_ptr() not in (text.data_ptr(), x.data_ptr())
    assert torch.equal(joined, torch.cat([text, x], dim=1))


@torch.no_grad()
def test_a_block_does_not_write_into_what_it_was_given():
    whole = draw(2, WORDS + TOKENS, C)
    before = whole.clone()
    block, arguments = single(), block_given(NAME)
    arguments |= {"encoder_hidden_states": whole[:, :WORDS], "hidden_states": whole[:, WORDS:]}
    expected = block(**arguments)
    replaced(block)
    near(block(**arguments), expected)
    assert torch.equal(whole, before)


@torch.no_grad()
@pytest.mark.parametrize("path", ["transformer_blocks.0", "single_transformer_blocks.0"])
def test_float16_is_clipped_at_its_largest_value(path):
    block = model(NAME).get_submodule(path).half()
    arguments = block_given(NAME, torch.float16)
    arguments["encoder_hidden_states"][0, 0, 0] = 65504
    last, norm = (block.proj_out, block.norm) if "single" in path else (block.ff_context.net[2], block.norm1_context)
    last.bias.fill_(60000)
    # Gates of 1.
    norm.linear.weight.zero_()
    norm.linear.bias.fill_(1)
    expected = block(**arguments)[0]
    assert expected.abs().max() == 65504
    replaced(block)
    ours = block(**arguments)[0]
    assert ours.isfinite().all()
    assert ours.abs().max() == 65504


@torch.no_grad()
@pytest.mark.parametrize("act", [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()], ids=str)
def test_the_feed_forward_of_one_stream_has_the_blocks_own_activation(act):
    block, arguments = single(), block_given(NAME)
    block.act_mlp = act
    expected = block(**arguments)
    replaced(block)
    near(block(**arguments), expected)


@torch.no_grad()
def test_gelu_is_written_to_its_place_bit_for_bit():
    mixed, wide = draw(2, 7, C), draw(2, 7, 5 * C, seed=2)[..., C:]
    act = nn.GELU(approximate="tanh")
    assert torch.equal(flux_transformer._beside_gelu(mixed, act, wide), torch.cat([mixed, act(wide)], dim=2))


def test_a_block_of_another_kind_is_skipped_with_the_reason():
    block = model(NAME).transformer_blocks[0]
    block.ff_context = nn.Identity()
    (change,) = apply(block, RULES)
    assert change.why_skipped == "its feed-forward is Identity, not one with GELU"
    block = single()
    block.attn = nn.MultiheadAttention(C, HEADS)
    (change,) = apply(block, RULES)
    assert change.why_skipped == "its attention is a MultiheadAttention"
