from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.downsampling import Downsample2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from pipelines import tiny_unet, tiny_vae
from rocm_sd import numerics
from rocm_sd.rewrite import apply, sampling, undo
from rocm_sd.rewrite.sampling import DOWNSAMPLE, UPSAMPLE

RULES = [UPSAMPLE, DOWNSAMPLE]
NAMED = "conv2d=torch,upsample=torch,upsample_conv2d=torch"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["one op", "two ops"])
def way(request, monkeypatch):
    """Named, so that they run on a CPU too; one op where its sums of weights pay, two where not."""
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    monkeypatch.setattr(sampling, "_as_one_op", lambda _x, _weight: request.param == "one op")
    return request.param


def sampler(kind=Upsample2D, **options):
    torch.manual_seed(0)
    return laid(kind(**{"channels": 16, "use_conv": True} | options))


def laid(module):
    """As `optimize` lays convolutions out where it applies the rules."""
    return module.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def picture(batch=2, channels=16, size=(5, 7)):
    x = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def check(module, x, *arguments):
    stock, exact = module(x, *arguments), copy.deepcopy(module).double()(x.double(), *arguments)
    changes = apply(module, RULES)
    assert [c.replaced for c in changes] == [True]
    numerics.require(type(module).__name__, module(x, *arguments), exact, stock)
    undo(changes)
    assert torch.equal(module(x, *arguments), stock)


UP = {
    "plain": {},
    "other channels": {"out_channels": 24},
    "no bias": {"bias": False},
    "old name": {"name": "Conv2d_0"},
}
DOWN = {
    "plain": {},
    "other channels": {"out_channels": 24},
    "no bias": {"bias": False},
    "op": {"name": "op"},
    "encoder": {"padding": 0},
    "encoder, op": {"padding": 0, "name": "op"},
    "padding 2": {"padding": 2},
    "1x1": {"kernel_size": 1, "padding": 1},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", UP.values(), ids=UP)
def test_upsample_is_as_near_to_float64_as_stock(options, dtype, way):
    check(sampler(**options).to(dtype), picture().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", DOWN.values(), ids=DOWN)
def test_downsample_is_as_near_to_float64_as_stock(options, dtype, way):
    check(sampler(Downsample2D, **options).to(dtype), picture().to(dtype))


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (6, 8)], ids=str)
def test_sizes(size, way):
    check(sampler(), picture(size=size))
    check(sampler(Downsample2D), picture(size=size))
    if min(size) > 1:
        check(sampler(Downsample2D, padding=0), picture(size=size))


@pytest.mark.parametrize("size", [(10, 14), (9, 14), (20, 28), (3, 3)], ids=str)
def test_any_output_size(size, way):
    check(sampler(), picture(), size)
    check(sampler(), picture(), torch.Size(size))


@pytest.mark.parametrize("batch", [0, 1, 64])
def test_batches(batch, way):
    module, x = sampler(), picture(batch, size=(2, 3))
    stock = module(x)
    apply(module, RULES)
    torch.testing.assert_close(module(x), stock)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm_type": "rms_norm", "eps": 1e-5, "elementwise_affine": True}, "it begins with RMSNorm"),
        ({"use_conv_transpose": True}, "transposed"),
        ({"interpolate": False}, "does not enlarge"),
        ({"use_conv": False}, "no convolution"),
        ({"kernel_size": 5, "padding": 2}, "not 3x3 with padding 1: (5, 5)"),
        ({"kernel_size": 1, "padding": 0}, "not 3x3 with padding 1: (1, 1)"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_upsamplers_are_skipped_with_the_reason(options, reason):
    module = sampler(**options)
    (change,) = apply(module, RULES)
    assert reason in change.why_skipped
    assert "forward" not in module.__dict__


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm_type": "ln_norm", "eps": 1e-5, "elementwise_affine": True}, "it begins with LayerNorm"),
        ({"use_conv": False}, "no convolution"),
        ({"kernel_size": 5}, "(5, 5)"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_downsamplers_are_skipped_with_the_reason(options, reason):
    (change,) = apply(sampler(Downsample2D, **options), RULES)
    assert reason in change.why_skipped


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"padding_mode": "circular"}, "pads with circular"),
        ({"groups": 2}, "2 groups"),
        ({"dilation": 2}, "dilation (2, 2)"),
    ],
    ids=["circular", "groups", "dilation"],
)
@pytest.mark.parametrize("kind", [Upsample2D, Downsample2D])
def test_unusual_convolutions_are_skipped(kind, change, reason):
    module = sampler(kind)
    stride = 2 if kind is Downsample2D else 1
    module.conv = nn.Conv2d(16, 16, 3, stride, **{"padding": 1} | change)
    (found,) = apply(module, RULES)
    assert reason in found.why_skipped


