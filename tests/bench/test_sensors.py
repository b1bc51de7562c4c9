"""Power, clock and temperature: from a sysfs tree and from faithful small copies of the two vendors' libraries."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rocm_sd.bench import sensors
from rocm_sd.bench.sensors import watch

# torch calls it cuda:0; the driver's tools would call it number 1, since another card comes before it on the bus.
OURS, OTHER = "0000:c3:00.0", "0000:03:00.0"


@pytest.fixture
def on_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    give_address(monkeypatch)
    monkeypatch.setitem(sys.modules, "amdsmi", None)


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    give_address(monkeypatch)


def give_address(monkeypatch):
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def hwmon(root, address, **files):
    folder = root / "sys/bus/pci/devices" / address / "hwmon/hwmon4"
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    return folder


class AmdSmiError(Exception):
    pass


def amdsmi_library(*, power, clock, temperatures, handles=((OTHER, "other"), (OURS, "ours"))):
    """amdsmi as its documentation has it; `temperatures` by sensor, and a sensor that is not there raises."""
    library = ModuleType("amdsmi")
    library.open = 0

    def init():
        library.open += 1

    def shut_down():
        library.open -= 1

    def of_ours(handle, value):
        assert library.open
        assert handle == "ours"
        return value() if callable(value) else value

    def temperature(handle, sensor, metric):
        assert metric == "current"
        if sensor not in temperatures:
            raise AmdSmiError("AMDSMI_STATUS_NOT_SUPPORTED")
        return of_ours(handle, temperatures[sensor])

    library.AmdSmiClkType = SimpleNamespace(GFX="gfx")
    library.AmdSmiTemperatureType = SimpleNamespace(EDGE="edge", HOTSPOT="hotspot", JUNCTION="hotspot")
    library.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")
    library.amdsmi_init = init
    library.amdsmi_shut_down = shut_down
    library.amdsmi_get_processor_handles = lambda: [name for _, name in handles]
    library.amdsmi_get_gpu_device_bdf = lambda handle: {name: address for address, name in handles}[handle]
    library.amdsmi_get_power_info = lambda handle: of_ours(handle, power)
    library.amdsmi_get_clock_info = lambda handle, kind: of_ours(handle, {"gfx": clock}[kind])
    library.amdsmi_get_temp_metric = temperature
    return library


def nvml_library(power=lambda: 412_500):
    library = ModuleType("pynvml")
    library.open = 0
    library.NVML_CLOCK_SM, library.NVML_TEMPERATURE_GPU = 1, 0

    def init():
        library.open += 1

    def shutdown():
        library.open -= 1

    library.nvmlInit, library.nvmlShutdown = init, shutdown
    library.nvmlDeviceGetHandleByPciBusId = {OURS: "ours", OTHER: "other"}.__getitem__
    library.nvmlDeviceGetPowerUsage = lambda handle: {"ours": power}[handle]()
    library.nvmlDeviceGetClockInfo = lambda handle, kind: {("ours", 1): 1980}[handle, kind]
    library.nvmlDeviceGetTemperature = lambda handle, kind: {("ours", 0): 61}[handle, kind]
    return library


def read(root, seconds=0.0):
    with watch("cuda", every_s=0.01, root=root) as readings:
        time.sleep(seconds)
    return readings


def figures(readings):
    return readings.power_watt, readings.clock_mhz, readings.temperature_c


@pytest.mark.usefixtures("on_rocm")
def test_the_kernels_files_are_read_in_their_units(tmp_path):
    hwmon(tmp_path, OTHER, power1_average=1, temp1_input=1, freq1_input=1)
    hwmon(tmp_path, OURS, power1_average=287_000_000, temp1_input=64_000, freq1_input=2_450_000_000)
    assert figures(read(tmp_path)) == (287.0, 2450.0, 64.0)


@pytest.mark.usefixtures("on_rocm")
def test_newer_cards_have_other_file_names(tmp_path):
    hwmon(tmp_path, OURS, power1_input=650_000_000, temp2_input=71_000)
    readings = read(tmp_path)
    assert figures(readings) == (650.0, None, 71.0)
    assert "clock: amdsmi: amdsmi is not installed; it comes with ROCm; hwmon: no freq1_input" in readings.notes


@pytest.mark.usefixtures("on_rocm")
def test_samples_are_averaged_over_the_block(tmp_path):
    folder = hwmon(tmp_path, OURS, power1_average=100_000_000)
    with watch("cuda", every_s=0.02, root=tmp_path) as readings:
        time.sleep(0.3)
        replacement = folder / "new"
        replacement.write_text("300000000")
        replacement.replace(folder / "power1_average")
        time.sleep(0.3)
    assert 150 < readings.power_watt < 250
    assert readings.samples > 5
    assert readings.seconds == pytest.approx(0.6, rel=0.5)
    assert any("only, and drivers average it" in note for note in readings.notes)


AMDSMI_VERSIONS = {
    "rocm7": {
        "power": {"socket_power": 702, "current_socket_power": 702, "average_socket_power": "N/A"},
        "clock": {"clk": 2100, "min_clk": 132, "max_clk": 2100, "clk_locked": False, "clk_deep_sleep": "N/A"},
        "temperatures": {"hotspot": 63},
    },
    "rocm6-mi300": {
        "power": {"current_socket_power": 702, "average_socket_power": 0xFFFF, "power_limit": 750_000_000},
        "clock": {"clk": 2100, "min_clk": 132, "max_clk": 2100},
        "temperatures": {"edge": "N/A", "hotspot": 63},
    },
    "rocm6.0-navi": {
        "power": {"current_socket_power": 0xFFFFFFFF, "average_socket_power": 702, "gfx_voltage": 1100},
        "clock": {"cur_clk": 2100, "max_clk": 2500, "min_clk": 500, "sleep_clk": 0},
        "temperatures": {"edge": 63, "hotspot": 80},
    },
    "millidegrees": {
        "power": {"average_socket_power": 702},
        "clock": {"cur_clk": 2100},
        "temperatures": {"edge": 63_000},
    },
}


@pytest.mark.usefixtures("on_rocm")
@pytest.mark.parametrize("version", AMDSMI_VERSIONS)
def test_every_version_of_amdsmi_is_understood(monkeypatch, tmp_path, version):
    library = amdsmi_library(**AMDSMI_VERSIONS[version])
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    assert figures(read(tmp_path)) == (702.0, 2100.0, 63.0)
    assert library.open == 0


@pytest.mark.usefixtures("on_rocm")
def test_what_amdsmi_does_not_tell_is_read_from_the_kernel(monkeypatch, tmp_path):
    library = amdsmi_library(power={"average_socket_power": "N/A"}, clock={"clk": 2100}, temperatures={"edge": 50})
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    hwmon(tmp_path, OURS, power1_average=90_000_000, freq1_input=1, temp1_input=1)
    assert figures(read(tmp_path, 1.05)) == (90.0, 2100.0, 50.0)


@pytest.mark.usefixtures("on_rocm")
def test_a_card_that_amdsmi_does_not_list_is_not_mistaken_for_another(monkeypatch, tmp_path):
    library = amdsmi_library(power={}, clock={}, temperatures={}, handles=((OTHER, "other"),))
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    readings = read(tmp_path)
    assert figures(readings) == (None, None, None)
    assert readings.notes == (
        f"power, clock, temperature: amdsmi: no card at {OURS}; hwmon: the kernel shows no sensors of {OURS}",
    )
    assert library.open == 0


@pytest.mark.usefixtures("on_cuda")
def test_nvml_is_asked_for_the_card_by_its_address(monkeypatch, tmp_path):
    library = nvml_library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert figures(read(tmp_path)) == (412.5, 1980.0, 61.0)
    assert library.open == 0


@pytest.mark.usefixtures("on_cuda")
def test_without_nvml_the_note_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(sys, "path", [])
    readings = read(tmp_path)
    assert figures(readings) == (None, None, None)
    assert readings.notes == (
        "power, clock, temperature: NVML: pynvml is not installed; type: pip install nvidia-ml-py",
    )


@pytest.mark.usefixtures("on_cuda")
def test_a_sensor_that_fails_on_the_way_is_noted_once_and_leaves_the_rest(monkeypatch, tmp_path):
    answers = iter([400_000, 400_000])

    def power():
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("GPU is lost") from None

    monkeypatch.setitem(sys.modules, "pynvml", nvml_library(power))
    readings = read(tmp_path, 0.2)
    assert figures(readings) == (400.0, 1980.0, 61.0)
    assert readings.notes.count("power: RuntimeError (GPU is lost)") == 1


@pytest.mark.usefixtures("on_cuda")
def test_a_driver_that_hangs_does_not_hold_the_benchmark(monkeypatch, tmp_path):
    released = threading.Event()
    first = iter([400_000])
    library = nvml_library(lambda: next(first, None) or released.wait(30) or 0)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(sensors, "_PATIENCE_S", 0.1)
    started = time.perf_counter()
    readings = read(tmp_path)
    assert time.perf_counter() - started < 5
    assert library.open == 1  # the thread is still inside
    assert any("did not answer" in note for note in readings.notes)
    released.set()


@pytest.mark.usefixtures("on_cuda")
def test_an_error_of_the_benchmark_passes_and_the_library_is_closed(monkeypatch, tmp_path):
    library = nvml_library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with pytest.raises(KeyboardInterrupt), watch("cuda", root=tmp_path) as readings:
        raise KeyboardInterrupt
    assert readings.power_watt == 412.5
    assert library.open == 0


def test_a_cpu_and_a_card_without_an_address_are_explained_in_words(monkeypatch, tmp_path):
    with watch("cpu") as readings:
        pass
    assert figures(readings) == (None, None, None)
    assert readings.notes == ("no sensors are read for a device of type cpu",)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="old"))
    readings = read(tmp_path)
    assert readings.notes[0].startswith("the card's PCI address is not known: AttributeError")


@pytest.mark.gpu
def test_a_real_card_tells_something_or_says_why_not():
    square = torch.randn(2048, 2048, device="cuda")
    with watch("cuda") as readings:
        until = time.perf_counter() + 1.2
        while time.perf_counter() < until:
            square @ square
            torch.cuda.synchronize()
    assert (readings.power_watt is not None and 1 < readings.power_watt < 2000) or readings.notes
