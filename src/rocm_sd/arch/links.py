"""How two GPUs of this machine are connected, as AMD's compute driver (KFD) says it in sysfs.

A node lists the links of its own: those of `io_links` are to the host and over Infinity Fabric (XGMI), those of
`p2p_links` to other GPUs over PCIe. The driver writes bandwidths in MB/s, and 0 where it does not know one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rocm_sd.arch.kfd import KFD_NODES, find_gpus, numbered, read_properties

__all__ = ["Link", "link_between", "slowest_link"]

_KINDS = {2: "PCIe", 11: "XGMI"}


@dataclass(frozen=True, slots=True)
class Link:
    """`speed`: bytes a second in one direction, None where the driver does not say it."""

    kind: str
    speed: float | None

    def __str__(self) -> str:
        return self.kind if self.speed is None else f"{self.kind} with {self.speed / 1e9:.0f} GB/s"


def link_between(one: str, other: str, root: Path | None = None) -> Link | None:
    """By their PCI addresses; None where the driver lists no link between the two. `root` is where sys/ is."""
    root = Path("/") if root is None else root
    nodes = {gpu.pci_address: gpu.node for gpu in find_gpus(root) if gpu.node is not None}
    if one not in nodes or other not in nodes:
        return None
    for kind in ("io_links", "p2p_links"):
        for folder in numbered(root / KFD_NODES / str(nodes[one]) / kind):
            try:
                properties = read_properties(folder / "properties")
            except (OSError, ValueError):
                # Hidden from a container, or of a kernel that writes more than numbers.
                continue
            if properties.get("node_to") == nodes[other] and properties.get("type") in _KINDS:
                speed = properties.get("max_bandwidth", 0) * 1e6
                return Link(_KINDS[properties["type"]], speed or None)
    return None


def slowest_link(addresses: list[str], root: Path | None = None) -> Link | None:
    """Of all pairs of these GPUs; None where the driver knows nothing of a pair."""
    pairs = [(one, other) for number, one in enumerate(addresses) for other in addresses[number + 1 :]]
    found = [link_between(one, other, root) for one, other in pairs]
    known = [link for link in found if link is not None]
    if not known or len(known) < len(found):
        return None
    # PCIe is slower than XGMI where the driver leaves out how fast it is.
    return min(known, key=lambda link: (link.speed or 0.0, link.kind != "PCIe"))
