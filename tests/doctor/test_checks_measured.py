"""The checks that measure, on answers that are healthy, sick or unreadable: only a healthy one is ever a pass."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from rocm_sd.doctor.check import Finding, Status
from rocm_sd.doctor.examination import all_probes, chosen_checks, examine
from rocm_sd.doctor.facts import Facts, Gpu, TorchDevice, TorchFacts
from rocm_sd.doctor.probes import LiveProbes, RecordedProbes

MACHINES = Path(__file__).parent / "machines"

# The probe that each check asks.
PROBES = {
    "sdpa_numerics": "sdpa_numerics",
    "sdpa_math_fallback": "sdpa_backend",
    "first_run_stall": "first_convolution",
    "convolution_library": "convolution_library",
    "convolution_layout": "convolution_layout",
    "gemm_library": "gemm_library",
    "bf16_speed": "half_precision",
    "mapped_weights": "mapped_weights",
    "graph_replay": "graph_capture",
    "large_graph": "large_graph",
    "fp8_product": "scaled_product",
    "triton_works": "triton_compile",
}


@cache
def _recorded(machine: str) -> str:
    return (MACHINES / machine / "probes.json").read_text(encoding="utf-8")


def _healthy(check: str) -> dict:
    """An MI300X has every kind of kernel; of its own pain, the graphs, a Radeon has none."""
    machine = "r9700-first-run" if check == "graph_replay" else "mi300x-graphs-fp8"
    return json.loads(_recorded(machine))[PROBES[check]]


def _facts(gfx: str | None = "gfx942", **environment: str) -> Facts:
    torch = TorchFacts(version="2.13.0", hip="7.1", devices=(TorchDevice("a card", gfx),) if gfx else ())
    gpus = (Gpu(0, "amd", gfx=gfx, integrated=False, compute_units=64),) if gfx else ()
    return Facts("Linux", "3.11", gpus=gpus, torch=torch, packages={"triton": "3.9"}, environment=environment)


def _find(check: str, answer: object, facts: Facts | None = None, **others: object) -> Finding:
    probes = RecordedProbes({PROBES[check]: answer, **others})
    (examined,) = examine(facts or _facts(), probes, chosen_checks([check]))
    return examined.finding


@pytest.mark.parametrize("check", PROBES)
def test_a_healthy_answer_passes_with_its_figures(check):
    found = _find(check, _healthy(check))
    assert found.status is Status.OK, found.says
    assert found.fix is None
    assert found.measured
    assert any(letter.isdecimal() for letter in found.says)


@pytest.mark.parametrize("check", PROBES)
def test_every_check_says_what_it_measures_and_where_the_pain_was_met(check):
    (found,) = chosen_checks([check])
    assert found.name == check
    assert found.question.endswith("?")
    assert found.measures
    assert found.links
    assert all(link.startswith("https://github.com/") for link in found.links)


@pytest.mark.parametrize("check", PROBES)
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"device": {"kind": "cuda", "vendor": "amd", "arch": "gfx942"}},
        {"device": "cuda"},
        {"device": None, "rows": "all of them", "libraries": 3, "float16": [], "replays": 1, "captured": "yes"},
        {"cannot": "the driver is gone"},
        ["nonsense"],
    ],
    ids=["empty", "device-only", "device-is-text", "wrong-kinds", "cannot", "a-list"],
)
def test_an_unreadable_answer_is_no_pass(check, answer):
    found = _find(check, answer)
    assert found.status is Status.UNKNOWN, found.says


# What each check cannot do without, as a path into the answer.
DECISIVE = {
    "sdpa_numerics": [("rows",), ("failed",), ("rows", 3, "ok")],
    "sdpa_math_fallback": [("rows",), ("rows", 0, "chosen"), ("rows", 0, "head"), ("rows", 0, "math_ms")],
    "first_run_stall": [("first_ms",), ("second_ms",)],
    "convolution_library": [("rows",), ("rows", 2, "on_ms"), ("rows", 2, "off_ms")],
    "convolution_layout": [("rows",), ("rows", 2, "nchw_ms"), ("rows", 2, "nhwc_ms")],
    "gemm_library": [("libraries",)],
    "bf16_speed": [("float16",), ("bfloat16",), ("bfloat16", "conv_ms"), ("float16", "gemm_ms")],
    "mapped_weights": [("mapped_s",), ("heap_s",), ("bytes",)],
    "graph_replay": [("captured",), ("replays",), ("replays", 1, "ok")],
    "large_graph": [("nodes",), ("processes",), ("processes", 2, "captured"), ("processes", 1, "wrong")],
    "fp8_product": [("fnuz",), ("fnuz", "accepted"), ("ocp", "accepted"), ("fnuz", "ok")],
    "triton_works": [("add_float32",), ("multiply_float16", "ok"), ("multiply_bfloat16", "ok")],
}
_CASES = [(check, path) for check, paths in DECISIVE.items() for path in paths]


@pytest.mark.parametrize(
    ("check", "path"), _CASES, ids=[f"{check}-{'.'.join(map(str, path))}" for check, path in _CASES]
)
@pytest.mark.parametrize("nonsense", ["words", [], -1.0, float("nan"), {}], ids=repr)
def test_one_unreadable_value_is_no_pass(check, path, nonsense):
    answer = deepcopy(_healthy(check))
    inside = answer
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = nonsense
    if path == ("failed",) and nonsense == {}:
        pytest.skip("an empty object is what it should be")
    found = _find(check, answer)
    assert found.status is Status.UNKNOWN, found.says
    del inside[path[-1]]
    if path != ("multiply_bfloat16",):
        assert _find(check, answer).status is Status.UNKNOWN or isinstance(path[-1], int)


@pytest.mark.parametrize("check", PROBES)
def test_without_a_gpu_the_question_does_not_arise(check):
    on_cpu = {"kind": "cpu", "vendor": "none", "arch": "cpu"}
    found = _find(check, _healthy(check) | {"device": on_cpu}, _facts(None))
    assert found.status is (Status.OK if check == "sdpa_numerics" else Status.NOT_HERE)


@pytest.mark.parametrize("check", PROBES)
def test_what_ran_on_the_processor_says_nothing_about_the_gpu(check):
    on_cpu = {"kind": "cpu", "vendor": "none", "arch": "cpu"}
    found = _find(check, _healthy(check) | {"device": on_cpu})
    assert found.status is Status.UNKNOWN
    assert "torch sees no GPU" in found.says


@pytest.mark.parametrize("check", PROBES)
@pytest.mark.parametrize(
    ("way", "reason"), [("crash", "SIGKILL"), ("hang", "did not answer within"), ("nonsense", "could not be read")]
)
def test_a_probe_that_crashes_hangs_or_babbles_is_no_pass(check, way, reason, tmp_path, monkeypatch):
    program = {
        "crash": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "hang": "import time; time.sleep(60)",
        "nonsense": "print('[1, 2')",
    }
    (tmp_path / "sick_probe.py").write_text(program[way])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probes = LiveProbes(patience=0.3 if way == "hang" else 30, module="sick_probe")
    (examined,) = examine(_facts(), probes, chosen_checks([check]))
    assert examined.finding.status is Status.UNKNOWN
    assert reason in examined.finding.says


def test_wrong_attention_is_found_by_its_head_size():
    answer = json.loads(_recorded("strix-halo-sd3-vae"))["sdpa_numerics"]
    found = _find("sdpa_numerics", answer, _facts("gfx1151"))
    assert found.status is Status.PROBLEM
    assert "16 of 84" in found.says
    assert all("384" in case or "512" in case for case in found.measured["wrong"])
    assert found.fix
    assert "--use-split-cross-attention" in found.fix.summary


def test_attention_that_gives_no_number_is_wrong():
    answer = _healthy("sdpa_numerics")
    row = next(row for row in answer["rows"] if row["backend"] == "flash")
    row |= {"ok": False, "error": None}
    found = _find("sdpa_numerics", answer)
    assert found.status is Status.PROBLEM
    assert "not a number" in found.says


def test_plain_math_that_is_wrong_itself_is_found():
    answer = _healthy("sdpa_numerics")
    for row in answer["rows"]:
        row |= {"ok": False, "math_error": None, "error": 3.0 if row["backend"] == "flash" else None}
    assert _find("sdpa_numerics", answer).status is Status.PROBLEM


@pytest.mark.parametrize(("exceeded", "status"), [(False, Status.PROBLEM), (True, Status.UNKNOWN)])
def test_an_attention_backend_that_crashes_is_a_problem_and_one_without_an_end_is_unknown(exceeded, status):
    answer = _healthy("sdpa_numerics")
    answer["failed"] = {"efficient": {"reason": "its process was ended by SIGSEGV", "exceeded": exceeded}}
    assert _find("sdpa_numerics", answer).status is status


def _by_math(answer: dict) -> dict:
    for row in answer["rows"]:
        row |= {"chosen": "math", "default_ms": row["math_ms"], "why_not_fused": ["Not compiled for current AMD GPU."]}
    return answer


def test_plain_math_in_place_of_fused_attention_is_found():
    flag = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    found = _find("sdpa_math_fallback", _by_math(_healthy("sdpa_math_fallback")), _facts("gfx1100"))
    assert found.status is Status.PROBLEM
    assert "3 of 4" in found.says
    assert "Not compiled for current AMD GPU." in found.says
    assert found.fix
    assert found.fix.env == {flag: "1"}
    # It would turn on heads above 256 as well, which are wrong there.
    assert not found.fix.safe
    for facts in (_facts("gfx1100", **{flag: "1"}), _facts("gfx1031"), _facts("gfx942")):
        found = _find("sdpa_math_fallback", _by_math(_healthy("sdpa_math_fallback")), facts)
        assert found.fix
        assert not found.fix.env
        assert found.fix.commands == ("rocm-sd tune",)


def test_plain_math_for_the_head_of_512_is_no_fallback():
    answer = _healthy("sdpa_math_fallback")
    answer["rows"][3] |= {"chosen": "math", "why_not_fused": ["too large"]}
    assert _find("sdpa_math_fallback", answer).status is Status.OK


# First and second call in milliseconds: TheRock 3266, a kernel that is loaded, a slow card, YuE 169.
@pytest.mark.parametrize(
    ("first", "second", "status"),
    [(24400, 910, Status.PROBLEM), (180, 2, Status.OK), (1500, 400, Status.OK), (84500, 700, Status.PROBLEM)],
)
def test_a_first_convolution_that_stalls_is_found(first, second, status):
    answer = _healthy("first_run_stall") | {"first_ms": first, "second_ms": second}
    found = _find("first_run_stall", answer, _facts("gfx1201"))
    assert found.status is status
    if found.fix:
        assert found.fix.env == {"MIOPEN_FIND_MODE": "FAST"}
        assert found.fix.safe


def test_a_first_convolution_without_an_end_is_found_and_a_mode_that_is_set_stays():
    answer = json.loads(_recorded("r9700-first-run"))["first_convolution"]
    assert _find("first_run_stall", answer, _facts("gfx1201")).status is Status.PROBLEM
    found = _find("first_run_stall", answer, _facts("gfx1201", MIOPEN_FIND_MODE="NORMAL"))
    assert found.status is Status.PROBLEM
    assert found.fix
    assert not found.fix.env
    assert "MIOPEN_FIND_MODE=NORMAL" in found.fix.summary


@pytest.mark.parametrize(
    ("on", "off", "status"), [(5.0, 1.0, Status.PROBLEM), (1.9, 1.0, Status.OK), (0.05, 0.02, Status.OK)]
)
def test_a_library_that_is_slower_than_none_is_found(on, off, status):
    answer = _healthy("convolution_library")
    answer["rows"][2] |= {"on_ms": on, "off_ms": off}
    found = _find("convolution_library", answer)
    assert found.status is status
    if status is Status.PROBLEM:
        assert "5.0 times" in found.says
        assert answer["rows"][2]["name"] in found.says
        assert found.fix
        assert found.fix.commands == ("rocm-sd tune",)


def test_a_slow_layout_is_found_and_the_switch_is_safe():
    answer = json.loads(_recorded("rx7900xtx-nhwc"))["convolution_layout"]
    found = _find("convolution_layout", answer, _facts("gfx1100"))
    assert found.status is Status.PROBLEM
    assert "44.0 times" in found.says
    assert found.fix
    assert found.fix.env == {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"}
    assert found.fix.safe
    found = _find("convolution_layout", answer, _facts("gfx1100", PYTORCH_MIOPEN_SUGGEST_NHWC="0"))
    assert found.fix
    assert not found.fix.env


def _libraries(**tflops: float | None) -> dict:
    libraries = {
        name: {"tflops": rate, "rows": [], "error": "" if rate else "its process was ended by SIGSEGV"}
        for name, rate in tflops.items()
    }
    return {"device": {"kind": "cuda", "vendor": "amd", "arch": "gfx1151"}, "libraries": libraries}


def test_the_slower_gemm_library_is_found():
    facts = _facts("gfx1151")
    # TheRock 5314.
    found = _find("gemm_library", _libraries(default=17.4, rocblas=39.8, hipblaslt=17.4), facts)
    assert found.status is Status.PROBLEM
    assert "17.4" in found.says
    assert "39.8" in found.says
    assert found.fix
    assert (dict(found.fix.env), found.fix.safe) == ({"TORCH_BLAS_PREFER_HIPBLASLT": "0"}, True)
    found = _find("gemm_library", _libraries(default=20.0, rocblas=20.0, hipblaslt=40.0), facts)
    assert found.fix
    assert (dict(found.fix.env), found.fix.safe) == ({"TORCH_BLAS_PREFER_HIPBLASLT": "1"}, False)
    assert _find("gemm_library", _libraries(default=20.0, rocblas=24.0, hipblaslt=20.0), facts).status is Status.OK


def test_a_gemm_library_that_crashes_is_reported():
    facts = _facts("gfx1150")
    found = _find("gemm_library", _libraries(default=None, rocblas=10.0, hipblaslt=None), facts)
    assert found.status is Status.PROBLEM
    assert "SIGSEGV" in found.says
    assert found.fix
    assert found.fix.env == {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}
    found = _find("gemm_library", _libraries(default=10.0, rocblas=10.0, hipblaslt=None), facts)
    assert found.status is Status.OK
    assert "hipBLASLt fails" in found.says
    assert _find("gemm_library", _libraries(default=None, rocblas=None), facts).status is Status.UNKNOWN
    assert _find("gemm_library", _libraries(default=10.0), facts).status is Status.UNKNOWN


def test_slow_or_absent_bfloat16_is_found():
    slow = _healthy("bf16_speed")
    slow["bfloat16"]["conv_ms"] = 2.1 * slow["float16"]["conv_ms"]
    found = _find("bf16_speed", slow)
    assert found.status is Status.PROBLEM
    assert "2.1 in convolutions" in found.says
    absent = _healthy("bf16_speed")
    absent["bfloat16"] = {"gemm_ms": None, "conv_ms": None, "error": "its process was ended by SIGABRT"}
    found = _find("bf16_speed", absent)
    assert found.status is Status.PROBLEM
    assert "SIGABRT" in found.says
    assert found.fix


# The report's figures; a slow disk's page faults; a map that is slower, yet quick; and a copy without an end.
@pytest.mark.parametrize(
    ("mapped", "heap", "status"),
    [(5.0, 0.004, Status.PROBLEM), (0.4, 0.1, Status.OK), (0.03, 0.004, Status.OK), (None, None, Status.PROBLEM)],
)
def test_slow_mapped_weights_are_found(mapped, heap, status):
    answer = _healthy("mapped_weights") | {"mapped_s": mapped, "heap_s": heap}
    if mapped is None:
        answer |= {"device": None, "exceeded_s": 18.0}
    found = _find("mapped_weights", answer, _facts("gfx1100"))
    assert found.status is status
    if status is Status.PROBLEM:
        assert found.fix
        assert found.fix.env == {"GPU_PINNED_MIN_XFER_SIZE": "1048576"}
        assert found.fix.safe
        assert "--disable-mmap" in found.fix.summary


def test_a_graph_that_replays_wrongly_or_not_at_all_is_found():
    wrong = _healthy("graph_replay")
    wrong["replays"] = [
        {"ok": True, "largest_error": 0.001, "allowed": 0.003},
        {"ok": False, "largest_error": None, "allowed": 1},
    ]
    crashed = _healthy("graph_replay") | {"captured": False, "replays": [], "error": "its process was ended by SIGSEGV"}
    for answer, word in ((wrong, "1 of 2 replays"), (crashed, "SIGSEGV")):
        found = _find("graph_replay", answer)
        assert found.status is Status.PROBLEM
        assert word in found.says
        assert found.fix
        assert (dict(found.fix.env), found.fix.safe) == ({"ROCM_SD_STEP_GRAPH": "0"}, True)


def test_a_large_graph_that_replays_wrongly_in_one_process_or_crashes_is_found():
    wrong, crashed = _healthy("large_graph"), _healthy("large_graph")
    wrong["processes"][1]["wrong"] = 2
    crashed["processes"][2] |= {"captured": False, "replays": 0, "error": "its process was ended by SIGSEGV"}
    words = "2 of 15 replays of a graph of 400 nodes are wrong, in 1 of 3 processes"
    for answer, word in ((wrong, words), (crashed, "SIGSEGV")):
        found = _find("large_graph", answer)
        assert found.status is Status.PROBLEM
        assert word in found.says
        assert (dict(found.fix.env), found.fix.safe) == ({"ROCM_SD_STEP_GRAPH": "0"}, True)
        assert "7.2.0 to 7.2.3" in found.fix.summary


def test_the_large_graph_has_a_launch_for_each_node_and_a_known_result():
    import torch

    from rocm_sd.doctor.checks.large_graph import chain

    others = [torch.full((4,), float(each % 7)) for each in range(400)]
    with torch.profiler.profile() as recorded:
        result = chain(torch.arange(4.0), others)
    assert sum(event.name == "aten::add" for event in recorded.events()) == 400
    assert torch.equal(result, torch.arange(4.0) + sum(each % 7 for each in range(400)))


_REFUSED = {"accepted": False, "ok": None, "error": "not supported"}
_RIGHT = {"accepted": True, "ok": True, "error": ""}
_WRONG = {"accepted": True, "ok": False, "error": "largest error 0.75 of the largest value"}


@pytest.mark.parametrize(
    ("expected", "ocp", "fnuz", "status"),
    [
        ("fnuz", _REFUSED, _RIGHT, Status.OK),
        ("fnuz", _RIGHT, _RIGHT, Status.OK),
        ("fnuz", _WRONG, _RIGHT, Status.PROBLEM),
        ("ocp", _REFUSED, _REFUSED, Status.PROBLEM),
        ("ocp", _WRONG, _REFUSED, Status.PROBLEM),
        ("none", _REFUSED, _REFUSED, Status.NOT_HERE),
        ("none", _WRONG, _REFUSED, Status.PROBLEM),
        (None, _REFUSED, _RIGHT, Status.UNKNOWN),
    ],
)
def test_fp8_in_the_wrong_format_is_found(expected, ocp, fnuz, status):
    answer = _healthy("fp8_product") | {"expected": expected, "ocp": ocp, "fnuz": fnuz}
    assert _find("fp8_product", answer).status is status


def test_a_triton_that_does_not_work_is_found():
    answer = json.loads(_recorded("rx7800xt-cuda-triton"))
    found = _find("triton_works", answer["triton_compile"], _facts("gfx1101"), smoke=answer["smoke"])
    assert found.status is Status.PROBLEM
    assert "0 active drivers" in found.says
    assert found.fix
    # For RDNA2 no Triton compiles: a reinstallation would be idle.
    found = _find("triton_works", answer["triton_compile"], _facts("gfx1032"), smoke=answer["smoke"])
    assert found.status is Status.NOT_HERE
    assert found.fix is None
    # Where torch's own kernels fail as well, Triton is not to blame.
    answer["smoke"]["elementwise"] = {"ok": False, "error": "invalid device function"}
    found = _find("triton_works", answer["triton_compile"], _facts("gfx1101"), smoke=answer["smoke"])
    assert found.status is Status.UNKNOWN
    assert "kernels_present" in found.says


def test_a_triton_that_aborts_on_bfloat16_alone_is_distinguished():
    answer = _healthy("triton_works")
    answer["multiply_bfloat16"] = {"ok": False, "error": "its process was ended by SIGABRT"}
    found = _find("triton_works", answer, _facts("gfx1030"))
    assert found.status is Status.PROBLEM
    assert "not in bfloat16" in found.says
    del answer["multiply_bfloat16"]
    assert _find("triton_works", answer).status is Status.OK


def test_no_triton_is_no_fault_of_triton():
    facts = Facts("Linux", "3.11", gpus=_facts().gpus, torch=_facts().torch)
    assert _find("triton_works", _healthy("triton_works"), facts).status is Status.NOT_HERE


@pytest.mark.parametrize("machine", sorted(folder.name for folder in MACHINES.iterdir() if folder.is_dir()))
def test_every_recorded_machine_answers_every_probe(machine):
    assert set(json.loads(_recorded(machine))) == set(all_probes())


@pytest.mark.gpu
@pytest.mark.parametrize("check", PROBES)
def test_every_check_comes_to_an_answer_on_this_gpu(check):
    from rocm_sd.doctor.reading import gather

    (examined,) = examine(gather(), LiveProbes(), chosen_checks([check]))
    assert examined.finding.status is not Status.UNKNOWN, examined.finding.says
