from __future__ import annotations

import json
import re

import pytest
import torch

import rocm_sd_ops
from pipelines import tiny_pipeline
from rocm_sd.bench.profiling.families import CONVOLUTION, GEMM, IDLE
from rocm_sd.cli import main
from rocm_sd.errors import Unsupported

ROCPROF = '"Kernel_Name","Start_Timestamp","End_Timestamp"\n"naive_conv_fwd",1000,9000\n"Cijk_x",9000,11000\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return str(folder)


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    return int(ended.value.code or 0)


def test_help_has_examples(capsys):
    assert rocm_sd("profile", "--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd profile --rocprof results_kernel_trace.csv" in shown
    for option in ("--model", "--engine", "--steps", "--out", "--trace", "--flame", "--rocprof", "--json"):
        assert option in shown


@pytest.mark.parametrize("engine", ["stock", "rocm-sd"])
def test_a_picture_is_profiled_and_everything_is_written(model, tmp_path, capsys, engine):
    common = ("--model", model, "--steps", "2", "--device", "cpu", "--engine", engine)
    assert rocm_sd("profile", *common, "--out", str(tmp_path), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    shares = {part["name"]: part["share"] for part in printed["families"]}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[CONVOLUTION] > 0
    assert {"unet", "vae", "text_encoder"} <= {part["name"] for part in printed["modules"]}
    assert printed["subject"]["engine"] == engine
    assert json.loads((tmp_path / "profile.json").read_text()) == printed
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    flame = (tmp_path / "flame.html").read_text()
    assert "aten::conv2d" in flame
    # Nothing of a person's folders.
    assert model not in json.dumps(printed)
    assert model not in flame


def test_for_people_there_are_tables(model, tmp_path, capsys):
    common = ("--model", model, "--steps", "2", "--device", "cpu", "--rows", "3")
    assert rocm_sd("profile", *common, "--flame", str(tmp_path / "f.html"), "--trace", str(tmp_path / "t.json")) == 0
    shown = capsys.readouterr().out
    for word in ("By family", "By module", "By op", "convolution", "outside ops", "unet", "f.html", "t.json"):
        assert word in shown
    assert {path.name for path in tmp_path.iterdir()} == {"f.html", "t.json"}


def test_a_kernel_trace_of_rocprofv3_has_the_same_words(tmp_path, capsys):
    file = tmp_path / "results_kernel_trace.csv"
    file.write_text(ROCPROF)
    assert rocm_sd("profile", "--rocprof", str(file), "--flame", str(tmp_path / "flame.html")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "MIOpen has no tuned convolution for this shape" in shown
    assert "MIOPEN_FIND_ENFORCE=3 rocm-sd profile" in shown
    assert "rocprofv3 records kernels only" in shown
    assert "naive_conv_fwd" in (tmp_path / "flame.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("no-such-workload",), 2, "workload 'no-such-workload' is not known"),
        (("emoji", "--engine", "warp"), 2, "engine 'warp' is not known"),
        (("--steps", "0"), 2, "Invalid value for '--steps'"),
        (("--rocprof", "no-such.csv"), 1, "no-such.csv is not a trace that can be read: there is no such file"),
        (("emoji", "--rocprof", "x.csv"), 2, "leave out the others"),
        (("--model", "./no-such-folder"), 4, "There is no model at ./no-such-folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(capsys, arguments, code, sentence):
    assert rocm_sd("profile", *arguments) == code
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_the_promised_names_profile_any_program(tmp_path, capsys):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU()), torch.ones(8, 64)
    with pytest.raises(Unsupported, match="statistics of nothing"):
        rocm_sd_ops.ROCmSDProfiler().stats()
    rocm_sd_ops.profiler.enable(model)
    model(x)
    # Asking for the statistics ends the recording.
    rocm_sd_ops.profiler.print_stats()
    assert not any(module._forward_hooks for module in model.modules())
    first = rocm_sd_ops.profiler.stats()
    model(x)
    rocm_sd_ops.profiler.disable()
    assert rocm_sd_ops.profiler.stats() == first
    shown = capsys.readouterr().out
    assert "GEMM" in shown
    assert "Sequential.0" in shown
    with rocm_sd_ops.ROCmSDProfiler() as profile:
        model(x)
    stats = profile.stats()
    assert stats.family(GEMM).ms > 0
    assert stats.family(IDLE) is not None
    assert "profiler.enable(pipe)" in " ".join(stats.notes)
    assert profile.export(tmp_path / "flame.html").read_text().startswith("<!doctype html>")
    assert json.loads(profile.export(tmp_path / "trace.json").read_text())["traceEvents"]
    with pytest.raises(Unsupported, match=re.escape("the ending '.png'")):
        profile.export(tmp_path / "flame.png")


def test_the_promised_names_are_resolved_on_first_use():
    assert {"profiler", "ROCmSDProfiler"} <= set(dir(rocm_sd_ops))
    assert rocm_sd_ops.profiler is rocm_sd_ops.profiler
    with pytest.raises(AttributeError, match="no attribute 'profile'"):
        _ = rocm_sd_ops.profile
