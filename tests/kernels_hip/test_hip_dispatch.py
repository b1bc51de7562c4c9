"""HIP in dispatch: chosen where the data or the database name it, skipped with one sentence where it cannot run.

The CPU stands for a card here: a driver that notes calls, or the emulator, runs the kernels on its memory.
"""

from __future__ import annotations

import logging

import pytest
import torch
from driver_library import DriverLibrary, HostCard, build

from rocm_sd import arch as archs
from rocm_sd import ops, workers
from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip import driver, rtc, runtime, toolchain
from rocm_sd.kernels.hip.driver import HIP, Driver
from rocm_sd.kernels.hip.runtime import DeviceLauncher
from rocm_sd.ops import OPS, registry, self_test
from rocm_sd.tuning import choice
from rocm_sd.tuning.database import Entry
from rocm_sd.tuning.environment import current, kernel_hash
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search.candidates import candidates

CPU = torch.device("cpu")
GFX = archs.get("gfx1100")
NAMES = [name for name, op in OPS.items() if any(i.name == "hip" for i in op.implementations)]
OP = OPS["layer_norm_residual"]
HIP_CONFIG = {"threads": 256}
PTX = b".visible .entry layer_norm_residual(.param .u64 x)\n.maxntid 128\n{ ret; }"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return build(tmp_path_factory.mktemp("driver"), "libamdhip64.so")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A machine on which nothing was measured or said yet."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))

    def forget():
        registry._say_once.cache_clear()
        registry.forget_choices()
        self_test.forget()
        runtime._why_not.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def hip_by_data(monkeypatch):
    """Data that name HIP, on a device whose kernels are tested before they are used."""
    table = {"static": {"implementation": "hip", "config": HIP_CONFIG, "why": "timed"}}
    monkeypatch.setattr(choice, "_table", lambda op, _arch: table if op == OP.name else None)
    monkeypatch.setattr(registry, "SELF_TESTED", frozenset({"cpu"}))
    # The driver of these tests is in this process: kernels are tested in place, as inside a worker.
    monkeypatch.setattr(workers, "_inside", True)


def call(rows=3):
    x = torch.randn(rows, 64).half()
    y, total = ops.layer_norm_residual(x, x)
    stock_y, stock_total = OP.implementation("torch")(x, x, None, None, 1e-5)
    assert torch.equal(y, stock_y)
    assert torch.equal(total, stock_total)


def said(caplog):
    """By this package: threads that other tests have left may log something of their own."""
    ours = [record for record in caplog.records if record.name == "rocm_sd" and record.levelno >= logging.WARNING]
    return [record.getMessage() for record in ours]


def test_what_has_hip_declares_what_dispatch_and_the_ladder_need():
    assert set(NAMES) == {
        "attention", "conv2d", "group_norm_silu", "layer_norm_residual", "layout_copy", "linear_geglu",
        "linear_residual", "transformer_block", "upsample", "upsample_conv2d",
    }  # fmt: skip
    for name in NAMES:
        op, kernels = OPS[name], OPS[name].implementation("hip").kernels
        assert kernels.promises
        assert kernels.module == f"rocm_sd.kernels.hip.{name}"
        for gfx in toolchain.TARGETS:
            arch = archs.get(gfx)
            for sample in op.verification.real:
                problem = op.verification.problem(*sample.make(filled=False))
                configs = list(kernels.space(problem, arch)) if kernels.space else []
                assert all(type(config) is type(op.own["hip"].default) for config in configs)
                assert len(configs) == len(set(configs))


def test_hip_is_chosen_nowhere_but_where_data_or_a_measurement_name_it():
    for gfx in archs.ARCHS:
        found = {name: OPS[name].lookup(gfx, {}) for name in NAMES}
        named = {name for name, each in found.items() if each.implementation == "hip"}
        assert all(OPS[name].config_of("hip", found[name]) is found[name].config for name in named)
        # Whole passes over memory are saved there, and Triton has nothing.
        assert named == ({"group_norm_silu", "layer_norm_residual"} if gfx == "gfx1030" else set())


def test_a_machine_without_amd_hears_nothing_of_it(caplog):
    call()
    assert OP.choose(OP.verification.problem(torch.ones(3, 64)), CPU).implementation == "torch"
    assert said(caplog) == []
    assert hip_kernels.why_not(CPU) == "HIP has no code for a tensor on cpu"
    with pytest.raises(Unsupported, match=r"layer_norm_residual \(hip\) does not support HIP has no code"):
        ops.layer_norm_residual(torch.ones(3, 64), None, implementation="hip")


