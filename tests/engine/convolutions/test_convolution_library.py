"""What was measured of cuDNN or MIOpen is in force within a model's calls, and nowhere else."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import rocm_sd
from measured_library import AS_TORCH_COMES, FIGURES, SEARCHED, WITHOUT, flags, measure, seen_by_convolutions
from pipelines import tiny_pipeline, tiny_unet, tiny_vae
from rocm_sd.engine.capture.snapshot import flatten
from rocm_sd.engine.convolutions import library as convolution_library
from rocm_sd.engine.convolutions.library import ChosenLibrary
from rocm_sd.engine.optimization import optimize_with
from rocm_sd.engine.parts import Parts
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning import Choice

GPU = torch.device("cuda")
NONE = torch.nn.Identity()  # a model without convolutions


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    forget_choices()
    assert flags() == AS_TORCH_COMES
    yield
    assert flags() == AS_TORCH_COMES
    forget_choices()


@pytest.fixture
def pipe(tmp_path):
    return tiny_pipeline(tmp_path)


def draw(pipe, **options):
    arguments = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "np"}
    return torch.from_numpy(pipe("a frog", generator=torch.Generator().manual_seed(0), **arguments | options).images)


def call(unet, batch=2):
    with torch.no_grad():
        return unet(torch.ones(batch, 4, 8, 8), torch.tensor(3), torch.ones(batch, 5, unet.config.cross_attention_dim))


def library(implementation="searched", device=None):
    # A CPU is not left without oneDNN, and a torch without GPUs cannot tell of captures.
    device = device or (GPU if implementation == "none" else torch.device("cpu"))
    return ChosenLibrary(Choice(implementation, source="measured here", why=FIGURES), device)


def notes_with(target, what):
    return [note for note in rocm_sd.report(target).notes if what in note]


@pytest.mark.parametrize("level", ["auto", "memory"])
@pytest.mark.parametrize("captured", ["0", "1"])
def test_a_picture_is_drawn_with_it_and_the_report_has_the_figures(pipe, level, captured, monkeypatch):
    stock = draw(pipe)
    measure()
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", captured)
    rocm_sd.optimize(pipe, level=level)
    with seen_by_convolutions(monkeypatch) as seen:
        torch.testing.assert_close(draw(pipe), stock, rtol=1e-3, atol=1e-3)
    assert flags() == AS_TORCH_COMES
    in_the_vae = sum(isinstance(layer, torch.nn.Conv2d) for layer in (pipe.vae.quant_conv, pipe.vae.post_quant_conv))
    assert seen.count(SEARCHED) > 20
    # What lies between the VAE's halves and its methods: convolutions of one point.
    assert len(seen) - seen.count(SEARCHED) <= in_the_vae
    (note,) = notes_with(pipe, "finds by a search")
    assert FIGURES in note
    assert not notes_with(pipe, "not captured")


def test_graphs_are_captured_inside_of_it_and_replays_need_none(pipe, monkeypatch):
    measure()
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    rocm_sd.optimize(pipe)
    draw(pipe, num_inference_steps=5)
    assert notes_with(pipe, "UNet2DConditionModel: 1 graph of its forward")
    rocm_sd.restore(pipe)
    assert "forward" not in pipe.unet.__dict__
    assert "forward" not in pipe.vae.decoder.__dict__


@pytest.mark.parametrize("what", ["unet", "encoder", "decoder"])
def test_a_bare_model_is_called_with_it(what, monkeypatch):
    measure()
    model = rocm_sd.optimize(tiny_unet() if what == "unet" else tiny_vae())
    with seen_by_convolutions(monkeypatch) as seen, torch.no_grad():
        if what == "unet":
            call(model)
        elif what == "decoder":
            model.decode(torch.ones(1, 4, 4, 4))
        else:
            model.encode(torch.ones(1, 3, 16, 16))
    assert seen.count(SEARCHED) > 5
    assert notes_with(model, FIGURES)


def test_nothing_is_touched_where_nothing_was_measured(pipe):
    rocm_sd.optimize(pipe)
    assert "forward" not in pipe.unet.__dict__
    assert not notes_with(pipe, "convolutions run with")


def test_one_that_is_not_clearly_faster_is_reported_and_not_used(monkeypatch):
    measure(high=1040.0)
    unet = rocm_sd.optimize(tiny_unet())
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {AS_TORCH_COMES}
    assert notes_with(unet, "convolutions run with oneDNN as torch is set (1034.0 us, and the next 812.0 us")


def test_a_part_that_is_not_wanted_is_left_out(monkeypatch):
    measure()
    unet = optimize_with(tiny_unet(), "auto", "exact", Parts(convolution_library=False))
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {AS_TORCH_COMES}


def test_an_error_in_a_forward_puts_the_flags_back(monkeypatch):
    measure()
    unet = rocm_sd.optimize(tiny_unet())

    def fail(*_args):
        assert flags() == SEARCHED
        raise ValueError("in the middle")

    hook = unet.mid_block.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        call(unet)
    assert flags() == AS_TORCH_COMES
    hook.remove()
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {SEARCHED}


def test_a_call_within_a_call_leaves_the_flags_to_the_outer_one():
    measure()
    inner, outer = rocm_sd.optimize(tiny_unet()), rocm_sd.optimize(tiny_unet())
    after = []
    outer.mid_block.register_forward_pre_hook(lambda *_: (call(inner), after.append(flags()))[0] and None)
    call(outer)
    assert after == [SEARCHED]


def test_of_two_threads_the_last_one_puts_the_flags_back():
    first, second, found = library(), library(), []
    inside, leave = threading.Event(), threading.Event()

    def other():
        with second.in_force(NONE):
            inside.set()
            leave.wait(10)
            found.append(flags())

    thread = threading.Thread(target=other)
    with first.in_force(NONE):
        thread.start()
        assert inside.wait(10)
    assert flags() == SEARCHED
    leave.set()
    thread.join(10)
    assert found == [SEARCHED]


def test_another_setting_does_not_break_into_a_call():
    other = library("none")
    with library().in_force(NONE):
        with other.in_force(NONE):
            assert flags() == SEARCHED
        assert flags() == SEARCHED
    assert any("1 call ran as torch is set, because a call with another setting" in note for note in other.notes())


@pytest.mark.parametrize(("name", "value"), [("enabled", False), ("benchmark", True)])
def test_a_flag_that_was_set_by_hand_wins_and_is_reported(name, value, monkeypatch):
    measure()
    unet = rocm_sd.optimize(tiny_unet())
    monkeypatch.setattr(torch.backends.cudnn, name, value)
    mine = flags()
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {mine}
    assert flags() == mine
    (note,) = notes_with(unet, "they were faster")
    assert f"because torch.backends.cudnn.{name} is {value}, and torch comes with {not value}" in note
    assert FIGURES in note
    assert notes_with(unet, "1 call ran as torch is set")
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("changed", "after"), [({"enabled": False}, WITHOUT), ({"benchmark": False}, AS_TORCH_COMES)], ids=str
)
def test_what_is_set_by_hand_within_a_call_stays(changed, after):
    with library().in_force(NONE):
        for name, value in changed.items():
            setattr(torch.backends.cudnn, name, value)
        assert convolution_library.flags_set_by_hand() == after
    try:
        assert flags() == after
    finally:
        torch.backends.cudnn.enabled = True


def test_flags_that_are_set_by_hand_are_another_kind_of_call(monkeypatch):
    def key():
        return flatten((torch.ones(2),), {}, torch.device("cpu")).key

    before = key()
    with library().in_force(NONE):
        assert key() == before
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert key() != before
    monkeypatch.undo()


def test_nothing_else_of_torchs_settings_is_written(monkeypatch):
    """torch.backends.cudnn.flags() would put the precision of convolutions back to torch's default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with library("none").in_force(NONE):
        assert flags() == WITHOUT
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic


