"""IP-Adapters loaded from files by Diffusers itself: an optimised pipeline draws stock's picture with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

import pipelines
import rocm_sd
from pipelines import CASES, DEVICE, Twins, mask_of, small_blocks_too
from rocm_sd.integrations.diffusers import ROCmAttnProcessor, ROCmIPAdapterAttnProcessor, set_rocm_processors
from rocm_sd.integrations.diffusers.keeping import in_force
from tiny_models import unet_of

IMAGE = 16
FAMILIES = {"sd15": "sd15", "sdxl": "sdxl", "sd15-controlnet": "sd15"}


def in_two_steps(name):
    case = CASES[name]
    return replace(case, arguments=case.arguments | {"num_inference_steps": 2})


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    small_blocks_too(monkeypatch, "1")


def save_adapter(folder, family, seed):
    """In the layout of the published ones: a projection of the picture's embedding, keys and values for each layer."""
    torch.manual_seed(seed)
    unet = unet_of(family)
    text = unet.config.cross_attention_dim
    tensors = {
        "image_proj.proj.weight": torch.randn(4 * text, IMAGE) / IMAGE**0.5,
        "image_proj.proj.bias": torch.randn(4 * text) / 8,
        "image_proj.norm.weight": torch.ones(text),
        "image_proj.norm.bias": torch.zeros(text),
    }
    # Numbered as Diffusers goes through them.
    by_order = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(by_order):
        wide = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("k", "v"):
            tensors[f"ip_adapter.{2 * number + 1}.to_{part}_ip.weight"] = torch.randn(wide, text) / text**0.5
    save_file(tensors, folder / f"adapter-{seed}.safetensors")


@pytest.fixture
def adapters(tmp_path):
    def load(name, *seeds):
        for seed in seeds:
            save_adapter(tmp_path, FAMILIES[name], seed)
        files = [f"adapter-{seed}.safetensors" for seed in seeds]
        return lambda pipe: pipe.load_ip_adapter(
            str(tmp_path), subfolder="", weight_name=files, image_encoder_folder=None, local_files_only=True
        )

    return load


