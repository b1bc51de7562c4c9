"""Merged tokens are what they are defined to be, as exactly as their definition computed in the same dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from approximated import Definition
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

import rocm_sd
from pipelines import CASES, Twins, call, exactly, require_as_exact_as_stock, small_blocks_too
from rocm_sd import numerics
from rocm_sd.engine.approximation import Approximation, Skipping, remember
from rocm_sd.engine.approximation.merging import merge, merged_count, outermost
from rocm_sd.engine.denoisers import MERGED
from tiny_models import TEXT, unet_of

STEPS = 4
SHARES = (0.3, 0.5, 0.9)
PIPELINES = ["sd15", "sdxl", "sd15-img2img", "sd15-inpaint9", "sd15-controlnet", "sdxl-img2img"]


@pytest.fixture(params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)
    return request.param


def groups_of(x, height, width, share):
    """Of one sample [N, C]: lists of the tokens that attention takes as one, in words of the paper."""
    tokens = [(row, column) for row in range(height) for column in range(width)]
    into = [token for token in tokens if token[0] % 2 == 0 and token[1] % 2 == 0]
    sources = [token for token in tokens if token not in into]
    # Of equal ones the first, in the order of the corners.
    sources.sort(key=lambda token: (token[0] % 2, token[1] % 2))
    unit = {token: x[number] / x[number].norm() for number, token in enumerate(tokens)}
    nearest = {}
    for source in sources:
        cosines = torch.stack([unit[source] @ unit[place] for place in into])
        best = int(cosines.argmax())
        nearest[source] = (float(cosines[best]), into[best])
    chosen = sorted(sources, key=lambda source: -nearest[source][0])[: int(share * len(sources))]
    groups = {place: [place] for place in into}
    for source in chosen:
        groups[nearest[source][1]].append(source)
    alone = [[source] for source in sources if source not in chosen]
    return [[tokens.index(token) for token in group] for group in [*alone, *groups.values()]]


def defined(x, height, width, share, attention):
    """[B, N, C]: each group's mean through attention, and its result for each of its tokens."""
    results = []
    for sample in x:
        groups = groups_of(sample, height, width, share)
        answered = attention(torch.stack([sample[group].mean(0) for group in groups])[None])[0]
        result = answered.new_empty(len(sample), answered.shape[-1])
        for group, answer in zip(groups, answered, strict=True):
            result[group] = answer
        results.append(result)
    return torch.stack(results)


class MergingDefinition:
    """On a stock UNet: all that merges is written out, in each of its outermost blocks."""

    def __init__(self, unet, share):
        self.share = share
        for spatial in outermost(unet):
            spatial.register_forward_pre_hook(self.note_size)
            for block in spatial.transformer_blocks:
                own = block.attn1.forward
                block.attn1.forward = lambda x, own=own, **_: defined(x, *self.size, self.share, own)

    def note_size(self, _module, args):
        self.size = args[0].shape[2:]


def drawn(pipe, name="sd15", seed=0, **options):
    return call(pipe, CASES[name], seed, **{"num_inference_steps": STEPS, **options})


def check(folder, name, approximation, seeds=(0, 1), **options):
    pipes = [CASES[name].build(folder).to(dtype) for dtype in (torch.float32, torch.float32, torch.float64)]
    ours = rocm_sd.optimize(pipes[0], quality=approximation)
    for pipe in pipes[1:]:
        MergingDefinition(pipe.unet, approximation.merged)
        Definition(pipe, approximation.skipping)
    mine = [drawn(ours, name, seed, **options) for seed in seeds]
    stock = [drawn(pipes[1], name, seed, **options) for seed in seeds]
    with exactly(torch.float32):
        exact = [drawn(pipes[2], name, seed, **options) for seed in seeds]
    require_as_exact_as_stock(mine, exact, stock, times=2)
    return ours


