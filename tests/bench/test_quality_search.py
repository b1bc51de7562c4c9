"""The search on a small model: its own pictures and reports, and a clock that says what a setting would take."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderTiny

from pipelines import tiny_pipeline
from rocm_sd.bench import quality_methods, quality_search
from rocm_sd.bench.quality_methods import parts
from rocm_sd.bench.quality_search import Searcher, candidates
from rocm_sd.engine import Approximation, Skipping, optimize, report, restore
from rocm_sd.engine.approximation import eight_bits, small_decoder
from rocm_sd.integrations import diffusers as host
from rocm_sd.quality.budget import Budget, Scores
from rocm_sd.quality.similarity import as_tensor, similarity

STEPS = 8
PROMPTS = ("a frog", "a dog", "a cat")
SHALLOW = 0.3
TAKES = {"merged": lambda share: 1 - 0.2 * share, "eight_bits": lambda _: 0.8}
DECODER, IN_EIGHT_BITS = 0.05, 0.02  # saved by the small one, and by the VAE's own in 8 bits
REQUESTS = [host.Request(text, steps=STEPS, seed=number, guidance=3.0) for number, text in enumerate(PROMPTS)]


def reckoned(quality):
    """A picture's time in seconds, of which exact takes one."""
    if isinstance(quality, str):
        return 1.0
    one = quality if isinstance(quality, Approximation) else Approximation(quality)
    steps = [one.skipping.step(number, 0, STEPS) for number in range(STEPS)]
    took = sum((1 if step.whole else SHALLOW) * (1 if step.guided else 0.5) for step in steps) / STEPS
    for name, share in TAKES.items():
        took *= share(getattr(one, name)) if getattr(one, name) else 1
    return took - DECODER * one.small_decoder - IN_EIGHT_BITS * bool(one.eight_bit_decoder)


@pytest.fixture(autouse=True)
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    # No network, and layers of a model this small are all below it.
    monkeypatch.setattr(small_decoder, "_NOT_ON_THE_HUB", set(small_decoder._FAMILIES.values()))
    monkeypatch.setattr(eight_bits, "_SMALLEST", 4)
    monkeypatch.setattr(quality_search, "_DEPTHS", (1,))
    monkeypatch.setattr(quality_search, "_EVERY", (2, 4))
    monkeypatch.setattr(quality_search, "_GUIDANCE_END", ())
    monkeypatch.setattr(Searcher, "_seconds", lambda searcher, _: reckoned(report(searcher._pipe).quality))


@pytest.fixture
def pipe(tmp_path):
    made = tiny_pipeline(tmp_path)
    yield made
    restore(made)


def put_small_decoder(vae):
    stages = len(vae.config.block_out_channels)
    shape = dict.fromkeys(("decoder_block_out_channels", "encoder_block_out_channels"), (8,) * stages)
    counts = dict.fromkeys(("num_decoder_blocks", "num_encoder_blocks"), (1,) * stages)
    tiny = AutoencoderTiny(latent_channels=vae.config.latent_channels, **shape, **counts)
    tiny.save_pretrained(small_decoder.folder_of("madebyollin/taesd"))


def searched(pipe, drawn=None):
    return Searcher(pipe, REQUESTS, None, (lambda _: None) if drawn is None else drawn.append)


def psnr_of(pipe, searcher, one):
    optimize(pipe, quality=one)
    images = [image for request in REQUESTS for image in host.generate(pipe, request).images]
    return similarity(as_tensor(searcher.exact), as_tensor(images)).psnr


def test_the_fastest_combination_within_the_budget_is_found(pipe, monkeypatch):
    monkeypatch.setattr(quality_search, "_EVERY", (2,))
    put_small_decoder(pipe.vae)
    searcher = searched(pipe)
    methods = {method.approximation: method for method in searcher.methods}
    kept = {one: method.share for one, method in methods.items() if method.why_not is None}
    here = [one for one in methods if "fp8" not in {one.eight_bits, one.eight_bit_decoder}]
    assert kept == pytest.approx({one: reckoned(one) for one in here}), "each was timed by itself, and was at work"
    assert "fp8" in methods[Approximation(eight_bits="fp8")].why_not
    # A decoder of random weights draws nothing like it: what is found has none. So near is a combination of the others.
    wanted = Approximation(Skipping(1, 2), merged=0.3, eight_bits="int8")
    budget = Budget(psnr=sorted(psnr_of(pipe, searcher, wanted))[1] - 0.01)
    assert sorted(psnr_of(pipe, searcher, Approximation(small_decoder=True)))[1] < budget.psnr
    found = searcher.search(budget)
    assert len(parts(found.approximation)) > 1
    assert not found.approximation.small_decoder
    assert budget.holds(found.scores)
    assert found.ruled_out > 0
    assert found.speedup[0] == pytest.approx(1 / reckoned(found.approximation))
    # By drawing each of them that has no part which was just seen to be outside: none is faster and within.
    everything = candidates(STEPS, {1: SHALLOW}, methods=kept, schedules=searcher.schedules)
    rest = [one for _, one in everything if not one.small_decoder]
    first = next(one for one in rest if sorted(psnr_of(pipe, searcher, one))[1] >= budget.psnr)
    assert reckoned(found.approximation) <= reckoned(wanted)
    assert reckoned(found.approximation) == pytest.approx(reckoned(first))


