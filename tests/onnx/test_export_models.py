"""Models of every family, exported by the command and run: each part and the whole picture are as exact as torch's."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import CLIPConfig

from pipelines import CASES, call, exactly, picture_of, require_as_exact_as_stock
from rocm_sd.cli import main
from rocm_sd.errors import NumericsFailure
from rocm_sd.onnx import ROCmOnnxPipeline, checking, layout, modules
from rocm_sd.onnx.modules import exported_modules


@dataclasses.dataclass(frozen=True)
class Exported:
    family: str
    dtype: torch.dtype
    folder: object
    manifest: layout.Manifest
    tokens: object

    def stock(self, dtype=None, kind=None):
        case = CASES[self.family if kind is None else f"{self.family}-{kind}"]
        return case.build(self.tokens).to(self.dtype if dtype is None else dtype)


FAMILIES = {
    "sd15": (torch.float32, []),
    "sd21": (torch.float32, []),
    "sdxl": (torch.float16, ["--float16"]),
}


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tmp_path_factory):
    dtype, flags = FAMILIES[request.param]
    tokens, model = tmp_path_factory.mktemp("tokens"), tmp_path_factory.mktemp("model") / request.param
    CASES[request.param].build(tokens).save_pretrained(model)
    out = tmp_path_factory.mktemp("exported") / request.param
    with pytest.raises(SystemExit) as ended:
        main.run(["onnx", "export", str(model), str(out), *flags])
    assert not ended.value.code
    return Exported(request.param, dtype, out, layout.Manifest.load(out), tokens)


def test_the_folder_has_the_layout_and_the_names(exported):
    two = exported.family == "sdxl"
    parts = ["text_encoder", *(["text_encoder_2"] if two else []), "unet", "vae_decoder", "vae_encoder"]
    assert [part.name for part in exported.manifest.parts] == parts
    assert exported.manifest.optimized is None
    assert exported.manifest.source == exported.family
    files = {part.name: [file.name for file in part.files] for part in exported.manifest.parts}
    assert all(each == ["model.onnx", "model.onnx.data"] for each in files.values())
    layout.require_digests(exported.folder, exported.manifest)
    unet = exported.manifest.part("unet")
    added = ["text_embeds", "time_ids"] if two else []
    assert [each.name for each in unet.inputs] == ["sample", "timestep", "encoder_hidden_states", *added]
    assert unet.inputs[0].shape == ("batch", 4, "height", "width")
    assert [each.name for each in unet.outputs] == ["out_sample"]
    assert unet.dtype == str(exported.dtype).removeprefix("torch.")
    if two:
        second = exported.manifest.part("text_encoder_2")
        assert [each.name for each in second.outputs][:3] == ["text_embeds", "last_hidden_state", "hidden_states.0"]
    for name in ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"):
        assert (exported.folder / name).is_file()
    assert json.loads((exported.folder / "unet" / "config.json").read_text())["_class_name"] == "UNet2DConditionModel"
    assert not list(exported.folder.glob(".unfinished-*"))


def test_no_path_of_this_machine_is_left_in_a_graph(exported):
    for part in exported.manifest.parts:
        assert b"site-packages" not in (exported.folder / part.name / "model.onnx").read_bytes()


def test_a_whole_picture_is_as_exact_as_stocks(exported):
    ours = ROCmOnnxPipeline.from_pretrained(exported.folder, verify=True)
    assert ours.unet.dtype == exported.dtype
    ours.set_progress_bar_config(disable=True)
    case = CASES[exported.family]
    options = {"output_type": "pt", "height": 16, "width": 24}
    with exactly(exported.dtype):
        exact = call(exported.stock(torch.float64), case, **options)
    drawn = [call(each, case, **options) for each in (ours, exported.stock())]
    require_as_exact_as_stock([drawn[0].to(drawn[1].dtype)], [exact], [drawn[1]], times=2)
    # Another seed is another picture: the comparison above is not of two constants.
    assert not torch.allclose(call(ours, case, seed=1, **options), drawn[0], atol=1e-2)


def test_a_batch_of_another_size_and_image_to_image_are_as_exact(exported):
    ours = ROCmOnnxPipeline.from_pretrained(exported.folder, "cpu", threads=1)
    ours.set_progress_bar_config(disable=True)
    case = CASES[f"{exported.family}-img2img"]
    options = {"num_images_per_prompt": 2, "image": picture_of(3, 24, 16)}
    with exactly(exported.dtype):
        exact = call(exported.stock(torch.float64, "img2img"), case, **options)
    drawn = [call(each, case, **options) for each in (ours, exported.stock(kind="img2img"))]
    require_as_exact_as_stock([drawn[0].to(drawn[1].dtype)], [exact], [drawn[1]], times=2)


def test_an_export_that_is_wrong_is_not_kept(exported):
    """The check itself: weights that changed after the export are seen, each part's."""
    parts = exported_modules(exported.stock())
    for name, each in parts.items():
        file = exported.folder / name / "model.onnx"
        checking.require_same(each, file)
        first = next(p for p in each.module.parameters() if p.dim() > 1)
        with torch.no_grad():
            first.mul_(1.01)
        with pytest.raises(NumericsFailure, match=f"of the exported {name}"):
            checking.require_same(each, file)


def test_the_safety_checker_flags_what_diffusers_own_does():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = small | {"image_size": 8, "patch_size": 4, "projection_dim": 8}
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=8)).eval()
    for embeds in (checker.concept_embeds, checker.special_care_embeds):
        embeds.data.normal_()
    # About half of the pictures are above a threshold.
    checker.concept_embeds_weights.data.fill_(0.62)
    checker.special_care_embeds_weights.data.fill_(0.5)
    seen, images = torch.randn(40, 3, 8, 8), torch.rand(40, 3, 8, 8)
    part = modules._safety_checker(checker)
    with torch.no_grad():
        cleared, found = part.module(seen, images)
    theirs, flagged = checker(seen, images.clone())
    assert 5 < sum(flagged) < 35
    assert found.tolist() == flagged
    assert torch.equal(cleared, theirs)
