from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch._subclasses import FakeTensorMode

from pipelines import tiny_unet, tiny_vae
from rocm_sd import numerics
from rocm_sd.ops.registry import Op
from rocm_sd.rewrite import apply, convolutions, resblock, undo
from rocm_sd.rewrite.resblock import RULE
from rocm_sd.tuning import Choice

NAMED = "conv2d=torch,group_norm_silu=torch"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["in place", "ops", "the norm adds"])
def way(request, monkeypatch):
    """The ways through a block: plain torch as on a CPU, the ops, and as where a GPU's library convolves."""
    monkeypatch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    if request.param != "in place":
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    if request.param == "the norm adds":
        monkeypatch.setattr(convolutions, "fuses_adds", lambda _layer, _x: False)
    return request.param


@pytest.fixture
def ops(monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)


def block(**options) -> ResnetBlock2D:
    torch.manual_seed(0)
    config = {"in_channels": 32, "out_channels": 64, "temb_channels": 16, "groups": 8}
    return laid(ResnetBlock2D(**config | options))


def laid(module):
    """As `optimize` lays convolutions out where it applies the rule."""
    return module.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def inputs(batch=2, channels=32, size=(5, 7), temb=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, *size, generator=generator).contiguous(memory_format=torch.channels_last)
    return x, torch.randn(batch, 16, generator=generator) if temb else None


def double(tensor):
    return None if tensor is None else tensor.double()


def check(module, x, temb, name="resblock"):
    """The module with the rule against stock, both measured against float64; returns the rule's result."""
    stock, exact = module(x, temb), copy.deepcopy(module).double()(x.double(), double(temb))
    changes = apply(module, [RULE])
    assert [c.replaced for c in changes if c.kind == "ResnetBlock2D"] == [True]
    ours = module(x, temb)
    assert ours.dtype == stock.dtype
    numerics.require(name, ours, exact, stock)
    undo(changes)
    assert torch.equal(module(x, temb), stock)
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_channels": 32},
        {"temb_channels": None},
        {"temb_channels": None, "time_embedding_norm": "group"},
        {"skip_time_act": True},
        {"up": True},
        {"down": True},
        {"up": True, "kernel": "sde_vp"},
        {"down": True, "kernel": "fir"},
        {"output_scale_factor": 1.4},
        {"conv_shortcut_bias": False, "conv_2d_out_channels": 24},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_as_near_to_float64_as_stock(options, dtype, way):
    size = (6, 8) if "down" in options else (5, 7)
    x, temb = inputs(size=size, temb="temb_channels" not in options)
    module = block(**options).to(dtype)
    check(module, x.to(dtype), None if temb is None else temb.to(dtype), f"resblock in {dtype}, {way}")


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 2)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_smallest_maps(size, batch, way):
    check(block(), *inputs(batch, size=size))


def test_other_layouts_of_the_input(way):
    x, temb = inputs()
    check(block(), x.contiguous(), temb)
    check(block(), torch.cat([x, x], dim=1)[:, ::2], temb)


def test_an_embedding_for_the_whole_batch_is_broadcast(way):
    x, temb = inputs()
    check(block(), x, temb[:1])


def test_an_embedding_without_a_projection_is_added_as_stock_does(way):
    module, (x, _) = block(temb_channels=None), inputs()
    temb = torch.randn(2, 64, 1, 1)
    stock = module(x, temb)
    apply(module, [RULE])
    assert torch.equal(module(x, temb), stock)


def test_large_batches_of_a_block_that_enlarges(way):
    check(block(up=True), *inputs(batch=65, size=(3, 2)))


def test_an_empty_batch_is_stocks(way):
    x, temb = inputs(batch=0)
    module = block()
    shape = module(x, temb).shape
    apply(module, [RULE])
    assert module(x, temb).shape == shape


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(32, 64, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(32, 64, 3, padding=1, groups=2),
        nn.Conv2d(32, 64, 3, padding=2, dilation=2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.Conv2d(32, 64, (3, 1), padding=(1, 0)),
        nn.Conv2d(32, 64, 3, padding="same"),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
    ],
    ids=["circular", "groups", "dilation", "5x5", "3x1", "same", "no bias"],
)
def test_convolutions_of_other_kinds(conv, way):
    module = block()
    module.conv1 = conv
    check(laid(module), *inputs())


def test_padding_changed_while_in_use(way):
    """Seamless textures, both usual ways."""
    module, arguments = block(), inputs()
    apply(module, [RULE])
    zeros = module(*arguments)
    for layer in (module.conv1, module.conv2):
        layer.padding_mode = "circular"
        layer._reversed_padding_repeated_twice = [1, 1, 1, 1]
    circular = module(*arguments)
    torch.testing.assert_close(circular, ResnetBlock2D.forward(module, *arguments))
    assert (circular - zeros).abs().max() > 0.01
    for layer in (module.conv1, module.conv2):
        layer.padding_mode = "zeros"
        layer._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x.roll(1, 3), weight, bias, padding=1)
    torch.testing.assert_close(module(*arguments), ResnetBlock2D.forward(module, *arguments))


