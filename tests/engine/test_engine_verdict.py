"""rocm_sd.report(pipe) in five lines: true of every state that a pipeline can be in, and within 80 columns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rocm_sd
from pipelines import tiny_pipeline
from rocm_sd import settings
from rocm_sd.engine import Report, Skipping, calibration, levels, verdict_facts
from rocm_sd.engine.installed import MEASURED, SHIPPED, WAITS, Approximated, Graphs, ModelPlan
from rocm_sd.engine.model_ways import unmeasured
from rocm_sd.engine.optimization import optimize_with
from rocm_sd.engine.parts import Parts
from rocm_sd.engine.verdict_facts import Facts
from rocm_sd.ops.registry import forget_choices
from rocm_sd.rewrite import Change

LAYOUT = "its convolutions keep their layout (channels-last, float32 convolutions are 3.74 times as far from exact)"
REPLACED = tuple(Change(f"unet.{n}", "ResnetBlock2D", "resblock") for n in range(96))
SKIPPED = tuple(Change(f"vae.{n}", "ResnetBlock2D", "resblock", LAYOUT) for n in range(2))
MORE = "More: print(rocm_sd.report(pipe, verbose=True))"


def lines(arch="gfx1100", changes=(*REPLACED, *SKIPPED), *, level="auto", quality="exact", approximations=(), **facts):
    said = Report(arch, level, quality, changes, (), approximations, Facts(**facts)).lines
    assert len(said) <= 5
    assert max(map(len, said)) <= 80
    assert "print(rocm_sd.report(pipe, verbose=True))" in said[-1]
    return said


@pytest.fixture
def pipe(tmp_path):
    return tiny_pipeline(tmp_path)


@pytest.fixture
def captured(monkeypatch):
    """Graphs on a CPU, where a trace stands for one."""
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(verdict_facts.arch, "find_gpus", list)


def draw(pipe, steps=3):
    return pipe("a frog", num_inference_steps=steps, height=16, width=16, output_type="latent").images


def shown(target):
    said = rocm_sd.report(target).lines
    assert len(said) <= 5
    assert max(map(len, said)) <= 80
    return said


# On a CPU.


def test_a_cpu_runs_stock_as_expected():
    said = lines("cpu", SKIPPED)
    assert said[0] == "CPU: running stock PyTorch, as expected; 0 of 2 modules replaced"
    assert said[-1] == MORE


def test_a_module_that_two_rules_look_at_counts_once():
    twice = (*SKIPPED, Change("vae.1", "Decoder", "vae_decoder", "another reason"))
    assert lines("cpu", twice)[0].endswith("; 0 of 2 modules replaced")
    by_another = (*SKIPPED, Change("vae.1", "Decoder", "vae_decoder"))
    said = lines("gfx1100", by_another)
    assert said[0] == "gfx1100: 1 of 2 modules replaced"
    assert f"Skipped: 1 module, because {LAYOUT[:20]}" in "\n".join(said)


def test_a_gpu_that_does_not_draw_is_named(pipe, monkeypatch, no_gpu):
    rocm_sd.optimize(pipe)
    assert "though" not in shown(pipe)[0]
    monkeypatch.setattr(verdict_facts.arch, "find_gpus", lambda: [SimpleNamespace(arch_name="gfx1100", name="Radeon")])
    # As on a CPU whose layout keeps all rules away.
    optimize_with(pipe, "auto", "exact", Parts(rules=frozenset()))
    assert shown(pipe)[0] == "CPU: running stock PyTorch, though there is a gfx1100; type: rocm-sd doctor"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    optimize_with(pipe, "auto", "exact", Parts(rules=frozenset()))
    assert shown(pipe)[0] == "CPU: running stock PyTorch, though torch sees a GPU: call pipe.to('cuda') first"


def test_on_a_cpu_replaced_modules_have_ops_that_are_stock(pipe, monkeypatch, no_gpu):
    rocm_sd.optimize(pipe)
    assert shown(pipe)[0] == "CPU: 23 of 23 modules replaced, whose ops are stock PyTorch here"
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "group_norm_silu=torch")
    rocm_sd.optimize(pipe)
    assert settings.current().implementations
    assert shown(pipe)[0] == "CPU: 23 of 23 modules replaced"


# On a GPU: nothing replaced, and why.


@pytest.mark.parametrize(
    ("changes", "facts", "expected"),
    [
        ((), {"plans": (ModelPlan("UNet2DConditionModel", WAITS),)}, " until its first picture is measured here"),
        (
            (),
            {"plans": (ModelPlan("UNet2DConditionModel", MEASURED, None, "2026-02-03"),)},
            ", the fastest when it was measured here",
        ),
        (SKIPPED, {"known": False}, ", because rocm-sd does not know this GPU"),
        ((), {}, ", because no rule is for its modules"),
        (SKIPPED, {}, "; 0 of 2 modules replaced"),
    ],
    ids=["calibration pending", "stock is the fastest", "unknown GPU", "unknown pipeline", "skipped"],
)
def test_nothing_replaced_on_a_gpu_has_its_reason(changes, facts, expected):
    said = lines("gfx1100", changes, **facts)
    assert said[0].startswith(f"gfx1100: running stock PyTorch{expected}")
    assert ("Skipped: 2 modules, because its convolutions keep" in "\n".join(said)) == bool(changes)


def test_an_emulated_card_is_called_so():
    assert lines("gfx1100", emulated=True)[0].startswith("gfx1100 (emulated): 96 of 98 modules replaced")


# Graphs.


@pytest.mark.parametrize(
    ("graphs", "headline"),
    [
        ([("UNet2DConditionModel", 0, 0)], ", no graph captured yet"),
        ([("UNet2DConditionModel", 1, 0)], ", UNet captured as a graph"),
        ([("UNet2DConditionModel", 1, 38)], ", UNet replayed as a graph"),
        ([("UNet2DConditionModel", 1, 38), ("Decoder", 1, 0)], ", UNet replayed and VAE captured as graphs"),
        ([("SD3Transformer2DModel", 2, 9), ("Decoder", 1, 1)], ", transformer and VAE replayed as graphs"),
        (
            [("UNet2DConditionModel", 1, 3), ("ControlNetModel", 1, 3), ("Decoder", 1, 0)],
            ", 2 of 3 models replayed as graphs",
        ),
    ],
)
def test_graphs_are_told_as_they_are(graphs, headline):
    said = lines(graphs=tuple(Graphs(*one) for one in graphs))
    assert said[0] == f"gfx1100: 96 of 98 modules replaced{headline}"
    assert not any(line.startswith("Graphs") for line in said)


def test_a_graph_that_was_refused_has_its_reason():
    refused = Graphs("UNet2DConditionModel", why_none=("a graph of it differs by 0.5", "its weights move"))
    said = lines(graphs=(refused,))
    assert said[0] == "gfx1100: 96 of 98 modules replaced"
    assert said[1] == "Graphs of the UNet: none, because a graph of it differs by 0.5; 1 other reason"
    some = replace(refused, count=1, replays=3, why_none=refused.why_none[:1])
    assert lines(graphs=(some,))[1].startswith("Graphs of the UNet: some calls had none, because a graph of it")


def test_graphs_of_a_real_unet(pipe, captured, no_gpu):
    rocm_sd.optimize(pipe.unet)
    given = (torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 6, pipe.unet.config.cross_attention_dim))

    def call():
        with torch.no_grad():
            pipe.unet(*given)

    assert shown(pipe.unet)[0].endswith("modules replaced, no graph captured yet")
    call()
    assert shown(pipe.unet)[0].endswith("modules replaced, no graph captured yet")
    call()
    assert shown(pipe.unet)[0].endswith("modules replaced, UNet captured as a graph")
    call()
    assert shown(pipe.unet)[0].endswith("modules replaced, UNet replayed as a graph")
    pipe.unet.conv_in.register_forward_hook(lambda *_: None)
    call()
    assert any(line.startswith("Graphs of the UNet: some calls had none, because ") for line in shown(pipe.unet))


@pytest.mark.parametrize(
    ("decision", "asked", "expected"),
    [
        ({"kept": "model offload"}, None, "the model offload that was found moves weights"),
        ({}, False, "ROCM_SD_STEP_GRAPH is 0"),
        ({"device": torch.device("xpu")}, None, "torch has none for xpu"),
        ({"level": "memory"}, None, None),
        ({"device": torch.device("cpu")}, None, None),
    ],
)
def test_why_there_are_no_graphs(monkeypatch, decision, asked, expected):
    made = {"level": "performance", "kept": None, "device": torch.device("cuda:0")} | decision
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "0" if asked is False else "")
    found = verdict_facts._why_no_graphs(SimpleNamespace(**made), Parts(), wanted=False)
    assert found == expected
    assert verdict_facts._why_no_graphs(SimpleNamespace(**made), Parts(), wanted=True) is None
    if expected:
        assert lines(why_no_graphs=found)[1] == f"Graphs: none, because {expected}"


# Plans.


@pytest.mark.parametrize(
    ("plans", "facts", "expected"),
    [
        (
            (
                ModelPlan("UNet2DConditionModel", MEASURED, 4.42, "2026-02-03"),
                ModelPlan("Decoder", MEASURED, None, "2"),
            ),
            {},
            "Plan: measured here on 2026-02-03: UNet 4.42x stock, VAE as stock",
        ),
        (
            (ModelPlan("Decoder", MEASURED, 2.0, "2026-02-03"), ModelPlan("UNet2DConditionModel", WAITS)),
            {},
            "Plan: measured here on 2026-02-03: VAE 2.00x stock; UNet to be measured",
        ),
        ((ModelPlan("Decoder", SHIPPED),), {"timed": True}, "Plan: the shipped data's, timed on gfx1100"),
        (
            (ModelPlan("Decoder", SHIPPED),),
            {},
            "Plan: the shipped data's, not timed on any card; type: rocm-sd tune",
        ),
        (
            (ModelPlan("Decoder", SHIPPED, why="it cannot be rebuilt"),),
            {},
            "Plan: the shipped data's, since it cannot be rebuilt",
        ),
    ],
)
def test_plans_are_measured_or_shipped(plans, facts, expected):
    assert expected in lines(plans=plans, **facts)
    # On a CPU nobody asks for one.
    assert (expected in lines("cpu", plans=plans, **facts)) == (plans[0].source == MEASURED)


def test_a_real_pipeline_waits_for_its_first_picture(pipe, captured, monkeypatch, tmp_path, no_gpu):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "1")
    forget_choices()
    unmeasured.clear()
    rocm_sd.optimize(pipe)
    said = shown(pipe)
    assert said[0] == "CPU: running stock PyTorch, as expected; no module replaced"
    assert "Plan: none yet; VAE and UNet measured here at the first picture" in said
    found = calibration.plans.MeasuredPlan(calibration.named("channels_last"), 1.0, 4.42, "2026-02-03")
    monkeypatch.setattr(calibration, "measured", lambda *_, **__: found)
    rocm_sd.optimize(pipe)
    said = shown(pipe)
    assert "Plan: measured here on 2026-02-03: VAE 4.42x stock, UNet 4.42x stock" in said
    forget_choices()


# Quality and level.

STEPS = Approximated("steps", "PSNR 45.3 dB, SSIM 0.997")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "Quality exact: nothing is approximated; level auto (performance here)"),
        (
            {"quality": "high", "approximated": (STEPS,)},
            "Quality high: approximates steps; PSNR 45.3 dB, SSIM 0.997 to exact",
        ),
        (
            {"quality": "high", "approximated": (Approximated("int8 layers"),), "cost": "PSNR 40.0 dB, SSIM 0.990"},
            "Quality high: approximates int8 layers; PSNR 40.0 dB, SSIM 0.990 to exact",
        ),
        (
            {"quality": Skipping(depth=1, every=3), "approximated": (Approximated("steps"),)},
            "Quality as given: approximates steps; its cost is not measured",
        ),
        # Weights that were loaded in eight bits are so at every quality.
        (
            {"approximated": (Approximated("12 layers in int8, as loaded"),)},
            "Quality exact: approximates 12 layers in int8, as loaded; its cost is not ...",
        ),
        (
            {"quality": "high", "approximated": (replace(STEPS, why_exact="FreeU is on"),)},
            "Quality high: exact so far, because FreeU is on; level auto (performance here)",
        ),
        (
            {"quality": "high", "approximations": ("Net is exact: nothing; type: rocm-sd tune --quality MODEL",)},
            "Quality high: exact until you type: rocm-sd tune --quality MODEL",
        ),
        (
            {"quality": "psnr=32", "approximations": ("x; type: rocm-sd tune --quality MODEL --within psnr=32",)},
            "Exact until you type: rocm-sd tune --quality MODEL --within psnr=32",
        ),
        (
            {"level": "memory", "facts_level": "memory", "does": "half batches, no graphs"},
            "Level memory: half batches, no graphs; quality exact",
        ),
        (
            {"facts_level": "memory", "does": "half batches, no graphs, offload"},
            "Level auto (memory here): half batches, no graphs, offload; quality exact",
        ),
    ],
)  # fmt: skip
def test_quality_and_level_are_told_with_their_cost(given, expected):
    options = {name: value for name, value in given.items() if name in {"level", "quality", "approximations"}}
    facts = {name.removeprefix("facts_"): value for name, value in given.items() if name not in options}
    report = Report("gfx1100", options.pop("level", "auto"), options.pop("quality", "exact"), REPLACED,
                    facts=Facts(**facts), **options)  # fmt: skip
    assert expected in report.lines
    assert max(map(len, report.lines)) <= 80


def test_a_real_pipeline_of_level_memory(pipe, no_gpu):
    rocm_sd.optimize(pipe, level="memory", quality="high")
    said = shown(pipe)
    assert "Level memory: half batches, no graphs" in said
    assert any(line.startswith("Quality high: exact") for line in said)


def test_a_real_approximation_and_what_becomes_of_it(pipe, no_gpu):
    rocm_sd.optimize(pipe, quality=Skipping(depth=1, every=2))
    expected = "Quality as given: approximates steps; its cost is not measured"
    assert any(line.startswith(expected) for line in shown(pipe))
    draw(pipe, 6)
    assert any(line.startswith(expected) for line in shown(pipe))
    rocm_sd.optimize(pipe, quality=Skipping(depth=1, every=2))
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    draw(pipe, 6)
    assert any(line.startswith("Quality as given: exact so far, because FreeU") for line in shown(pipe))


# What has changed since.


def test_modules_that_fell_back_are_counted_with_the_reason_once(pipe, no_gpu):
    rocm_sd.optimize(pipe)
    blocks = [module for module in pipe.unet.modules() if type(module).__name__ == "ResnetBlock2D"][:3]
    before = [block.nonlinearity for block in blocks]
    for block in blocks:
        block.nonlinearity = nn.Mish()
    said = shown(pipe)
    assert said[0].startswith("CPU: 20 of 23 modules replaced")
    assert said[1] == "Fallback since optimize: 3 modules, because its nonlinearity has changed ..."
    assert not any(line.startswith("Skipped") for line in said)
    for block, was in zip(blocks, before, strict=True):
        block.nonlinearity = was
    assert shown(pipe)[0].startswith("CPU: 23 of 23 modules replaced")


def test_a_pipeline_that_was_moved_is_told_first(pipe, monkeypatch, no_gpu):
    rocm_sd.optimize(pipe)
    monkeypatch.setattr(levels, "placement", lambda _target: levels.Placement(torch.device("cuda:0")))
    assert shown(pipe)[0] == "CPU: its weights are on cuda:0 now; call rocm_sd.optimize(pipe) again"


def test_with_all_at_once_it_is_five_lines_and_says_how_many_remarks_are_left():
    said = lines(
        quality="high", approximated=(STEPS,), fell_back=SKIPPED, why_no_graphs="ROCM_SD_STEP_GRAPH is 0",
        graphs=(Graphs("Decoder", why_none=("because of a very long reason " * 5,)),),
        plans=(ModelPlan("Decoder", WAITS),),
    )  # fmt: skip
    assert len(said) == 5
    assert [line.split(":")[0] for line in said] == [
        "gfx1100", "Fallback since optimize", "Graphs", "Graphs of the VAE", "More (2 other remarks)",
    ]  # fmt: skip


# How it is printed.


def test_five_lines_are_printed_and_the_table_when_asked(pipe, no_gpu):
    rocm_sd.optimize(pipe)
    report = rocm_sd.report(pipe)
    assert str(report) == repr(report) == "\n".join(report.lines)
    assert report.to_dict()["verdict"] == report.lines[0]
    verbose = rocm_sd.report(pipe, verbose=True)
    assert str(verbose) == "\n".join(report.lines) + "\n\n" + report.details
    assert "rocm-sd on cpu, level auto, quality exact" in report.details
    assert "ResnetBlock2D by rule resblock" in report.details


def test_a_reason_is_told_once_for_each_part():
    twice = tuple(Change("vae.9", "Decoder", rule, LAYOUT) for rule in ("vae_decoder", "norm_out"))
    changes = (*SKIPPED, *twice, *REPLACED[:2])
    details = Report("cpu", "auto", "exact", changes).details
    assert details.count("skipped, because its convolutions") == 1
    words = " ".join(details.replace("│", " ").split())
    assert "vae 3 skipped, because its convolutions keep" in words
    assert "2 ResnetBlock2D, Decoder" in words
    assert "unet 2 replaced: 2 ResnetBlock2D by rule resblock" in words


def test_a_console_prints_the_lines_as_they_are(pipe, capsys, no_gpu, monkeypatch):
    from rich.console import Console

    monkeypatch.setenv("COLUMNS", "80")
    rocm_sd.optimize(pipe)
    report = rocm_sd.report(pipe)
    Console().print(report)
    assert capsys.readouterr().out == "\n".join(report.lines) + "\n"
    Console().print(rocm_sd.report(pipe, verbose=True))
    assert "what was done" in capsys.readouterr().out
