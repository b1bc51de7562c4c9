"""The small decoder draws what the VAE draws, nearly; whatever it is not for, the VAE draws itself."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

import rocm_sd
from pipelines import CASES, DEVICE, call, picture_of
from rocm_sd.engine.approximation import Approximation, remember, small_decoder
from rocm_sd.errors import CorruptModel, ModelNotFound, Unsupported
from rocm_sd.models.emoji import MODEL_FOLDER, decoder, held_out_prompts
from rocm_sd.quality.similarity import similarity
from tiny_models import vae_of

SMALL = Approximation(small_decoder=True)
STEPS = 4
TAESD = "madebyollin/taesd"
NOT_SHIPPED = "emoji-sd's small decoder is not shipped yet"
# What quality="high" asks for.
PSNR, SSIM = 30.0, 0.95


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A folder of its own, and no network: the hub is not asked."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(small_decoder, "_NOT_ON_THE_HUB", set(small_decoder._FAMILIES.values()))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def emoji():
    pipe = StableDiffusionPipeline.from_pretrained(MODEL_FOLDER).to(DEVICE)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def latents(emoji):
    """Of six prompts that training never saw, as the VAE decodes them."""
    texts = [prompt.text for prompt in held_out_prompts(6, seed=5)]
    generators = [torch.Generator().manual_seed(number) for number in range(len(texts))]
    drawn = emoji(texts, num_inference_steps=8, guidance_scale=3.0, generator=generators, output_type="latent").images
    return drawn / emoji.vae.config.scaling_factor


@pytest.fixture
def restored(emoji):
    if not decoder.DECODER_FILE.is_file():
        pytest.skip(NOT_SHIPPED)
    yield emoji
    rocm_sd.restore(emoji)


def decoded(pipe, z):
    with torch.no_grad():
        return (pipe.vae.decode(z, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)


def notes_of(pipe):
    return " / ".join(rocm_sd.report(pipe).approximations)


@pytest.mark.parametrize("step_graph", ["0", "1"], ids=["stepwise", "captured"])
def test_pictures_are_near_the_vaes(restored, latents, monkeypatch, step_graph):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", step_graph)
    exact = decoded(restored, latents)
    rocm_sd.optimize(restored, quality=SMALL)
    assert not torch.equal(decoded(restored, latents), exact)
    # The second and third time from a graph, where there is one.
    for _ in range(2):
        found = similarity(exact, decoded(restored, latents))
        assert statistics.median(found.psnr) >= PSNR
        assert found.mean_ssim >= SSIM
    assert "emoji-sd's own" in notes_of(restored)
    assert "18 pictures drawn by the small decoder" in notes_of(restored)


def test_a_batch_is_its_pictures(restored, latents):
    rocm_sd.optimize(restored, quality=SMALL)
    together = decoded(restored, latents)
    alone = torch.cat([decoded(restored, one) for one in latents.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_other_sizes_and_answers(restored, latents):
    rocm_sd.optimize(restored, quality=SMALL)
    z = latents[:1, :, :16, :24]
    with torch.no_grad():
        answer = restored.vae.decode(z)
        (alone,) = restored.vae.decode(z, False)
    assert type(answer).__name__ == "DecoderOutput"
    assert answer.sample.shape == (1, 3, 64, 96)
    assert torch.equal(answer.sample, alone)


def test_img2img(restored, request):
    """The encoder is the VAE's own; what is drawn is near."""
    pipe = StableDiffusionImg2ImgPipeline(**restored.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    request.addfinalizer(lambda: rocm_sd.restore(pipe))

    def draw():
        generator = torch.Generator().manual_seed(0)
        start = picture_of(3, 128, 128)
        options = {"strength": 0.5, "num_inference_steps": STEPS, "generator": generator, "output_type": "pt"}
        return pipe("a frog on a pink background", start, **options).images.float().cpu()

    exact = draw()
    rocm_sd.optimize(pipe, quality=SMALL)
    found = similarity(exact, draw())
    assert min(found.psnr) >= PSNR - 3
    assert "1 pictures drawn by the small decoder" in notes_of(pipe)
    rocm_sd.restore(pipe)
    assert torch.equal(draw(), exact)


def test_restore_gives_stocks_bits(restored, latents):
    stock = decoded(restored, latents)
    for _ in range(2):
        rocm_sd.optimize(restored, quality=SMALL)
        assert not torch.equal(decoded(restored, latents), stock)
        rocm_sd.restore(restored)
        assert torch.equal(decoded(restored, latents), stock)
        assert "decode" not in restored.vae.__dict__
    rocm_sd.optimize(restored)
    torch.testing.assert_close(decoded(restored, latents), stock, atol=1e-4, rtol=0)


@pytest.mark.skipif(not decoder.DECODER_FILE.is_file(), reason=NOT_SHIPPED)
def test_the_file_is_small_and_plain():
    assert decoder.DECODER_FILE.stat().st_size <= 2_000_000
    model, _ = decoder.load_decoder()
    assert 300_000 <= sum(p.numel() for p in model.parameters()) <= 1_000_000
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_missing_or_damaged_decoder_falls_back(emoji, latents, request, monkeypatch, tmp_path):
    request.addfinalizer(lambda: rocm_sd.restore(emoji))
    exact = decoded(emoji, latents[:1])
    for content in (None, b"not a file of weights"):
        file = tmp_path / "decoder.safetensors"
        if content is not None:
            file.write_bytes(content)
        monkeypatch.setattr(decoder, "DECODER_FILE", file)
        with pytest.raises(ModelNotFound if content is None else CorruptModel):
            decoder.load_decoder()
        rocm_sd.optimize(emoji, quality=SMALL)
        torch.testing.assert_close(decoded(emoji, latents[:1]), exact, atol=1e-4, rtol=0)
        assert "the VAE's own decoder: The small decoder" in notes_of(emoji)
        told = "training.emoji_sd.train_decoder" if content is None else "pip install --force-reinstall rocm-sd"
        assert told in notes_of(emoji)


def test_a_vae_that_it_was_not_distilled_from_draws_itself(restored):
    assert not isinstance(small_decoder.find(restored.vae), str)
    with torch.no_grad():
        restored.vae.decoder.conv_out.weight.mul_(1.5)
        try:
            assert "no small decoder is known" in small_decoder.find(restored.vae)
        finally:
            restored.vae.decoder.conv_out.weight.div_(1.5)


def test_fewer_steps_than_were_measured_are_the_vaes(restored):
    remember(restored.unet, "psnr=30", STEPS + 1, SMALL, "so fast", {})

    def draw(steps):
        generator = torch.Generator().manual_seed(0)
        return restored("a frog", num_inference_steps=steps, generator=generator, output_type="pt").images

    exact = [draw(steps) for steps in (STEPS, STEPS + 1)]
    rocm_sd.optimize(restored, quality="psnr=30")
    torch.testing.assert_close(draw(STEPS), exact[0], atol=1e-3, rtol=0)
    assert f"own decoder, because nothing was measured for {STEPS} steps" in notes_of(restored)
    assert not torch.allclose(draw(STEPS + 1), exact[1], atol=1e-3)
    assert f"from {STEPS + 1} steps on" in notes_of(restored)


def test_gradients_are_the_vaes(restored, latents):
    def gradient():
        z = latents[:1].clone().requires_grad_()
        return torch.autograd.grad(restored.vae.decode(z).sample.sum(), z)[0]

    exact = gradient()
    rocm_sd.optimize(restored, quality=SMALL)
    torch.testing.assert_close(gradient(), exact, atol=1e-2, rtol=1e-3)
    assert "gradients may be wanted" in notes_of(restored)


def tiny_of(vae, **options):
    """An AutoencoderTiny with random weights that enlarges as the VAE does."""
    stages = len(vae.config.block_out_channels)
    torch.manual_seed(0)
    shape = {
        "latent_channels": vae.config.latent_channels,
        "decoder_block_out_channels": (8,) * stages, "num_decoder_blocks": (1,) * stages,
        "encoder_block_out_channels": (8,) * stages, "num_encoder_blocks": (1,) * stages,
    }  # fmt: skip
    return AutoencoderTiny(**shape | options)


def put(tiny, name=TAESD, **options):
    tiny.save_pretrained(small_decoder.folder_of(name), **options)


@pytest.mark.parametrize("step_graph", ["0", "1"], ids=["stepwise", "captured"])
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd15-img2img"])
def test_a_family_has_its_autoencoder_tiny(tmp_path, monkeypatch, name, step_graph):
    """Its pictures are those that Diffusers draws with it in the VAE's place."""
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", step_graph)
    pipe, stock = (CASES[name].build(tmp_path) for _ in range(2))
    tiny = tiny_of(pipe.vae)
    put(tiny)
    rocm_sd.optimize(pipe, quality=SMALL)
    ours = call(pipe, CASES[name], output_type="pt")
    assert TAESD in notes_of(pipe)
    own, stock.vae.decode = (
        stock.vae.config.scaling_factor,
        lambda z, **_: tiny.to(z).decode(z * own, return_dict=False),
    )
    torch.testing.assert_close(ours, call(stock, CASES[name], output_type="pt"), atol=1e-4, rtol=0)


def test_latents_with_a_shift_are_converted():
    vae = vae_of(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159)
    tiny = tiny_of(vae, shift_factor=0.25, scaling_factor=2.0)
    put(tiny, "madebyollin/taef1")
    found = small_decoder.find(vae)
    x = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    z = x / 0.3611 + 0.1159
    with torch.no_grad():
        theirs = tiny.decode(x / 2.0 + 0.25, return_dict=False)[0]
        torch.testing.assert_close(found(z, torch.float32), theirs, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_had_says_what_to_type(tmp_path):
    pipe, plain = (CASES["sd15"].build(tmp_path) for _ in range(2))
    rocm_sd.optimize(pipe, quality=SMALL)
    rocm_sd.optimize(plain)
    assert "pictures are drawn by the VAE's own decoder" in notes_of(pipe)
    assert f"type: hf download {TAESD}" in notes_of(pipe)
    assert torch.equal(call(pipe, CASES["sd15"], output_type="pt"), call(plain, CASES["sd15"], output_type="pt"))


def test_pickled_weights_are_not_loaded():
    vae = vae_of()
    put(tiny_of(vae), safe_serialization=False)
    assert "hf download" in small_decoder.find(vae)


def test_a_decoder_that_enlarges_otherwise_is_not_taken():
    vae = vae_of()
    put(tiny_of(vae, decoder_block_out_channels=(8,) * 4, num_decoder_blocks=(1,) * 4))
    assert "enlarges 4 channels 8 times" in small_decoder.find(vae)
    assert "no small decoder is known for a AutoencoderTiny" in small_decoder.find(tiny_of(vae))


def test_what_is_not_finite_is_drawn_by_the_vae(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    tiny = tiny_of(pipe.vae)
    tiny.decoder.layers[-1].bias.data.fill_(70000.0)
    put(tiny)
    pipe.vae.half()
    rocm_sd.optimize(pipe, quality=SMALL)
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    assert bool(decoded(pipe, z).isfinite().all())
    assert "was not finite" in notes_of(pipe)


def test_a_vae_that_is_cast_for_its_decode_keeps_the_small_decoder_small(tmp_path, monkeypatch):
    computed, own = [], small_decoder.SmallDecoder.__call__
    spied = lambda self, z, dtype: computed.append(dtype) or own(self, z, dtype)  # noqa: E731
    monkeypatch.setattr(small_decoder.SmallDecoder, "__call__", spied)
    pipe = CASES["sd15"].build(tmp_path)
    put(tiny_of(pipe.vae))
    pipe.vae.register_to_config(force_upcast=True)
    pipe.vae.half()
    rocm_sd.optimize(pipe, quality=SMALL)
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pipe.vae.float()
    with torch.no_grad():
        assert pipe.vae.decode(z).sample.dtype is torch.float32
    assert computed == [torch.float16]
    assert "1 pictures drawn by the small decoder" in notes_of(pipe)


def test_previews(restored, latents):
    scaled = latents * restored.vae.config.scaling_factor
    exact = decoded(restored, latents[:2])
    picture = rocm_sd.preview(restored, scaled[:2])
    assert picture.size == (256, 128)
    shown = torch.from_numpy(np.array(picture)).float().view(128, 2, 128, 3).permute(1, 3, 0, 2) / 255
    assert statistics.median(similarity(exact, shown).psnr) >= PSNR
    shots = []

    def keep(pipe, _number, _timestep, tensors):
        shots.append(rocm_sd.preview(pipe, tensors["latents"]))
        return tensors

    restored("a frog", num_inference_steps=2, callback_on_step_end=keep, output_type="latent")
    assert [shot.size for shot in shots] == [(128, 128)] * 2


def test_a_preview_without_a_small_decoder_is_the_vaes(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    picture = rocm_sd.preview(pipe, latents)
    exact = decoded(pipe, latents / pipe.vae.config.scaling_factor)[0].permute(1, 2, 0).mul(255).round()
    assert np.array_equal(np.array(picture), exact.to(torch.uint8).cpu().numpy())
    with pytest.raises(Unsupported, match="unpack"):
        rocm_sd.preview(pipe, latents.flatten(2))
