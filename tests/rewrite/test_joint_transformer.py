from __future__ import annotations

import copy

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention import FeedForward, JointTransformerBlock
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0, PAGJointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import nn

from joint_models import (
    MODELS,
    ONE_OF_EACH,
    RULES,
    WORDS,
    block_given,
    each_model,
    given,
    is_flux,
    model,
    near,
    replaced,
)
from rocm_sd import numerics
from rocm_sd.rewrite import apply, undo
from transformer_blocks import DTYPES, draw, stock_calls

BLOCKS = (JointTransformerBlock, FluxTransformerBlock, FluxSingleTransformerBlock)
ATTENTIONS = (Attention, FluxAttention)


def double(arguments: dict) -> dict:
    floats = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) and "ids" not in k}
    return arguments | {k: v.double() for k, v in floats.items()}


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_accurate_as_stock_and_comes_back_bit_for_bit(name, batch, dtype, monkeypatch):
    module = model(name).to(dtype)
    arguments = given(name, dtype, batch)
    exact = copy.deepcopy(module).double()(**double(arguments))[0]
    stock = module(**arguments)[0]
    state, parameters = copy.deepcopy(module.state_dict()), dict(module.named_parameters())
    changes = replaced(module)
    assert len(changes) == (6 if is_flux(name) else 3)
    with monkeypatch.context() as patch:
        calls = [stock_calls(patch, cls) for cls in (*BLOCKS, *ATTENTIONS, FeedForward)]
        ours = module(**arguments)[0]
        assert not any(calls)
    numerics.require(name, ours, exact, stock)
    for _ in range(2):
        found = module.state_dict()
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert all(parameters[key] is p for key, p in module.named_parameters())
        undo(changes)
        assert torch.equal(module(**arguments)[0], stock)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_many_random_weights_never_go_beyond_what_stock_errs(name):
    """One seed may be luck: over twenty, in half precision, ours is no further from float64 than 1.2 times stock."""
    ours, theirs = 0.0, 0.0
    for seed in range(20):
        module = model(name)
        torch.manual_seed(seed)
        for parameter in module.parameters():
            parameter.normal_(std=parameter.std().item() if parameter.numel() > 1 else 1.0)
        module = module.half()
        arguments = given(name, torch.float16, 1 + seed % 2)
        exact = copy.deepcopy(module).double()(**double(arguments))[0]
        theirs += (module(**arguments)[0] - exact).square().mean().item()
        replaced(module)
        ours += (module(**arguments)[0] - exact).square().mean().item()
    assert ours <= 1.2**2 * theirs


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("SD3.5", "transformer_blocks.0"),
        ("SD3.5", "transformer_blocks.2"),
        ("Flux dev", "transformer_blocks.0"),
        ("Flux dev", "single_transformer_blocks.1"),
    ],
)
def test_one_conditioning_for_a_whole_batch(name, path):
    block = model(name).get_submodule(path)
    arguments = block_given(name)
    arguments["temb"] = arguments["temb"][:1]
    expected = block(**arguments)
    replaced(block)
    for a, b in zip(block(**arguments), expected, strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            near(a, b)


@torch.no_grad()
@each_model
@pytest.mark.parametrize("kind", ["no text", "float64", "a subclass of Tensor"])
def test_what_the_pieces_do_not_take_is_stocks(name, kind):
    block, arguments = model(name).transformer_blocks[0], block_given(name)
    if kind == "no text":
        arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"][:, :0]
        if is_flux(name):
            arguments["image_rotary_emb"] = tuple(t[WORDS:] for t in arguments["image_rotary_emb"])
    elif kind == "float64":
        block.double()
        arguments = double(arguments)
    else:
        arguments["hidden_states"] = nn.Parameter(arguments["hidden_states"], requires_grad=False)
    expected = block(**arguments)
    replaced(block)
    assert all(torch.equal(a, b) for a, b in zip(block(**arguments), expected, strict=True))


class Shouting:
    """A processor of a user's own, as JointAttnProcessor2_0 and FluxAttnProcessor are called."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __call__(self, *args, **given):
        found = self.inner(*args, **given)
        return tuple(2 * one for one in found) if isinstance(found, tuple) else 2 * found


class Whispering(JointAttnProcessor2_0):
    def __call__(self, *args, **given):
        found = super().__call__(*args, **given)
        return tuple(one / 2 for one in found) if isinstance(found, tuple) else found / 2


@torch.no_grad()
@each_model
@pytest.mark.parametrize("when", ["before", "after"])
def test_another_processor_is_asked_itself(name, when):
    make = lambda: Shouting(FluxAttnProcessor() if is_flux(name) else JointAttnProcessor2_0())  # noqa: E731
    module, reference, arguments = model(name), model(name), given(name)
    plain = reference(**arguments)[0]
    reference.set_attn_processor(make())
    expected = reference(**arguments)[0]
    assert not torch.allclose(expected, plain, atol=1e-2)
    if when == "before":
        module.set_attn_processor(make())
    replaced(module)
    if when == "after":
        near(module(**arguments)[0], plain)
        module.set_attn_processor(make())
    near(module(**arguments)[0], expected)
    module.set_attn_processor(make().inner)
    near(module(**arguments)[0], plain)


@torch.no_grad()
def test_processors_derived_from_the_known_one_are_asked_themselves():
    for make in (Whispering, PAGJointAttnProcessor2_0):
        module, arguments = model("SD3"), given("SD3")
        # Perturbed attention takes half of the batch for itself; the last block returns no text to it.
        target = module.transformer_blocks[0].attn
        target.set_processor(make())
        expected = module(**arguments)[0]
        replaced(module)
        near(module(**arguments)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["SD3", "Flux dev"])
def test_projections_that_diffusers_fuses_itself(name):
    module, arguments = model(name), given(name)
    expected = module(**arguments)[0]
    replaced(module)
    module(**arguments)
    module.fuse_qkv_projections()
    near(module(**arguments)[0], expected)
    for attn in module.modules():
        # Only fused weights are read from here on: what lies packed must not be.
        if isinstance(attn, ATTENTIONS):
            attn.to_q.weight.data.fill_(float("nan"))
    near(module(**arguments)[0], expected)


@torch.no_grad()
def test_chunked_feed_forward_and_skipped_layers_are_stocks():
    module, arguments = model("SD3.5"), given("SD3.5")
    module.enable_forward_chunking(1, dim=1)
    expected = [module(**arguments, skip_layers=skipped)[0] for skipped in (None, [1])]
    replaced(module)
    for skipped, one in zip((None, [1]), expected, strict=True):
        assert torch.equal(module(**arguments, skip_layers=skipped)[0], one)
    module.disable_forward_chunking()
    near(module(**arguments, skip_layers=[1])[0], expected[1])


@torch.no_grad()
@each_model
def test_residuals_of_a_controlnet(name):
    module, arguments = model(name), given(name)
    added = [draw(2, 24, 32, seed=seed) for seed in (5, 6)]
    if is_flux(name):
        arguments |= {"controlnet_block_samples": added, "controlnet_single_block_samples": added}
    else:
        arguments["block_controlnet_hidden_states"] = added
    expected = module(**arguments)[0]
    replaced(module)
    near(module(**arguments)[0], expected)


@torch.no_grad()
@each_model
def test_options_for_the_processor_are_given_to_stock(name):
    module, arguments = model(name), given(name)
    plain = module(**arguments)[0]
    seen = []

    class Listening(type(module.transformer_blocks[0].attn.processor)):
        def __call__(self, *args, loud=None, **more):
            seen.append(loud)
            return super().__call__(*args, **more)

    module.set_attn_processor(Listening())
    replaced(module)
    near(module(**arguments, joint_attention_kwargs={"loud": 3})[0], plain)
    assert seen
    assert set(seen) == {3}


@torch.no_grad()
@each_model
def test_autocast_falls_back_to_stock(name):
    module, arguments = model(name), given(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(**arguments)[0]
        replaced(module)
        ours = module(**arguments)[0]
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


def test_gradients_are_stocks_own():
    for name in ONE_OF_EACH:
        module, arguments = model(name).train(), given(name)
        wanted = [arguments["hidden_states"].requires_grad_(), *module.parameters()]

        def gradients(module=module, arguments=arguments, wanted=wanted):
            out = module(**arguments)[0].square().sum()
            return torch.autograd.grad(out, wanted, allow_unused=True)

        expected = gradients()
        changes = replaced(module)
        # Weights are laid together in between: learning must not notice.
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True) if b is not None)
            with torch.no_grad():
                module(**arguments)
        undo(changes)
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True) if b is not None)


PATHS = [
    "norm1",
    "norm1.norm",
    "norm1.linear",
    "norm1_context",
    "norm2",
    "norm2_context",
    "attn",
    "attn.to_k",
    "attn.add_v_proj",
    "attn.norm_q",
    "attn.norm_added_k",
    "attn.to_out.0",
    "attn.to_out.1",
    "attn.to_add_out",
    "ff",
    "ff.net.0",
    "ff.net.0.proj",
    "ff.net.1",
    "ff_context",
    "ff_context.net.2",
]
ONLY = {
    "SD3.5": [f"transformer_blocks.{p}" for p in ("0.attn2", "0.attn2.to_q", "0.attn2.norm_k", "2.norm1_context")],
    "Flux dev": [
        f"single_transformer_blocks.1{p}"
        for p in (
            "",
            ".norm",
            ".norm.norm",
            ".attn",
            ".attn.to_v",
            ".attn.norm_k",
            ".proj_mlp",
            ".act_mlp",
            ".proj_out",
        )
    ],
}


def by_column(_module, _args, output):
    """A norm after it would take a common factor out again."""
    if isinstance(output, tuple):
        return tuple(by_column(None, None, one) for one in output)
    return output * torch.linspace(1, 1.5, output.shape[-1])


def by_position(_module, _args, output):
    """A hook that is shown [B, S, H, D] for [B, H, S, D] would tell."""
    return output * torch.linspace(1, 1.5, output.shape[1]).view(-1, 1, 1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name in ONE_OF_EACH for path in [f"transformer_blocks.0.{p}" for p in PATHS] + ONLY[name]],
)
def test_hooks_inside_a_block_are_called_and_obeyed(name, path):
    module, reference, arguments = model(name), model(name), given(name)
    plain = reference(**arguments)[0]
    hook = by_position if path.endswith(("norm_q", "norm_k", "norm_added_k")) else by_column
    reference.get_submodule(path).register_forward_hook(hook)
    expected = reference(**arguments)[0]
    assert not torch.allclose(expected, plain, atol=1e-4)
    replaced(module)
    handle = module.get_submodule(path).register_forward_hook(hook)
    near(module(**arguments)[0], expected)
    handle.remove()
    near(module(**arguments)[0], plain)


@torch.no_grad()
@each_model
def test_a_block_that_is_given_another_class_does_as_that_class_says(name):
    block, arguments = model(name).transformer_blocks[0], block_given(name)
    stock = block(**arguments)
    replaced(block)
    own = type(block)

    class Merging(own):
        def forward(self, *args, **more):
            return tuple(3 * one for one in super().forward(*args, **more))

    block.__class__ = Merging
    for a, b in zip(block(**arguments), stock, strict=True):
        near(a, 3 * b)


@torch.no_grad()
@each_model
def test_a_forward_of_another_program_is_kept(name):
    module, arguments = model(name), given(name)

    class Tripling(ModelHook):
        def post_forward(self, _module, output):
            return tuple(3 * one for one in output)

    HookRegistry.check_if_exists_or_initialize(module.transformer_blocks[0]).register_hook(Tripling(), "tripling")
    expected = module(**arguments)[0]
    changes = apply(module, RULES)
    assert [c.why_skipped for c in changes if not c.replaced] == ["its forward is one of diffusers.hooks.hooks"]
    near(module(**arguments)[0], expected)
    undo(changes)
    assert torch.equal(module(**arguments)[0], expected)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("ff", FeedForward(32, activation_fn="geglu"), "its feed-forward is FeedForward with GEGLU, not one with GELU"),
        ("ff", nn.Identity(), "its feed-forward is Identity, not one with GELU"),
        ("attn", nn.Identity(), "attn is a Identity"),
        ("attn2", FluxAttention(32), "attn2 is a FluxAttention"),
        ("attn.inner_kv_dim", 16, "attn has fewer key heads than query heads"),
        ("attn2.to_out", None, "attn2 has another output projection than a linear and a dropout"),
    ],
)
def test_a_block_of_another_kind_is_skipped_with_the_reason(path, value, reason):
    block = model("SD3.5").transformer_blocks[0]
    parent, _, attribute = path.rpartition(".")
    setattr(block.get_submodule(parent), attribute, value)
    (change,) = apply(block, RULES)
    assert change.why_skipped == reason
    assert "forward" not in block.__dict__