def test_what_is_found_is_drawn_again_as_it_was(pipe):
    searcher = searched(pipe)
    found = searcher.search(Budget(psnr=1))
    again = searcher.search(Budget(psnr=2))
    assert found.approximation == again.approximation, "its scores were kept"
    assert len(parts(found.approximation)) > 1
    assert found.scores.psnr == pytest.approx(psnr_of(pipe, searcher, found.approximation))
    assert len(searcher.pictures[found.approximation]) == len(PROMPTS)


def test_what_cannot_be_had_is_named_and_takes_no_part(pipe, monkeypatch):
    monkeypatch.setattr(eight_bits, "_SMALLEST", 10**6)
    searcher = searched(pipe)
    reasons = {method.approximation: method.why_not for method in searcher.methods}
    assert "pictures are drawn by the VAE's own decoder" in reasons[Approximation(small_decoder=True)]
    assert "hf download" in reasons[Approximation(small_decoder=True)]
    assert "no layers that can be put into int8" in reasons[Approximation(eight_bits="int8")]
    assert reasons[Approximation(merged=0.8)] is None
    found = searcher.search(Budget(psnr=1)).approximation
    assert found.merged == 0.8
    assert found.skipping.every == 4
    assert not found.small_decoder
    assert found.eight_bits is None


def test_a_method_that_is_not_faster_takes_no_part(pipe, monkeypatch):
    monkeypatch.setitem(TAKES, "merged", lambda _: 1.01)
    searcher = searched(pipe)
    merged = [method for method in searcher.methods if method.approximation.merged]
    assert [method.why_not for method in merged] == ["it is not faster beyond doubt"] * 3
    assert not searcher.search(Budget(psnr=1)).approximation.merged


def test_a_budget_that_nothing_meets_is_exact(pipe):
    put_small_decoder(pipe.vae)
    drawn = []
    searcher = searched(pipe, drawn)
    before = len(drawn)
    found = searcher.search(Budget(psnr=500))
    assert found.approximation is None
    assert found.scores is None
    # Two prompts of each method alone say it; nothing that has one of them as a part is drawn.
    kept = sum(method.why_not is None for method in searcher.methods)
    assert kept == 6
    skippings = 8 + 4 * len(searcher.schedules)
    assert found.tried <= skippings + kept
    # Two of them were drawn before, to compare schedules.
    assert 2 * (found.tried - 2) <= len(drawn) - before <= 2 * found.tried
    assert found.ruled_out >= (skippings + 1) * 4 * 2 * 3 - 1 - found.tried


def test_the_search_ends_where_nothing_is_faster(pipe, monkeypatch):
    searcher = searched(pipe)
    timed = []
    monkeypatch.setattr(searcher, "_speedup", lambda one: timed.append(one) or (1.1, 0.99, 1.2))
    assert searcher.search(Budget(psnr=1)).approximation is None
    assert len(timed) == len(set(timed)) == 4
    assert [reckoned(one) for one in timed] == pytest.approx(sorted(map(reckoned, timed)))


def test_whole_steps_are_searched_where_features_change(pipe, monkeypatch):
    monkeypatch.setattr(Searcher, "_is_nearer", lambda *_: True)
    searcher = searched(pipe)
    assert searcher.schedules, "the features of a picture do not change evenly"
    for (depth, every), whole in searcher.schedules.items():
        assert depth == 1
        assert len(whole) == STEPS / every
        numbers = [round(share * STEPS) for share in whole]
        assert numbers[0] == 0
        assert numbers == sorted(set(numbers))
        assert numbers != list(range(0, STEPS, every))
        assert [share * STEPS for share in whole] == pytest.approx(numbers)
    found = candidates(STEPS, {1: SHALLOW}, schedules=searcher.schedules)
    own = [one for _, one in found if one.skipping.whole]
    assert len(own) == 4 * len(searcher.schedules)
    costs = {one: cost for cost, one in found}
    assert all(costs[one] == pytest.approx(reckoned(one)) for one in own)
    # Each costs what the uniform one does that has as many whole steps.
    for (depth, every), whole in searcher.schedules.items():
        uniform = Approximation(Skipping(depth, every, guided_every=every))
        assert costs[Approximation(Skipping(depth, whole=whole, guided_every=2))] == pytest.approx(costs[uniform])


