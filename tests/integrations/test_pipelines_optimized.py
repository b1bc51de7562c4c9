"""The pipelines that are optimised from the start: however they are made, and wherever they go."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)

import rocm_sd
from pipelines import CASES, call, exactly, require_as_exact_as_stock, tiny_pipeline
from rocm_sd import ROCmStableDiffusionPipeline, ROCmStableDiffusionXLPipeline
from rocm_sd.engine import levels
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.integrations.diffusers import ROCmOptimizedPipeline
from rocm_sd.integrations.diffusers.keeping import in_force
from rocm_sd.integrations.diffusers.loading import save_single_file
from tiny_models import unet_of

CASE = CASES["sd15"]


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Also on a machine with a GPU, where a pipeline would wait to be moved there."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def folder_of(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)
    CASES[name].build(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of("sd15", tmp_path_factory)


@pytest.fixture(scope="module")
def xl_folder(tmp_path_factory):
    return folder_of("sdxl", tmp_path_factory)


def loaded(folder, **options):
    pipe = ROCmStableDiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(folder):
    return loaded(folder)


def stock_of(folder):
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def forward_of(pipe):
    """The rewritten forward of one block: another object once the pipeline has been optimised anew; None if stock."""
    return pipe.unet.mid_block.resnets[0].__dict__.get("forward")


def require_right(pipe, folder, stored=torch.float32):
    """As exact as stock's, of weights that were once rounded to `stored`."""
    with exactly(torch.float32):
        exact = call(stock_of(folder).to(stored).to(torch.float64), CASE)
    stock = call(stock_of(folder).to(stored).to(torch.float32), CASE)
    require_as_exact_as_stock([call(pipe, CASE)], [exact], [stock], times=2)


def test_a_folder_gives_an_optimized_pipeline(folder):
    pipe = loaded(folder, level="memory", quality="high")
    assert type(pipe) is ROCmStableDiffusionPipeline
    assert isinstance(pipe, StableDiffusionPipeline)
    report = rocm_sd.report(pipe)
    assert (report.level, report.quality) == ("memory", "high")
    assert report.replaced
    assert pipe.report().to_dict() == report.to_dict()
    require_right(pipe, folder)


def test_the_embedded_model_has_a_name():
    pipe = ROCmStableDiffusionPipeline.from_pretrained("emoji-sd")
    assert pipe.report().replaced


@pytest.mark.parametrize("option", ["level", "quality"])
def test_an_unknown_option_is_named_with_the_choices(folder, option):
    with pytest.raises(InvalidOption, match="Use one of: "):
        loaded(folder, **{option: "fast"})


def test_a_checkpoint_of_one_file_works_too(folder, tmp_path):
    stock = stock_of(folder)
    save_single_file(stock, tmp_path / "model.safetensors")
    pipe = ROCmStableDiffusionPipeline.from_single_file(
        str(tmp_path / "model.safetensors"), config=str(folder), local_files_only=True, level="performance"
    )
    assert type(pipe) is ROCmStableDiffusionPipeline
    assert rocm_sd.report(pipe).level == "performance"
    for name, weight in stock.unet.state_dict().items():
        assert torch.equal(pipe.unet.state_dict()[name], weight)


def test_a_model_of_sdxl_gives_the_pipeline_of_sdxl_and_the_other_way_round(folder, xl_folder):
    pipe = loaded(xl_folder)
    assert type(pipe) is ROCmStableDiffusionXLPipeline
    assert pipe.report().replaced
    assert call(pipe, CASES["sdxl"]).isfinite().all()
    assert type(ROCmStableDiffusionXLPipeline.from_pretrained(folder)) is ROCmStableDiffusionPipeline


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refiner", "a StableDiffusionXLImg2ImgPipeline without text_encoder, tokenizer"),
        ("sd3", "a StableDiffusion3Pipeline without unet"),
    ],
)
def test_what_neither_class_can_run_is_refused_with_the_class_to_use(name, message, tmp_path):
    stock = CASES[name].build(tmp_path)
    stock.save_pretrained(tmp_path / "model")
    with pytest.raises(Unsupported, match=message) as refusal:
        loaded(tmp_path / "model")
    assert f"diffusers.{CASES[name].kind}.from_pretrained" in refusal.value.hint
    with pytest.raises(Unsupported, match=message):
        ROCmStableDiffusionPipeline.from_pipe(stock)


