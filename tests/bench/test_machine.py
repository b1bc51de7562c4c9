"""A record says which card, driver and versions, and nothing about whose they are."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import rocm_sd
from rocm_sd import arch
from rocm_sd.bench.machine import machine

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc 12.3"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (someone@build-host)  Sun"


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def card(monkeypatch):
    """A card of the given architecture, as arch.device_facts tells it."""

    def give(name, *, hip, miopen_or_cudnn):
        facts = arch.DeviceFacts(f"a {name} card", arch.get(name), 96, 48, 24 * 2**30)
        monkeypatch.setattr(arch, "device_facts", lambda _: facts)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: miopen_or_cudnn)
        return torch.device("cuda")

    return give


def test_this_machine_on_its_cpu():
    here = machine(torch.device("cpu"))
    assert here.arch == "cpu"
    assert here.driver is None
    assert here.compute_units > 0
    assert here.memory_mib > 0
    assert here.versions["rocm-sd"] == rocm_sd.__version__
    assert here.versions["python"] == platform.python_version()
    assert here.versions["torch"] == torch.__version__
    assert not {"rocm", "cuda", "miopen", "cudnn"} & set(here.versions)


def test_nothing_names_a_person_a_host_or_a_folder(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "the-host-of-somebody")
    found = json.dumps(asdict(machine(torch.device("cpu"))))
    for private in ("the-host-of-somebody", "/home", "/usr", "/root", f'"{getpass.getuser()}"'):
        assert private not in found


def test_an_amd_card(card, tmp_path):
    device = card("gfx1100", hip="7.0.51831-a3e329ad8", miopen_or_cudnn=3005001)
    write(tmp_path, "sys/module/amdgpu/version", "6.12.12\n")
    found = machine(device, root=tmp_path)
    assert (found.device, found.arch, found.compute_units, found.memory_mib) == ("a gfx1100 card", "gfx1100", 96, 24576)
    assert found.driver == "amdgpu 6.12.12"
    assert found.versions["miopen"] == "3.5.1"
    assert found.versions["rocm"].startswith("7.0")
    assert "cuda" not in found.versions


def test_the_driver_of_the_kernel_has_no_version_of_its_own(card, tmp_path):
    device = card("gfx1100", hip="7.0", miopen_or_cudnn=None)
    assert machine(device, root=tmp_path).driver is None
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    assert machine(device, root=tmp_path).driver == "amdgpu of the kernel"


@pytest.mark.parametrize(("text", "driver"), [(CLOSED, "nvidia 550.54.15"), (OPEN, "nvidia 580.65.06"), ("", None)])
def test_an_nvidia_card(card, tmp_path, text, driver):
    device = card("sm_90", hip=None, miopen_or_cudnn=91002)
    write(tmp_path, "proc/driver/nvidia/version", text)
    found = machine(device, root=tmp_path)
    assert found.driver == driver
    assert (found.versions["cuda"], found.versions["cudnn"]) == ("13.0", "9.10.2")


def test_a_processor_is_called_by_its_model(monkeypatch, tmp_path):
    monkeypatch.setattr(arch, "device_facts", lambda _: SimpleNamespace(**facts_of_a_cpu()))
    assert machine(torch.device("cpu"), root=tmp_path).device == "x86_64"
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD Ryzen 9 7950X\n")
    assert machine(torch.device("cpu"), root=tmp_path).device == "AMD Ryzen 9 7950X"


def facts_of_a_cpu():
    return {"name": "x86_64", "arch": arch.CPU, "compute_units": 4, "multiprocessors": 4, "memory_bytes": None}
