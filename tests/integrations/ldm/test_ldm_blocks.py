"""Block forwards against the host's own, in every host of ldm's classes: how exact they are, and when it is called."""

from __future__ import annotations

import copy
import os
from functools import wraps

import pytest
import torch
from ldm_hosts import FAKES, HOSTS, error, picture, run, whole
from torch import nn

from rocm_sd import numerics
from rocm_sd.integrations.ldm import blocks
from rocm_sd.ops import OPS
from rocm_sd.rewrite import sampling


@pytest.fixture(params=HOSTS)
def host(request, as_new):
    return HOSTS[request.param]()


@pytest.fixture(params=FAKES)
def fake(request, as_new):
    return HOSTS[request.param]()


@pytest.fixture(autouse=True)
def ops_are_asked(monkeypatch):
    """On a CPU the forwards leave pictures to the host, unless the settings name an implementation."""
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))


def counting(monkeypatch, *kinds):
    """How often the classes' own forwards are called."""
    calls = []

    def counted(kind):
        original = kind.forward

        @wraps(original)
        def forward(self, *args, **kwargs):
            calls.append(type(self).__name__)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)

    for kind in kinds:
        counted(kind)
    return calls


def kinds_replaced(module):
    return {type(part) for part in module.modules() if "forward" in part.__dict__}


def check(host, module, *args, **options):
    """The replaced module against the host's own and against float64; none of its own forwards is called."""
    stock = run(host, module, *args)
    exact = run(host, copy.deepcopy(module).double(), *map(doubled, args))
    changes = host.replace(module)
    assert changes
    assert all(change.replaced for change in changes), changes
    with pytest.MonkeyPatch.context() as patch:
        calls = counting(patch, *kinds_replaced(module) - {nn.Sequential})
        ours = run(host, module, *args, **options)
    assert not calls, "the host's own forwards were called"
    assert host.failure() is None
    assert ours.dtype == stock.dtype
    numerics.require(type(module).__name__, ours, exact, stock)
    host.undo(changes)
    assert torch.equal(run(host, module, *args), stock)
    assert not kinds_replaced(module)
    return {change.rule for change in changes}


def doubled(value):
    return [one.double() for one in value] if isinstance(value, list) else value.double()


def is_left(host, module, monkeypatch, *args, **kwargs):
    """Whether the host's own forward does the work of the replaced module, and nothing has failed."""
    calls = counting(monkeypatch, type(module))
    run(host, module, *args, **kwargs)
    assert host.failure() is None
    return bool(calls)


@pytest.mark.parametrize("linear", [False, True], ids=["conv", "linear"])
def test_a_unet_gives_what_the_hosts_gives(host, linear):
    rules = check_unet(host, **({"use_linear_in_transformer": True} if linear else {}))
    assert rules - {"norm_out"} == {"resblock", "upsample", "downsample", "spatial_transformer", "transformer"}


