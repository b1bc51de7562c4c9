"""Links between GPUs in sysfs trees like those of real machines."""

from __future__ import annotations

import pytest
from kfd_tree import cpu_node, node, write

from rocm_sd.arch.links import Link, link_between, slowest_link

PCIE, XGMI = 2, 11
# (node, address, location as KFD packs it)
CARDS = [(1, "0000:03:00.0", 0x300), (2, "0000:43:00.0", 0x4300), (3, "0000:83:00.0", 0x8300)]
ONE, OTHER, THIRD = (address for _, address, _ in CARDS)


def machine(root, links, gfx=90402):
    """links: (from, to, folder, type, MB/s)."""
    cpu_node(root)
    for number, _, location in CARDS:
        node(root, number, simd_count=1216, simd_per_cu=4, gfx_target_version=gfx, location_id=location, domain=0)
    for number, (start, end, folder, kind, speed) in enumerate(links):
        place = root / "sys/class/kfd/kfd/topology/nodes" / str(start) / folder / str(number) / "properties"
        write(place, f"type {kind}\nnode_from {start}\nnode_to {end}\nweight 15\nmax_bandwidth {speed}\n")


def test_infinity_fabric_and_its_speed(tmp_path):
    machine(tmp_path, [(1, 0, "io_links", PCIE, 32000), (1, 2, "io_links", XGMI, 50000)])
    found = link_between(ONE, OTHER, tmp_path)
    assert found == Link("XGMI", 50e9)
    assert str(found) == "XGMI with 50 GB/s"


def test_pcie_between_two_radeons(tmp_path):
    machine(tmp_path, [(1, 2, "p2p_links", PCIE, 0)], gfx=110000)
    found = link_between(ONE, OTHER, tmp_path)
    assert found == Link("PCIe", None)
    assert str(found) == "PCIe"


@pytest.mark.parametrize(
    "links",
    [[], [(1, 0, "io_links", PCIE, 32000)], [(1, 2, "io_links", 3, 50000)]],
    ids=["none", "to the host alone", "of a kind nobody knows"],
)
def test_what_the_driver_does_not_list(tmp_path, links):
    machine(tmp_path, links)
    assert link_between(ONE, OTHER, tmp_path) is None


def test_a_link_that_cannot_be_read_hides_no_other(tmp_path):
    machine(tmp_path, [(1, 2, "p2p_links", PCIE, 16000)])
    write(tmp_path / "sys/class/kfd/kfd/topology/nodes/1/io_links/9/properties", "type many\n")
    assert link_between(ONE, OTHER, tmp_path) == Link("PCIe", 16e9)


def test_a_card_that_is_not_there(tmp_path):
    machine(tmp_path, [])
    assert link_between(ONE, "0000:99:00.0", tmp_path) is None
    assert link_between(ONE, OTHER, tmp_path / "nowhere") is None


def test_the_slowest_of_all_pairs(tmp_path):
    fabric = [(1, 2, "io_links", XGMI, 50000), (1, 3, "io_links", XGMI, 50000)]
    machine(tmp_path, [*fabric, (2, 3, "p2p_links", PCIE, 16000)])
    assert slowest_link([ONE, OTHER, THIRD], tmp_path) == Link("PCIe", 16e9)
    assert slowest_link([ONE, OTHER], tmp_path) == Link("XGMI", 50e9)
    assert slowest_link([ONE], tmp_path) is None


def test_one_pair_of_which_nothing_is_known_leaves_nothing_to_say(tmp_path):
    machine(tmp_path, [(1, 2, "io_links", XGMI, 50000)])
    assert slowest_link([ONE, OTHER, THIRD], tmp_path) is None