def embeddings(*seeds, guided=True):
    """As `prepare_ip_adapter_image_embeds` gives them: of no picture and of one."""
    return [torch.randn(2 if guided else 1, 1, IMAGE, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


class Adapted(Twins):
    def drawn(self, pipe, seed=0, **options):
        """The embeddings in the dtype of each."""
        given = [one.to(pipelines.DEVICE, pipe.dtype) for one in options.get("ip_adapter_image_embeds", ())]
        return super().drawn(pipe, seed, **options | ({"ip_adapter_image_embeds": given} if given else {}))


@pytest.mark.parametrize(("name", "step_graph"), [("sd15", "0"), ("sdxl", "1"), ("sd15-controlnet", "1")])
def test_load_scale_and_unload(tmp_path, adapters, monkeypatch, name, step_graph):
    small_blocks_too(monkeypatch, step_graph)
    twins = Adapted(in_two_steps(name), tmp_path)
    plain = twins.check()
    twins.each(adapters(name, 1))
    picture = {"ip_adapter_image_embeds": embeddings(5)}
    with_it = twins.check(**picture)
    assert not torch.allclose(with_it, plain, atol=1e-3)
    # Read anew by every call: a step that was captured with another scale is not replayed.
    twins.each(lambda pipe: pipe.set_ip_adapter_scale(0.3))
    weaker = twins.check(ip_adapter_image_embeds=embeddings(5))
    assert not torch.allclose(weaker, with_it, atol=1e-4)
    assert not torch.allclose(weaker, twins.check(ip_adapter_image_embeds=embeddings(6)), atol=1e-4)
    twins.each(lambda pipe: pipe.unload_ip_adapter())
    torch.testing.assert_close(twins.check(), plain, rtol=1e-3, atol=1e-3)


def test_loaded_before_optimize_and_restored(tmp_path, adapters):
    twins = Adapted(in_two_steps("sd15"), tmp_path)
    rocm_sd.restore(twins.ours)
    twins.each(adapters("sd15", 1))
    rocm_sd.optimize(twins.ours)
    picture = {"ip_adapter_image_embeds": embeddings(5)}
    twins.check(**picture)
    rocm_sd.restore(twins.ours)
    assert twins.are_equal(**picture)


def test_two_adapters_with_masks_by_place(tmp_path, adapters):
    twins = Adapted(in_two_steps("sd15"), tmp_path)
    twins.each(adapters("sd15", 1, 2))
    twins.each(lambda pipe: pipe.set_ip_adapter_scale([0.7, 0.4]))
    picture = {"ip_adapter_image_embeds": embeddings(5, 6)}
    both = twins.check(**picture)
    halves = [mask_of(), 1 - mask_of()]
    by_place = twins.check(**picture, cross_attention_kwargs={"ip_adapter_masks": halves})
    assert not torch.allclose(both, by_place, atol=1e-4)


def test_without_guidance(tmp_path, adapters):
    twins = Adapted(in_two_steps("sd15"), tmp_path)
    twins.each(adapters("sd15", 1))
    twins.check(ip_adapter_image_embeds=embeddings(5, guided=False), guidance_scale=1.0)


def test_by_our_processors(tmp_path, adapters):
    twins = Adapted(in_two_steps("sd15"), tmp_path)
    twins.ours.unet.set_attn_processor(ROCmAttnProcessor())
    twins.each(adapters("sd15", 1))
    unet = twins.ours.unet
    # Diffusers keeps a picture's own, and gives the attentions to the text its own.
    assert {type(one) for one in unet.attn_processors.values()} == {ROCmAttnProcessor, IPAdapterAttnProcessor2_0}
    picture = {"ip_adapter_image_embeds": embeddings(5)}
    with_it = twins.check(**picture)
    assert set_rocm_processors(unet)
    assert {type(one) for one in unet.attn_processors.values()} == {ROCmAttnProcessor, ROCmIPAdapterAttnProcessor}
    torch.testing.assert_close(twins.check(**picture), with_it)
    twins.each(lambda pipe: pipe.set_ip_adapter_scale(0.3))
    weaker = twins.check(**picture)
    assert not torch.allclose(weaker, with_it, atol=1e-4)
    assert unet.state_dict().keys() == twins.stock.unet.state_dict().keys()
    twins.each(lambda pipe: pipe.unload_ip_adapter())
    assert {type(one) for one in unet.attn_processors.values()} == {ROCmAttnProcessor, AttnProcessor2_0}
    twins.check()


def test_a_picture_itself_goes_through_the_image_encoder(tmp_path, adapters):
    twins = Adapted(in_two_steps("sd15"), tmp_path)
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, projection_dim=IMAGE, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip

    def with_encoder(pipe):
        torch.manual_seed(7)
        encoder = CLIPVisionModelWithProjection(config).eval().to(DEVICE, pipe.dtype)
        pipe.register_modules(image_encoder=encoder, feature_extractor=CLIPImageProcessor(size=8, crop_size=8))

    twins.each(with_encoder)
    twins.each(adapters("sd15", 1))
    red, blue = (twins.check(ip_adapter_image=Image.new("RGB", (12, 12), colour)) for colour in ("red", "blue"))
    assert not torch.allclose(red, blue, atol=1e-4)
    assert in_force(twins.ours) is not None


def test_with_parts_that_are_offloaded(tmp_path, adapters, monkeypatch):
    monkeypatch.setattr(pipelines, "DEVICE", torch.device("cpu"))
    twins = Adapted(in_two_steps("sd15"), tmp_path)
    twins.each(adapters("sd15", 1))
    twins.ours.enable_model_cpu_offload(device="cpu")
    twins.check(ip_adapter_image_embeds=embeddings(5))
    rocm_sd.optimize(twins.ours)
    twins.check(ip_adapter_image_embeds=embeddings(6))
