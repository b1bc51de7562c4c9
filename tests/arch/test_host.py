"""What stands around a GPU, in the words that records and the performance database have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rocm_sd.arch import host


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("6.8.0-45-generic", "Linux 6.8.0"),
        ("6.11.5-somebody-built-this", "Linux 6.11.5"),
        ("5.15.167.4-microsoft-standard-WSL2", "Linux 5.15.167.4 (WSL)"),
        ("custom", "Linux"),
    ],
)
def test_the_system_is_its_name_and_its_numbers(release, expected):
    assert host.system_name("Linux", release) == expected


@pytest.mark.parametrize(
    ("number", "on_rocm", "expected"),
    [(8907, False, "8.9.7"), (91900, False, "9.19.0"), (2020000, True, "2.20.0"), (30501, True, "3.5.1")],
)
def test_one_number_becomes_a_version(number, on_rocm, expected):
    assert host.convolution_library(number, on_rocm=on_rocm) == expected


def test_the_first_package_that_is_there_tells_its_version():
    assert host.installed("no-such-package", "pytest") == pytest.__version__
    assert host.installed("no-such-package") is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ({"hip": "7.0.5", "cuda": None, "rocm": "7.1.0"}, ("rocm", "7.1.0")),
        ({"hip": "7.0.5", "cuda": None}, ("rocm", "7.0.5")),
        ({"hip": None, "cuda": "13.0"}, ("cuda", "13.0")),
    ],
)
def test_the_runtime_is_that_of_torchs_build(version, expected):
    assert host.runtime(SimpleNamespace(version=SimpleNamespace(**version))) == expected


def test_an_address_is_written_as_the_kernel_writes_it():
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC3, pci_device_id=1)
    assert host.pci_address(properties) == "0000:c3:01.0"
