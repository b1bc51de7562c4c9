"""What a user may change in a model, before `optimize` and after it: each picture is stock's, recorded or not."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

import rocm_sd
from pipelines import require_as_exact_as_stock, small_blocks_too
from rocm_sd.engine import model_ways
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, resblock, vae_attention
from tiny_models import TEXT, unet_of, vae_of


class Swish(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


class Doubled(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self, x, *_args):
        return 2 * (x if self.inner is None else self.inner(x))


def doubling(_module, _args, output):
    return 2 * output


def halved(_module, args):
    return tuple(arg / 2 if isinstance(arg, torch.Tensor) else arg for arg in args)


def put(path, **values):
    def change(model):
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value() if callable(value) else value)

    return change


def item(path, index, make):
    def change(model):
        model.get_submodule(path)[index] = make(model.get_submodule(path)[index])

    return change


def wrapped(path, name):
    def change(model):
        owner = model.get_submodule(path)
        setattr(owner, name, Doubled(getattr(owner, name)))

    return change


def hook(path):
    def change(model):
        model.get_submodule(path).register_forward_hook(doubling)

    return change


def pre_hook(path):
    def change(model):
        model.get_submodule(path).register_forward_pre_hook(halved)

    return change


def other_class(path):
    def change(model):
        module = model.get_submodule(path)
        kind = type(module)

        def forward(self, x, *args, **kwargs):
            y = kind.forward(self, x, *args, **kwargs)
            return (2 * y[0],) if isinstance(y, tuple) else 2 * y

        module.__class__ = type("Mine", (kind,), {"forward": forward, "__module__": "mine"})

    return change


def own_forward(path):
    def change(model):
        module = model.get_submodule(path)
        inner = module.forward

        def forward(*args, **kwargs):
            y = inner(*args, **kwargs)
            return (2 * y[0],) if isinstance(y, tuple) else 2 * y

        module.forward = forward

    return change


def method(path, name):
    def change(model):
        module = model.get_submodule(path)
        inner = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: 2 * inner(*args, **kwargs))

    return change


def group_norm():
    return nn.GroupNorm(4, 32)


def rms():
    return nn.RMSNorm(8)


RES, MID = "down_blocks.0.resnets.0", "mid_block.resnets.1"
SPATIAL = "down_blocks.0.attentions.0"
BLOCK = f"{SPATIAL}.transformer_blocks.0"
ATTN, TEXT_ATTN, FF = f"{BLOCK}.attn1", f"{BLOCK}.attn2", f"{BLOCK}.ff"
DOWN, UP, UP_RES = "down_blocks.0.downsamplers.0", "up_blocks.0.upsamplers.0", "up_blocks.0.resnets.0"

UNET = {
    "res-nonlinearity": put(RES, nonlinearity=nn.Mish),
    "res-nonlinearity-subclass": put(RES, nonlinearity=Swish),
    "res-nonlinearity-hook": hook(f"{RES}.nonlinearity"),
    "res-class": other_class(RES),
    "res-nonlinearity-class": other_class(f"{RES}.nonlinearity"),
    "res-time-embedding-norm": put(RES, time_embedding_norm="none"),
    "res-norm1-identity": put(RES, norm1=nn.Identity),
    "res-norm2-identity": put(MID, norm2=nn.Identity),
    "res-norm1-groups": put(f"{RES}.norm1", num_groups=4),
    "res-norm1-eps": put(f"{RES}.norm1", eps=0.5),
    "res-norm1-hook": hook(f"{RES}.norm1"),
    "res-norm2-pre-hook": pre_hook(f"{RES}.norm2"),
    "res-conv1-wrapped": wrapped(RES, "conv1"),
    "res-conv2-hook": hook(f"{RES}.conv2"),
    "res-conv1-class": other_class(f"{RES}.conv1"),
    "res-conv1-padding": put(f"{RES}.conv1", padding_mode="circular", _reversed_padding_repeated_twice=[1, 1, 1, 1]),
    "res-conv1-product": method(f"{RES}.conv1", "_conv_forward"),
    "res-conv-shortcut-none": put("up_blocks.1.resnets.1", output_scale_factor=3.0),
    "res-output-scale": put(RES, output_scale_factor=2.0),
    "res-skip-time-act": put(RES, skip_time_act=True),
    "res-dropout": put(RES, dropout=Doubled),
    "res-dropout-hook": hook(f"{RES}.dropout"),
    "res-time-proj-wrapped": wrapped(RES, "time_emb_proj"),
    "res-time-proj-none": put(MID, time_emb_proj=None, time_embedding_norm="none"),
    "res-forward": own_forward(RES),
    "res-hook": hook(RES),
    "res-up-forward": own_forward(UP_RES),
    "res-up-nonlinearity": put(UP_RES, nonlinearity=nn.GELU),
    "attn-residual": put(ATTN, residual_connection=True),
    "attn-rescale": put(ATTN, rescale_output_factor=2.0),
    "attn-norm-q": put(ATTN, norm_q=rms),
    "attn-norm-k": put(TEXT_ATTN, norm_k=rms),
    "attn-group-norm": put(ATTN, group_norm=group_norm),
    "attn-heads": put(ATTN, heads=2),
    "attn-scale": put(ATTN, scale=0.9, processor=AttnProcessor),
    "attn-processor": put(TEXT_ATTN, processor=AttnProcessor),
    "attn-to-q-wrapped": wrapped(ATTN, "to_q"),
    "attn-to-out-hook": hook(f"{ATTN}.to_out.0"),
    "attn-dropout": item(f"{ATTN}.to_out", 1, lambda _: Doubled()),
    "attn-class": other_class(ATTN),
    "attn-hook": hook(TEXT_ATTN),
    "attn-norm-cross": put(TEXT_ATTN, norm_cross=lambda: nn.LayerNorm(TEXT)),
    "attn-forward": own_forward(TEXT_ATTN),
    "attn-batch-to-heads": put(TEXT_ATTN, processor=AttnProcessor, upcast_softmax=True),
    "ff-out-identity": item(f"{FF}.net", 2, Doubled),
    "ff-gate-identity": item(f"{FF}.net", 0, Doubled),
    "ff-dropout": item(f"{FF}.net", 1, lambda _: Doubled()),
    "ff-gate-gelu": method(f"{FF}.net.0", "gelu"),
    "ff-class": other_class(FF),
    "ff-hook": hook(f"{FF}.net.0"),
    "ff-more": lambda model: model.get_submodule(f"{FF}.net").append(Doubled()),
    "block-class": other_class(BLOCK),
    "block-norm-identity": put(BLOCK, norm2=nn.Identity),
    "block-norm-eps": put(f"{BLOCK}.norm3", eps=0.5),
    "block-norm-type": put(BLOCK, norm_type="layer_norm_i2vgen"),
    "block-cross-only": put(BLOCK, pos_embed=Doubled),
    "block-chunked": lambda model: model.get_submodule(BLOCK).set_chunk_feed_forward(4, 1),
    "block-forward": own_forward(BLOCK),
    "block-pre-hook": pre_hook(BLOCK),
    "spatial-norm": put(SPATIAL, norm=group_norm),
    "spatial-proj-hook": hook(f"{SPATIAL}.proj_in"),
    "spatial-class": other_class(SPATIAL),
    "down-conv-wrapped": wrapped(DOWN, "conv"),
    "down-class": other_class(DOWN),
    "up-conv-hook": hook(f"{UP}.conv"),
    "up-forward": own_forward(UP),
    "out-norm-groups": put("conv_norm_out", num_groups=4),
    "out-norm-class": other_class("conv_norm_out"),
    "out-act": put("", conv_act=nn.Mish),
    "out-act-class": other_class("conv_act"),
    "out-act-hook": hook("conv_act"),
    "time-embedding-hook": hook("time_embedding"),
    "freeu": lambda model: model.enable_freeu(0.9, 0.2, 1.5, 1.6),
}  # fmt: skip

VRES, VATTN = "decoder.up_blocks.0.resnets.1", "decoder.mid_block.attentions.0"
VAE = {
    "res-dropout": put(VRES, dropout=Doubled),
    "res-dropout-hook": hook(f"{VRES}.dropout"),
    "res-nonlinearity": put(VRES, nonlinearity=Swish),
    "res-nonlinearity-hook": hook(f"{VRES}.nonlinearity"),
    "res-class": other_class(VRES),
    "res-norm1-identity": put(VRES, norm1=nn.Identity),
    "res-conv1-wrapped": wrapped(VRES, "conv1"),
    "res-forward": own_forward(VRES),
    "res-output-scale": put(VRES, output_scale_factor=2.0),
    "attn-residual": put(VATTN, residual_connection=False),
    "attn-rescale": put(VATTN, rescale_output_factor=3.0),
    "attn-norm-q": put(VATTN, norm_q=lambda: nn.RMSNorm(32)),
    "attn-group-norm": put(VATTN, group_norm=None),
    "attn-dropout": item(f"{VATTN}.to_out", 1, lambda _: Doubled()),
    "attn-class": other_class(VATTN),
    "attn-to-q-hook": hook(f"{VATTN}.to_q"),
    "attn-processor": put(VATTN, processor=AttnProcessor),
    "block-forward": own_forward("decoder.up_blocks.0"),
    "block-class": other_class("decoder.up_blocks.0"),
    "mid-hook": hook("decoder.mid_block"),
    "decoder-class": other_class("decoder"),
    "decoder-conv-in-hook": hook("decoder.conv_in"),
    "out-act": put("decoder", conv_act=Swish),
    "out-act-class": other_class("decoder.conv_act"),
    "up-forward": own_forward("decoder.up_blocks.0.upsamplers.0"),
    "up-channels-last": wrapped("decoder.up_blocks.0.upsamplers.0", "conv"),
}  # fmt: skip
CHANGES = [*(("unet", name) for name in UNET), *(("vae", name) for name in VAE)]


@pytest.fixture(params=["0", "1"], ids=["one by one", "recorded"])
def recorded(request, monkeypatch):
    """Every rule there is, with recordings and without."""
    small_blocks_too(monkeypatch, request.param)
    monkeypatch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    monkeypatch.setattr(vae_attention, "_WORTH_IT_ON_CPU", 0)
    every = tuple(rule if rule.on_cpu else replace(rule, on_cpu=True) for rule in (*RULES, *RULES_FOR_GRAPHS))
    monkeypatch.setattr(model_ways, "RULES", every)
    monkeypatch.setattr(model_ways, "RULES_FOR_GRAPHS", ())
    return request.param == "1"


def model_of(kind):
    torch.manual_seed(0)
    return (unet_of("sd15") if kind == "unet" else vae_of()).requires_grad_(False)


def called(model, kind, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    latents, text = (torch.randn(*shape, generator=random).to(dtype) for shape in ((2, 4, 8, 8), (2, 7, TEXT)))
    with torch.no_grad():
        if kind == "vae":
            return model.decode(latents, return_dict=False)[0]
        return model(latents, torch.tensor(7), text, return_dict=False)[0]


def change_of(kind, name):
    return (UNET if kind == "unet" else VAE)[name]


def pictures_of(kind, change=lambda _: None):
    stock, exact = model_of(kind), model_of(kind)
    for model in (stock, exact):
        change(model)
    return called(exact.double(), kind, torch.float64), called(stock, kind)


def near(ours, exact, stock):
    # One small picture: its error is by chance a half more than stock's, or less.
    require_as_exact_as_stock([ours], [exact], [stock], times=2)


@pytest.mark.parametrize(("kind", "name"), CHANGES, ids=[f"{kind}-{name}" for kind, name in CHANGES])
def test_a_change_after_optimize_gives_stocks_picture(kind, name, recorded):
    change = change_of(kind, name)
    ours = rocm_sd.optimize(model_of(kind), level="performance")
    assert rocm_sd.report(ours).replaced
    as_it_was = [called(ours, kind) for _ in range(3)][-1]
    near(as_it_was, *pictures_of(kind))
    change(ours)
    exact, stock = pictures_of(kind, change)
    for _ in range(3):
        near(called(ours, kind), exact, stock)


@pytest.mark.parametrize(("kind", "name"), CHANGES, ids=[f"{kind}-{name}" for kind, name in CHANGES])
def test_a_change_before_optimize_gives_stocks_picture_and_comes_back(kind, name, recorded):
    change = change_of(kind, name)
    exact, stock = pictures_of(kind, change)
    ours = model_of(kind)
    change(ours)
    before = {path: {**vars(module)} for path, module in ours.named_modules()}
    rocm_sd.optimize(ours, level="performance")
    for _ in range(3):
        near(called(ours, kind), exact, stock)
    rocm_sd.restore(ours)
    assert torch.equal(called(ours, kind), stock)
    for path, module in ours.named_modules():
        assert vars(module).keys() == before[path].keys(), path
        assert vars(module).get("forward") == before[path].get("forward"), path


class Merging:
    """As tomesd: a block's class with a forward that takes what Diffusers passes by name, and no more."""

    def forward(
        self, hidden_states, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None,
        timestep=None, cross_attention_kwargs=None, class_labels=None,
    ):  # fmt: skip
        half = hidden_states[:, ::2].repeat_interleave(2, dim=1)
        return type(self).__mro__[2].forward(
            self, half, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
            cross_attention_kwargs, class_labels,
        )  # fmt: skip


