"""Every pipeline of Diffusers that there is an optimised class for: made in each way, it draws stock's picture."""

from __future__ import annotations

from dataclasses import replace

import diffusers
import pytest
import torch
from safetensors.torch import save_file

import pipelines
import rocm_sd
from pipelines import CASES, Case, call, mask_of, picture_of
from rocm_sd.errors import ModelNotFound, RocmSdError, Unsupported
from rocm_sd.integrations import diffusers as ours
from rocm_sd.integrations.diffusers.keeping import in_force
from rocm_sd.integrations.diffusers.loading import save_single_file, single_file_class
from tiny_models import vae_of

INPAINTED = {"mask_image": mask_of(), "image": picture_of(1), "strength": 1.0, "height": 16, "width": 16}


def inpainting(name):
    case = CASES[name]
    arguments = {key: value for key, value in case.arguments.items() if key != "strength"}
    kind = case.kind.replace("Pipeline", "InpaintPipeline")
    return Case(kind, case.components, arguments | INPAINTED, case.scheduler, case.scheduler_options)


def of_sixteen_channels(tokenizer):
    """SD3's pipeline for inpainting takes no others."""
    parts = CASES["sd3"].components(tokenizer)
    config = dict(parts["transformer"].config) | {"in_channels": 16, "out_channels": 16}
    transformer = diffusers.SD3Transformer2DModel.from_config(config).eval()
    return parts | {"transformer": transformer, "vae": vae_of(latent_channels=16, shift_factor=0.06)}


