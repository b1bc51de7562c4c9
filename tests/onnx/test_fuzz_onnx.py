"""Readers of what lies in an exported folder, and of settings of quality: what is wrong is one sentence.

pytest -v tests/onnx/test_fuzz_onnx.py --hypothesis-profile=fuzz  ten thousand files for each, others every time
"""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")

import onnx
import onnx_folders
from fuzzed_files import broken_bytes, one_sentence
from rocm_sd import settings
from rocm_sd.engine.approximation import Approximation, known, known_with_plan, remember
from rocm_sd.engine.approximation.measured import _file
from rocm_sd.errors import RocmSdError
from rocm_sd.onnx import layout, providers
from rocm_sd.onnx.optimizing import optimize_folder
from rocm_sd.onnx.sessions import Session
from tiny_models import unet_of

PART = layout.Part(
    "unet", "float32", 18, (layout.Tensor("sample", "float32", ("batch", 4, "height", "width")),),
    (layout.Tensor("out_sample", "float32", ("batch", 4, "height", "width")),),
    (layout.PartFile("model.onnx", 10, "0" * 64),),
)  # fmt: skip
MANIFEST = layout.Manifest("emoji-sd", "StableDiffusionPipeline", {"rocm-sd": "0.1.0"}, (PART,))


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    logging.getLogger("rocm_sd").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("rocm_sd").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    MANIFEST.save(folder)
    return json.loads((folder / layout.MANIFEST).read_text())


@given(data=st.data())
def test_manifests(tmp_path_factory, manifest, data):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-export"
    (folder / "unet").mkdir(parents=True, exist_ok=True)
    (folder / "unet" / "model.onnx").write_bytes(b"0123456789")
    (folder / "model_index.json").write_text("{}")
    raw = data.draw(broken_bytes(manifest))
    (folder / layout.MANIFEST).write_bytes(raw)
    with one_sentence():
        found = layout.require_export(folder)
        layout.require_sizes(folder, found)
        layout.require_digests(folder, found)
    assert (folder / layout.MANIFEST).read_bytes() == raw


def test_the_good_manifest_is_taken(tmp_path):
    MANIFEST.save(tmp_path)
    assert layout.Manifest.load(tmp_path) == MANIFEST


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    onnx_folders.unet(folder)
    return folder


@given(share=st.floats(0, 1), noise=st.binary(max_size=9), cut=st.booleans(), of=st.sampled_from(("MODEL", "DATA")))
def test_models(tmp_path_factory, whole, share, noise, cut, of):
    """Torn or overwritten in the middle, and opened by ONNX Runtime and by what fuses it."""
    folder = tmp_path_factory.getbasetemp() / "torn-export"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    (folder / "model_index.json").write_text("{}")
    path = folder / "unet" / getattr(layout, of)
    raw = path.read_bytes()
    at = int(share * len(raw))
    path.write_bytes(raw[:at] + noise + (b"" if cut else raw[at + len(noise) :]))
    with one_sentence():
        Session(folder / "unet" / layout.MODEL, providers.named("cpu"))
    with one_sentence():
        optimize_folder(folder, folder.with_name("torn-fused"), provider="cpu", overwrite=True)
    assert path.read_bytes() == raw[:at] + noise + (b"" if cut else raw[at + len(noise) :])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ROCM_SD_CACHE", str(tmp_path_factory.mktemp("cache")))
        settings.current()
        unet = unet_of("sd15")
        remember(unet, "high", 20, Approximation(merged=0.5), "24 prompts", {"psnr_db": [31.0]})
        remember(unet, "high", 20, Approximation(stale_after=4), "24 prompts", {"psnr_db": [31.0]}, "patch=2")
        yield unet, json.loads(_file().read_text())


@given(data=st.data())
def test_settings_of_quality(model, data):
    unet, good = model
    raw = data.draw(broken_bytes(good))
    _file().write_bytes(raw)
    for found in (known(unet, "high"), known_with_plan(unet, "high", "patch=2")):
        for setting in found:
            assert str(setting.approximation)
            assert setting.from_steps > 0
    assert _file().read_bytes() == raw


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname"])
def test_weights_outside_of_the_folder_are_not_read(tmp_path, location):
    onnx_folders.unet(tmp_path / "export")
    (tmp_path / "export" / "model_index.json").write_text("{}")
    (tmp_path / "export" / "secret.bin").write_bytes(b"\0" * 4096)
    path = tmp_path / "export" / "unet" / layout.MODEL
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(RocmSdError):
        Session(path, providers.named("cpu"))
    with pytest.raises(RocmSdError):
        optimize_folder(tmp_path / "export", tmp_path / "fused", provider="cpu")
    assert not (tmp_path / "fused").exists()
