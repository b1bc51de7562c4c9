"""The benchmark of ONNX Runtime by its own flags: its columns, and a word for each flag that does nothing."""

from __future__ import annotations

import csv
import time

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx_folders
from rocm_sd.onnx import benchmark

SMALL = ["-s", "2", "--height", "16", "--width", "24", "-c", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return onnx_folders.made_by_hand(tmp_path_factory.mktemp("made") / "export", tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def of(*arguments):
        code = benchmark.main([str(each) for each in arguments])
        return code, *capsys.readouterr()

    return of


def rows(tmp_path):
    with (tmp_path / "benchmark_result.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_adds_rows_with_the_columns_of_that_benchmark(run, made, tmp_path):
    code, shown, _ = run("-e", "onnxruntime", "-p", made, "-r", "cpu", "-v", "1.5", "-b", "2", "-n", "2", *SMALL)
    assert code == 0
    assert "average_latency" in shown
    assert run("-p", made, *SMALL)[0] == 0
    first, second = rows(tmp_path)
    assert tuple(first) == benchmark.COLUMNS
    told = {name: first[name] for name in ("engine", "provider", "directory", "batch_size", "num_prompts", "height")}
    assert told == {
        "engine": "onnxruntime", "provider": "CPU", "directory": "export", "batch_size": "2", "num_prompts": "2",
        "height": "16",
    }  # fmt: skip
    assert first["model_name"] == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert float(first["average_latency"]) > 0
    assert float(first["median_latency"]) > 0
    assert float(first["first_run_memory_MB"]) >= 0
    assert float(first["second_run_memory_MB"]) >= 0
    assert (first["disable_safety_checker"], first["enable_cuda_graph"]) == ("True", "False")
    assert second["batch_size"] == "1"


def test_so_many_pictures_are_drawn_as_are_asked_for(run, made, monkeypatch):
    drawn = []

    def draw(_subject, _asked, prompt, turn):
        drawn.append((prompt, turn))
        # A call of less than 20 ms is timed again where others had the processor.
        time.sleep(0.025)

    monkeypatch.setattr(benchmark, "_drawn", draw)
    assert run("-p", made, "-n", "3", "-c", "2")[0] == 0
    assert drawn == [(0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tuning"], "--tuning has no effect on cpu: it is for cuda, rocm."),
        (["--enable_cuda_graph"], "--enable_cuda_graph has no effect on cpu: it is for cuda, rocm, tensorrt."),
        (["--use_xformers"], "--use_xformers has no effect on onnxruntime: it is for -e torch."),
        (["--enable_torch_compile"], "--enable_torch_compile has no effect on onnxruntime: it is for -e torch."),
        (["-m", "4"], "--max_trt_batch_size has no effect"),
    ],
)
def test_a_flag_that_does_nothing_here_is_named(run, made, flags, words):
    code, _, said = run("-p", made, "-r", "cpu", *flags, *SMALL)
    assert code == 0
    assert words in said


def test_what_is_missing_is_said_with_what_to_type(run, made, tmp_path):
    code, _, said = run("-e", "onnxruntime", "-v", "2.1")
    assert code == 2
    assert "rocm-sd onnx export stabilityai/stable-diffusion-2-1 FOLDER" in said
    code, _, said = run("-e", "tensorrt")
    assert code == 3
    assert "-e onnxruntime -r tensorrt" in said
    code, _, said = run("-p", made, "--enable_safety_checker")
    assert code == 3
    assert "which has none" in said
    code, _, said = run("-p", tmp_path / "nothing")
    assert code == 4
    assert not (tmp_path / "benchmark_result.csv").exists()


@pytest.mark.parametrize(
    ("there", "words"), [(b"mine\n1\n", "has other columns"), (b"\xff\xfe no text", "cannot be read")]
)
def test_a_file_of_something_else_is_left_as_it_is_before_anything_is_timed(
    run, made, tmp_path, monkeypatch, there, words
):
    (tmp_path / "benchmark_result.csv").write_bytes(there)
    monkeypatch.setattr(benchmark, "benchmark", lambda *_: pytest.fail("It was timed."))
    code, _, said = run("-p", made, *SMALL)
    assert code == 1
    assert words in said
    assert "--result" in said
    assert (tmp_path / "benchmark_result.csv").read_bytes() == there


def test_a_file_that_may_not_be_read_is_no_empty_file(run, made, tmp_path):
    (tmp_path / "benchmark_result.csv").mkdir()
    code, _, said = run("-p", made, *SMALL)
    assert code == 1
    assert "cannot be read" in said


def test_torch_is_timed_by_the_same_command(run, tmp_path):
    code, _, said = run(
        "-e", "torch", "-v", "emoji-sd", "-s", "1", "--height", "32", "--width", "32", "-c", "1", "-g", "-r", "cpu"
    )
    assert code == 0, said
    assert "--enable_cuda_graph has no effect on torch" in said
    (row,) = rows(tmp_path)
    assert (row["engine"], row["provider"], row["model_name"]) == ("torch", "default", "emoji-sd")


@pytest.mark.parametrize("wrong", [["-b", "0"], ["-s", "-1"], ["-r", "vulkan"], ["-v", "9"]])
def test_values_that_are_not_known_are_refused(run, wrong):
    with pytest.raises(SystemExit) as ended:
        run(*wrong)
    assert ended.value.code == 2
