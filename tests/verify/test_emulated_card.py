"""The whole engine on cards that are not there: rules, dispatch, that card's data, strides and variants, as AMD code.

A tiny UNet and VAE with every type of block run by the plans that a calibrated card may choose, at sizes that leave
tails everywhere. Then faults are planted, one at a time, in kernels, in dispatch and in data: each is caught here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tinygrad", reason="the emulator decodes by tinygrad's tables")
pytest.importorskip("triton", reason="AMD code is compiled by Triton")

import tiny_models
from rocm_sd import arch as archs
from rocm_sd import numerics, tuning
from rocm_sd.engine import convolutions
from rocm_sd.engine.optimization import optimize_with, report, restore
from rocm_sd.engine.parts import Parts
from rocm_sd.errors import NumericsFailure, Unsupported
from rocm_sd.kernels.hip import toolchain
from rocm_sd.kernels.triton import attention as attention_kernels
from rocm_sd.kernels.triton import layer_norm_residual as norm_kernels
from rocm_sd.ops import OPS, group_norm_silu, linear_residual, upsample
from rocm_sd.tuning import environment, resolve
from rocm_sd.verify import compiler, device, emulated, emulator
from rocm_sd.verify.proofs import EMULATED

PLANS = {"every": "channels_last", "transformer": "contiguous"}


class Case:
    """A model and a call of it, what stock torch makes of it in float16, and the exact result."""

    def __init__(self, model, *arguments, call=lambda model, *given: model(*given).sample):
        torch.manual_seed(0)
        self.model, self.call = model.to(torch.float16), call
        self.arguments = arguments
        exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
        with torch.no_grad():
            self.stock = call(self.model, *arguments)
            self.exact = call(_in_float64(self.model), *exact)

    def on(self, gfx, plan, **options):
        """The card, and the result there, which is held to the gate."""
        with torch.no_grad(), emulated(gfx, prefer="triton", **options) as card:
            optimize_with(self.model, "performance", "exact", Parts(plan=plan, calibrated=False))
            try:
                said = str(report(self.model))
                ours = self.call(self.model, *self.arguments)
            finally:
                restore(self.model)
        numerics.require(f"{type(self.model).__name__} on {gfx}", ours, self.exact, self.stock)
        return card, said


def _in_float64(model):
    other = type(model).from_config(model.config).to(torch.float64).eval()
    other.load_state_dict(model.state_dict())
    return other


def half(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.fixture(scope="module")
def unet():
    """SD 1.5's blocks: 9x7 latents leave tails in every tile, and 77 words in every block of keys."""
    torch.manual_seed(1)
    model = tiny_models.unet_of("sd15")
    return Case(model, half(2, 4, 9, 7), torch.tensor(500), half(2, 77, tiny_models.TEXT))


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(2)
    return Case(tiny_models.vae_of(), half(1, 4, 5, 7), call=lambda model, latents: model.decode(latents).sample)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("gfx", EMULATED)
def test_a_unet_is_drawn_by_the_machine_code_of_a_card(unet, gfx, plan):
    card, said = unet.on(gfx, PLANS[plan])
    assert gfx in said
    launched = {launch.kernel for launch in card.launches}
    assert {"_attend", "_product", "_layer_norm_residual", "_linear_geglu"} <= launched
    assert ("_conv2d" in launched) == (plan == "every")
    assert all(launch.modelled_us > 0 for launch in card.launches)


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_picture_is_decoded_by_the_machine_code_of_a_card(decoder, gfx):
    card, _ = decoder.on(gfx, "channels_last")
    assert {"_conv2d", "_attend"} <= {launch.kernel for launch in card.launches}


# Faults, planted one at a time


def without(pattern):
    """Machine code with these instructions taken out, of each kernel that has them; `edit.count` says of how many."""

    def edit(code):
        changed, number = re.subn(pattern, "s_nop 0", code.assembly)
        if not number:
            return code
        edit.count += 1
        return compiler.assemble(code.arch, changed, lds=code.lds)

    edit.count = 0
    return edit


@pytest.mark.parametrize(
    ("gfx", "wait"),
    [
        ("gfx1100", r"\bs_waitcnt vmcnt\(\d+\)"),
        ("gfx1201", r"\bs_wait_loadcnt 0x\w+"),
        ("gfx942", r"\bs_waitcnt vmcnt\(\d+\)"),
    ],
)
def test_a_missing_wait_is_caught(unet, gfx, wait):
    edit = without(wait)
    with pytest.raises(emulator.MissingWait):
        unet.on(gfx, "channels_last", edit=edit)
    assert edit.count


def test_a_stride_mistake_in_dispatch_is_caught(unet, monkeypatch):
    launch = attention_kernels.launch

    def mistaken(q, k, v, *rest):
        batch, rows, heads, column = v.stride()
        launch(q, k, v.as_strided(v.shape, (batch, heads, rows, column)), *rest)

    monkeypatch.setattr(attention_kernels, "launch", mistaken)
    with pytest.raises((NumericsFailure, emulator.EmulationError)):
        unet.on("gfx1100", "contiguous")


def test_a_missing_mask_is_caught(unet, monkeypatch, tmp_path):
    source = Path(norm_kernels.__file__).read_text(encoding="utf-8")
    mask = ", mask=_inside(here, c, i, C, CHUNK, EVEN_C))\n"
    assert source.endswith("\n")
    before, found, after = source.rpartition(f"out.to(y.dtype.element_ty){mask}")
    assert found, "the store of the norm is written in another way"
    file = tmp_path / "norm_without_a_mask.py"
    file.write_text(f"{before}out.to(y.dtype.element_ty))\n{after}", encoding="utf-8")
    specification = importlib.util.spec_from_file_location("norm_without_a_mask", file)
    broken = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "norm_without_a_mask", broken)
    specification.loader.exec_module(broken)
    monkeypatch.setitem(sys.modules, norm_kernels.__name__, broken)
    with pytest.raises(emulator.OutOfBounds):
        unet.on("gfx1100", "contiguous")