def test_a_custom_pipeline_is_refused(folder):
    with pytest.raises(Unsupported, match="custom_pipeline"):
        loaded(folder, custom_pipeline="clip_guided_stable_diffusion")


def test_a_pipeline_made_of_its_parts_is_optimized_by_its_first_picture(folder):
    pipe = ROCmStableDiffusionPipeline(**stock_of(folder).components, requires_safety_checker=False)
    assert in_force(pipe) is None
    require_right(pipe, folder)
    assert rocm_sd.report(pipe).replaced


def test_a_class_of_the_users_own_is_kept(folder):
    class Mine(ROCmStableDiffusionPipeline):
        pass

    assert type(Mine.from_pretrained(folder)) is Mine


class TestFromAnotherPipeline:
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_the_parts_are_shared_and_keep_their_dtype(self, folder, wrapped):
        stock = stock_of(folder).to(torch.bfloat16)
        pipe = ROCmStableDiffusionPipeline.from_pipe(ROCmOptimizedPipeline(stock) if wrapped else stock, level="memory")
        assert pipe.unet is stock.unet
        assert pipe.unet.dtype == torch.bfloat16
        assert rocm_sd.report(pipe).level == "memory"
        assert in_force(stock) is None
        pipe.restore()
        assert forward_of(stock) is None

    def test_one_that_was_optimized_hands_over(self, pipe):
        second = ROCmStableDiffusionPipeline.from_pipe(pipe)
        assert rocm_sd.report(second).replaced
        assert in_force(pipe) is None
        # The parts are optimised already: drawing with the first does not do it once more.
        before = forward_of(pipe)
        call(pipe, CASE)
        assert forward_of(pipe) is before
        second.restore()
        assert forward_of(pipe) is None

    def test_another_dtype_may_be_asked_for(self, folder):
        pipe = ROCmStableDiffusionPipeline.from_pipe(stock_of(folder), dtype=torch.float64)
        assert pipe.unet.dtype == torch.float64

    def test_sdxl_gives_the_pipeline_of_sdxl(self, xl_folder):
        stock = DiffusionPipeline.from_pretrained(xl_folder)
        assert type(ROCmStableDiffusionPipeline.from_pipe(stock)) is ROCmStableDiffusionXLPipeline

    def test_a_wrong_level_leaves_the_given_one_as_it_is(self, pipe):
        with pytest.raises(InvalidOption):
            ROCmStableDiffusionPipeline.from_pipe(pipe, level="fast")
        assert rocm_sd.report(pipe).replaced

    def test_diffusers_makes_its_own_pipelines_of_it(self, pipe):
        other = AutoPipelineForImage2Image.from_pipe(pipe, dtype=pipe.dtype)
        assert type(other) is StableDiffusionImg2ImgPipeline
        assert other.unet is pipe.unet


def test_what_is_saved_is_a_stock_model(pipe, folder, tmp_path):
    call(pipe, CASE)
    pipe.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(again) is StableDiffusionPipeline
    before = stock_of(folder).unet.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in again.unet.state_dict().items())