def test_who_wants_the_same_bits_every_time_gets_no_search(monkeypatch):
    searched = library()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with searched.in_force(NONE):
        assert flags() == AS_TORCH_COMES
    assert any("deterministic algorithms are asked for" in note for note in searched.notes())


def test_within_a_capture_only_what_was_searched_before_is_in_force(monkeypatch):
    searched, x = library(device=GPU), torch.ones(1, 4, 8, 8)

    def within(*given):
        with searched.in_force(NONE, *given):
            return flags()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert within((x,), {"timestep": x}) == SEARCHED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert within((x,), {"timestep": x}) == SEARCHED
    assert within((x[:, :, :4],), {"timestep": x}) == AS_TORCH_COMES
    assert any("nothing can be searched while a graph is captured" in note for note in searched.notes())
    # Without the library there is nothing to search.
    with library("none").in_force(NONE, x):
        assert flags() == WITHOUT


def test_without_the_library_the_vae_keeps_it(monkeypatch):
    """Its convolutions would unfold whole pictures, which its plan does not reckon with."""
    without, unet, vae = library("none"), tiny_unet(), tiny_vae()
    assert convolution_library.convolving_models(vae, without, is_vae=True) == []
    models = convolution_library.convolving_models(unet, without, is_vae=False)
    assert models == [unet]
    installed = convolution_library.install_library(models, without, has_vae=True)
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {WITHOUT}
    first, second = installed.notes()
    assert first == f"convolutions run without cuDNN ({FIGURES})"
    assert second.startswith("the VAE's convolutions keep cuDNN")
    installed.restore()
    assert "forward" not in unet.__dict__
    assert [vae.encoder, vae.decoder] == convolution_library.convolving_models(vae, library(), is_vae=True)