def test_a_config_too_large_for_lds_is_caught(unet, monkeypatch, tmp_path):
    shutil.copytree(Path(tuning.__file__).parent / "data" / "gfx1100", tmp_path / "gfx1100")
    file = tmp_path / "gfx1100" / "conv2d.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    for part in (data["static"], *data["bucket"]):
        part["config"] |= {"block_m": 128, "block_n": 128, "block_k": 256, "stages": 3}
    file.write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setenv("ROCM_SD_DATA", str(tmp_path))
    with pytest.raises(device.LaunchRefused, match=r"gfx1100 does not launch _conv2d: .*LDS.*limited by lds"):
        unet.on("gfx1100", "channels_last")


def test_what_no_kernel_writes_is_nan():
    with emulated("gfx1100"):
        assert torch.empty(8).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_grid_that_is_too_large_is_refused():
    code = SimpleNamespace(name="k", workgroup_size=64, wave_size=32, vgprs=8, agprs=0, lds=0)
    assert device._why_refused(archs.get("gfx1100"), code, (1, 2**16, 1)) is None
    assert "larger" in device._why_refused(archs.get("gfx1100"), code, (1, 2**16 + 1, 1))


# The card


def test_the_cpu_is_taken_for_the_card_and_for_itself_again():
    cpu = torch.device("cpu")
    chosen = OPS["group_norm_silu"].named({"hw": 64, "dtype": "float16"}, cpu)
    with emulated("gfx942") as card:
        assert archs.detect(cpu) is archs.get("gfx942") is card.arch
        assert archs.device_facts("cpu").compute_units == 304
        assert archs.computes_on_gpu(cpu)
        assert not resolve.has_database(), "nothing was measured on a card that is not there"
        assert environment.current(cpu).arch == "gfx942"
        x = half(1, 32, 4, 4).contiguous(memory_format=torch.channels_last)
        group_norm_silu(x, 4)
        assert card.launches
        assert card.total().wave_instructions == sum(each.counters.wave_instructions for each in card.launches)
    assert archs.detect(cpu) is archs.CPU
    assert environment.current(cpu).arch == archs.CPU.name
    assert OPS["group_norm_silu"].named({"hw": 64, "dtype": "float16"}, cpu) == chosen
    launches = len(card.launches)
    group_norm_silu(x, 4)
    assert len(card.launches) == launches, "what was bound there is forgotten"


def test_one_workgroup_counts_for_all_where_only_work_is_counted():
    x = half(2, 64, 16, 16).contiguous(memory_format=torch.channels_last)
    found = {}
    for one_only in (False, True):
        with emulated("gfx1100", prefer="triton", one_only=one_only) as card:
            for _ in range(2):
                upsample(x, 2)
        found[one_only] = [launch.counters for launch in card.launches]
    assert len(found[True]) == len(found[False]) == 2
    assert found[True][0] is found[True][1], "launches that are alike are executed once"
    ours, whole = found[True][0], found[False][0]
    assert ours.workgroups == whole.workgroups > 1
    assert (ours.wave_instructions, ours.bytes_loaded, ours.bytes_stored, ours.by_class) == (
        whole.wave_instructions, whole.bytes_loaded, whole.bytes_stored, whole.by_class,
    )  # fmt: skip


def test_hip_kernels_are_the_cards_where_there_is_a_clang():
    try:
        toolchain.find_compiler()
    except toolchain.NoHipCompiler as error:
        pytest.skip(str(error))
    x = half(1, 64, 9, 7).contiguous(memory_format=torch.channels_last)
    stock, exact = (group_norm_silu(each, 8) for each in (x, x.double()))
    with emulated("gfx1100", prefer="hip") as card:
        ours = group_norm_silu(x, 8)
    assert {(launch.op, launch.config) for launch in card.launches} == {("group_norm_silu", None)}
    assert all(launch.counters.wave_instructions for launch in card.launches)
    numerics.require("group_norm_silu", ours, exact, stock)


def test_launches_that_differ_in_a_number_are_counted_apart():
    flops = []
    with torch.no_grad(), emulated("gfx1100", prefer="triton", one_only=True) as card:
        for width in (128, 256, 128):
            card.launches.clear()
            linear_residual(torch.zeros(64, width).half(), torch.zeros(64, width).half())
            flops.append(card.total().matrix_flops)
    assert flops[0] == flops[2] >= 2 * 64 * 64 * 128
    assert flops[1] == 2 * flops[0]


def test_its_library_answers_contiguous_as_rocms_does_by_default():
    cpu = torch.device("cpu")
    with emulated("gfx942"):
        layout = convolutions.choose_layout(cpu, torch.float16)
    assert layout.implementation != convolutions.CHANNELS_LAST
    assert "answers a channels-last convolution contiguous" in layout.why


def test_only_what_the_emulator_executes_is_a_card():
    with pytest.raises(Unsupported, match="gfx1030"), emulated("gfx1030"):
        pass


def test_an_environment_variable_emulates_for_the_whole_process(monkeypatch):
    monkeypatch.setenv("ROCM_SD_EMULATE", "gfx1201")
    model = tiny_models.unet_of("sd15")
    try:
        optimize_with(model, "performance", "exact", Parts(calibrated=False))
        assert "gfx1201" in str(report(model))
        assert archs.emulated() is archs.get("gfx1201")
    finally:
        restore(model)
        device._of_process.close()
    assert archs.emulated() is None
