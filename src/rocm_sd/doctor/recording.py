"""A machine as a folder: facts.json, probes.json, and the part of sysfs that its GPUs are read from.

Nothing in it names a person, a host, a folder or the serial number of a card.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.facts import Facts
from rocm_sd.doctor.reading import cards, gpus_in
from rocm_sd.errors import InvalidOption
from rocm_sd.files import read_text, write_texts
from rocm_sd.plain_json import read_json
from rocm_sd.typed_json import Misfit, Rules, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["FACTS", "PROBES", "load", "read_probes", "record", "without_names"]

FACTS = "facts.json"
PROBES = "probes.json"

_NODES = "sys/class/kfd/kfd/topology/nodes"
# Bytes, and numbers of things: none is negative.
_SIZE = {"minimum": 0, "maximum": 2**63}
_RULES: Rules = {
    "Facts.memory_total": _SIZE,
    **{f"Gpu.{name}": _SIZE for name in ("index", "compute_units", "vram_total", "vram_free", "gtt_total")},
    **{f"TorchDevice.{name}": _SIZE for name in ("total", "free")},
}
# Of the kernel's own description; it also tells a card's serial number (unique_id), which stays out.
_KEPT_PROPERTIES = (
    "cpu_cores_count", "simd_count", "simd_per_cu", "gfx_target_version", "vendor_id", "location_id", "domain",
)  # fmt: skip
_KEPT_OF_A_BANK = ("heap_type", "size_in_bytes")
_KEPT_OF_A_CARD = ("vendor", "mem_info_vram_total", "mem_info_vram_used", "mem_info_gtt_total")

# Two parts or more, and no part of a web address.
_PATH = re.compile(r"(?<![\w/])(?!//)(?:[A-Za-z]:)?(?:[\\/]|~/)[^\s:,;'\"()<>\\/]+(?:[\\/][^\s:,;'\"()<>\\/]*)+")
_HOME = re.compile(r"[\\/](?:home|Users)[\\/][^\\/]+[\\/]?$")
_SERIAL = re.compile(r"GPU-[0-9a-fA-F-]+")
# A device file says something, and names nobody.
_DEVICE = re.compile(r"/dev/[\w/]+$")


def load(folder: Path) -> Facts:
    """The machine in a folder. Where the folder has a sysfs tree, the GPUs are read from it, as on a real machine."""
    file = folder / FACTS

    def unreadable(why: str) -> InvalidOption:
        hint = f"{file} is not a recorded machine: {why}. Name a folder that `rocm-sd doctor --record FOLDER` wrote."
        return InvalidOption("machine", str(folder), [], hint=hint)

    try:
        facts = read(Facts, read_json(file, unreadable), _RULES)
    except Misfit as error:
        raise unreadable(str(error)) from None
    return replace(facts, gpus=gpus_in(folder)) if (folder / "sys").is_dir() else facts


def read_probes(folder: Path) -> dict[str, Any]:
    """The answers of a recorded machine by the probe's name; empty where none were recorded."""
    file = folder / PROBES
    if not file.exists():
        return {}

    def unreadable(why: str) -> InvalidOption:
        return InvalidOption("machine", str(folder), [], hint=f"{file}: {why}.")

    answers: dict[str, Any] = read_json(file, unreadable, of=dict)
    return answers


def record(folder: Path, facts: Facts, answers: Mapping[str, Any], root: Path | None = None) -> None:
    """Write a machine down, all of it or nothing; `root` is where its sys/ is."""
    root = root or Path("/")
    texts = {
        Path(FACTS): json.dumps(without_names(asdict(facts)), indent=2) + "\n",
        Path(PROBES): json.dumps(without_names(dict(answers)), indent=2) + "\n",
    }
    write_texts(folder, texts | dict(_nodes(root)) | dict(_cards(root)))


def without_names(value: Any) -> Any:
    """Keep the last part of a path, and nothing of a serial number: an error's text may hold either."""
    if isinstance(value, str):
        return _PATH.sub(_last_part, _SERIAL.sub("GPU-(serial)", value))
    if isinstance(value, dict):
        return {name: without_names(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(each) for each in value]
    return value


def _last_part(found: re.Match[str]) -> str:
    path = found[0]
    if _HOME.search(path):
        return "(path)"
    return path if _DEVICE.match(path) else "(path)/" + re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _nodes(root: Path) -> Iterator[tuple[Path, str]]:
    for node in sorted((root / _NODES).glob("[0-9]*")):
        files: dict[Path, tuple[str, ...]] = {node / "properties": _KEPT_PROPERTIES}
        files.update(dict.fromkeys(sorted(node.glob("mem_banks/[0-9]*/properties")), _KEPT_OF_A_BANK))
        for file, kept in files.items():
            lines = read_text(file).splitlines()
            text = "".join(f"{line}\n" for line in lines if line.split(" ")[0] in kept)
            if lines:
                yield file.relative_to(root), text
        name = read_text(node / "name")
        if name:
            yield (node / "name").relative_to(root), f"{name}\n"


def _cards(root: Path) -> Iterator[tuple[Path, str]]:
    for device, address in cards(root):
        copy = device.relative_to(root)
        # The link to the folder that bears the address becomes a plain folder here: the address is written down.
        yield copy / "uevent", f"PCI_SLOT_NAME={address}\n"
        for name in _KEPT_OF_A_CARD:
            text = read_text(device / name)
            if text:
                yield copy / name, f"{text}\n"