def as_card(monkeypatch, gfx="gfx1100"):
    monkeypatch.setattr(hip_kernels, "why_not", lambda _device: runtime._why_not(gfx))


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_places", lambda *_: iter([str(tmp_path / "none.so")]))
    driver.driver_for.cache_clear()
    rtc.rtc_for.cache_clear()
    yield
    driver.driver_for.cache_clear()
    rtc.rtc_for.cache_clear()


@pytest.fixture
def driver_there(monkeypatch, file):
    monkeypatch.setattr(runtime, "driver_for", lambda api: Driver(api, DriverLibrary(file).library))


def test_without_rocms_library_dispatch_goes_on_and_says_why_once(hip_by_data, no_library, monkeypatch, caplog):
    as_card(monkeypatch)
    for rows in (3, 3, 4):
        call(rows)
    (sentence,) = said(caplog)
    assert sentence.startswith("layer_norm_residual: stock torch on cpu, because there is no libamdhip64.so here")


def test_without_a_compiler_dispatch_goes_on_and_says_why_once(
    hip_by_data, driver_there, no_library, monkeypatch, tmp_path, caplog
):
    as_card(monkeypatch)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "CLANGS", ("no-such-clang",))
    for rows in (3, 4):
        call(rows)
    (sentence,) = said(caplog)
    assert "because there is no clang 19 or newer" in sentence
    assert sentence.endswith("nor hiprtc")


def test_on_an_unknown_gfx_dispatch_goes_on_and_says_why_once(hip_by_data, monkeypatch, caplog):
    as_card(monkeypatch, "gfx9999")
    for rows in (3, 4):
        call(rows)
    assert said(caplog) == ["layer_norm_residual: stock torch on cpu, because the HIP kernels have no code for gfx9999"]


LOADING = "hipModuleLoadData of layer_norm_residual for gfx1100"


def refuse(_kernel, _arch):
    raise toolchain.HipCompilationFailed("clang-19 refused layer_norm_residual.hip for gfx1100: error: wrong.")


@pytest.mark.parametrize(
    ("compile_", "failure", "reason"),
    [
        (refuse, ("", 0), "HipCompilationFailed: clang-19 refused layer_norm_residual.hip for gfx1100: error: wrong."),
        (None, ("load", 209), f"LoadFailed: {LOADING} failed: ErrorNoBinaryForGpu"),
        (None, ("load", 2), f"LoadFailed: {LOADING} failed: ErrorOutOfMemory"),
    ],
    ids=["a compiler that fails", "a code object for another gfx", "no memory to load it"],
)  # fmt: skip
@pytest.mark.parametrize("tested", [True, False], ids=["in the self-test", "after it"])
def test_what_cannot_be_compiled_or_loaded_is_skipped_for_this_process(
    hip_by_data, file, monkeypatch, caplog, compile_, failure, reason, tested
):
    if not tested:
        monkeypatch.setattr(registry, "SELF_TESTED", frozenset())
    fake = DriverLibrary(file)
    fake.fail(*failure)
    launcher = DeviceLauncher(GFX, HostCard(), Driver(HIP, fake.library), compile_ or (lambda _kernel, _arch: PTX))
    with hip_kernels.launched_by(launcher):
        for rows in (3, 3, 4):
            call(rows)
        (sentence,) = said(caplog)
        assert (reason if tested else reason.split(": ", 1)[1].rstrip(".")) in sentence
        # What a machine's set-up is to blame for is no lasting fault of the kernel.
        assert not user_database().quarantined()
        with pytest.raises(hip_kernels.launch.HipUnavailable):
            ops.layer_norm_residual(torch.ones(3, 64).half(), None, implementation="hip")
    assert not fake.calls("launch")


def test_a_kernel_that_is_not_loaded_while_a_graph_is_captured_is_used_after_it(hip_by_data, file, monkeypatch, caplog):
    monkeypatch.setattr(registry, "SELF_TESTED", frozenset())
    fake, card = DriverLibrary(file), HostCard()
    card.capturing = True
    with hip_kernels.launched_by(DeviceLauncher(GFX, card, Driver(HIP, fake.library), lambda _kernel, _arch: PTX)):
        call()
        card.capturing = False
        ops.layer_norm_residual(torch.ones(3, 64).half(), None)
    assert said(caplog) == []
    assert [launch.values[1:5] for launch in fake.calls("launch")] == [(1, 1, 1, 128)]


