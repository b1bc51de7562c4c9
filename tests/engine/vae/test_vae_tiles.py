from __future__ import annotations

import math

import pytest
import torch
from diffusers import AutoencoderKL
from peft import LoraConfig
from torch import nn

from live_memory import LiveMemory, live_peak
from pipelines import tiny_vae
from rocm_sd.engine import denoising
from rocm_sd.engine.vae import tiles
from rocm_sd.engine.vae.plan import MIB
from rocm_sd.engine.vae.steps import decoder_steps, encoder_steps, why_not_in_strips, why_unknown
from rocm_sd.engine.vae.tiles import Store, in_strips
from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.rewrite import RULES, apply, norm_out

CPU = torch.device("cpu")
KIB = 1024
# What the engine promises against the picture decoded whole; rounding alone is what is left here.
PROMISED_DB = 45


def psnr(ours: torch.Tensor, whole: torch.Tensor) -> float:
    """Of pictures between -1 and 1."""
    error = float((ours.double().clamp(-1, 1) - whole.double().clamp(-1, 1)).square().mean()) / 4
    return math.inf if error == 0 else -10 * math.log10(error)


def strips(vae, z, budget, *, encode=False, channels_last=False):
    steps = encoder_steps(vae) if encode else decoder_steps(vae)
    assert why_not_in_strips(vae, steps, CPU) is None
    store = Store(CPU, budget, channels_last)
    y = in_strips(steps, z, store)
    assert store.used == 0, "every map is given back"
    return y


@pytest.fixture(scope="module")
def emoji():
    return AutoencoderKL.from_pretrained(MODEL_FOLDER / "vae").eval().requires_grad_(False)


def drawing(height, width):
    """A face on a bright ground, between -1 and 1: edges, flat areas, and halves that differ in brightness."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    face, eyes = x**2 + y**2 < 0.6, (x.abs() - 0.3) ** 2 + (y + 0.2) ** 2 < 0.02
    picture = torch.stack([torch.ones_like(x), 0.5 + 0.5 * y, 0.5 - 0.5 * x])
    picture[:, face] = torch.tensor([[1.0], [0.8], [0.1]])
    picture[:, eyes] = -1.0
    return picture[None]


@torch.no_grad()
@pytest.mark.parametrize("budget", [64 * MIB, 1 * MIB, 64 * KIB], ids=lambda b: f"{b // KIB} KiB")
def test_the_trained_model_has_no_seams(emoji, budget):
    z = emoji.encode(drawing(96, 160)).latent_dist.mode()
    whole = emoji.decode(z).sample
    ours = strips(emoji, z, budget)
    assert psnr(ours, whole) > 110
    # Stock's own tiles, for comparison: the fault that this is for.
    emoji.tile_latent_min_size, emoji.tile_sample_min_size = 16, 64
    emoji.enable_tiling()
    tiled = emoji.decode(z).sample
    emoji.disable_tiling()
    assert psnr(tiled, whole) < PROMISED_DB


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(emoji, dtype):
    z = emoji.encode(drawing(32, 32)).latent_dist.mode()
    exact = emoji.decode(z).sample
    half = AutoencoderKL.from_pretrained(MODEL_FOLDER / "vae", torch_dtype=dtype).eval().requires_grad_(False)
    whole = half.decode(z.to(dtype)).sample
    ours = strips(half, z.to(dtype), 64 * KIB)
    assert ours.dtype is dtype
    assert psnr(ours, whole) > PROMISED_DB
    assert psnr(ours, exact) > psnr(whole, exact) - 1, "no further from float32 than the whole picture"


def real_vae():
    """SD 1.5's and SDXL's. The weights are drawn so that the picture fills its range."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
    )
    return vae.eval().requires_grad_(False)


@torch.no_grad()
def test_the_real_architecture():
    vae = real_vae()
    z = torch.randn(1, 4, 5, 3)
    whole = vae.decode(z).sample
    vae.decoder.conv_out.weight *= 0.5 / whole.std()
    vae.decoder.conv_out.bias.zero_()
    whole = vae.decode(z).sample
    assert whole.std() > 0.3
    assert psnr(strips(vae, z, 2 * MIB), whole) > 100


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (5, 1), (3, 7), (17, 4), (12, 12)])
def test_odd_sizes(height, width):
    vae = tiny_vae().eval()
    z = torch.randn(1, 4, height, width)
    torch.testing.assert_close(strips(vae, z, 16 * KIB), vae.decode(z).sample, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(4, 6), (9, 7), (37, 20), (40, 41)])
