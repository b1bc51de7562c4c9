"""The checks that look at versions and variables, each on a machine that is well and on ones that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import torch_build as set_up
from rocm_sd.doctor import wheels
from rocm_sd.doctor.check import Status
from rocm_sd.doctor.examination import chosen_checks, examine
from rocm_sd.doctor.facts import Facts, Gpu, TorchDevice, TorchFacts
from rocm_sd.doctor.probes import RecordedProbes

GIB = 2**30
ARCHS = ("gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1201")
OK, PROBLEM, UNKNOWN, NOT_HERE = Status.OK, Status.PROBLEM, Status.UNKNOWN, Status.NOT_HERE
NO_GPU = Facts("Linux 6.8", "3.12.3", torch=TorchFacts("2.13.0+cpu"), packages={"torch": "2.13.0+cpu"})
RIGHT = {kind: {"ok": True, "error": ""} for kind in ("elementwise", "gemm", "conv", "sdpa")}


def machine(gfx="gfx1100", *, integrated=False, torch="2.13.0+rocm7.2", arch_list=ARCHS, environment=None, **more):
    gpu = Gpu(
        0, "amd", "chip", gfx, integrated, 40, vram_total=16 * GIB, vram_free=15 * GIB, gtt_total=16 * GIB,
        pci_address="0000:03:00.0",
    )  # fmt: skip
    device = TorchDevice("Radeon", gfx, integrated, total=16 * GIB, free=15 * GIB, pci_address=gpu.pci_address)
    in_torch = TorchFacts(torch, hip="7.2", arch_list=arch_list, devices=(device,), wants_triton="triton-rocm==3.7.0")
    facts = Facts(
        "Linux 6.8", "3.12.3", rocm="7.2", memory_total=64 * GIB, gpus=(gpu,), torch=in_torch,
        packages={"torch": torch, "triton-rocm": "3.7.0"}, environment=environment or {},
    )  # fmt: skip
    return replace(facts, **more)


def finding(name, facts, **answers):
    (examined,) = examine(facts, RecordedProbes(answers), chosen_checks([name]))
    return examined.finding


MINE = [
    "allocator_settings", "aotriton_settings", "apu_memory", "bf16", "c_compiler", "fp8_format", "free_memory",
    "gfx_override", "graph_runtime", "integrated_gpu", "kernels_present", "miopen_settings", "torch_build",
    "tunable_op", "two_tritons",
]  # fmt: skip


@pytest.mark.parametrize("name", MINE)
def test_a_machine_that_is_well_has_no_problem(name):
    assert finding(name, machine(), smoke={**RIGHT, "device": {"kind": "cuda"}}).status in {OK, NOT_HERE}
    without = finding(name, NO_GPU, smoke={**RIGHT, "device": {"kind": "cpu"}})
    assert without.status in {OK, NOT_HERE}


@pytest.mark.parametrize("gfx", sorted({*set_up.ROCM_WHEELS, *set_up.REFUSED, "gfx1250"}))
@pytest.mark.parametrize("python", [(3, 10), (3, 12)])
def test_the_line_for_pip_is_what_set_up_installs(gfx, python):
    sources = () if gfx in set_up.REFUSED else set_up.rocm_sources((gfx,), python)
    line = sources[0].typed_by_hand().removeprefix(".venv/bin/") if sources else None
    assert wheels.pip_line((gfx,), python) == line
    assert wheels.REFUSED == set_up.REFUSED


@pytest.mark.parametrize(
    ("facts", "status", "said", "command"),
    [
        (machine(torch="2.13.0+cpu"), OK, "is built for it", None),
        (machine("gfx1151"), PROBLEM, "has no kernels for", "torch[device-gfx1151]"),
        (machine("gfx1151", arch_list=("gfx11-generic",)), OK, "is built for it", None),
        (machine("gfx942", arch_list=("gfx942:sramecc+:xnack-",)), OK, "is built for it", None),
        (machine("gfx906"), PROBLEM, "has no kernels for", None),
        (replace(machine(), torch=TorchFacts("2.13.0+cpu")), PROBLEM, "for CPUs only", "torch[device-gfx1100]"),
        (replace(machine(), torch=TorchFacts("2.13.0", cuda="13.0")), PROBLEM, "for NVIDIA GPUs", "device-gfx1100"),
        (replace(machine(), torch=TorchFacts()), PROBLEM, "torch is not installed", "device-gfx1100"),
        (replace(machine(), torch=TorchFacts("2.13.0+rocm7.2", hip="7.2")), PROBLEM, "sees no GPU", "usermod"),
        (replace(machine(), torch=TorchFacts("2.13", hip="7", error="it crashed")), UNKNOWN, "it crashed", None),
        (machine(arch_list=()), UNKNOWN, "does not tell", None),
        (replace(machine(), gpus=(Gpu(0, "amd"),)), PROBLEM, "does not list it", "modprobe"),
        (replace(NO_GPU, gpus=(Gpu(0, "nvidia", "H200"),)), PROBLEM, "NVIDIA GPU", "pip install"),
        (replace(NO_GPU, torch=TorchFacts()), PROBLEM, "not installed", None),
    ],
)  # fmt: skip
def test_torch_build(facts, status, said, command):
    found = finding("torch_build", facts)
    assert found.status is status, found
    assert said in found.says
    if command:
        assert command in " ".join(found.fix.commands)


def test_beside_an_nvidia_card_in_use_amd_is_not_judged():
    igpu = Gpu(0, "amd", "raphael", "gfx1036", integrated=True)
    nvidia = Gpu(0, "nvidia", "RTX", pci_address="0000:01:00.0")
    device = TorchDevice("RTX", total=16 * GIB, free=15 * GIB, pci_address="0000:01:00.0")
    facts = replace(NO_GPU, gpus=(igpu, nvidia), torch=TorchFacts("2.13.0", cuda="13.0", devices=(device,)))
    found = {name: finding(name, facts, smoke={**RIGHT, "device": {"kind": "cuda"}}).status for name in MINE}
    assert set(found.values()) == {OK, NOT_HERE}
    assert (found["torch_build"], found["free_memory"]) == (OK, OK)


def test_an_integrated_gpu_does_not_choose_the_wheel():
    card = machine("gfx1201", arch_list=("gfx90a",))
    igpu = Gpu(1, "amd", "raphael", "gfx1036", integrated=True)
    found = finding("torch_build", replace(card, gpus=(*card.gpus, igpu)))
    assert "torch[device-gfx1201]==" in found.fix.commands[0]


def override(value):
    return {"HSA_OVERRIDE_GFX_VERSION": value}


@pytest.mark.parametrize(
    ("gfx", "value", "archs", "status", "fix"),
    [
        ("gfx1100", None, ARCHS, OK, None),
        ("gfx1100", "11.0.0", ARCHS, OK, None),
        # Needed: the same instructions, and no kernels of its own.
        ("gfx1031", None, ARCHS, PROBLEM, {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}),
        ("gfx1031", "10.3.0", ARCHS, OK, None),
        ("gfx1031", None, ("gfx1031",), OK, None),
        # Left over.
        ("gfx1031", "10.3.0", ("gfx1030", "gfx1031"), PROBLEM, "unset"),
        ("gfx1101", "11.0.0", ARCHS, PROBLEM, "unset"),
        # Another chip's instructions.
        ("gfx1201", "11.0.0", ARCHS, PROBLEM, "unset"),
        ("gfx1103", "11.0.0", ("gfx1100",), PROBLEM, "unset"),
        ("gfx1151", "11.0.0", ("gfx1100",), PROBLEM, "unset"),
        ("gfx1100", "eleven", ARCHS, PROBLEM, "unset"),
        # No report of it.
        ("gfx1102", "11.0.0", ARCHS, UNKNOWN, None),
        ("gfx90a", "9.0.10", ARCHS, OK, None),
    ],
)
def test_gfx_override(gfx, value, archs, status, fix):
    found = finding("gfx_override", machine(gfx, arch_list=archs, environment=override(value) if value else {}))
    assert found.status is status, found
    if fix == "unset":
        assert (found.fix.unset, found.fix.safe) == (("HSA_OVERRIDE_GFX_VERSION",), True)
    elif fix:
        assert (found.fix.env, found.fix.safe) == (fix, True)


def test_an_override_for_one_gpu_is_not_safe_beside_another():
    facts = machine("gfx1031")
    other = Gpu(1, "amd", "navi31", "gfx1100", integrated=False, compute_units=20)
    found = finding("gfx_override", replace(facts, gpus=(*facts.gpus, other)))
    assert (found.status, found.fix.safe) == (PROBLEM, False)


@pytest.mark.parametrize(
    ("packages", "wants", "status", "said"),
    [
        ({"triton": "3.9.0", "triton-rocm": "3.7.0"}, "triton-rocm==3.7.0", PROBLEM, "2 packages"),
        ({"triton": "3.7.0"}, "triton-rocm==3.7.0", PROBLEM, "triton 3.7.0 is installed"),
        ({"triton-rocm": "3.6.0"}, "triton-rocm==3.7.0", PROBLEM, "triton-rocm 3.6.0 is installed"),
        ({}, "triton-rocm==3.7.0", PROBLEM, "no Triton is installed"),
        ({"triton": "3.9.0"}, None, OK, "torch asks for none"),
        ({}, None, NOT_HERE, "none"),
    ],
)
def test_two_tritons(packages, wants, status, said):
    facts = machine(packages=packages)
    found = finding("two_tritons", replace(facts, torch=replace(facts.torch, wants_triton=wants)))
    assert found.status is status
    assert said in found.says
    if status is PROBLEM:
        assert found.fix.commands[-1].endswith('https://download.pytorch.org/whl/rocm7.2 "triton-rocm==3.7.0"')
        assert not packages or found.fix.commands[0] == f"pip uninstall -y {' '.join(sorted(packages))}"


def with_igpu(environment=None, *, first=True):
    card = machine("gfx1101", environment=environment)
    igpu = Gpu(0, "amd", "raphael", "gfx1036", True, 2, GIB // 2, GIB // 4, 16 * GIB, "0000:0f:00.0")
    device = TorchDevice("AMD Radeon Graphics", "gfx1036", True, 16 * GIB, 15 * GIB, igpu.pci_address)
    gpus = (igpu, replace(card.gpus[0], index=1))
    devices = (device, *card.torch.devices) if first else card.torch.devices
    return replace(card, gpus=gpus, torch=replace(card.torch, devices=devices))


def test_integrated_gpu_and_what_it_counts_as_memory():
    found = finding("integrated_gpu", with_igpu({"ROCR_VISIBLE_DEVICES": "0,1"}))
    assert found.status is PROBLEM
    assert (found.fix.env, found.fix.unset) == ({"HIP_VISIBLE_DEVICES": "1"}, ("ROCR_VISIBLE_DEVICES",))
    assert finding("apu_memory", with_igpu()).fix.env == {"HIP_VISIBLE_DEVICES": "1"}
    for name, status in (("integrated_gpu", OK), ("apu_memory", NOT_HERE)):
        assert finding(name, with_igpu({"HIP_VISIBLE_DEVICES": "1"}, first=False)).status is status
    assert finding("integrated_gpu", machine("gfx1151", integrated=True)).status is OK


@pytest.mark.parametrize("value", ["1", "0,3", "-1", ""])
def test_a_number_that_names_no_gpu(value):
    # Where the kernel lists none, a number cannot be judged.
    wsl = machine(environment={"HIP_VISIBLE_DEVICES": "1"}, gpus=())
    assert finding("integrated_gpu", wsl).status is OK
    facts = machine(environment={"HIP_VISIBLE_DEVICES": value})
    found = finding("integrated_gpu", replace(facts, torch=replace(facts.torch, devices=())))
    assert (found.status, found.fix.unset, found.fix.safe) == (PROBLEM, ("HIP_VISIBLE_DEVICES",), True)


@pytest.mark.parametrize(
    ("free", "total", "status"),
    [(15, 16, OK), (9, 16, OK), (7, 16, PROBLEM), (2, 16, PROBLEM), (2, 2, PROBLEM), (17, 16, UNKNOWN)],
)
def test_free_memory(free, total, status):
    facts = machine()
    device = replace(facts.torch.devices[0], free=free * GIB, total=total * GIB)
    facts = replace(facts, torch=replace(facts.torch, devices=(device,)))
    assert finding("free_memory", facts).status is status
    # Without torch's word, the kernel's.
    kernel = replace(facts.gpus[0], vram_free=free * GIB, vram_total=total * GIB)
    assert finding("free_memory", replace(facts, gpus=(kernel,), torch=TorchFacts())).status is status
    unknown = replace(facts.gpus[0], vram_free=None)
    assert finding("free_memory", replace(facts, gpus=(unknown,), torch=TorchFacts())).status is UNKNOWN


@pytest.mark.parametrize(
    ("own", "shared", "in_torch", "system", "status"),
    [
        (0.5, 62, 62, 125, OK),
        (0.5, 112, 112, 125, OK),
        (0.5, 15.5, 15.5, 125, PROBLEM),
        (0.5, 62, 15.5, 125, PROBLEM),
        (0.5, 12, 12, 24, PROBLEM),
        (0.5, 7.5, 7.5, 15, OK),
        (96, 15.5, 96, 31, OK),
        (None, None, 16, 31, UNKNOWN),
    ],
)
def test_apu_memory(own, shared, in_torch, system, status):
    facts = machine("gfx1151", integrated=True, memory_total=int(system * GIB))
    own, shared = (None if size is None else int(size * GIB) for size in (own, shared))
    gpu = replace(facts.gpus[0], vram_total=own, gtt_total=shared)
    device = replace(facts.torch.devices[0], total=int(in_torch * GIB))
    facts = replace(facts, gpus=(gpu,), torch=replace(facts.torch, devices=(device,)))
    found = finding("apu_memory", facts)
    assert found.status is status, found
    if (own, shared) == (GIB // 2, int(15.5 * GIB)):
        assert "ttm.pages_limit=24379392" in found.fix.summary


@pytest.mark.parametrize(
    ("environment", "torch", "status", "fix"),
    [
        ({}, "2.13.0", OK, None),
        ({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, "2.12.0", OK, None),
        ({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, "2.11.0", PROBLEM, ({}, ("PYTORCH_HIP_ALLOC_CONF",))),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"},
            "2.13.0",
            PROBLEM,
            ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, ()),
        ),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            "2.13.0",
            PROBLEM,
            ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, ("PYTORCH_ALLOC_CONF",)),
        ),
        (
            {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
            "2.13.0",
            OK,
            None,
        ),
        (
            {"PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:9,max_split_size_mb:512"},
            "2.13.0",
            PROBLEM,
            ({"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512"}, ()),
        ),
        ({"PYTORCH_HIP_ALLOC_CONF": "expandable"}, "2.13.0", PROBLEM, ({}, ("PYTORCH_HIP_ALLOC_CONF",))),
    ],
)
def test_allocator_settings(environment, torch, status, fix):
    found = finding("allocator_settings", machine(torch=f"{torch}+rocm7.2", environment=environment))
    assert found.status is status, found
    if fix:
        assert (found.fix.env, found.fix.unset, found.fix.safe) == (*fix, True)


@pytest.mark.parametrize(
    ("gfx", "status"),
    [("gfx1030", PROBLEM), ("gfx1035", PROBLEM), ("gfx906", PROBLEM), ("gfx908", PROBLEM), ("gfx1100", OK),
     ("gfx942", OK), ("gfx1300", UNKNOWN)],
)  # fmt: skip
def test_bf16(gfx, status):
    assert finding("bf16", machine(gfx)).status is status


@pytest.mark.parametrize(
    ("gfx", "packages", "status", "said"),
    [
        ("gfx942", {}, OK, "fnuz"),
        ("gfx942", {"torchao": "0.15.0"}, PROBLEM, "torchao 0.15.0"),
        ("gfx950", {"torchao": "0.15.0"}, OK, "OCP"),
        ("gfx1201", {}, OK, "OCP"),
        ("gfx1100", {}, OK, "no FP8"),
        ("gfx1032", {}, OK, "no FP8"),
        ("gfx1300", {}, UNKNOWN, "not in the table"),
    ],
)
def test_fp8_format(gfx, packages, status, said):
    found = finding("fp8_format", machine(gfx, packages=packages))
    assert found.status is status
    assert said in found.says


@pytest.mark.parametrize(
    ("gfx", "torch", "rocm", "environment", "status", "env", "unset"),
    [
        ("gfx1100", "2.9.1", "7.1.1", {}, PROBLEM, {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"}, ()),
        ("gfx1100", "2.9.1", "7.1.1", {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"}, OK, None, None),
        ("gfx1100", "2.9.1", "6.4", {}, OK, None, None),
        ("gfx1100", "2.10.0", "7.1", {}, OK, None, None),
        ("gfx1100", "2.13.0", "7.2", {"PYTORCH_MIOPEN_SUGGEST_NHWC": "1"}, PROBLEM,
         {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"}, ()),
        # CDNA is the other way round.
        ("gfx942", "2.9.1", "7.1", {}, OK, None, None),
        ("gfx942", "2.13.0", "7.2", {"MIOPEN_DEBUG_CONV_DIRECT_NAIVE_CONV_FWD": "0"}, PROBLEM, {},
         ("MIOPEN_DEBUG_CONV_DIRECT_NAIVE_CONV_FWD",)),
        ("gfx1201", "2.13.0", "7.2", {"MIOPEN_FIND_ENFORCE": "search"}, PROBLEM, {}, ("MIOPEN_FIND_ENFORCE",)),
        ("gfx1201", "2.13.0", "7.2", {"MIOPEN_FIND_ENFORCE": "1"}, OK, None, None),
    ],
)  # fmt: skip
def test_miopen_settings(gfx, torch, rocm, environment, status, env, unset):
    found = finding("miopen_settings", machine(gfx, torch=f"{torch}+rocm{rocm}", rocm=rocm, environment=environment))
    assert found.status is status, found
    if status is PROBLEM:
        assert (found.fix.env, found.fix.unset, found.fix.safe) == (env, unset, True)


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        ({}, OK, "as torch comes"),
        ({"PYTORCH_TUNABLEOP_ENABLED": "0"}, OK, "kept off"),
        ({"PYTORCH_TUNABLEOP_ENABLED": "1"}, PROBLEM, "its tuning is on"),
        ({"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_TUNING": "1"}, PROBLEM, "its tuning is on"),
        ({"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_TUNING": "0"}, OK, "with its tuning off"),
    ],
)
def test_tunable_op(environment, status, said):
    found = finding("tunable_op", machine("gfx1100", environment=environment))
    assert found.status is status
    assert said in found.says
    if status is PROBLEM:
        assert (found.fix.unset, found.fix.safe) == (("PYTORCH_TUNABLEOP_ENABLED",), True)
    assert finding("tunable_op", NO_GPU).status is NOT_HERE


COMPILER = {"c_compiler": "gcc", "python_header": True}


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        (machine(**COMPILER), OK, "Triton takes gcc"),
        (machine(c_compiler="", python_header=True), PROBLEM, "No C compiler is found"),
        (machine(c_compiler="clang", python_header=False), PROBLEM, "clang, but Python.h"),
        (machine(c_compiler="clang"), OK, "Triton takes clang"),
        (machine(), NOT_HERE, "recorded"),
        (machine("gfx1030", c_compiler=""), NOT_HERE, "does not compile for gfx1030"),
        (machine("gfx1032", c_compiler=""), NOT_HERE, "does not compile for gfx1032"),
        (machine(c_compiler="", packages={"torch": "2.13.0"}), NOT_HERE, "not installed"),
        (machine(c_compiler="", system="Windows 11"), NOT_HERE, "brings its own"),
        (replace(NO_GPU, c_compiler="", packages={"triton": "3.7.0"}), NOT_HERE, "no GPU"),
        (
            replace(NO_GPU, gpus=(Gpu(0, "nvidia", "H200"),), c_compiler="", packages={"triton": "3.7.0"}),
            PROBLEM,
            "No C compiler",
        ),
    ],
)
def test_c_compiler(facts, status, said):
    found = finding("c_compiler", facts)
    assert found.status is status, found
    assert said in found.says
    if status is PROBLEM:
        assert "stock torch" in found.means
        for tool, package in (("apt", "gcc python3-dev"), ("dnf", "gcc python3-devel"), ("pacman", "gcc")):
            assert any(tool in line and line.endswith(package) for line in found.fix.commands)


@pytest.mark.parametrize(
    ("gfx", "rocm", "status"),
    [
        ("gfx942", "7.2.0", PROBLEM),
        ("gfx942", "7.2.3", PROBLEM),
        # PyTorch's own wheel, which set-up falls back to, is named by two numbers.
        ("gfx942", "7.2", PROBLEM),
        ("gfx942", "7.2.4", OK),
        ("gfx942", "7.1.1", OK),
        ("gfx942", "7.13.0", OK),
        ("gfx942", "10.0.0", OK),
        # Reported of an MI300X alone.
        ("gfx1100", "7.2.1", OK),
        ("gfx942", None, UNKNOWN),
    ],
)
def test_graph_runtime(gfx, rocm, status):
    found = finding("graph_runtime", machine(gfx, rocm=rocm))
    assert found.status is status, found
    if status is PROBLEM:
        assert "ROCm/clr#279" in found.says
        # It costs speed where the diagnosis is wrong: the user decides.
        assert (found.fix.env, found.fix.safe) == ({"ROCM_SD_STEP_GRAPH": "0"}, False)
        assert "rocm10.0.0" in found.fix.commands[0]


@pytest.mark.parametrize(
    ("gfx", "torch", "value", "status"),
    [
        ("gfx1101", "2.13.0", None, PROBLEM),
        ("gfx1101", "2.13.0", "0", PROBLEM),
        ("gfx1101", "2.13.0", "1", OK),
        ("gfx1100", "2.12.0", None, PROBLEM),
        ("gfx1100", "2.13.0", None, OK),
        ("gfx1201", "2.9.0", None, OK),
        ("gfx942", "2.9.0", None, OK),
        ("gfx1031", "2.13.0", "1", "none"),
        ("gfx1300", "2.13.0", None, UNKNOWN),
    ],
)
def test_aotriton_settings(gfx, torch, value, status):
    name = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    environment = {} if value is None else {name: value}
    found = finding("aotriton_settings", machine(gfx, torch=f"{torch}+rocm7.2", environment=environment))
    if status == "none":
        assert (found.status, found.fix.env) == (PROBLEM, {})
        assert "--opt-sub-quad-attention" in found.fix.summary
        return
    assert found.status is status
    if status is PROBLEM:
        # It may turn on kernels that are wrong: the user decides.
        assert (found.fix.env, found.fix.safe) == ({name: "1"}, False)


def test_kernels_present():
    on_gpu = {"device": {"kind": "cuda"}}
    bad = {**RIGHT, **on_gpu, "sdpa": {"ok": False, "error": "invalid device function"}}
    found = finding("kernels_present", machine(), smoke=bad)
    assert found.status is PROBLEM
    assert "attention: invalid device function" in found.says
    assert "torch[device-gfx1100]" in found.fix.commands[0]
    # A nearer cause has a nearer fix.
    assert finding("kernels_present", with_igpu(), smoke=bad).fix.env == {"HIP_VISIBLE_DEVICES": "1"}
    stale = machine("gfx1201", environment=override("11.0.0"))
    assert finding("kernels_present", stale, smoke=bad).fix.unset == ("HSA_OVERRIDE_GFX_VERSION",)
    assert finding("kernels_present", machine()).status is UNKNOWN
    assert finding("kernels_present", machine(), smoke={"cannot": "no"}).status is UNKNOWN
    assert finding("kernels_present", machine(), smoke={**RIGHT, "gemm": {"ok": "yes"}}).status is UNKNOWN
    assert finding("kernels_present", machine(), smoke={**RIGHT, "device": {"kind": "cpu"}}).status is UNKNOWN
    without = {kind: RIGHT[kind] for kind in ("elementwise", "gemm", "conv")}
    assert finding("kernels_present", machine(), smoke=without).status is UNKNOWN
