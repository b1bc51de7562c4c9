"""Models quantised by torchao: an optimised pipeline is as near to the model that was not quantised as stock is."""

from __future__ import annotations

import pytest
import torch
from diffusers import TorchAoConfig

import rocm_sd
from pipelines import CASES, DEVICE, call, exactly, require_as_exact_as_stock, small_blocks_too
from rocm_sd.integrations.diffusers import set_rocm_processors

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

CONFIGS = {
    "weights": quantization.Int8WeightOnlyConfig,
    "weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
}


@pytest.fixture(autouse=True, params=["0", "1"], ids=["stepwise", "captured"])
def step_graph(request, monkeypatch):
    small_blocks_too(monkeypatch, request.param)


def denoiser(pipe):
    return "unet" if hasattr(pipe, "unet") else "transformer"


def quantised(case, folder, config):
    pipe = case.build(folder)
    quantization.quantize_(getattr(pipe, denoiser(pipe)), CONFIGS[config]())
    return pipe


def drawn(pipe, case):
    return [call(pipe, case, seed) for seed in range(2)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd15-controlnet", "sd3", "flux-dev"])
def test_the_picture_is_as_exact_as_stocks(tmp_path, name, config):
    case = CASES[name]
    with exactly(torch.float32):
        exact = drawn(case.build(tmp_path).to(torch.float64), case)
    stock, ours = (quantised(case, tmp_path, config) for _ in range(2))
    wanted = drawn(stock, case)
    rocm_sd.optimize(ours)
    found = drawn(ours, case)
    # Rounded to 255 steps, a value is at times one step more or less where its last bits differ.
    require_as_exact_as_stock(found, exact, wanted, times=2)
    if config == "weights":
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    rocm_sd.restore(ours)
    assert all(torch.equal(*pair) for pair in zip(drawn(ours, case), wanted, strict=True))
    if name != "flux-dev":
        assert set_rocm_processors(getattr(ours, denoiser(ours)))
        assert all(torch.equal(*pair) for pair in zip(drawn(ours, case), wanted, strict=True))


@pytest.mark.parametrize("name", ["sd15", "sd3"])
def test_loaded_by_diffusers_own_config(tmp_path, name):
    case = CASES[name]
    stock = case.build(tmp_path)
    part = denoiser(stock)
    getattr(stock, part).save_pretrained(tmp_path / "part")
    pictures = []
    for optimise in (False, True):
        pipe = case.build(tmp_path)
        model = type(getattr(pipe, part)).from_pretrained(
            tmp_path / "part", quantization_config=TorchAoConfig(CONFIGS["weights"]()), dtype=torch.float32
        )
        setattr(pipe, part, model.to(DEVICE))
        if optimise:
            rocm_sd.optimize(pipe)
            assert rocm_sd.report(pipe).replaced
        pictures.append(call(pipe, case))
    torch.testing.assert_close(pictures[1], pictures[0], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(pictures[0], call(stock, case), atol=1e-4)