def tokens_of(dtype, height, width, channels=24, batch=2, seed=0):
    x = torch.randn(batch, height * width, channels, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(2, 2), (4, 6), (8, 8), (2, 16)], ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_tokens_against_the_definition(device, dtype, size, share):
    x = tokens_of(dtype, *size).to(device)
    found = merge(x, *size, share)
    assert found.tokens.shape[1] == x.shape[1] - merged_count(x.shape[1], share)
    exact = defined(x.double(), *size, share, lambda tokens: tokens)
    theirs = defined(x, *size, share, lambda tokens: tokens)
    compared = numerics.compare(found.spread(found.tokens), exact, theirs)
    assert compared.rms <= 2 * compared.stock_rms + compared.floor, str(compared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equal_tokens_merge_without_loss(device, dtype):
    windows = torch.randn(2, 4, 4, 16, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x = windows.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    found = merge(x, 8, 8, 0.99)
    assert found.tokens.shape[1] == 64 - 47
    assert torch.equal(found.spread(found.tokens), x)


def test_one_token_for_all_keeps_their_mean_in_float16(device):
    """Thousands of tokens in one place: their sum is beyond float16, and their mean is not."""
    x = torch.full((1, 64 * 64, 8), 600.0, device=device, dtype=torch.float16)
    x[:, 1] = 601
    found = merge(x, 64, 64, 0.999)
    assert bool(found.tokens.isfinite().all())
    assert float((found.tokens - 600).abs().max()) <= 1


def test_the_same_bits_again_and_whatever_else_is_in_the_batch(device):
    x = tokens_of(torch.float32, 8, 8, batch=3).to(device)
    first, second = (merge(x, 8, 8, 0.5) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.rows, second.rows)
    assert torch.equal(merge(x[1:2], 8, 8, 0.5).rows, first.rows[1:2])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.usefixtures("step_graph")
def test_each_share_is_what_it_is_defined_to_be(tmp_path, share):
    ours = check(tmp_path, "sd15", Approximation(merged=share))
    notes = rocm_sd.report(ours).approximations
    assert any(f"{share:.0%} of three in four outermost tokens are merged" in note for note in notes)
    assert any(f"ran on {64 - merged_count(64, share)} of 64 tokens" in note for note in notes)
    assert not any("no tokens" in note or "exact" in note for note in notes)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.usefixtures("step_graph")
def test_each_pipeline(tmp_path, name):
    check(tmp_path, name, Approximation(merged=0.5))


@pytest.mark.usefixtures("step_graph")
def test_with_steps_that_leave_something_out(tmp_path):
    check(tmp_path, "sd15", Approximation(Skipping(depth=1, every=2, guided_every=2), merged=0.5), seeds=(0, 1, 2))


@pytest.mark.parametrize("options", [{"height": 24, "width": 16}, {"num_images_per_prompt": 2}], ids=str)
@pytest.mark.usefixtures("step_graph")
def test_calls_of_other_kinds(tmp_path, options):
    check(tmp_path, "sd15", Approximation(merged=0.5), **options)


@pytest.mark.usefixtures("step_graph")
def test_no_share_has_the_bits_that_there_were(tmp_path):
    plain, merged = (CASES["sd15"].build(tmp_path) for _ in range(2))
    for without, quality in (("exact", Approximation(merged=0.0)), (skipping := Skipping(1, 2), None)):
        rocm_sd.optimize(plain, quality=without)
        rocm_sd.optimize(merged, quality=Approximation(skipping) if quality is None else quality)
        assert torch.equal(drawn(plain), drawn(merged))


@pytest.mark.usefixtures("step_graph")
def test_pictures_have_the_same_bits_again(tmp_path):
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=Approximation(merged=0.5))
    first = drawn(pipe)
    drawn(pipe, height=24)
    assert torch.equal(drawn(pipe), first)
    other = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=Approximation(merged=0.5))
    assert torch.equal(drawn(other), first)


@pytest.mark.usefixtures("step_graph")
def test_restore_brings_stocks_bits_back(tmp_path):
    pipe, stock = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe, quality=Approximation(merged=0.5))
    assert not torch.equal(drawn(pipe), drawn(stock))
    copied = rocm_sd.restore(copy.deepcopy(pipe))
    rocm_sd.restore(pipe)
    for restored in (pipe, copied):
        assert torch.equal(drawn(restored), drawn(stock))
        assert not any("forward" in module.__dict__ for module in restored.unet.modules())


@pytest.mark.usefixtures("step_graph")
def test_fewer_steps_than_were_measured_are_exact(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    pipe = CASES["sd15"].build(tmp_path)
    remember(pipe.unet, "high", STEPS + 1, Approximation(merged=0.5), "so fast", {})
    twins = Twins(CASES["sd15"], tmp_path, quality="high")
    twins.check(num_inference_steps=STEPS)
    pipe = twins.ours
    notes = rocm_sd.report(pipe).approximations
    assert any(f"from {STEPS + 1} steps on (measured here: so fast)" in note for note in notes)
    assert any(f"merge no tokens, because nothing was measured for {STEPS} steps" in note for note in notes)
    merged, stock = (drawn(each, num_inference_steps=STEPS + 1) for each in (pipe, twins.stock))
    assert not torch.allclose(merged, stock, atol=1e-3)


def given_of(unet, size=(8, 8), **more):
    random = torch.Generator().manual_seed(0)
    text = torch.randn(2, 7, unet.config.cross_attention_dim, generator=random)
    sample = torch.randn(2, 4, *size, generator=random)
    return {"sample": sample, "timestep": torch.tensor(500), "encoder_hidden_states": text, "return_dict": False} | more


def reasons(pipe):
    return [note for note in rocm_sd.report(pipe).approximations if "merges no tokens" in note]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"size": (8, 10)}, None),
        ({"size": (5, 9)}, "5x9 tokens do not make windows of 2x2"),
        ({"cross_attention_kwargs": {"scale": 0.5}}, None),
    ],
    ids=["other size", "odd", "scale"],
)
def test_calls_that_are_exact_say_why(tmp_path, given, reason):
    """Held against the same call without a share."""
    pipe = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=Approximation(merged=0.5))
    named = given_of(pipe.unet, **given)
    with torch.no_grad():
        exact, merged = (pipe.unet(**named, **share)[0] for share in ({}, {MERGED: 0.5}))
    assert torch.equal(exact, merged) == (reason is not None)
    assert bool(reasons(pipe)) == (reason is not None)
    assert reason is None or reason in reasons(pipe)[0]


