"""Finding GPUs in sysfs trees like those of real machines."""

from __future__ import annotations

import logging

import pytest
from kfd_tree import GIB, cpu_node, node, write

from rocm_sd.arch import Vendor, find_gpus
from rocm_sd.arch.kfd import gfx_name


def drm_card(root, number, vendor, address="0000:03:00.0"):
    device = root / "sys/devices/pci0000:00" / address
    write(device / "vendor", f"{vendor}\n")
    card = root / "sys/class/drm" / f"card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    (root / "sys/class/drm" / f"card{number}-DP-1").mkdir()


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90006, "gfx906"),
        (90008, "gfx908"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_target_versions_become_gfx_names(version, name):
    assert gfx_name(version) == name


def test_discrete_card_comes_before_the_integrated_one(tmp_path):
    cpu_node(tmp_path)
    # The integrated GPU of a desktop Ryzen often has the lower node number.
    node(tmp_path, 1, "raphael", simd_count=4, simd_per_cu=2, gfx_target_version=100306, location_id=4096)
    node(
        tmp_path,
        2,
        "navi31",
        [(1, 24 * GIB)],
        cpu_cores_count=0,
        simd_count=192,
        simd_per_cu=2,
        gfx_target_version=110000,
        location_id=768,
        domain=0,
    )
    card, integrated = find_gpus(tmp_path)
    assert (card.arch_name, card.name, card.compute_units, card.vram_bytes) == ("gfx1100", "navi31", 96, 24 * GIB)
    assert (card.integrated, card.pci_address, card.node, card.vendor) == (False, "0000:03:00.0", 2, Vendor.AMD)
    assert (integrated.arch_name, integrated.integrated, integrated.compute_units) == ("gfx1036", True, 2)
    assert integrated.vram_bytes is None
    assert integrated.pci_address == "0000:10:00.0"


def test_eight_accelerators_keep_the_order_of_their_nodes(tmp_path):
    cpu_node(tmp_path)
    for index in range(2, 12):
        node(
            tmp_path,
            index,
            "mi300x",
            [(1, 96 * GIB), (2, 96 * GIB), (0, GIB)],
            simd_count=1216,
            simd_per_cu=4,
            gfx_target_version=90402,
        )
    found = find_gpus(tmp_path)
    assert [gpu.node for gpu in found] == list(range(2, 12))
    assert {(gpu.arch_name, gpu.compute_units, gpu.vram_bytes) for gpu in found} == {("gfx942", 304, 192 * GIB)}


def test_a_node_with_cpu_cores_and_simds_is_integrated(tmp_path):
    node(tmp_path, 0, cpu_cores_count=8, simd_count=24, simd_per_cu=2, gfx_target_version=110003)
    (gpu,) = find_gpus(tmp_path)
    assert (gpu.arch_name, gpu.integrated) == ("gfx1103", True)


def test_an_unknown_gfx_is_found_and_nothing_is_said_of_it(tmp_path):
    node(tmp_path, 1, simd_count=128, simd_per_cu=4, gfx_target_version=130000)
    (gpu,) = find_gpus(tmp_path)
    assert (gpu.arch_name, gpu.integrated) == ("gfx1300", None)


def test_no_gpu(tmp_path):
    assert find_gpus(tmp_path) == ()
    cpu_node(tmp_path)
    assert find_gpus(tmp_path) == ()


def test_nvidia_only(tmp_path):
    information = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\nBus Location: \t 0000:0a:00.0\n"
    write(tmp_path / "proc/driver/nvidia/gpus/0000:0a:00.0/information", information)
    (gpu,) = find_gpus(tmp_path)
    assert (gpu.vendor, gpu.name, gpu.pci_address) == (Vendor.NVIDIA, "NVIDIA H200", "0000:0a:00.0")
    assert gpu.arch_name is None


def test_cards_on_the_bus_are_seen_without_their_drivers(tmp_path):
    drm_card(tmp_path, 0, "0x10de", "0000:01:00.0")
    drm_card(tmp_path, 1, "0x1002", "0000:03:00.0")
    drm_card(tmp_path, 2, "0x8086", "0000:00:02.0")
    assert [(gpu.vendor, gpu.pci_address, gpu.arch_name) for gpu in find_gpus(tmp_path)] == [
        (Vendor.AMD, "0000:03:00.0", None),
        (Vendor.NVIDIA, "0000:01:00.0", None),
    ]


@pytest.mark.parametrize(
    "text", ["simd_count many\n", "simd_count 8\n", "\x00\x01 \n"], ids=["word", "no gfx", "bytes"]
)
def test_a_malformed_node_is_named_in_the_log_and_hides_no_other(tmp_path, caplog, text):
    write(tmp_path / "sys/class/kfd/kfd/topology/nodes/1/properties", text)
    node(tmp_path, 2, simd_count=64, simd_per_cu=2, gfx_target_version=110002)
    with caplog.at_level(logging.WARNING):
        (gpu,) = find_gpus(tmp_path)
    assert gpu.arch_name == "gfx1102"
    assert "nodes/1/properties is skipped" in caplog.text


def test_this_machine_can_be_searched():
    assert all(gpu.vendor in (Vendor.AMD, Vendor.NVIDIA) for gpu in find_gpus())
