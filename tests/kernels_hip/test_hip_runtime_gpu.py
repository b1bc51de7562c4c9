"""The loader on a real card: torch's driver library, PTX through CUDA's table, or a HIP source through HIP's."""

from __future__ import annotations

import threading

import pytest
import torch

from rocm_sd import arch as archs
from rocm_sd.kernels.hip import rtc, runtime
from rocm_sd.kernels.hip.driver import CUDA, HIP, LoadFailed, NoDriver, driver_for
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.kernels.hip.runtime import DeviceLauncher, NotWhileCapturing, TorchCard

pytestmark = pytest.mark.gpu

# y[i] = x[i] * factor + offset for i < n, or 0 * factor + offset where there is no x.
PTX = b"""\
.version 7.0
.target sm_70
.address_size 64
.visible .entry affine(.param .u64 px, .param .u64 py, .param .u32 pn, .param .f32 pf, .param .u32 po)
.maxntid 128, 1, 1
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [px];
    ld.param.u64 %rd2, [py];
    ld.param.u32 %r1, [pn];
    ld.param.f32 %f1, [pf];
    ld.param.s32 %r2, [po];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.s32 %p1, %r6, %r1;
    @%p1 bra done;
    mul.wide.s32 %rd3, %r6, 4;
    mov.f32 %f2, 0f00000000;
    setp.eq.u64 %p2, %rd1, 0;
    @%p2 bra none;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.f32 %f2, [%rd4];
none:
    cvt.rn.f32.s32 %f3, %r2;
    fma.rn.f32 %f4, %f2, %f1, %f3;
    add.s64 %rd5, %rd2, %rd3;
    st.global.f32 [%rd5], %f4;
done:
    ret;
}
"""
HIP_SOURCE = """
#include <rocm_sd/types.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(128) affine(const float* x, float* y, int n, float factor, int offset) {
    const int i = block_x() * 128 + thread_index();
    if (i < n) y[i] = (x ? x[i] : 0.0f) * factor + offset;
}
"""
ON_ROCM = torch.version.hip is not None


@pytest.fixture
def affine(tmp_path):
    file = tmp_path / "affine.hip"
    file.write_text(HIP_SOURCE)
    return Kernel(file, "affine")


@pytest.fixture
def make(affine):
    made = []

    def launcher(index=0, image=PTX):
        arch = archs.detect(torch.device("cuda", index))
        given = None if ON_ROCM else lambda _kernel, _arch: image
        made.append(DeviceLauncher(arch, TorchCard(index), driver_for(HIP if ON_ROCM else CUDA), given))
        return made[-1]

    yield launcher
    torch.cuda.synchronize()
    for each in made:
        each.unload()


def launch(launcher, kernel, x, y, factor=2.0, offset=-3):
    launcher.launch(kernel, (-(-y.numel() // 128), 1, 1), (x, y, y.numel(), factor, offset))


def test_every_element_is_computed_and_nothing_beyond(make, affine):
    x = torch.randn(1000, device="cuda")
    y = torch.full((1200,), float("nan"), device="cuda")
    launch(make(), affine, x, y[:1000])
    torch.testing.assert_close(y[:1000], x * 2 - 3)
    assert bool(y[1000:].isnan().all())
    launch(make(), affine, None, y[:1000])
    assert bool((y[:1000] == -3).all())


def test_it_runs_in_order_with_torch_on_the_stream_that_is_current(make, affine):
    launcher, stream = make(), torch.cuda.Stream()
    x, y = torch.zeros(2**22, device="cuda"), torch.zeros(2**22, device="cuda")
    launcher.load(affine)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(5.0)
        launch(launcher, affine, x, y)
        done = stream.record_event()
        # Were it on another stream, or had the launch waited, it would be over.
        assert not done.query()
    done.synchronize()
    assert bool((y == 7.0).all())


def test_a_captured_graph_replays_it_with_new_values(make, affine):
    launcher = make()
    x, y = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    other = Kernel(affine.source, "affine", (("other", 1),))
    launch(launcher, affine, x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(launcher, affine, x, y)
        with pytest.raises(NotWhileCapturing, match="before the capture"):
            launch(launcher, other, x, y)
        launch(launcher, affine, y, y, 10.0, 1)
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert bool((y == (value * 2 - 3) * 10 + 1).all())


def test_what_is_unloaded_is_loaded_anew_and_memory_comes_back(make, affine):
    launcher = make()
    x, y = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    for _ in range(3):
        launch(launcher, affine, x, y.zero_())
        torch.cuda.synchronize()
        assert bool((y == -1).all())
        launcher.unload()
        assert not launcher._modules


def test_a_thread_that_never_used_the_card_can_launch(make, affine):
    launcher = make()
    x, y = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    failed = []

    def run():
        try:
            launch(launcher, affine, x, y)
        except Exception as error:  # noqa: BLE001 -- reported below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed
    assert bool((y == -1).all())


@pytest.mark.skipif(ON_ROCM, reason="the image is PTX")
@pytest.mark.parametrize("image", [PTX.replace(b"ld.global.f32", b"ld.nowhere.f32"), PTX.replace(b"sm_70", b"sm_999")])
def test_a_bad_image_is_refused_with_the_drivers_own_words_and_the_card_goes_on(make, affine, image):
    x, y = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    with pytest.raises(LoadFailed, match=r"cuModuleLoadData of affine for sm_\d+ failed: CUDA_ERROR_\w+ \(\d+\), \w+"):
        launch(make(image=image), affine, x, y)
    launch(make(), affine, x, y)
    assert bool((y == -1).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one card")
def test_each_card_has_its_own_modules_whichever_is_current(make, affine):
    for index in (1, 0):
        x, y = (torch.ones(128, device=f"cuda:{index}") for _ in range(2))
        launch(make(index), affine, x, y)
        assert bool((y == -1).all())
    assert torch.cuda.current_device() == 0


def test_the_compiler_in_a_library_makes_what_the_driver_loads(make, affine, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    arch = archs.detect(torch.device("cuda", 0))
    try:
        library = rtc.rtc_for(rtc.api_for(arch))
    except NoDriver as error:
        pytest.skip(str(error))
    if not ON_ROCM:
        text = HIP_SOURCE.replace("#include <rocm_sd/types.hpp>\nusing namespace rocm_sd;", "")
        text = text.replace("ROCM_SD_KERNEL(128)", 'extern "C" __global__ __launch_bounds__(128) void')
        text = text.replace("block_x()", "blockIdx.x").replace("thread_index()", "threadIdx.x")
        affine.source.write_text(text)
    image = rtc.compile_source(library, affine.source, arch, {})
    assert runtime.threads_of(image, "affine") == 128
    launcher = DeviceLauncher(arch, TorchCard(0), driver_for(HIP if ON_ROCM else CUDA), lambda _kernel, _arch: image)
    x, y = torch.ones(300, device="cuda"), torch.zeros(300, device="cuda")
    launch(launcher, affine, x, y)
    assert bool((y == -1).all())
    launcher.unload()


def test_dispatch_says_why_not_in_one_sentence_or_not_at_all():
    found = runtime.why_not(torch.device("cuda", 0))
    assert found is None if ON_ROCM and archs.detect("cuda").name in runtime.tagged() else found
    launcher = runtime.launcher_for(torch.device("cuda"))
    assert launcher is runtime.launcher_for(torch.device("cuda", torch.cuda.current_device()))
