from __future__ import annotations

import copy
import io
import pickle

import peft
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules

from joint_models import ONE_OF_EACH, block_given, each_model, given, model, near, replaced
from rocm_sd.rewrite import packing, undo

TARGETS = [
    ["to_q", "to_k", "to_v", "to_out.0"],
    ["to_k", "add_k_proj"],
    ["proj_mlp", "proj_out", "net.0.proj", "net.2", "linear"],
    ["to_add_out", "add_q_proj", "add_v_proj", "to_v"],
]


@torch.no_grad()
@each_model
@pytest.mark.parametrize("targets", TARGETS, ids=lambda t: t[0])
def test_lora_by_diffusers_and_peft(name, targets):
    """Loaded, scaled, fused, unfused, unloaded, after the rules: at every step what stock computes."""
    stock, ours, arguments = model(name), model(name), given(name)
    changes = replaced(ours)

    def same(**more) -> torch.Tensor:
        expected = stock(**arguments, **more)[0]
        torch.testing.assert_close(ours(**arguments, **more)[0], expected, rtol=1e-4, atol=1e-4)
        return expected

    def both(step) -> None:
        for module in (stock, ours):
            torch.manual_seed(9)
            step(module)

    plain = same()
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    both(lambda m: m.add_adapter(config, adapter_name="one"))
    loaded = same()
    assert not torch.allclose(loaded, plain, atol=1e-2)
    halved = same(joint_attention_kwargs={"scale": 0.5})
    assert not torch.allclose(halved, loaded, atol=1e-3)
    both(lambda m: m.set_adapters("one", 0.3))
    assert not torch.allclose(same(), loaded, atol=1e-3)
    both(lambda m: m.disable_adapters())
    near(same(), plain)
    both(lambda m: m.enable_adapters())
    both(lambda m: m.fuse_lora(lora_scale=1.0))
    fused = same()
    both(lambda m: m.unfuse_lora())
    same()
    both(lambda m: m.delete_adapters("one"))
    torch.testing.assert_close(same(), plain, rtol=1e-4, atol=1e-4)
    both(lambda m: m.add_adapter(config, adapter_name="two"))
    torch.testing.assert_close(same(), loaded, rtol=1e-3, atol=1e-3)
    undo(changes)
    assert torch.equal(ours(**arguments)[0], stock(**arguments)[0])
    replaced(ours)
    same()
    assert not torch.equal(fused, plain)


@torch.no_grad()
@each_model
def test_weights_changed_in_place_are_in_the_next_picture(name):
    """As fusing does it, without a version bump."""
    stock, ours, arguments = model(name), model(name), given(name)
    replaced(ours)
    ours(**arguments)
    for module in (stock, ours):
        torch.manual_seed(4)
        for parameter in module.parameters():
            parameter.data += torch.randn(parameter.shape) / 8
    near(ours(**arguments)[0], stock(**arguments)[0])


@torch.no_grad()
@pytest.mark.parametrize(("name", "sizes"), [("SD3", [3, 3] * 3), ("Flux dev", [3, 3] * 3 + [4] * 3)])
def test_weights_are_packed_once(name, sizes, monkeypatch):
    module, arguments = model(name), given(name)
    replaced(module)
    moves = []
    lay = packing._lay_together
    monkeypatch.setattr(packing, "_lay_together", lambda p: moves.append(len(p)) or lay(p))
    for _ in range(3):
        module(**arguments)
    # Weights and biases of each.
    assert moves == [size for size in sizes for _ in range(2)]


@torch.no_grad()
@each_model
def test_another_dtype_after_packing(name):
    module, arguments = model(name), given(name)
    replaced(module)
    before = module(**arguments)[0]
    module.bfloat16()
    assert module(**given(name, torch.bfloat16))[0].dtype == torch.bfloat16
    fresh = model(name).bfloat16().float()
    near(module.float()(**arguments)[0], fresh(**arguments)[0])
    assert before.dtype == torch.float32


@torch.no_grad()
@each_model
def test_layer_by_layer_offload_and_its_end(name):
    module, arguments = model(name), given(name)
    expected = module(**arguments)[0]
    changes = replaced(module)
    module(**arguments)
    cpu_offload(module, execution_device=torch.device("cpu"))
    assert module.transformer_blocks[0].attn.to_q.weight.is_meta
    near(module(**arguments)[0], expected)
    remove_hook_from_submodules(module)
    near(module(**arguments)[0], expected)
    undo(changes)
    assert torch.equal(module(**arguments)[0], expected)


@torch.no_grad()
@each_model
def test_copies_and_files(name):
    module, arguments = model(name), given(name)
    stock = module(**arguments)[0]
    replaced(module)
    ours = module(**arguments)[0]
    twin = copy.deepcopy(module)
    assert torch.equal(twin(**arguments)[0], ours)
    twin.transformer_blocks[0].attn.to_q.weight.data.add_(1)
    assert not torch.equal(twin(**arguments)[0], ours)
    assert torch.equal(module(**arguments)[0], ours)
    data = pickle.dumps(module)
    assert b"rocm_sd" not in data
    buffer = io.BytesIO()
    torch.save(module, buffer)
    for back in (pickle.loads(data), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)):
        assert torch.equal(back(**arguments)[0], stock)
        replaced(back)
        assert torch.equal(back(**arguments)[0], ours)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "path"),
    [(name, "transformer_blocks.0") for name in ONE_OF_EACH] + [("Flux dev", "single_transformer_blocks.0")],
)
def test_compiles_as_stock_does(name, path):
    """A compiler fuses stock's own steps: no graph is broken, and nothing of the weights' places is in it."""
    block = model(name).get_submodule(path)
    arguments = block_given(name)
    replaced(block)
    eager = block(**arguments)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(**arguments), eager, strict=True):
        near(a, b)
