"""Block forwards in this host's own circumstances: autocast, its LoRA, other extensions, errors.

What holds in every host of ldm's classes is in tests/integrations/ldm.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import wraps

import pytest
import torch
from a1111_world import FAKE_LDM, SmallVae, place_package, randomise, real_or_skip, small_unet
from torch import nn

from rocm_sd.integrations.a1111.a1111_policy import CAPTURED_RULES, RULES
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.ldm import blocks
from rocm_sd.rewrite import apply as apply_rules

ALL = (*RULES, *CAPTURED_RULES)
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


def laid(module):
    """As the switch lays convolutions out where it applies the rules."""
    return module.to(memory_format=torch.channels_last)


def apply(module):
    return apply_rules(module, ALL)


def error(result, exact):
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def test_a_unet_under_autocast_is_as_exact_as_the_hosts(package, monkeypatch):
    """The host's default: half precision weights and autocast; on a CPU that is bfloat16."""
    unet = small_unet(package)
    inputs = unet_inputs(torch.bfloat16)
    exact = run(unet, **{name: value.float() for name, value in inputs.items()})
    half = laid(copy.deepcopy(unet).to(torch.bfloat16))
    monkeypatch.setattr(nn.GroupNorm, "forward", float_group_norm)
    with torch.autocast("cpu", torch.bfloat16):
        stock = run(half, **inputs)
    monkeypatch.undo()
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))
    apply(half)
    calls = [counting(monkeypatch, kind) for kind in (package.unet.ResBlock, package.attention.BasicTransformerBlock)]
    half.out[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(half, **inputs)
        assert torch.is_autocast_enabled("cpu")
    assert calls == [[], []]
    assert ours.dtype == stock.dtype == torch.bfloat16
    assert error(ours, exact) <= 2 * error(stock, exact) + 1e-3


def float_group_norm(self, x):
    """A GPU's autocast takes this op and its weights to float32; a CPU's leaves the weights, and torch refuses them."""
    return nn.functional.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)


@pytest.mark.parametrize(("source", "depth"), [("fake-sgm", 1), ("real-sgm", 2)])
def test_a_unet_of_sdxl_with_its_classes(as_new, source, depth):
    unet = laid(small_unet(
        SOURCES[source](), num_classes="sequential", adm_in_channels=16, transformer_depth=depth,
        use_linear_in_transformer=True,
    ))  # fmt: skip
    inputs = unet_inputs(classes=True)
    stock = run(unet, **inputs)
    apply(unet)
    assert error(run(unet, **inputs), stock) < 2e-6


@pytest.mark.parametrize("what", ["grad", "broken", "not-permitted", "other-dtype"])
def test_blocks_are_the_hosts_where_ours_may_not(fake, monkeypatch, what):
    unet = laid(small_unet(fake))
    inputs = unet_inputs()
    stock = run(unet, **inputs)
    apply(unet)
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


def test_attention_that_is_more_than_its_weights_is_the_hosts(fake, monkeypatch):
    """Hypernetworks, and the setting for scores in float32."""
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "attention=torch,layer_norm_residual=torch,linear_residual=torch")
    block = laid(randomise(fake.attention.BasicTransformerBlock(32, 2, 16, context_dim=24)).eval())
    attn = laid(randomise(fake.vae.AttnBlock(32)).eval())
    apply(block)
    apply(attn)
    calls = [counting(monkeypatch, type(module)) for module in (block, attn)]
    for expected in ([0, 0], [1, 1]):
        run(block, torch.randn(2, 20, 32), torch.randn(2, 7, 24))
        run(attn, torch.randn(1, 32, 4, 4))
        assert [len(found) for found in calls] == expected
        monkeypatch.setattr(PERMISSION, "attention", False)
    assert PERMISSION.broken is None


def a_resblock(package, **more):
    block = laid(randomise(package.unet.ResBlock(64, 16, 0, **more)).eval())
    return block, torch.randn(2, 64, 6, 4), torch.randn(2, 16)


def test_autocast_to_its_own_dtype_is_left_for_the_time_of_a_block(fake, monkeypatch):
    block, x, emb = a_resblock(fake)
    block, x = block.to(torch.bfloat16), x.to(torch.bfloat16)
    apply(block)
    seen = []
    ours = blocks.plain_norm_silu

    def looking(*args, **kwargs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return ours(*args, **kwargs)

    monkeypatch.setattr(blocks, "plain_norm_silu", looking)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(block, x, emb).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


@pytest.mark.parametrize(
    "short",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "python"],
)
def test_too_little_memory_is_no_reason_to_stop(fake, monkeypatch, capsys, short):
    block, x, emb = a_resblock(fake)
    stock = run(block, x, emb)
    apply(block)

    def fail(*_arguments, **_named):
        raise short

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "plain_norm_silu", fail)
        assert torch.equal(run(block, x, emb), stock)
    assert "too little memory" in capsys.readouterr().out
    calls = counting(monkeypatch, fake.unet.ResBlock)
    run(block, x, emb)
    assert not calls


def test_a_block_that_fails_is_the_hosts_from_then_on(fake, monkeypatch, capsys):
    unet = laid(small_unet(fake))
    inputs = unet_inputs()
    stock = run(unet, **inputs)
    apply(unet)

    def fail(*_arguments, **_named):
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setattr(blocks, "plain_norm_silu", fail)
    assert torch.equal(run(unet, **inputs), stock)
    assert torch.equal(run(unet, **inputs), stock)
    said = capsys.readouterr().out
    assert said.count("no such kernel") == 1
    assert "long story" not in said


def test_layers_of_a_vae_with_a_foreign_forward_are_called(fake, monkeypatch):
    """The UNet's are looked at before its call; a VAE's parts are called one by one."""
    vae, x, calls = laid(randomise(SmallVae(fake)).eval()), torch.randn(1, 4, 9, 6), []
    apply(vae)
    run(vae, x)
    original = nn.Conv2d.forward

    def cast(self, x):
        calls.append(self)
        return original(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", cast)
    run(vae, x)
    assert {id(layer) for layer in calls} == {id(layer) for layer in vae.modules() if isinstance(layer, nn.Conv2d)}


def test_tiling_that_is_on_when_rules_are_applied_is_no_reason_to_skip_a_block(fake, monkeypatch):
    """The next job may have none."""
    block, x, emb = a_resblock(fake)
    layers = [layer for layer in block.modules() if isinstance(layer, nn.Conv2d)]
    for layer in layers:
        layer.padding_mode = "circular"
    (change, *_) = apply(block)
    assert change.replaced
    calls = counting(monkeypatch, fake.unet.ResBlock)
    run(block, x, emb)
    assert len(calls) == 1
    for layer in layers:
        layer.padding_mode = "zeros"
    run(block, x, emb)
    assert len(calls) == 1


def test_what_others_do_to_a_block_counts(fake, monkeypatch):
    """ControlNet's reference gives blocks another _forward, token merging another class, Hypertile attention another
    forward: each of them is called.
    """
    unet = laid(small_unet(fake))
    inputs = unet_inputs()
    block = unet.middle_block[1].transformer_blocks[0]
    apply(unet)
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
