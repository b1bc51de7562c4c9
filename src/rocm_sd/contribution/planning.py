"""What a contribution runs on a machine: doctor, self-tests, numerics, calibration, bench and ComfyUI, in that order.

Seconds that are expected are those of a healthy card; they divide the bar, and say what is not worth its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.bench.card_report import SKIPPED, Item
from rocm_sd.contribution import on_host
from rocm_sd.contribution.attempts import failed
from rocm_sd.contribution.keeping import Found
from rocm_sd.contribution.running import PlannedPart, Unit, plain_summary
from rocm_sd.doctor.examination import all_checks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rocm_sd.contribution.device import Device

__all__ = ["planned", "without_device"]

_GIB = 2**30
# Bytes of the card and of the host that a workload takes, with one engine at a time: weights in half precision, the
# VAE's peak, and the weights that the host keeps for every engine.
_NEEDED = {"sd15-512": (5 * _GIB, 4 * _GIB), "sdxl-1024": (11 * _GIB, 9 * _GIB)}
_EXPECTED_S = {"emoji": 30.0, "sd15-512": 110.0, "sdxl-1024": 170.0}
# Hangs end after that, where the budget does not end them before.
_BENCH_LIMIT_S, _CALIBRATION_LIMIT_S = 1800.0, 900.0
STOCK_NAME = "torch"
# By name, and imported in the process that runs them: the command itself needs no torch that works.
_TASKS = "rocm_sd.contribution.tasks"


def planned(device: Device, comfyui: Path | None = None) -> tuple[PlannedPart, ...]:
    on_cpu = device.name == "cpu"
    tested = [(op, name) for op, name in device.implementations if name != STOCK_NAME]
    models = [name for name, (unit, _) in _workloads(device).items() if unit and name != "sdxl-1024"]
    return (
        _doctor(),
        PlannedPart("self-tests", "self-tests", tuple(
            Unit(f"{op} {name}", f"{_TASKS}:self_test_of", (op, name, device.dtype, device.name), expected_s=1.5)
            for op, name in tested
        ), plain_summary),
        PlannedPart("verify", "numerics", tuple(
            Unit(f"{op} {name}", f"{_TASKS}:judge", (op, name, device.name), expected_s=1.0 if on_cpu else 1.5)
            for op, name in device.implementations
        ), plain_summary),
        PlannedPart("calibration", "calibration", tuple(
            Unit(name, f"{_TASKS}:calibrate", (name, device.name), _CALIBRATION_LIMIT_S, 45.0, "program")
            for name in models
        ), _sentences),
        PlannedPart("bench", "bench", tuple(
            unit or _skipped(name, why) for name, (unit, why) in _workloads(device).items()
        ), _sentences),
        _comfyui(comfyui, cpu=on_cpu),
    )  # fmt: skip


def without_device(why: str, comfyui: Path | None = None) -> tuple[PlannedPart, ...]:
    """Where the device cannot even be looked at: that is the failure, and the doctor may know its reason."""
    names = ("self-tests", "verify", "calibration", "bench")
    lost = Unit("device", failed, ("device", f"it could not be looked at: {why}"), place="here")
    rest = [
        PlannedPart(name, name, (_skipped("device", "it could not be looked at"),), plain_summary) for name in names[1:]
    ]
    return (_doctor(), PlannedPart(names[0], names[0], (lost,), plain_summary), *rest, _comfyui(comfyui, cpu=False))


def _doctor() -> PlannedPart:
    units = [Unit("facts", on_host.facts, (), expected_s=8.0, place="here")]
    units += [Unit(check.name, on_host.examined, (check.name,), expected_s=2.0, place="here") for check in all_checks()]
    return PlannedPart("doctor", "doctor", tuple(units), _examination)


def _comfyui(asked: Path | None, *, cpu: bool) -> PlannedPart:
    host = on_host.find_comfyui(asked)
    if host is None:
        unit = _skipped(on_host.COMFYUI, "none was found; name its folder: --comfyui FOLDER")
    else:
        unit = Unit(on_host.COMFYUI, on_host.comfyui, (str(host.root), cpu), expected_s=30.0, place="here")
    return PlannedPart("comfyui", "ComfyUI", (unit,), _sentences)


def _workloads(device: Device) -> dict[str, tuple[Unit | None, str]]:
    """By name: its unit, or why there is none."""
    found: dict[str, tuple[Unit | None, str]] = {"emoji": (_bench("emoji", device), "")}
    for name, (needed, of_host) in _NEEDED.items():
        why = ""
        if device.name == "cpu":
            why = "it needs a GPU"
        elif device.free is not None and device.free < needed:
            why = _too_little("the card's memory", needed, device.free)
        elif device.host_free is not None and device.host_free < of_host:
            why = _too_little("the host's memory", of_host, device.host_free)
        found[name] = (None if why else _bench(name, device), why)
    return found


def _too_little(what: str, needed: int, free: int) -> str:
    return f"it needs {needed / _GIB:.0f} GiB of {what}, and {free / _GIB:.1f} are free"


def _bench(name: str, device: Device) -> Unit:
    return Unit(name, f"{_TASKS}:bench", (name, device.name), _BENCH_LIMIT_S, _EXPECTED_S[name], "program")


def _skipped(name: str, why: str) -> Unit:
    return Unit(name, _say, (name, why), expected_s=0.0, place="here")


def _say(name: str, why: str) -> Found:
    return Found((Item(name, SKIPPED, why),))


def _examination(items: Sequence[Item]) -> str:
    """Such as: 1 problem: torch_build; 20 ok, 4 do not arise here."""
    by_status = {status: [item for item in items if item.figures.get("status") == status]
                 for status in ("problem", "unknown", "ok", "not here")}  # fmt: skip
    words = [
        f"{len(found)} {status}: {', '.join(item.name for item in found)}"
        for status, found in by_status.items()
        if found and status in {"problem", "unknown"}
    ]
    words.append(f"{len(by_status['ok'])} ok, {len(by_status['not here'])} do not arise here")
    return "; ".join(words)


def _sentences(items: Sequence[Item]) -> str:
    return "; ".join(item.reason if item.name == on_host.COMFYUI else f"{item.name}: {item.reason}" for item in items)
