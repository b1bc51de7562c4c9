"""The measured setting of the convolution library in the nodes' models, against stand-ins of ComfyUI's interfaces."""

from __future__ import annotations

import fake_comfyui
import pytest
import torch

from measured_library import AS_TORCH_COMES, FIGURES, SEARCHED, WITHOUT, flags, measure, seen_by_convolutions
from rocm_sd.engine.convolutions.library import ChosenLibrary
from rocm_sd.integrations.comfyui import host, patching
from rocm_sd.integrations.comfyui.comfyui_policy import compiled_ahead
from rocm_sd.integrations.comfyui.host import PatchReport
from rocm_sd.ops import OPS
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import Choice


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch):
    fake_comfyui.install(monkeypatch)
    host._SAID.clear()
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    forget_choices()
    measure()
    with torch.no_grad():
        yield
    assert flags() == AS_TORCH_COMES
    forget_choices()


def notes(patched):
    return "\n".join(patching.report_of(patched).lines())


@pytest.mark.parametrize("captured", ["0", "1"])
@pytest.mark.parametrize("level", ["auto", "memory"])
def test_steps_are_computed_with_it_and_the_original_is_the_hosts(level, captured, monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{name}=torch" for name in OPS))
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", captured)
    stock = fake_comfyui.patcher()
    expected = fake_comfyui.run(stock)
    ours = patching.optimize_model(stock, level, "exact")
    with seen_by_convolutions(monkeypatch) as seen:
        result = fake_comfyui.run(ours)
    assert set(seen) == {SEARCHED}
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert FIGURES in notes(ours)
    assert ("replayed 2 times" in notes(ours)) == (captured == "1" and level == "auto")
    with seen_by_convolutions(monkeypatch) as seen:
        fake_comfyui.run(patching.stock_clone(ours))
    assert set(seen) == {AS_TORCH_COMES}


def test_an_error_in_a_step_puts_the_flags_back():
    ours = patching.optimize_model(fake_comfyui.patcher(), "auto", "exact")

    def interrupt(*_args):
        assert flags() == SEARCHED
        raise InterruptedError

    ours.model.diffusion_model.out.register_forward_pre_hook(interrupt)
    with pytest.raises(InterruptedError):
        fake_comfyui.run(ours)
    assert flags() == AS_TORCH_COMES


def test_the_hosts_own_setting_stays(monkeypatch):
    """ComfyUI switches MIOpen off on most cards of AMD when it starts."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    ours = patching.optimize_model(fake_comfyui.patcher(), "auto", "exact")
    with seen_by_convolutions(monkeypatch) as seen:
        fake_comfyui.run(ours)
    assert set(seen) == {WITHOUT}
    assert "because torch.backends.cudnn.enabled is False" in notes(ours)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)


def test_where_nothing_was_measured_nothing_wraps_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "another"))
    forget_choices()
    ours = patching.optimize_model(fake_comfyui.patcher(), "auto", "exact")
    assert not ours.get_wrappers("diffusion_model", host.KEY)


class _Vae(torch.nn.Module):
    def decode(self, _z):
        return flags()


@pytest.mark.parametrize(("implementation", "expected"), [("searched", SEARCHED), ("none", AS_TORCH_COMES)])
def test_a_vae_decodes_with_a_search_and_not_without_the_library(implementation, expected):
    device = torch.device("cpu" if implementation == "searched" else "cuda")
    library = ChosenLibrary(Choice(implementation, source="measured here", why=FIGURES), device)
    vae = _Vae()
    decode = compiled_ahead(vae, "decode", PatchReport("VAE", "cpu", "auto"), library)
    assert decode(torch.ones(1)) == expected
    assert bool(library.notes_of_a_vae()) == (implementation == "none")