def check_unet(host, **more):
    unet, inputs = host.unet(**more), host.unet_inputs()
    stock = run(host, unet, **inputs)
    changes = host.replace(unet)
    assert all(change.replaced for change in changes)
    with pytest.MonkeyPatch.context() as patch:
        calls = counting(patch, *kinds_replaced(unet) - {nn.Sequential})
        ours = run(host, unet, **inputs, **host.options)
    assert not calls, "the host's own forwards were called"
    # The host's own computes parts in float32 whatever the weights are: two ways of float32 are compared.
    assert error(ours, stock) <= 2e-6
    host.undo(changes)
    assert torch.equal(run(host, unet, **inputs), stock)
    assert not kinds_replaced(unet)
    return {change.rule for change in changes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_vae_is_as_exact_as_the_hosts(host, dtype):
    vae, x = host.vae().to(dtype), picture(1, 4, 9, 6, dtype=dtype)
    assert check(host, vae, x) == {"vae_resblock", "vae_attention", "vae_upsample", "vae_downsample"}


@pytest.mark.parametrize(
    "more",
    [{}, {"up": True}, {"down": True}, {"out_channels": 32}, {"use_scale_shift_norm": True}],
    ids=["same", "up", "down", "narrower", "scale-shift"],
)
def test_every_kind_of_resblock(host, more):
    block, x, emb = host.resblock(**more), picture(2, 64, 6, 4), picture(2, 16)
    stock = run(host, block, x, emb)
    (change, *_) = host.replace(block)
    assert change.replaced == ("use_scale_shift_norm" not in more)
    assert error(run(host, block, x, emb), stock) < 2e-6


def test_samplers(host):
    x = picture(2, 32, 5, 7)
    assert check(host, host.upsample(), x) == {"upsample"}
    assert check(host, host.downsample(), x) == {"downsample"}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_spatial_transformer_with_a_text_for_each_block(fake, depth):
    module, x = fake.spatial(depth=depth), picture(2, 32, 4, 5)
    texts = [picture(2, 7, 24, seed=seed) for seed in range(depth)]
    assert check(fake, module, x, texts, **fake.options) == {"spatial_transformer", "transformer"}


def test_fewer_texts_than_blocks_are_the_hosts_affair(fake):
    module, x, text = fake.spatial(depth=2), picture(2, 32, 4, 5), picture(2, 7, 24)
    # The original takes one text for one block; in ComfyUI one text is for all blocks.
    original = type(module).__module__.startswith("ldm.")
    stock = None if original else run(fake, module, x, text)
    fake.replace(module)
    for given in ([text], text) if original else ([text],):
        with pytest.raises(IndexError):
            run(fake, module, x, given, **fake.options)
    if not original:
        assert error(run(fake, module, x, text, **fake.options), stock) < 2e-6
    assert fake.failure() is None


def test_text_of_another_dtype_is_brought_to_the_blocks(fake):
    (block,) = fake.spatial().transformer_blocks
    x, text = picture(2, 20, 32), picture(2, 7, 24)
    exact = run(fake, block, x, text)
    half = block.to(torch.bfloat16)
    fake.replace(half)
    ours = run(fake, half, x.to(torch.bfloat16), text, **fake.options)
    assert fake.failure() is None
    assert ours.dtype == torch.bfloat16
    assert error(ours, exact) < 2e-2


def test_text_that_is_no_tensor_of_the_device_is_the_hosts_affair(fake, monkeypatch):
    (block,) = fake.spatial().transformer_blocks
    x, text = picture(2, 20, 32), picture(2, 7, 24)
    fake.replace(block)
    assert not is_left(fake, block, monkeypatch, x, text, **fake.options)
    assert not is_left(fake, block, monkeypatch, x, context=text, **fake.options)
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(fake, block, x, text.to("meta"), **fake.options)
    assert fake.failure() is None


# Each of these is the host's to do, and each was looked at by one of the hosts' rules only.
def _drop_out(block, x, emb):
    block.out_layers[2].p = 0.5
    block.train()
    return x, emb


def _other_layout(block, x, emb):
    block.in_layers[2].weight.data = block.in_layers[2].weight.data.contiguous()
    return x, emb


def _embedding_of_a_video(_block, x, emb):
    return x, emb[:, None].expand(-1, 1, -1)


def _padding(block, x, emb):
    block.out_layers[3].padding_mode = "circular"
    return x, emb


def _other_product(block, x, emb):
    layer = block.in_layers[2]
    layer._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, 2 * weight, bias, padding=1)
    return x, emb


def _hook_of(name):
    def hook(block, x, emb):
        block.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: 2 * output)
        return x, emb

    hook.__name__ = name
    return hook


