"""A folder is optimized whole or not at all, and its manifest says what was done."""

from __future__ import annotations

import errno
import json
import re
import shutil
from dataclasses import asdict

import onnx_ir as ir
import pytest
import torch
from fused_parts import exported, file_outputs, torch_outputs, torch_part

import onnx
from rocm_sd import numerics
from rocm_sd.cli.onnx_optimize import optimize
from rocm_sd.errors import CorruptModel, ModelNotFound, NoDiskSpace, NumericsFailure, RocmSdError, Unsupported
from rocm_sd.onnx import comparing, layout, optimize_pipeline
from rocm_sd.onnx.fusions import attention, constant_shapes
from rocm_sd.onnx.fusions.sites import sites_of
from rocm_sd.onnx.optimizing import optimize_folder

_PARTS = ("text_encoder", "vae_decoder")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "plain"
    (folder / "scheduler").mkdir(parents=True)
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    parts = []
    for name in _PARTS:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(torch_part(name)[3]))
        ir.save(exported(name), folder / name / layout.MODEL, external_data=layout.DATA)
        parts.append(layout.described(name, folder / name))
    layout.Manifest("tiny", "StableDiffusionPipeline", {"torch": "0"}, tuple(parts)).save(folder)
    return folder


@pytest.fixture
def plain(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "plain")


def _left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("float16", [False, True])
def test_a_folder_is_optimized_and_said_to_be(plain, tmp_path, float16):
    out = tmp_path / "fused"
    seen = []
    result = optimize_folder(plain, out, float16=float16, provider="cpu", progress=lambda *each: seen.append(each))
    told = [(n, 2, name + what) for n, name in enumerate(_PARTS) for what in ("", ": compared with the export")]
    assert seen == [*told, (2, 2, "done")]
    assert {part.unchecked for part in result.parts} == {""}
    manifest = layout.require_export(out)
    layout.require_digests(out, manifest)
    assert manifest.optimized == json.loads(json.dumps(asdict(result)))
    assert {part.name: part.dtype for part in manifest.parts} == dict.fromkeys(
        _PARTS, "float16" if float16 else "float32"
    )
    assert (out / "scheduler" / "scheduler_config.json").is_file()
    assert _left(tmp_path) == ["fused", "plain"]
    for name in _PARTS:
        dtype = torch.float16 if float16 else torch.float32
        actual = file_outputs(out / name / layout.MODEL, torch_part(name)[1])
        for ours, true, theirs in zip(
            actual, torch_outputs(name, torch.float64), torch_outputs(name, dtype), strict=True
        ):
            numerics.require(name, ours, true, theirs)


def test_found_and_sites_are_equal_or_the_difference_is_explained(plain, tmp_path):
    result = optimize_folder(plain, tmp_path / "fused", provider="cpu")
    for part in result.parts:
        sites = sites_of(part.name, torch_part(part.name)[3])
        assert {each.name: each.sites for each in part.fusions} == sites
        found = {each.name: each.found for each in part.fusions}
        assert found == {name: 0 if name == "NhwcConv" else count for name, count in sites.items()}
        assert {each.name for each in part.fusions if each.reason} == {"NhwcConv"} & set(sites)
    assert all(sites_of(name, torch_part(name)[3])["Attention"] for name in _PARTS)


def test_sites_that_are_missed_are_counted_with_a_reason(plain, tmp_path, monkeypatch):
    fused, missed = attention._site, []

    def all_but_the_first(node):
        site = fused(node)
        if site is not None and not missed:
            missed.append(site)
            return None
        return site

    monkeypatch.setattr(attention, "_site", all_but_the_first)
    result = optimize_folder(plain, tmp_path / "fused", provider="cpu")
    (row,) = (each for each in result.parts[0].fusions if each.name == "Attention")
    assert (row.found, row.sites) == (2, 3)
    assert row.reason == "1 in a form that no rule knows"


