"""The loader against a driver that notes every argument: signatures, parameters, errors, modules, no GPU needed."""

from __future__ import annotations

import struct
import threading

import pytest
import torch
from driver_library import DriverLibrary, HostCard, build

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import driver as drivers
from rocm_sd.kernels.hip import rtc, runtime, toolchain
from rocm_sd.kernels.hip.driver import CUDA, HIP, Driver, LaunchFailed, LoadFailed, NoDriver
from rocm_sd.kernels.hip.launch import HipUnavailable, Kernel
from rocm_sd.kernels.hip.runtime import DeviceLauncher, NotWhileCapturing

GFX = archs.get("gfx1100")
KERNEL = Kernel("any", "scale", (("element", "half"),))
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry scale(.param .u64 x, .param .u32 n)
.maxntid 128, 1, 1
{ ret; }
.visible .entry other(.param .u64 x)
.reqntid 64
{ ret; }
.visible .entry free(.param .u64 x)
{ ret; }
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drivers")
    return {HIP: build(folder, "libamdhip64.so"), CUDA: build(folder, "libcuda.so.1", "-DROCM_SD_CUDA")}


@pytest.fixture(params=[HIP, CUDA], ids=lambda api: api.name)
def api(request):
    return request.param


@pytest.fixture
def fake(files, api):
    return DriverLibrary(files[api])


def launcher_of(fake, api, image=PTX, card=None, arch=GFX):
    return DeviceLauncher(arch, card or HostCard(), Driver(api, fake.library), lambda _kernel, _arch: image)


def test_a_launch_is_given_every_argument_in_its_place(fake, api):
    fake.expect(8, 8, 4, 4, 4)
    x = torch.zeros(12)
    card = HostCard(stream=0x7F00DEADBEEF)
    launcher = launcher_of(fake, api, card=card)
    launcher.launch(KERNEL, (3, 5, 7), (x[4:], None, -2, 0.5, True))
    load, function, launch = fake.calls("load", "function", "launch")
    assert load.text == PTX[:4].decode()
    # The text ends where PTX ends: the loader put a zero there.
    assert load.values[0] == len(PTX)
    assert (function.values[0], function.text) == (load.values[1], "scale")
    assert launch.values[:10] == (function.values[1], 3, 5, 7, 128, 1, 1, 0, 0x7F00DEADBEEF, 0)
    assert launch.parameters[:28] == struct.pack("<QQifi", x.data_ptr() + 16, 0, -2, 0.5, 1)
    assert card.entered == 2


def test_values_of_a_launch_are_its_own_in_every_thread_and_at_every_call(fake, api):
    fake.expect(4, 4)
    other_is_between = []

    class Between(HostCard):
        """Another thread launches after this one has laid out its values, and before the driver reads them."""

        def stream(self):
            if threading.current_thread() is threading.main_thread() and not other_is_between:
                other_is_between.append(True)
                thread = threading.Thread(target=launcher.launch, args=(KERNEL, (1, 1, 1), (30, 40)))
                thread.start()
                thread.join()
            return super().stream()

    launcher = launcher_of(fake, api, card=Between())
    launcher.launch(KERNEL, (1, 1, 1), (1, 2))
    launcher.launch(KERNEL, (1, 1, 1), (5, 6))
    launched = [struct.unpack("<ii", call.parameters[:8]) for call in fake.calls("launch")]
    assert launched == [(30, 40), (1, 2), (5, 6)]


def test_a_kernel_is_loaded_once_and_modules_are_shared_and_given_back(fake, api):
    launcher = launcher_of(fake, api)
    other = Kernel("any", "other", (("element", "half"),))
    for kernel in (KERNEL, other, KERNEL):
        launcher.launch(kernel, (1, 1, 1), ())
    (load,) = fake.calls("load")
    assert [call.text for call in fake.calls("function")] == ["scale", "other"]
    assert [call.values[4] for call in fake.calls("launch")] == [128, 64, 128]
    launcher.unload()
    assert [call.values[0] for call in fake.calls("unload")] == [load.values[1]]
    launcher.unload()
    assert len(fake.calls("unload")) == 1
    launcher.launch(KERNEL, (1, 1, 1), ())
    assert len(fake.calls("load")) == 2