def test_tensors_that_a_launcher_refuses_go_to_stock_torch_with_a_sentence_and_others_do_not(monkeypatch, file, caplog):
    """What a problem does not tell: lines so long that a tile reaches further than the kernel's offsets."""
    conv = OPS["conv2d"]
    table = {"static": {"implementation": "hip", "config": conv.implementation("hip").default.to_dict()}}
    table["static"]["why"] = "timed"
    monkeypatch.setattr(choice, "_table", lambda op, _arch: table if op == "conv2d" else None)
    image = PTX.replace(b"layer_norm_residual", b"conv2d")
    fake = DriverLibrary(file)
    launcher = DeviceLauncher(GFX, HostCard(), Driver(HIP, fake.library), lambda _kernel, _arch: image)
    # The same problem twice: one line of so many pixels, and as many lines of one.
    pixels, weight = 2**20, torch.ones(1, 256, 1, 1).half()
    line = torch.zeros(1, 1, 1, 1).half().expand(1, 256, 1, pixels)
    monkeypatch.setattr(OPS["conv2d"].implementation("torch").run.__globals__["F"], "conv2d", lambda *_: line[:, :1])
    monkeypatch.setitem(conv.implementation("torch").run.__globals__, "channels_last", lambda tensor: tensor)
    with hip_kernels.launched_by(launcher):
        for _ in range(2):
            ops.conv2d(line, weight)
        assert not fake.calls("launch")
        ops.conv2d(line.transpose(2, 3), weight)
        assert len(fake.calls("launch")) == 1
        with pytest.raises(Unsupported, match="conv2d by HIP does not support lines of 1048576 pixels"):
            ops.conv2d(line, weight, implementation="hip")
    (sentence,) = said(caplog)
    assert sentence.startswith("conv2d: stock torch on cpu, because conv2d by HIP does not support lines of 1048576")


def test_wrong_results_are_quarantined_as_of_any_other_candidate(hip_by_data, file, caplog):
    """A driver that computes nothing leaves what memory held before."""
    launcher = DeviceLauncher(GFX, HostCard(), Driver(HIP, DriverLibrary(file).library), lambda _kernel, _arch: PTX)
    with hip_kernels.launched_by(launcher):
        call()
    (kept,) = user_database().quarantined()
    assert (kept.op, kept.candidate, kept.kernel_hash) == (OP.name, "hip", OP.kernel_hash("hip"))
    assert "hip is set aside" in said(caplog)[0]


def entry(candidate, config, median, stock=20.0):
    problem = OP.verification.problem(torch.ones(3, 64).half(), None)
    return Entry(
        OP.name, problem, current("cpu"), OP.kernel_hash(candidate), candidate, config,
        median, median, median, stock, "ok", "2026-05-04T03:02:01+00:00",
    )  # fmt: skip


def chosen():
    registry.forget_choices()
    return OP.choose(OP.verification.problem(torch.ones(3, 64).half(), None), CPU)


def test_a_measurement_of_hip_counts_beside_those_of_triton_and_each_has_its_own_config(file):
    triton = OP.implementation("triton").default.to_dict()
    launcher = DeviceLauncher(GFX, HostCard(), Driver(HIP, DriverLibrary(file).library))
    with hip_kernels.launched_by(launcher):
        user_database().put([entry("triton", triton, 10.0), entry("hip", HIP_CONFIG, 5.0)])
        found = chosen()
        assert (found.implementation, found.config.to_dict(), found.source) == ("hip", HIP_CONFIG, "measured here")
        problem = OP.verification.problem(torch.ones(3, 64).half(), None)
        # Another kernel, asked for by name, never gets the config of the one that is chosen.
        assert OP.choose(problem, CPU, "hip").config.to_dict() == HIP_CONFIG
        assert OP.config_of("triton", found) == OP.implementation("triton").default
        user_database().put([entry("hip", {"no": 1}, 5.0), entry("hip", HIP_CONFIG, 7.0)])
        assert chosen().implementation == "torch"


