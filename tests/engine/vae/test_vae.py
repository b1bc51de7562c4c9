from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import CpuOffload, add_hook_to_module
from diffusers import AutoencoderKL, AutoencoderTiny
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import nn

from pipelines import tiny_pipeline, tiny_vae
from rocm_sd import numerics
from rocm_sd.arch.table import ARCHS
from rocm_sd.arch.torch_libraries import FUSED_HEADS, FusedHeads, why_not_fused
from rocm_sd.engine.vae import planned as engine
from rocm_sd.engine.vae.plan import MIB
from rocm_sd.kernels.configs.attention import AttentionConfig
from rocm_sd.ops.attention import op, reference

KIB = 1024


def build(dtype=torch.float32) -> AutoencoderKL:
    torch.manual_seed(0)
    return tiny_vae().eval().requires_grad_(False).to(dtype)


def latents(batch=1, height=8, width=8, dtype=torch.float32):
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def free(monkeypatch):
    """Call it with the bytes that are to be free."""
    return lambda amount: monkeypatch.setattr(engine, "free_memory", lambda _device: amount)


def without_margins(monkeypatch):
    monkeypatch.setattr("rocm_sd.engine.vae.plan._SLACK", 0)


@torch.no_grad()
def test_whole_where_it_fits_with_stocks_bits_and_types():
    vae, z, x = build(), latents(2), torch.rand(2, 3, 16, 16)
    picture, posterior = vae.decode(z).sample, vae.encode(x).latent_dist
    installed = engine.install(vae)
    ours = vae.decode(z)
    assert type(ours) is DecoderOutput
    assert torch.equal(ours.sample, picture)
    assert torch.equal(vae.decode(z=z, return_dict=False, generator=None)[0], picture)
    encoded = vae.encode(x)
    assert type(encoded) is AutoencoderKLOutput
    assert torch.equal(encoded.latent_dist.mean, posterior.mean)
    assert torch.equal(vae.encode(x=x, return_dict=False)[0].std, posterior.std)
    assert torch.equal(vae(x).sample, vae.decode(posterior.mode()).sample)
    notes = installed.notes()
    assert any(note.startswith("VAE decode of 2x4x8x8: whole (") for note in notes)
    assert any(note.startswith("VAE encode of 2x3x16x16: whole (") for note in notes)
    installed.restore()
    assert "decode" not in vae.__dict__
    assert "encode" not in vae.__dict__
    assert torch.equal(vae.decode(z).sample, picture)


@torch.no_grad()
@pytest.mark.parametrize(("amount", "way"), [(800 * KIB, "whole"), (500 * KIB, "sliced"), (20 * KIB, "tiled")])
def test_the_way_follows_from_what_is_free(amount, way, free, monkeypatch):
    without_margins(monkeypatch)
    vae, z = build(), latents(2, 10, 12)
    stock, exact = vae.decode(z).sample, copy.deepcopy(vae).double().decode(z.double()).sample
    x = torch.rand(2, 3, 20, 24)
    moments, exact_moments = (
        vae.encode(x).latent_dist.mean,
        copy.deepcopy(vae).double().encode(x.double()).latent_dist.mean,
    )
    installed = engine.install(vae)
    free(amount)
    numerics.require(way, vae.decode(z).sample, exact, stock)
    numerics.require(way, vae.encode(x).latent_dist.mean, exact_moments, moments)
    assert installed.notes()[0].startswith(f"VAE decode of 2x4x10x12: {way} (")


@torch.no_grad()
def test_level_memory_tiles_what_else_would_be_the_peak(free, monkeypatch):
    vae, z = build(), latents(2, 16, 16)
    installed = engine.install(vae, "memory")
    free(2**40)
    vae.decode(z)
    assert ": whole (" in installed.notes()[0]
    monkeypatch.setattr("rocm_sd.engine.vae.plan._MEMORY_LEVEL", 700 * KIB)
    vae.decode(z)
    assert ": sliced (" in installed.notes()[0]
    monkeypatch.setattr("rocm_sd.engine.vae.plan._MEMORY_LEVEL", 300 * KIB)
    vae.decode(z)
    assert ": tiled (" in installed.notes()[0]


class Failing:
    """Runs out of memory for batches above `largest`."""

    def __init__(self, largest):
        self.whole, self.largest, self.asked = engine.decode_whole, largest, []

    def __call__(self, vae, z):
        self.asked.append(len(z))
        if len(z) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.whole(vae, z)


@pytest.fixture
def whole_decodes(monkeypatch):
    """One entry for each decode of a whole batch."""
    ran, whole = [], engine.decode_whole
    monkeypatch.setattr(engine, "decode_whole", lambda vae, z: ran.append(1) or whole(vae, z))
    return ran


