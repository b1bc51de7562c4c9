"""Small transformer blocks of Diffusers, and what tests of their rules do with them."""

from __future__ import annotations

from types import FunctionType

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from rocm_sd.rewrite import apply
from rocm_sd.rewrite.spatial_transformer import RULE as SPATIAL_TRANSFORMER
from rocm_sd.rewrite.transformer import RULE as TRANSFORMER

RULES = [TRANSFORMER, SPATIAL_TRANSFORMER]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
C, HEADS, TEXT = 64, 2, 48


def block(**options) -> BasicTransformerBlock:
    torch.manual_seed(0)
    module = BasicTransformerBlock(C, HEADS, C // HEADS, **{"cross_attention_dim": TEXT} | options).eval()
    for norm in (module.norm1, module.norm2, module.norm3):
        # Fresh norms are 1 and 0, and would hide a weight that is not used.
        for parameter in [] if norm is None else norm.parameters():
            nn.init.normal_(parameter, mean=0.5)
    return module


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return draw(2, 15, C, dtype=dtype)


def text(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return draw(2, 7, TEXT, seed=2, dtype=dtype)


def replaced(module: nn.Module) -> list:
    changes = apply(module, RULES)
    assert changes
    assert all(c.replaced for c in changes), [c.why_skipped for c in changes]
    return changes


def stock_calls(monkeypatch, cls: type[nn.Module]) -> list[nn.Module]:
    """The instances whose class's own forward ran. The function stays the same one: another would be noticed."""
    calls = []
    forward = cls.forward
    original = FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    original.__kwdefaults__ = forward.__kwdefaults__

    def counting(self, *args, **kwargs):
        _counted[type(self).forward].append(self)  # noqa: F821 -- a global of the module whose forward this is
        return _originals[type(self).forward](self, *args, **kwargs)  # noqa: F821

    for name, value in (("_counted", calls), ("_originals", original)):
        monkeypatch.setitem(forward.__globals__, name, {**forward.__globals__.get(name, {}), forward: value})
    monkeypatch.setattr(forward, "__code__", counting.__code__)
    for name in ("__defaults__", "__kwdefaults__"):
        monkeypatch.setattr(forward, name, None)
    return calls


def spatial(**options) -> Transformer2DModel:
    torch.manual_seed(0)
    config = {"num_attention_heads": HEADS, "attention_head_dim": C // HEADS, "in_channels": C, "norm_num_groups": 8}
    module = Transformer2DModel(**config | {"cross_attention_dim": TEXT} | options).eval()
    nn.init.normal_(module.norm.weight, mean=0.5)
    nn.init.normal_(module.norm.bias)
    return module
