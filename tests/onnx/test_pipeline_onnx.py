"""ROCmOnnxPipeline: what it runs, with which provider, and what it says of folders that it cannot run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx_folders
from onnx import TensorProto
from rocm_sd.arch import FoundGpu, Vendor
from rocm_sd.errors import CorruptModel, DeviceUnavailable, InvalidOption, MissingDependency, ModelNotFound, Unsupported
from rocm_sd.onnx import ROCmOnnxPipeline, layout, providers, sessions
from rocm_sd.onnx.providers import Provider
from rocm_sd.onnx.sessions import Session

CPU = Provider("cpu", {})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return onnx_folders.made_by_hand(tmp_path_factory.mktemp("made") / "export", tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "export")


def draw(pipe, prompt="a frog", seed=0, **options):
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "output_type": "pt", "height": 16, "width": 24} | options
    return pipe(prompt, generator=torch.Generator().manual_seed(seed), **given).images


def test_it_calls_and_behaves_as_diffusers_pipeline_does(made):
    import diffusers

    pipe = ROCmOnnxPipeline.from_pretrained(str(made))
    assert isinstance(pipe.pipe, diffusers.StableDiffusionPipeline)
    assert pipe.provider.name == "cpu"
    first = draw(pipe)
    assert first.shape == (1, 3, 16, 24)
    assert torch.equal(draw(pipe), first)
    assert not torch.equal(draw(pipe, seed=1), first)
    assert not torch.equal(draw(pipe, "a dog"), first)
    steps = []
    draw(pipe, callback_on_step_end=lambda _pipe, step, _time, given: steps.append(step) or given)
    assert steps == [0, 1, 2]
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    assert not torch.equal(draw(pipe), first)
    assert draw(pipe, num_images_per_prompt=3).shape[0] == 3


@pytest.mark.parametrize("timestep", [(TensorProto.INT64, None), (TensorProto.INT64, 1), (TensorProto.FLOAT, "batch")])
def test_folders_of_other_exporters_run_without_a_manifest(made, folder, timestep):
    (folder / layout.MANIFEST).unlink()
    onnx_folders.unet(folder, timestep=timestep)
    assert torch.equal(draw(ROCmOnnxPipeline.from_pretrained(folder)), draw(ROCmOnnxPipeline.from_pretrained(made)))


def test_a_folder_that_is_no_export_is_named_with_what_to_type(tmp_path, folder):
    with pytest.raises(ModelNotFound, match=r"no folder .*missing.*rocm-sd onnx export"):
        ROCmOnnxPipeline.from_pretrained(tmp_path / "missing")
    with pytest.raises(ModelNotFound, match=r"has no model_index\.json.*rocm-sd onnx export"):
        ROCmOnnxPipeline.from_pretrained(tmp_path)
    (folder / layout.MANIFEST).unlink()
    shutil.rmtree(folder / "unet")
    with pytest.raises(ModelNotFound, match=r"has no unet/model\.onnx"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_an_export_that_was_interrupted_says_how_to_finish_it(folder):
    manifest = layout.Manifest.load(folder)
    shutil.rmtree(folder / "unet")
    layout.Manifest(manifest.source, manifest.pipeline, {}, tuple(p for p in manifest.parts if p.name != "unet")).save(
        folder
    )
    with pytest.raises(ModelNotFound, match=r"unet/model\.onnx is missing.*rocm-sd onnx export by-hand"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_the_manifest_decides_which_parts_there_are(folder):
    """A folder that it does not list is of another export, or of one that was not finished."""
    shutil.copytree(folder / "unet", folder / "safety_checker")
    assert ROCmOnnxPipeline.from_pretrained(folder).safety_checker is None
    manifest = layout.Manifest.load(folder)
    replace(manifest, parts=tuple(p for p in manifest.parts if p.name != "unet")).save(folder)
    with pytest.raises(ModelNotFound, match=r"unet/model\.onnx is missing"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_a_safety_checker_that_was_not_exported_yet_is_missed(folder):
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match=r"safety_checker/model\.onnx is missing.*rocm-sd onnx export by-hand"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_truncated_or_missing_weights_are_seen_before_they_are_read(folder):
    data = folder / "unet" / layout.DATA
    raw = data.read_bytes()
    data.write_bytes(raw[:-1])
    with pytest.raises(CorruptModel, match=rf"model\.onnx\.data has {len(raw) - 1} bytes, and should have {len(raw)}"):
        ROCmOnnxPipeline.from_pretrained(folder)
    data.unlink()
    with pytest.raises(CorruptModel, match=r"model\.onnx\.data is missing"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_weights_that_were_changed_are_seen_where_digests_are_compared(folder):
    data = folder / "unet" / layout.DATA
    raw = bytearray(data.read_bytes())
    raw[0] ^= 1
    data.write_bytes(raw)
    ROCmOnnxPipeline.from_pretrained(folder)
    with pytest.raises(CorruptModel, match="its digest is another"):
        ROCmOnnxPipeline.from_pretrained(folder, verify=True)


def test_a_model_that_is_no_onnx_is_named(folder):
    (folder / layout.MANIFEST).unlink()
    (folder / "unet" / layout.MODEL).write_bytes(b"no protocol buffer")
    with pytest.raises(CorruptModel, match=r"unet/model\.onnx cannot be loaded.*Export the model again"):
        ROCmOnnxPipeline.from_pretrained(folder)


@pytest.mark.parametrize("left", [10, None])
def test_weights_that_are_missing_or_cut_off_are_named_without_a_manifest_too(folder, left):
    (folder / layout.MANIFEST).unlink()
    data = folder / "text_encoder" / layout.DATA
    data.unlink() if left is None else data.write_bytes(data.read_bytes()[:left])
    with pytest.raises(CorruptModel, match=r"weights beside .*text_encoder/model\.onnx are missing or cut off"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_operators_of_an_unknown_opset_are_said_to_need_a_newer_runtime(folder):
    (folder / layout.MANIFEST).unlink()
    onnx_folders.unet(folder, opset=9999)
    with pytest.raises(Unsupported, match=r"opset 9999, which .*unet/model\.onnx has.*newer onnxruntime"):
        ROCmOnnxPipeline.from_pretrained(folder)


@pytest.mark.parametrize("change", ["{", '{"format": "rocm-sd-onnx/1"}', '{"format": "rocm-sd-onnx/2"}'])
def test_a_manifest_that_cannot_be_read_is_named(folder, change):
    (folder / layout.MANIFEST).write_text(change)
    with pytest.raises(CorruptModel, match=rf"{layout.MANIFEST} cannot be read"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_a_manifest_cannot_lead_out_of_its_folder(folder):
    told = json.loads((folder / layout.MANIFEST).read_text())
    told["parts"][0]["files"][0]["name"] = "../../secret"
    (folder / layout.MANIFEST).write_text(json.dumps(told))
    with pytest.raises(CorruptModel, match="which is not of the form"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_a_model_of_another_kind_is_refused(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    with pytest.raises(Unsupported, match="FluxPipeline"):
        ROCmOnnxPipeline.from_pretrained(folder)
    index["scheduler"] = ["os", "system"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(Unsupported, match=r"os\.system"):
        ROCmOnnxPipeline.from_pretrained(folder)


def test_providers_are_known_by_name_and_never_fall_back(made, monkeypatch):
    with pytest.raises(InvalidOption, match="auto, cpu, migraphx, rocm, cuda, tensorrt"):
        ROCmOnnxPipeline.from_pretrained(made, "vulkan")
    monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda: ["CPUExecutionProvider"])
    for name, cure in (("migraphx", "onnxruntime-migraphx"), ("rocm", "up to 1.22"), ("cuda", "onnxruntime-gpu")):
        with pytest.raises(DeviceUnavailable, match=f"has no provider {name}; it has cpu.*{cure}"):
            ROCmOnnxPipeline.from_pretrained(made, name)
    for option in ("graphs", "tuning"):
        with pytest.raises(InvalidOption, match=f"{option} 'on'"):
            ROCmOnnxPipeline.from_pretrained(made, "cpu", **{option: True})


def test_auto_takes_the_first_that_works_and_by_name_says_that_it_does_not(made, monkeypatch):
    """A build for CUDA on a machine without a card: it has the provider and cannot use it."""
    there = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda: there)
    assert ROCmOnnxPipeline.from_pretrained(made, graphs=True).provider.name == "cpu"
    with pytest.raises(DeviceUnavailable):
        ROCmOnnxPipeline.from_pretrained(made, "cuda")


def fused_for(folder, provider):
    optimized = {"provider": provider, "float16": False, "parts": []}
    replace(layout.Manifest.load(folder), optimized=optimized).save(folder)
    return folder


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_a_model_fused_for_another_provider_says_how_to_fuse_it_for_this_one(folder, asked):
    fused_for(folder, "rocm")
    with pytest.raises(Unsupported, match=r"fused for rocm.*rocm-sd onnx optimize EXPORT .* --provider cpu"):
        ROCmOnnxPipeline.from_pretrained(folder, asked)
    fused_for(folder, "vulkan")
    with pytest.raises(CorruptModel, match="fused for vulkan"):
        ROCmOnnxPipeline.from_pretrained(folder, asked)


def test_auto_passes_a_provider_over_that_cannot_run_what_was_fused_and_says_so(folder, monkeypatch, caplog):
    there = ["MIGraphXExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda: there)
    with caplog.at_level("WARNING", "rocm_sd"):
        assert ROCmOnnxPipeline.from_pretrained(fused_for(folder, "cpu")).provider.name == "cpu"
    assert "--provider migraphx" in caplog.text
    with pytest.raises(Unsupported, match="Run the plain export"):
        ROCmOnnxPipeline.from_pretrained(folder, "tensorrt")


def test_auto_leaves_out_what_a_provider_cannot_do_and_says_so(made, monkeypatch, caplog):
    """MIGraphX captures no graphs: asked for by name that is an error, by auto it is still the best provider."""
    tried = []

    def opened(_file, provider, _threads):
        tried.append((provider.name, provider.graphs))
        if provider.is_gpu:
            raise DeviceUnavailable("There is no card.")
        return opened_here(_file, provider, _threads)

    opened_here = sessions._opened
    monkeypatch.setattr(sessions, "_opened", opened)
    there = ["MIGraphXExecutionProvider", "ROCMExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda: there)
    with caplog.at_level("WARNING", "rocm_sd"):
        ROCmOnnxPipeline.from_pretrained(made, graphs=True, tuning=True)
    assert list(dict.fromkeys(tried)) == [("migraphx", False), ("rocm", True), ("cpu", False)]
    assert "graphs has no effect: the provider cpu has none." in caplog.text
    assert "tuning has no effect" in caplog.text


def test_options_of_each_provider_have_the_names_of_its_version(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda: list(providers.PROVIDERS.values()))
    assert providers.named("cuda", graphs=True).options == {"enable_cuda_graph": "1"}
    # Its attention raises without tunable ops; tuning them is another option.
    assert providers.named("rocm").options == {"tunable_op_enable": "1"}
    tuned = {"tunable_op_enable": "1", "tunable_op_tuning_enable": "1"}
    assert providers.named("rocm", graphs=True, tuning=True).options == {"enable_hip_graph": "1", **tuned}
    monkeypatch.setattr(providers.runtime(), "__version__", "1.23.0")
    # Nothing of float16: it would round whole models, and with them the parts that are float32 with a reason.
    compiled = providers.named("migraphx").options
    assert compiled == {"migraphx_model_cache_dir": str(providers.cache_folder("migraphx"))}
    kept = providers.cache_folder("migraphx")
    assert kept.is_dir()
    monkeypatch.setattr(providers.runtime(), "__version__", "1.24.0")
    assert providers.cache_folder("migraphx") != kept
    monkeypatch.setattr(providers.runtime(), "__version__", "1.22.0")
    assert providers.named("migraphx").options == {}
    built = {"trt_engine_cache_enable", "trt_engine_cache_path", "trt_timing_cache_enable", "trt_timing_cache_path"}
    assert set(providers.named("tensorrt").options) == built


def test_it_computes_on_the_card_where_torchs_tensors_are(monkeypatch):
    monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda: list(providers.PROVIDERS.values()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = providers.named("cuda")
    assert (found.device, found.options) == (torch.device("cuda:1"), {"device_id": "1"})
    assert providers.named("rocm").options["device_id"] == "1"
    assert "device_id" not in providers.named("cpu").options
    # Which is chosen once: a session and its tensors stay together.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert found.device == torch.device("cuda:1")


def test_without_a_gpu_torch_what_was_compiled_is_kept_by_the_drivers_cards_and_rocm(monkeypatch, tmp_path):
    """Each of these is another folder: another card, a second card, another version of ROCm."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(providers, "_ROCM_VERSION", tmp_path / "version")
    seen = []
    for version, cards in (("7.0.0", ["gfx1100"]), ("7.0.0", ["gfx942"]), ("7.0.0", []), ("7.1.0", ["gfx1100"])):
        (tmp_path / "version").write_text(version)
        gpus = tuple(FoundGpu(Vendor.AMD, None, None, arch_name=card, node=1) for card in cards)
        monkeypatch.setattr(providers.arch, "find_gpus", lambda gpus=gpus: gpus)
        seen.append(providers.cache_folder("migraphx"))
    assert len(set(seen)) == 4
    assert [folder.parent.name for folder in seen] == ["gfx1100", "gfx942", "unknown", "gfx1100"]