class TestWhereItGoes:
    def test_a_move_to_where_it_is_changes_nothing(self, pipe):
        before = forward_of(pipe)
        assert pipe.to("cpu") is pipe
        assert forward_of(pipe) is before

    def test_it_is_optimized_for_the_place_where_it_is_moved_to(self, folder):
        pipe = loaded(folder, level="memory")
        before = forward_of(pipe)
        pipe.to(torch.float64)
        assert forward_of(pipe) is not before
        assert rocm_sd.report(pipe).level == "memory"
        assert call(pipe, CASE).dtype == torch.float64

    def test_options_of_a_later_optimize_count(self, pipe):
        rocm_sd.optimize(pipe, level="memory")
        pipe.to(torch.float64)
        assert rocm_sd.report(pipe).level == "memory"

    @pytest.mark.parametrize("by", ["method", "function"])
    def test_once_restored_it_stays_stock(self, pipe, folder, by):
        pipe.restore() if by == "method" else rocm_sd.restore(pipe)
        assert torch.equal(call(pipe, CASE), call(stock_of(folder), CASE))
        pipe.to(torch.float64)
        call(pipe, CASE)
        assert forward_of(pipe) is None
        with pytest.raises(Unsupported, match="not optimised"):
            pipe.report()
        rocm_sd.optimize(pipe)
        assert pipe.report().replaced

    def test_with_a_gpu_in_the_machine_it_waits_to_be_moved_or_used(self, folder, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            pipe = loaded(folder, level="memory")
            assert in_force(pipe) is None
            report = pipe.report()
        assert report.level == "memory"
        assert forward_of(pipe)

    def test_what_the_user_optimizes_meanwhile_is_not_done_again(self, folder, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            pipe = loaded(folder)
        rocm_sd.optimize(pipe, level="memory")
        before = forward_of(pipe)
        call(pipe, CASE)
        assert forward_of(pipe) is before
        assert rocm_sd.report(pipe).level == "memory"

    def test_another_part_is_optimized_before_the_next_picture(self, pipe):
        first = pipe.unet
        torch.manual_seed(1)
        pipe.unet = unet_of("sd15")
        call(pipe, CASE)
        assert forward_of(pipe)
        assert "forward" not in first.mid_block.resnets[0].__dict__

    def test_offloading_that_comes_later_is_seen_and_kept(self, pipe, folder):
        pipe.enable_model_cpu_offload(device="cpu")
        require_right(pipe, folder)
        assert any("model offload that was found is kept" in note for note in pipe.report().notes)
        # After each picture Diffusers offloads anew, which is no reason to begin again.
        before = pipe.unet.mid_block.resnets[0].__dict__["forward"]
        call(pipe, CASE)
        assert pipe.unet.mid_block.resnets[0].__dict__["forward"] is before

    def test_an_offload_of_the_engines_own_is_taken_off_before_a_move(self, folder, monkeypatch):
        """As on a GPU that is too small: the offload would otherwise bring the parts back to where they were."""
        decide = levels.decide
        monkeypatch.setattr(levels, "decide", lambda *given: replace(decide(*given), offload=True))
        pipe = loaded(folder, level="memory")
        assert pipe._all_hooks
        before = forward_of(pipe) or pipe.unet.mid_block.resnets[0].forward
        require_right(pipe, folder)
        call(pipe, CASE)
        assert (forward_of(pipe) or pipe.unet.mid_block.resnets[0].forward) is before
        taken_off = []
        remove = pipe.remove_all_hooks
        monkeypatch.setattr(pipe, "remove_all_hooks", lambda: (taken_off.append(pipe.unet.dtype), remove())[1])
        pipe.to(torch.float64)
        assert taken_off[0] == torch.float32
        assert pipe._all_hooks
        assert call(pipe, CASE).dtype == torch.float64
        pipe.restore()
        assert not getattr(pipe, "_all_hooks", None)
        assert levels.placement(pipe).by is None


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["performance", "memory"])
def test_on_a_gpu_it_is_optimized_for_the_gpu(folder, level):
    pipe = loaded(folder, level=level, dtype=torch.float16)
    assert in_force(pipe) is None
    pipe.to("cuda")
    assert rocm_sd.report(pipe).arch != "cpu"
    assert (levels.placement(pipe).by == "model offload") == (level == "memory")
    before = forward_of(pipe)
    for _ in range(2):
        assert call(pipe, CASE).isfinite().all()
    pipe.to("cuda")
    if level == "performance":
        assert forward_of(pipe) is before
    pipe.to("cpu", torch.float32)
    assert in_force(pipe) is None
    assert {part.device.type for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {"cpu"}
    require_right(pipe, folder, torch.float16)


def test_a_copy_draws_the_same_picture(pipe):
    wanted = call(pipe, CASE)
    twin = copy.deepcopy(pipe)
    # A copy has no graphs, whose bits may be others.
    torch.testing.assert_close(call(twin, CASE), wanted, rtol=1e-3, atol=1e-3)
    assert twin.unet is not pipe.unet


def test_signatures_and_names_are_stocks(pipe, tmp_path):
    """Diffusers finds a pipeline's parts by the signature, and its relatives by the name."""
    assert pipe.components.keys() == tiny_pipeline(tmp_path).components.keys()
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert "ROCmStableDiffusionPipeline" in repr(type(pipe))
