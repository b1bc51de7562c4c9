"""Every probe for real, in its own process, on the CPU; and what happens where one crashes, hangs or cannot run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import cache
from importlib.util import find_spec

import pytest

from rocm_sd.doctor.check import CannotRun
from rocm_sd.doctor.examination import all_checks, all_probes
from rocm_sd.doctor.probing.isolated import isolated


def _run(*arguments: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "rocm_sd.doctor.probing", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def _ask(name: str, device: str = "cpu") -> dict:
    printed, _ = _run(name, json.dumps({"device": device, "quick": True}))
    lines = printed.splitlines()
    assert len(lines) == 1, printed
    return json.loads(lines[0])


# Importing torch takes longer than most probes: one process asks them all, and each works in a fork of it.
_ALL = """
import json
from rocm_sd.doctor.probing import __main__ as probing
answers = {name: probing.ask(name, '{"device": "cpu", "quick": true}') for name in probing.all_probes()}
print(json.dumps(probing._plain(answers), allow_nan=False))
"""


@cache
def _answers() -> dict:
    done = subprocess.run([sys.executable, "-c", _ALL], capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _is_time(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def test_smoke_finds_every_kind_of_kernel_of_the_cpu():
    answer = _ask("smoke")
    assert answer == _answers()["smoke"]
    assert answer.pop("device") == {"kind": "cpu", "vendor": "none", "arch": "cpu"}
    assert answer == {kind: {"ok": True, "error": ""} for kind in ("elementwise", "gemm", "conv", "sdpa")}


def test_sdpa_numerics_compares_the_fused_kernel_with_float64():
    answer = _answers()["sdpa_numerics"]
    assert answer["failed"] == {}
    cases = {(row["backend"], row["head"], row["keys"], row["dtype"]): row for row in answer["rows"]}
    assert len(cases) == len(answer["rows"])
    assert {("flash", head) for head in (64, 160, 512)} <= {case[:2] for case in cases}
    assert all(row["ok"] and 0 < row["error"] <= row["allowed"] for row in answer["rows"])
    # Errors are those of the dtype: float32's are below, bfloat16's above what one rounding of the other would be.
    assert cases["math", 64, 256, "float32"]["error"] < 1e-5 < cases["math", 64, 256, "bfloat16"]["error"]


def test_sdpa_numerics_sees_what_is_wrong():
    import torch

    from rocm_sd.doctor.checks.sdpa_numerics import _judged, _largest_error

    exact = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    wrong = exact.clone()
    wrong[0, 1, 3, 3] += 0.1
    assert _judged("flash", _largest_error(exact.float(), exact), 1e-6, 3e-6)["ok"]
    assert not _judged("flash", _largest_error(wrong.float(), exact), 1e-6, 3e-6)["ok"]
    wrong[0, 0, 0, 0] = math.nan
    assert not _judged("flash", _largest_error(wrong.float(), exact), 1e-6, 3e-6)["ok"]


def test_sdpa_backend_says_what_runs_and_how_fast():
    rows = _answers()["sdpa_backend"]["rows"]
    assert [row["head"] for row in rows] == [40, 64, 64, 512]
    assert {row["chosen"] for row in rows} == {"flash"}
    assert all(_is_time(row["default_ms"]) and _is_time(row["math_ms"]) for row in rows)


def test_first_convolution_times_two_calls_of_one_size():
    answer = _answers()["first_convolution"]
    assert answer["exceeded_s"] is None
    assert _is_time(answer["first_ms"])
    assert _is_time(answer["second_ms"])
    assert 37 <= answer["height"] < 63


@pytest.mark.parametrize(
    ("name", "times"), [("convolution_library", ("on_ms", "off_ms")), ("convolution_layout", ("nchw_ms", "nhwc_ms"))]
)
def test_convolutions_are_timed_both_ways(name, times):
    rows = _answers()[name]["rows"]
    assert len(rows) == 4
    assert all(_is_time(row[each]) for row in rows for each in times)


def test_gemm_library_times_the_default():
    answer = _answers()["gemm_library"]["libraries"]["default"]
    assert answer["error"] == ""
    assert {row["layout"] for row in answer["rows"]} == {"NN", "NT", "TN"}
    rates = [row["tflops"] for row in answer["rows"]]
    assert min(rates) <= answer["tflops"] <= max(rates)


def test_half_precision_times_both_dtypes():
    answer = _answers()["half_precision"]
    for dtype in ("float16", "bfloat16"):
        assert answer[dtype]["error"] == ""
        assert _is_time(answer[dtype]["gemm_ms"])
        assert _is_time(answer[dtype]["conv_ms"])


def test_mapped_weights_times_both_copies():
    answer = _answers()["mapped_weights"]
    assert answer["bytes"] == 8 * 2**20
    assert _is_time(answer["mapped_s"])
    assert _is_time(answer["heap_s"])


def test_scaled_product_multiplies_in_both_formats():
    answer = _answers()["scaled_product"]
    for name in ("ocp", "fnuz"):
        assert answer[name] == {"accepted": True, "ok": True, "error": ""}
    assert answer["expected"] == "none"


@pytest.mark.parametrize("name", ["graph_capture", "large_graph", "triton_compile"])
def test_what_needs_a_gpu_says_so(name):
    assert "there is no GPU" in _answers()[name]["cannot"]


def test_scaled_product_sees_the_wrong_format():
    import torch

    from rocm_sd.doctor.checks.fp8_product import _judged

    values = torch.tensor([[200.0, 1.5]]).to(torch.float8_e4m3fn)
    exact = values.double() @ values.double().t()
    misread = values.view(torch.uint8).view(torch.float8_e4m3fnuz).double()
    assert _judged(exact.bfloat16().double(), exact)["ok"]
    assert not _judged(misread @ misread.t(), exact)["ok"]


def test_a_gpu_that_is_not_there_is_a_reason_and_no_failure():
    assert "cuda:77 was asked for" in _ask("smoke", "cuda:77")["cannot"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("no_such_probe",), "there is no probe 'no_such_probe'"),
        ((), "there is no probe ''"),
        (("smoke", "{"), "no JSON"),
        (("smoke", "[]"), "a probe takes"),
        (("smoke", '{"size": 3}'), "a probe takes"),
    ],
)
def test_a_wrong_question_is_answered(arguments, reason):
    assert reason in json.loads(_run(*arguments)[0])["cannot"]


def test_what_libraries_print_stays_off_the_answer():
    program = """
