"""Files of layers in 8 bits that were torn or written by a stranger: what is wrong is one sentence.

pytest tests/engine/approximation/test_fuzz_eight_bits.py --hypothesis-profile=fuzz  ten thousand files for each reader
"""

from __future__ import annotations

import copy
import json
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fuzzed_files import broken_bytes, sentence
from rocm_sd.engine.approximation import eight_bit_files, eight_bits
from rocm_sd.errors import RocmSdError
from rocm_sd.rewrite.eight_bits import Origin, quantized


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def _eight_bits():
    """(model with one layer, the same in 8 bits)."""
    model = nn.Sequential(nn.Linear(8, 4))
    weight, scale = quantized(model[0].weight, torch.int8, by_row=True)
    origin = Origin("0", eight_bits.digest_of(model[0].weight), "float32", 0.01)
    return model, nn.Sequential(eight_bits.in_eight_bits(model[0], weight, scale, None, None, origin))


def _header(path):
    with safe_open(path, framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()[EIGHT_BITS_KEY]  # noqa: SIM118


MODEL, IN_EIGHT_BITS = _eight_bits()
EIGHT_BITS_KEY = eight_bit_files._KEY
with tempfile.TemporaryDirectory() as made:
    TENSORS, _TEXT = _header(eight_bit_files.save_eight_bits(IN_EIGHT_BITS, f"{made}/x.safetensors"))
EIGHT_BITS = json.loads(_TEXT)


@given(raw=broken_bytes(EIGHT_BITS))
def test_eight_bit_headers(folder, raw):
    path, model = folder / "layers.safetensors", copy.deepcopy(MODEL)
    save_file(TENSORS, path, {EIGHT_BITS_KEY: raw.decode("utf-8", "replace")})
    try:
        eight_bit_files.load_eight_bits(model, path)
    except RocmSdError as error:
        sentence(error)
        assert type(model[0]) is nn.Linear
    else:
        assert model(torch.ones(1, 8)).isfinite().all()


@given(share=st.floats(0, 1), noise=st.binary(max_size=9), cut=st.booleans())
def test_eight_bit_files(folder, share, noise, cut):
    path, model = folder / "torn.safetensors", copy.deepcopy(MODEL)
    eight_bit_files.save_eight_bits(IN_EIGHT_BITS, path)
    whole = path.read_bytes()
    at = int(share * len(whole))
    path.write_bytes(whole[:at] + noise + (b"" if cut else whole[at + len(noise) :]))
    try:
        eight_bit_files.load_eight_bits(model, path)
    except RocmSdError as error:
        sentence(error)
        assert type(model[0]) is nn.Linear
    else:
        # What was not noticed has changed nothing that counts.
        assert torch.equal(model(torch.ones(1, 8)), IN_EIGHT_BITS(torch.ones(1, 8)))
