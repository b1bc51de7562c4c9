"""What a card says of itself while it works: power, clock and temperature, averaged over a stretch of time.

A card is found by its PCI address and never by its number, since HIP_VISIBLE_DEVICES and its kin renumber what torch
sees and not what the driver's tools see. Nothing here raises into a benchmark: what cannot be read is None, and
`Readings.notes` says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch

from rocm_sd.arch import host

__all__ = ["Readings", "watch"]

Probe = Callable[[], float]
Probes = dict[str, Probe]
Candidate = TypeVar("Candidate")

EVERY_S = 0.1
QUANTITIES = ("power", "clock", "temperature")
FIGURES = ("power_watt", "clock_mhz", "temperature_c")
# Drivers average the power that they report over up to a second, so a shorter look shows what came before it as well.
_LEAST_S_FOR_POWER = 1.0
_PATIENCE_S = 2.0
_ROOT = Path("/")


@dataclass
class Readings:
    """Averages, filled in when the watch ends; None where nothing answers, with the reason in `notes`.

    `temperature_c` is that of the card's edge where it has such a sensor, else of its hottest spot.
    """

    power_watt: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    samples: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """By the names that a measurement has for them."""
        return {name: getattr(self, name) for name in FIGURES}


class _NoReading(Exception):
    """One quantity, or one whole source, has nothing to say, for this reason."""


@contextmanager
def watch(device: torch.device | str, *, every_s: float = EVERY_S, root: Path = _ROOT) -> Iterator[Readings]:
    """Sample the card in a thread while the block runs: about ten times a second, and at both ends of the block."""
    readings = Readings()
    with ExitStack() as opened:
        probes, notes = _probes(torch.device(device), root, opened)
        sampler = _Sampler(probes, every_s)
        sampler.start()
        try:
            yield readings
        finally:
            sampler.stop()
            _fill(readings, sampler, notes)
            if sampler.hangs:
                opened.pop_all()  # the thread is still inside the driver's library: it stays open


def _fill(readings: Readings, sampler: _Sampler, notes: list[str]) -> None:
    averages = {name: fmean(values) for name, values in sampler.values.items() if values}
    for quantity, figure in zip(QUANTITIES, FIGURES, strict=True):
        setattr(readings, figure, averages.get(quantity))
    readings.samples, readings.seconds = sampler.samples, sampler.seconds
    notes = [*notes, *sampler.notes]
    if readings.power_watt is not None and readings.seconds < _LEAST_S_FOR_POWER:
        notes.append(f"power was watched for {readings.seconds:.2f} s only, and drivers average it over up to a second")
    readings.notes = tuple(notes)


class _Sampler:
    def __init__(self, probes: Probes, every_s: float) -> None:
        self.values: dict[str, list[float]] = {name: [] for name in probes}
        self.notes: list[str] = []
        self.samples = 0
        self.seconds = 0.0
        self.hangs = False
        self._probes = probes
        self._every_s = every_s
        self._started = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rocm-sd-sensors", daemon=True)

    def start(self) -> None:
        self._started = time.perf_counter()
        if self._probes:
            self._thread.start()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._started
        self._ended.set()
        if self._probes:
            self._thread.join(timeout=_PATIENCE_S)
            self.hangs = self._thread.is_alive()
            if self.hangs:
                self.notes.append(f"a sensor did not answer within {_PATIENCE_S:.0f} s")

    def _run(self) -> None:
        ended = False
        while True:
            for name, probe in self._probes.items():
                try:
                    self.values[name].append(probe())
                except Exception as error:  # noqa: BLE001, PERF203 -- drivers raise what they like; a benchmark goes on
                    note = f"{name}: {_reason(error)}"
                    if note not in self.notes:
                        self.notes.append(note)
            self.samples += 1
            if ended:
                return
            ended = self._ended.wait(self._every_s)


def _probes(device: torch.device, root: Path, opened: ExitStack) -> tuple[Probes, list[str]]:
    """For each quantity the first source that answers, and why the others have none."""
    if device.type != "cuda":
        return {}, [f"no sensors are read for a device of type {device.type}"]
    try:
        address = _pci_address(device)
    except Exception as error:  # noqa: BLE001 -- no address means no sensors, and is no reason to stop
        return {}, [f"the card's PCI address is not known: {_reason(error)}"]
    sources: dict[str, Callable[[], Probes]] = (
        {"amdsmi": lambda: _amdsmi(address, opened), "hwmon": lambda: _hwmon(address, root)}
        if torch.version.hip
        else {"NVML": lambda: _nvml(address, opened)}
    )
    chosen: Probes = {}
    unanswered: dict[str, list[str]] = {quantity: [] for quantity in QUANTITIES}
    for name, source in sources.items():
        if not unanswered:
            break
        try:
            probes = source()
        except Exception as error:  # noqa: BLE001 -- the next source may answer
            probes = dict.fromkeys(QUANTITIES, _raising(error))
        for quantity in tuple(unanswered):
            try:
                probes[quantity]()
            except Exception as error:  # noqa: BLE001, PERF203 -- as above
                unanswered[quantity].append(f"{name}: {_reason(error)}")
            else:
                chosen[quantity] = probes[quantity]
                del unanswered[quantity]
    by_reason: dict[str, list[str]] = {}
    for quantity, reasons in unanswered.items():
        by_reason.setdefault("; ".join(reasons), []).append(quantity)
    return chosen, [f"{', '.join(quantities)}: {reason}" for reason, quantities in by_reason.items()]


def _raising(error: Exception) -> Probe:
    def probe() -> float:
        raise error

    return probe


def _amdsmi(address: str, opened: ExitStack) -> Probes:
    amdsmi = _library("amdsmi", "it comes with ROCm")
    amdsmi.amdsmi_init()
    opened.callback(_quietly, amdsmi.amdsmi_shut_down)
    handles = amdsmi.amdsmi_get_processor_handles()
    handle = _first(
        (one for one in handles if _same_card(amdsmi.amdsmi_get_gpu_device_bdf(one), address)), f"no card at {address}"
    )

    def power() -> float:
        # One name from ROCm 7 on; before, one for MI300 and later, and one for all others.
        names = ("socket_power", "current_socket_power", "average_socket_power")
        return _number(amdsmi.amdsmi_get_power_info(handle), names)

    def clock() -> float:
        # The field was cur_clk before ROCm 6.1.
        return _number(amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.GFX), ("clk", "cur_clk"))

    def temperature() -> float:
        reasons = []
        # MI300 has no sensor at its edge. JUNCTION is the same sensor as HOTSPOT.
        for sensor in ("EDGE", "HOTSPOT", "JUNCTION"):
            kind = getattr(amdsmi.AmdSmiTemperatureType, sensor, None)
            if kind is None:
                continue
            try:
                reading = amdsmi.amdsmi_get_temp_metric(handle, kind, amdsmi.AmdSmiTemperatureMetric.CURRENT)
                degrees = _number({sensor: reading}, (sensor,))
            except Exception as error:  # noqa: BLE001 -- the next sensor may answer
                reasons.append(_reason(error))
            else:
                # No card lives at 1000 degrees: some versions give thousandths.
                return degrees / 1000 if degrees > 1000 else degrees
        raise _NoReading("; ".join(dict.fromkeys(reasons)))

    return {"power": power, "clock": clock, "temperature": temperature}


def _nvml(address: str, opened: ExitStack) -> Probes:
    nvml = _library("pynvml", "type: pip install nvidia-ml-py")
    nvml.nvmlInit()
    opened.callback(_quietly, nvml.nvmlShutdown)
    handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
    return {
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # in milliwatts
        "clock": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "temperature": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    }


def _hwmon(address: str, root: Path) -> Probes:
    """The kernel's own files: microwatts, hertz and thousandths of a degree."""
    folders = sorted((root / "sys/bus/pci/devices" / address).glob("hwmon/hwmon*"))
    folder = _first(folders, f"the kernel shows no sensors of {address}")

    def first_of(scale: float, *names: str) -> Probe:
        def probe() -> float:
            path = _first((folder / name for name in names if (folder / name).is_file()), f"no {' or '.join(names)}")
            return int(path.read_text(encoding="ascii")) / scale

        return probe

    return {
        "power": first_of(1e6, "power1_average", "power1_input"),
        "clock": first_of(1e6, "freq1_input"),
        # MI300 has temp2, its hottest spot, and no temp1, the edge.
        "temperature": first_of(1e3, "temp1_input", "temp2_input"),
    }


def _quietly(close: Callable[[], object]) -> None:
    with suppress(Exception):  # the readings are in; how a library ends changes nothing
        close()


def _pci_address(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return host.pci_address(torch.cuda.get_device_properties(index))


def _same_card(found: str, address: str) -> bool:
    """The function (.0, .1) may differ: a partition of an MI300 has one of its own, and torch does not know it."""
    return found.lower().rpartition(".")[0] == address.rpartition(".")[0]


def _library(name: str, cure: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise _NoReading(f"{name} is not installed; {cure}") from None


def _number(reading: Mapping[str, object], names: tuple[str, ...]) -> float:
    """The first that is a figure. Unknown ones are "N/A", 0, or all bits set, by version and card."""
    for name in names:
        value = reading.get(name)
        if isinstance(value, (int, float)) and value > 0 and value not in (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF):
            return float(value)
    raise _NoReading(f"no figure under {', '.join(names)}")


def _first(candidates: Iterable[Candidate], otherwise: str) -> Candidate:
    for candidate in candidates:
        return candidate
    raise _NoReading(otherwise)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, _NoReading) else f"{type(error).__name__} ({text})" if text else type(error).__name__
    )
