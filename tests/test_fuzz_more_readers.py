"""The readers of files that are not of benchmarks or tuning: what is wrong is one sentence, and nothing is lost.

pytest tests/test_fuzz_more_readers.py                               a hundred files for each reader
pytest -v tests/test_fuzz_more_readers.py --hypothesis-profile=fuzz  ten thousand, others every time
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from fuzzed_files import broken_bytes, one_sentence, sentence
from rocm_sd.agents import keeping
from rocm_sd.bench import accuracy, subjects
from rocm_sd.bench.accuracy import AccuracyRecord, EngineAccuracy
from rocm_sd.bench.records import Machine, WorkloadFacts
from rocm_sd.bench.report import pictures
from rocm_sd.cli.quality import _picture
from rocm_sd.errors import RocmSdError
from rocm_sd.models import single_file
from rocm_sd.ops import accepted
from rocm_sd.quality.scoring import read_statistics
from rocm_sd.serve.keys import Keys
from rocm_sd.tuning import tunable_op

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    logging.getLogger("rocm_sd").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("rocm_sd").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@st.composite
def torn(draw, whole):
    """A file of bytes with some of them overwritten, inserted or cut off."""
    raw = whole
    for _ in range(draw(st.integers(1, 3))):
        at, noise = int(draw(st.floats(0, 1)) * len(raw)), draw(st.binary(max_size=9))
        raw = raw[:at] + noise + draw(st.sampled_from((raw[at + len(noise) :], raw[at:], b"")))
    return raw


def _statistics():
    made = io.BytesIO()
    np.savez(made, mu=np.zeros(3), sigma=np.eye(3))
    return made.getvalue()


STATISTICS = _statistics()


@given(raw=torn(STATISTICS))
def test_statistics(folder, raw):
    (folder / "statistics.npz").write_bytes(raw)
    with one_sentence():
        found = read_statistics(folder / "statistics.npz")
        assert found.mean.isfinite().all()
        assert found.covariance.shape == (len(found.mean), len(found.mean))


IMPROVEMENT = json.loads((ROOT / "benchmarks/improve-cpu/gfx1100.json").read_text())["ops"][0]["record"]


@given(raw=broken_bytes({**IMPROVEMENT, "rounds": IMPROVEMENT["rounds"][:2]}))
def test_improvements(folder, raw):
    (folder / "improvement.json").write_bytes(raw)
    with one_sentence():
        keeping.tree_of(keeping.read(folder / "improvement.json").rounds)


ACCEPTED = accepted.Accepted(
    "rocm-sd-accepted/1", "geglu-12345678", "geglu", "config", ("gfx1100",), "0" * 16, config={"rows": 2}, bucket="x"
)


@given(raw=broken_bytes(asdict(ACCEPTED) | {"digest": ACCEPTED.hashed()}))
def test_accepted_kernels(folder, raw):
    """Each is code or a config that will run: none that was changed is taken, and none stops the others."""
    place = folder / "accepted-cache/accepted"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{ACCEPTED.name}.json").write_bytes(raw)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(accepted, "folder", lambda: place)
        assert [each for each in accepted.accepted() if each.hashed() != each.digest] == []


def _checkpoint(folder):
    place = folder / "model/unet"
    if not place.exists():
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        save_file({"a": torch.zeros(2)}, place / "part-1.safetensors")
        save_file({"secret": torch.zeros(2)}, folder / "model/other.safetensors")
    return place


@given(raw=broken_bytes({"metadata": {"total_size": 8}, "weight_map": {"a": "part-1.safetensors"}}))
def test_indexes_of_weights(folder, raw):
    place = _checkpoint(folder)
    (place / "diffusion_pytorch_model.safetensors.index.json").write_bytes(raw)
    with one_sentence():
        assert "secret" not in single_file.read_part(place.parent, "unet").weights


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/hostname", "x/../../other.safetensors", "..", "x" * 5000]
)
def test_weights_outside_of_their_folder_are_not_read(folder, shard):
    place = _checkpoint(folder)
    index = place / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(RocmSdError, match="is no file in its folder") as refused:
        single_file.read_part(place.parent, "unet")
    sentence(refused.value)


RESULTS = b"""\
Validator,PT_VERSION,2.11.0
Validator,GCN_ARCH_NAME,gfx1100
GemmTunableOp_Half_TN,tn_320_4096_320_ld_320_320_320,Gemm_Hipblaslt_1,0.021
"""


@given(raw=torn(RESULTS))
def test_results_of_tunable_op(folder, raw):
    (folder / "tunableop.csv").write_bytes(raw)
    with one_sentence():
        found = tunable_op.read_results(folder / "tunableop.csv")
        tunable_op.why_stale(found, "gfx1100", "2.11.0")


@given(raw=torn(b"id\tcaption\n1\ta frog\n2\ta red apple\n"), suffix=st.sampled_from((".tsv", ".txt")))
def test_prompts(folder, raw, suffix):
    file = folder / f"prompts{suffix}"
    file.write_bytes(raw)
    for read in (accuracy.read_prompts, lambda file: subjects.from_file(file).texts):
        with one_sentence():
            for prompt in read(file):
                assert prompt == prompt.strip() != ""


@given(raw=torn(b"# Keys of rocm-sd serve: name:sha256\nann:" + b"0" * 64 + b"\n"))
def test_keys(folder, raw):
    (folder / "keys").write_bytes(raw)
    with one_sentence():
        assert Keys(folder / "keys").name_of("") is None


ACCURACY = AccuracyRecord(
    WorkloadFacts("sdxl-1024", "sdxl", "random", 1024, 1024, 20, "EulerDiscreteScheduler", 8.0, "float16"),
    Machine("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24560, "6.12", "Linux 6.8", {"torch": "2.11.0+rocm7"}),
    "rocm-sd bench sdxl-1024 --accuracy", "2026-11-15T12:00:00+00:00", 5000, "0" * 64, "clip", "val2014",
    (EngineAccuracy("stock", "1", 5000, 31.7, 23.4, 900.0), EngineAccuracy("rocm-sd", "1", 5000, 31.7, 23.4, 500.0)),
)  # fmt: skip


@given(raw=broken_bytes(ACCURACY.to_dict()))
def test_accuracy_records(folder, raw):
    file = folder / "accuracy/sdxl-accuracy.json"
    file.parent.mkdir(exist_ok=True)
    for each in file.parent.iterdir():
        each.unlink()
    file.write_bytes(raw)
    with one_sentence():
        found = AccuracyRecord.load(file)
        for each in found.results:
            accuracy.verdict(found, each)
    # What is there is put aside, whatever it is.
    with suppress(RocmSdError):
        ACCURACY.save(file)
    assert [each for each in file.parent.iterdir() if each.read_bytes() == raw]


def _png():
    made, text = io.BytesIO(), PngImagePlugin.PngInfo()
    text.add_text("prompt", "a frog")
    text.add_itxt("prompt", "a frög", zip=True)
    Image.new("RGB", (9, 7), "red").save(made, format="PNG", pnginfo=text)
    return made.getvalue()


PNG = _png()


@given(raw=torn(PNG))
def test_pictures(folder, raw):
    (folder / "picture.png").write_bytes(raw)
    for read in (pictures.read, _picture):
        with one_sentence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(folder / "picture.png")


def test_the_good_files_are_taken(folder):
    """What is broken above is whole before that: none of the readers refuses everything."""
    for name, raw, read in (
        ("good.npz", STATISTICS, read_statistics),
        ("good.json", json.dumps(IMPROVEMENT).encode(), keeping.read),
        ("good.csv", RESULTS, tunable_op.read_results),
        ("good.tsv", b"id\tcaption\n1\ta frog\n2\ta red apple\n", accuracy.read_prompts),
        ("good.keys", b"ann:" + b"0" * 64 + b"\n", Keys),
        ("good-accuracy.json", json.dumps(ACCURACY.to_dict()).encode(), AccuracyRecord.load),
        ("good.png", PNG, pictures.read),
    ):
        (folder / name).write_bytes(raw)
        assert read(folder / name)