@torch.no_grad()
@pytest.mark.parametrize(("largest", "asked", "way"), [(1, [2, 1, 1], "sliced"), (0, [2, 1], "tiled")])
def test_what_runs_out_of_memory_nevertheless_is_followed_by_a_smaller_way(largest, asked, way, monkeypatch):
    vae, z = build(), latents(2, 96, 96)
    stock = vae.decode(z).sample
    failing = Failing(largest)
    monkeypatch.setattr(engine, "decode_whole", failing)
    installed = engine.install(vae)
    torch.testing.assert_close(vae.decode(z).sample, stock, rtol=1e-4, atol=1e-5)
    assert failing.asked == asked
    assert f"ran out of memory; {way} was next" in installed.notes()[-1]


@torch.no_grad()
def test_errors_of_other_kinds_and_the_last_one_are_raised(monkeypatch):
    vae = build()
    installed = engine.install(vae)
    with pytest.raises(RuntimeError, match="expected input"):
        vae.decode(torch.ones(1, 5, 8, 8))
    installed.restore()
    vae.decoder.conv_in.register_forward_hook(lambda _m, _a, y: y)
    monkeypatch.setattr(engine, "decode_whole", Failing(0))
    engine.install(vae)
    with pytest.raises(torch.OutOfMemoryError):
        vae.decode(latents())


@torch.no_grad()
def test_what_is_ready_is_not_planned(free, whole_decodes):
    vae, z = build(), latents()
    stock = vae.decode(z).sample
    ran = whole_decodes
    installed = engine.install(vae, ready=lambda z: z.shape[-1] == 8)
    free(0)
    assert torch.equal(vae.decode(z).sample, stock)
    assert ran == [1]
    assert not installed.notes()
    vae.decode(latents(1, 8, 9))
    assert ran == [1]
    assert "tiled" in installed.notes()[0]


@torch.no_grad()
def test_the_users_switches_are_honoured(free):
    vae, z = build(), latents(2, 40, 40)
    vae.tile_latent_min_size, vae.tile_sample_min_size = 16, 32
    vae.enable_tiling()
    tiled = vae.decode(z).sample
    installed = engine.install(vae)
    assert torch.equal(vae.decode(z).sample, tiled), "stock's own tiles"
    assert not installed.notes()
    vae.disable_tiling()
    vae.enable_slicing()
    vae.decode(z)
    assert ": sliced (" in installed.notes()[0]
    vae.disable_slicing()
    vae.decode(z)
    assert ": whole (" in installed.notes()[0]


def test_gradients_autocast_and_tracing_are_stocks_own(free):
    free(0)
    vae, z = build().requires_grad_(True), latents().requires_grad_()
    vae.decode(z).sample.sum().backward()
    stock, z.grad = z.grad, None
    installed = engine.install(vae)
    vae.decode(z).sample.sum().backward()
    assert torch.equal(z.grad, stock)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = type(vae).decode(vae, z).sample
        assert torch.equal(vae.decode(z).sample, wanted)
    with torch.no_grad():
        compiled = torch.compile(lambda z: vae.decode(z).sample, backend="eager")
        torch.testing.assert_close(compiled(z), type(vae).decode(vae, z).sample)
    assert not installed.notes()


def answer(decode, z):
    try:
        return decode(z).sample.shape
    except (RuntimeError, ValueError) as error:
        return str(error)


@torch.no_grad()
def test_bad_input_is_stocks_to_answer():
    vae = build()
    engine.install(vae)
    for bad in (torch.ones(0, 4, 8, 8), torch.ones(4, 8, 8), torch.ones(1, 4, 8, 8, dtype=torch.float64)):
        assert answer(vae.decode, bad) == answer(lambda z: type(vae).decode(vae, z), bad)


@torch.no_grad()
def test_copies_pickles_and_the_end_of_a_vae(whole_decodes):
    vae, z = build(), latents()
    stock = vae.decode(z).sample
    ran = whole_decodes
    installed = engine.install(vae)
    vae_ref = weakref.ref(vae)
    other = copy.deepcopy(vae)
    for weight in other.parameters():
        weight.mul_(2)
    assert not torch.equal(other.decode(z).sample, stock), "a copy has weights of its own"
    assert not ran
    again = pickle.loads(pickle.dumps(vae))
    assert torch.equal(again.decode(z).sample, stock)
    del vae, other, again
    gc.collect()
    assert vae_ref() is None
    installed.restore()


