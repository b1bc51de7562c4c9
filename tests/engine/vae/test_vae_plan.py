from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL

from live_memory import live_peak
from rocm_sd.arch import host_memory
from rocm_sd.engine import memory
from rocm_sd.engine.vae.plan import MIB, VaePlan, Way, plan, predicted_peak
from rocm_sd.ops import OPS
from rocm_sd.ops.definition import Implementation
from rocm_sd.ops.registry import Op
from rocm_sd.rewrite import RULES, apply, norm_out
from rocm_sd.tuning import Choice

ALL_RULES = (*RULES, *(() if norm_out.RULE in RULES else (norm_out.RULE,)))
NAMED = "conv2d=torch,group_norm_silu=torch,upsample_conv2d=torch,upsample=torch,attention=torch,linear_residual=torch"


def build(channels=(32, 64, 128, 128), **options) -> AutoencoderKL:
    torch.manual_seed(0)
    config = {
        "down_block_types": ("DownEncoderBlock2D",) * len(channels),
        "up_block_types": ("UpDecoderBlock2D",) * len(channels),
        "block_out_channels": channels,
        "layers_per_block": 2,
    }
    return AutoencoderKL(**config | options).eval().requires_grad_(False)


def prepared(vae, mode):
    """`ops` is as on a GPU: each rule calls its op."""
    if mode != "stock":
        vae.to(memory_format=torch.channels_last)
        apply(vae, [rule for rule in ALL_RULES if rule.on_cpu or mode == "ops"])
    return vae


@torch.no_grad()
def test_the_measure_itself_by_a_case_computed_by_hand():
    def call():
        a = torch.ones(1000)
        view = a.view(10, 100)  # Nothing new.
        b = view * 2  # 8000
        del a, view
        c = torch.cat([b, b])  # 4000 + 8000
        c += 1
        b = None
        return c * 2  # 8000 + 8000

    assert live_peak(call) == 16000
    given = torch.ones(500)
    assert live_peak(lambda: given.view(5, 100) + 1, given) == 2000


CASES = {
    "SD 1.5, a quarter of the channels": (build, (1, 4, 24, 24), torch.float32),
    "batch 3, not square": (build, (3, 4, 16, 24), torch.float32),
    "half the bytes": (lambda: build((32, 64), layers_per_block=1), (1, 4, 16, 16), torch.bfloat16),
    "as of SD 3 and Flux: 16 channels, no quant convolutions": (
        lambda: build(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False),
        (1, 16, 16, 16),
        torch.float32,
    ),
    "no attention": (lambda: build((32, 64), mid_block_add_attention=False), (2, 4, 64, 64), torch.float32),
    "two equal blocks": (lambda: build((32, 32), norm_num_groups=16), (2, 4, 64, 64), torch.float32),
    "narrow at full size": (lambda: build((32, 128), norm_num_groups=16), (1, 4, 64, 64), torch.float32),
    "SD 1.5 and SDXL, real channels": (lambda: build((128, 256, 512, 512)), (1, 4, 6, 6), torch.float32),
}


@torch.no_grad()
@pytest.mark.parametrize("mode", ["stock", "rules", "ops"])
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_predicted(case, mode, monkeypatch):
    """15 percent is the promise; on a CPU, where every allocation is seen, 3 are enough."""
    make, shape, dtype = CASES[case]
    if mode == "ops":
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    vae = prepared(make().to(dtype), mode)
    z = torch.randn(shape, dtype=dtype)
    measured = live_peak(lambda: vae.decode(z), z)
    assert predicted_peak(vae, shape, dtype) == pytest.approx(measured, rel=0.03)


@torch.no_grad()
def test_what_a_norm_overwrites_is_predicted(monkeypatch):
    """A kernel that needs no map for its result: the block that changes the channels is no longer the peak."""
    peaks = []
    for norm in ("torch", "triton"):
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED.replace("silu=torch", f"silu={norm}"))
        vae = prepared(build((32, 64), norm_num_groups=16, layers_per_block=1, mid_block_add_attention=False), "ops")
        z = torch.randn(1, 4, 16, 16)
        peaks.append(live_peak(lambda vae=vae, z=z: vae.decode(z), z))
        # The kernel's sums, which are not predicted, are a tenth of so small a map.
        assert predicted_peak(vae, z.shape, torch.float32) == pytest.approx(peaks[-1], rel=0.15)
    assert peaks[1] < 0.85 * peaks[0]


def test_the_scratch_of_whatever_convolves_is_counted(monkeypatch):
    """Parts of a split depth, by Triton and by HIP; what a plug-in says of itself; nothing where nobody says."""
    conv2d, split = OPS["conv2d"], 4
    plug_in = Implementation("mine", conv2d.own["torch"].run, scratch_bytes=lambda _arguments, _config, _device: 2**40)
    vae = prepared(build((128, 256), mid_block_add_attention=False).half(), "ops")
    implementations = {**conv2d.own, "mine": plug_in, "quiet": replace(plug_in, scratch_bytes=None)}
    monkeypatch.setattr(Op, "implementation", lambda op, name: (implementations if op is conv2d else op.own)[name])
    peaks = {}
    for name in ("torch", "triton", "hip", "mine", "quiet"):
        default = implementations[name].default
        config = replace(default, split_k=split) if default else default

        def choose(op, _problem, _device, forced=None, name=name, config=config):
            return Choice(name, config) if op is conv2d else Choice("torch")

        monkeypatch.setattr(Op, "choose", choose)
        peaks[name] = predicted_peak(vae, (1, 4, 64, 64), torch.float16, device=torch.device("cuda"))
    assert peaks["torch"] == peaks["quiet"] < peaks["triton"] == peaks["hip"]
    # The largest map, 128 channels of 128 x 128, has no more than its float32 parts above the peak without them.
    assert peaks["hip"] - peaks["torch"] <= split * 4 * 256 * 128 * 128
    assert peaks["mine"] > 2**40


