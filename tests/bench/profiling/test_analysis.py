from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from traces import GpuTrace

from rocm_sd import arch
from rocm_sd.bench.profiling import ROCmSDProfiler, analyse, findings, load, read, tables
from rocm_sd.bench.profiling.analysis import Analysis, TimePart, family_work, pieces
from rocm_sd.bench.profiling.families import (
    ATTENTION,
    CONVOLUTION,
    COPIES,
    ELEMENTWISE,
    GEMM,
    IDLE,
    NORM,
    OTHER,
)
from rocm_sd.bench.profiling.recording import Recording
from rocm_sd.bench.profiling.trace import UnreadableTrace, union

CONV_FLOPS = 2.0 * 2 * 320 * 64 * 64 * 320 * 9  # of the convolution in `vae_picture`


def vae_picture() -> GpuTrace:
    """1000 us: a UNet product, then a VAE whose convolution needs a transpose, then a norm; the rest is idle."""
    trace = GpuTrace()
    trace.module("unet", 0, 100)
    trace.host("aten::mm", 10, 90)
    trace.kernel("Cijk_Ailk_Bljk_HHS_BH_MT64", 20, 100, 200)
    trace.module("vae.decoder", 200, 500)
    trace.module("vae.decoder.up_blocks.0", 210, 490)
    trace.conv(220, 300, [2, 320, 64, 64], [320, 320, 3, 3])
    trace.host("aten::miopen_convolution", 230, 290)
    trace.kernel("batched_transpose_32x32_half", 240, 300, 400)
    trace.kernel("Cijk_inside_a_convolution", 250, 400, 500)
    trace.host("aten::native_group_norm", 310, 350)
    trace.kernel("vendor_mystery", 320, 500, 600)
    return trace


def test_time_by_family_adds_up_to_the_wall_time():
    analysis = analyse(read(vae_picture().values), arch.get("gfx942"))
    shares = {part.name: part.share for part in analysis.families}
    assert shares == pytest.approx({GEMM: 0.1, CONVOLUTION: 0.1, COPIES: 0.1, NORM: 0.1, IDLE: 0.6})
    assert sum(shares.values()) == pytest.approx(1)
    assert (analysis.wall_ms, analysis.busy_ms) == pytest.approx((1.0, 0.4))


def test_a_kernel_belongs_to_the_module_that_launched_it_not_to_the_one_running_when_it_ran():
    analysis = analyse(read(vae_picture().values), arch.get("gfx942"))
    parts = {part.name: part for part in analysis.modules}
    assert set(parts) == {"unet", "vae", "vae.decoder"}
    assert parts["unet"].families == pytest.approx({GEMM: 0.1})
    assert parts["vae"].families == pytest.approx({COPIES: 0.1, CONVOLUTION: 0.1, NORM: 0.1})


def test_idle_is_measured_against_the_time_without_a_profiler():
    analysis = analyse(read(vae_picture().values), arch.get("gfx942"), plain_ms=0.5)
    assert analysis.family(IDLE).share == pytest.approx(0.2)
    assert analysis.profiled_ms == pytest.approx(1.0)
    # A profile cannot be busier than the time that it took.
    assert analyse(read(vae_picture().values), arch.get("gfx942"), plain_ms=0.1).family(IDLE).share == 0


def test_kernels_side_by_side_are_not_busy_twice():
    trace = GpuTrace((0, 100))
    trace.kernel("attn_fwd", 1, 10, 60)
    trace.kernel("Cijk_x", 2, 20, 50)
    analysis = analyse(read(trace.values), arch.get("gfx942"))
    assert analysis.busy_ms == pytest.approx(0.05)
    assert analysis.family(IDLE).ms == pytest.approx(0.05)
    assert union([(0, 2), (1, 3), (5, 6)]) == 4


def test_the_floor_is_that_of_the_roofline_and_only_where_the_peak_is_known():
    known = arch.get("gfx942")
    analysis = analyse(read(vae_picture().values), known)
    part = analysis.family(CONVOLUTION)
    assert part.flops == CONV_FLOPS
    assert part.floor_ms == pytest.approx(CONV_FLOPS / known.peak("float16") / 1e12 * 1e3)
    assert part.percent == pytest.approx(100 * part.floor_ms / 0.1)
    assert part.bound == "compute"
    # The kernel inside has the work; the transpose beside it has none.
    kernels = {each.name: each for each in analysis.kernels}
    assert kernels["Cijk_inside_a_convolution"].floor_ms == pytest.approx(part.floor_ms)
    assert kernels["batched_transpose_32x32_half"].floor_ms is None
    unknown = analyse(read(vae_picture().values), arch.unknown("gfx9999")).family(CONVOLUTION)
    assert (unknown.flops, unknown.floor_ms, unknown.percent) == (CONV_FLOPS, None, None)