class LoRA(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.scale = 1.5

    def forward(self, x):
        return self.base_layer(x) * self.scale


@pytest.mark.parametrize("kind", [Upsample2D, Downsample2D])
def test_what_happens_to_the_layer_after_apply_is_seen(kind, way):
    module, x = sampler(kind), picture()
    apply(module, RULES)
    plain, before = module.conv, module(x)
    # A LoRA is loaded, unloaded, fused; then the textures become seamless.
    module.conv = LoRA(plain)
    torch.testing.assert_close(module(x), before * 1.5)
    module.conv = plain
    assert torch.equal(module(x), before)
    plain.weight.data += torch.randn(plain.weight.shape)
    fused = module(x)
    torch.testing.assert_close(fused, kind.forward(module, x))
    assert (fused - before).abs().max() > 0.1
    plain.padding_mode, plain._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]
    torch.testing.assert_close(module(x), kind.forward(module, x))
    assert not torch.allclose(module(x), fused)


@pytest.mark.parametrize("kind", [Upsample2D, Downsample2D])
def test_wrong_channels_are_stocks_error(kind, way):
    module = sampler(kind)
    apply(module, RULES)
    with pytest.raises(AssertionError):
        module(picture(channels=8))


@pytest.mark.parametrize("kind", [Upsample2D, Downsample2D])
def test_gradients_autocast_and_deprecated_arguments_are_stocks(kind, way):
    module, x = sampler(kind).requires_grad_(True), picture()
    stock = torch.autograd.grad(module(x).square().sum(), module.conv.weight)
    apply(module, RULES)
    assert torch.equal(torch.autograd.grad(module(x).square().sum(), module.conv.weight)[0], stock[0])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert module(x).dtype == torch.bfloat16
    with pytest.warns(FutureWarning, match="scale"):
        module(x, scale=1.0)


@pytest.mark.parametrize("kind", [Upsample2D, Downsample2D])
def test_compiles_as_one_graph(kind, monkeypatch):
    monkeypatch.setattr(sampling, "through_op", lambda _name, _x: True)
    monkeypatch.setattr("rocm_sd.rewrite.convolutions.through_op", lambda _name, _x: True)
    module, x = sampler(kind), picture()
    changes = apply(module, RULES)
    eager = module(x)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), eager)
    undo(changes)


def test_sums_of_weights_pay_on_large_pictures_only(monkeypatch):
    x, weight = picture(), torch.zeros(16, 16, 3, 3)
    assert not sampling._as_one_op(x, weight)
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "upsample_conv2d=parity_library")
    assert not sampling._as_one_op(x, weight)
    assert sampling._as_one_op(torch.empty(2, 16, 64, 64), weight)
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "upsample_conv2d=torch")
    assert not sampling._as_one_op(torch.empty(2, 16, 64, 64), weight)


def test_small_models(way):
    torch.manual_seed(0)
    unet = laid(tiny_unet())
    # 9 is no multiple of two: the UNet then names the size that it wants.
    x, text = torch.randn(2, 4, 9, 7), torch.randn(2, 5, 32)
    exact, stock = copy.deepcopy(unet).double()(x.double(), 7, text.double()).sample, unet(x, 7, text).sample
    changes = apply(unet, RULES)
    assert [c.kind for c in changes if c.replaced] == ["Downsample2D", "Upsample2D"]
    numerics.require("unet", unet(x, 7, text).sample, exact, stock)
    undo(changes)
    assert torch.equal(unet(x, 7, text).sample, stock)
    vae = laid(tiny_vae())
    exact = copy.deepcopy(vae).double()
    image, latents = torch.randn(1, 3, 10, 15), torch.randn(1, 4, 5, 7)
    stock = vae.encode(image).latent_dist.mean, vae.decode(latents).sample
    assert sum(c.replaced for c in apply(vae, RULES)) == 2
    numerics.require(
        "encode", vae.encode(image).latent_dist.mean, exact.encode(image.double()).latent_dist.mean, stock[0]
    )
    numerics.require("decode", vae.decode(latents).sample, exact.decode(latents.double()).sample, stock[1])
