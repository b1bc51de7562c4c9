"""Block forwards against the host's own: the exactness rule, and when the host's own is called."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from functools import wraps

import pytest
import torch
from a1111_world import FAKE_LDM, SmallVae, place_package, randomise, real_or_skip, small_unet
from torch import nn

from rocm_sd.integrations.a1111 import transformer_blocks, unet_blocks, vae_blocks
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.plain_layers import is_of
from rocm_sd.rewrite.apply import apply, undo

ALL = (*unet_blocks.RULES, *transformer_blocks.RULES, *vae_blocks.RULES)
OPS = ("conv2d", "group_norm_silu", "upsample_conv2d", "upsample")
SOURCES = {
    "fake-ldm": lambda: place_package("ldm", FAKE_LDM),
    "fake-sgm": lambda: place_package("sgm", FAKE_LDM),
    "real-ldm": lambda: place_package("ldm", real_or_skip("ldm")),
    "real-sgm": lambda: place_package("sgm", real_or_skip("sgm")),
}


@pytest.fixture(params=SOURCES)
def package(request, as_new):
    return SOURCES[request.param]()


@pytest.fixture
def fake(as_new):
    return SOURCES["fake-ldm"]()


@pytest.fixture(autouse=True)
def ops_are_asked(monkeypatch):
    """On a CPU the forwards leave small pictures to the host, unless the settings name an implementation."""
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))


def unet_inputs(dtype=torch.float32, size=(8, 8), classes=False):
    generator = torch.Generator().manual_seed(11)
    shapes = {"x": (2, 4, *size), "context": (2, 7, 24), "y": (2, 16)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if not classes:
        del made["y"]
    return {"timesteps": torch.tensor([7.0, 801.0]), **made}


def counting(monkeypatch, kind):
    """How often the class's own forward is called."""
    calls = []
    original = kind.forward

    @wraps(original)
    def forward(self, *args, **kwargs):
        calls.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    return calls


def run(model, *args, **kwargs):
    with torch.no_grad(), PERMISSION.a_whole_call():
        return model(*args, **kwargs)


def error(result, exact):
    return float((result.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("more", [{}, {"use_linear_in_transformer": True}], ids=["conv", "linear"])
def test_a_unet_gives_what_the_hosts_gives(package, monkeypatch, more):
    unet = small_unet(package, **more)
    inputs = unet_inputs()
    stock = run(unet, **inputs)
    changes = apply(unet, ALL)
    assert {change.rule for change in changes} == {
        "resblock", "upsample", "downsample", "spatial_transformer", "transformer",
    }  # fmt: skip
    assert all(change.replaced for change in changes)
    kinds = {type(module) for module in unet.modules() if "forward" in module.__dict__}
    calls = [counting(monkeypatch, kind) for kind in kinds]
    ours = run(unet, **inputs)
    assert not any(calls), "the host's own forwards were called"
    # The host's own computes parts in float32 whatever the weights are: two ways of float32 are compared.
    assert error(ours, stock) <= 2e-6
    undo(changes)
    assert torch.equal(run(unet, **inputs), stock)
    assert not any("forward" in module.__dict__ for module in unet.modules())


def test_a_unet_under_autocast_is_as_exact_as_the_hosts(package, monkeypatch):
    """The host's default: half precision weights and autocast; on a CPU that is bfloat16."""
    unet = small_unet(package)
    inputs = unet_inputs(torch.bfloat16)
    exact = run(unet, **{name: value.float() for name, value in inputs.items()})
    half = copy.deepcopy(unet).to(torch.bfloat16)
    monkeypatch.setattr(nn.GroupNorm, "forward", float_group_norm)
    with torch.autocast("cpu", torch.bfloat16):
        stock = run(half, **inputs)
    monkeypatch.undo()
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))
    apply(half, ALL)
    calls = counting(monkeypatch, package.unet.ResBlock)
    calls += counting(monkeypatch, package.attention.BasicTransformerBlock)
    half.out[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(half, **inputs)
        assert torch.is_autocast_enabled("cpu")
    assert not calls
    assert ours.dtype == stock.dtype == torch.bfloat16
    assert error(ours, exact) <= 2 * error(stock, exact) + 1e-3


def float_group_norm(self, x):
    """A GPU's autocast takes this op and its weights to float32; a CPU's leaves the weights, and torch refuses them."""
    return nn.functional.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)


