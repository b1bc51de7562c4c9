"""What is read of a machine, and that what is written of it names nobody."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from rocm_sd.doctor import reading
from rocm_sd.doctor.facts import WATCHED, Facts, Gpu, TorchDevice, TorchFacts, numbers, visible_to_torch
from rocm_sd.doctor.reading import gather, gpus_in
from rocm_sd.doctor.recording import load, read_probes, record, without_names
from rocm_sd.errors import InvalidOption
from rocm_sd.typed_json import read

GIB = 2**30
MACHINES = Path(__file__).parent / "machines"
IGPU = Gpu(0, "amd", "raphael", "gfx1036", integrated=True, compute_units=2, pci_address="0000:0f:00.0")
CARD = Gpu(1, "amd", "navi32", "gfx1101", integrated=False, compute_units=60, pci_address="0000:03:00.0")


def two_gpus(environment=None, devices=()):
    torch = TorchFacts(version="2.12.0+rocm7.2", hip="7.2", devices=devices)
    return Facts("Linux", "3.12.3", gpus=(IGPU, CARD), torch=torch, environment=environment or {})


@pytest.fixture(scope="module")
def here():
    return gather()


def test_this_machine_is_read_without_importing_torch_here(here):
    import torch

    assert here.torch.version == torch.__version__
    assert here.torch.error is None
    assert here.packages["diffusers"]
    assert here.system.startswith(("Linux", "Darwin", "Windows"))
    # In a fresh interpreter nothing of the doctor's own needs torch: a broken driver must not end it.
    import subprocess

    program = (
        "import sys, rocm_sd.cli.doctor, rocm_sd.doctor.examination as e; e.all_checks(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
def test_a_real_gpu_is_listed_by_torch_and_by_the_kernel(here):
    device = here.torch.devices[0]
    assert 0 < device.free <= device.total
    assert here.torch.build in {"rocm", "cuda"}
    assert here.used is not None
    assert (here.used.vendor == "amd") == (here.torch.build == "rocm")
    if here.torch.build == "rocm":
        assert device.gfx.startswith("gfx")
        assert here.torch.arch_list


def test_facts_survive_json(here):
    for facts in (here, two_gpus({"HIP_VISIBLE_DEVICES": "1"}, (TorchDevice("card", "gfx1101"),))):
        assert read(Facts, json.loads(json.dumps(asdict(facts)))) == facts


def test_facts_of_an_unknown_kind_are_refused():
    with pytest.raises(ValueError, match="shoe_size is not known"):
        read(Facts, {"system": "Linux", "python": "3.12", "shoe_size": 42})


def test_only_listed_variables_are_read():
    read = []

    class Environment(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    given = Environment(HSA_OVERRIDE_GFX_VERSION="11.0.0", HF_TOKEN="secret", MIOPEN_FIND_MODE="2")
    facts = gather(environment=given)
    assert facts.environment == {"HSA_OVERRIDE_GFX_VERSION": "11.0.0", "MIOPEN_FIND_MODE": "2"}
    assert set(read) <= set(WATCHED)
    assert "secret" not in json.dumps(asdict(facts))


@pytest.mark.parametrize(
    ("there", "named", "taken"),
    [
        (("gcc", "clang"), None, "gcc"),
        (("clang",), None, "clang"),
        (("cc",), None, ""),
        (("gcc", "tcc"), "tcc", "tcc"),
        # One that is named and not there is not replaced by another.
        (("gcc",), "icc", ""),
        ((), None, ""),
    ],
)
def test_the_compiler_is_the_one_that_triton_takes(tmp_path, there, named, taken):
    for name in there:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path)} | ({} if named is None else {"CC": named})
    assert reading._c_compiler(environment) == taken


def test_gpus_come_in_the_order_of_their_nodes_with_their_memory():
    igpu, card = gpus_in(MACHINES / "igpu-first")
    assert (igpu.index, igpu.gfx, igpu.integrated, igpu.compute_units) == (0, "gfx1036", True, 2)
    assert (igpu.vram_total, igpu.gtt_total) == (GIB // 2, int(15.5 * GIB))
    assert (card.index, card.gfx, card.integrated, card.pci_address) == (1, "gfx1101", False, "0000:03:00.0")
    assert card.vram_total == 16 * GIB
    assert card.vram_free == 16 * GIB - int(0.9 * GIB)


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, [0, 1]),
        ({"HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"HIP_VISIBLE_DEVICES": "5"}, []),
        ({"HIP_VISIBLE_DEVICES": "1,5,0"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        # The second counts in what the first leaves.
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [1]),
    ],
)
def test_what_the_variables_leave_to_torch(environment, seen):
    assert [gpu.index for gpu in visible_to_torch(two_gpus(environment))] == seen


def test_the_gpu_in_use_is_what_torch_lists_first():
    on_bus = (TorchDevice("card", "gfx1100", pci_address="0000:03:00.0"),)
    assert two_gpus(devices=on_bus).used == CARD
    by_kind = (TorchDevice("card", "gfx1101", integrated=False),)
    assert two_gpus(devices=by_kind).used == CARD
    assert two_gpus().used == IGPU
    assert two_gpus({"HIP_VISIBLE_DEVICES": "1"}).used == CARD
    assert two_gpus().meant == CARD
    assert two_gpus(devices=on_bus).called(CARD) == "card"
    nvidia = Facts("Linux", "3.12", torch=TorchFacts("2.13.0", cuda="13.0", devices=(TorchDevice("H200", total=5),)))
    assert (nvidia.used.vendor, nvidia.used.vram_total, nvidia.gfx) == ("nvidia", 5, None)


def test_the_processors_own_gpu_is_not_meant_beside_an_nvidia_card():
    nvidia = Gpu(0, "nvidia", "RTX", pci_address="0000:01:00.0")
    cuda = TorchFacts("2.13.0", cuda="13.0", devices=(TorchDevice("RTX", pci_address="0000:01:00.0"),))
    both = Facts("Linux", "3.12", gpus=(IGPU, nvidia), torch=cuda)
    assert (both.used, both.meant) == (nvidia, None)
    assert Facts("Linux", "3.12", gpus=(IGPU, nvidia), torch=TorchFacts("2.13.0+cpu")).meant is None
    # A card is meant as long as no NVIDIA GPU is in use.
    assert Facts("Linux", "3.12", gpus=(CARD, nvidia), torch=TorchFacts("2.13.0+cpu")).meant == CARD
    assert Facts("Linux", "3.12", gpus=(CARD, nvidia), torch=cuda).meant is None


def test_where_the_kernel_lists_nothing_torch_does():
    torch = TorchFacts("2.13.0+rocm7.2", hip="7.2", devices=(TorchDevice("RX 7900 XTX", "gfx1100", total=5),))
    facts = Facts("Linux 6.6 (WSL)", "3.12", torch=torch, environment={"HIP_VISIBLE_DEVICES": "1"})
    assert facts.meant == facts.used == facts.amd[0]
    assert (facts.gfx, facts.used.vram_total, facts.listed_amd) == ("gfx1100", 5, ())


def test_versions_are_compared_as_numbers():
    assert numbers("2.10.0+rocm7.1") > (2, 9)
    assert numbers("7.14") > numbers("7.2")
    assert numbers(None) == () < (1,)


def test_a_torch_that_crashes_is_reported_and_not_taken_for_absent(monkeypatch, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho 'no such symbol' >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    facts = gather()
    assert facts.torch.error == "torch ended with code 3: no such symbol"
    assert facts.torch.version is not None
    assert facts.torch.build == "cpu" or facts.torch.devices == ()


def test_a_torch_that_hangs_or_babbles_is_reported(monkeypatch, tmp_path):
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    assert reading._ask_torch(0.3) == {"error": "torch did not answer within 0 s"}
    program.write_text("#!/bin/sh\necho nonsense\n")
    assert "could not be read" in reading._ask_torch(30)["error"]


def test_a_recorded_machine_is_the_machine_and_names_nobody(tmp_path):
    root, folder = tmp_path / "root", tmp_path / "recorded"
    node = root / "sys/class/kfd/kfd/topology/nodes/1"
    (node / "mem_banks/0").mkdir(parents=True)
    properties = "simd_count 192\nsimd_per_cu 2\ngfx_target_version 110000\nlocation_id 768\nunique_id 1234567890123\n"
    (node / "properties").write_text(properties)
    (node / "name").write_text("navi31\n")
    (node / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {24 * GIB}\n")
    device = root / "sys/devices/pci0000:00/0000:03:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "unique_id").write_text("abcdef0123456789\n")
    (device / "mem_info_vram_total").write_text(f"{24 * GIB}\n")
    (device / "mem_info_vram_used").write_text(f"{GIB}\n")
    card = root / "sys/class/drm/card0"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    facts = Facts(
        "Linux 6.8.0", "3.12.3", gpus=gpus_in(root), environment={"HIP_VISIBLE_DEVICES": "GPU-abcdef0123456789"}
    )
    answers = {"smoke": {"gemm": {"ok": False, "error": "cannot open /home/ada/models/x.bin"}}}
    record(folder, facts, answers, root)
    again = load(folder)
    assert again.gpus == facts.gpus
    assert again.gpus[0].vram_free == 23 * GIB
    assert read_probes(folder)["smoke"]["gemm"]["error"] == "cannot open (path)/x.bin"
    written = "".join(file.read_text() for file in folder.rglob("*") if file.is_file())
    for secret in ("ada", "1234567890123", "abcdef0123456789"):
        assert secret not in written


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("/home/ada/x/y.so: no symbol", "(path)/y.so: no symbol"),
        ("in /home/ada", "in (path)"),
        ("error:/Users/ada/lib/z", "error:(path)/z"),
        ("cannot open /dev/dri/renderD128", "cannot open /dev/dri/renderD128"),
        ("see https://github.com/ROCm/ROCm/issues/1", "see https://github.com/ROCm/ROCm/issues/1"),
        ("1/2 of 3/4", "1/2 of 3/4"),
        ("C:\\Users\\ada\\x.dll", "(path)/x.dll"),
    ],
)
def test_of_a_path_the_last_part_is_kept(text, written):
    assert without_names(text) == written


def test_a_folder_that_is_no_machine_is_said(tmp_path):
    with pytest.raises(InvalidOption, match=r"facts\.json"):
        load(tmp_path)
    (tmp_path / "facts.json").write_text("[]")
    with pytest.raises(InvalidOption, match="is not a recorded machine"):
        load(tmp_path)
    (tmp_path / "probes.json").write_text("[]")
    with pytest.raises(InvalidOption, match="not an object"):
        read_probes(tmp_path)
