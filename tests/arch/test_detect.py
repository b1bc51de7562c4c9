"""Detection from what torch reports, on the CPU, and with no torch at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rocm_sd.arch import ARCHS, CPU, Vendor, arch_from_properties, detect, device_facts
from rocm_sd.errors import DeviceUnavailable

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # import torch now raises ModuleNotFoundError
from rocm_sd.arch import detect, find_gpus, device_facts
from rocm_sd.errors import DeviceUnavailable
assert detect("cpu").name == "cpu"
try:
    detect("cuda:0")
except DeviceUnavailable as error:
    assert "torch is not installed" in str(error)
else:
    raise AssertionError("a numbered device was accepted")
found = find_gpus()
expected = found[0].arch_name if found else "cpu"
print(detect().name, expected or found[0].vendor.value, device_facts().arch == detect())
"""


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"gcn_arch_name": "gfx942:sramecc+:xnack-"}, "gfx942"),
        ({"gcn_arch_name": "gfx1100"}, "gfx1100"),
        ({"capability": (9, 0)}, "sm_90"),
        ({"capability": (7, 5)}, "sm_75"),
        ({"capability": (12, 0)}, "sm_120"),
    ],
)
def test_properties_name_an_entry(properties, name):
    assert arch_from_properties(**properties) is ARCHS[name]


def test_a_capability_between_two_known_ones_is_unknown():
    orin = arch_from_properties(capability=(8, 7))
    assert (orin.name, orin.known, orin.vendor, orin.wave_size) == ("sm_87", False, Vendor.NVIDIA, None)


def test_gfx_name_and_capability_together_are_refused():
    """gfx1100 reports capability (11, 0): whoever passes both would let a number that means nothing decide."""
    with pytest.raises(ValueError, match="only one of them"):
        arch_from_properties(gcn_arch_name="gfx1100", capability=(11, 0))
    with pytest.raises(ValueError, match="only one of them"):
        arch_from_properties()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=["name", "torch.device"])
def test_the_cpu_is_the_cpu(device):
    assert detect(device) is CPU
    facts = device_facts(device)
    assert facts.arch is CPU
    assert facts.compute_units == os.cpu_count()
    assert facts.memory_bytes > 2**28
    assert facts.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine with no GPU")
def test_with_no_gpu_the_default_is_the_cpu_and_a_gpu_is_an_error():
    assert detect() is CPU
    with pytest.raises(DeviceUnavailable, match="sees no GPU"):
        detect("cuda:0")


def test_another_kind_of_device_is_unknown():
    meta = detect("meta")
    assert (meta.name, meta.known, meta.vendor) == ("meta", False, Vendor.NONE)
    assert device_facts("meta").compute_units is None


@pytest.mark.gpu
def test_the_gpu_at_hand_is_described_as_it_is():
    properties = torch.cuda.get_device_properties(0)
    here = detect("cuda:0")
    assert detect() is detect(torch.device("cuda", torch.cuda.current_device()))
    assert here.vendor is (Vendor.NVIDIA if torch.version.hip is None else Vendor.AMD)
    facts = device_facts("cuda:0")
    assert facts.multiprocessors == properties.multi_processor_count
    assert facts.memory_bytes == properties.total_memory
    if here.known:
        assert here.wave_size == properties.warp_size
    with pytest.raises(DeviceUnavailable, match="counted from 0"):
        detect("cuda:63")


def test_without_torch_the_kernel_is_asked():
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    name, expected, same = run.stdout.split()
    assert (name, same) == (expected, "True")