HOOKED = (
    "in_layers", "in_layers.0", "in_layers.1", "in_layers.2", "out_layers", "out_layers.0", "out_layers.1",
    "out_layers.2", "out_layers.3", "emb_layers", "emb_layers.0", "emb_layers.1",
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [_drop_out, _other_layout, _embedding_of_a_video, _padding, _other_product, *map(_hook_of, HOOKED)],
    ids=lambda change: change.__name__,
)
def test_what_keeps_a_resblock_to_the_host(fake, monkeypatch, change):
    block, x, emb = fake.resblock(), picture(2, 64, 6, 4), picture(2, 16)
    fake.replace(block)
    assert not is_left(fake, block, monkeypatch, x, emb)
    given = change(block, x, emb)
    calls = counting(monkeypatch, type(block))
    torch.manual_seed(3)
    try:
        ours = run(fake, block, *given)
    except RuntimeError:
        # A UNet's block takes no such embedding: the host says so.
        assert change is _embedding_of_a_video
        ours = None
    assert calls
    assert fake.failure() is None
    if ours is None:
        return
    torch.manual_seed(3)
    assert torch.equal(ours, run(fake, block.__class__.forward.__get__(block), *given))


def test_an_embedding_of_another_dtype_is_brought_to_the_blocks(fake):
    block, x, emb = fake.resblock(), picture(2, 64, 6, 4), picture(2, 16)
    exact = run(fake, block, x, emb)
    half = block.to(torch.bfloat16)
    fake.replace(half)
    ours = run(fake, half, x.to(torch.bfloat16), emb)
    assert fake.failure() is None
    assert ours.dtype == torch.bfloat16
    assert error(ours, exact) < 2e-2


@pytest.mark.parametrize("name", ["in_layers.2", "out_layers.3", "emb_layers.1", "in_layers.0"])
def test_a_bias_of_another_dtype_is_the_hosts_affair(fake, monkeypatch, name):
    block, x, emb = fake.resblock(), picture(2, 64, 6, 4), picture(2, 16)
    fake.replace(block)
    layer = block.get_submodule(name)
    layer.bias.data = layer.bias.data.double()
    calls = counting(monkeypatch, type(block))
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        run(fake, block, x, emb)
    assert calls
    assert fake.failure() is None


def test_a_block_that_enlarges_a_large_batch_is_the_hosts(fake, monkeypatch):
    block, emb = fake.resblock(up=True), picture(64, 16)
    fake.replace(block)
    assert is_left(fake, block, monkeypatch, picture(64, 64, 2, 1), emb)
    monkeypatch.undo()
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))
    assert not is_left(fake, block, monkeypatch, picture(63, 64, 2, 1), emb[:63])


def test_large_batches_and_pictures_are_enlarged_by_the_host(fake, monkeypatch):
    """Torch's kernel for channels-last fails on them."""
    for block in (fake.upsample(), fake.vae().up):
        channels = block.conv.in_channels
        fake.replace(block)
        with monkeypatch.context() as patch:
            assert not is_left(fake, block, patch, picture(63, channels, 1, 1))
        with monkeypatch.context() as patch:
            assert is_left(fake, block, patch, picture(64, channels, 1, 1))
    layer = fake.upsample().conv
    with torch.no_grad():
        meta = torch.empty(8, 32, 2048, 2048, device="meta")
        assert sampling.doubles(layer, meta)
        assert not sampling.doubles(layer, torch.empty(8, 32, 2048, 2049, device="meta"))


def test_with_ops_that_are_stock_torch_a_cpu_is_worth_it_where_the_policy_says_so(fake, monkeypatch):
    monkeypatch.delenv("ROCM_SD_IMPLEMENTATION")
    block, emb = fake.resblock(), picture(1, 16)
    fake.replace(block)
    with monkeypatch.context() as patch:
        assert is_left(fake, block, patch, picture(1, 64, 63, 64), emb)
    assert is_left(fake, block, monkeypatch, picture(1, 64, 64, 64), emb) is not fake.policy.works_on_cpu


def test_an_empty_batch_is_the_hosts(fake, monkeypatch):
    block = fake.resblock()
    fake.replace(block)
    assert is_left(fake, block, monkeypatch, picture(0, 64, 6, 4), picture(0, 16))


@pytest.mark.parametrize("way", ["one op", "two ops"])
def test_both_ways_to_enlarge(fake, monkeypatch, way):
    monkeypatch.setattr(sampling, "_as_one_op", lambda _x, _weight: way == "one op")
    check(fake, fake.upsample(), picture(2, 32, 5, 7))
    check(fake, fake.vae().up, picture(2, 64, 5, 7))