def test_without_the_library_channels_last_convolutions_would_be_copied_and_keep_it(monkeypatch):
    without, unet = library("none"), tiny_unet()
    installed = convolution_library.install_library([unet], without, has_vae=False)
    unet.to(memory_format=torch.channels_last)
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {AS_TORCH_COMES}
    assert any("1 call ran as torch is set, because its convolutions are channels-last" in n for n in installed.notes())
    installed.restore()
    (note,) = convolution_library.install_library([unet], without, has_vae=False).notes()
    assert note.startswith("UNet2DConditionModel is called with the library as torch is set: its convolutions are")
    assert "forward" not in unet.__dict__
    # What is searched is searched in the layout that is there.
    assert library().why_not(unet) is None


def test_on_a_cpu_onednn_stays_on_since_it_is_more_than_convolutions():
    measure("none")
    unet = rocm_sd.optimize(tiny_unet())
    assert "forward" not in unet.__dict__
    (note,) = notes_with(unet, "oneDNN stays on")
    assert FIGURES in note


def test_restore_leaves_no_trace(pipe):
    before = {path: set(module.__dict__) for path, module in pipe.unet.named_modules()}
    stock = draw(pipe)
    measure()
    rocm_sd.optimize(pipe, level="memory")
    draw(pipe)
    rocm_sd.restore(pipe)
    assert {path: set(module.__dict__) for path, module in pipe.unet.named_modules()} == before
    assert "forward" not in pipe.vae.decoder.__dict__
    assert torch.equal(draw(pipe), stock)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_model_of_two_pipelines_is_called_with_it_until_both_are_restored(tmp_path, order, monkeypatch):
    measure()
    pipes = [tiny_pipeline(tmp_path), tiny_pipeline(tmp_path)]
    pipes[1].unet = unet = pipes[0].unet
    for pipe in pipes:
        rocm_sd.optimize(pipe)
    rocm_sd.restore(pipes[order[0]])
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {SEARCHED}
    rocm_sd.restore(pipes[order[1]])
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {AS_TORCH_COMES}
    assert "forward" not in unet.__dict__


def test_a_model_that_another_pipeline_has_captured_runs_as_there(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    pipes = [tiny_pipeline(tmp_path), tiny_pipeline(tmp_path)]
    pipes[1].unet = unet = pipes[0].unet
    rocm_sd.optimize(pipes[0])
    measure()
    rocm_sd.optimize(pipes[1])
    assert notes_with(pipes[1], "UNet2DConditionModel runs as in the pipeline that shares it")
    rocm_sd.restore(pipes[0])
    rocm_sd.restore(pipes[1])
    assert "forward" not in unet.__dict__


@pytest.mark.parametrize("first", ["hook", "optimize"])
def test_a_hook_of_accelerate_before_or_after(first, monkeypatch):
    measure()
    unet = tiny_unet()
    if first == "hook":
        add_hook_to_module(unet, ModelHook())
        rocm_sd.optimize(unet)
    else:
        rocm_sd.optimize(unet)
        add_hook_to_module(unet, ModelHook())
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {SEARCHED}
    rocm_sd.restore(unet)
    with seen_by_convolutions(monkeypatch) as seen:
        call(unet)
    assert set(seen) == {AS_TORCH_COMES}
    remove_hook_from_module(unet)
    assert getattr(unet.__dict__.get("forward"), "__func__", type(unet).forward) is type(unet).forward


def test_copies_and_pickles_run_as_stock(monkeypatch):
    measure()
    unet = rocm_sd.optimize(tiny_unet())
    for other in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        with seen_by_convolutions(monkeypatch) as seen:
            call(other)
        assert set(seen) == {AS_TORCH_COMES}
    again = rocm_sd.optimize(copy.deepcopy(unet))
    with seen_by_convolutions(monkeypatch) as seen:
        call(again)
    assert set(seen) == {SEARCHED}


def test_a_model_with_it_can_be_collected():
    measure()
    unet = rocm_sd.optimize(tiny_unet())
    call(unet)
    gone = weakref.ref(unet)
    del unet
    gc.collect()
    assert gone() is None
