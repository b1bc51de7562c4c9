"""`rocm-sd onnx export --single`: one model of a whole picture, which draws what its parts and stock torch draw."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx_ir as ir

import onnx
from pipelines import CASES, exactly, require_as_exact_as_stock, tiny_pipeline
from rocm_sd.errors import NumericsFailure, RocmSdError, Unsupported
from rocm_sd.onnx import ROCmOnnxPipeline, joining, layout, single
from rocm_sd.onnx.joining import Ddim
from rocm_sd.onnx.optimizing import optimize_folder
from rocm_sd.onnx.single import export_single

FAMILIES = {"sd15": torch.float32, "sd21": torch.float32, "sdxl": torch.float16}


def stock(family, tokens, dtype):
    pipe = CASES[family].build(tokens).to(dtype)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe, seed=0, **options):
    given = {"height": 16, "width": 24, "num_inference_steps": 3, "guidance_scale": 4.0, "output_type": "pt"} | options
    return pipe("a frog", generator=torch.Generator().manual_seed(seed), **given).images.float()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("single") / request.param
    export_single(CASES[request.param].build(tokens).to(FAMILIES[request.param]), out, source="tiny")
    return request.param, out


def test_one_file_is_all_that_is_left_and_is_a_model(exported):
    _, out = exported
    manifest = layout.Manifest.load(out)
    assert [part.name for part in manifest.parts] == ["picture"]
    assert manifest.extra["unchecked"] == ""
    assert [each.name for each in manifest.whole.files] == ["model.onnx"]
    assert not {path.name for path in out.iterdir()} & {*layout.PARTS, single.PARTS_FOLDER}
    assert not list(out.glob(".*"))
    onnx.checker.check_model(str(out / layout.MODEL))
    assert {value.name for value in manifest.whole.inputs} >= {
        "input_ids",
        "negative_ids",
        "noise",
        "steps",
        "guidance",
    }
    assert [value.name for value in manifest.whole.outputs] == ["images"]


@pytest.mark.parametrize(
    "options", [{}, {"negative_prompt": "a dog", "num_images_per_prompt": 2}, {"guidance_scale": 1}]
)
def test_a_picture_is_as_exact_as_stocks(exported, tokens, options):
    family, out = exported
    ours = ROCmOnnxPipeline.from_pretrained(out, "cpu", verify=True)
    with exactly(FAMILIES[family]):
        exact = drawn(stock(family, tokens, torch.float64), **options)
    theirs = drawn(stock(family, tokens, FAMILIES[family]), **options)
    found = drawn(ours, **options)
    require_as_exact_as_stock([found], [exact], [theirs], times=2)
    assert not torch.allclose(drawn(ours, seed=1, **options), found, atol=1e-2)


def test_what_one_model_cannot_do_is_said(exported, tmp_path):
    _, out = exported
    ours = ROCmOnnxPipeline.from_pretrained(out, "cpu")
    with pytest.raises(Unsupported, match=r"an image to start from.*without --single"):
        drawn(ours, image=torch.rand(1, 3, 16, 16))
    with pytest.raises(Unsupported, match="clip_skip"):
        drawn(ours, clip_skip=1)
    with pytest.raises(Unsupported, match="another scheduler"):
        ours.scheduler = object()
    with pytest.raises(Unsupported, match=r"which is one model.*without --single"):
        optimize_folder(out, tmp_path / "fused", provider="cpu")
    with pytest.raises(RocmSdError, match="holds an export of tiny already"):
        export_single(CASES["sd15"].build(tmp_path), out, source="tiny")


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_the_scheduler_in_it_is_diffusers_ddim(spacing, prediction, tmp_path):
    """Of a UNet that gives its sample: what is left are the scheduler's own numbers."""
    scheduler = diffusers.DDIMScheduler(
        timestep_spacing=spacing, prediction_type=prediction, clip_sample=prediction == "sample", clip_sample_range=0.9,
        steps_offset=int(spacing == "leading"), set_alpha_to_one=False, beta_schedule="scaled_linear",
    )  # fmt: skip
    parts = parts_that_copy(tmp_path)
    drawing = joining.Drawing(Ddim.of(scheduler), channels=3, scale=1, scaling=0.5)
    ir.save(joining.joined(parts, drawing), tmp_path / "model.onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    ids, noise = np.ones((1, 4), np.int64), np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype(np.float32)
    for steps in (1, 2, 7, 16, 30, 48):
        scheduler.set_timesteps(steps)
        latents = torch.from_numpy(noise).double()
        for time in scheduler.timesteps:
            latents = scheduler.step(latents * 0.5 + time / 1000, time, latents).prev_sample
        expected = (latents / 0.5 / 2 + 0.5).clamp(0, 1)
        given = {"input_ids": ids, "negative_ids": ids, "noise": noise, "guidance": np.asarray(3, np.float32)}
        (found,) = session.run(None, {**given, "steps": np.asarray(steps)})
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)


def parts_that_copy(folder):
    texts = {
        "text_encoder": """(int64[batch, tokens] input_ids) => (float[batch, tokens] last_hidden_state)
            { last_hidden_state = Cast <to = 1> (input_ids) }""",
        "unet": """(float[batch, 3, h, w] sample, float timestep, float[batch, tokens] encoder_hidden_states)
            => (float[batch, 3, h, w] out_sample)
            <float half = {0.5}, float many = {1000.0}>
            { less = Mul (sample, half)  part = Div (timestep, many)  out_sample = Add (less, part) }""",
        "vae_decoder": """(float[batch, 3, h, w] latent_sample) => (float[batch, 3, h, w] sample)
            { sample = Identity (latent_sample) }""",
    }
    files = {}
    for name, text in texts.items():
        files[name] = folder / f"{name}.onnx"
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {name} {text}')
        onnx.save(model, files[name])
    return files


def test_an_interrupted_export_goes_on_and_a_wrong_model_is_not_kept(tokens, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def wrong(parts, drawing):
        model = joined(parts, drawing)
        model.graph.initializers["scaling"].const_value = ir.tensor(np.float32(0.5), name="scaling")
        return model

    joined = joining.joined
    monkeypatch.setattr(joining, "joined", wrong)
    with pytest.raises(NumericsFailure, match="a picture of the one model is not the export's"):
        export_single(tiny_pipeline(tokens), out, source="tiny")
    assert [path.name for path in out.iterdir()] == [single.PARTS_FOLDER]
    monkeypatch.setattr(joining, "joined", joined)
    told = []
    export_single(tiny_pipeline(tokens), out, source="tiny", progress=lambda _d, _t, what: told.append(what))
    assert told == ["starting", "joining the parts", "compared with its parts", "done"]


def test_weights_that_pass_two_gigabytes_lie_beside_it(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(single, "_MOST_IN_ONE_FILE", 10_000)
    manifest = export_single(tiny_pipeline(tokens), tmp_path / "out", source="tiny")
    assert [each.name for each in manifest.whole.files] == ["model.onnx", "model.onnx.data"]
    data = tmp_path / "out" / layout.DATA
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(RocmSdError, match=r"model.onnx.data has \d+ bytes.*--single"):
        ROCmOnnxPipeline.from_pretrained(tmp_path / "out", "cpu")


def test_what_cannot_be_one_model_is_refused_before_anything_is_written(tokens, tmp_path):
    pipe = tiny_pipeline(tokens)
    pipe.text_encoder = None
    with pytest.raises(Unsupported, match="--single does not support a model without a text_encoder"):
        export_single(pipe, tmp_path / "out", source="tiny")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RocmSdError, match="holds something else"):
        export_single(tiny_pipeline(tokens), tmp_path, source="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
