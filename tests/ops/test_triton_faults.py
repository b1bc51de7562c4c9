"""A Triton that is broken, or does not compile for the card, or crashes: stock torch runs, and one warning says why."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rocm_sd import arch, workers
from rocm_sd.engine.capture import warmup
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.kernels.triton import CompilerCrashed, CompilerFailed
from rocm_sd.kernels.unavailable import KernelUnavailable
from rocm_sd.ops import registry, self_test
from rocm_sd.ops.definition import Implementation, Verification
from rocm_sd.ops.registry import Op
from rocm_sd.ops.samples import Sample
from rocm_sd.tuning import choice
from rocm_sd.tuning.resolve import user_database

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# What the data of a Radeon choose Triton for.
IN_TRITON = ("geglu", "layer_norm_residual", "guided_step")
BROKEN = {
    "at import": {"__init__.py": "raise ImportError('libtriton.so: no such file')"},
    "a library": {"__init__.py": "", "language.py": "raise OSError('libamdhip64.so: cannot open')"},
    "its own check": {"__init__.py": "", "language.py": "raise RuntimeError('two LLVMs\\nin one process')"},
    "another version": {"__init__.py": "import math; math.knobs"},
    "no runtime": {"__init__.py": "", "language.py": ""},
}
_NO_DRIVER = """
class Config:
    @property
    def active(self):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
driver = Config()
"""
NO_DRIVER = {
    "__init__.py": "",
    "language.py": "",
    "runtime/__init__.py": "",
    "runtime/driver.py": _NO_DRIVER,
}


def scenario():
    """On a gfx1100 that is none: all that happens before a kernel would be launched. What was warned of is returned."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rocm_sd").addHandler(handler)
    arch.detect = lambda _device=None: arch.get("gfx1100")
    warmup.start_compiling(GPU)
    warmup.compile_kernels(lambda: pytest.fail("nothing is compiled"), GPU, torch.float16)
    chosen = {}
    for name in IN_TRITON:
        op = registry.OPS[name]
        problem = op.verification.problem(*op.verification.real[0].make(filled=False))
        assert op.named(problem, GPU).implementation == "triton"
        found = op.choose(problem, GPU)
        chosen[name] = [found.implementation, found.why]
    return {"said": said, "chosen": chosen}


def scenario_pipeline():
    import tempfile

    import rocm_sd
    from pipelines import tiny_pipeline

    with tempfile.TemporaryDirectory() as folder:
        pipe = rocm_sd.optimize(tiny_pipeline(Path(folder)))
        images = pipe("a frog", num_inference_steps=2, height=16, width=16, output_type="pt").images
    return {"finite": bool(images.isfinite().all())}


def play(code: str, parts: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, text in parts.items():
        path = folder / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    tests = Path(__file__).parents[1]
    paths = [str(folder), str(tests / "ops"), str(tests), *filter(None, sys.path)]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "ROCM_SD_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def played(name: str, parts: dict[str, str], folder: Path) -> dict:
    ran = play(f"import json, test_triton_faults as t; print(json.dumps(t.{name}()))", parts, folder)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", BROKEN)
def test_a_triton_that_cannot_be_imported_is_one_warning_and_stock_runs(tmp_path, how):
    found = played("scenario", BROKEN[how], tmp_path)
    assert len(found["said"]) == 1, found["said"]
    assert found["said"][0].startswith("Triton cannot be imported (")
    assert found["said"][0].endswith("rocm-sd uses stock torch in its place; to find out more, type: rocm-sd doctor")
    assert "\n" not in found["said"][0]
    for implementation, why in found["chosen"].values():
        assert implementation == "torch"
        assert why.startswith("Triton cannot be imported (")


def test_a_triton_without_a_driver_is_one_warning_too(tmp_path):
    found = played("scenario", NO_DRIVER, tmp_path)
    sentences = [each for each in found["said"] if each.startswith("Triton cannot use the GPU (RuntimeError: 0 active")]
    assert len(sentences) == 1
    # That nothing is compiled ahead with such a package is the other.
    assert len(found["said"]) == 2
    assert {implementation for implementation, _ in found["chosen"].values()} == {"torch"}


def test_a_pipeline_is_optimised_and_draws_beside_a_broken_triton(tmp_path):
    assert played("scenario_pipeline", BROKEN["at import"], tmp_path) == {"finite": True}


def test_the_doctor_examines_beside_a_broken_triton(tmp_path):
    code = "import sys; from rocm_sd.cli.main import run; sys.argv[0] = 'rocm-sd'; run()"
    ran = play(code, BROKEN["at import"], tmp_path, "doctor", "triton_works", "two_tritons", "--json")
    assert "Traceback" not in ran.stderr
    assert {each["check"] for each in json.loads(ran.stdout)["findings"]} == {"triton_works", "two_tritons"}


@pytest.fixture
def _asked_anew():
    caches = (triton_kernels._why_not_imported, triton_kernels._why_not_driven)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_the_table_of_architectures_is_asked_before_triton(monkeypatch):
    monkeypatch.setattr(arch, "detect", lambda _device: arch.get("gfx1030"))
    monkeypatch.setattr(triton_kernels, "import_module", lambda _name: pytest.fail("Triton was tried"))
    reason = triton_kernels.why_not(GPU)
    assert reason == "Triton does not compile for gfx1030 (Triton 3.9: the AMD backend refuses gfx1030)"
    warmup.start_compiling(GPU)
    warmup.compile_kernels(lambda: pytest.fail("nothing is compiled"), GPU, torch.float16)


def _of_triton(error):
    """As Triton's own errors are, which are in modules of its own."""
    error.__module__ = "triton.compiler.errors"
    return error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (_of_triton(type("CompilationError", (Exception,), {}))("at 3:4: no such layout\nmodule {"), CompilerFailed),
        (RuntimeError("PassManager::run failed"), CompilerFailed),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), CompilerFailed),
        (CompilerCrashed("its compiler crashed."), CompilerCrashed),
        # What a card says is nobody's to hide.
        (RuntimeError("Triton Error [HIP]:  Code: 700, Messsage: illegal address"), RuntimeError),
        (torch.OutOfMemoryError("HIP out of memory"), torch.OutOfMemoryError),
    ],
)
def test_of_errors_at_a_launch_only_the_compilers_make_way_for_stock(monkeypatch, error, raised):
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    class Module:
        @staticmethod
        def launch():
            raise error

    monkeypatch.setattr(triton_kernels, "import_module", lambda _name: Module)
    with pytest.raises(raised) as found:
        triton_kernels.launch_op("geglu", CPU)
    assert type(found.value) is raised
    assert not isinstance(found.value, KernelUnavailable) or "\n" not in str(found.value)