@pytest.mark.parametrize(("source", "depth"), [("fake-sgm", 1), ("real-sgm", 2)])
def test_a_unet_of_sdxl_with_its_classes(as_new, source, depth):
    unet = small_unet(
        SOURCES[source](), num_classes="sequential", adm_in_channels=16, transformer_depth=depth,
        use_linear_in_transformer=True,
    )  # fmt: skip
    inputs = unet_inputs(classes=True)
    stock = run(unet, **inputs)
    apply(unet, ALL)
    assert error(run(unet, **inputs), stock) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_vae_is_as_exact_as_the_hosts(package, dtype):
    vae = randomise(SmallVae(package)).eval().to(dtype)
    x = torch.randn(1, 4, 9, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = run(copy.deepcopy(vae).double(), x.double())
    stock = run(vae, x)
    changes = apply(vae, ALL)
    assert [change.rule for change in changes] == [
        "vae_resblock", "vae_attention", "vae_upsample", "vae_downsample", "vae_resblock",
    ]  # fmt: skip
    ours = run(vae, x)
    assert error(ours, exact) <= 2 * error(stock, exact) + 1e-6
    undo(changes)
    assert torch.equal(run(vae, x), stock)


@pytest.mark.parametrize("what", ["grad", "broken", "not-permitted", "other-dtype"])
def test_blocks_are_the_hosts_where_ours_may_not(fake, monkeypatch, what):
    unet = small_unet(fake)
    inputs = unet_inputs()
    stock = run(unet, **inputs)
    apply(unet, ALL)
    calls = counting(monkeypatch, fake.unet.ResBlock)
    around = nullcontext()
    if what == "broken":
        monkeypatch.setattr(PERMISSION, "broken", "it was")
    if what == "not-permitted":
        monkeypatch.setattr(PERMISSION, "unet", "it may not")
    if what == "other-dtype":
        around = torch.autocast("cpu", torch.bfloat16)
    with around:
        ours = unet(**inputs).detach() if what == "grad" else run(unet, **inputs)
    assert len(calls) == 8
    if what != "other-dtype":
        assert torch.equal(ours, stock)


def a_resblock(package, **more):
    return randomise(package.unet.ResBlock(64, 16, 0, **more)).eval(), torch.randn(2, 64, 6, 4), torch.randn(2, 16)


@pytest.mark.parametrize(
    "more",
    [{}, {"up": True}, {"down": True}, {"out_channels": 32}, {"use_scale_shift_norm": True}],
    ids=["same", "up", "down", "narrower", "scale-shift"],
)
def test_every_kind_of_resblock(package, more):
    block, x, emb = a_resblock(package, **more)
    stock = run(block, x, emb)
    (change, *_) = apply(block, ALL)
    assert change.replaced == ("use_scale_shift_norm" not in more)
    assert error(run(block, x, emb), stock) < 2e-6


def test_autocast_to_another_dtype_is_the_hosts_affair(fake, monkeypatch):
    block, x, emb = a_resblock(fake)
    apply(block, ALL)
    calls = counting(monkeypatch, fake.unet.ResBlock)
    with torch.autocast("cpu", torch.bfloat16):
        run(block, x, emb)
    assert len(calls) == 1
    run(block, x, emb)
    assert len(calls) == 1


def test_autocast_to_its_own_dtype_is_left_for_the_time_of_a_block(fake, monkeypatch):
    block, x, emb = a_resblock(fake)
    block, x = block.to(torch.bfloat16), x.to(torch.bfloat16)
    apply(block, ALL)
    seen = []
    ours = unet_blocks.norm_silu

    def looking(*args, **kwargs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return ours(*args, **kwargs)

    monkeypatch.setattr(unet_blocks, "norm_silu", looking)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(block, x, emb).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


def test_too_little_memory_is_no_reason_to_stop(fake, monkeypatch, capsys):
    block, x, emb = a_resblock(fake)
    stock = run(block, x, emb)
    apply(block, ALL)

    def fail(*_arguments, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(unet_blocks, "norm_silu", fail)
        assert torch.equal(run(block, x, emb), stock)
    assert "too little memory" in capsys.readouterr().out
    calls = counting(monkeypatch, fake.unet.ResBlock)
    run(block, x, emb)
    assert not calls


def test_a_block_that_fails_is_the_hosts_from_then_on(fake, monkeypatch, capsys):
    unet = small_unet(fake)
    inputs = unet_inputs()
    stock = run(unet, **inputs)
    apply(unet, ALL)

    def fail(*_arguments, **_named):
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setattr(unet_blocks, "norm_silu", fail)
    assert torch.equal(run(unet, **inputs), stock)
    assert torch.equal(run(unet, **inputs), stock)
    told = capsys.readouterr().out
    assert told.count("no such kernel") == 1
    assert "long story" not in told


def test_what_others_do_to_a_block_counts(fake, monkeypatch):
    """ControlNet's reference gives blocks another _forward, token merging another class, Hypertile attention another
    forward: each of them is called.
    """
    unet = small_unet(fake)
    inputs = unet_inputs()
    block = unet.middle_block[1].transformer_blocks[0]
    apply(unet, ALL)
    ours = run(unet, **inputs)
    seen = []

    def reference(self, x, context=None):
        seen.append("reference")
        return type(self)._forward(self, x, context)

    block._forward = reference.__get__(block)
    assert error(run(unet, **inputs), ours) < 1e-5
    del block._forward

    kind = type(block)

    def merging(_self, x, _context=None):
        seen.append("merged")
        return x

    merged = type("ToMeBlock", (kind,), {"_forward": merging})
    merged.__module__ = "tomesd.patch"
    block.__class__ = merged
    assert error(run(unet, **inputs), ours) > 1e-3
    block.__class__ = kind

    plain = block.attn1.forward

    def tiled(*args, **kwargs):
        seen.append("tiled")
        return plain(*args, **kwargs)

    block.attn1.forward = tiled
    assert error(run(unet, **inputs), ours) < 1e-5
    assert seen == ["reference", "merged", "tiled"]


def test_a_layer_that_is_no_plain_layer_is_called(fake):
    """Extensions wrap layers: the wrapper decides."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    unet = small_unet(fake)
    attn = unet.middle_block[1].transformer_blocks[0].attn1
    wrapped = Doubled(attn.to_q.in_features, attn.to_q.out_features, bias=False)
    wrapped.load_state_dict(attn.to_q.state_dict())
    attn.to_q = wrapped
    stock = run(unet, **unet_inputs())
    apply(unet, ALL)
    assert error(run(unet, **unet_inputs()), stock) < 1e-5


def test_seamless_textures_keep_their_padding(fake):
    """The host's tiling sets the padding of every convolution while it is on."""
    unet = small_unet(fake)
    apply(unet, ALL)
    for layer in unet.modules():
        if type(layer) is nn.Conv2d:
            layer.padding_mode = "circular"
    ours = run(unet, **unet_inputs())
    stock = small_unet(fake)
    for layer in stock.modules():
        if type(layer) is nn.Conv2d:
            layer.padding_mode = "circular"
    assert error(ours, run(stock, **unet_inputs())) < 1e-5


def test_the_fakes_have_the_layers_and_the_values_of_the_real_ones(as_new):
    folder = real_or_skip("ldm")
    fake = SOURCES["fake-ldm"]()
    ours = small_unet(fake)
    place_package("ldm", folder)
    real = SOURCES["real-ldm"]()
    theirs = small_unet(real)
    mine, others = ours.state_dict(), theirs.state_dict()
    assert {name: value.shape for name, value in mine.items()} == {name: v.shape for name, v in others.items()}
    assert error(run(ours, **unet_inputs()), run(theirs, **unet_inputs())) < 1e-5
    vae, real_vae = randomise(SmallVae(fake)), randomise(SmallVae(real))
    assert vae.state_dict().keys() == real_vae.state_dict().keys()
    x = torch.randn(1, 4, 8, 8)
    assert error(run(vae, x), run(real_vae, x)) < 1e-5


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted here")
@pytest.mark.parametrize("what", ["resblock", "transformer"])
def test_with_the_kernels_a_block_is_as_exact_as_the_hosts(fake, monkeypatch, what):
    ops = ("conv2d", "group_norm_silu", "attention", "linear_geglu", "layer_norm_residual", "linear_residual")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=triton" for op in ops))
    if what == "resblock":
        block, x, second = a_resblock(fake, out_channels=32)
    else:
        block = randomise(fake.attention.SpatialTransformer(32, 2, 16, context_dim=24)).eval()
        x, second = torch.randn(2, 32, 4, 4), torch.randn(2, 7, 24)
    exact = run(block, x, second)
    x, second, half = x.half(), second.half(), copy.deepcopy(block).half()
    norms = [module for module in half.modules() if is_of(module, "GroupNorm32")]
    for norm in norms:
        # A GPU's autocast would take its weights to float32; a CPU has none for this dtype.
        norm.float()
    stock = run(half, x, second)
    for norm in norms:
        norm.half()
    apply(half, ALL)
    ours = run(half, x, second)
    assert PERMISSION.broken is None
    assert error(ours, exact) <= 2 * error(stock, exact) + 1e-4