@pytest.mark.parametrize("force_upcast", [True, False, None])
@pytest.mark.parametrize("is_sdxl", [True, False])
def test_a_vae_that_overflows_stays_in_float32(plain, tmp_path, force_upcast, is_sdxl):
    """As Diffusers has it: by default, and of SDXL alone."""
    config = plain / "vae_decoder" / "config.json"
    told = {name: value for name, value in json.loads(config.read_text()).items() if name != "force_upcast"}
    config.write_text(json.dumps(told | ({} if force_upcast is None else {"force_upcast": force_upcast})))
    if is_sdxl:
        shutil.copytree(plain / "text_encoder", plain / "text_encoder_2")
        (plain / layout.MANIFEST).unlink()
        shutil.copytree(plain / "text_encoder", plain / "unet")
        index = {"_class_name": "StableDiffusionXLPipeline", "text_encoder_2": ["transformers", "CLIPTextModel"]}
        (plain / "model_index.json").write_text(json.dumps(index))
        (plain / "unet" / "config.json").unlink()
    result = optimize_folder(plain, tmp_path / "fused", float16=True, provider="cpu")
    by_name = {part.name: part for part in result.parts}
    wide = is_sdxl and force_upcast is not False
    assert (by_name["text_encoder"].float16, by_name["vae_decoder"].float16) == (True, not wide)
    assert ("force_upcast" in by_name["vae_decoder"].note) == wide


def test_a_fusion_that_computes_something_else_is_not_kept(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "_exact_scale", lambda scale, _head: 1.1 * scale)
    with pytest.raises(NumericsFailure, match="of the fused text_encoder is not the export's"):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")
    assert _left(tmp_path) == ["plain"]


def test_a_graph_that_is_no_model_is_not_kept(plain, tmp_path, monkeypatch):
    def without_outputs(editor):
        editor.graph.outputs.clear()
        editor.graph[0].op_type = "Nothing"

    monkeypatch.setattr(constant_shapes, "fuse", without_outputs)
    with pytest.raises(RocmSdError, match="The fused text_encoder is no model"):
        optimize_folder(plain, tmp_path / "fused", provider="cuda")
    assert _left(tmp_path) == ["plain"]


def test_what_is_not_compared_says_why(plain, tmp_path, monkeypatch):
    def said(folder, provider):
        return {part.unchecked for part in optimize_folder(plain, tmp_path / folder, provider=provider).parts}

    assert said("cards", "rocm") == {"a CPU has no kernels of rocm"}
    assert said("compiled", "migraphx") == {""}
    monkeypatch.setattr(comparing.host_memory, "free", lambda: 2**10)
    assert said("large", "cpu") == {"it takes 0.0 GiB of memory, and 0.0 are free"}
    monkeypatch.setattr(comparing.host_memory, "free", lambda: None)
    assert said("untold", "cpu") == {""}


def test_what_is_no_export_is_refused(tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelNotFound) as caught:
            optimize_folder(folder, tmp_path / "out")
        assert caught.value.hint
    assert _left(tmp_path) == []