FAMILY = {
    name: CASES[name]
    for name in (
        "sd15", "sd15-img2img", "sd15-inpaint4", "sd15-controlnet", "sd15-two-controlnets", "sd15-controlnet-img2img",
        "sd15-controlnet-inpaint", "sdxl", "sdxl-img2img", "sdxl-inpaint4", "sdxl-controlnet",
        "sdxl-controlnet-img2img", "sdxl-controlnet-inpaint", "refiner", "sd3", "sd3-img2img", "flux-dev",
        "flux-img2img",
    )
}  # fmt: skip
FAMILY["sd3-inpaint"] = replace(inpainting("sd3"), components=of_sixteen_channels)
FAMILY["flux-inpaint"] = inpainting("flux-dev")
OTHERS = {"ROCmOptimizedPipeline", "SharedPipeline"}  # no subclass of one of stock's
CLASSES = sorted({name for name in ours.__all__ if name.endswith("Pipeline")} - OTHERS)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Also on a machine with a GPU, where a pipeline would wait to be moved there."""
    monkeypatch.setattr(pipelines, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def class_of(case):
    return getattr(ours, f"ROCm{case.kind}")


def test_each_class_is_drawn_with_here():
    assert {f"ROCm{case.kind}" for case in FAMILY.values()} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_each_is_a_subclass_under_stocks_name(name):
    kind, stock = getattr(ours, name), getattr(diffusers, name.removeprefix("ROCm"))
    assert issubclass(kind, stock)
    assert kind.__name__ == stock.__name__
    assert kind.__qualname__ == name


@pytest.mark.parametrize("name", FAMILY)
def test_saved_loaded_drawn_and_handed_over(name, tmp_path):
    case = FAMILY[name]
    stock = case.build(tmp_path)
    folder = tmp_path / "model"
    stock.save_pretrained(folder)
    # Diffusers asks for a word about each text encoder that is to be left out.
    left_out = {name: None for name, part in stock.components.items() if part is None and name.endswith(("_2", "_3"))}
    loaded = quiet(class_of(case).from_pretrained(folder, level="memory", **left_out))
    assert type(loaded) is class_of(case)
    assert loaded.components.keys() == stock.components.keys()
    assert rocm_sd.report(loaded).level == "memory"
    steps = {"num_inference_steps": 2}
    wanted = call(stock, case, **steps)
    # How exact each is, is asked in tests/engine/test_pipelines.py.
    torch.testing.assert_close(call(loaded, case, **steps), wanted, rtol=1e-3, atol=1e-3)
    # Saved, it is stock's again.
    loaded.save_pretrained(tmp_path / "again")
    assert diffusers.DiffusionPipeline.load_config(tmp_path / "again")["_class_name"] == case.kind
    shared = quiet(class_of(case).from_pipe(stock))
    assert type(shared) is class_of(case)
    assert rocm_sd.report(shared).replaced
    shared.restore()
    assert torch.equal(call(stock, case, **steps), wanted)


def test_a_controlnet_is_given_to_a_model_that_has_none(tmp_path):
    base, controlled = CASES["sd15"].build(tmp_path), CASES["sd15-controlnet"]
    stock = controlled.build(tmp_path)
    base.save_pretrained(tmp_path / "base")
    pipe = ours.ROCmStableDiffusionControlNetPipeline.from_pretrained(tmp_path / "base", controlnet=stock.controlnet)
    assert type(pipe) is ours.ROCmStableDiffusionControlNetPipeline
    replaced = {change.path.partition(".")[0] for change in pipe.report().replaced}
    assert {"unet", "controlnet", "vae"} <= replaced
    assert call(quiet(pipe), controlled).isfinite().all()
    from_pipe = ours.ROCmStableDiffusionControlNetPipeline.from_pipe(base, controlnet=stock.controlnet)
    assert from_pipe.controlnet is stock.controlnet


class TestOneTaskOfSeveralPipelines:
    def test_a_picture_is_begun_from_a_text_and_gone_on_with(self, tmp_path):
        text = quiet(ours.ROCmStableDiffusionPipeline.from_pipe(CASES["sd15"].build(tmp_path)))
        picture = quiet(ours.ROCmStableDiffusionImg2ImgPipeline.from_pipe(text))
        assert picture.unet is text.unet
        assert in_force(picture) is not None
        assert call(picture, CASES["sd15-img2img"]).isfinite().all()

    @pytest.mark.parametrize("task", ["Img2Img", "Inpaint", "ControlNet", "ControlNetImg2Img", "ControlNetInpaint"])
    def test_the_counterpart_for_sdxl_is_found(self, tmp_path, task):
        family, net = ("sdxl", "sdxl-controlnet") if "ControlNet" in task else ("sdxl", None)
        more = {"controlnet": CASES[net].build(tmp_path).controlnet} if net else {}
        kind = getattr(ours, f"ROCmStableDiffusion{task}Pipeline")
        pipe = kind.from_pipe(CASES[family].build(tmp_path), **more)
        assert type(pipe) is getattr(ours, f"ROCmStableDiffusionXL{task}Pipeline")

    def test_a_refiner_is_no_pipeline_for_texts(self, tmp_path):
        stock = CASES["refiner"].build(tmp_path)
        with pytest.raises(Unsupported, match="without text_encoder, tokenizer") as refusal:
            ours.ROCmStableDiffusionXLPipeline.from_pipe(stock)
        assert "ROCmStableDiffusionXLImg2ImgPipeline" in refusal.value.hint
        assert (
            type(ours.ROCmStableDiffusionImg2ImgPipeline.from_pipe(stock)) is ours.ROCmStableDiffusionXLImg2ImgPipeline
        )

    @pytest.mark.parametrize(
        ("kind", "name", "message"),
        [
            ("ROCmFluxPipeline", "sd3", "a model of StableDiffusion3"),
            ("ROCmStableDiffusion3Pipeline", "flux-dev", "a model of Flux"),
            ("ROCmStableDiffusion3Pipeline", "sd15", "a StableDiffusionPipeline without transformer"),
            ("ROCmStableDiffusionInpaintPipeline", "flux-dev", "a FluxPipeline without tokenizer, unet|without unet"),
        ],
    )
    def test_a_model_of_another_family_is_refused_with_the_class_to_use(self, tmp_path, kind, name, message):
        stock = CASES[name].build(tmp_path)
        with pytest.raises(Unsupported, match=message) as refusal:
            getattr(ours, kind).from_pipe(stock)
        assert f"Or use ROCm{CASES[name].kind}." in refusal.value.hint


class TestFiles:
    @pytest.mark.parametrize("task", ["", "Img2Img", "Inpaint"])
    def test_one_file_for_every_task(self, tmp_path, task):
        stock = CASES["sd15"].build(tmp_path)
        stock.save_pretrained(tmp_path / "folder")
        save_single_file(stock, tmp_path / "model.safetensors")
        kind = getattr(ours, f"ROCmStableDiffusion{task}Pipeline")
        pipe = kind.from_single_file(
            str(tmp_path / "model.safetensors"), config=str(tmp_path / "folder"), local_files_only=True
        )
        assert type(pipe) is kind
        assert pipe.report().replaced
        for name, weight in stock.unet.state_dict().items():
            assert torch.equal(pipe.unet.state_dict()[name], weight)

    @pytest.mark.parametrize(
        ("weight", "kind"),
        [
            ("model.diffusion_model.input_blocks.0.0.weight", "StableDiffusionPipeline"),
            ("conditioner.embedders.1.model.x", "StableDiffusionXLPipeline"),
            ("model.diffusion_model.joint_blocks.0.x", "StableDiffusion3Pipeline"),
            ("double_blocks.0.img_attn.qkv.weight", "FluxPipeline"),
            ("model.diffusion_model.double_blocks.0.x", "FluxPipeline"),
        ],
    )
    def test_a_checkpoint_is_known_by_its_weights(self, tmp_path, weight, kind):
        file = tmp_path / "model.safetensors"
        save_file({weight: torch.zeros(1), "model.diffusion_model.x": torch.zeros(1)}, file)
        assert single_file_class(file).__name__ == kind
        if kind in {"FluxPipeline", "StableDiffusion3Pipeline"}:
            with pytest.raises(Unsupported, match="a model of") as refusal:
                ours.ROCmStableDiffusionPipeline.from_single_file(file)
            assert f"ROCm{kind}" in refusal.value.hint

    @pytest.mark.parametrize("way", ["from_pretrained", "from_single_file"])
    def test_a_path_with_nothing_there(self, tmp_path, way):
        with pytest.raises(ModelNotFound, match="There is no model at"):
            getattr(ours.ROCmStableDiffusionPipeline, way)(str(tmp_path / "nothing.safetensors"))

    def test_a_folder_that_is_no_model_has_stocks_words(self, tmp_path):
        with pytest.raises(OSError, match=r"model_index\.json"):
            ours.ROCmStableDiffusionPipeline.from_pretrained(tmp_path)

    @pytest.mark.parametrize("kind", ["ROCmStableDiffusionPipeline", "ROCmFluxPipeline"])
    def test_a_hub_that_cannot_be_reached_is_reported(self, tmp_path, kind):
        with pytest.raises(RocmSdError, match="owner/model could not be loaded: the hub cannot be reached") as refusal:
            getattr(ours, kind).from_pretrained("owner/model", cache_dir=tmp_path, local_files_only=True)
        # What code written for Diffusers catches.
        assert isinstance(refusal.value, OSError)
        assert "Check the name and the connection" in str(refusal.value)
