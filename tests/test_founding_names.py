"""docs/founding-names.md: every line of its tables is run here, in order, and gives what its table says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines import CASES
from rocm_sd.kernels.hip import toolchain

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "founding-names.md").read_text(encoding="utf-8")
PYTHON = ("Operators, profiling, pipelines", "Several GPUs, every host, tuning", "Agents")
ROW = re.compile(r"^\| `(?P<line>.+?)` \| (?P<gives>.+) \|$", re.MULTILINE)


def lines(section):
    """(line, words) of a section's table."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [(row["line"], row["gives"]) for row in ROW.finditer(text)]


def is_tensor(found):
    return isinstance(found, torch.Tensor) and found.isfinite().all() and found.numel() == 64 * 512


def names_in(words):
    return lambda _found, names: all(word in names for word in words)


def is_config(found, _names):
    return found.implementation and found.config["block_m"] > 0


# By line: whether what it gives, and the names that there are after it, are what the page says.
HOLDS = {
    "from rocm_sd_ops import ROCmSDBackend, ROCmSDProfiler, ROCmOptimizedPipeline": lambda _, names: all(
        isinstance(names[each], type) for each in ("ROCmSDBackend", "ROCmSDProfiler", "ROCmOptimizedPipeline")
    ),
    "from rocm_sd_ops import OptimizedAttentionFunction, pytorch_attention_fallback, rocm_backend": lambda _, names: (
        issubclass(names["OptimizedAttentionFunction"], torch.autograd.Function)
        and callable(names["pytorch_attention_fallback"])
        and isinstance(names["rocm_backend"], names["ROCmSDBackend"])
    ),
    "register_rocm_ops()": lambda found, _: "rocm_sd::attention" in found and torch.ops.rocm_sd.attention,
    "optimized_attention(q, k, v, num_heads=8)": lambda found, _: is_tensor(found) and found.shape == (1, 64, 512),
    "pytorch_attention_fallback(q, k, v, num_heads=8)": lambda found, names: torch.allclose(
        found, names["optimized_attention"](names["q"], names["k"], names["v"], 8), atol=1e-5
    ),
    "OptimizedAttentionFunction.apply(q, k, v, 8)": lambda found, _: is_tensor(found) and found.grad_fn is not None,
    "rocm_backend.is_available()": lambda found, names: found == (names["rocm_backend"].why_not() is None),
    'ROCmSDBackend("cpu").why_not()': lambda found, _: "HIP has no code for a tensor on cpu" in found,
    'f"{benchmark_attention(1, 64, 512, 8, 100):.2f}ms"': lambda found, _: re.fullmatch(r"\d+\.\d\dms", found),
    'benchmark_attention(1, 64, 512, 8, 3)["speedup"]': lambda found, _: isinstance(found, float) and found > 0,
    "ROCmSDProfiler().profile_attention(q, k, v, 8)": lambda found, _: is_tensor(found),
    "ROCmSDProfiler().profile_attention(1, 64, 512, 8)": lambda found, _: is_tensor(found),
    "ROCmSDProfiler().timings": lambda found, _: found == {},
    "profiler.enable()": lambda found, _: found is None,
    "profiler.print_stats()": lambda found, _: found is None,
    "ROCmOptimizedPipeline()": lambda found, _: found.unet.config["cross_attention_dim"] and found.report(),
    "ROCmOptimizedPipeline(pipe)": lambda found, names: found.pipeline is names["pipe"] and found.report(),
    'optimize_sd_model(pipe, "Auto")': lambda found, names: found is names["pipe"],
    'optimize_sd_model(pipe.unet, optimization_level="performance")': lambda found, names: found is names["pipe"].unet,
    "from rocm_sd import ROCmStableDiffusionPipeline": names_in(["ROCmStableDiffusionPipeline"]),
    "from multi_gpu_coordinator import MultiGPUCoordinator, ModelParallelAttention": names_in(
        ["MultiGPUCoordinator", "ModelParallelAttention"]
    ),
    "MultiGPUCoordinator().devices": lambda found, _: len(found) == max(1, torch.cuda.device_count()),
    'ModelParallelAttention(512, 8, ["cpu", "cpu"])(q)': lambda found, _: is_tensor(found),
    "import unified_sd_optimization": names_in(["unified_sd_optimization"]),
    "unified_sd_optimization.optimize(pipe)": lambda found, names: found is names["pipe"],
    "unified_sd_optimization.integration_of(pipe)": lambda found, _: str(found) == "Integration.DIFFUSERS",
    'optimize_sd_model(model, "Auto")': lambda found, names: (
        found is not names["model"] and found.model is names["model"].model
    ),
    "ROCmOptimizedAttention.FUNCTION": lambda found, _: found == "optimize_model",
    "ROCmOptimizedVAE.FUNCTION": lambda found, _: found == "optimize_model",
    "ROCmOptimizedAttention.CATEGORY": lambda found, _: found == "ROCm Optimizations",
    'ROCmOptimizedAttention().optimize_model(model, "auto")': lambda found, names: (
        found[0] is not names["model"] and found[0].model is names["model"].model
    ),
    'FindOptimalConfig("linear_residual", {"m": 512, "n": 512, "k": 512, "dtype": "float16"}, "gfx1100")': is_config,
    "from rocm_sd.agents import roster": names_in(["roster"]),
    "roster.find_roster()": lambda found, _: found == Path("config", "agents.yaml"),
    'roster.ROLES["meaningful_work"].work': lambda found, _: found == "analyst",
    'roster.ROLES["implementation"].work': lambda found, _: found == "kernel_writer",
    'roster.ROLES["vae_optimization"].ops': lambda found, _: "upsample" in found and "attention" not in found,
    'roster.ROLES["advanced_optimization"].ops': lambda found, _: "attention" in found and "linear_residual" in found,
    'roster.ROLES["final_integration"].work': lambda found, _: found == "reviewer",
    'roster.read_roster(roster.find_roster()).agent("implementation")': lambda found, _: found.role == "implementation",
}
# What the lines of a table stand on, in the words of the documents that they come from.
GIVEN = """
from rocm_sd_ops import benchmark_attention, optimize_sd_model, optimized_attention, profiler, register_rocm_ops
from rocm_sd.integrations.comfyui.nodes import ROCmOptimizedAttention, ROCmOptimizedVAE
from rocm_sd.tuning import FindOptimalConfig
"""


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "integrations" / "comfyui"))
    import fake_comfyui

    fake_comfyui.install(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = dict(zip("qkv", torch.randn(3, 1, 64, 512).requires_grad_().unbind(), strict=True))
    found |= {"pipe": CASES["sd15"].build(tmp_path), "model": fake_comfyui.patcher()}
    exec(GIVEN, found)
    return found


@pytest.mark.parametrize("section", PYTHON)
def test_each_python_line_gives_what_the_page_says(section, names, capsys):
    for line, _ in lines(section):
        if re.match(r"(from|import) ", line):
            exec(line, names)
            found = None
        else:
            found = eval(line, names)
        assert HOLDS[line](found, names), line
    if "profiler.print_stats()" in dict(lines(section)):
        assert "By family" in capsys.readouterr().out


def test_every_promised_python_line_stands_on_the_page():
    assert [line for section in PYTHON for line, _ in lines(section)] == list(HOLDS)


def test_the_cpp_lines_compile_on_the_host(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no c++: apt-get install g++")
    shown = [line for line, _ in lines("C++")]
    for name in ("FusedTransformerBlockTemplate", "rdna3::OptimizedFusedTransformer", "cdna3::", "FindOptimalConfig"):
        assert any(name in line for line in shown)
    source = tmp_path / "lines.cpp"
    source.write_text(
        '#include "ck_sd_templates.hpp"\nint main() {\n' + "\n".join(shown) + "\n"
        "return a.head == 64 && b.head == 64 && c.head == 40 && c.wave_size == 64 && d.known() ? 0 : 1; }\n"
    )
    program = tmp_path / "lines"
    subprocess.run([compiler, "-std=c++17", f"-I{toolchain.INCLUDE}", source, "-o", program], check=True)
    subprocess.run([program], check=True)


@pytest.mark.slow
def test_each_command_does_what_the_page_says(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from rocm_sd.onnx import export_pipeline

    export_pipeline(CASES["sd15"].build(tmp_path), tmp_path / "MODEL", source="tiny", check=False)
    shown = [line for line, _ in lines("Commands")]
    setup, optimize, benchmark = shown
    done = subprocess.run(shlex.split(setup), cwd=ROOT, capture_output=True, text=True, check=True)
    assert "would run: .venv/bin/pip install" in done.stdout
    here = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for line in (optimize, benchmark):
        words = [sys.executable, *shlex.split(line)[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "FUSED" / "unet" / "model.onnx").is_file()
    assert "MODEL" in (tmp_path / "benchmark_result.csv").read_text()