def test_a_map_of_another_layout_is_the_hosts(fake, monkeypatch):
    module, text = fake.spatial(), picture(2, 7, 24)
    fake.replace(module)
    assert is_left(fake, module, monkeypatch, picture(2, 32, 4, 5).contiguous(), text, **fake.options)


def test_gradients_are_the_hosts(fake, monkeypatch):
    unet, inputs = fake.unet(), fake.unet_inputs()
    stock = run(fake, unet, **inputs)
    fake.replace(unet)
    kinds = kinds_replaced(unet) - {nn.Sequential}
    calls = counting(monkeypatch, *kinds)
    with fake.captured():
        ours = unet(**inputs, **fake.options)
    assert torch.equal(ours, stock)
    assert set(calls) == {kind.__name__ for kind in kinds}


def test_a_compiled_block_is_the_hosts(fake):
    block, x, emb = fake.resblock(), picture(2, 64, 6, 4), picture(2, 16)
    stock = run(fake, block, x, emb)
    fake.replace(block)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(fake, compiled, x, emb), stock)
    assert fake.failure() is None


def test_transformers_do_their_work_in_captured_calls_only(fake, monkeypatch):
    module, x, text = fake.spatial(), picture(2, 32, 4, 5), picture(2, 7, 24)
    fake.replace(module)
    calls = counting(monkeypatch, *kinds_replaced(module))
    run(fake, module, x, text, **fake.options)
    assert not calls
    with torch.no_grad():
        module(x, text, **fake.options)
    kinds = {"spatial_transformer": "SpatialTransformer", "transformer": "BasicTransformerBlock"}
    assert "transformer" in fake.policy.in_captured_calls
    assert set(calls) == {kinds[rule] for rule in fake.policy.in_captured_calls}


def test_autocast_to_another_dtype_is_the_hosts(fake, monkeypatch):
    block, x, emb = fake.resblock(), picture(2, 64, 6, 4), picture(2, 16)
    fake.replace(block)
    with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patch:
        assert is_left(fake, block, patch, x, emb)
    assert not is_left(fake, block, monkeypatch, x, emb)


def test_a_block_that_fails_is_the_hosts_from_then_on(fake, monkeypatch):
    unet, inputs = fake.unet(), fake.unet_inputs()
    stock = run(fake, unet, **inputs)
    fake.replace(unet)
    tried = []

    def fail(*_arguments, **_named):
        tried.append(1)
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setattr(blocks, "plain_norm_silu", fail)
    assert error(run(fake, unet, **inputs, **fake.options), stock) <= 2e-6
    assert "no such kernel" in fake.failure()
    assert "long story" not in fake.failure()
    first = len(tried)
    assert error(run(fake, unet, **inputs, **fake.options), stock) <= 2e-6
    assert len(tried) == first, "tried again"


def test_an_attention_of_somebody_else_is_called(fake):
    """Hypertile and others give an attention another forward."""
    module, x, text = fake.spatial(), picture(2, 32, 4, 5), picture(2, 7, 24)
    stock = run(fake, module, x, text)
    fake.replace(module)
    attn, seen = module.transformer_blocks[0].attn1, []
    plain = attn.forward

    def tiled(*args, **kwargs):
        seen.append(1)
        return plain(*args, **kwargs)

    attn.forward = tiled
    assert error(run(fake, module, x, text, **fake.options), stock) < 1e-5
    assert seen == [1]