class LoRA(nn.Module):
    """As PEFT wraps a convolution."""

    def __init__(self, base_layer: nn.Conv2d) -> None:
        super().__init__()
        self.base_layer = base_layer
        out, taken = base_layer.weight.shape[:2]
        self.down = nn.Conv2d(taken, 4, base_layer.kernel_size, padding=base_layer.padding, bias=False)
        self.up = nn.Conv2d(4, out, 1, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["conv1", "conv2", "conv_shortcut"])
def test_a_lora_loaded_after_apply_and_unloaded(name, way):
    module, arguments = block(), inputs()
    apply(module, [RULE])
    before, plain = module(*arguments), getattr(module, name)
    setattr(module, name, LoRA(plain).requires_grad_(False))
    adapted = module(*arguments)
    torch.testing.assert_close(adapted, ResnetBlock2D.forward(module, *arguments))
    assert (adapted - before).abs().max() > 0.01
    setattr(module, name, plain)
    assert torch.equal(module(*arguments), before)


@pytest.mark.parametrize("name", ["norm1", "conv1", "time_emb_proj", "norm2", "conv2", "conv_shortcut"])
def test_weights_changed_in_place_are_seen(name, way):
    """As a LoRA is fused: through `data`, which leaves no trace."""
    module, arguments = block(), inputs()
    apply(module, [RULE])
    module(*arguments)
    for parameter in getattr(module, name).parameters():
        parameter.data += torch.randn(parameter.shape)
    torch.testing.assert_close(module(*arguments), ResnetBlock2D.forward(module, *arguments))


@pytest.mark.parametrize("name", ["norm1", "conv1", "norm2", "conv2", "conv_shortcut"])
def test_forward_hooks_of_layers_run(name, way):
    module, arguments, seen = block(), inputs(), []
    apply(module, [RULE])

    def hook(_module, _inputs, output):
        seen.append(output)
        return output * 2

    getattr(module, name).register_forward_hook(hook)
    ours = module(*arguments)
    assert len(seen) == 1
    held = seen[0].clone()
    torch.testing.assert_close(ours, ResnetBlock2D.forward(module, *arguments))
    assert torch.equal(seen[0], held)


def test_a_hook_of_the_activation_runs(way):
    module, arguments, seen = block(), inputs(), []
    apply(module, [RULE])
    module.nonlinearity.register_forward_hook(lambda _module, _inputs, _output: seen.append(1))
    assert torch.equal(module(*arguments), ResnetBlock2D.forward(module, *arguments))
    # After each norm and of the time embedding, in both.
    assert len(seen) == 6


def test_offload_of_every_layer(way):
    module, arguments = block(), inputs()
    stock = module(*arguments)
    apply(module, [RULE])
    cpu_offload(module, execution_device="cpu")
    assert module.conv1.weight.is_meta
    torch.testing.assert_close(module(*arguments), stock)


def test_dropout_in_training_mode(way):
    module, arguments = block(dropout=0.5).train(), inputs()
    torch.manual_seed(3)
    stock = module(*arguments)
    apply(module, [RULE])
    torch.manual_seed(3)
    torch.testing.assert_close(module(*arguments), stock)
    assert not torch.allclose(module(*arguments), stock)


def test_gradients_are_stocks(way):
    # One of x is asked for, too: without it torch 2.13 dies in the backward of its channels-last group norm on a CPU.
    module, (x, temb) = block().requires_grad_(True), (t.requires_grad_() for t in inputs())
    wanted = [x, temb, *module.parameters()]
    expected = torch.autograd.grad(module(x, temb).square().sum(), wanted)
    apply(module, [RULE])
    found = torch.autograd.grad(module(x, temb).square().sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # A trained LoRA in a frozen block.
    module.requires_grad_(False)
    x, temb = x.detach(), temb.detach()
    module.conv1 = LoRA(module.conv1)
    wanted = list(module.conv1.up.parameters())
    expected = torch.autograd.grad(ResnetBlock2D.forward(module, x, temb).square().sum(), wanted)
    found = torch.autograd.grad(module(x, temb).square().sum(), wanted)
    torch.testing.assert_close(found, expected)


def test_autocast_chooses_the_same_dtypes(way):
    module, arguments = block(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        stock = module(*arguments)
        apply(module, [RULE])
        assert torch.equal(module(*arguments), stock)
    assert module(*arguments).dtype == torch.float32


def test_arguments_that_stock_deprecated_still_warn(way):
    module, (x, temb) = block(), inputs()
    stock = module(x, temb)
    apply(module, [RULE])
    with pytest.warns(FutureWarning, match="scale"):
        ours = module(x, temb, scale=1.0)
    assert torch.equal(ours, stock)
    with pytest.raises((AttributeError, TypeError)):
        module(x, None)


@pytest.mark.parametrize("named", [True, False], ids=["ops", "plain torch"])
def test_compiles_as_one_graph(named, monkeypatch):
    monkeypatch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    module, arguments = block(), inputs()
    if named:
        monkeypatch.setattr(convolutions, "through_op", lambda _name, _x: True)
    changes = apply(module, [RULE])
    eager = module(*arguments)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), eager)
    undo(changes)