def merge_tokens(model):
    for module in list(model.modules()):
        if type(module).__name__ == "BasicTransformerBlock":
            module.__class__ = type("ToMeBlock", (Merging, type(module)), {"__module__": "tomesd.patch"})


def cache_blocks(model):
    """As DeepCache: forwards that answer with what they gave in the call before, in every second call."""
    calls = []

    def wrap(module, forward, kept):
        def cached(*args, **kwargs):
            if len(calls) % 2:
                kept[:] = [forward(*args, **kwargs)]
            return kept[0]

        module.forward = cached

    inner = model.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    for block in (*model.down_blocks, *model.up_blocks):
        for module in (*getattr(block, "attentions", ()), *block.resnets):
            wrap(module, module.forward, [])
    model.forward = counted


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("program", [merge_tokens, cache_blocks])
def test_programs_that_patch_blocks_work_in_either_order(program, order, recorded):
    others = [model_of("unet"), model_of("unet").double()]
    ours = model_of("unet")
    if order == "before":
        program(ours)
    rocm_sd.optimize(ours, level="performance")
    if order == "after":
        called(ours, "unet")
        program(ours)
    for model in others:
        program(model)
    for _ in range(4):
        stock, exact = called(others[0], "unet"), called(others[1], "unet", torch.float64)
        near(called(ours, "unet"), exact, stock)
    report = str(rocm_sd.report(ours).to_dict())
    assert ("tomesd.patch" in report) if program is merge_tokens else (order == "after" or __name__ in report)