def test_without_onnxruntime_it_says_what_to_install(made, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingDependency, match=r"pip install 'rocm-sd\[onnx\]'"):
        ROCmOnnxPipeline.from_pretrained(made)


def inputs_of(seed, batch=2, height=4):
    random = torch.Generator().manual_seed(seed)
    sample = torch.randn(batch, 4, height, 6, generator=random)
    return {"sample": sample, "timestep": torch.tensor(seed), "encoder_hidden_states": torch.randn(batch, 5, 32)}


@pytest.mark.parametrize("graphs", [False, True])
def test_bound_calls_and_replayed_ones_give_what_plain_ones_give(made, graphs):
    """As on a GPU, with buffers of the host: a graph's inputs are copied in, and its outputs are the caller's own."""
    plain = Session(made / "unet" / layout.MODEL, CPU)
    bound = Session(made / "unet" / layout.MODEL, Provider("cpu", {}, graphs=graphs), bound=True)
    calls = [inputs_of(seed, *size) for size in ((2, 4), (1, 8)) for seed in range(4)]
    found = [bound(given, ["out_sample"])["out_sample"] for given in calls]
    for given, one in zip(calls, found, strict=True):
        torch.testing.assert_close(one, plain(given, ["out_sample"])["out_sample"])
    assert len(bound._sizes) == (2 if graphs else 0)


