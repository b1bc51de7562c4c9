"""The two blocks that a UNet is made of, built from the ops: the same function as Diffusers', and one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rocm_sd import numerics
from rocm_sd.ops import attention, conv2d, geglu, group_norm_silu, layer_norm_residual, linear_residual
from rocm_sd.ops.linear_residual.packing import pack_linears, split_heads

C, HEADS, TEXT = 64, 2, 48


class ResBlock(nn.Module):
    """Norms, convolutions, time embedding and shortcut of a Diffusers ResnetBlock2D, four calls in all."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        b = self.block
        add = b.time_emb_proj(torch.nn.functional.silu(temb))
        shortcut = conv2d(x, b.conv_shortcut.weight, b.conv_shortcut.bias)
        h = group_norm_silu(x, b.norm1.num_groups, b.norm1.weight, b.norm1.bias, None, b.norm1.eps)
        h = conv2d(h, b.conv1.weight, b.conv1.bias, add, padding=1)
        h = group_norm_silu(h, b.norm2.num_groups, b.norm2.weight, b.norm2.bias, None, b.norm2.eps)
        return conv2d(h, b.conv2.weight, b.conv2.bias, None, shortcut, padding=1)


class TransformerBlock(nn.Module):
    """A Diffusers BasicTransformerBlock: packed QKV and text KV, residuals in epilogues and norms."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.qkv, _ = pack_linears(block.attn1.to_q, block.attn1.to_k, block.attn1.to_v)
        self.text_kv, _ = pack_linears(block.attn2.to_k, block.attn2.to_v)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        b = self.block
        h = b.norm1(x)
        h = attention(*split_heads(linear_residual(h, self.qkv), 3, HEADS)).flatten(2)
        h = linear_residual(h, b.attn1.to_out[0].weight, b.attn1.to_out[0].bias)
        h, x = layer_norm_residual(h, x, b.norm2.weight, b.norm2.bias, b.norm2.eps)
        q = linear_residual(h, b.attn2.to_q.weight).unflatten(2, (HEADS, -1))
        h = attention(q, *split_heads(linear_residual(text, self.text_kv), 2, HEADS)).flatten(2)
        h = linear_residual(h, b.attn2.to_out[0].weight, b.attn2.to_out[0].bias)
        h, x = layer_norm_residual(h, x, b.norm3.weight, b.norm3.bias, b.norm3.eps)
        projection, out = b.ff.net[0].proj, b.ff.net[2]
        h = geglu(linear_residual(h, projection.weight), projection.bias)
        return linear_residual(h, out.weight, out.bias, x)


def _resblock():
    from diffusers.models.resnet import ResnetBlock2D

    stock = ResnetBlock2D(in_channels=C, out_channels=2 * C, temb_channels=TEXT, groups=8)
    x = torch.randn(2, C, 6, 5).contiguous(memory_format=torch.channels_last)
    return stock, ResBlock, (x, torch.randn(2, TEXT))


def _transformer():
    from diffusers.models.attention import BasicTransformerBlock

    class Stock(BasicTransformerBlock):
        def forward(self, x, text):
            return super().forward(x, encoder_hidden_states=text)

    stock = Stock(C, HEADS, C // HEADS, cross_attention_dim=TEXT)
    return stock, TransformerBlock, (torch.randn(2, 30, C), torch.randn(2, 7, TEXT))


@pytest.fixture(params=[_resblock, _transformer], ids=["resblock", "transformer"])
def block(request, device):
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    stock, ours, inputs = request.param()
    stock = stock.eval().requires_grad_(False).to(device)
    return stock, ours, [tensor.to(device) for tensor in inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_as_near_to_float64_as_stock(block, dtype):
    stock, ours, inputs = block
    stock, inputs = stock.to(dtype), [tensor.to(dtype) for tensor in inputs]
    exact = copy.deepcopy(stock).double()(*(tensor.double() for tensor in inputs))
    numerics.require(f"the block in {dtype}", ours(stock)(*inputs), exact, stock(*inputs))


def test_compiles_as_one_graph(block):
    """fullgraph raises at the first graph break."""
    stock, ours, inputs = block
    eager = ours(stock)
    backend = "inductor" if inputs[0].is_cuda else "aot_eager"
    compiled = torch.compile(eager, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), eager(*inputs))


def test_gradients_flow_through_every_op(block):
    """In float64, so that no rounding stands between the two."""
    stock, ours, inputs = block
    stock = stock.double().requires_grad_(True)
    wanted = [tensor.double().requires_grad_() for tensor in inputs]
    names = [name for name, _ in stock.named_parameters()]
    expected = torch.autograd.grad(stock(*wanted).square().sum(), [*wanted, *stock.parameters()])
    found = torch.autograd.grad(ours(stock)(*wanted).square().sum(), [*wanted, *stock.parameters()])
    for name, a, b in zip(["x", "condition", *names], found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, n=name: f"{n}: {text}")
