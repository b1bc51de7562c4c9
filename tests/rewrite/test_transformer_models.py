from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipelines import tiny_unet
from rocm_sd import numerics
from rocm_sd.rewrite import packing, undo
from transformer_blocks import DTYPES, C, block, draw, replaced, spatial, stock_calls, text, tokens

UNETS = {
    "SD 1.5": {},
    "SD 2.1": {"use_linear_projection": True, "attention_head_dim": (4, 8), "upcast_attention": True},
    "SDXL": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "attention_head_dim": (2, 4),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    },
    "only cross": {"only_cross_attention": True},
}


def unet(flavour: str) -> tuple[UNet2DConditionModel, dict]:
    torch.manual_seed(0)
    given = {"timestep": torch.tensor(7), "encoder_hidden_states": draw(2, 7, 32, seed=2), "return_dict": False}
    if flavour == "SDXL":
        added = {"text_embeds": draw(2, 16, seed=3), "time_ids": torch.arange(12.0).view(2, 6)}
        given["added_cond_kwargs"] = added
    return tiny_unet(**UNETS[flavour]).eval(), given


def cast(given: dict, dtype: torch.dtype) -> dict:
    def one(value):
        if isinstance(value, dict):
            return {k: one(v) for k, v in value.items()}
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {k: one(v) for k, v in given.items()}


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flavour", UNETS)
def test_a_whole_unet_is_as_accurate_as_stock_and_comes_back_bit_for_bit(flavour, dtype, monkeypatch):
    model, given = unet(flavour)
    model = model.to(dtype)
    x = draw(2, 4, 8, 8, dtype=dtype)
    exact = copy.deepcopy(model).double()(x.double(), **cast(given, torch.float64))[0]
    given = cast(given, dtype)
    state = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    stock = model(x, **given)[0]
    changes = replaced(model)
    assert {c.rule for c in changes} == {"transformer", "spatial_transformer"}
    with monkeypatch.context() as patch:
        calls = [stock_calls(patch, cls) for cls in (BasicTransformerBlock, Transformer2DModel)]
        ours = model(x, **given)[0]
        assert calls == [[], []]
    numerics.require(flavour, ours, exact, stock)
    for _ in range(2):
        found = model.state_dict()
        assert list(found) == list(state)
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert all(parameters[name] is p for name, p in model.named_parameters())
        undo(changes)
        assert torch.equal(model(x, **given)[0], stock)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_second_order_gradients_of_a_whole_unet_are_those_of_stock():
    model, given = unet("SD 1.5")
    model, given = model.double(), cast(given, torch.float64)
    x = draw(2, 4, 8, 8, dtype=torch.float64).requires_grad_()

    def second_order():
        with sdpa_kernel(SDPBackend.MATH):  # stock's other kernels have none
            (first,) = torch.autograd.grad(model(x, **given)[0].square().sum(), x, create_graph=True)
            return first, *torch.autograd.grad(first.square().sum(), x)

    stock = second_order()
    replaced(model)
    torch.testing.assert_close(second_order(), stock, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_saved_and_loaded_while_the_rules_are_on(tmp_path):
    model, given = unet("SD 1.5")
    x = draw(2, 4, 8, 8)
    stock = model(x, **given)[0]
    replaced(model)
    model(x, **given)
    model.save_pretrained(tmp_path)
    assert torch.equal(UNet2DConditionModel.from_pretrained(tmp_path)(x, **given)[0], stock)


@torch.no_grad()
def test_another_dtype_or_device_after_packing():
    module = spatial()
    replaced(module)
    given = {"return_dict": False}
    before = module(draw(2, C, 5, 3), text(), **given)[0]
    module.double()
    wide = module(draw(2, C, 5, 3).double(), text().double(), **given)[0]
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), before)
    module.float()
    meta = copy.deepcopy(module).to("meta")
    assert meta(draw(2, C, 5, 3).to("meta"), text().to("meta"), **given)[0].shape == before.shape
    assert torch.equal(module(draw(2, C, 5, 3), text(), **given)[0], before)


@torch.no_grad()
def test_layer_by_layer_offload_and_its_end():
    module, x = spatial(), draw(2, C, 5, 3)
    expected = module(x, text(), return_dict=False)[0]
    changes = replaced(module)
    module(x, text(), return_dict=False)
    cpu_offload(module, execution_device=torch.device("cpu"))
    assert module.transformer_blocks[0].attn1.to_q.weight.is_meta
    torch.testing.assert_close(module(x, text(), return_dict=False)[0], expected)
    remove_hook_from_submodules(module)
    torch.testing.assert_close(module(x, text(), return_dict=False)[0], expected)
    undo(changes)
    assert torch.equal(module(x, text(), return_dict=False)[0], expected)


@torch.no_grad()
def test_a_copy_has_rules_and_weights_of_its_own():
    module = block()
    replaced(module)
    before = module(tokens(), encoder_hidden_states=text())
    twin = copy.deepcopy(module)
    assert torch.equal(twin(tokens(), encoder_hidden_states=text()), before)
    twin.attn1.to_q.weight.data.add_(1)
    assert not torch.equal(twin(tokens(), encoder_hidden_states=text()), before)
    assert torch.equal(module(tokens(), encoder_hidden_states=text()), before)


@torch.no_grad()
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_is_stock_when_it_comes_back(how):
    """The file needs none of this package; optimising what it holds is as optimising any other model."""
    module = spatial()
    stock = module(draw(2, C, 5, 3), text(), return_dict=False)[0]
    replaced(module)
    ours = module(draw(2, C, 5, 3), text(), return_dict=False)[0]
    if how == "pickle":
        data = pickle.dumps(module)
        back = pickle.loads(data)
        assert b"rocm_sd" not in data
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        back = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert torch.equal(back(draw(2, C, 5, 3), text(), return_dict=False)[0], stock)
    changes = replaced(back)
    assert torch.equal(back(draw(2, C, 5, 3), text(), return_dict=False)[0], ours)
    undo(changes)
    assert torch.equal(back(draw(2, C, 5, 3), text(), return_dict=False)[0], stock)


@torch.no_grad()
def test_compiles_as_one_graph():
    module = spatial(use_linear_projection=True, num_layers=2)
    replaced(module)
    given = {"return_dict": False}
    x = draw(2, C, 5, 3).contiguous(memory_format=torch.channels_last)
    eager = module(x, text(), **given)[0]
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, text(), **given)[0], eager)


@torch.no_grad()
def test_weights_are_packed_and_in_place_only(monkeypatch):
    """One product for QKV and one for the text's K and V; after the first call no weight moves any more."""
    module = block()
    replaced(module)
    moves = []
    lay = packing._lay_together
    monkeypatch.setattr(packing, "_lay_together", lambda p: moves.append(p) or lay(p))
    for _ in range(3):
        module(tokens(), encoder_hidden_states=text())
    assert [len(m) for m in moves] == [3, 2]
    storages = [p.untyped_storage().data_ptr() for p in module.parameters()]
    assert len(storages) - len(set(storages)) == 3
