"""Attention processors that stand in for Diffusers' own: the same bits where the op is stock torch, in every path."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    JointAttnProcessor2_0,
)

import pipelines
import rocm_sd
from model_inputs import sd3_inputs, sdxl_inputs, unet_inputs
from pipelines import CASES, Twins, small_blocks_too
from rocm_sd import numerics
from rocm_sd.engine.capture import foreign
from rocm_sd.errors import Unsupported
from rocm_sd.integrations.diffusers import (
    ROCmAttnProcessor,
    ROCmFusedAttnProcessor,
    ROCmIPAdapterAttnProcessor,
    ROCmJointAttnProcessor,
    attention_backend,
    set_rocm_processors,
)
from tiny_models import controlnet_of, sd3_transformer, unet_of, vae_of

STOCK = {
    ROCmAttnProcessor: AttnProcessor2_0,
    ROCmFusedAttnProcessor: FusedAttnProcessor2_0,
    ROCmJointAttnProcessor: JointAttnProcessor2_0,
}
INPUTS = {"sd15": unet_inputs, "sd21": unet_inputs, "sdxl": sdxl_inputs}


@pytest.fixture
def asked(monkeypatch):
    """How often the op was asked."""
    calls = []
    op = attention_backend.attention
    monkeypatch.setattr(attention_backend, "attention", lambda *given: (calls.append(given), op(*given))[1])
    return calls


def in_two_steps(name):
    case = CASES[name]
    return replace(case, arguments=case.arguments | {"num_inference_steps": 2})


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def attention_of(**options):
    torch.manual_seed(0)
    return Attention(**{"query_dim": 32, "heads": 4, "dim_head": 8, "bias": True} | options).eval()


TEXT = {"encoder_hidden_states": drawn(2, 5, 24)}
ADDED = {"attention_mask": drawn(2, 1, 9)}
# The attention's options, its input, and what else it is given.
PATHS = {
    "to itself": ({}, (2, 9, 32), {}),
    "to a text": ({"cross_attention_dim": 24}, (2, 9, 32), TEXT),
    "without bias": ({"bias": False}, (2, 9, 32), {}),
    "a picture with norm and residual": (
        {"norm_num_groups": 8, "residual_connection": True, "rescale_output_factor": 1.5},
        (2, 32, 3, 3),
        {},
    ),
    "a norm by place": ({"spatial_norm_dim": 6}, (2, 32, 3, 3), {"temb": drawn(2, 6, 3, 3)}),
    "a norm of the text": ({"cross_attention_dim": 24, "cross_attention_norm": "layer_norm"}, (2, 9, 32), TEXT),
    "norms of queries and keys": ({"qk_norm": "layer_norm", "eps": 1e-3}, (2, 9, 32), {}),
    "a mask": ({}, (2, 9, 32), ADDED),
    "a mask of the text": ({"cross_attention_dim": 24}, (2, 9, 32), TEXT | {"attention_mask": drawn(2, 1, 5)}),
    "one key": ({"cross_attention_dim": 24}, (2, 9, 32), {"encoder_hidden_states": drawn(2, 1, 24)}),
}


def of_dtype(given, dtype):
    return {name: value.to(dtype) for name, value in given.items()}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ours", [ROCmAttnProcessor, ROCmFusedAttnProcessor])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_stocks_bits(asked, path, ours, dtype):
    options, shape, given = PATHS[path]
    attn = attention_of(**options).to(dtype)
    if ours is ROCmFusedAttnProcessor:
        attn.fuse_projections()
    given = of_dtype(given, dtype)
    x = drawn(*shape, dtype=dtype)
    attn.set_processor(STOCK[ours]())
    wanted = attn(x, **given)
    attn.set_processor(ours())
    assert torch.equal(attn(x, **given), wanted)
    assert len(asked) == (0 if "mask" in path else 1)


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_picture_of_either_layout(layout):
    attn = attention_of(norm_num_groups=8, residual_connection=True)
    x = drawn(2, 32, 4, 4).contiguous(memory_format=layout)
    wanted = attn(x)
    attn.set_processor(ROCmAttnProcessor())
    assert torch.equal(attn(x), wanted)
    assert attn(x).stride() == wanted.stride()


@torch.no_grad()
@pytest.mark.parametrize("flavour", INPUTS)
@pytest.mark.parametrize("how", ["one for all", "each its own"])
def test_a_whole_unet_has_stocks_bits(asked, flavour, how):
    torch.manual_seed(0)
    unet = unet_of(flavour).double()
    given = INPUTS[flavour]()
    wanted = unet(**given).sample
    if how == "one for all":
        unet.set_attn_processor(ROCmAttnProcessor())
    else:
        assert set_rocm_processors(unet) == len(unet.attn_processors)
        # They are known by now.
        assert set_rocm_processors(unet) == 0
    assert torch.equal(unet(**given).sample, wanted)
    assert len(asked) == len(unet.attn_processors)
    unet.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(unet(**given).sample, wanted)


@torch.no_grad()
def test_with_a_kernel_it_is_as_exact_as_stock(monkeypatch, asked):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "attention=triton")
    attn, x = attention_of().half(), drawn(2, 9, 32, dtype=torch.float16)
    exact = copy.deepcopy(attn).double()(x.double())
    stock = attn(x)
    attn.set_processor(ROCmAttnProcessor())
    compared = numerics.compare(attn(x), exact, stock)
    assert compared.rms <= 2 * compared.stock_rms + compared.floor, str(compared)
    assert len(asked) == 1


@torch.no_grad()
def test_fused_projections_of_a_unet_and_back(asked):
    torch.manual_seed(0)
    unet = unet_of("sd15").double()
    unet.fuse_qkv_projections()
    wanted = unet(**unet_inputs()).sample
    assert set_rocm_processors(unet) == len(unet.attn_processors)
    assert {type(one) for one in unet.attn_processors.values()} == {ROCmFusedAttnProcessor}
    assert torch.equal(unet(**unet_inputs()).sample, wanted)
    assert asked
    unet.unfuse_qkv_projections()
    assert {type(one) for one in unet.attn_processors.values()} == {AttnProcessor2_0}


@torch.no_grad()
def test_the_joint_attention_of_sd3(asked):
    torch.manual_seed(0)
    model = sd3_transformer().double()
    wanted = model(**sd3_inputs()).sample
    assert set_rocm_processors(model) == len(model.attn_processors) == 2
    assert torch.equal(model(**sd3_inputs()).sample, wanted)
    assert len(asked) == 2


@torch.no_grad()
@pytest.mark.parametrize("norm", [None, "rms_norm"])
@pytest.mark.parametrize("words", [True, False])
def test_the_joint_attention_with_norms_and_without_words(words, norm):
    options = {"added_kv_proj_dim": 32, "context_pre_only": False} if words else {}
    attn = attention_of(**options, qk_norm=norm, eps=1e-6, processor=JointAttnProcessor2_0())
    given = {"encoder_hidden_states": drawn(2, 5, 32)} if words else {}
    x = drawn(2, 9, 32)
    wanted = attn(x, **given)
    attn.set_processor(ROCmJointAttnProcessor())
    found = attn(x, **given)
    pairs = zip(found, wanted, strict=True) if words else [(found, wanted)]
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_stocks(asked, frozen):
    found = []
    for processor in (AttnProcessor2_0(), ROCmAttnProcessor()):
        torch.manual_seed(0)
        unet = unet_of("sd15").double().requires_grad_(not frozen)
        unet.set_attn_processor(processor)
        given = unet_inputs()
        given["sample"].requires_grad_()
        unet(**given).sample.square().sum().backward()
        found.append([given["sample"].grad, *(p.grad for p in unet.parameters() if not frozen)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    # An attention before any weight that is trained would still be the op's.
    assert not asked


@torch.no_grad()
def test_autocast_gives_stocks_bits(asked):
    attn = attention_of()
    x = drawn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = attn(x)
        attn.set_processor(ROCmAttnProcessor())
        found = attn(x)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert not asked


@torch.no_grad()
def test_it_compiles_as_one_graph():
    attn = attention_of(cross_attention_dim=24)
    attn.set_processor(ROCmAttnProcessor())
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    x = drawn(2, 9, 32)
    assert torch.equal(compiled(x, **TEXT), attn(x, **TEXT))


@torch.no_grad()
def test_the_attention_of_a_vae():
    torch.manual_seed(0)
    vae = vae_of()
    z = drawn(1, 4, 8, 8)
    wanted = vae.decode(z).sample
    vae.set_attn_processor(ROCmAttnProcessor())
    assert torch.equal(vae.decode(z).sample, wanted)
    rocm_sd.optimize(vae)
    torch.testing.assert_close(vae.decode(z).sample, wanted)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_model_with_them_can_be_copied(again):
    unet = unet_of("sd15")
    unet.set_attn_processor(ROCmAttnProcessor())
    twin = again(unet)
    assert {type(one) for one in twin.attn_processors.values()} == {ROCmAttnProcessor}


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None, "unet"], ids=repr)
def test_what_has_no_processors_is_refused(model):
    with pytest.raises(Unsupported, match="with attention processors"):
        set_rocm_processors(model)


def test_a_processor_of_the_users_own_stays():
    class Mine(AttnProcessor2_0):
        pass

    unet = unet_of("sd15")
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(Mine())
    assert set_rocm_processors(unet) == len(unet.attn_processors) - 1
    assert type(unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor) is Mine


def adapter_of(hidden=32, text=24, scale=0.7, count=1):
    torch.manual_seed(3)
    return IPAdapterAttnProcessor2_0(hidden, text, num_tokens=(4,) * count, scale=[scale] * count).eval()


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("given", "scale"),
    # Stock takes a scale for each picture with masks by place alone.
    [*product(["pictures", "mask", "masks by place"], [0.7, 0.0]), ("masks by place", [0.5])],
)
def test_an_ip_adapter_has_stocks_bits(asked, given, scale, count):
    attn = attention_of(cross_attention_dim=24)
    stock = adapter_of(scale=scale, count=count)
    options = {"encoder_hidden_states": (drawn(2, 5, 24), [drawn(2, 1, 4, 24, seed=n) for n in range(count)])}
    if given == "mask":
        options["attention_mask"] = drawn(2, 1, 5)
    if given == "masks by place":
        options["ip_adapter_masks"] = [(drawn(1, 1, 3, 3, seed=n) > 0).float() for n in range(count)]
    attn.set_processor(stock)
    x = drawn(2, 9, 32)
    wanted = attn(x, **options)
    ours = ROCmIPAdapterAttnProcessor.of(stock)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert ours.to_k_ip[0].weight is stock.to_k_ip[0].weight
    attn.set_processor(ours)
    assert torch.equal(attn(x, **options), wanted)
    pictures = count if scale else 0
    assert len(asked) == {"pictures": 1 + pictures, "mask": pictures, "masks by place": 0}[given]


class TestTheEngineKnowsThem:
    def test_by_what_they_stand_in_for(self):
        unet = unet_of("sd15")
        unet.set_attn_processor(ROCmAttnProcessor())
        assert foreign.why_foreign(unet) is None
        unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(
            ROCmIPAdapterAttnProcessor.of(adapter_of(64, 32))
        )
        assert foreign.why_foreign(unet) is None

        class Counting(ROCmAttnProcessor):
            """What a user adds is not known."""

        unet.set_attn_processor(Counting())
        assert foreign.why_foreign(unet) == "its Attention is computed by Counting"

    @torch.no_grad()
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_their_attention_is_packed_and_the_answer_stays(self, asked, monkeypatch, when):
        monkeypatch.setattr(pipelines, "DEVICE", torch.device("cpu"))
        # The rules for blocks of a transformer are applied where steps are captured.
        small_blocks_too(monkeypatch, "1")
        torch.manual_seed(0)
        unet, plain = unet_of("sd15").double(), unet_of("sd15").double()
        plain.load_state_dict(unet.state_dict())
        wanted = rocm_sd.optimize(plain)(**unet_inputs()).sample
        if when == "before":
            unet.set_attn_processor(ROCmAttnProcessor())
        rocm_sd.optimize(unet)
        if when == "after":
            unet.set_attn_processor(ROCmAttnProcessor())
        assert torch.equal(unet(**unet_inputs()).sample, wanted)
        # The rules' own attention was used, of weights that lie together.
        assert not asked
        assert len(rocm_sd.report(unet).replaced) == len(rocm_sd.report(plain).replaced)
        rocm_sd.restore(unet)
        assert torch.equal(unet(**unet_inputs()).sample, rocm_sd.restore(plain)(**unet_inputs()).sample)

    @pytest.mark.parametrize(("name", "step_graph"), [("sdxl", "1"), ("sd3", "1"), ("sd15-controlnet", "0")])
    def test_a_pipeline_with_them_draws_stocks_picture(self, tmp_path, monkeypatch, name, step_graph):
        small_blocks_too(monkeypatch, step_graph)
        twins = Twins(in_two_steps(name), tmp_path)
        twins.check()
        for part in ("unet", "controlnet", "transformer"):
            if hasattr(twins.ours, part):
                assert set_rocm_processors(getattr(twins.ours, part))
        twins.check(1)
        rocm_sd.optimize(twins.ours)
        twins.check(2)


def test_a_controlnet_has_them_too():
    net = controlnet_of("sd15")
    assert set_rocm_processors(net) == len(net.attn_processors)
