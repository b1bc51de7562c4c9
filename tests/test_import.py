"""Importing is cheap, needs no Triton, and goes downwards only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_costs_under_a_fifth_of_a_second_beyond_torch():
    code = "import torch, time; t = time.process_time(); import rocm_sd, rocm_sd_ops; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.2


def test_the_package_and_its_ops_import_without_triton():
    python(
        "import sys; sys.modules['triton'] = None\n"
        "import rocm_sd, rocm_sd_ops, rocm_sd.ops, rocm_sd.engine\n"
        "import torch; y = rocm_sd.ops.group_norm_silu(torch.ones(1, 8, 2, 2), 4)\n"
        "assert y.shape == (1, 8, 2, 2)\n"
        "assert rocm_sd_ops.register_rocm_ops() == tuple('rocm_sd::' + name for name in rocm_sd.ops.OPS)\n"
    )


def test_arch_imports_without_torch():
    assert python("import sys; import rocm_sd.arch; print('torch' in sys.modules)") == "False"


def test_an_unknown_name_is_an_attribute_error():
    import rocm_sd

    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = rocm_sd.optimise
    assert "optimize" in dir(rocm_sd)


@pytest.fixture
def copy_of_the_source(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    command = (
        "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    )
    return subprocess.run([sys.executable, "-c", command], cwd=folder, capture_output=True, text=True, check=False)


def test_the_import_contract_holds(copy_of_the_source):
    done = contracts(copy_of_the_source)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("arch/table.py", "import rocm_sd.ops", "Imports go downwards only"),
        ("ops/registry.py", "import rocm_sd.engine.optimization", "Imports go downwards only"),
        ("rewrite/apply.py", "import diffusers", "Host programs are imported by their integration only"),
        ("engine/reporting.py", "import triton", "Only kernels know Triton"),
    ],
)
def test_an_upward_import_breaks_the_contract(copy_of_the_source, module, line, broken):
    file = copy_of_the_source / "src" / "rocm_sd" / module
    file.write_text(file.read_text() + f"\n{line}\n")
    done = contracts(copy_of_the_source)
    assert done.returncode != 0
    assert f"{broken} BROKEN" in done.stdout
