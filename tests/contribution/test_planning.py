"""What runs where: on a CPU, on cards of any memory, and where a card cannot even be opened."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rocm_sd.bench.card_report import FAILED, SKIPPED
from rocm_sd.bench.records import Machine
from rocm_sd.contribution import attempts, on_host, planning, sick_device
from rocm_sd.contribution.device import Device
from rocm_sd.contribution.keeping import Kept
from rocm_sd.contribution.running import Run
from rocm_sd.doctor.examination import all_checks

GIB = 2**30
CARD = Machine("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24560, "amdgpu", "Linux 6.8", {"torch": "2.11.0+rocm7"})
ORDER = ["doctor", "self-tests", "verify", "calibration", "bench", "comfyui"]


@pytest.fixture(autouse=True)
def no_comfyui(monkeypatch):
    monkeypatch.setattr(on_host, "find_comfyui", lambda _asked: None)


def device(name: str = "cuda:0", free: float = 24, host_free: float = 32) -> Device:
    implementations = (("geglu", "torch"), ("geglu", "triton"))
    return Device(name, CARD, int(free * GIB), int(host_free * GIB), "float16", "hash", implementations)


def planned(made: Device) -> dict[str, planning.PlannedPart]:
    parts = planning.planned(made)
    assert [part.name for part in parts] == ORDER
    return {part.name: part for part in parts}


def names(part: planning.PlannedPart, place: str | None = None) -> list[str]:
    return [unit.name for unit in part.units if place in (None, unit.place)]


def test_every_check_every_kernel_and_every_implementation_is_asked():
    parts = planned(device())
    assert names(parts["doctor"]) == ["facts", *(check.name for check in all_checks())]
    assert names(parts["self-tests"], "worker") == ["geglu triton"]
    assert names(parts["verify"], "worker") == ["geglu torch", "geglu triton"]
    # What is named is there.
    for part in parts.values():
        assert all(callable(attempts.named(unit.work)) for unit in part.units if isinstance(unit.work, str))
    expected = sum(unit.expected_s for part in parts.values() for unit in part.units)
    # A card runs about 45 kernels and 60 implementations: it is still about ten minutes.
    assert expected + 1.5 * (45 + 60) < 11 * 60


@pytest.mark.parametrize(
    ("made", "timed", "calibrated", "why"),
    [
        (device("cpu"), ["emoji"], ["emoji"], "it needs a GPU"),
        (device(free=4), ["emoji"], ["emoji"], "it needs 11 GiB of the card's memory, and 4.0 are free"),
        (device(free=8), ["emoji", "sd15-512"], ["emoji", "sd15-512"], "it needs 11 GiB of the card's memory"),
        (device(host_free=6), ["emoji", "sd15-512"], ["emoji", "sd15-512"], "it needs 9 GiB of the host's memory"),
        (device(), ["emoji", "sd15-512", "sdxl-1024"], ["emoji", "sd15-512"], None),
    ],
)
def test_what_fits_into_memory_is_timed_and_the_rest_says_why_not(made, timed, calibrated, why):
    parts = planned(made)
    assert names(parts["bench"], "program") == timed
    assert names(parts["calibration"], "program") == calibrated
    skipped = [unit.work(*unit.arguments).items[0] for unit in parts["bench"].units if unit.place == "here"]
    assert names(parts["bench"]) == ["emoji", "sd15-512", "sdxl-1024"]
    assert all(item.state == SKIPPED for item in skipped)
    assert (why is None) == (skipped == [])
    assert why is None or skipped[-1].reason.startswith(why)


def test_a_card_that_cannot_be_opened_is_a_failure_to_send(tmp_path):
    parts = planning.without_device("crashed by signal 6; it last said: HSA error")
    assert [part.name for part in parts] == ORDER
    over = Run(Kept(tmp_path), 60.0).parts(parts[1:])
    assert [part.state for part in over] == [FAILED, *[SKIPPED] * 4]
    assert "HSA error" in over[0].items[0].reason
    machine = sick_device.machine()
    assert machine.versions["rocm-sd"]
    assert machine.arch


def test_a_torch_that_cannot_be_imported_ends_no_command(tmp_path):
    """Whatever is broken, the doctor can say so: only processes of their own import it."""
    for name in ("torch", "diffusers"):
        (tmp_path / f"{name}.py").write_text("import os\nos.abort()\n")
    code = (
        "from rocm_sd.cli import contribute, main; from rocm_sd.contribution import planning, running, sick_device;"
        "machine, parts, _ = contribute._planned(contribute.Console(), None, None);"
        "print([unit.arguments for unit in parts[1].units])"
    )
    places = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "crashed by signal 6" in ended.stdout
