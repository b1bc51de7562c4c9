"""The measured setting of the convolution library in jobs of a host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from measured_library import AS_TORCH_COMES, FIGURES, SEARCHED, WITHOUT, flags, measure, seen_by_convolutions
from rocm_sd.engine.convolutions.library import ChosenLibrary
from rocm_sd.integrations.a1111 import switch
from rocm_sd.integrations.a1111.switch import SWITCH
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import Choice, resolve

ON = (True, "auto", "exact")
OFF = (False, "auto", "exact")


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    forget_choices()
    measure()
    yield
    assert flags() == AS_TORCH_COMES
    forget_choices()


def pictures(host, script, args):
    p = host.processing.StableDiffusionProcessing()
    return host.processing.process_images(p, script, args).images


def said(what):
    return [line for line in SWITCH.report() if what in line]


@pytest.mark.parametrize("captured", ["0", "1"])
def test_a_job_is_computed_with_it_and_off_is_the_host(host, script, captured, monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", captured)
    with seen_by_convolutions(monkeypatch) as seen:
        stock = pictures(host, script, OFF)
    assert set(seen) == {AS_TORCH_COMES}
    with seen_by_convolutions(monkeypatch) as seen:
        on = pictures(host, script, ON)
    assert seen.count(SEARCHED) > len(seen) // 2
    assert all(float((one - other).norm() / other.norm()) <= 1e-5 for one, other in zip(on, stock, strict=True))
    (line,) = said("finds by a search")
    assert FIGURES in line
    with seen_by_convolutions(monkeypatch) as seen:
        off = pictures(host, script, OFF)
    assert set(seen) == {AS_TORCH_COMES}
    assert all(torch.equal(one, other) for one, other in zip(off, stock, strict=True))
    assert all("forward" not in module.__dict__ for module in host.shared.sd_model.modules())


def test_the_halves_of_the_vae_are_called_with_it(host, script, monkeypatch):
    decoder = host.shared.sd_model.first_stage_model.decoder = nn.Sequential(nn.Conv2d(4, 4, 3))
    for args, expected in ((ON, SEARCHED), (OFF, AS_TORCH_COMES)):
        pictures(host, script, args)
        with seen_by_convolutions(monkeypatch) as seen, torch.no_grad():
            decoder(torch.ones(1, 4, 4, 4))
        assert seen == [expected]
    assert "forward" not in decoder.__dict__


@pytest.mark.parametrize("channels_last", [False, True])
def test_without_the_library_where_convolutions_are_contiguous(host, script, channels_last, monkeypatch):
    """As on a GPU: a CPU is not left without oneDNN."""
    found = ChosenLibrary(Choice("none", source="measured here", why=FIGURES), torch.device("cuda"))
    monkeypatch.setattr(switch.convolutions, "choose_library", lambda _device: found)
    layout = Choice("channels_last" if channels_last else "torch", why="timed")
    monkeypatch.setattr(resolve, "choose", lambda *_: layout)
    with seen_by_convolutions(monkeypatch) as seen:
        pictures(host, script, ON)
    assert (WITHOUT in seen) is not channels_last
    assert bool(said("because its convolutions are channels-last")) is channels_last
    assert said("the VAE's convolutions keep cuDNN")


def test_the_hosts_own_setting_stays(host, script, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with seen_by_convolutions(monkeypatch) as seen:
        pictures(host, script, ON)
    assert set(seen) == {WITHOUT}
    (line,) = said("they were faster")
    assert "torch.backends.cudnn.enabled is False" in line
    monkeypatch.undo()