def test_encoding(emoji, height, width):
    x = drawing(height, width)
    whole = torch.cat([emoji.encode(x).latent_dist.mean, emoji.encode(x).latent_dist.logvar], dim=1)
    ours = strips(emoji, x, 64 * KIB, encode=True)
    torch.testing.assert_close(ours.clamp(max=20), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_with_rules_and_channels_last(emoji):
    vae = AutoencoderKL.from_pretrained(MODEL_FOLDER / "vae").eval().requires_grad_(False)
    z = emoji.encode(drawing(64, 64)).latent_dist.mode()
    whole = vae.decode(z).sample
    vae.to(memory_format=torch.channels_last)
    apply(vae, [*RULES, norm_out.RULE])
    assert psnr(strips(vae, z, 64 * KIB, channels_last=True), whole) > 110


@torch.no_grad()
def test_with_a_lora(emoji):
    vae = AutoencoderKL.from_pretrained(MODEL_FOLDER / "vae").eval()
    plain = vae.decode(torch.ones(1, 4, 12, 12)).sample
    vae.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["conv1", "conv_out", "to_q", "to_out.0"]))
    vae.requires_grad_(False).eval()
    z = torch.ones(1, 4, 12, 12)
    whole = vae.decode(z).sample
    assert psnr(plain, whole) < 40
    assert psnr(strips(vae, z, 64 * KIB), whole) > 110


@torch.no_grad()
def test_scores_are_made_for_some_queries_at_a_time(emoji, monkeypatch):
    asked = []
    attend = tiles.attention
    monkeypatch.setattr(tiles, "scores_bytes", lambda *_arguments, **_named: 2**30)
    monkeypatch.setattr(tiles, "attention", lambda q, k, v: asked.append(q.shape[1]) or attend(q, k, v))
    z = emoji.encode(drawing(64, 64)).latent_dist.mode()
    assert psnr(strips(emoji, z, 64 * KIB), emoji.decode(z).sample) > 110
    assert sum(asked) == 256
    assert max(asked) * 8 * 256 <= 64 * KIB


class WithHost(Store):
    """A GPU's store on a CPU: maps beyond the budget go to memory that is not counted."""

    memory: LiveMemory
    in_host = 0

    def empty(self, shape, dtype):
        size = dtype.itemsize * math.prod(shape)
        if self.used + size <= self.budget - self.strip_bytes:
            return super().empty(shape, dtype)
        self.in_host += 1
        with self.memory.elsewhere():
            return self.empty_in_host(shape, dtype, torch.contiguous_format), 0


@torch.no_grad()
def test_memory_is_bounded_however_large_the_picture(emoji):
    """Beside the budget there are the picture itself and the least strip of a few rows."""
    budget, peaks = 2 * MIB, []
    for size in (16, 32, 48):
        z = torch.randn(1, 4, size, size)
        store = WithHost(CPU, budget, channels_last=False)
        with LiveMemory(z) as memory:
            store.memory = memory
            ours = in_strips(decoder_steps(emoji), z, store)
        assert store.in_host
        peaks.append(memory.peak - ours.nbytes)
    assert max(peaks) < 1.5 * budget
    assert live_peak(lambda: emoji.decode(z), z) > 10 * max(peaks)


@torch.no_grad()
def test_strips_need_less_than_the_whole_even_where_there_is_no_host(emoji):
    z = torch.randn(1, 4, 32, 32)
    whole = live_peak(lambda: emoji.decode(z), z)
    assert live_peak(lambda: strips(emoji, z, 1 * MIB), z) < 0.75 * whole


def hook(vae):
    vae.decoder.mid_block.resnets[0].register_forward_hook(lambda _m, _a, y: y * 2)


def seamless(vae):
    for layer in vae.modules():
        if isinstance(layer, nn.Conv2d):
            layer.padding_mode = "circular"


def other_forward(vae):
    layer = vae.decoder.conv_in
    layer.forward = lambda x: nn.Conv2d.forward(layer, x) * 2


def other_convolution(vae):
    vae.decoder.conv_out._conv_forward = lambda *a: nn.Conv2d._conv_forward(vae.decoder.conv_out, *a)


def other_processor(vae):
    from diffusers.models.attention_processor import AttnProcessor

    vae.set_attn_processor(AttnProcessor())


@pytest.mark.parametrize(
    ("touch", "reason"),
    [
        (hook, "decoder.mid_block.resnets.0: it has hooks"),
        (seamless, "pads with circular"),
        (other_forward, "replaced its forward"),
        (other_convolution, "replaced its convolution"),
        (other_processor, "computed by AttnProcessor"),
        (nn.Module.train, "training mode"),
        (lambda vae: vae.to("meta"), "on another device"),
    ],
)
def test_what_strips_would_not_see_falls_back_to_stock(touch, reason):
    vae = tiny_vae().eval()
    assert why_not_in_strips(vae, decoder_steps(vae), CPU) is None
    touch(vae)
    assert reason in why_not_in_strips(vae, decoder_steps(vae), CPU)


@torch.no_grad()
def test_a_captured_decoder_can_be_taken_layer_by_layer():
    vae = tiny_vae().eval()
    installed = denoising.install(vae, denoising.captured_models(vae))
    assert "forward" in vae.decoder.__dict__
    z = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(strips(vae, z, 16 * KIB), vae.decode(z).sample, rtol=1e-4, atol=1e-5)
    installed.restore()


def test_models_of_other_parts_are_named():
    assert why_unknown(tiny_vae()) is None
    assert why_unknown(nn.Linear(1, 1)) == "a Linear is not planned for"
    vae = tiny_vae()
    vae.decoder.up_blocks[0] = nn.Identity()
    assert why_unknown(vae) == "its decoder has a Identity"