@torch.no_grad()
@pytest.mark.parametrize("mode", ["stock", "rules", "ops"])
@pytest.mark.parametrize("case", ["batch 3, not square", "two equal blocks", "narrow at full size"])
def test_the_peak_of_encoding_is_predicted(case, mode, monkeypatch):
    make, (N, _, H, W), dtype = CASES[case]
    if mode == "ops":
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    vae = prepared(make().to(dtype), mode)
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    x = torch.randn(N, 3, scale * H, scale * W, dtype=dtype)
    measured = live_peak(lambda: vae.encode(x), x)
    assert predicted_peak(vae, x.shape, dtype, encode=True) == pytest.approx(measured, rel=0.03)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("mode", ["stock", "rules"])
@pytest.mark.parametrize(("batch", "size"), [(1, 64), (4, 64), (1, 128), (1, 256)])
def test_the_peak_is_predicted_on_a_gpu(batch, size, mode):
    vae = prepared(build((128, 256, 512, 512)).to("cuda", torch.float16), "ops" if mode == "rules" else mode)
    z = torch.randn(batch, 4, size, size, dtype=torch.float16, device="cuda")
    vae.decode(z)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    vae.decode(z)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    assert predicted_peak(vae, z.shape, torch.float16) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("whole", "one", "batch", "free", "options", "way"),
    [
        (1000, 1000, 1, 8000, {}, Way.WHOLE),
        (1000, 1000, 1, None, {}, Way.WHOLE),
        (1000, 1000, 1, 1100, {}, Way.TILED),  # Not within what a prediction may be wrong by.
        (4000, 1000, 4, 3000, {}, Way.SLICED),
        (4000, 1000, 4, 900, {}, Way.TILED),
        (4000, 1000, 4, 0, {}, Way.TILED),
        (4000, 1000, 4, 80000, {"slices": True}, Way.SLICED),
        (4000, 1000, 4, None, {"slices": True}, Way.SLICED),
        (1000, 1000, 1, 80000, {"slices": True}, Way.WHOLE),
        (1000, 1000, 1, 900, {"tiles": False}, Way.WHOLE),  # Stock's own error is better than none at all.
        (4000, 1000, 4, 900, {"tiles": False}, Way.SLICED),
        (300, 300, 1, 80000, {"level": "memory"}, Way.WHOLE),
        (1000, 1000, 1, 80000, {"level": "memory"}, Way.TILED),
        (1200, 300, 4, 80000, {"level": "memory"}, Way.SLICED),
        (1000, 1000, 1, None, {"level": "memory"}, Way.TILED),
    ],
)
def test_the_fastest_way_that_fits(whole, one, batch, free, options, way):
    free = None if free is None else free * MIB
    chosen = plan(whole * MIB, one * MIB, batch=batch, free=free, **options)
    assert chosen.way is way
    if way is Way.TILED and free is not None:
        assert chosen.budget <= free


def test_what_follows_when_memory_runs_out():
    ways, chosen = [], VaePlan(Way.WHOLE, 400 * MIB, 500 * MIB)
    while chosen is not None:
        ways.append((chosen.way, chosen.needed // MIB))
        chosen = chosen.smaller(4, tiles=True)
    assert ways == [(Way.WHOLE, 400), (Way.SLICED, 100), (Way.TILED, 50), (Way.TILED, 25)]
    assert VaePlan(Way.SLICED, 400 * MIB, None).smaller(4, tiles=False) is None
    assert VaePlan(Way.WHOLE, 400 * MIB, None).smaller(1, tiles=True).way is Way.TILED


def test_free_memory_of_the_host(tmp_path, monkeypatch):
    meminfo, group = tmp_path / "meminfo", tmp_path / "cgroup"
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "_CGROUP", group)
    cpu = torch.device("cpu")
    assert memory.free_memory(cpu) is None
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:    5000 kB\n")
    assert memory.free_memory(cpu) == 5000 * 1024
    group.mkdir()
    (group / "memory.current").write_text("3000\n")
    (group / "memory.stat").write_text("anon 2000\ninactive_file 500\nactive_file 400\n")
    (group / "memory.max").write_text("max\n")
    assert memory.free_memory(cpu) == 5000 * 1024
    (group / "memory.max").write_text("4000\n")
    assert memory.free_memory(cpu) == 1900
    assert memory.free_memory(torch.device("meta")) is None


def test_free_memory_here():
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 2**50


def test_what_running_out_of_memory_looks_like():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert memory.is_out_of_memory(caught.value)
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
