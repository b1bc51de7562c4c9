"""Examples are at most ten lines that import public names alone; they and the notebook run on the embedded model."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest
from PIL import Image

import rocm_sd
import rocm_sd_ops

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NOTEBOOK = FOLDER / "quickstart.ipynb"
PUBLIC = {"rocm_sd": rocm_sd.__all__, "rocm_sd_ops": rocm_sd_ops.__all__}


def code_lines(source):
    """Lines of statements: no docstring, no comment, nothing empty."""
    body = ast.parse(source).body
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return {
        line
        for statement in body[1 if documented else 0 :]
        for line in range(statement.lineno, statement.end_lineno + 1)
        if source.splitlines()[line - 1].strip() and not source.splitlines()[line - 1].strip().startswith("#")
    }


def private_names(source):
    """What a script takes from this project and no page promises."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.partition(".")[0] in PUBLIC and "." in each.name]
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PUBLIC:
            found += [
                f"{node.module}.{each.name}" for each in node.names if each.name not in PUBLIC.get(node.module, ())
            ]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PUBLIC:
            found += [f"{node.value.id}.{node.attr}"] if node.attr not in PUBLIC[node.value.id] else []
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_public(path):
    source = path.read_text(encoding="utf-8")
    assert len(code_lines(source)) <= 10
    assert private_names(source) == []
    assert f"python examples/{path.name}" in ast.get_docstring(ast.parse(source))


def test_there_are_four():
    names = ["basic_inference", "benchmark_comparison", "img2img_lora", "optimized_pipeline"]
    assert [path.stem for path in EXAMPLES] == names


@pytest.mark.parametrize(
    "planted",
    [
        "import rocm_sd.engine",
        "from rocm_sd.models import resolve",
        "from rocm_sd_ops import hidden",
        "import rocm_sd\nrocm_sd.engine.optimize(1)",
    ],
)
def test_a_private_name_is_seen(planted):
    assert private_names(planted)


def test_lines_are_counted():
    assert len(code_lines('"""Words."""\n\nimport a\n\n# why\nfor b in a:\n    # this\n    b(\n        1)\n')) == 4


def run(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def is_a_picture(path):
    with Image.open(path) as picture:
        return any(high > low for low, high in picture.convert("RGB").getextrema())


@pytest.mark.slow
def test_basic_inference_draws_and_reports(tmp_path, monkeypatch, capsys):
    run("basic_inference", tmp_path, monkeypatch)
    assert is_a_picture(tmp_path / "frog.png")
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_optimized_pipeline_draws_and_restores(tmp_path, monkeypatch, capsys):
    run("optimized_pipeline", tmp_path, monkeypatch)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["frog.png", "red apple.png"]
    assert "restored: StableDiffusionPipeline" in capsys.readouterr().out


@pytest.mark.slow
def test_the_comparison_shows_both(tmp_path, monkeypatch, capsys):
    run("benchmark_comparison", tmp_path, monkeypatch)
    seconds = dict(line.removesuffix(" s a picture").split(": ") for line in capsys.readouterr().out.splitlines())
    assert list(seconds) == ["stock", "rocm-sd"]
    assert all(float(each) > 0 for each in seconds.values())


@pytest.mark.slow
def test_the_lora_shows_by_its_scale(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    run("img2img_lora", tmp_path, monkeypatch)
    drawn = [(tmp_path / f"lora-{scale}.png").read_bytes() for scale in ("0.0", "0.5", "1.0")]
    assert len(set(drawn)) == 3


def test_the_notebook_is_small_public_and_has_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}
    assert private_names("\n".join("".join(cell["source"]) for cell in code)) == []
    assert NOTEBOOK.stat().st_size < 20_000


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    # The kernel of the running environment: a notebook names one of the user's.
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", cwd=str(tmp_path))
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any("differ by at most" in output.get("text", "") for output in outputs)
