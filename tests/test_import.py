"""Importing is cheap, needs no Triton, and goes downwards only."""

from __future__ import annotations

import ast
import re
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


def test_ops_are_there_after_the_package_is_imported_alone_and_cost_nothing_before():
    code = (
        "import sys, rocm_sd; assert 'torch' not in sys.modules and 'rocm_sd.ops' not in sys.modules\n"
        "assert 'ops' in dir(rocm_sd)\n"
        "import torch; x, weight = torch.ones(1, 4, 2, 2), torch.ones(3, 4, 3, 3)\n"
        "print(tuple(rocm_sd.ops.upsample_conv2d(x, weight).shape))"
    )
    assert python(code) == "(1, 3, 4, 4)"


def test_arch_imports_without_torch():
    assert python("import sys; import rocm_sd.arch; print('torch' in sys.modules)") == "False"


def test_an_unknown_name_is_an_attribute_error():
    import rocm_sd

    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = rocm_sd.optimise
    assert "optimize" in dir(rocm_sd)


def copied_source(folder):
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    command = (
        "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    )
    return subprocess.run([sys.executable, "-c", command], cwd=folder, capture_output=True, text=True, check=False)


def test_the_import_contract_holds(tmp_path):
    done = contracts(copied_source(tmp_path))
    assert done.returncode == 0, done.stdout


PLANTED = [
    ("arch/table.py", "import rocm_sd.ops", "Imports go downwards only"),
    ("ops/registry.py", "import rocm_sd.engine.optimization", "Imports go downwards only"),
    ("rewrite/apply.py", "import diffusers", "Host programs are imported by their integration only"),
    ("engine/reporting.py", "import triton", "Only kernels know Triton"),
    ("engine/capture/graph.py", "import rocm_sd.engine.levels", "Rooms of the engine import downwards only"),
    ("engine/memory.py", "def f():\n    import rocm_sd.engine.vae", "Rooms of the engine import downwards only"),
    ("integrations/a1111/switch.py", "import rocm_sd.engine.capture.graph", "The engine is entered by its facades"),
    ("bench/gate.py", "from rocm_sd.engine import memory", "The engine is entered by its facades"),
    ("bench/gate.py", "from rocm_sd.engine.vae.plan import plan", "The engine is entered by its facades"),
    ("ops/plugins.py", "import rocm_sd.ops.registry", "An op is declared below what chooses for it"),
    ("ops/self_test.py", "def f():\n    import rocm_sd.ops.registry", "An op is declared below what chooses for it"),
]


@pytest.fixture(scope="module")
def lint_of_the_planted(tmp_path_factory):
    """Where each of them stands in a copy that has them all, and what each broken contract says of that copy."""
    folder = copied_source(tmp_path_factory.mktemp("planted"))
    places = {}
    for module, line, broken in PLANTED:
        file = folder / "src" / "rocm_sd" / module
        text = f"{file.read_text()}\n{line}\n"
        file.write_text(text)
        name = ".".join(("rocm_sd", *Path(module).with_suffix("").parts))
        places[module, line, broken] = f"{name} -> {{}} (l.{len(text.splitlines())})"
    done = contracts(folder)
    assert done.returncode != 0
    _, *said = re.split(r"\n([^\n]+)\n-+\n", done.stdout.partition("Broken contracts")[2])
    return places, dict(zip(said[::2], said[1::2], strict=True))


def test_each_contract_has_a_line_that_breaks_it():
    named = re.findall(r'contracts\]\]\nname = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {broken for _, _, broken in PLANTED} == set(named)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: f"{case[0]}: {case[1].splitlines()[-1].strip()}")
def test_an_import_that_is_not_allowed_breaks_the_contract(lint_of_the_planted, case):
    places, said = lint_of_the_planted
    before, after = map(re.escape, places[case].split("{}"))
    assert re.search(before + r"\S+" + after, said[case[2]]), said[case[2]]


def test_nothing_is_recognised_by_the_name_of_a_module_of_this_project():
    """A stand-in for a forward has a mark (rewrite/forwards.py), and a processor says what it stands in for."""
    by_name = re.compile(r"""startswith\(\(?["']rocm_sd|__module__\b[^\n]*["']rocm_sd""")
    found = [path for path in (ROOT / "src").rglob("*.py") if by_name.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_no_implementation_is_recognised_by_its_name_outside_the_ops():
    """What one can do is a property of the implementation (ops/definition.py)."""
    packages = {"bench/machine.py": 'package == "triton"', "doctor/checks/triton_works.py": '"triton" in name'}
    source, found = ROOT / "src" / "rocm_sd", []
    for path in source.rglob("*.py"):
        place = path.relative_to(source).as_posix()
        text = path.read_text(encoding="utf-8").replace(packages.get(place, "\0"), "False")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare) and not place.startswith("ops/"):
                sides = [side for each in (node.left, *node.comparators) for side in (each, *getattr(each, "elts", ()))]
                found += [place for side in sides if isinstance(side, ast.Constant) and side.value == "triton"]
    assert found == []