def test_a_replayed_graph_has_no_modules_and_its_work_comes_from_the_stock_model():
    trace = GpuTrace((0, 100))
    for number, name in enumerate(("_moments", "_fold", "_product", "_fold", "_conv2d")):
        trace.kernel(name, 5, 10 + 10 * number, 20 + 10 * number, launch="hipGraphLaunch")
    stock = family_work(read(vae_picture().values))
    analysis = analyse(read(trace.values), arch.get("gfx942"), reference=stock, modules=read(vae_picture().values))
    assert analysis.graph_share == 1
    assert {part.name: part.calls for part in analysis.families} == {NORM: 2, GEMM: 2, CONVOLUTION: 1, IDLE: 0}
    assert analysis.family(CONVOLUTION).flops == CONV_FLOPS
    # Fusing changes what a norm moves: no floor is made up for it.
    assert analysis.family(NORM).floor_ms is None
    assert "vae" in {part.name for part in analysis.modules}


def test_what_no_rule_knows_is_listed_by_name():
    trace = GpuTrace((0, 100))
    trace.kernel("vendor_mystery", 5, 10, 90)
    analysis = analyse(read(trace.values), arch.get("gfx942"))
    assert [part.name for part in analysis.unknown] == ["vendor_mystery"]
    assert analysis.family(OTHER).share == pytest.approx(0.8)
    assert any("vendor_mystery" in found.sentence for found in findings(analysis))


def test_slow_paths_in_words():
    trace = vae_picture()
    trace.kernel("naive_conv_ab_nonpacked_fwd_nchw_half", 260, 600, 700)
    slow_paths = findings(analyse(read(trace.values), arch.get("gfx942")), "stock")
    sentences = [path.sentence for path in slow_paths]
    assert "the GPU is idle 50% of the time: launches come from Python" in sentences
    assert "naive_conv kernels take 10%: MIOpen has no tuned convolution for this shape" in sentences
    assert "VAE: 25% of the time in layout copies" in sentences
    assert all(path.next for path in slow_paths)
    assert [path.share for path in slow_paths] == sorted((path.share for path in slow_paths), reverse=True)
    ours = findings(analyse(read(trace.values), arch.get("gfx942")), "rocm-sd")
    assert "rocm_sd.report(pipe)" in next(found.next for found in ours if "idle" in found.sentence)


def test_a_gpu_that_waits_between_graphs_is_not_advised_to_capture_them():
    trace = GpuTrace((0, 100))
    trace.host("a", 1, 3)
    trace.kernel("Cijk_x", 2, 2, 52, launch="hipGraphLaunch")
    for engine in ("rocm-sd", "compile"):
        (idle,) = findings(analyse(read(trace.values), arch.get("gfx942")), engine)
        assert idle.sentence == "the GPU is idle 50% of the time: it waits for the host between graphs"
        assert "--batch" in idle.next


def h200_profile():
    """Figures as wide as those of SDXL, eight pictures at once, on an H200."""
    families = (
        TimePart("GEMM", 1423.67, 0.414, 2232, 278944.2e9, 1281.97, 1423.67, "compute"),
        TimePart("layout copies", 1.07, 0.001, 142),
        TimePart("convolution", 279.66, 0.273, 313, 182969.1e9, 186.49, 200.0, "compute"),
        TimePart(IDLE, 27.61, 0.027, 0),
    )
    both = {"elementwise": 2.0, "convolution": 1.1}
    name = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy>>"
    kernels = (
        TimePart("nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", 1147.58, 0.144, 12240, families={"GEMM": 147.58}),
        TimePart(name, 3.10, 0.003, 39, 1.0, 0.12, 0.5, "memory", families=both),
    )
    modules = (TimePart("unet.down_blocks.0", 1099.56, 0.618, 1, families={"GEMM": 400.0, "norm": 300.0}),)
    return Analysis("NVIDIA H200", "sm_90", 1021.4, 1021.4, 993.7, families, modules, kernels, on_gpu=True)