@pytest.mark.parametrize(
    ("listed", "missing"),
    [
        ({"unet": ["diffusers", "UNet2DConditionModel"]}, "unet"),
        ({"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}, "safety_checker"),
        ({"vae": ["diffusers", "AutoencoderKL"]}, "vae_encoder"),
    ],
)
def test_an_export_that_was_interrupted_is_finished_first(plain, tmp_path, listed, missing):
    index = {"_class_name": "StableDiffusionPipeline", "text_encoder": ["transformers", "CLIPTextModel"], **listed}
    (plain / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match=rf"{missing}/model\.onnx is missing.*rocm-sd onnx export tiny"):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")
    assert _left(tmp_path) == ["plain"]


def test_an_export_that_is_there_stays_unless_it_may_go(plain, tmp_path):
    out = tmp_path / "fused"
    optimize_folder(plain, out, provider="cpu")
    (out / "mine").write_text("kept")
    with pytest.raises(RocmSdError, match="is there already") as caught:
        optimize_folder(plain, out, provider="cpu")
    assert "--overwrite" in caught.value.hint
    assert (out / "mine").read_text() == "kept"
    optimize_folder(plain, out, provider="cpu", overwrite=True)
    assert not (out / "mine").exists()
    assert _left(tmp_path) == ["fused", "plain"]


@pytest.mark.parametrize("name", ["thesis.txt", "model_index.json", "unet/diffusion_pytorch_model.safetensors"])
def test_a_folder_that_is_no_export_is_never_replaced(plain, tmp_path, name):
    file = tmp_path / "documents" / name
    file.parent.mkdir(parents=True)
    file.write_text("years of work")
    with pytest.raises(RocmSdError, match="no export of rocm-sd, and is not replaced"):
        optimize_folder(plain, tmp_path / "documents", provider="cpu", overwrite=True)
    assert file.read_text() == "years of work"
    assert _left(tmp_path) == ["documents", "plain"]


def test_a_link_to_the_folder_stays(plain, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "fused").symlink_to("disk")
    for overwrite in (False, True):
        optimize_folder(plain, tmp_path / "fused", provider="cpu", overwrite=overwrite)
        assert (tmp_path / "fused").is_symlink()
        assert (tmp_path / "disk" / layout.MANIFEST).is_file()
    assert _left(tmp_path) == ["disk", "fused", "plain"]


def test_the_result_lies_beside_its_source(plain):
    for out in (plain, plain / "fused", plain.parent):
        with pytest.raises(RocmSdError, match="within one another"):
            optimize_folder(plain, out, provider="cpu", overwrite=True)


def test_what_is_optimized_is_not_optimized_again(plain, tmp_path):
    optimize_folder(plain, tmp_path / "once", provider="cpu")
    with pytest.raises(RocmSdError, match="optimized already"):
        optimize_folder(tmp_path / "once", tmp_path / "twice", provider="cpu")


@pytest.mark.parametrize("with_manifest", [True, False])
def test_weights_that_are_cut_off_are_seen(plain, tmp_path, with_manifest):
    data = plain / "text_encoder" / layout.DATA
    data.write_bytes(data.read_bytes()[:-1000])
    if not with_manifest:
        (plain / layout.MANIFEST).unlink()
        shutil.copytree(plain / "text_encoder", plain / "unet")
    with pytest.raises(CorruptModel, match=r"model\.onnx\.data has \d+ bytes"):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")
    assert _left(tmp_path) == ["plain"]


def test_an_opset_that_no_rule_knows_is_refused(plain, tmp_path):
    file = plain / "text_encoder" / layout.MODEL
    model = onnx.load(file, load_external_data=False)
    model.opset_import[0].version = 13
    (plain / layout.MANIFEST).unlink()
    shutil.copytree(plain / "text_encoder", plain / "unet")
    onnx.save(model, file)
    with pytest.raises(Unsupported, match="opset 13"):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")
    file.write_bytes(b"no model")
    with pytest.raises(CorruptModel, match="no ONNX model"):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")
    assert _left(tmp_path) == ["plain"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_nothing_half_written_is_left(plain, tmp_path, monkeypatch, error):
    def fails(*_args, **_options):
        raise error

    monkeypatch.setattr(ir, "save", fails)
    expected = NoDiskSpace if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")
    assert _left(tmp_path) == ["plain"]


def test_a_disk_without_room_is_seen_before_anything_is_written(plain, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(NoDiskSpace, match="needed"):
        optimize_folder(plain, tmp_path / "fused", provider="cpu")


def test_the_founding_form_has_the_same_result_and_the_same_codes(plain, tmp_path, capsys):
    given = ["-i", str(plain), "-o", str(tmp_path / "fused"), "--float16", "-e", "--provider", "cpu"]
    assert optimize_pipeline.main(given) == 0
    printed = capsys.readouterr().out
    of_the_verb = optimize_folder(plain, tmp_path / "other", float16=True, provider="cpu")
    assert layout.Manifest.load(tmp_path / "fused").optimized == json.loads(json.dumps(asdict(of_the_verb)))
    for part in of_the_verb.parts:
        for row in part.fusions:
            assert re.search(rf"\b{row.name} +│ +{row.found} +│ +{row.sites} ", printed)
    assert optimize_pipeline.main(given) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert optimize_pipeline.main([*given, "--overwrite", "--provider", "tpu"]) == 2


def test_the_verb_prints_the_table_or_json(plain, tmp_path, capsys):
    optimize(plain, tmp_path / "fused", provider="cpu")
    printed = capsys.readouterr().out
    assert "SkipLayerNorm" in printed
    assert f"wrote {tmp_path / 'fused'}" in printed
    optimize(plain, tmp_path / "other", provider="cpu", as_json=True)
    assert json.loads(capsys.readouterr().out)["provider"] == "cpu"