def test_while_a_graph_is_captured_nothing_is_loaded_and_what_is_loaded_is_launched(fake, api):
    card = HostCard()
    launcher = launcher_of(fake, api, card=card)
    launcher.load(KERNEL)
    card.capturing = True
    before = len(fake.calls())
    launcher.launch(KERNEL, (1, 1, 1), ())
    assert {call.name for call in fake.calls()[before:]} <= {"launch"}
    with pytest.raises(NotWhileCapturing, match=r"other for gfx1100 is not loaded.*before the capture"):
        launcher.launch(Kernel("any", "other"), (1, 1, 1), ())
    card.capturing = False
    launcher.launch(Kernel("any", "other"), (1, 1, 1), ())


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        (
            "load",
            2,
            r"(hip|cu)ModuleLoadData of scale for gfx1100 failed: ErrorOutOfMemory \(2\), out of memory\. Free",
        ),
        ("load", 209, r"ErrorNoBinaryForGpu \(209\), no kernel image.*another GPU: see HSA_OVERRIDE_GFX_VERSION"),
        ("function", 500, r"ModuleGetFunction of scale for gfx1100 failed: error \(500\), which the driver does not"),
    ],
)
def test_what_cannot_be_loaded_is_reported_and_tried_anew_at_the_next_call(fake, api, function, code, message):
    launcher = launcher_of(fake, api)
    fake.fail(function, code)
    with pytest.raises(LoadFailed, match=message) as raised:
        launcher.launch(KERNEL, (1, 1, 1), ())
    assert isinstance(raised.value, HipUnavailable)
    assert not fake.calls("launch")
    fake.fail("", 0)
    launcher.launch(KERNEL, (1, 1, 1), ())
    assert len(fake.calls("launch")) == 1


def test_a_failed_launch_and_a_failed_unload_are_no_reason_to_try_another_implementation(fake, api):
    launcher = launcher_of(fake, api)
    fake.fail("launch", 700)
    with pytest.raises(
        LaunchFailed, match=r"(hipModule|cu)LaunchKernel of scale .* ErrorFault \(700\), a fault\."
    ) as it:
        launcher.launch(KERNEL, (1, 1, 1), ())
    assert not isinstance(it.value, HipUnavailable)
    fake.fail("unload", 700)
    with pytest.raises(LaunchFailed, match="ModuleUnload of a module failed"):
        launcher.unload()


def test_numbers_beyond_32_bits_and_tensors_elsewhere_never_reach_the_driver(fake, api):
    launcher = launcher_of(fake, api)
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(Unsupported, match="passes 32 bits"):
            launcher.launch(KERNEL, (1, 1, 1), (value,))
    card = HostCard()
    card.index = 0
    with pytest.raises(Unsupported, match="a tensor on cpu as argument 1 on another device"):
        launcher_of(fake, api, card=card).launch(KERNEL, (1, 1, 1), (0, torch.zeros(1)))
    assert not fake.calls("launch")


def test_cuda_gives_each_thread_the_context_that_torch_uses(files):
    fake = DriverLibrary(files[CUDA])
    card = HostCard()
    launcher = launcher_of(fake, CUDA, card=card)

    def twice():
        for _ in range(2):
            launcher.launch(KERNEL, (1, 1, 1), ())

    threads = [threading.Thread(target=twice) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(fake.calls("retain")) == len(fake.calls("set")) == len(threads)
    assert {call.values[0] for call in fake.calls("set")} == {0x7F0000003000}
    assert len(fake.calls("load")) == 1


def test_a_library_that_is_no_driver_is_refused_by_name(files):
    with pytest.raises(NoDriver, match=r"libcuda\.so\.1 is no HIP driver: .*hipModuleLoadData"):
        Driver(HIP, DriverLibrary(files[CUDA]).library)


def test_the_copy_that_the_process_uses_comes_before_any_other(files, monkeypatch, tmp_path):
    fake = DriverLibrary(files[HIP])
    assert fake.library
    assert next(drivers._places("libamdhip64", ("",))) == str(files[HIP])
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0 0:0 1   /site/torch/lib/libamdhip64-1a2b3c.so.7\n"
        "7f02-7f03 r--p 0 0:0 2   /x/libnvrtc-builtins.so.13\n"
    )
    monkeypatch.setattr(drivers, "_MAPS", maps)
    assert next(drivers._places("libamdhip64", ("",))) == "/site/torch/lib/libamdhip64-1a2b3c.so.7"
    assert "/x/libnvrtc-builtins.so.13" not in list(drivers._places("libnvrtc", ("",)))


