from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from rocm_sd import arch
from rocm_sd.ops import OPS
from rocm_sd.tuning import environment
from rocm_sd.tuning.environment import Environment, current, driver, kernel_hash

CARD = Environment("gfx1100", 96, "amdgpu 6.10.5", "rocm 7.1.0", "2.11.0+rocm7.1", "3.6.0", "3005001")


def test_the_key_is_the_same_text_for_the_same_environment_and_another_for_any_other():
    assert Environment.from_key(CARD.key()) == CARD
    others = {replace(CARD, **{f.name: 7 if f.name == "compute_units" else "another"}).key() for f in fields(CARD)}
    others |= {replace(CARD, **{f.name: None}).key() for f in fields(CARD) if f.name not in {"arch", "torch"}}
    assert len(others) == 12
    assert CARD.key() not in others


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("amdgpu of Linux 6.8.0-45-generic", "amdgpu of Linux 6.8"),
        ("amdgpu of Linux 6.14.5-200.fc42.x86_64", "amdgpu of Linux 6.14"),
        ("amdgpu of Linux 6.14-arch1-1", "amdgpu of Linux 6.14"),
        ("amdgpu of Linux 6.8", "amdgpu of Linux 6.8"),
        ("amdgpu 6.10.5", "amdgpu 6.10.5"),
        ("nvidia 580.82.07", "nvidia 580.82.07"),
        (None, None),
    ],
)
def test_a_key_with_the_whole_release_of_the_kernel_is_that_of_its_series(written, read):
    old = CARD.key().replace('"amdgpu 6.10.5"', f'"{written}"' if written else "null")
    assert Environment.from_key(old) == replace(CARD, driver=read)
    assert Environment.from_key(old).key() == replace(CARD, driver=read).key()


@pytest.mark.parametrize(
    "broken", ["{}", "[]", CARD.key().replace('"arch"', '"gpu"'), CARD.key().replace("96", '"96"')]
)
def test_another_text_is_no_key(broken):
    with pytest.raises(ValueError, match=r"environment|compute_units"):
        Environment.from_key(broken)


def test_the_cpu_has_an_environment_without_a_gpu_in_it():
    here = current("cpu")
    assert here == current(torch.device("cpu"))
    assert (here.arch, here.driver, here.runtime, here.miopen) == ("cpu", None, None, None)
    assert here.torch == torch.__version__


@pytest.mark.gpu
def test_a_gpu_has_all_that_measurements_depend_on():
    here = current("cuda")
    assert here == current(torch.device("cuda", torch.cuda.current_device()))
    assert here.arch == arch.detect("cuda").name
    assert here.compute_units
    assert here.runtime.split()[0] in {"rocm", "cuda"}
    assert here.miopen is not None


def test_drivers_are_distinguished(tmp_path):
    assert driver(arch.Vendor.AMD, tmp_path) is None
    module = tmp_path / "sys/module/amdgpu"
    module.mkdir(parents=True)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.8.0-45-generic\n")
    assert driver(arch.Vendor.AMD, tmp_path) == "amdgpu of Linux 6.8"
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.8.0-51-generic\n")
    # A distribution's update leaves what was measured.
    assert driver(arch.Vendor.AMD, tmp_path) == "amdgpu of Linux 6.8"
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.11.2-arch1-1\n")
    assert driver(arch.Vendor.AMD, tmp_path) == "amdgpu of Linux 6.11"
    (module / "version").write_text("6.10.5\n")
    assert driver(arch.Vendor.AMD, tmp_path) == "amdgpu 6.10.5"
    nvidia = tmp_path / "proc/driver/nvidia"
    nvidia.mkdir(parents=True)
    (nvidia / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
    )
    assert driver(arch.Vendor.NVIDIA, tmp_path) == "nvidia 580.82.07"
    assert driver(arch.Vendor.NONE, tmp_path) is None


def test_every_op_with_kernels_has_a_hash_and_none_has_that_of_another():
    hashes = {op.name: op.kernel_hash(op.verification.implementation) for op in OPS.values()}
    assert all(len(found) == 16 for found in hashes.values())
    assert len(set(hashes.values())) == len(hashes)


def test_what_has_a_kernel_of_this_project_is_known_by_its_source_and_the_rest_by_versions_alone():
    conv2d = OPS["conv2d"]
    assert conv2d.kernel_hash("triton") == conv2d.kernel_hash("library_epilogue") == conv2d.kernel_hash()
    assert conv2d.kernel_hash("torch") == ""
    assert OPS["attention"].kernel_hash("sdpa_flash") == ""


def test_the_hash_changes_with_the_kernel_and_with_the_kernels_that_it_imports(tmp_path, monkeypatch):
    package = tmp_path / "own_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "outer.py").write_text("from rocm_sd.kernels.triton.geglu import (\n    launch,\n)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel_hash.cache_clear()
    before = kernel_hash("own_kernels.outer")
    (package / "outer.py").write_text("from rocm_sd.kernels.triton.upsample import (\n    launch,\n)\n")
    kernel_hash.cache_clear()
    changed = kernel_hash("own_kernels.outer")
    monkeypatch.setattr(environment, "_bytes", lambda path: path.read_bytes() + b"#" * (path.name == "upsample.py"))
    kernel_hash.cache_clear()
    within = kernel_hash("own_kernels.outer")
    kernel_hash.cache_clear()
    assert len({before, changed, within}) == 3


def test_a_hash_is_made_without_triton_and_without_torch():
    program = (
        "import sys; from rocm_sd.tuning.environment import kernel_hash; "
        "print(kernel_hash('rocm_sd.kernels.triton.attention')); assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == OPS["attention"].kernel_hash()
