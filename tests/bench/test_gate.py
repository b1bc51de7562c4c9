from __future__ import annotations

import pytest
import torch

from rocm_sd.bench.gate import PictureGate
from rocm_sd.bench.workloads import make


@pytest.fixture(scope="module", params=["sd15-512", "sdxl-mlperf"])
def work(request):
    return make(request.param, torch.device("cpu"), tiny=True, steps=1)


def refusing(work, error, monkeypatch):
    """No room for the whole model in the exact dtype; what was asked for."""
    asked, real = [], work.pipeline

    def pipeline(dtype=None, *, by_layers=False):
        asked.append((dtype, by_layers))
        if dtype is torch.float64 and not by_layers:
            raise error
        return real(dtype, by_layers=by_layers)

    monkeypatch.setattr(work, "pipeline", pipeline)
    return asked


def test_exact_latents_of_a_model_that_does_not_fit_come_layer_by_layer(work, monkeypatch, caplog):
    whole = PictureGate(work, 2)
    asked = refusing(work, torch.OutOfMemoryError("tried to allocate 2 GiB"), monkeypatch)
    by_layers = PictureGate(work, 2)
    assert asked == [(torch.float64, False), (torch.float64, True), (None, False)]
    assert "layers come to the card one by one" in caplog.text
    assert torch.equal(whole._latents, by_layers._latents)
    assert torch.equal(whole._picture, by_layers._picture)
    assert by_layers.stock_error == whole.stock_error
    assert by_layers.check(work.pipeline()).wrong is None


def test_another_error_is_not_taken_for_a_lack_of_memory(work, monkeypatch):
    asked = refusing(work, RuntimeError("no kernel for this card"), monkeypatch)
    with pytest.raises(RuntimeError, match="no kernel"):
        PictureGate(work, 1)
    assert asked == [(torch.float64, False)]