def test_torchs_own_copy_comes_before_the_systems(files, monkeypatch, tmp_path):
    monkeypatch.setattr(drivers, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(drivers, "torch_folders", lambda: [files[HIP].parent])
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert list(drivers._places("libamdhip64", ("", ".7"))) == [
        str(files[HIP]), "libamdhip64.so", "libamdhip64.so.7"
    ]  # fmt: skip
    assert drivers.open_library("libamdhip64", ())._name == str(files[HIP])
    with pytest.raises(NoDriver, match=r"There is no libnothing\.so here"):
        drivers.open_library("libnothing", ("",))


def test_the_size_of_a_workgroup_is_read_from_what_was_compiled():
    assert [runtime.threads_of(PTX, name) for name in ("scale", "other")] == [128, 64]
    for image, name in ((PTX, "free"), (PTX, "none"), (b"\x7fELF damaged", "scale"), (b"\xff\xfe", "scale")):
        with pytest.raises(LoadFailed, match=rf"compiled.*{name}"):
            runtime.threads_of(image, name)


LAYOUT = (("channels", 3), ("element", "bits16"), ("last", 1))


@pytest.fixture
def code():
    try:
        return toolchain.compile_source("layout_copy", GFX, dict(LAYOUT)).elf
    except toolchain.NoHipCompiler as error:
        pytest.skip(str(error))


def test_a_code_object_is_compiled_loaded_and_launched_with_its_own_workgroups(files, code):
    fake = DriverLibrary(files[HIP])
    launcher = DeviceLauncher(GFX, HostCard(), Driver(HIP, fake.library))
    for name in ("layout_copy_wide", "layout_copy_few"):
        launcher.launch(Kernel("layout_copy", name, LAYOUT), (1, 1, 1), ())
    assert runtime.compile_image(Kernel("layout_copy", "layout_copy_wide", LAYOUT), GFX) == code
    (load,) = fake.calls("load")
    assert load.text == "\x7fELF"
    assert [call.values[4] for call in fake.calls("launch")] == [64, 128]


@pytest.fixture
def hiprtc(files, monkeypatch, tmp_path):
    """A machine with ROCm's libraries and no clang."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "CLANGS", ("no-such-clang",))
    fake = DriverLibrary(files[HIP])
    found = rtc.Rtc(rtc.HIPRTC, fake.library)
    monkeypatch.setattr(rtc, "rtc_for", lambda _api: found)
    return fake


def test_without_clang_hiprtc_compiles_the_same_sources_once(code, hiprtc):
    hiprtc.answer_code(code)
    kernel = Kernel("layout_copy", "layout_copy_wide", LAYOUT)
    for _ in range(2):
        assert runtime.compile_image(kernel, GFX) == code
    create, compile_, destroy = hiprtc.calls()
    assert (create.text, create.values[:3]) == ("layout_copy.hip", (0, 0, 0))
    assert compile_.values[0] == destroy.values[0] == 0x7F0000004000
    assert hiprtc.options == [
        "--offload-arch=gfx1100", "-O3", "-std=c++17",
        "-DROCM_SD_CHANNELS=3", "-DROCM_SD_ELEMENT=bits16", "-DROCM_SD_LAST=1",
    ]  # fmt: skip
    assert hiprtc.source == rtc.flattened(toolchain.SOURCES / "layout_copy.hip")


def test_what_hiprtc_says_is_reported_and_its_program_is_given_back(hiprtc):
    kernel = Kernel("layout_copy", "layout_copy_wide", LAYOUT)
    hiprtc.fail("compile", 6)
    message = r"hiprtc refused layout_copy\.hip for gfx1100: .*3:7: error: unknown type name 'wrong'\."
    with pytest.raises(toolchain.HipCompilationFailed, match=message):
        runtime.compile_image(kernel, GFX)
    assert len(hiprtc.calls("destroy")) == 1
    hiprtc.fail("create", 1)
    with pytest.raises(toolchain.HipCompilationFailed, match=r"hiprtc failed on layout_copy\.hip .*HIPRTC_ERROR \(1\)"):
        runtime.compile_image(kernel, GFX)


def test_with_neither_clang_nor_hiprtc_the_error_names_both(hiprtc, monkeypatch):
    def none(_api):
        raise NoDriver("There is no libhiprtc.so here.")

    monkeypatch.setattr(rtc, "rtc_for", none)
    with pytest.raises(toolchain.NoHipCompiler, match=r"no clang 19 or newer.*no libhiprtc\.so.*apt-get install"):
        runtime.compile_image(Kernel("layout_copy", "layout_copy_wide", LAYOUT), GFX)


def test_a_flattened_source_has_every_header_once_and_compiles_to_the_same_code(code, tmp_path):
    for source in toolchain.source_names():
        text = rtc.flattened(toolchain.SOURCES / f"{source}.hip")
        assert "#include" not in text
        assert "#pragma once" not in text
        assert text.count("struct rdna2 {") == text.count("using bfloat = ") == 1
    file = tmp_path / "layout_copy.hip"
    file.write_text(rtc.flattened(toolchain.SOURCES / "layout_copy.hip"))
    assert toolchain.compile_source(file, GFX, dict(LAYOUT)).elf == code


def test_every_proven_gfx_has_a_tag_and_an_unknown_one_has_none():
    assert set(toolchain.TARGETS) <= set(runtime.tagged())
    assert not {"gfx908", "gfx950", "gfx9999"} & set(runtime.tagged())