def test_a_kernel_without_a_config_is_not_given_that_of_another(monkeypatch, file):
    op = OPS["layout_copy"]
    problem = op.verification.problem(torch.ones(1, 64, 8, 8).half(), True)
    table = {
        "static": {"implementation": "triton", "config": op.implementation("triton").default.to_dict(), "why": "timed"}
    }
    monkeypatch.setattr(choice, "_table", lambda name, _arch: table if name == op.name else None)
    user_database().put(
        [
            Entry(
                op.name,
                problem,
                current("cpu"),
                op.kernel_hash("hip"),
                "hip",
                {},
                1.0,
                1.0,
                1.0,
                9.0,
                "ok",
                "2026-05-04",
            )
        ]
    )
    registry.forget_choices()
    with hip_kernels.launched_by(DeviceLauncher(GFX, HostCard(), Driver(HIP, DriverLibrary(file).library))):
        found = op.choose(problem, CPU)
    assert (found.implementation, found.config) == ("hip", NO_CONFIG)


def test_a_search_tries_every_config_of_hip_and_hip_without_one(file):
    launcher = DeviceLauncher(GFX, HostCard(), Driver(HIP, DriverLibrary(file).library))
    with hip_kernels.launched_by(launcher):
        found = candidates(OP, OP.verification.problem(torch.ones(3, 64).half(), None), CPU)
        assert [c.config.to_dict() for c in found if c.implementation == "hip"] == [
            {"threads": threads} for threads in (64, 128, 256, 512)
        ]
        copy = OPS["layout_copy"]
        found = candidates(copy, copy.verification.problem(torch.ones(1, 64, 8, 8).half(), True), CPU)
        assert [c.config.to_dict() for c in found if c.implementation == "hip"] == [{}]


def test_hip_has_a_hash_of_its_launcher_its_source_and_every_header(monkeypatch):
    hashes = {OPS[name].kernel_hash("hip") for name in NAMES}
    assert len(hashes) == len(NAMES)
    assert not hashes & {op.kernel_hash() for op in OPS.values()}
    from rocm_sd.tuning import environment

    read = environment._bytes
    own = ("layer_norm_residual.hip", "wave.hpp", "launch.py", "layer_norm_residual.py")
    several = ("conv2d.hip", "conv2d_split.hip", "conv2d_finish.hip", "conv2d_finish.py")
    parts = ("linear_residual.hip", "linear_split.hip", "batched_linear.hip", "linear_residual.py", "conv2d_finish.hip")
    of_block = ("norm_geglu.hip", "attention.hip", "row_moments.hip", "linear_moments.py", "transformer_plan.py")
    changes = (
        (OP, own), (OPS["conv2d"], several), (OPS["linear_residual"], parts), (OPS["transformer_block"], of_block),
    )  # fmt: skip
    for op, changed in ((op, name) for op, names in changes for name in names):
        monkeypatch.setattr(environment, "_bytes", lambda path, end=changed: read(path) + b"/" * (path.name == end))
        kernel_hash.cache_clear()
        assert op.kernel_hash("hip") not in hashes, changed
    kernel_hash.cache_clear()


def test_each_op_says_what_it_cannot_take(file):
    half = {"dtype": "float16"}
    refused = {
        "attention": {"b": 1, "s": 4, "t": 4, "h": 1, "d": 72, **half},
        "conv2d": {"pixels": 1, "cin": 1, "cout": 1, "kernel": 1, "stride": 1, "padding": 0, "dtype": "float32"},
        "linear_geglu": {"m": 1, "f": 1, "k": 1, "bias": 0, "dtype": "float32"},
        "upsample_conv2d": {"pixels": 1, "cin": 1, "cout": 1, "dtype": "float32"},
        "group_norm_silu": {"n": 1, "c": 2**10, "hw": 2**21, "groups": 32, **half},
        "layer_norm_residual": {"m": 1, "c": 8193, "residual": 0, **half},
        "layout_copy": {"n": 1, "c": 128, "hw": 2**24, "channels_last": 1, **half},
        "linear_residual": {"m": 1, "n": 1, "k": 1, "bias": 0, "residual": 0, "dtype": "float32"},
        "transformer_block": {"b": 1, "s": 4, "t": 4, "c": 72, "h": 1, "f": 288, **half},
        "upsample": {"n": 1, "c": 1, "hw": 1, "scale": 9, "mode": "nearest", **half},
    }
    assert refused.keys() == set(NAMES)
    with hip_kernels.launched_by(DeviceLauncher(GFX, HostCard(), Driver(HIP, DriverLibrary(file).library))):
        for name, problem in refused.items():
            why_not = OPS[name].implementation("hip").why_not
            assert why_not(problem, CPU), name
            assert why_not({**problem, "dtype": "float64"}, CPU), name
            real = OPS[name].verification.real[0].make(filled=False)
            assert why_not(OPS[name].verification.problem(*real), CPU) is None, name