def spatially(pipe, text, mask=None):
    """The first spatial transformer by itself: a mask for all of a UNet's fits none of its levels."""
    from rocm_sd.engine.approximation import merging

    x = torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), merging._during(merging._Now(0.5)):
        given = {"encoder_hidden_states": text, "attention_mask": mask, "return_dict": False}
        return outermost(pipe.unet)[0](x, **given)[0]


def test_a_mask_is_exact(tmp_path):
    pipe, plain = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe, quality=Approximation(merged=0.5))
    text, mask = given_of(pipe.unet)["encoder_hidden_states"], torch.zeros(2, 1, 64)
    assert not torch.equal(spatially(pipe, text), spatially(plain, text))
    assert reasons(pipe) == []
    mask[..., 32:] = -10000
    assert torch.equal(spatially(pipe, text, mask), spatially(plain, text, mask))
    assert "it is given a mask or other arguments" in reasons(pipe)[0]


def test_an_ip_adapter_is_exact(tmp_path):
    pipe, plain = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe, quality=Approximation(merged=0.5))
    processor = IPAdapterAttnProcessor2_0(32, cross_attention_dim=TEXT, num_tokens=(4,))
    text = given_of(pipe.unet)["encoder_hidden_states"], [torch.randn(2, 1, 4, TEXT)]
    for each in (pipe, plain):
        outermost(each.unet)[0].transformer_blocks[0].attn2.processor = processor
    assert torch.equal(spatially(pipe, text), spatially(plain, text))
    assert "IPAdapterAttnProcessor2_0 computes attention" in reasons(pipe)[0]


@pytest.mark.usefixtures("step_graph")
def test_attention_that_somebody_else_computes_is_exact(tmp_path):
    twins = Twins(CASES["sd15"], tmp_path, quality=Approximation(merged=0.5))
    twins.each(lambda pipe: pipe.enable_attention_slicing(1))
    twins.check()
    assert "SlicedAttnProcessor computes attention" in reasons(twins.ours)[0]


def test_more_pairs_than_there_is_memory_for_are_exact(tmp_path, monkeypatch):
    from rocm_sd.engine.approximation import merging

    monkeypatch.setattr(merging, "_MOST_PAIRS", 3 * 16 * 16 - 1)
    twins = Twins(CASES["sd15"], tmp_path, quality=Approximation(merged=0.5))
    twins.check()
    assert "would take too much memory" in reasons(twins.ours)[0]


def test_gradients_are_exact(tmp_path):
    plain, pipe = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(plain)
    rocm_sd.optimize(pipe, quality=Approximation(merged=0.5))

    def gradient(unet):
        named = given_of(unet)
        sample = named.pop("sample").requires_grad_()
        return torch.autograd.grad(unet(sample, **named)[0].sum(), sample)[0]

    assert torch.equal(gradient(pipe.unet), gradient(plain.unet))
    assert any("gradients may be wanted" in note for note in rocm_sd.report(pipe).approximations)


def test_which_blocks_are_the_outermost():
    for family, level in (("sd15", 0), ("sdxl", 1)):
        unet = unet_of(family)
        found = outermost(unet)
        assert found == [*unet.down_blocks[level].attentions, *unet.up_blocks[-1 - level].attentions]


def test_a_transformer_is_exact_and_says_so(tmp_path):
    case = CASES["flux-dev"]
    pipe, plain = (case.build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe, quality=Approximation(merged=0.5))
    assert "a FluxTransformer2DModel has no such blocks" in reasons(pipe)[0]
    rocm_sd.optimize(plain)
    torch.testing.assert_close(call(pipe, case), call(plain, case), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("step_graph")
def test_two_pipelines_with_one_unet(tmp_path):
    first = CASES["sd15"].build(tmp_path)
    second = type(first)(**first.components, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    alone = rocm_sd.optimize(CASES["sd15"].build(tmp_path), quality=Approximation(merged=0.5))
    for pipe in (first, second):
        rocm_sd.optimize(pipe, quality=Approximation(merged=0.5))
    for pipe in (first, second):
        torch.testing.assert_close(drawn(pipe), drawn(alone), atol=1e-4, rtol=1e-4)
    rocm_sd.restore(first)
    torch.testing.assert_close(drawn(second), drawn(alone), atol=1e-4, rtol=1e-4)
    rocm_sd.restore(second)
    assert not any("forward" in module.__dict__ for module in first.unet.modules())