@pytest.mark.parametrize("size", [None, 1, "batch"])
def test_timesteps_of_a_batch_are_never_cut_to_the_first(folder, size):
    onnx_folders.unet(folder, timestep=(TensorProto.FLOAT, size))
    session = Session(folder / "unet" / layout.MODEL, CPU)
    alike, apart = ({**inputs_of(7), "timestep": torch.tensor(times)} for times in ([7, 7], [7, 8]))
    text = {"encoder_hidden_states": alike["encoder_hidden_states"]}
    one = session({**inputs_of(7), **text}, ["out_sample"])["out_sample"]
    assert torch.equal(session(alike, ["out_sample"])["out_sample"], one)
    if size == "batch":
        session(apart, ["out_sample"])
    else:
        with pytest.raises(Unsupported, match="a timestep for each picture"):
            session(apart, ["out_sample"])


def test_what_an_export_cannot_do_is_said(made):
    pipe = ROCmOnnxPipeline.from_pretrained(made)
    with pytest.raises(Unsupported, match="cross_attention_kwargs"):
        draw(pipe, cross_attention_kwargs={"scale": 0.5})
    with pytest.raises(Unsupported, match="hidden states"):
        draw(pipe, clip_skip=1)
    with pytest.raises(ModelNotFound, match="no vae_encoder"):
        draw(pipe, image=torch.rand(1, 3, 16, 16), strength=0.5, height=None, width=None)
    with pytest.raises(Unsupported, match="a call without sample"):
        pipe.unet.session({"timestep": torch.tensor(1)}, ["out_sample"])


def test_a_part_is_seen_as_diffusers_sees_a_model(made):
    pipe = ROCmOnnxPipeline.from_pretrained(made)
    assert pipe.device == torch.device("cpu")
    assert pipe.unet.dtype == torch.float32
    assert pipe.unet.config.sample_size == 8
    assert pipe.vae_scale_factor == 2
    assert pipe.unet.to("meta").device == torch.device("cpu")
    given = inputs_of(0)
    kept, alone = pipe.unet(*given.values()), pipe.unet(*given.values(), return_dict=False)
    assert torch.equal(kept.sample, alone[0])