def test_no_figure_is_cut_off_where_a_terminal_is_narrow():
    shown = io.StringIO()
    tables.show(h200_profile(), Console(file=shown, width=80))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    of_families = (
        "1423.67",
        "41.4%",
        "2232",
        "196",
        "1281.97",
        "90%",
        "279.66",
        "27.3%",
        "654",
        "186.49",
        "93%",
        "72%",
    )
    of_kernels = ("1147.58", "14.4%", "12240", "3.10", "0.3%", "39", "24%", "16%")
    for figure in (*of_families, *of_kernels, "27.61", "1099.56", "61.8%", "compute"):
        assert figure in text, figure
    # A name keeps a third of the width, whatever stands beside it.
    assert "nvjet_sm90_hsh_256x" in text


def test_a_busy_gpu_without_copies_has_nothing_that_stands_out():
    trace = GpuTrace((0, 100))
    trace.host("aten::mm", 1, 3)
    trace.kernel("Cijk_x", 2, 2, 98)
    assert findings(analyse(read(trace.values), arch.get("gfx942"))) == ()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, 16)
        self.proj = nn.Linear(16, 24)

    def forward(self, x):
        x = self.norm(self.grouped(self.conv(x))).flatten(2).transpose(1, 2)
        q, k, v = self.proj(x).unflatten(2, (3, 2, 4)).unbind(2)
        out = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out @ out.transpose(2, 3)


@pytest.fixture(scope="module")
def recorded():
    block, x = Block().eval(), torch.randn(2, 8, 18, 22)
    with torch.no_grad():
        block(x)
        with Recording(block) as recording:
            block(x)
    return recording.trace


def test_flops_are_those_of_torch_s_own_counter(recorded):
    block, x = Block().eval(), torch.randn(2, 8, 18, 22)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        block(x)
    ours = {family: sum(work.flops for work in works) for family, works in family_work(read(recorded)).items()}
    theirs = {str(op).split(".")[-1]: flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert ours[CONVOLUTION] == theirs["convolution"]
    assert ours[GEMM] == sum(flops for op, flops in theirs.items() if op in ("addmm", "mm", "bmm", "baddbmm"))
    attention = [flops for op, flops in theirs.items() if "dot_product" in op]
    # torch's counter has no formula for the attention of every CPU build.
    S, H, D = 9 * 11, 2, 4
    assert ours[ATTENTION] == (sum(attention) if attention else 4 * 2 * H * S * S * D)


def test_a_real_recording_on_a_cpu_adds_up_and_knows_its_modules(recorded):
    analysis = analyse(read(recorded), arch.CPU)
    assert not analysis.on_gpu or torch.cuda.is_available()
    assert sum(part.share for part in analysis.families) == pytest.approx(1)
    assert analysis.family(CONVOLUTION).ms > 0
    assert {"Block", "Block.conv", "Block.proj"} <= {part.name for part in analysis.modules}
    assert analysis.family(OTHER) is None, [part.name for part in analysis.unknown]
    json.dumps(analysis.to_dict())


def test_a_trace_tells_nothing_of_the_machine(recorded):
    assert not {"host_name", "traceName", "trace_id"} & set(recorded)


def test_hooks_and_ranges_are_gone_after_an_error():
    class Broken(nn.Module):
        def forward(self, _x):
            raise ValueError("broken")

    model = nn.Sequential(nn.Linear(2, 2), Broken())
    profile = ROCmSDProfiler(model)
    with pytest.raises(ValueError, match="broken"), profile:
        model(torch.ones(1, 2))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert profile.stats().family(GEMM).ms > 0


def test_views_count_for_the_op_that_made_them():
    trace = GpuTrace((0, 100))
    trace.host("aten::linear", 0, 50)
    trace.host("aten::t", 5, 10)
    trace.host("aten::addmm", 10, 45)
    trace.host("aten::view", 60, 70)
    found = {(piece.name, piece.family): piece.us for piece in pieces(read(trace.values))}
    assert found == {
        ("aten::linear", GEMM): 10, ("aten::t", GEMM): 5, ("aten::addmm", GEMM): 35, ("aten::view", "views"): 10,
    }  # fmt: skip
    assert ELEMENTWISE not in {family for _, family in found}


@pytest.mark.parametrize(("text", "why"), [("{", "Expecting"), ("[1]", "no traceEvents"), (None, "no such file")])
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, why):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnreadableTrace, match=why):
        load(path)