def ops_called(monkeypatch):
    """(op, which of its optional tensors are given) of each call from here on."""
    calls = []

    def counted(name):
        op = getattr(convolutions, name)

        def call(*arguments):
            calls.append((name, *(argument is not None for argument in arguments[2:5])))
            return op(*arguments)

        monkeypatch.setattr(convolutions, name, call)

    counted("conv2d")
    counted("group_norm_silu")
    return calls


def test_weights_of_another_layout_are_not_copied_in_every_call(ops, monkeypatch):
    module, arguments = block(), inputs()
    apply(module, [RULE])
    for layer in (module.conv1, module.conv2):
        layer.weight.data = layer.weight.data.contiguous()
    calls = ops_called(monkeypatch)
    torch.testing.assert_close(module(*arguments), ResnetBlock2D.forward(module, *arguments))
    # A weight of 1x1 lies in both layouts at once.
    assert [name for name, *_ in calls] == ["group_norm_silu", "group_norm_silu", "conv2d"]


def test_a_bias_of_another_dtype_is_stocks_error(ops):
    module, arguments = block(), inputs()
    apply(module, [RULE])
    module.conv1.bias.data = module.conv1.bias.data.half()
    with pytest.raises(RuntimeError, match="bias"):
        module(*arguments)


def test_a_block_is_five_ops_with_every_add_inside(ops, monkeypatch):
    calls = ops_called(monkeypatch)
    module = block()
    apply(module, [RULE])
    module(*inputs())
    # conv2d: bias, add, residual; group_norm_silu: weight, bias, add.
    norm, conv1, shortcut, conv2 = (True, True, False), (True, True, False), (True, False, False), (True, False, True)
    assert calls == [
        ("group_norm_silu", *norm), ("conv2d", *conv1), ("group_norm_silu", *norm), ("conv2d", *shortcut),
        ("conv2d", *conv2),
    ]  # fmt: skip
    calls.clear()
    monkeypatch.setattr(convolutions, "fuses_adds", lambda _layer, _x: False)
    module(*inputs())
    assert calls[1:3] == [("conv2d", False, False, False), ("group_norm_silu", True, True, True)]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("triton", True), ("hip", True), ("library_epilogue", False), ("library_gemm", False), ("torch", False)],
)
def test_the_norm_adds_where_a_gpus_library_convolves(chosen, expected, monkeypatch):
    def choose(_op, problem, device):
        assert (problem["pixels"], problem["cin"], problem["cout"], problem["padding"]) == (70, 32, 64, 1)
        assert device.type == "cuda"
        return Choice(chosen)

    monkeypatch.setattr(Op, "choose", choose)
    layer = block().conv1
    with FakeTensorMode():
        x = torch.empty(2, 32, 5, 7, device="cuda")
        assert convolutions.fuses_adds(layer, x) is expected
    assert convolutions.fuses_adds(layer, inputs()[0])


def test_small_blocks_on_a_cpu_are_stocks_own():
    """What a rule saves there is less than what it costs to ask."""
    module, arguments = block(), inputs()
    stock = module(*arguments)
    apply(module, [RULE])
    assert torch.equal(module(*arguments), stock)


def test_state_dict_keys_stay(ops):
    module = block()
    before = list(module.state_dict())
    changes = apply(module, [RULE])
    assert list(module.state_dict()) == before
    undo(changes)
    assert "forward" not in module.__dict__


def test_a_small_unet(way):
    torch.manual_seed(0)
    unet = laid(tiny_unet())
    x, text = torch.randn(2, 4, 10, 14), torch.randn(2, 5, 32)
    stock = unet(x, 7, text).sample
    exact = copy.deepcopy(unet).double()(x.double(), 7, text.double()).sample
    changes = apply(unet, [RULE])
    assert sum(c.replaced for c in changes) == 8
    numerics.require("unet", unet(x, 7, text).sample, exact, stock)
    undo(changes)
    assert torch.equal(unet(x, 7, text).sample, stock)


def test_a_small_vae(way):
    torch.manual_seed(0)
    vae = laid(tiny_vae())
    picture, latents = torch.randn(1, 3, 10, 14), torch.randn(1, 4, 5, 7)
    exact = copy.deepcopy(vae).double()
    stock = vae.encode(picture).latent_dist.mean, vae.decode(latents).sample
    apply(vae, [RULE])
    ours = vae.encode(picture).latent_dist.mean, vae.decode(latents).sample
    numerics.require("encode", ours[0], exact.encode(picture.double()).latent_dist.mean, stock[0])
    numerics.require("decode", ours[1], exact.decode(latents.double()).sample, stock[1])