def test_other_vaes_are_skipped_with_the_reason():
    tiny = AutoencoderTiny()
    installed = engine.install(tiny)
    assert installed.notes() == ("VAE: decodes as stock does, because a AutoencoderTiny is not planned for",)
    assert "decode" not in tiny.__dict__
    installed.restore()
    vae = build()
    vae.decode = lambda z: z
    installed = engine.install(vae)
    assert "another program" in installed.notes()[0]
    installed.restore()
    assert vae.decode(3) == 3


@torch.no_grad()
@pytest.mark.parametrize("amount", [2**40, 0])
def test_offloaded_weights(amount, free):
    free(amount)
    vae, z = build(), latents()
    stock = vae.decode(z).sample
    engine.install(vae)
    cpu_offload(vae, execution_device=torch.device("cpu"))
    torch.testing.assert_close(vae.decode(z).sample, stock)


@torch.no_grad()
def test_a_hook_of_the_whole_model_brings_its_weights_first():
    vae, z = build(), latents()
    brought = []

    class Hook(CpuOffload):
        def pre_forward(self, module, *args, **kwargs):
            brought.append(module)
            return super().pre_forward(module, *args, **kwargs)

    add_hook_to_module(vae, Hook(execution_device="cpu"), append=True)
    engine.install(vae)
    vae.decode(z)
    assert brought == [vae]


def overflowing(path="up_blocks.0.resnets.0") -> AutoencoderKL:
    """A VAE whose named block gives values beyond float16, and all others values within it."""
    vae = build()
    vae.decoder.get_submodule(path).conv2.weight.mul_(2e5)
    vae.decoder.up_blocks[0].upsamplers[0].conv.weight.mul_(1e-3)
    return vae.to(torch.float16)


@torch.no_grad()
@pytest.mark.parametrize("amount", [2**40, 0], ids=["whole", "tiled"])
def test_a_block_that_overflows_is_computed_with_a_wider_range(amount, free):
    vae, z = overflowing(), latents(2, dtype=torch.float16)
    weights = {name: (p.data_ptr(), p.clone()) for name, p in vae.named_parameters()}
    assert not torch.isfinite(vae.decode(z).sample).all()
    exact = copy.deepcopy(vae).float().decode(z.float()).sample
    installed = engine.install(vae)
    free(amount)
    ours = vae.decode(z).sample
    assert ours.dtype is torch.float16
    torch.testing.assert_close(ours.float(), exact, rtol=0.01, atol=0.01 * float(exact.std()))
    assert all(p.data_ptr() == weights[n][0] and torch.equal(p, weights[n][1]) for n, p in vae.named_parameters())
    note = installed.notes()[-1]
    assert "float16 overflowed, and was finite with decoder.up_blocks.0.resnets.0, " in note
    assert note.endswith("in float32")
    widened = note.split(" with ")[1].split(" in ")[0].split(", ")
    assert widened == [f"decoder.up_blocks.0.{name}" for name in ("resnets.0", "resnets.1", "upsamplers.0")]


@torch.no_grad()
def test_only_the_pictures_that_overflow_are_computed_again(monkeypatch):
    vae = build()
    vae.decoder.conv_in.weight.mul_(8)
    vae.to(torch.float16)
    z = torch.cat([latents() * 1e4, latents()]).half()
    stock = vae.decode(z).sample
    assert [bool(torch.isfinite(picture).all()) for picture in stock] == [False, True]
    engine.install(vae)
    again = []
    in_strips = engine.in_strips
    monkeypatch.setattr(engine, "in_strips", lambda *args: again.append(args[1]) or in_strips(*args))
    ours = vae.decode(z).sample
    assert torch.isfinite(ours).all()
    assert torch.equal(ours[1], stock[1])
    assert len(again) == 1
    assert torch.equal(again[0], z[:1])


@torch.no_grad()
def test_what_is_not_finite_for_another_reason_stays_so_and_is_reported():
    vae, z = build(torch.float16), latents(dtype=torch.float16)
    installed = engine.install(vae)
    z[0, 0, 0, 0] = torch.nan
    assert not torch.isfinite(vae.decode(z).sample).all()
    assert "the input was not finite either" in installed.notes()[-1]
    vae.decoder.conv_out.bias[0] = torch.inf
    assert not torch.isfinite(vae.decode(latents(dtype=torch.float16)).sample).all()
    assert "not finite either with decoder.conv_out in float32" in installed.notes()[-1]
    vae.decoder.conv_in.register_forward_hook(lambda _m, _a, y: y)
    vae.decode(latents(dtype=torch.float16))
    assert "was left so: decoder.conv_in: it has hooks" in installed.notes()[-1]