def test_what_differs_is_in_the_report_until_it_is_back(recorded):
    model = rocm_sd.optimize(model_of("unet"), level="performance")
    called(model, "unet")
    replaced = len(rocm_sd.report(model).replaced)
    block = model.get_submodule(RES)
    before, block.nonlinearity = block.nonlinearity, nn.Mish()
    (change,) = [c for c in rocm_sd.report(model).skipped if c.path.endswith(RES)]
    assert change.why_skipped == "its nonlinearity has changed since it was optimised"
    block.nonlinearity = before
    assert len(rocm_sd.report(model).replaced) == replaced


def test_a_class_that_is_patched_is_noticed(recorded, monkeypatch):
    kind = type(model_of("unet").get_submodule(RES))
    ours = rocm_sd.optimize(model_of("unet"), level="performance")
    called(ours, "unet")
    inner = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, temb, *args: 2 * inner(self, x, temb, *args))
    exact, stock = pictures_of("unet")
    for _ in range(3):
        near(called(ours, "unet"), exact, stock)
    late = rocm_sd.optimize(model_of("unet"), level="performance")
    near(called(late, "unet"), exact, stock)
    assert "ResnetBlock2D.forward was replaced by" in str(rocm_sd.report(late).to_dict())


def test_transforms_traces_empty_batches_and_hooks_of_all_modules_are_stocks(recorded):
    stock, ours = model_of("vae"), rocm_sd.optimize(model_of("vae"), level="performance")
    z = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    for model in (stock, ours):
        called(model, "vae")

    def results(vae):
        with torch.no_grad():
            yield torch.func.vmap(vae.decoder.forward)(z)
            yield torch.jit.trace(vae.decoder, z[0], check_trace=False)(z[0])
        yield torch.func.grad(lambda x: vae.decoder(x).sum())(z[0])
        with torch.no_grad():
            yield vae.decoder.up_blocks[0](z.new_empty(0, 32, 8, 8))
            seen = []
            handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
            vae.decoder(z[0])
            handle.remove()
        yield torch.tensor([len(seen), seen.count(nn.SiLU)])

    for _ in range(3):
        # One after the other: each leaves the mode of gradients as it found it only once it is at its end.
        theirs, mine = list(results(stock)), list(results(ours))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", ["unet", "vae"])
def test_copies_of_models_are_stocks_again_once_restored(kind, recorded):
    stock = called(model_of(kind), kind)
    model = model_of(kind)
    twin = rocm_sd.optimize(copy.deepcopy(model), level="performance")
    for _ in range(3):
        called(twin, kind)
    assert torch.equal(called(model, kind), stock)
    again = copy.deepcopy(twin)
    assert torch.equal(called(rocm_sd.restore(twin), kind), stock)
    assert torch.equal(called(rocm_sd.restore(again), kind), stock)
    assert not any("forward" in vars(module) for module in (*twin.modules(), *again.modules()))
    rocm_sd.restore(rocm_sd.optimize(again, level="performance"))
    assert torch.equal(called(again, kind), stock)