@pytest.fixture
def crashing(tmp_path, monkeypatch):
    """An op that is trusted, and whose compiler crashes at the size of 4."""

    def fast(x):
        if x.numel() == 4:
            raise CompilerCrashed("its compiler crashed (_silu: SIGSEGV).")
        return x * torch.sigmoid(x)

    def problem(x):
        return {"n": x.numel(), "dtype": str(x.dtype).removeprefix("torch.")}

    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    table = {"static": {"implementation": "fast", "why": "shipped"}}
    monkeypatch.setattr(choice, "_table", lambda op, _arch: table if op == "silu" else None)
    monkeypatch.setattr(registry, "SELF_TESTED", frozenset({"cpu"}))
    # A worker finds ops by name, and this one has none: it is tested in place, as inside a worker.
    monkeypatch.setattr(workers, "_inside", True)
    registry._say_once.cache_clear()
    registry.forget_choices()
    self_test.forget()
    sample = Sample("7 elements", torch.float32, lambda draw: (draw(7),))
    yield lambda: Op(
        "silu",
        "x * sigmoid(x)",
        (Implementation("torch", torch.nn.functional.silu), Implementation("fast", fast)),
        verification=Verification(
            "fast", "rocm_sd.kernels.triton.geglu", lambda x: x * torch.sigmoid(x), problem, (sample,), (), {}
        ),
    )
    registry.forget_choices()
    self_test.forget()


def test_an_op_whose_compiler_crashed_is_stock_at_every_size_and_in_every_process(crashing, caplog):
    op = crashing()
    assert op.choose({"n": 5, "dtype": "float32"}, CPU).implementation == "fast"
    x = torch.randn(4)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        assert torch.equal(op.run({"n": 4, "dtype": "float32"}, CPU, None, x), torch.nn.functional.silu(x))
    reason = "its compiler crashed (_silu: SIGSEGV)"
    assert [record.getMessage() for record in caplog.records] == [f"silu: stock torch on cpu, because {reason}"]
    assert [(each.candidate, each.reason) for each in user_database().quarantined()] == [("fast", reason)]
    # In this process at any size, though that of 5 was chosen and tested before.
    for n in (4, 5, 6):
        assert op.choose({"n": n, "dtype": "float32"}, CPU).implementation == "torch"
    # And in the next, which has the database alone.
    self_test.forget()
    registry.forget_choices()
    assert crashing().choose({"n": 4, "dtype": "float32"}, CPU).why == f"fast is set aside: {reason}"


def test_by_name_a_crashed_compiler_is_an_error(crashing):
    with pytest.raises(CompilerCrashed):
        crashing().run({"n": 4, "dtype": "float32"}, CPU, "fast", torch.randn(4))
    assert user_database().quarantined() == ()