def test_the_safe_dtype_follows_from_the_architecture(monkeypatch):
    for name, wanted in (("gfx1100", torch.bfloat16), ("gfx1030", torch.float32), ("sm_90", torch.bfloat16)):
        monkeypatch.setattr(engine.arch, "detect", lambda _device, name=name: ARCHS[name])
        assert engine.safe_dtype(torch.device("cuda")) is wanted


@torch.no_grad()
def test_in_a_pipeline(tmp_path, free):
    pipe = tiny_pipeline(tmp_path)

    def picture():
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt", "generator": generator}
        return pipe("a frog", num_images_per_prompt=2, **options).images

    stock = picture()
    installed = engine.install(pipe.vae)
    assert torch.equal(picture(), stock)
    free(0)
    torch.testing.assert_close(picture(), stock, rtol=1e-4, atol=1e-5)
    installed.restore()
    assert torch.equal(picture(), stock)


@torch.no_grad()
def test_heads_that_fused_attention_gets_wrong_do_not_go_there(monkeypatch, free):
    vae, z = build(), latents()
    seen = []
    attend = nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        enabled = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled())
        seen.append((args[0].shape[-1], any(enabled)))
        return attend(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    stock = vae.decode(z).sample
    assert seen == [(32, True)]
    engine.install(vae)
    monkeypatch.setitem(FUSED_HEADS, "cpu", FusedHeads(16, "a report"))
    op._kept_from_fused.cache_clear()
    torch.testing.assert_close(vae.decode(z).sample, stock)
    free(0)
    torch.testing.assert_close(vae.decode(z).sample, stock, rtol=1e-4, atol=1e-5)
    assert len(seen) > 2
    assert {fused for _, fused in seen[1:]} == {False}
    op._kept_from_fused.cache_clear()


def test_the_table_of_wrong_heads():
    assert set(FUSED_HEADS) <= set(ARCHS)
    assert {name for name in ARCHS if name.startswith("gfx11")} == set(FUSED_HEADS)
    assert why_not_fused(ARCHS["gfx1100"], 256) is None
    assert "wrong above 256" in why_not_fused(ARCHS["gfx1151"], 512)
    assert why_not_fused(ARCHS["gfx1201"], 512) is None
    assert why_not_fused(ARCHS["sm_90"], 512) is None


def test_the_op_keeps_such_heads_from_every_fused_backend(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(op.arch, "detect", lambda _device: ARCHS["gfx1151"])
    op._kept_from_fused.cache_clear()
    problem = {"b": 1, "s": 64, "t": 64, "h": 1, "d": 512, "dtype": "float16"}
    for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn"):
        assert "heads of 512 on gfx1151" in op.OP.implementation(name).why_not(problem, device)
    q, k, v = torch.randn(3, 2, 40, 3, 512, generator=torch.Generator().manual_seed(0)).unbind(0)
    monkeypatch.setattr(op, "_SCORES", 2 * 3 * 40 * 7)
    ours = op._stock(q, k, v, None)
    torch.testing.assert_close(ours, reference.attention(q, k, v))
    op._kept_from_fused.cache_clear()


def test_what_scores_take():
    cpu = torch.device("cpu")
    q = torch.empty(1, 16384, 1, 512, dtype=torch.float16, device="meta")

    def taken(name):
        implementation = op.OP.implementation(name)
        return implementation.scratch_bytes((q, q, q, None), implementation.default, cpu)

    assert taken("sdpa_math") == 2 * 2**30
    assert taken("gemm_softmax") == 96 * MIB
    assert taken("torch") == 0
    assert taken("triton") == 0


def test_where_the_keys_are_divided_the_parts_are_counted(monkeypatch):
    """Few queries and many keys: as many key ranges as fill the GPU, each with its results in float32."""
    facts = SimpleNamespace(compute_units=96)
    monkeypatch.setattr(op.arch, "device_facts", lambda _device: facts)
    q, k = (torch.empty(1, length, 2, 512, dtype=torch.float16, device="meta") for length in (64, 4096))
    config = AttentionConfig(block_m=64, block_n=32, programs_per_cu=1)
    ranges, blocks = config.key_ranges(2, 64, 4096, 512, 96)
    assert (ranges, blocks) == (32, 4)
    taken = op.OP.implementation("triton").scratch_bytes((q, k, k, None), config, torch.device("cuda"))
    assert taken == 4 * ranges * 2 * 64 * (512 + 2)
    whole = replace(config, programs_per_cu=0)
    assert op.OP.implementation("triton").scratch_bytes((q, k, k, None), whole, torch.device("cuda")) == 0
