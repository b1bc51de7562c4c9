"""emoji-sd with its trained weights, exported and fused by the commands: the same pictures as Diffusers draws."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from pipelines import exactly, require_as_exact_as_stock
from rocm_sd.cli import main
from rocm_sd.models import resolve
from rocm_sd.onnx import ROCmOnnxPipeline, layout

pytestmark = pytest.mark.slow
PROMPT = "a frog on a pink background"


def typed(*arguments):
    with pytest.raises(SystemExit) as ended:
        main.run(["onnx", *map(str, arguments)])
    assert not ended.value.code


def opened(folder):
    pipe = ROCmOnnxPipeline.from_pretrained(folder, "cpu", verify=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "emoji-sd"
    typed("export", "emoji-sd", out)
    return out


@pytest.fixture(scope="module")
def exported(folder):
    return opened(folder)


@pytest.fixture(scope="module")
def fused(folder):
    """What is not compared with the export is said; of this model all is."""
    out = folder.parent / "fused"
    typed("optimize", folder, out, "--provider", "cpu")
    parts = layout.Manifest.load(out).optimized["parts"]
    assert {part["unchecked"] for part in parts} == {""}
    assert all(row["found"] for part in parts for row in part["fusions"] if row["name"] == "Attention")
    return opened(out)


def stock(kind=StableDiffusionPipeline, dtype=torch.float32):
    pipe = kind.from_pretrained(resolve().location, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe, seed=0, **options):
    given = {"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "pt"} | options
    return pipe(PROMPT, generator=torch.Generator().manual_seed(seed), **given).images


def test_a_picture_is_as_exact_as_stocks(exported, fused):
    with exactly(torch.float32):
        exact = drawn(stock(dtype=torch.float64))
    theirs = drawn(stock())
    for each in (exported, fused):
        ours = drawn(each)
        require_as_exact_as_stock([ours], [exact], [theirs], times=2)
        # What a person gets: the same 256 values, but for a rounding at the edge of one.
        eight_bits = [(each * 255).round() for each in (ours, theirs)]
        assert (eight_bits[0] - eight_bits[1]).abs().max() <= 1


def test_a_picture_made_of_a_picture_is_as_exact_as_stocks(exported, fused):
    options = {"image": torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(5)), "strength": 0.7}
    with exactly(torch.float32):
        exact = drawn(stock(StableDiffusionImg2ImgPipeline, torch.float64), **options)
    theirs = drawn(stock(StableDiffusionImg2ImgPipeline), **options)
    for each in (exported, fused):
        require_as_exact_as_stock([drawn(each, **options)], [exact], [theirs], times=2)


def test_in_half_precision_a_fused_model_is_as_exact_as_stock_in_it(folder):
    """All of its parts, since Diffusers' pipeline of this family computes its VAE in half precision, too."""
    out = folder.parent / "half"
    typed("optimize", folder, out, "--float16", "--provider", "cpu")
    assert {part.dtype for part in layout.Manifest.load(out).parts} == {"float16"}
    options = {"height": 32, "width": 32, "num_inference_steps": 2}
    with exactly(torch.float16):
        exact = drawn(stock(dtype=torch.float64), **options)
    ours, theirs = drawn(opened(out), **options), drawn(stock(dtype=torch.float16), **options)
    require_as_exact_as_stock([ours.to(theirs.dtype)], [exact], [theirs], times=2)


def test_clip_skip_takes_an_earlier_layer(exported):
    """Diffusers normalises what clip_skip chose with the encoder's own last layer, which is beside the model."""
    options = {"num_inference_steps": 1, "height": 32, "width": 32}
    plain, none, one = (drawn(exported, clip_skip=skip, **options) for skip in (None, 0, 1))
    # None skipped is the last layer: what is computed without hidden states, too.
    torch.testing.assert_close(plain, none, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, one, atol=1e-2)