def test_a_layer_that_is_no_plain_layer_is_called(fake):
    """Extensions wrap layers: the wrapper decides."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for name in ("attn1.to_q", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"):
        module, x, text = fake.spatial(), picture(2, 32, 4, 5), picture(2, 7, 24)
        module.transformer_blocks[0].get_submodule(name).__class__ = Doubled
        stock = run(fake, module, x, text)
        fake.replace(module)
        assert error(run(fake, module, x, text, **fake.options), stock) < 1e-5


INSIDE = (
    "norm1", "attn1", "attn1.to_q", "attn1.to_out", "norm2", "attn2.to_v", "attn2.to_out.0", "attn2.to_out.1", "norm3",
    "ff", "ff.net", "ff.net.0", "ff.net.0.proj", "ff.net.1", "ff.net.2",
)  # fmt: skip


@pytest.mark.parametrize("place", INSIDE)
def test_hooks_inside_a_transformer_block_run(fake, place):
    (block,) = fake.spatial().transformer_blocks
    x, text = picture(2, 20, 32), picture(2, 7, 24)
    fake.replace(block)
    plain = run(fake, block, x, text, **fake.options)
    block.get_submodule(place).register_forward_hook(lambda _module, _inputs, output: 2 * output)
    ours = run(fake, block, x, text, **fake.options)
    with whole(fake):
        stock = type(block).forward(block, x, text, **fake.options)
    assert torch.equal(ours, stock)
    assert error(ours, plain) > 1e-3


def test_seamless_textures_keep_their_padding(fake):
    """The padding of every convolution is set while it is on."""

    def tile(unet):
        for layer in unet.modules():
            if isinstance(layer, nn.Conv2d):
                layer.padding_mode = "circular"

    unet, inputs = fake.unet(), fake.unet_inputs()
    zeros = run(fake, unet, **inputs)
    fake.replace(unet)
    tile(unet)
    ours = run(fake, unet, **inputs, **fake.options)
    stock = fake.unet()
    tile(stock)
    assert error(ours, run(fake, stock, **inputs)) < 1e-5
    assert error(ours, zeros) > 1e-3


# What a rule skips, with the reason that the report gives.
def _other_norm(block):
    block.in_layers[0] = nn.Identity()


def _other_activation(block):
    block.out_layers[1] = nn.GELU()


def _of_a_video(block):
    block.in_layers[2] = nn.Conv3d(64, 64, 3)


def _more_layers(block):
    block.out_layers.append(nn.Identity())


def _no_embedding(block):
    block.skip_t_emb = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block, "use_scale_shift_norm", True), "scales and shifts"),
        (_no_embedding, "no time embedding"),
        (_more_layers, "other layers"),
        (_other_norm, "not GroupNorm with SiLU"),
        (_other_activation, "not GroupNorm with SiLU"),
        (_of_a_video, "not of two dimensions"),
        (lambda block: setattr(block.in_layers[2], "groups", 2), "2 groups"),
    ],
    ids=["scale-shift", "no-embedding", "more-layers", "norm", "activation", "video", "groups"],
)
def test_resblocks_are_skipped_with_the_reason(fake, change, reason):
    block = fake.resblock()
    change(block)
    found = fake.replace(block)[0]
    assert reason in found.why_skipped
    assert "forward" not in block.__dict__


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        ("", lambda m: setattr(m, "proj_in", nn.Conv2d(32, 32, 3, padding=1)), "not of one point"),
        ("", lambda m: setattr(m, "norm", nn.BatchNorm2d(32)), "BatchNorm2d"),
        ("transformer_blocks.0", lambda m: setattr(m, "attn2", None), "no attn2"),
        ("transformer_blocks.0", lambda m: setattr(m, "attn1", nn.Linear(1, 1)), "its attn1 is a Linear"),
        ("transformer_blocks.0", lambda m: setattr(m, "is_res", False), "changes the width"),
        ("transformer_blocks.0", lambda m: setattr(m, "switch_temporal_ca_to_sa", True), "over time"),
        ("transformer_blocks.0", lambda m: m.ff.net.append(nn.Identity()), "not GEGLU"),
    ],
    ids=["proj", "norm", "no-text", "attention", "width", "time", "geglu"],
)
def test_transformers_are_skipped_with_the_reason(fake, path, change, reason):
    module = fake.spatial()
    change(module.get_submodule(path))
    (found,) = [found for found in fake.replace(module) if found.path == path]
    assert reason in found.why_skipped


def test_samplers_and_attention_are_skipped_with_the_reason(fake):
    up, down, vae = fake.upsample(), fake.downsample(), fake.vae()
    up.use_conv = down.use_conv = vae.up.with_conv = False
    vae.attn.q = nn.Conv2d(64, 64, 3, padding=1)
    vae.block.norm1 = nn.Identity()
    reasons = [found.why_skipped for module in (up, down) for found in fake.replace(module)]
    assert reasons == ["it has no convolution"] * 2
    by_path = {found.path: found.why_skipped for found in fake.replace(vae)}
    assert by_path == {
        "block": "its norms are not GroupNorm", "attn": "its projections are not of one point",
        "up": "it has no convolution", "down": None, "last": None,
    }  # fmt: skip
    other = fake.upsample()
    other.scale_factor = 4
    assert fake.replace(other)[0].why_skipped == "it enlarges by 4"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted here")
@pytest.mark.parametrize("what", ["resblock", "transformer"])
def test_with_the_kernels_a_block_is_as_exact_as_the_hosts(fake, monkeypatch, what):
    ops = ("conv2d", "group_norm_silu", "attention", "linear_geglu", "layer_norm_residual", "linear_residual")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=triton" for op in ops))
    if what == "resblock":
        block, x, second, options = fake.resblock(out_channels=32), picture(2, 64, 6, 4), picture(2, 16), {}
    else:
        block, x, second, options = fake.spatial(), picture(2, 32, 4, 4), picture(2, 7, 24), fake.options
    exact = run(fake, block, x, second)
    x, second, half = x.half(), second.half(), copy.deepcopy(block).half()
    norms = [module for module in half.modules() if type(module).__name__ == "GroupNorm32"]
    for norm in norms:
        # A GPU's autocast would take its weights to float32; a CPU has none for this dtype.
        norm.float()
    stock = run(fake, half, x, second)
    for norm in norms:
        norm.half()
    fake.replace(half)
    ours = run(fake, half, x, second, **options)
    assert fake.failure() is None
    assert error(ours, exact) <= 2 * error(stock, exact) + 1e-4


class _Louder(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def _exchanged(path, make):
    def change(block):
        parent, _, name = path.rpartition(".")
        block.get_submodule(parent)._modules[name] = make()

    change.__name__ = f"{path}-{make.__name__}"
    return change


def _another_class(block):
    kind = type(block)
    block.__class__ = type("Mine", (kind,), {"forward": lambda self, *given: 2 * kind.forward(self, *given)})


def _skips(block):
    block.skip_connection = nn.Sequential(nn.Identity(), _Louder())


def _own_method(block):
    block._forward = lambda x, emb: 2 * type(block)._forward(block, x, emb)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "change",
    [
        _exchanged("in_layers.1", _Louder), _exchanged("out_layers.1", nn.Mish), _exchanged("emb_layers.0", _Louder),
        _exchanged("out_layers.2", _Louder), _exchanged("in_layers.0", nn.Identity), _another_class, _skips,
        _own_method,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_resblock_that_was_changed_gives_what_the_hosts_gives(fake, change, when):
    x, emb = picture(2, 64, 6, 4), picture(2, 16)
    block = fake.resblock()
    if change is _own_method and not hasattr(type(block), "_forward"):
        pytest.skip("the host's block has no such method")
    expected = fake.resblock()
    change(expected)
    if when == "before":
        change(block)
    fake.replace(block)
    if when == "after":
        run(fake, block, x, emb)
        change(block)
    assert error(run(fake, block, x, emb), run(fake, expected, x, emb)) < 2e-6
    assert fake.failure() is None


def test_an_attribute_that_no_rule_knows_keeps_a_block_to_the_host(fake, monkeypatch):
    block, x, emb = fake.resblock(), picture(2, 64, 6, 4), picture(2, 16)
    fake.replace(block)
    assert not is_left(fake, block, monkeypatch, x, emb)
    block.use_scale_shift_norm = None
    assert is_left(fake, block, monkeypatch, x, emb)