@pytest.mark.parametrize("is_nearer", [False, True])
def test_schedules_that_are_no_nearer_than_even_ones_are_not_searched(pipe, monkeypatch, is_nearer):
    monkeypatch.setattr(quality_search, "timed_alone", lambda *_: [])
    own = Searcher._nearness

    def nearness(searcher, images):
        found = own(searcher, images)
        # So far from its own distance that there is no doubt.
        more = 80 if bool(report(searcher._pipe).quality.skipping.whole) == is_nearer else 0
        return Scores([psnr + more for psnr in found.psnr], found.ssim)

    monkeypatch.setattr(Searcher, "_nearness", nearness)
    searcher = searched(pipe)
    (note,) = searcher.notes
    near = {bool(one.skipping.whole): scores.median_psnr for one, scores in searcher._near.items()}
    assert len(near) == 2
    assert f"{near[True]:.1f} dB where features change, {near[False]:.1f} dB evenly" in note
    assert bool(searcher.schedules) == is_nearer
    assert ("both are tried" in note) == is_nearer


def test_of_two_schedules_the_nearer_one_is_found(pipe, monkeypatch):
    """Whole steps where features change, and uniform ones: they cost the same."""
    monkeypatch.setattr(quality_search, "_EVERY", (2,))
    monkeypatch.setattr(quality_search, "timed_alone", lambda *_: [])
    monkeypatch.setattr(Searcher, "_is_nearer", lambda *_: True)
    searcher = searched(pipe)
    ((depth, every), whole), *_ = searcher.schedules.items()
    mine, uniform = Approximation(Skipping(depth, whole=whole)), Approximation(Skipping(depth, every))
    middle = {one: sorted(psnr_of(pipe, searcher, one))[1] for one in (mine, uniform)}
    one = max(middle, key=middle.get)
    monkeypatch.setattr(quality_search, "candidates", lambda *_, **__: [(0.5, uniform), (0.5, mine)])
    assert searcher.search(Budget(psnr=middle[one] - 1e-6)).approximation == one


def test_methods_count_where_no_step_can_be_left_out(pipe, monkeypatch):
    monkeypatch.setattr(quality_search, "_EVERY", ())
    found = searched(pipe).search(Budget(psnr=1)).approximation
    assert found == Approximation(merged=0.8, eight_bits="int8", eight_bit_decoder="int8")


def test_guidance_may_end_early(pipe, monkeypatch):
    monkeypatch.setattr(quality_search, "_GUIDANCE_END", (0.6, 0.8))
    found = [one.skipping for _, one in candidates(STEPS, {1: SHALLOW}, schedules={(1, 2): (0, 0.1, 0.2, 0.5)})]
    ended = [skipping for skipping in found if skipping.guidance_end < 1]
    assert {Skipping(guidance_end=0.6), Skipping(1, 4, guidance_end=0.8)} <= {*ended}
    assert any(skipping.whole for skipping in ended)
    assert all(skipping.guided_every == 1 for skipping in ended)
    alone = [one.skipping for _, one in candidates(STEPS, {1: SHALLOW}, halves=False)]
    assert all(skipping.guidance_end == 1 for skipping in alone)
    monkeypatch.setattr(quality_search, "_EVERY", ())
    monkeypatch.setattr(quality_search, "timed_alone", lambda *_: [])
    searcher = searched(pipe)
    found = searcher.search(Budget(psnr=1))
    assert found.approximation == Approximation(Skipping(guidance_end=0.6))
    assert found.speedup[0] == pytest.approx(8 / 6.5)
    assert found.scores.psnr == pytest.approx(psnr_of(pipe, searcher, found.approximation))


def test_a_budget_holds_on_a_model_that_was_made_delicate(pipe, monkeypatch):
    """One column of what comes into a feed-forward is so many times the others that 8 bits lose these."""
    monkeypatch.setattr(quality_search, "_EVERY", ())
    monkeypatch.setattr(quality_methods, "METHODS", (Approximation(eight_bits="int8"),))
    # Convolutions of a model this small add more error than what is looked for.
    monkeypatch.setattr(eight_bits, "_convolutions", lambda *_: ())
    block = next(part for name, part in pipe.unet.named_modules() if name.endswith("transformer_blocks.0"))
    with torch.no_grad():
        for part in (block.norm3.weight, block.norm3.bias):
            part[3] *= 1e12
        block.ff.net[0].proj.weight[:, 3] /= 1e12
    searcher, asked = searched(pipe), Approximation(eight_bits="int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eight_bits, "too_far", lambda _errors: frozenset())
        lost = sorted(psnr_of(pipe, searcher, asked))[1]
    kept = sorted(psnr_of(pipe, searcher, asked))[1]
    assert kept > lost + 1
    budget = Budget(psnr=(kept + lost) / 2)
    found = searcher.search(budget)
    assert found.approximation == asked
    assert budget.holds(found.scores)
    optimize(pipe, quality=found.approximation)
    assert type(block.ff.net[0].proj) is torch.nn.Linear
    assert any("too delicate for int8" in note for note in report(pipe).approximations)