import os, sys
from rocm_sd.doctor.check import Probe
from rocm_sd.doctor.probing import __main__ as probing
def answer(**_):
    os.write(1, b"MIOpen(HIP): Warning\\n")
    print("printed")
    return {"infinite": float("inf"), "rows": [float("nan"), 1.5]}
probing.all_probes = lambda: {"smoke": Probe("smoke", answer)}
sys.argv = ["probing", "smoke", "{}"]
probing.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"infinite": None, "rows": [None, 1.5]}
    assert "MIOpen(HIP)" in done.stderr


def test_a_fault_inside_a_probe_is_its_reason():
    printed, errors = _run("first_convolution", '{"device": "no such device"}')
    assert "RuntimeError" in json.loads(printed)["cannot"]
    assert "Traceback" in errors


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_tiny_kernels_compute_what_they_say():
    program = """
import torch
from rocm_sd.doctor.probing.tiny_kernel import add, multiply
x, y = torch.randn(2, 1000)
total = torch.full_like(x, float("nan"))
add[(4,)](x, y, total, 1000, BLOCK=256)
assert torch.equal(total, x + y)
x, y = torch.randn(2, 32, 32).half()
product = torch.full((32, 32), float("nan"))
multiply[(1,)](x, y, product, SIZE=32)
assert torch.allclose(product.double(), x.double() @ y.double(), atol=1e-4)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=True)


def test_each_probe_belongs_to_one_check():
    measured = [check for check in all_checks() if check.probe is not None]
    assert len(all_probes()) == len(measured) == 13
    for check in measured:
        assert callable(check.probe.answer)
        assert check.probe.answer.__module__ == f"rocm_sd.doctor.checks.{check.name}"


def _be_killed() -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _exit() -> dict:
    os._exit(3)


def _sleep() -> dict:
    time.sleep(60)
    return {}


def _raise() -> dict:
    raise RuntimeError("HIP error: invalid device function")


def _refuse() -> dict:
    raise CannotRun("no such card")


def test_isolated_outlives_what_ends_the_process():
    assert isolated(dict, {"a": 1}, limit_s=20).answer == {"a": 1}
    assert isolated(_be_killed, limit_s=20).failed == "its process was ended by SIGKILL"
    assert isolated(_exit, limit_s=20).failed == "its process ended with code 3"
    assert isolated(_raise, limit_s=20).failed == "RuntimeError: HIP error: invalid device function"
    with pytest.raises(CannotRun, match="no such card"):
        isolated(_refuse, limit_s=20)


def test_isolated_ends_what_does_not_end():
    began = time.perf_counter()
    outcome = isolated(_sleep, limit_s=0.2)
    assert time.perf_counter() - began < 10
    assert outcome.answer is None
    assert outcome.exceeded
    assert outcome.failed == "it did not end within 0.2 s"


@pytest.mark.gpu
@pytest.mark.parametrize("name", all_probes())
def test_every_probe_answers_on_the_gpu_within_its_time(name):
    began = time.perf_counter()
    printed, errors = _run(name, "{}")
    assert time.perf_counter() - began < 30
    answer = json.loads(printed)
    assert "cannot" not in answer, errors
    assert answer["device"]["kind"] == "cuda"
